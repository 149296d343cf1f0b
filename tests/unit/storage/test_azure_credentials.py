"""Identities against token services that speak Azure's protocols, and a store that takes their tokens."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import traceback
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from crc32c import crc32c

from tests.support.azure_metadata_server import TokenService
from tests.support.raw_http import NOBODY, Exchange, serving
from tieringd.errors import ConfigError, StorageDenied, StorageUnavailable
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.store_settings import AzureSettings

METADATA, FEDERATION = "azure_vm_instance_metadata", "azure_aks_oidc_federation"
CHALLENGE = (
    "Bearer authorization_uri=https://login.microsoftonline.com/tenant/oauth2/authorize "
    "resource_id=https://storage.azure.com"
)
ASSERTION = "secret-assertion"


class Container:
    """A store that takes some tokens, keeps the bodies, and challenges requests with other tokens."""

    def __init__(self, *accepted: str):
        self.accepted = set(accepted)
        self.seen: list[str] = []
        self.bodies: list[bytes] = []

    async def __call__(self, exchange: Exchange) -> None:
        self.bodies.append(await exchange.read_body())
        self.seen.append(exchange.headers.get("authorization", ""))
        if self.seen[-1].removeprefix("Bearer ") in self.accepted:
            await exchange.answer("201 Created", ETag='"v"')
        else:
            await exchange.answer(
                "401 Unauthorized", x_ms_error_code="InvalidAuthenticationInfo", WWW_Authenticate=CHALLENGE
            )


class Cloud:
    """A container and a token service, and the stores that use them."""

    def __init__(self, resources, url, certificate, service, container):
        self._resources = resources
        self._url = url
        self._certificate = certificate
        self.service = service
        self.container = container

    async def store(self, source=METADATA, **changes) -> AzureStore:
        values = {"storage_account": "account", "container": "archive", "endpoint": self._url}
        values |= {"credentials": source, "trust_file": str(self._certificate)}
        store = await AzureStore.open(AzureSettings(**values | changes))
        self._resources.push_async_callback(store.close)
        return store


@pytest.fixture
def cloud(server_tls, certificate, monkeypatch, tmp_path):
    """Return a function that starts a container, and both token services with one handler behind them."""

    @asynccontextmanager
    async def start(service: TokenService, *accepted: str):
        service.client_ids |= {"application"}
        service.assertion = service.assertion or ASSERTION
        token_file = tmp_path / "federated-token"
        token_file.write_text(ASSERTION)
        container = Container(*accepted)
        async with AsyncExitStack() as resources:
            metadata_url = await resources.enter_async_context(serving(service))
            authority = await resources.enter_async_context(serving(service, tls=server_tls))
            url = await resources.enter_async_context(serving(container, tls=server_tls))
            monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", metadata_url)
            monkeypatch.setenv("AZURE_AUTHORITY_HOST", authority)
            monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
            monkeypatch.setenv("AZURE_CLIENT_ID", "application")
            monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(token_file))
            yield Cloud(resources, url, certificate, service, container)

    return start


@pytest.fixture
def advance(monkeypatch):
    """Return a function that sets the wall clock forward; timers do not notice."""
    offset, real = [0.0], time.time
    # The SDK compares a token's expiry with the wall clock of the system, and takes no other.
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])

    def by(seconds: float) -> None:
        offset[0] += seconds

    return by


async def put(store: AzureStore, data: bytes = b"content") -> None:
    await store.put("key", data, crc32c=crc32c(data))


@pytest.mark.parametrize("source", [METADATA, FEDERATION])
async def test_one_token_serves_many_requests(cloud, source):
    """Requests at the same time and after each other show one token, asked for once."""
    async with cloud(TokenService(), "secret-token-1") as here:
        store = await here.store(source)
        await asyncio.gather(*(put(store) for _ in range(8)))
        await put(store)
    assert set(here.container.seen) == {"Bearer secret-token-1"}
    assert here.service.requests == 1


@pytest.mark.parametrize("source", [METADATA, FEDERATION])
async def test_end_of_the_token_is_known(cloud, source):
    """A store knows the end of its token from the first request on, as the token service gave it."""
    async with cloud(TokenService(), "secret-token-1") as here:
        store = await here.store(source)
        assert store.credentials_end is None
        await put(store)
        assert store.credentials_end > time.time()


async def test_user_assigned_identity_is_asked_for_by_its_client_id(cloud):
    """The metadata service is asked for the identity with that client id, even if the machine has none."""
    service = TokenService(has_own_identity=False, client_ids={"my-identity"})
    async with cloud(service, "secret-token-1") as here:
        await put(await here.store(managed_identity_id="my-identity"))
    assert service.issued == ["secret-token-1"]


@pytest.mark.parametrize("source", [METADATA, FEDERATION])
async def test_token_is_refreshed_before_it_expires(cloud, advance, source):
    """Four minutes before its end a token is replaced, while requests go on."""
    async with cloud(TokenService(), "secret-token-1", "secret-token-2") as here:
        store = await here.store(source)
        await put(store)
        advance(3600 - 240)
        await asyncio.gather(*(put(store) for _ in range(8)))
    assert here.container.seen[0] == "Bearer secret-token-1"
    assert here.container.seen[-1] == "Bearer secret-token-2"
    assert here.service.requests == 2


@pytest.mark.parametrize("source", [METADATA, FEDERATION])
async def test_token_that_cannot_be_refreshed_is_used_to_its_end(cloud, advance, source):
    """A token service that is down does no harm while the old token is good."""
    async with cloud(TokenService(), "secret-token-1") as here:
        store = await here.store(source)
        await put(store)
        here.service.refusal = ("503 Service Unavailable", b"{}", {})
        advance(3600 - 240)
        await put(store)
        assert here.service.requests == 2
        advance(300)
        with pytest.raises(StorageUnavailable):
            await put(store)


@pytest.mark.parametrize("source", [METADATA, FEDERATION])
async def test_rejected_token_is_replaced_and_the_request_sent_again(cloud, slice_of, source):
    """A token that the store rejects before its time is replaced by a fresh one, and the file sent anew."""
    data = random.Random(1).randbytes(3 << 20)
    async with cloud(TokenService(), "secret-token-2") as here:
        store = await here.store(source)
        info = await store.put("key", slice_of(data), crc32c=crc32c(data))
    assert info.version == '"v"'
    assert here.container.bodies == [data, data]
    assert here.container.seen == ["Bearer secret-token-1", "Bearer secret-token-2"]


async def test_identity_that_is_never_accepted_is_denied_without_a_storm(cloud):
    """A call is denied if fresh tokens are rejected as well, and the token service is left alone."""
    async with cloud(TokenService()) as here:
        store = await here.store()
        for _ in range(5):
            with pytest.raises(StorageDenied, match="InvalidAuthenticationInfo"):
                await put(store)
    assert here.service.requests == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [
        pytest.param("400 Bad Request", StorageDenied, id="refused"),
        pytest.param("403 Forbidden", StorageDenied, id="forbidden"),
        pytest.param("404 Not Found", StorageUnavailable, id="being-updated"),
        pytest.param("410 Gone", StorageUnavailable, id="being-upgraded"),
        pytest.param("429 Too Many Requests", StorageUnavailable, id="too-many"),
        pytest.param("500 Internal Server Error", StorageUnavailable, id="failed"),
        pytest.param("200 OK", StorageUnavailable, id="nonsense"),
    ],
)
@pytest.mark.parametrize("source", [METADATA, FEDERATION])
async def test_failure_of_the_token_service_is_told_apart_from_a_refusal(cloud, source, status, error):
    """A refusal is for an operator, anything else for another try; either is one request."""
    document = b'{"error": "some_code", "error_description": "said the service"}'
    async with cloud(TokenService(refusal=(status, document, {"Retry_After": "7"}))) as here:
        store = await here.store(source)
        with pytest.raises(error, match=source) as caught:
            await put(store)
    assert type(caught.value) is error
    assert here.service.requests == 1
    assert here.container.seen == []
    if error is StorageUnavailable:
        assert caught.value.retry_after_seconds == 7
        assert not caught.value.outcome_unknown
    else:
        assert caught.value.hint
        assert caught.value.may_pass


async def test_unknown_identity_names_the_setting(cloud):
    """An identity that the machine does not have is denied, with a hint at the property."""
    async with cloud(TokenService()) as here:
        with pytest.raises(StorageDenied, match="cloud_storage_azure_managed_identity_id"):
            await put(await here.store(managed_identity_id="not-mine"))


async def test_metadata_service_that_is_not_there_is_unavailable(cloud, monkeypatch):
    """A call is worth another try if no metadata service answers: the machine may have just started."""
    async with cloud(TokenService()) as here:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", NOBODY)
        with pytest.raises(StorageUnavailable, match=METADATA):
            await put(await here.store())


async def test_missing_assertion_is_unavailable(cloud, monkeypatch, tmp_path):
    """A token file that Kubernetes has not projected yet is worth another try."""
    async with cloud(TokenService()) as here:
        monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "not-there"))
        with pytest.raises(StorageUnavailable, match="not-there"):
            await put(await here.store(FEDERATION))


async def test_rotated_assertion_is_read_again(cloud, advance, tmp_path):
    """A later exchange shows what the token file holds then."""
    async with cloud(TokenService(), "secret-token-1", "secret-token-2") as here:
        store = await here.store(FEDERATION)
        await put(store)
        (tmp_path / "federated-token").write_text("rotated")
        here.service.assertion = "rotated"
        advance(3700)
        await put(store)
    assert here.container.seen[-1] == "Bearer secret-token-2"


@pytest.mark.parametrize(
    ("variable", "value", "match"),
    [
        pytest.param("AZURE_TENANT_ID", "", "AZURE_TENANT_ID", id="tenant"),
        pytest.param("AZURE_CLIENT_ID", "", "AZURE_CLIENT_ID", id="client"),
        pytest.param("AZURE_FEDERATED_TOKEN_FILE", "", "AZURE_FEDERATED_TOKEN_FILE", id="file"),
        pytest.param("AZURE_AUTHORITY_HOST", "http://login", "TLS", id="authority"),
    ],
)
async def test_federation_needs_its_environment(cloud, monkeypatch, variable, value, match):
    """A variable that Kubernetes should have set is a fault of the configuration, named at the start."""
    async with cloud(TokenService()) as here:
        monkeypatch.setenv(variable, value)
        with pytest.raises(ConfigError, match=match):
            await here.store(FEDERATION)


async def test_identity_is_refused_without_tls(cloud):
    """A token is never sent in the clear."""
    async with cloud(TokenService()) as here:
        with pytest.raises(ConfigError, match="TLS"):
            await here.store(endpoint="http://127.0.0.1:1")


@pytest.mark.parametrize("source", [METADATA, FEDERATION])
async def test_tokens_reach_no_log_and_no_error(cloud, caplog, source):
    """Everything logged at any level, and every traceback, is free of tokens and assertions."""
    caplog.set_level(logging.DEBUG)
    texts = []
    async with cloud(TokenService()) as here:
        store = await here.store(source)
        for refusal in (None, ("400 Bad Request", b'{"error": "code"}', {})):
            here.service.refusal = refusal
            with pytest.raises(StorageDenied) as caught:
                await put(store)
            texts += traceback.format_exception(caught.value)
    assert here.container.seen
    texts += [record.getMessage() + repr(record.args) for record in caplog.records]
    assert len(caplog.records) > 3
    assert "secret" not in "".join(texts)


@pytest.mark.parametrize("key", [None, "", "no base64, but secret"])
async def test_unusable_shared_key_is_refused_without_being_shown(key):
    """A key that is missing or damaged is a fault of the configuration; the message does not quote it."""
    settings = AzureSettings(storage_account="account", container="archive", shared_key=key)
    with pytest.raises(ConfigError, match="cloud_storage_azure_shared_key") as caught:
        await AzureStore.open(settings)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_shared_key_is_not_printed():
    """The settings can be logged."""
    assert "hush" not in repr(AzureSettings(storage_account="a", container="c", shared_key="hush"))
