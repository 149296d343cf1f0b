"""The retry table of the Azure store, in front of Microsoft's own emulator: Azurite."""

# Long: every fault of the table goes over a real connection, and some are timeouts and closed connections.

from __future__ import annotations

import json
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, ClassVar

import jwt
import pytest
from azure.core.exceptions import ResourceExistsError
from azure.storage.blob import ContainerClient
from crc32c import crc32c

from tests.contract.expiry_table import ExpiryTable, Issuer
from tests.contract.parts_table import PartsTable
from tests.contract.retry_table import MIB, SEGMENT, RetryTable, Scene, put_manifest
from tests.support.azure_metadata_server import RESOURCE, TokenService
from tests.support.azurite import ACCOUNT, KEY, AzureBucket, Azurite, require_azurite
from tests.support.certificate import write_certificate
from tests.support.fault_proxy import Answer, DamageRequest, fault_proxy
from tests.support.ports import free_ports
from tests.support.processes import Server
from tests.support.raw_http import serving
from tests.support.tls_relay import presenting, relay, trusting
from tieringd.errors import ChecksumRejected, StorageError, StorageUnavailable
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.base import IfAbsent
from tieringd.storage.store_settings import AzureSettings

if TYPE_CHECKING:
    from pathlib import Path


def said(status: str, code: str | None, **headers: str) -> Answer:
    """Return what Azure answers, or, without a code, a gateway on the way."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = f"<Error><Code>{code}</Code><Message>said the proxy</Message></Error>".encode()
    return Answer(status, body if code else b"", named | ({"x-ms-error-code": code} if code else {}))


class JwtService(TokenService):
    """Issues tokens that Azurite reads: it looks at the times, the issuer and the audience."""

    async def _issue(self, exchange) -> None:
        now = int(time.time())
        claims = {"aud": RESOURCE, "iss": "https://sts.windows.net/tenant/", "iat": now, "nbf": now - 60}
        claims |= {"exp": now + self.lifetime_seconds, "jti": str(len(self.issued))}
        self.issued.append(jwt.encode(claims, "the key of a test; Azurite does not check it"))
        document = {"access_token": self.issued[-1], "expires_in": self.lifetime_seconds}
        document |= {"resource": RESOURCE, "token_type": "Bearer"}
        await exchange.answer("200 OK", json.dumps(document).encode(), Content_Type="application/json")


class TokenIssuer(Issuer):
    """Such a service."""

    def __init__(self) -> None:
        self.tokens = JwtService()
        super().__init__(self.tokens)

    @property
    def issued(self) -> list[str]:
        """Return the tokens."""
        return self.tokens.issued


class ListedBucket(AzureBucket):
    """A bucket that also tells what is in it."""

    def keys(self) -> list[str]:
        """Return the keys below the prefix."""
        names = self._client.list_blob_names(name_starts_with=f"{self._prefix}/")
        return [name.removeprefix(f"{self._prefix}/") for name in names]


class TrustedBucket(ListedBucket):
    """A bucket on a server that speaks TLS with a certificate of its own."""

    def __init__(self, endpoint: str, *, container: str, prefix: str, certificate: Path) -> None:
        key = {"account_name": ACCOUNT, "account_key": KEY}
        self._client = ContainerClient(
            endpoint, container, credential=key, retry_total=0, connection_verify=str(certificate)
        )
        self._prefix = prefix

    def create(self) -> None:
        """Create the container, unless it exists."""
        with suppress(ResourceExistsError):
            self._client.create_container()


class TestAzureRetryTable(PartsTable, RetryTable):
    """One container for all cases, and a prefix for each."""

    refusals: ClassVar = {
        "429": said("429 Too Many Requests", "TooManyRequests"),
        "429-retry-after": said("429 Too Many Requests", "TooManyRequests", Retry_After="0"),
        "500": said("500 Internal Server Error", "InternalError"),
        "503": said("503 Server Busy", "ServerBusy"),
        "503-retry-after": said("503 Server Busy", "ServerBusy", Retry_After="0"),
    }
    in_doubt: ClassVar = {"500"}
    denial = said("403 Forbidden", "AuthorizationFailure")
    no_bucket = said("404 Not Found", "ContainerNotFound")
    wait = said("503 Server Busy", "ServerBusy", Retry_After="1")
    parts: ClassVar = {"single_put_bytes": MIB, "block_bytes": 5 * MIB}

    def is_part(self, exchange) -> bool:
        return "comp=block&" in exchange.path

    def is_join(self, exchange) -> bool:
        return "comp=blocklist" in exchange.path

    @pytest.fixture
    def server_url(self, azurite):
        return azurite.endpoint.removesuffix(f"/{ACCOUNT}")

    @pytest.fixture
    def bucket(self, azurite, prefix):
        with ListedBucket(azurite.endpoint, container="contract", prefix=prefix) as bucket:
            yield bucket

    @pytest.fixture
    def open_backend(self, azurite, prefix):
        async def opened(url: str, **changes) -> AzureStore:
            values = {"storage_account": ACCOUNT, "container": "contract", "prefix": prefix}
            values |= {"endpoint": f"{url}/{ACCOUNT}", "shared_key": azurite.key}
            return await AzureStore.open(AzureSettings(**values | changes))

        return opened

    async def test_damaged_upload_is_raised(self, here, slice_of):
        """Bytes that were damaged on their way are refused by the server; the emulator's code is its own."""
        store = await here.store()
        here.proxy.spoil(DamageRequest())
        with pytest.raises(StorageError, match="contentMD5 doesn't match"):
            await store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT))
        assert len(here.outcomes) == 1
        assert here.bucket.keys() == []

    async def test_damage_that_azure_finds_is_a_rejected_checksum(self, here, slice_of):
        """Azure's own refusal of an MD5 is final."""
        store = await here.store()
        here.proxy.spoil(said("400 Bad Request", "Md5Mismatch"))
        with pytest.raises(ChecksumRejected):
            await store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT))
        assert here.outcomes == ["ChecksumRejected"]

    @pytest.mark.parametrize(
        ("answer", "is_certain"),
        [
            pytest.param(said("503 Service Unavailable", None), False, id="503-of-a-gateway"),
            pytest.param(
                said("503 Service Unavailable", None, Retry_After="0"), False, id="with-retry-after"
            ),
            pytest.param(said("429 Too Many Requests", None), True, id="429-of-a-gateway"),
            pytest.param(said("500 Timed Out", "OperationTimedOut"), False, id="timed-out"),
        ],
    )
    async def test_commit_is_repeated_only_when_the_store_has_not_begun_it(self, here, answer, is_certain):
        """A gateway's 503 may come after the service has done the work; its 429 comes before."""
        store = await here.store()
        here.proxy.spoil(answer)
        if is_certain:
            await put_manifest(store, condition=IfAbsent())
            assert here.outcomes == ["StorageUnavailable", "ok"]
        else:
            with pytest.raises(StorageUnavailable) as caught:
                await put_manifest(store, condition=IfAbsent())
            assert caught.value.outcome_unknown
            assert here.outcomes == ["StorageUnavailable"]


class TestAzureTokens(ExpiryTable):
    """Azurite takes tokens over TLS only, so the ciphers are taken off around the proxy."""

    expired = said(
        "401 Unauthorized",
        "InvalidAuthenticationInfo",
        WWW_Authenticate="Bearer authorization_uri=https://login.microsoftonline.com/tenant/oauth2/authorize "
        f"resource_id={RESOURCE}",
    )
    # The SDK replaces a token within the attempt.
    attempts: ClassVar = ["ok"]

    @pytest.fixture(scope="class")
    @classmethod
    def certificate(cls, tmp_path_factory):
        return write_certificate(tmp_path_factory.mktemp("tls") / "server.pem")

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory, certificate):
        (port,) = free_ports(1)
        command = [
            *(str(require_azurite()), "--blobHost", "127.0.0.1", "--blobPort", str(port)),
            *("--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry", "--silent"),
            *("--oauth", "basic", "--cert", str(certificate), "--key", str(certificate)),
        ]
        output = tmp_path_factory.mktemp("azurite") / "azurite.log"
        server = Azurite(Server(command, output=output), port=port, scheme="https")
        server.launch()
        yield server
        server.stop()

    @pytest.fixture
    def bucket(self, server, prefix, certificate):
        with TrustedBucket(
            server.endpoint, container="tokens", prefix=prefix, certificate=certificate
        ) as bucket:
            bucket.create()
            yield bucket

    @pytest.fixture
    async def issuer(self, monkeypatch):
        issuer = TokenIssuer()
        async with serving(issuer) as url:
            monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", url)
            yield issuer

    @pytest.fixture
    async def here(self, server, certificate, bucket, prefix, issuer):
        async def opened(url: str, **changes) -> AzureStore:
            values = {"storage_account": ACCOUNT, "container": "tokens", "prefix": prefix}
            values |= {"endpoint": f"{url}/{ACCOUNT}", "credentials": "azure_vm_instance_metadata"}
            return await AzureStore.open(AzureSettings(**values | {"trust_file": str(certificate)} | changes))

        async with AsyncExitStack() as stack:
            plain = await stack.enter_async_context(relay(server.endpoint, connect=trusting(certificate)))
            proxy = await stack.enter_async_context(fault_proxy(plain))
            url = await stack.enter_async_context(relay(proxy.url, accept=presenting(certificate)))
            yield Scene(proxy, bucket, lambda _, **changes: opened(url, **changes), stack)
