"""
Azure Blob storage and ADLS Gen2, through azure-storage-blob.

Versions are ETags. Retries are off (`storage.resilient` retries).

Verification: the service keeps no CRC32C, so it is kept in the blob's metadata, written by the same
request as the blob, and `get` compares it with the bytes that arrive. A put compares the announced
checksum with the bytes as they are read, and never sends the end of a file that differs: nothing is
stored. On the way, TLS authenticates every record. Bytes in memory, and files sent without TLS, carry an
MD5 that the service compares; its response reports the MD5 of the bytes that arrived, and is compared as
well. Files over TLS carry no MD5: an MD5 of every segment would cost more of the broker's CPU time than
all the rest of an upload, and would find nothing more.

Large files are sent as blocks, which one last request makes a blob. No listing shows the blocks of a
failed upload, and the service drops them after a week.

With a hierarchical namespace, directories are left out of listings, and a key cannot be both an object
and the beginning of another's path.

`soft_delete` reads from the account's properties whether the account keeps deleted blobs.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from xml.etree import ElementTree as ET

from crc32c import crc32c as crc32c_of

from tieringd.clock import wall_clock_ms
from tieringd.errors import ChecksumRejected, ObjectNotFound, StorageError, StorageUnavailable, TieringError
from tieringd.formats.crc32c_combine import combined_crc32c
from tieringd.storage.azure.azure_requests import AzureResponse, Requests, is_encrypted
from tieringd.storage.azure.body import CheckedBody, md5_of
from tieringd.storage.azure.errors import AzureCall
from tieringd.storage.azure.joining import BlockCopies
from tieringd.storage.azure.listing import Listing, parse_crc32c
from tieringd.storage.base import (
    Body,
    Condition,
    FileSlice,
    IfAbsent,
    Joined,
    JoinSource,
    ListPage,
    ObjectInfo,
)
from tieringd.storage.calls import require, require_whole
from tieringd.storage.receive import ranged
from tieringd.storage.store_settings import AzureSettings
from tieringd.storage.store_times import date_ms

_OK = frozenset({200})
_CREATED = frozenset({201})
_RANGE = frozenset({200, 206, 416})
_GONE = frozenset({202})
_IN_THREAD_FROM_BYTES = 1 << 20  # Less is hashed in less time than a thread takes to start.


def soft_delete(document: bytes) -> tuple[str, ...]:
    """
    Return, for people, how deleted blobs are kept; empty where they are not.

    *document* is the response to Get Blob Service Properties.

    Raises:
        StorageUnavailable: The document is not XML.
    """
    try:
        properties = ET.fromstring(document.removeprefix(b"\xef\xbb\xbf"))  # noqa: S314 - TLS and our service
        policy = properties.find("DeleteRetentionPolicy")
    except ET.ParseError as error:
        raise StorageUnavailable(f"the account's properties are not XML ({error})") from error
    if policy is None or policy.findtext("Enabled") != "true":
        return ()
    return (f"soft delete keeps deleted blobs for {policy.findtext('Days')} days",)


class AzureStore:
    """A container of an Azure storage account. Build it with `open`, inside the loop that uses it."""

    has_own_clock = True

    def __init__(self, settings: AzureSettings, requests: Requests, resources: AsyncExitStack) -> None:
        self._settings = settings
        self._container = settings.container
        self._prefix = f"{settings.prefix.strip('/')}/" if settings.prefix.strip("/") else ""
        self._is_encrypted = is_encrypted(settings)
        self._requests = requests
        self._resources = resources
        self._copies = BlockCopies(requests, container=self._container, key_prefix=self._prefix)
        self._listing = Listing(requests, container=self._container, key_prefix=self._prefix)

    @classmethod
    async def open(cls, settings: AzureSettings) -> AzureStore:
        """
        Build the client. Nothing is sent yet.

        Raises:
            ConfigError: The endpoint, the credentials or a file of the settings cannot be used.
        """
        async with AsyncExitStack() as resources:
            requests = await Requests.open(settings, resources)
            return cls(settings, requests, resources.pop_all())
        raise AssertionError("an exit stack swallows nothing")

    @property
    def credentials_end(self) -> float | None:
        """Return when the credentials expire; see `ExpiringStore`."""
        return self._requests.credentials_end

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object: in one request, or in blocks when it is large."""
        call = AzureCall("put", self._container, key, is_conditional_put=condition is not None)
        headers = self._blob_headers(crc32c, condition)
        if isinstance(body, FileSlice) and body.size_bytes:
            size_bytes = body.size_bytes
            if size_bytes <= self._settings.single_put_bytes:
                answer, _ = await self._put_file(call, body, "", headers, checksum_before=0, expected=crc32c)
            else:
                answer = await self._put_blocks(call, body, crc32c, headers)
        else:
            data = b"" if isinstance(body, FileSlice) else body
            answer, size_bytes = await self._put_bytes(call, data, crc32c, headers), len(data)
        return _stored(call, key, size_bytes, answer, crc32c)

    def _blob_headers(self, crc32c: int, condition: Condition | None) -> dict[str, str]:
        headers = {
            "x-ms-blob-type": "BlockBlob",
            "Content-Type": "application/octet-stream",
            "x-ms-meta-crc32c": f"{crc32c:08x}",
        }
        if self._settings.access_tier is not None:
            headers["x-ms-access-tier"] = self._settings.access_tier
        if condition is not None:
            name, value = (
                ("If-None-Match", "*") if isinstance(condition, IfAbsent) else ("If-Match", condition.version)
            )
            headers[name] = value
        return headers

    async def _put_bytes(
        self, call: AzureCall, data: bytes, crc32c: int, headers: dict[str, str]
    ) -> AzureResponse:
        checksum, md5 = (
            _checksums(data)
            if len(data) < _IN_THREAD_FROM_BYTES
            else await asyncio.to_thread(_checksums, data)
        )
        if checksum != crc32c:
            raise _rejected(call)
        call.may_have_effect = lambda: True
        headers["Content-MD5"] = _base64(md5)
        answer = await self._requests.send(
            call, "PUT", self._prefix + str(call.key), headers=headers, content=data, accept=_CREATED
        )
        _require_md5(call, answer, headers)
        return answer

    async def _put_file(
        self,
        call: AzureCall,
        file_slice: FileSlice,
        query: str,
        headers: Mapping[str, str],
        *,
        checksum_before: int,
        expected: int | None,
    ) -> tuple[AzureResponse, int]:
        """Send a file, or a block of one. Return the response, and the checksum up to its end."""
        if not self._is_encrypted:
            md5 = await md5_of(file_slice, executor=self._requests.executor)
            headers = {**headers, "Content-MD5": _base64(md5)}
        body = CheckedBody(
            file_slice,
            executor=self._requests.executor,
            stall_seconds=self._requests.stall_seconds,
            checksum_before=checksum_before,
            expected=expected,
        )
        if not query:
            call.may_have_effect = lambda: body.is_sent
        try:
            answer = await self._requests.send(
                call,
                "PUT",
                self._prefix + str(call.key),
                query=query,
                headers=headers,
                content=body,
                accept=_CREATED,
            )
        except StorageUnavailable as error:
            if body.failure is not None:
                raise body.failure from error
            if body.is_rejected:
                raise _rejected(call) from error
            raise
        finally:
            await body.stop()
        _require_md5(call, answer, headers)
        return answer, body.checksum

    async def _put_blocks(
        self, call: AzureCall, file_slice: FileSlice, crc32c: int, headers: dict[str, str]
    ) -> AzureResponse:
        """Upload blocks one after the other, and make them a blob. The last request has the condition."""
        names, checksum = list[str](), 0
        upload = os.urandom(12)
        end = file_slice.position + file_slice.size_bytes
        staging = AzureCall(call.operation, call.bucket, call.key)
        for position in range(file_slice.position, end, self._settings.block_bytes):
            part = FileSlice(file_slice.fd, position, min(self._settings.block_bytes, end - position))
            names.append(_block_name(upload, len(names)))
            _, checksum = await self._put_file(
                staging,
                part,
                f"?comp=block&blockid={names[-1]}",
                {"Content-Type": "application/octet-stream"},
                checksum_before=checksum,
                expected=crc32c if position + part.size_bytes == end else None,
            )
        return await self._commit_blocks(call, names, headers)

    async def _commit_blocks(
        self, call: AzureCall, names: Sequence[str], headers: dict[str, str]
    ) -> AzureResponse:
        blocks = "".join(f"<Uncommitted>{name}</Uncommitted>" for name in names)
        headers = {
            **{name: value for name, value in headers.items() if name != "x-ms-blob-type"},
            "Content-Type": "application/xml",
            "x-ms-blob-content-type": "application/octet-stream",
        }
        call.may_have_effect = lambda: True
        return await self._requests.send(
            call,
            "PUT",
            self._prefix + str(call.key),
            query="?comp=blocklist",
            headers=headers,
            content=f'<?xml version="1.0" encoding="utf-8"?><BlockList>{blocks}</BlockList>'.encode(),
            accept=_CREATED,
        )

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """Store a blob of blocks that the service copies; None if the service refuses to."""
        if not self._copies.can_copy:
            return None
        upload = os.urandom(12)
        names = [_block_name(upload, number) for number in range(len(sources))]
        is_proven = await self._copies.stage(key, sources, names)
        if is_proven is None:
            return None
        if combined_crc32c((source.crc32c, source.size_bytes) for source in sources) != crc32c:
            raise ChecksumRejected(
                f"join {key}: the checksum of the sources is not the expected one", key=key
            )
        call = AzureCall("join", self._container, key, is_conditional_put=condition is not None)
        answer = await self._commit_blocks(call, names, self._blob_headers(crc32c, condition))
        size_bytes = sum(source.size_bytes for source in sources)
        return Joined(_stored(call, key, size_bytes, answer, crc32c), is_proven=is_proven, host_bytes=0)

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object whole. Its checksum is verified if the blob has one."""
        call = AzureCall("get", self._container, key)
        answer = await self._requests.send(call, "GET", self._prefix + key, accept=_OK)
        require_whole(call, len(answer.data), answer.headers)
        info = _info(call, key, answer.headers, size_bytes=len(answer.data))
        if info.crc32c is not None and await _crc32c(answer.data) != info.crc32c:
            raise StorageUnavailable(f"{call.subject}: the received bytes have a wrong checksum")
        return answer.data, info

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range in one request."""
        if size_bytes == 0:
            await self.head(key)
            return b""
        call = AzureCall("get_range", self._container, key)
        wanted = {"x-ms-range": f"bytes={position}-{position + size_bytes - 1}"}
        answer = await self._requests.send(call, "GET", self._prefix + key, headers=wanted, accept=_RANGE)
        return ranged(
            call,
            answer.data,
            status=answer.status,
            headers=answer.headers,
            position=position,
            size_bytes=size_bytes,
        )

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size, version and checksum."""
        call = AzureCall("head", self._container, key)
        answer = await self._requests.send(call, "HEAD", self._prefix + key, accept=_OK)
        size_bytes = int(require(call, answer.headers, "Content-Length"))
        return _info(call, key, answer.headers, size_bytes=size_bytes)

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return one page of a listing."""
        return await self._listing.page(prefix, start_after=start_after, limit=limit)

    async def delete_many(self, keys: Sequence[str]) -> None:
        """
        Delete objects, one request each, as many at a time as there are connections.

        Raises:
            TieringError: Some objects were not deleted. It is one object's error, with a count of all in
                its hint.
        """
        left = iter(keys)
        workers = min(len(keys), self._settings.max_connections)
        results = await asyncio.gather(*(self._delete_from(left) for _ in range(workers)))
        errors = [error for result in results for error in result]
        if errors:
            # A missing container or a denial says more than a server that was busy for one key.
            first = next((each for each in errors if isinstance(each, StorageError)), errors[0])
            first.hint = f"{len(errors)} of {len(keys)} objects were not deleted; {first.hint or 'try again'}"
            raise first

    async def _delete_from(self, keys: Iterable[str]) -> list[TieringError]:
        errors: list[TieringError] = []
        for key in keys:
            call = AzureCall("delete", self._container, key)
            try:
                await self._requests.send(call, "DELETE", self._prefix + key, accept=_GONE)
            except ObjectNotFound:
                continue
            except TieringError as error:
                errors.append(error)
        return errors

    async def kept_after_delete(self, key: str) -> tuple[str, ...]:
        """Return whether the account has soft delete and versions, and the container locks."""
        blob = await self._requests.send(
            AzureCall("head", self._container, key), "HEAD", self._prefix + key, accept=_OK
        )
        container = await self._requests.send(
            AzureCall("get container", self._container), "GET", "", query="?restype=container", accept=_OK
        )
        account = await self._requests.send(
            AzureCall("get account", self._container),
            "GET",
            "",
            query="?restype=service&comp=properties",
            accept=_OK,
            is_of_account=True,
        )
        ways = {
            "the account keeps versions: a deleted blob stays as an older version": "x-ms-version-id"
            in blob.headers,
            "an immutability policy keeps blobs": container.headers.get("x-ms-has-immutability-policy")
            == "true",
            "a legal hold keeps blobs": container.headers.get("x-ms-has-legal-hold") == "true",
        }
        return (*soft_delete(account.data), *(way for way, holds in ways.items() if holds))

    def tell_time_to(self, listener: Callable[[int | None], None]) -> None:
        """Tell *listener* the time of the service's responses."""
        self._requests.times.listen(listener)

    async def close(self) -> None:
        """Close the connections."""
        await self._resources.aclose()


def _block_name(upload: bytes, number: int) -> str:
    """Return a block's name. It is unique to the upload: two uploads of a blob must not mix their blocks."""
    return base64.urlsafe_b64encode(f"{upload.hex()}{number:06d}".encode()).decode()


def _checksums(data: bytes) -> tuple[int, bytes]:
    return crc32c_of(data), hashlib.md5(data, usedforsecurity=False).digest()


async def _crc32c(data: bytes) -> int:
    if len(data) < _IN_THREAD_FROM_BYTES:
        return int(crc32c_of(data))
    return int(await asyncio.to_thread(crc32c_of, data))


def _require_md5(call: AzureCall, answer: AzureResponse, headers: Mapping[str, str]) -> None:
    """
    Compare the MD5 that was sent with the one in the response, if both are there.

    Raises:
        StorageUnavailable: They differ.
    """
    sent, told = headers.get("Content-MD5"), answer.headers.get("Content-MD5")
    if sent is not None and told is not None and told != sent:
        raise StorageUnavailable(
            f"{call.subject}: the service has other bytes than it was sent",
            outcome_unknown=call.may_have_effect(),
        )


def _rejected(call: AzureCall) -> ChecksumRejected:
    return ChecksumRejected(
        f"{call.subject}: the checksum of the bytes is not the expected one",
        key=call.key,
        hint="nothing was stored",
    )


def _info(call: AzureCall, key: str, headers: Mapping[str, str], *, size_bytes: int) -> ObjectInfo:
    checksum = parse_crc32c(headers.get("x-ms-meta-crc32c"))
    return ObjectInfo(key, size_bytes, require(call, headers, "ETag"), checksum, _modified_ms(headers))


def _stored(call: AzureCall, key: str, size_bytes: int, answer: AzureResponse, crc32c: int) -> ObjectInfo:
    """Return the description of an object that the service has just stored."""
    version = require(call, answer.headers, "ETag")
    return ObjectInfo(key, size_bytes, version, crc32c, _modified_ms(answer.headers))


def _modified_ms(headers: Mapping[str, str]) -> int:
    return date_ms(headers.get("Last-Modified")) or wall_clock_ms()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
