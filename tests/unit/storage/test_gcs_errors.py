"""What the GCS store makes of refusals, of silence, and of settings that cannot work."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from crc32c import crc32c

from tests.support.gcs_wire import MEDIA, answering, document, gcs_settings, refusal, refusing, store_of
from tests.support.raw_http import NOBODY, Exchange, serving
from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    ConfigError,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StoreFull,
)
from tieringd.storage.base import IfAbsent, IfVersion
from tieringd.storage.gcs.store import GcsStore
from tieringd.storage.store_settings import GcsSettings


@pytest.mark.parametrize(
    ("status", "reason", "message", "error"),
    [
        pytest.param("412 Precondition Failed", "conditionNotMet", "", PreconditionFailed, id="lost"),
        pytest.param("304 Not Modified", "", "", PreconditionFailed, id="not-modified"),
        pytest.param("404 Not Found", "notFound", "", BucketNotFound, id="missing-bucket"),
        pytest.param("401 Unauthorized", "required", "Login Required", StorageDenied, id="no-token"),
        pytest.param("403 Forbidden", "forbidden", "no right", StorageDenied, id="policy"),
        pytest.param("403 Forbidden", "", "", StorageDenied, id="no-reason"),
        pytest.param("413 Content Too Large", "", "", StorageError, id="too-large"),
        pytest.param("507 Insufficient Storage", "", "", StoreFull, id="full"),
        pytest.param("501 Not Implemented", "", "", StorageError, id="no-such-service"),
        pytest.param("302 Found", "", "", StorageError, id="elsewhere"),
        pytest.param("400 Bad Request", "invalid", "bad name", StorageError, id="other"),
        pytest.param(
            "400 Bad Request",
            "invalid",
            'Provided CRC32C "AA" doesn\'t match calculated CRC32C "BB".',
            ChecksumRejected,
            id="checksum",
        ),
    ],
)
async def test_final_answers_have_classes_of_their_own(status, reason, message, error):
    """A final answer of the store has a class of its own, with the key."""
    async with store_of(refusing(status, reason, message)) as store:
        with pytest.raises(StorageError) as caught:
            await store.put("dir/key", b"content", crc32c=0, condition=IfVersion("7"))
    assert type(caught.value) is error
    assert caught.value.key == "dir/key"
    assert "dir/key" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "reason", "outcome_unknown"),
    [
        pytest.param("429 Too Many Requests", "rateLimitExceeded", False, id="throttled"),
        pytest.param("403 Forbidden", "userRateLimitExceeded", False, id="quota"),
        pytest.param("408 Request Timeout", "uploadBrokenConnection", False, id="body-too-slow"),
        pytest.param("409 Conflict", "conflict", True, id="conflict"),
        pytest.param("500 Internal Server Error", "backendError", True, id="internal"),
        pytest.param("502 Bad Gateway", "", True, id="gateway"),
        pytest.param("503 Service Unavailable", "backendError", True, id="unavailable"),
        pytest.param("504 Gateway Timeout", "", True, id="gateway-timeout"),
    ],
)
async def test_trouble_of_the_server_is_worth_another_try(status, reason, outcome_unknown):
    """Failures of the server are StorageUnavailable; those after which it may have stored say so."""
    async with store_of(refusing(status, reason, Retry_After="7")) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", b"content", crc32c=0, condition=IfAbsent())
        assert caught.value.outcome_unknown is outcome_unknown
        assert caught.value.retry_after_seconds == 7
        with pytest.raises(StorageUnavailable) as caught:
            await store.get("key")
        assert not caught.value.outcome_unknown


@pytest.mark.parametrize(
    ("status", "reason", "is_throttling"),
    [
        pytest.param("429 Too Many Requests", "rateLimitExceeded", True, id="throttled"),
        pytest.param("403 Forbidden", "rateLimitExceeded", True, id="quota"),
        pytest.param("403 Forbidden", "userRateLimitExceeded", True, id="quota-of-a-user"),
        pytest.param("503 Service Unavailable", "backendError", True, id="unavailable"),
        pytest.param("500 Internal Server Error", "backendError", False, id="internal"),
    ],
)
async def test_store_that_asks_for_fewer_requests_is_understood(status, reason, is_throttling):
    """A quota that is used up is told as throttling, whichever status Google sends for it."""
    async with store_of(refusing(status, reason)) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.get("key")
    assert caught.value.is_throttling is is_throttling


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param({"Retry_After": "Fri, 02 Jan 2026 03:04:05 GMT"}, 0, id="past-date"),
        pytest.param({"Retry_After": "soon"}, None, id="nonsense"),
        pytest.param({}, None, id="absent"),
    ],
)
async def test_retry_after_may_be_a_date_or_missing(headers, expected):
    """A date that has passed asks for no wait, and an unreadable header is no header."""
    async with store_of(refusing("503 Service Unavailable", **headers)) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.get("key")
    assert caught.value.retry_after_seconds == expected


async def test_redirection_is_not_followed():
    """A token goes nowhere but to the endpoint of the settings."""
    paths = []

    async def handle(exchange: Exchange) -> None:
        paths.append(exchange.path)
        await exchange.answer("307 Temporary Redirect", Location="/elsewhere")

    async with store_of(handle) as store:
        with pytest.raises(StorageError, match="307"):
            await store.get("key")
    assert paths == ["/storage/v1/b/archive/o/key?alt=media"]


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
async def test_server_that_is_not_reached_has_done_nothing(host):
    """A put that reached no server, for want of a listener or of a name, has no unknown outcome."""
    store = await GcsStore.open(gcs_settings(NOBODY.replace("127.0.0.1", host)))
    with pytest.raises(StorageUnavailable) as caught:
        await store.put("key", b"content", crc32c=0)
    assert not caught.value.outcome_unknown
    await store.close()


async def test_silent_server_is_given_up():
    """A server that owes an answer for too long is unavailable, and a put's outcome unknown."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_to_end()

    async with store_of(handle, read_timeout_seconds=0.1) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", b"content", crc32c=0)
        assert caught.value.outcome_unknown
        with pytest.raises(StorageUnavailable):
            await store.get("key")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"<html>welcome</html>", id="page"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"{}", id="nothing"),
        pytest.param(document(b"content", crc32c="!AAAAAA=="), id="no-base64"),
        pytest.param(document(b"content", crc32c="AAAA"), id="no-checksum"),
        pytest.param(document(b"content", size=None), id="no-size"),
        pytest.param(document(b"content", generation=None), id="no-generation"),
    ],
)
async def test_answer_of_something_else_is_no_success(body):
    """A 200 that does not describe an object is unavailable, names the endpoint, and a put is unknown."""
    async with store_of(answering(body)) as store:
        with pytest.raises(StorageUnavailable, match="cloud_storage_api_endpoint") as caught:
            await store.put("key", b"content", crc32c=crc32c(b"content"))
        assert caught.value.outcome_unknown
        with pytest.raises(StorageUnavailable, match="cloud_storage_api_endpoint"):
            await store.head("key")
        with pytest.raises(StorageUnavailable, match="cloud_storage_api_endpoint"):
            await store.get("key")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        pytest.param("No such object: archive/key", ObjectNotFound, id="object"),
        pytest.param("The specified bucket does not exist.", BucketNotFound, id="bucket"),
    ],
)
async def test_server_that_says_what_is_missing_is_believed(message, error):
    """Google's own words for a missing object or bucket need no second request."""
    paths = []

    async def handle(exchange: Exchange) -> None:
        paths.append(exchange.path)
        await exchange.answer("404 Not Found", refusal("404", "notFound", message))

    async with store_of(handle) as store:
        with pytest.raises(error):
            await store.head("key")
    assert len(paths) == 1


async def test_silent_404_is_followed_by_a_question_for_the_bucket():
    """A 404 that does not say what is missing may mean the object or the bucket."""

    async def object_missing(exchange: Exchange) -> None:
        is_object = urlsplit(exchange.path).path.endswith("key")
        await exchange.answer("404 Not Found" if is_object else "200 OK", b"" if is_object else b"{}")

    async with store_of(object_missing, max_connections=1) as store:
        with pytest.raises(ObjectNotFound):
            await store.get("key")
        await store.delete_many(["key"])
    async with store_of(refusing("404 Not Found"), max_connections=1) as store:
        with pytest.raises(BucketNotFound) as caught:
            await store.get("key")
        assert caught.value.key == "key"
        with pytest.raises(BucketNotFound):
            await store.delete_many(["key"])


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"endpoint": "not a url"}, id="endpoint"),
        pytest.param({"endpoint": "ftp://host"}, id="scheme"),
        pytest.param({"trust_file": "/not/there.pem"}, id="trust-file"),
        pytest.param({"trust_file": "/proc/self/status"}, id="not-a-trust-file"),
        pytest.param({"credentials_source": "config_file"}, id="no-key-file"),
    ],
)
async def test_settings_that_cannot_work_are_refused_at_once(wrong):
    """A client that cannot be built is a fault of the configuration."""
    with pytest.raises(ConfigError, match="cloud_storage_"):
        await GcsStore.open(gcs_settings("http://127.0.0.1:1", **wrong))


async def test_untrusted_certificate_names_the_setting(server_tls):
    """A server whose certificate is not trusted is unavailable, with a hint at the trust file."""
    async with store_of(refusing("200 OK"), tls=server_tls) as store:
        with pytest.raises(StorageUnavailable, match="cloud_storage_trust_file") as caught:
            await store.put("key", b"content", crc32c=0)
        assert not caught.value.outcome_unknown


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "https://storage.googleapis.com", id="default"),
        pytest.param({"endpoint": "host:1/"}, "https://host:1", id="host"),
        pytest.param({"endpoint": "host:1", "disable_tls": True}, "http://host:1", id="host-without-tls"),
        pytest.param({"endpoint": "https://host", "disable_tls": True}, "https://host", id="said"),
    ],
)
def test_endpoint_may_leave_the_scheme_out(changes, expected):
    """A host alone is spoken to over TLS, unless that is switched off."""
    assert GcsSettings(bucket="b", **changes).api_root == expected


async def test_proxy_of_the_environment_is_used(monkeypatch):
    """Requests go to the proxy that the environment names, and not there for hosts it excludes."""
    paths = []

    async def handle(exchange: Exchange) -> None:
        paths.append(exchange.path)
        await exchange.answer("200 OK", b"0123456789", **MEDIA)

    async with serving(handle) as url:
        monkeypatch.setenv("http_proxy", url)
        for excluded, endpoint in (("", "http://storage.invalid"), ("127.0.0.1", url)):
            monkeypatch.setenv("no_proxy", excluded)
            store = await GcsStore.open(gcs_settings(endpoint))
            await store.get("key")
            await store.close()
    path = "/storage/v1/b/archive/o/key?alt=media"
    assert paths == [f"http://storage.invalid{path}", path]
