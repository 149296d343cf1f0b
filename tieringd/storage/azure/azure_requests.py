"""
One signed request to a container and its whole response.

The SDK's client signs, dates and sends; our requests go through its pipeline unchanged. The client's own
operations are not used: `upload_blob` reads a file into one bytes object, `download_blob` repeats and
splits requests by itself, both build a client for every key, and listings are parsed on the loop's
thread. Retries are off here: one call is one request. The one exception is a token that the store
rejects: it is replaced by a fresh one, and the request is sent again.
"""

from __future__ import annotations

import io
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from azure.core.pipeline.transport import AioHttpTransport
from azure.core.rest import HttpRequest
from azure.storage.blob import BlobSasPermissions, generate_blob_sas
from azure.storage.blob.aio import ContainerClient

from tieringd.errors import ConfigError, StorageUnavailable
from tieringd.storage.azure.body import CheckedBody
from tieringd.storage.azure.credentials import Identity, open_identity, shared_key_credential
from tieringd.storage.azure.errors import AzureCall, from_answer, translated
from tieringd.storage.calls import send_once
from tieringd.storage.receive import receive
from tieringd.storage.store_settings import AzureSettings
from tieringd.storage.store_times import StoreTimes
from tieringd.storage.threads import body_threads
from tieringd.storage.tls_transport import TlsConnector

API_VERSION = "2023-11-03"
"""Old enough for every service, appliance and emulator; new enough for every feature used here."""

_USER_AGENT = "tieringd"
_STORAGE_SCOPE = "https://storage.azure.com/.default"
_READABLE_FOR = timedelta(hours=1)
_IN_ONE_PIECE_BYTES = 1 << 20  # aiohttp writes larger bytes in one go, and warns that it stalls the loop.


@dataclass(frozen=True, slots=True)
class AzureResponse:
    """The service's response, read to its end."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class Requests:
    """Requests to one container. Build it with `open`, inside the loop that uses it."""

    def __init__(
        self,
        settings: AzureSettings,
        client: ContainerClient,
        resources: AsyncExitStack,
        identity: Identity | None,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self.stall_seconds = settings.read_timeout_seconds
        self.executor = body_threads(settings.max_connections, name="tieringd-azure")
        """Threads that move the bytes of large bodies; at most as many as connections."""
        resources.callback(self.executor.shutdown, wait=False)
        self._base_url = client.url
        self._account_url = f"{self._base_url.rpartition('/')[0]}/"
        # The SDK has no public way to send a custom request.
        self._pipeline: Any = client._pipeline  # noqa: SLF001
        self.times = StoreTimes()
        """Notes the Date header of every response."""

    @classmethod
    async def open(cls, settings: AzureSettings, resources: AsyncExitStack) -> Requests:
        """
        Build the client; *resources* closes it. Nothing is sent yet.

        Raises:
            ConfigError: The endpoint, the credentials or a file of the settings cannot be used.
        """
        endpoint, identity = endpoint_of(settings), None
        if settings.credentials == "shared_key":
            credential: Any = shared_key_credential(settings)
        elif endpoint.startswith("https://"):
            credential = identity = await open_identity(settings, resources)
        else:
            raise ConfigError(
                f"{settings.credentials} needs TLS, because anyone who reads a token can use it",
                hint="do not set cloud_storage_disable_tls, or use a shared key",
            )
        session = await resources.enter_async_context(
            aiohttp.ClientSession(
                connector=TlsConnector(
                    limit=settings.max_connections,
                    keepalive_timeout=settings.max_idle_seconds,
                    ssl=_trust(settings),
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=True,
                auto_decompress=False,
            )
        )
        send_once(session)
        transport = AioHttpTransport(
            session=session,
            session_owner=False,
            connection_timeout=settings.connect_timeout_seconds,
            read_timeout=settings.read_timeout_seconds,
        )
        try:
            client = ContainerClient(
                endpoint,
                settings.container,
                credential=credential,
                transport=transport,
                api_version=API_VERSION,
                retry_total=0,
                user_agent=_USER_AGENT,
            )
        except ValueError as error:
            raise ConfigError(
                f"the Azure client for container {settings.container} cannot be built: {error}",
                hint="check cloud_storage_api_endpoint and cloud_storage_azure_container",
            ) from error
        return cls(settings, client, resources, identity)

    @property
    def credentials_end(self) -> float | None:
        """Return when the identity's token expires, in Unix time; None without one."""
        return None if self._identity is None else self._identity.end

    async def send(
        self,
        call: AzureCall,
        method: str,
        key: str,
        *,
        accept: frozenset[int],
        headers: Mapping[str, str] | None = None,
        query: str = "",
        content: bytes | CheckedBody | None = None,
        is_of_account: bool = False,
    ) -> AzureResponse:
        """
        Send a request about the blob *key*, the container or the whole account, and read its response.

        An empty *key* means the container, or with *is_of_account* the account.

        Raises:
            TieringError: No whole response came, or its status is not in *accept*.
        """
        request = HttpRequest(
            method,
            f"{self._account_url if is_of_account else self._url_of(key)}{query}",
            headers={"x-ms-version": API_VERSION, **(headers or {})},
            content=_body(content),
        )
        if content is not None:
            request.headers["Content-Length"] = str(len(content))
        with translated(call):
            response = (await self._pipeline.run(request, stream=True)).http_response
            try:
                # Before the body is read: while a large one arrives, the date gets old.
                self.times.note_date(response.headers)
                data = await receive(
                    response.internal_response, executor=self.executor, stall_seconds=self.stall_seconds
                )
            finally:
                await response.close()
        if response.status_code not in accept:
            raise from_answer(call, response.status_code, response.headers, _said(data))
        announced = response.headers.get("Content-Length")
        if method != "HEAD" and announced is not None and int(announced) != len(data):
            raise StorageUnavailable(f"{call.subject}: received {len(data)} of {announced} bytes")
        return AzureResponse(response.status_code, response.headers, data)

    async def readable(self, key: str) -> tuple[str, dict[str, str]]:
        """
        Return a URL by which the service itself may read the blob *key*, and headers that allow it.

        The URL may contain a signature, and the headers a token: both are secrets while they are valid.
        """
        if self._identity is not None:
            token = await self._identity.held_token(_STORAGE_SCOPE)
            return self._url_of(key), {"x-ms-copy-source-authorization": f"Bearer {token}"}
        signature = generate_blob_sas(
            self._settings.storage_account,
            self._settings.container,
            key,
            account_key=self._settings.shared_key,
            permission=BlobSasPermissions(read=True),
            expiry=datetime.now(UTC) + _READABLE_FOR,
        )
        return f"{self._url_of(key)}?{signature}", {}

    def _url_of(self, key: str) -> str:
        path = f"/{quote(key, safe='/~')}" if key else ""
        return f"{self._base_url}{path}"


def endpoint_of(settings: AzureSettings) -> str:
    """
    Return the URL at which the account speaks the Blob protocol.

    An account with a hierarchical namespace speaks it too, besides the ADLS protocol of its `dfs` name.

    Raises:
        ConfigError: The endpoint is no URL of a host.
    """
    scheme = "http" if settings.disable_tls else "https"
    endpoint = settings.endpoint or f"{settings.storage_account}.blob.core.windows.net"
    if "://" not in endpoint:
        endpoint = f"{scheme}://{endpoint}"
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(
            f"the Azure endpoint {endpoint} is not the address of a host",
            hint="check cloud_storage_api_endpoint and cloud_storage_azure_adls_endpoint",
        )
    return parts._replace(netloc=parts.netloc.replace(".dfs.", ".blob.", 1)).geturl().rstrip("/")


def is_encrypted(settings: AzureSettings) -> bool:
    """Return whether requests travel over TLS."""
    return endpoint_of(settings).startswith("https://")


def _trust(settings: AzureSettings) -> ssl.SSLContext:
    if settings.trust_file is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=settings.trust_file)
    except OSError as error:  # An SSLError is one.
        raise ConfigError(
            f"cloud_storage_trust_file: {settings.trust_file} cannot be used ({error.strerror or error})"
        ) from error


def _body(content: bytes | CheckedBody | None) -> Any:
    if isinstance(content, bytes) and len(content) > _IN_ONE_PIECE_BYTES:
        return io.BytesIO(content)
    return content


def _said(document: bytes) -> str:
    """Return the first line of an error document's message, without signatures and headers it may quote."""
    _, _, rest = document.partition(b"<Message>")
    message = rest.partition(b"</Message>")[0].decode(errors="replace")
    return message.splitlines()[0].rstrip(".") if message else ""
