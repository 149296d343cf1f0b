"""The table from what Azure answers to what a caller can do about it."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from crc32c import crc32c

from tests.support.raw_http import NOBODY, PATIENT, Exchange, serving
from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    ConfigError,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
)
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.base import IfVersion
from tieringd.storage.store_settings import AzureSettings

KEY = "c2VjcmV0"


def settings(url: str, **changes) -> AzureSettings:
    values = {"storage_account": "account", "container": "archive", "endpoint": f"{url}/account"}
    return AzureSettings(**PATIENT | values | {"shared_key": KEY} | changes)


@asynccontextmanager
async def store_of(handle, *, tls=None, **changes):
    async with serving(handle, tls=tls) as url:
        store = await AzureStore.open(settings(url, **changes))
        try:
            yield store
        finally:
            await store.close()


class Refusing:
    """Answers every request alike, and counts them."""

    def __init__(self, status: str, code: str = "", **headers: str):
        self.status = status
        self.headers = headers | ({"x_ms_error_code": code} if code else {})
        self.requests = 0

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.read_body()
        self.requests += 1
        body = (
            b"" if exchange.method == "HEAD" else b"<Error><Message>said the server\nmore</Message></Error>"
        )
        await exchange.answer(self.status, body, **self.headers)


async def put(store: AzureStore, **condition) -> None:
    await store.put("dir/key", b"content", crc32c=crc32c(b"content"), **condition)


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        pytest.param("412 Precondition Failed", "ConditionNotMet", PreconditionFailed, id="lost"),
        pytest.param("409 Conflict", "BlobAlreadyExists", PreconditionFailed, id="exists"),
        pytest.param("404 Not Found", "BlobNotFound", PreconditionFailed, id="missing-blob"),
        pytest.param("412 Precondition Failed", "", PreconditionFailed, id="lost-without-code"),
        pytest.param("409 Conflict", "", PreconditionFailed, id="exists-without-code"),
        pytest.param("412 Precondition Failed", "LeaseIdMissing", StorageError, id="leased"),
        pytest.param("409 Conflict", "ResourceTypeMismatch", StorageError, id="directory"),
        pytest.param("404 Not Found", "ContainerNotFound", BucketNotFound, id="missing-container"),
        pytest.param("409 Conflict", "ContainerBeingDeleted", BucketNotFound, id="container-going"),
        pytest.param("403 Forbidden", "AuthenticationFailed", StorageDenied, id="signature"),
        pytest.param("403 Forbidden", "AuthorizationPermissionMismatch", StorageDenied, id="role"),
        pytest.param("403 Forbidden", "AuthorizationFailure", StorageDenied, id="network-rules"),
        pytest.param("403 Forbidden", "AccountIsDisabled", StorageDenied, id="account"),
        pytest.param("401 Unauthorized", "", StorageDenied, id="no-code"),
        pytest.param("409 Conflict", "PublicAccessNotPermitted", StorageDenied, id="anonymous"),
        pytest.param("409 Conflict", "BlobImmutableDueToPolicy", StorageDenied, id="immutable"),
        pytest.param("400 Bad Request", "Md5Mismatch", ChecksumRejected, id="md5"),
        pytest.param("400 Bad Request", "Crc64Mismatch", ChecksumRejected, id="crc64"),
        pytest.param("413 Too Large", "RequestBodyTooLarge", StorageError, id="other"),
    ],
)
async def test_final_answers_have_classes_of_their_own(status, code, error):
    """A final answer of the store has a class of its own, after one request, with the key."""
    refusing = Refusing(status, code)
    async with store_of(refusing) as store:
        with pytest.raises(error) as caught:
            await put(store, condition=IfVersion('"v"'))
    assert type(caught.value) is error
    assert caught.value.key == "dir/key"
    assert "dir/key" in str(caught.value)
    assert refusing.requests == 1


@pytest.mark.parametrize(
    ("status", "code", "outcome_unknown"),
    [
        pytest.param("503 Server Busy", "ServerBusy", False, id="busy"),
        pytest.param("503 Service Unavailable", "", True, id="gateway-503"),
        pytest.param("429 Too Many Requests", "", False, id="too-many"),
        pytest.param("400 Bad Request", "InvalidBlockList", False, id="blocks-gone"),
        pytest.param("500 Internal Server Error", "InternalError", True, id="internal"),
        pytest.param("500 Operation Timed Out", "OperationTimedOut", True, id="timed-out"),
        pytest.param("503 Operation Timed Out", "OperationTimedOut", True, id="timed-out-as-503"),
        pytest.param("408 Request Timeout", "", True, id="too-slow"),
        pytest.param("502 Bad Gateway", "", True, id="gateway"),
    ],
)
async def test_trouble_of_the_server_is_worth_another_try(status, code, outcome_unknown):
    """Failures of the server are StorageUnavailable; those after which it may have stored say so."""
    refusing = Refusing(status, code, Retry_After="7")
    async with store_of(refusing) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await put(store)
        assert caught.value.outcome_unknown is outcome_unknown
        assert caught.value.retry_after_seconds == 7
        with pytest.raises(StorageUnavailable) as caught:
            await store.get("key")
        assert not caught.value.outcome_unknown
    assert refusing.requests == 2


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param({"Retry_After": "Fri, 02 Jan 2026 03:04:05 GMT"}, 0.0, id="past-date"),
        pytest.param({"Retry_After": "Fri, 02 Jan 2026 03:04:05"}, 0.0, id="date-without-zone"),
        pytest.param({"Retry_After": "soon"}, None, id="nonsense"),
        pytest.param({"x_ms_retry_after_ms": "250", "Retry_After": "7"}, 0.25, id="milliseconds-first"),
        pytest.param({}, None, id="none"),
    ],
)
async def test_pause_is_taken_from_what_the_server_asks_for(headers, expected):
    """The wait may be told in milliseconds, in seconds or as a date; an unreadable one is none."""
    async with store_of(Refusing("503 Server Busy", "ServerBusy", **headers)) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.get("key")
    assert caught.value.retry_after_seconds == expected


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param("BlobNotFound", ObjectNotFound, id="blob"),
        pytest.param("", ObjectNotFound, id="no-code"),
        pytest.param("ContainerNotFound", BucketNotFound, id="container"),
    ],
)
async def test_missing_object_is_told_from_a_missing_container(code, error):
    """The code among the headers decides, for HEAD as well, whose answer has no body."""
    async with store_of(Refusing("404 Not Found", code)) as store:
        for call in (store.get, store.head):
            with pytest.raises(error):
                await call("key")


async def test_listing_is_translated_like_the_rest():
    """A listing's failures go through the same table, after one request."""
    for refusing, error in (
        (Refusing("404 Not Found", "ContainerNotFound"), BucketNotFound),
        (Refusing("403 Forbidden", "AuthorizationFailure"), StorageDenied),
        (Refusing("503 Server Busy", "ServerBusy", Retry_After="3"), StorageUnavailable),
        (Refusing("200 OK"), StorageUnavailable),
    ):
        async with store_of(refusing) as store:
            with pytest.raises(error):
                await store.list_page("")
        assert refusing.requests == 1


async def test_answer_that_says_more_than_a_line_is_cut():
    """An error keeps the first line of the service's message. The rest quotes signatures and request ids."""
    async with store_of(Refusing("403 Forbidden", "AuthenticationFailed")) as store:
        with pytest.raises(StorageDenied, match="AuthenticationFailed said the server") as caught:
            await store.get("key")
    assert "more" not in str(caught.value)


@pytest.mark.parametrize("call", ["get", "put"])
@pytest.mark.parametrize("hours", [-2, 0, 2])
async def test_refusal_of_a_request_that_is_out_of_time_tells_of_the_clock(hours, call):
    """A wrong clock and a wrong key have one code: the service's Date says which it is."""
    date = format_datetime(datetime.now(UTC) + timedelta(hours=hours) * 1.005, usegmt=True)
    async with store_of(Refusing("403 Forbidden", "AuthenticationFailed", Date=date)) as store:
        with pytest.raises(StorageDenied) as caught:
            await (put(store) if call == "put" else store.get("key"))
    hint = caught.value.hint or ""
    side = "behind" if hours > 0 else "ahead of"
    told = f"set this machine's clock: it is 7[12]\\d\\d s {side}" if hours else "check cloud_storage_azure"
    assert re.match(told, hint)
    assert caught.value.may_pass is bool(hours)


async def test_unknown_host_is_unavailable_and_without_effect():
    """A name that does not resolve is worth another try, and nothing was stored."""
    store = await AzureStore.open(settings("https://account.blob.invalid"))
    with pytest.raises(StorageUnavailable) as caught:
        await put(store)
    assert not caught.value.outcome_unknown
    await store.close()


async def test_refused_connection_is_known_to_be_without_effect():
    """A put that reached no server has no unknown outcome."""
    store = await AzureStore.open(settings(NOBODY))
    with pytest.raises(StorageUnavailable) as caught:
        await put(store)
    assert not caught.value.outcome_unknown
    await store.close()


async def test_untrusted_certificate_names_the_setting(server_tls):
    """A server whose certificate is not trusted is unavailable, with a hint at the trust file."""
    async with store_of(Refusing("200 OK"), tls=server_tls) as store:
        with pytest.raises(StorageUnavailable, match="cloud_storage_trust_file"):
            await store.get("key")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"endpoint": "ftp://host"}, id="scheme"),
        pytest.param({"endpoint": "https://"}, id="no-host"),
        pytest.param({"container": ""}, id="container"),
        pytest.param({"trust_file": "/not/there.pem"}, id="trust-file"),
        pytest.param({"trust_file": __file__}, id="no-certificates"),
    ],
)
async def test_settings_that_cannot_work_are_refused_at_once(wrong):
    """A client that cannot be built is a fault of the configuration."""
    with pytest.raises(ConfigError, match="cloud_storage_"):
        await AzureStore.open(settings("http://127.0.0.1:1", **wrong))
