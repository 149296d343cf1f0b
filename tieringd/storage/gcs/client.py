"""
The connection to Cloud Storage: gcloud-aio's session and token, and one function for every request.

Requests go through the library's session, not through its calls for single operations: those hold bodies
in memory, give up after 30 seconds, repeat uploads, and raise errors that contain the access token. A
response is returned whole. Tokens travel on a session of their own, so a refresh never waits for a
connection that uploads hold.

`RelatedBody` is the body of an upload: a JSON part that describes the object, and its bytes. Google
calls it a multipart upload. It is one request, whatever its size. It is the only kind of upload that
carries the checksum with the data and whose conditions the emulators honour as well. The bytes of a file
go through `FileBody`, with its rules: they never become a Python object.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.payload import Payload
from gcloud.aio.storage import Storage

from tieringd.errors import BucketNotFound, ConfigError, LocalFileError, ObjectNotFound
from tieringd.storage.body import CHUNK_BYTES, FileBody
from tieringd.storage.calls import Call, send_once
from tieringd.storage.gcs.credentials import (
    GcsToken,
    account_token,
    instance_token,
    no_token,
    read_service_account,
)
from tieringd.storage.gcs.gcs_responses import (
    GcsResponse,
    bucket_not_found,
    from_answer,
    token_refused,
    translated,
)
from tieringd.storage.receive import receive
from tieringd.storage.store_settings import GcsSettings
from tieringd.storage.store_times import StoreTimes
from tieringd.storage.threads import body_threads
from tieringd.storage.tls_transport import TlsConnector

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter


_HEADERS = {"User-Agent": "tieringd", "Accept-Encoding": "identity"}


class RelatedBody(Payload):
    """
    The body of one upload. Its owner calls `stop` when the request is over, however it ended.

    *stall_seconds* limits the time in which the peer takes no byte.
    """

    _autoclose = True  # `stop` has released everything.

    def __init__(
        self, description: Mapping[str, str], content: bytes | FileBody, *, stall_seconds: float
    ) -> None:
        # 128 random bits: no data holds them by accident, and they cannot be predicted.
        boundary = secrets.token_hex(16)
        super().__init__(content, content_type=f"multipart/related; boundary={boundary}")
        self._head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(description)}"
            f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        self._content = content
        self._stall_seconds = stall_seconds
        self._size = len(self._head) + len(content) + len(self._tail)
        self.is_sent = False
        """Whether the last byte may have left. Until then the store cannot hold the object."""

    @property
    def failure(self) -> LocalFileError | None:
        """Return why the file could not be read. aiohttp hides this error behind its own."""
        return self._content.failure if isinstance(self._content, FileBody) else None

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:  # noqa: ARG002
        """Refuse: a segment is not text."""
        raise TypeError("the body of an upload cannot be decoded")

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write everything, which is what the request's headers promise."""
        assert content_length in (None, self._size), "the Content-Length header is not the body's length"
        await self.write(writer)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """
        Write everything.

        Raises:
            LocalFileError: The file is shorter than promised, or cannot be read.
            OSError: The connection failed, or the peer took nothing for too long.
        """
        await self._send(writer, self._head)
        if isinstance(self._content, FileBody):
            await self._content.write(writer)
        else:
            await self._send(writer, self._content)
        self.is_sent = True
        await self._send(writer, self._tail)

    async def stop(self) -> None:
        """Interrupt the work under way. Afterwards no thread uses the file's descriptor."""
        if isinstance(self._content, FileBody):
            await self._content.stop()

    async def _send(self, writer: AbstractStreamWriter, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            async with asyncio.timeout(self._stall_seconds):
                await writer.write(view[start : start + CHUNK_BYTES])


class GcsClient:
    """Sends requests about one bucket. Build it with `open`, inside the loop that uses it."""

    def __init__(
        self, settings: GcsSettings, storage: Storage, token: GcsToken, resources: AsyncExitStack
    ) -> None:
        self._is_anonymous = settings.is_anonymous
        self.stall_seconds = settings.read_timeout_seconds
        self.executor = body_threads(settings.max_connections, name="tieringd-gcs")
        """Threads that move the bytes of large bodies; at most as many as connections."""
        resources.callback(self.executor.shutdown, wait=False)
        self._bucket = settings.bucket
        bucket = quote(settings.bucket, safe="")
        self.bucket_url = f"{settings.api_root}/storage/v1/b/{bucket}"
        self.objects_url = f"{settings.api_root}/storage/v1/b/{bucket}/o"
        self.uploads_url = f"{settings.api_root}/upload/storage/v1/b/{bucket}/o"
        self._storage = storage
        self._token = token
        self._resources = resources
        self.times = StoreTimes()
        """Notes the Date header of every response."""

    @classmethod
    async def open(cls, settings: GcsSettings) -> GcsClient:
        """
        Build the client. Nothing is sent yet.

        Raises:
            ConfigError: The endpoint or a file of the settings cannot be used.
        """
        _check_endpoint(settings)
        async with AsyncExitStack() as resources:
            session = await resources.enter_async_context(
                _session(settings, settings.api_root, tls=await asyncio.to_thread(_tls, settings))
            )
            token = await _token(settings, resources)
            resources.push_async_callback(token.aclose)
            # Without this flag the library takes any custom root of the API for a development server
            # without tokens.
            storage = Storage(
                token=token,
                session=session,  # type: ignore[arg-type] # Its annotations mean requests.Session here.
                api_root=settings.api_root,
                api_is_dev=settings.is_anonymous,
            )
            return cls(settings, storage, token, resources.pop_all())
        raise AssertionError("an exit stack swallows nothing")

    @property
    def credentials_end(self) -> float | None:
        """Return until when the token is used, in Unix time; None before the first token."""
        return None if self._is_anonymous else self._token.end

    def object_url(self, name: str) -> str:
        """Return the URL of an object; *name* is its name with the prefix."""
        return f"{self.objects_url}/{quote(name, safe='')}"

    async def request(
        self,
        call: Call,
        method: str,
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: RelatedBody | bytes | None = None,
        accept: frozenset[int] = frozenset(),
    ) -> GcsResponse:
        """
        Return the response, if it is a success or its status is in *accept*.

        Raises:
            TieringError: The error that any other response, or a missing one, stands for.
        """
        token = None if self._is_anonymous else await self._token.get()
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        with translated(call):
            response = await self._storage.session.request(
                method,
                url,
                {**authorization, **(headers or {})},
                auto_raise_for_status=False,
                params=params,
                data=body,
                allow_redirects=False,
            )
            async with response:
                # Before the body is read: while a large one arrives, the date gets old.
                self.times.note_date(response.headers)
                # Google sends each hash in a header of its own.
                answer = GcsResponse(
                    response.status,
                    {name.lower(): ",".join(response.headers.getall(name)) for name in response.headers},
                    await receive(response, executor=self.executor, stall_seconds=self.stall_seconds),
                )
        if token is not None:
            if answer.status == HTTPStatus.UNAUTHORIZED:
                raise token_refused(call, answer, may_recover=self._token.refused(token))
            self._token.accepted(token)
        if answer.status in accept or HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return answer
        error = from_answer(call, answer)
        if isinstance(error, ObjectNotFound) and not answer.names_the_object:
            await self.require_bucket(call)
        raise error

    async def require_bucket(self, call: Call) -> None:
        """
        Check that the bucket exists, after a 404 that may be about the bucket or the object.

        This sends a listing request, because the permissions for objects do not include reading the
        bucket's own document.

        Raises:
            BucketNotFound: The bucket does not exist.
        """
        try:
            await self.request(
                Call(call.operation, self._bucket), "GET", self.objects_url, params={"maxResults": "1"}
            )
        except BucketNotFound as error:
            raise bucket_not_found(call) from error

    async def close(self) -> None:
        """Close the connections. Closing twice is allowed."""
        await self._resources.aclose()


def _check_endpoint(settings: GcsSettings) -> None:
    parts = urlsplit(settings.api_root)
    if parts.scheme not in {"http", "https"} or not parts.hostname or " " in parts.netloc:
        raise ConfigError(f"cloud_storage_api_endpoint: {settings.endpoint} is not the address of a server")


async def _token(settings: GcsSettings, resources: AsyncExitStack) -> GcsToken:
    source = settings.credentials_source
    if source == "config_file":
        if settings.service_account_file is None:
            raise ConfigError(
                "cloud_storage_credentials_source: config_file needs the file of a service account",
                hint="set cloud_storage_gcs_credentials_file",
            )
        account = await asyncio.to_thread(read_service_account, settings.service_account_file)
        tls = await asyncio.to_thread(_tls, settings, besides_system=True)
        session = await resources.enter_async_context(_session(settings, account["token_uri"], tls=tls))
        return account_token(account, session)
    # The metadata server is on this machine's own link, so no proxy is used.
    session = await resources.enter_async_context(_session(settings, None))
    if source == "anonymous":
        return no_token(session)
    return instance_token(session, metadata_host=settings.metadata_host)


def _session(
    settings: GcsSettings, proxied_url: str | None, *, tls: ssl.SSLContext | bool = True
) -> aiohttp.ClientSession:
    session = aiohttp.ClientSession(
        connector=TlsConnector(
            ssl=tls, limit=settings.max_connections, keepalive_timeout=settings.max_idle_seconds
        ),
        timeout=aiohttp.ClientTimeout(
            total=None,
            sock_connect=settings.connect_timeout_seconds,
            sock_read=settings.read_timeout_seconds,
        ),
        headers=_HEADERS,
        cookie_jar=aiohttp.DummyCookieJar(),
        # Found once: aiohttp would search the environment, and for a .netrc, at every request.
        proxy=None if proxied_url is None else _proxy(proxied_url),
    )
    send_once(session)
    return session


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _tls(settings: GcsSettings, *, besides_system: bool = False) -> ssl.SSLContext:
    path = settings.trust_file
    try:
        context = ssl.create_default_context(cafile=None if besides_system else path)
        if besides_system and path is not None:
            context.load_verify_locations(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cloud_storage_trust_file: {path} cannot be read as PEM certificates: {error}"
        ) from error
    return context
