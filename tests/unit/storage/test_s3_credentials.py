"""The S3 store with a role's credentials, against local services that issue and check them."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.support.aws_metadata_server import (
    CONTAINER_PATH,
    CONTAINER_TOKEN,
    IDENTITY,
    ROLE,
    ROLE_ARN,
    SESSION,
    CredentialService,
)
from tests.support.raw_http import NOBODY, Exchange, serving
from tieringd.errors import ConfigError, ObjectNotFound, StorageDenied, StorageUnavailable
from tieringd.storage.resilient import ResilientStore, StoreLimits
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

MODIFIED = {"ETag": '"version"', "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
SOURCES = ["metadata", "container", "sts"]
REFUSALS = [
    ("500 Internal Server Error", b"no"),
    ("200 OK", b"{}"),
    ("400 Bad Request", b""),
    ("200 OK", b'{"Code": "Success", "SecretAccessKey": "hush"'),
    ("200 OK", b"<AssumeRoleWithWebIdentityResponse><SecretAccessKey>hush"),
]
TWELVE_MINUTES = 720  # Soon at their end, but good enough to sign with.
FIVE_MINUTES = 300


@dataclass
class Bucket:
    """Answers every request, and remembers whose key signed it; refuses the keys that are expired."""

    expired: set[str] = field(default_factory=set)
    signers: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.read_body()
        signer = re.search(r"Credential=(\w+)/", exchange.headers["authorization"])[1]
        self.signers.append(signer)
        self.tokens.add(exchange.headers.get("x-amz-security-token"))
        if signer in self.expired or "all" in self.expired:
            document = b"<Error><Code>ExpiredToken</Code><Message>too late</Message></Error>"
            await exchange.answer("400 Bad Request", b"" if exchange.method == "HEAD" else document)
        else:
            await exchange.answer("200 OK", b"" if exchange.method == "HEAD" else b"content", **MODIFIED)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    """Take away what AWS's tools look for."""
    for name in (
        *("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"),
        *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        *("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"),
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def role(monkeypatch, tmp_path):
    """Return a function that sets the environment for a source at a URL, and gives the source's name."""

    def at(source: str, url: str) -> str:
        if source == "metadata":
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        elif source == "container":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url + CONTAINER_PATH)
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", CONTAINER_TOKEN)
        else:
            (tmp_path / "token").write_text(IDENTITY)
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
            monkeypatch.setenv("AWS_ROLE_ARN", ROLE_ARN)
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        return "sts" if source == "sts" else "aws_instance_metadata"

    return at


@asynccontextmanager
async def store_with(role, source: str, service: CredentialService, bucket: Bucket):
    async with serving(service) as credentials_url, serving(bucket) as url:
        name = role(source, credentials_url)
        settings = S3Settings(bucket="archive", endpoint_url=url, url_style="path", credentials_source=name)
        store = await S3Store.open(settings)
        try:
            yield store
        finally:
            await store.close()


@pytest.mark.parametrize("source", SOURCES)
async def test_requests_are_signed_with_the_role(role, source):
    """The first request fetches the role's credentials, and the next ones use them."""
    service, bucket = CredentialService(), Bucket()
    async with store_with(role, source, service, bucket) as store:
        assert service.requests == []
        await store.get("key")
        await store.get("key")
    assert bucket.signers == ["ASIA1", "ASIA1"]
    assert bucket.tokens == {"hush-token-1"}
    assert service.issued == 1


@pytest.mark.parametrize("lifetime_seconds", [3600, FIVE_MINUTES])
@pytest.mark.parametrize("source", SOURCES)
async def test_end_of_the_credentials_is_known(role, source, lifetime_seconds):
    """A store knows the end of its credentials as the service gave it: the SDK moves an end that is near."""
    service = CredentialService(lifetime_seconds=lifetime_seconds)
    async with store_with(role, source, service, Bucket()) as store:
        assert store.credentials_end is None
        await store.get("key")
        assert store.credentials_end == pytest.approx(time.time() + service.lifetime_seconds, abs=60)


@pytest.mark.parametrize("moved_by_seconds", [120, 600])
async def test_metadata_service_that_did_not_renew_is_asked_again(role, moved_by_seconds, monkeypatch):
    """The SDK would use the credentials past their end, and not ask again before."""
    # The SDK moves an end that is near by a random time. It asks a second time at once after a short one.
    monkeypatch.setattr("botocore.utils.random.randint", lambda *_: moved_by_seconds)
    service, bucket = CredentialService(lifetime_seconds=FIVE_MINUTES), Bucket()
    async with store_with(role, "metadata", service, bucket) as store:
        await store.get("key")
        first = service.issued
        service.lifetime_seconds = 3600
        await store.get("key")
        await refreshed(store)
        assert store.credentials_end > time.time() + FIVE_MINUTES
        await store.get("key")
    assert service.issued == first + 1
    assert bucket.signers[::2] == [f"ASIA{first}", f"ASIA{first + 1}"]


async def test_instance_metadata_is_asked_with_a_session_token(role):
    """Version 2 of the metadata service: a session first, then the role, then its credentials."""
    service = CredentialService()
    async with store_with(role, "metadata", service, Bucket()) as store:
        await store.get("key")
    roles = "/latest/meta-data/iam/security-credentials/"
    assert service.requests == [("PUT", "/latest/api/token"), ("GET", roles), ("GET", roles + ROLE)]


async def test_instance_metadata_is_never_asked_without_a_session_token(role):
    """
    Version 1 of the metadata service is not tried if version 2 refuses.

    Any process could be made to ask version 1.
    """
    service = CredentialService(refusal=("403 Forbidden", b""))
    async with store_with(role, "metadata", service, Bucket()) as store:
        with pytest.raises(StorageDenied):
            await store.get("key")
    assert service.requests == [("PUT", "/latest/api/token")]


@pytest.mark.parametrize("source", ["metadata", "container"])
async def test_metadata_is_not_asked_through_a_proxy(role, source, monkeypatch):
    """The proxy of the environment is for the store; this machine's own service is asked directly."""
    service, bucket = CredentialService(), Bucket()
    async with serving(bucket) as proxy_url:
        monkeypatch.setenv("HTTP_PROXY", proxy_url)
        async with store_with(role, source, service, Bucket()) as store:
            await store.get("key")
    assert bucket.signers == ["ASIA1"]
    assert service.issued == 1


@pytest.mark.parametrize("source", SOURCES)
async def test_many_waiters_share_one_fetch(role, source):
    """Twenty first requests at once cost the service one issue."""
    service, bucket = CredentialService(), Bucket()
    async with store_with(role, source, service, bucket) as store:
        await asyncio.gather(*(store.get("key") for _ in range(20)))
    assert bucket.signers == ["ASIA1"] * 20
    assert service.issued == 1


async def test_cancelled_waiter_does_not_end_the_fetch(role):
    """The first caller may be cancelled: the others get the credentials all the same."""
    service = CredentialService()
    service.is_open.clear()
    async with store_with(role, "sts", service, Bucket()) as store:
        first, second = (asyncio.create_task(store.get("key")) for _ in range(2))
        await service.is_asked.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        service.is_open.set()
        await second
    assert service.issued == 1


async def test_store_can_be_closed_during_a_fetch(role):
    """Closing ends a fetch that is under way, and leaves no task."""
    service = CredentialService()
    service.is_open.clear()
    async with store_with(role, "sts", service, Bucket()) as store:
        task = asyncio.create_task(store.get("key"))
        await service.is_asked.wait()
        task.cancel()
        (flight,) = store._credentials._refreshes._flights.values()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert flight.task.cancelled()


async def refreshed(store) -> None:
    """Return when the refresh that is under way, if any, has ended."""
    for flight in tuple(store._credentials._refreshes._flights.values()):
        await asyncio.wait({flight.task})


async def test_credentials_are_refreshed_ahead_without_holding_up_requests(role):
    """Requests go on with the old credentials while new ones are on their way."""
    service, bucket = CredentialService(lifetime_seconds=TWELVE_MINUTES), Bucket()
    async with store_with(role, "sts", service, bucket) as store:
        await store.get("key")
        service.is_open.clear()
        await store.get("key")
        await store.get("key")
        service.is_open.set()
        await refreshed(store)
        await store.get("key")
    assert bucket.signers == ["ASIA1", "ASIA1", "ASIA1", "ASIA2"]


async def test_failed_refresh_ahead_disturbs_no_request(role):
    """A service that is away disturbs no request while the credentials are good."""
    service, bucket = CredentialService(lifetime_seconds=TWELVE_MINUTES), Bucket()
    async with store_with(role, "sts", service, bucket) as store:
        await store.get("key")
        service.refusal = ("503 Service Unavailable", b"")
        for _ in range(3):
            await store.get("key")
        for _ in range(2):
            await refreshed(store)
            await store.get("key")
    assert bucket.signers == ["ASIA1"] * 6
    assert len(service.requests) == 2  # Asked once more, and not again for each request.


async def test_credentials_near_their_end_are_not_used(role):
    """Nothing is signed with what ends in ten minutes, as long as there is something better."""
    service, bucket = CredentialService(lifetime_seconds=FIVE_MINUTES), Bucket()
    async with store_with(role, "sts", service, bucket) as store:
        await store.get("key")
        await store.get("key")
        service.refusal = ("503 Service Unavailable", b"")
        with pytest.raises(StorageUnavailable, match="STS"):
            await store.get("key")
    assert bucket.signers == ["ASIA1", "ASIA2"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Service Unavailable"])
async def test_failing_service_is_worth_another_try(role, source, status):
    """A service that fails makes the store unavailable; when it is back, requests succeed."""
    service = CredentialService(refusal=(status, b""))
    async with store_with(role, source, service, Bucket()) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", b"content", crc32c=0)
        assert not caught.value.outcome_unknown
        service.refusal = None
        await store.get("key")


@pytest.mark.parametrize("source", SOURCES)
async def test_absent_service_is_not_replaced_by_another_source(role, source, monkeypatch):
    """Keys in the environment are not what was asked for: the store is unavailable."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAELSE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    bucket = Bucket()
    async with serving(bucket) as url:
        name = role(source, NOBODY)
        store = await S3Store.open(S3Settings(bucket="archive", endpoint_url=url, credentials_source=name))
        with pytest.raises(StorageUnavailable) as caught:
            await store.get("key")
        await store.close()
    assert caught.value.hint is not None
    assert bucket.signers == []


@pytest.mark.parametrize(
    ("source", "change", "hint"),
    [
        pytest.param("metadata", {"has_role": False}, "attach a role", id="instance-without-role"),
        pytest.param("metadata", {"refusal": ("403 Forbidden", b"")}, "attach a role", id="metadata-off"),
        pytest.param("metadata", {"refusal": ("200 OK", b"{}")}, "attach a role", id="no-fields"),
        pytest.param("container", {"refusal": ("404 Not Found", b"")}, "task's role", id="container"),
    ],
)
async def test_missing_role_is_denied_with_a_hint(role, source, change, hint):
    """A service that is there and has no credentials for us is for an operator to see to."""
    async with store_with(role, source, CredentialService(**change), Bucket()) as store:
        with pytest.raises(StorageDenied, match=hint) as caught:
            await store.get("key")
    assert caught.value.may_pass


async def test_refused_identity_is_denied_without_its_token(role, tmp_path):
    """STS's refusal names the role and what to check."""
    async with store_with(role, "sts", CredentialService(), Bucket()) as store:
        (tmp_path / "token").write_text("hush-another")
        with pytest.raises(
            StorageDenied, match=r"archive-role.*InvalidIdentityToken.*trust policy"
        ) as caught:
            await store.get("key")
        assert caught.value.may_pass
        (tmp_path / "token").unlink()
        with pytest.raises(StorageDenied, match="AWS_WEB_IDENTITY_TOKEN_FILE") as caught:
            await store.get("key")
        assert caught.value.may_pass


@pytest.mark.parametrize("source", SOURCES)
async def test_expired_token_is_replaced_and_the_request_repeated(role, source):
    """New credentials are fetched once if the store calls them expired, however many requests it refuses."""
    service, bucket = CredentialService(), Bucket(expired={"ASIA1"})
    limits = StoreLimits(initial_backoff_seconds=0.001)
    async with store_with(role, source, service, bucket) as store:
        resilient = ResilientStore(store, limits)
        await asyncio.gather(*(resilient.get("key") for _ in range(10)))
    assert service.issued == 2
    assert bucket.signers.count("ASIA2") == 10


async def test_expired_token_is_recognised_without_a_code(role):
    """A refused HEAD has no body that names the reason, and is repeated all the same."""
    service, bucket = CredentialService(), Bucket(expired={"ASIA1"})
    async with store_with(role, "sts", service, bucket) as store:
        await ResilientStore(store, StoreLimits(initial_backoff_seconds=0.001)).head("key")
    assert service.issued == 2


async def test_token_that_expires_again_at_once_is_denied(role):
    """New credentials that are refused as well are not replaced without end."""
    service, bucket = CredentialService(), Bucket(expired={"all"})
    async with store_with(role, "sts", service, bucket) as store:
        with pytest.raises(StorageDenied, match="ExpiredToken"):
            await ResilientStore(store, StoreLimits(initial_backoff_seconds=0.001)).get("key")
        assert bucket.signers == ["ASIA1", "ASIA2"]
        bucket.expired.clear()
        await store.get("key")


@pytest.mark.parametrize("source", SOURCES)
async def test_end_of_refused_credentials_stays_known(role, source):
    """The alert goes by it, and so does the renewal of an idle archive, until there are others."""
    service, bucket = CredentialService(lifetime_seconds=FIVE_MINUTES), Bucket(expired={"all"})
    async with store_with(role, source, service, bucket) as store:
        with pytest.raises(StorageDenied, match="ExpiredToken"):
            await ResilientStore(store, StoreLimits(initial_backoff_seconds=0.001)).get("key")
        assert store.credentials_end == pytest.approx(time.time() + FIVE_MINUTES, abs=60)
        bucket.expired.clear()
        service.lifetime_seconds = 3600
        await store.get("key")
        assert store.credentials_end == pytest.approx(time.time() + 3600, abs=60)


@pytest.mark.parametrize("missing", ["AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"])
async def test_sts_needs_its_environment(role, missing, monkeypatch):
    """A missing variable of the environment is found before anything starts."""
    role("sts", "http://127.0.0.1:1")
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=missing):
        await S3Store.open(S3Settings(bucket="archive", credentials_source="sts"))


async def test_config_file_needs_both_keys():
    """No other place is searched for keys if the configuration lacks one of the two."""
    with pytest.raises(ConfigError, match="cloud_storage_credentials_source"):
        await S3Store.open(S3Settings(bucket="archive", access_key="me"))


@pytest.mark.parametrize("source", SOURCES)
async def test_secrets_are_never_shown(role, source, caplog):
    """No error, traceback, representation or log line holds a secret or a token."""
    service = CredentialService(lifetime_seconds=FIVE_MINUTES)
    shown = []
    async with store_with(role, source, service, Bucket()) as store:
        await store.get("key")
        shown += [repr(store), repr(store._credentials), repr(store._settings), str(vars(store))]
        for refusal in REFUSALS:
            service.refusal = refusal
            store._credentials.renew(store._credentials.generation)
            with pytest.raises((StorageDenied, StorageUnavailable)) as caught:
                await store.get("key")
            shown += traceback.format_exception(caught.value)
    text = "\n".join([*shown, caplog.text])
    assert "Traceback" in text
    assert "hush" not in text
    assert SESSION not in text


async def test_unsigned_answer_of_a_missing_object_keeps_its_meaning(role):
    """An answer that is no refusal has its usual meaning under a role."""

    async def missing(exchange: Exchange) -> None:
        await exchange.answer("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")

    async with store_with(role, "sts", CredentialService(), missing) as store:
        with pytest.raises(ObjectNotFound):
            await store.get("key")
