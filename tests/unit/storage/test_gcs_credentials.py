"""Access tokens of the GCS store: fetched once for many, renewed in time, and never shown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
import traceback
from contextlib import asynccontextmanager

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.gcs_metadata_server import GcsMetadataServer, running_metadata_server
from tests.support.gcs_token_endpoint import ACCOUNT, GcsTokenEndpoint
from tests.support.raw_http import NOBODY, Exchange, serving
from tieringd.errors import ConfigError, ObjectNotFound, StorageDenied, StorageUnavailable, TieringError
from tieringd.storage.gcs.store import GcsStore
from tieringd.storage.store_settings import GcsSettings

MEDIA = {"x_goog_generation": "7", "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}


@pytest.fixture(scope="session")
def private_key():
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
def key_file(tmp_path, private_key):
    """Return a function that writes a service account's key file for a token endpoint."""

    def write(token_uri: str, /, **changes) -> str:
        pem = private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        document = {
            "type": "service_account",
            "client_email": ACCOUNT,
            "private_key": pem,
            "token_uri": token_uri,
        }
        path = tmp_path / "account.json"
        path.write_text(json.dumps(document | changes))
        return str(path)

    return write


class Bucket:
    """Answers every GET for which *is_good* likes the token; a 401 to the others."""

    def __init__(self):
        self.is_good = lambda token: token != ""
        self.seen = []
        self.is_missing = False

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.read_body()
        kind, _, token = exchange.headers.get("authorization", "").partition(" ")
        assert kind == "Bearer"
        self.seen.append(token)
        if not self.is_good(token):
            await exchange.answer("401 Unauthorized", b'{"error": {"message": "Invalid Credentials"}}')
        elif self.is_missing:
            await exchange.answer("404 Not Found", b"No such object: archive/key")
        else:
            await exchange.answer("200 OK", b"content", **MEDIA)


class Clock:
    """A clock that stands until it is set."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def store_of(bucket, **changes):
    async with serving(bucket) as url:
        store = await GcsStore.open(GcsSettings(bucket="archive", endpoint=url, **changes))
        try:
            yield store
        finally:
            await store.close()


@asynccontextmanager
async def instance_store(bucket, metadata):
    """Give a store that gets its tokens from a metadata server, and the clock by which they expire."""
    source = {"credentials_source": "gcp_instance_metadata", "metadata_host": metadata.host}
    async with store_of(bucket, **source) as store:
        store._client._token._clock = clock = Clock()
        yield store, clock


async def refreshed(store: GcsStore) -> None:
    """Return when the refresh that is under way has ended, well or not."""
    for flight in tuple(store._client._token._refreshes._flights.values()):
        await asyncio.wait({flight.task})


async def test_service_account_signs_for_its_token(key_file, private_key):
    """A token is asked for with an assertion that the account's key signed, once for many requests."""
    bucket, endpoint = Bucket(), GcsTokenEndpoint(private_key.public_key())
    async with (
        serving(endpoint) as url,
        store_of(bucket, service_account_file=key_file(f"{url}/token")) as store,
    ):
        await asyncio.gather(*(store.get("key") for _ in range(20)))
    assert len(endpoint.assertions) == 1
    assert bucket.seen == ["token-1"] * 20


async def test_end_of_the_token_is_known():
    """A store knows the end of its token from the first request on, and renews the token before that."""
    async with running_metadata_server() as metadata, instance_store(Bucket(), metadata) as (store, _):
        assert store.credentials_end is None
        await store.get("key")
        assert time.time() < store.credentials_end <= time.time() + 3600


@pytest.mark.parametrize("is_from_environment", [False, True], ids=["settings", "environment"])
async def test_instance_has_its_token_from_the_metadata_server(monkeypatch, tmp_path, is_from_environment):
    """The settings or GCE_METADATA_HOST say where it is; no key file and no proxy comes between."""
    bucket = Bucket()
    (tmp_path / "other.json").write_text('{"type": "authorized_user"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "other.json"))
    async with running_metadata_server() as metadata, serving(bucket) as url:
        # The bucket's server is its own proxy, and would object to a request for a token.
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.host if is_from_environment else "127.0.0.1:1")
        store = await GcsStore.open(
            GcsSettings(
                bucket="archive",
                endpoint=url,
                credentials_source="gcp_instance_metadata",
                metadata_host=None if is_from_environment else metadata.host,
            )
        )
        await store.get("key")
        await store.close()
    assert (bucket.seen, metadata.requests) == (["token-1"], 1)


async def test_many_callers_share_one_refresh():
    """Requests that find no token wait for one refresh; cancelling the first of them harms no other."""
    bucket = Bucket()
    async with running_metadata_server() as metadata, instance_store(bucket, metadata) as (store, _):
        metadata.may_answer.clear()
        tasks = [asyncio.create_task(store.get("key")) for _ in range(10)]
        await metadata.is_asked.wait()
        tasks[0].cancel()
        await asyncio.wait({tasks[0]})
        metadata.may_answer.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert metadata.requests == 1
    assert isinstance(results[0], asyncio.CancelledError)
    assert [data for data, _ in results[1:]] == [b"content"] * 9


async def test_token_is_renewed_before_it_expires_while_requests_run():
    """A token is renewed in the second half of its life, while requests go on with it."""
    bucket = Bucket()
    async with running_metadata_server() as metadata, instance_store(bucket, metadata) as (store, clock):
        await store.get("key")
        clock.now += 1799
        await store.get("key")
        assert metadata.requests == 1
        metadata.may_answer.clear()
        clock.now += 2
        await asyncio.gather(*(store.get("key") for _ in range(5)))
        metadata.may_answer.set()
        await refreshed(store)
        await store.get("key")
    assert bucket.seen == ["token-1"] * 7 + ["token-2"]
    assert metadata.requests == 2


async def test_early_refresh_that_fails_is_tried_again_later():
    """A refresh that fails does no harm while the token still works, and is repeated after a pause."""
    bucket = Bucket()
    async with running_metadata_server() as metadata, instance_store(bucket, metadata) as (store, clock):
        await store.get("key")
        clock.now += 1801
        metadata.refusal = "503 Service Unavailable"
        for _ in range(3):
            await store.get("key")
            await refreshed(store)
        assert metadata.requests == 2
        metadata.refusal = None
        clock.now += 11
        await store.get("key")
        await refreshed(store)
        await store.get("key")
    assert bucket.seen == ["token-1"] * 5 + ["token-2"]


async def test_expired_token_is_not_sent():
    """A token whose time is nearly over is replaced before the next request, not after."""
    bucket = Bucket()
    async with running_metadata_server() as metadata, instance_store(bucket, metadata) as (store, clock):
        await store.get("key")
        clock.now += 3590
        await store.get("key")
    assert bucket.seen == ["token-1", "token-2"]


async def test_refused_token_is_dropped_and_the_next_one_tried():
    """Requests with a refused token may be tried again, and the next one has a fresh token."""
    bucket = Bucket()
    bucket.is_good = lambda token: token != "token-1"
    async with running_metadata_server() as metadata, instance_store(bucket, metadata) as (store, _):
        results = await asyncio.gather(*(store.get("key") for _ in range(5)), return_exceptions=True)
        assert {type(result) for result in results} == {StorageUnavailable}
        assert not any(result.outcome_unknown for result in results)
        assert (await store.get("key"))[0] == b"content"
        bucket.is_good = lambda token: token == "token-3"
        with pytest.raises(StorageUnavailable):
            await store.get("key")
        await store.get("key")
    assert metadata.issued == 3


async def test_end_of_a_refused_token_stays_until_there_is_another_one():
    """A token of a revoked account has ended with its refusal. Without an end the alert would end as well."""
    bucket = Bucket()
    async with running_metadata_server() as metadata, instance_store(bucket, metadata) as (store, clock):
        await store.get("key")
        bucket.is_good = lambda token: token != "token-1"
        metadata.refusal = "404 Not Found"
        with pytest.raises(StorageUnavailable):
            await store.get("key")
        for _ in range(2):
            clock.now += 60
            with pytest.raises(StorageDenied):
                await store.get("key")
        assert store.credentials_end == pytest.approx(time.time() - 120, abs=30)
        metadata.refusal = None
        await store.get("key")
        assert store.credentials_end > time.time() + 120


async def test_fresh_token_that_is_refused_as_well_is_final():
    """A token that took a refused one's place, and is refused, means that the account has no access."""
    bucket = Bucket()
    bucket.is_good = lambda token: False
    async with running_metadata_server() as metadata, instance_store(bucket, metadata) as (store, _):
        with pytest.raises(StorageUnavailable):
            await store.get("key")
        results = await asyncio.gather(*(store.get("key") for _ in range(5)), return_exceptions=True)
        assert {type(result) for result in results} == {StorageDenied}
        assert all("cloud_storage_credentials_source" in str(result) for result in results)
        bucket.is_good = lambda token: True
        await store.get("key")
        bucket.is_good = lambda token: False
        with pytest.raises(StorageUnavailable):
            await store.get("key")


async def test_late_refusal_of_a_replaced_token_is_worth_another_try():
    """A 401 to a token that has been replaced meanwhile says nothing of the one that is used now."""
    async with running_metadata_server() as metadata, instance_store(Bucket(), metadata) as (store, _):
        token = store._client._token
        for value, may_recover in (("first", True), ("second", False)):
            token.access_token = value
            assert token.refused(value) is may_recover
            assert token.refused(value) is may_recover
        token.access_token = "fourth"
        assert token.refused("third")
        assert token.access_token == "fourth"


async def test_missing_object_does_not_cost_the_token():
    """Any answer but 401 means that the store knows the token."""
    bucket = Bucket()
    bucket.is_missing = True
    async with running_metadata_server() as metadata, instance_store(bucket, metadata) as (store, _):
        for _ in range(3):
            with pytest.raises(ObjectNotFound):
                await store.get("key")
    assert metadata.requests == 1


@pytest.mark.parametrize(
    ("status", "error", "match"),
    [
        pytest.param("404 Not Found", StorageDenied, "attach a service account", id="no-account"),
        pytest.param("403 Forbidden", StorageDenied, "attach a service account", id="no-right"),
        pytest.param("429 Too Many Requests", StorageUnavailable, "429", id="throttled"),
        pytest.param("503 Service Unavailable", StorageUnavailable, "503", id="trouble"),
        pytest.param("200 OK", StorageUnavailable, "response is not a token", id="page"),
    ],
)
async def test_metadata_server_without_a_token_is_told_by_class(status, error, match):
    """No account is for an operator to mend, trouble passes; one attempt is made, and the host is named."""
    async with running_metadata_server() as metadata, instance_store(Bucket(), metadata) as (store, _):
        metadata.refusal = status
        with pytest.raises(TieringError, match=match) as caught:
            await store.get("key")
        assert type(caught.value) is error
        assert getattr(caught.value, "may_pass", True)
        assert metadata.host in str(caught.value)
        assert metadata.requests == 1
        metadata.refusal = None
        await store.get("key")


async def test_metadata_server_that_is_away_is_unavailable():
    """No answer at the metadata server's address is a fault that may pass."""
    metadata = GcsMetadataServer()
    metadata.host = NOBODY.removeprefix("http://")
    async with instance_store(Bucket(), metadata) as (store, _):
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match=metadata.host):
                await store.put("key", b"content", crc32c=0)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({}, id="nothing"),
        pytest.param([], id="list"),
        pytest.param({"access_token": "a\r\nb", "expires_in": 3600}, id="two-lines"),
        pytest.param({"access_token": "token", "expires_in": "soon"}, id="no-time"),
    ],
)
async def test_answer_without_a_usable_token_is_unavailable(document):
    """An answer that is no token is not sent to the store."""

    async def handle(exchange: Exchange) -> None:
        headers = {"Content_Type": "application/json"}
        await exchange.answer("200 OK", json.dumps(document).encode(), **headers)

    bucket = Bucket()
    async with serving(handle) as url:
        source = {"credentials_source": "gcp_instance_metadata", "metadata_host": url.removeprefix("http://")}
        async with store_of(bucket, **source) as store:
            with pytest.raises(StorageUnavailable, match="response is not a token"):
                await store.get("key")
    assert bucket.seen == []


async def test_assertion_that_is_out_of_time_tells_of_the_clock(key_file, private_key):
    """A wrong clock of this machine is named, and not the key; the refusal ends when the clock is set."""
    endpoint = GcsTokenEndpoint(private_key.public_key())
    endpoint.refusal = "400 Bad Request"
    endpoint.words = (
        "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. Check "
        "your iat and exp values in the JWT claim."
    )
    async with (
        serving(endpoint) as url,
        store_of(Bucket(), service_account_file=key_file(f"{url}/token")) as store,
    ):
        with pytest.raises(StorageDenied, match="set this machine's clock") as caught:
            await store.get("key")
    assert caught.value.may_pass


@pytest.mark.parametrize(
    ("status", "error"),
    [
        pytest.param("400 Bad Request", StorageDenied, id="refused"),
        pytest.param("503 Service Unavailable", StorageUnavailable, id="trouble"),
    ],
)
async def test_refused_assertion_is_told_without_it(key_file, private_key, caplog, status, error):
    """The endpoint's code and words are in the error; the assertion that it quotes is nowhere."""
    caplog.set_level(logging.DEBUG)
    endpoint = GcsTokenEndpoint(private_key.public_key())
    endpoint.refusal = status
    async with (
        serving(endpoint) as url,
        store_of(Bucket(), service_account_file=key_file(f"{url}/token")) as store,
    ):
        with pytest.raises(error, match=r"invalid_grant Bad signature of \[cut\]") as caught:
            await store.get("key")
    if isinstance(caught.value, StorageUnavailable):
        assert caught.value.retry_after_seconds == 3
    else:
        assert not caught.value.may_pass
    (assertion,) = endpoint.assertions
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caplog.text
    assert not [part for part in assertion.split(".") if part in shown]


async def test_token_and_key_are_never_shown(key_file, private_key, caplog):
    """A secret is in no error with its causes, in no log and in no repr."""
    caplog.set_level(logging.DEBUG)
    bucket, endpoint, shown = Bucket(), GcsTokenEndpoint(private_key.public_key()), []

    async def broken(exchange: Exchange) -> None:
        await exchange.read_body()
        bucket.seen.append(exchange.headers["authorization"])
        if len(bucket.seen) % 2:
            exchange.reset()
        else:
            await exchange.answer("403 Forbidden", b"no")

    async with (
        serving(endpoint) as url,
        store_of(broken, service_account_file=key_file(f"{url}/token")) as store,
    ):
        for _ in range(4):
            with pytest.raises(TieringError) as caught:
                await store.put("key", b"content", crc32c=0)
            error: BaseException | None = caught.value
            shown += traceback.format_exception(error)
            while error is not None:
                shown += [repr(error), str(error), repr(vars(error))]
                error = error.__cause__ or error.__context__
        shown += [repr(store), repr(store._settings), repr(store._client), repr(store._client._token)]
    gc.collect()
    text = "".join(shown) + caplog.text
    assert "Bearer token-1" in bucket.seen
    assert "token-1" not in text
    assert "PRIVATE KEY" not in text


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        pytest.param({"type": "authorized_user"}, "type is authorized_user", id="other-kind"),
        pytest.param({"client_email": None}, "no client_email", id="no-account"),
        pytest.param({"token_uri": None, "private_key": None}, "no private_key, no token_uri", id="two"),
        pytest.param({"private_key": "hush hush"}, "private_key", id="no-key"),
    ],
)
async def test_key_file_that_cannot_work_is_refused_at_once(key_file, changes, match):
    """A key file without what a service account needs is a fault of the configuration."""
    settings = GcsSettings(bucket="b", service_account_file=key_file("http://127.0.0.1:1", **changes))
    with pytest.raises(ConfigError, match=match) as caught:
        await GcsStore.open(settings)
    assert "hush" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("text", [None, '{"private_key": "hush', "[]"], ids=["missing", "cut", "list"])
async def test_key_file_that_is_no_document_is_refused_at_once(tmp_path, text):
    """A file that is missing or unreadable is named, its content is not, and no other source is tried."""
    path = tmp_path / "account.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"account\.json") as caught:
        await GcsStore.open(GcsSettings(bucket="b", service_account_file=str(path)))
    assert "hush" not in "".join(traceback.format_exception(caught.value))


async def test_closing_ends_a_refresh():
    """A store that is closed while a token is on its way leaves nothing behind."""
    async with running_metadata_server() as metadata, instance_store(Bucket(), metadata) as (store, _):
        metadata.may_answer.clear()
        task = asyncio.create_task(store.get("key"))
        await metadata.is_asked.wait()
        await store.close()
        with pytest.raises(StorageUnavailable, match="the store was closed"):
            await task
