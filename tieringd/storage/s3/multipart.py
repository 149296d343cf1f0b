"""
Objects too large for one PUT: sent in parts, which become an object at once or not at all.

Each part is a slice of the open file with a CRC32C of its own, which the server checks. Before the
object is completed, the parts' checksums are combined: they must give the checksum that the caller
announced for the whole. The server decides about the put's condition in the completing request.

An upload that fails or is cancelled is aborted. `discard_abandoned` finds the uploads of killed
processes. Until then their parts cost money, and no listing of objects shows them.
"""

from __future__ import annotations

import asyncio
import base64
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from crc32c import crc32c as crc32c_of

from tieringd.clock import wall_clock_ms
from tieringd.errors import ChecksumRejected, StorageError, StorageUnavailable
from tieringd.formats.crc32c_combine import combined_crc32c
from tieringd.storage.at_once import at_once
from tieringd.storage.base import FileSlice, truncated, unreadable
from tieringd.storage.calls import Call, require
from tieringd.storage.store_times import date_ms
from tieringd.storage.threads import finished

CHECKSUM_METADATA = "tieringd-crc32c"
"""The metadata field with the checksum of the whole object: the server's own is composed of the parts'."""

_MAX_PARTS = 10_000
_READ_BYTES = 1 << 20
_ABORT_SECONDS = 5.0
"""The longest that a cancelled or failed caller waits for the abort; `discard_abandoned` does the rest."""


class SendFile(Protocol):
    """A function that sends a request whose body is a slice of a file."""

    async def __call__(
        self, call: Call, file_slice: FileSlice, request: Callable[..., Awaitable[Any]], parameters: Any
    ) -> dict[str, Any]:
        """Return the response; raise errors of our tree."""


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    file_slice: FileSlice


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload that is under way, or whose process was killed."""

    key: str
    upload_id: str
    age_seconds: float
    """By the server's clock."""


@dataclass(frozen=True, slots=True)
class MultipartUploads:
    """The multipart uploads of one store, which lends its client, its threads and its error translation."""

    client: Any
    bucket: str
    executor: Executor
    asking: Callable[[Call], AbstractContextManager[None]]
    send_file: SendFile
    part_bytes: int

    async def put(
        self,
        call: Call,
        file_slice: FileSlice,
        *,
        place: Mapping[str, str],
        crc32c: int,
        condition: Mapping[str, str],
        attributes: Mapping[str, str],
    ) -> dict[str, Any]:
        """
        Store a slice in parts, and return the completing request's response.

        *place* names bucket and key; *attributes* tell how the object is kept.
        """
        async with self.begun(call, place=place, crc32c=crc32c, attributes=attributes) as upload:
            parts = list(_parts_of(file_slice, self.part_bytes))
            entries = await at_once(parts, lambda part: self._send_part(call, part, upload))
            _require_checksum(call, parts, entries, crc32c)
            return await self.complete(call, upload, entries, condition)
        raise AssertionError("the translation of errors swallows none")

    @asynccontextmanager
    async def begun(
        self, call: Call, *, place: Mapping[str, str], crc32c: int, attributes: Mapping[str, str]
    ) -> AsyncIterator[Mapping[str, str]]:
        """Begin an upload, and yield the parameters that identify it. It is aborted when the block fails."""
        created = await self.ask(
            step_of(call),
            self.client.create_multipart_upload,
            **place,
            **attributes,
            ChecksumAlgorithm="CRC32C",
            Metadata={CHECKSUM_METADATA: encode_crc32c(crc32c)},
        )
        upload = {**place, "UploadId": require(call, created, "UploadId")}
        try:
            yield upload
        except BaseException:
            with suppress(StorageError, StorageUnavailable, TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self.ask(step_of(call), self.client.abort_multipart_upload, **upload)
            raise

    async def discard_abandoned(
        self, prefix: str, is_ours: Callable[[str], bool], *, older_than_seconds: float
    ) -> int:
        """
        Abort uploads below *prefix* that are ours and at least that old, by the server's clock.

        Without a Date header our own clock counts. A put whose upload is aborted too soon begins anew.

        Returns the number of aborted uploads.
        """
        discarded = 0
        async for one in self.unfinished(prefix):
            if one.age_seconds >= older_than_seconds and is_ours(one.key):
                await self._discard(one.key, one.upload_id)
                discarded += 1
        return discarded

    async def unfinished(self, prefix: str) -> AsyncIterator[UnfinishedUpload]:
        """Yield the uploads below *prefix* that are not finished, also those that are under way."""
        listing = Call(f"list unfinished uploads of {prefix}*", self.bucket)
        markers: dict[str, str] = {}
        while True:
            page = await self.ask(
                listing, self.client.list_multipart_uploads, Bucket=self.bucket, Prefix=prefix, **markers
            )
            now_ms = answered_at_ms(page)
            for upload in page.get("Uploads", ()):
                age_seconds = now_ms / 1000 - require(listing, upload, "Initiated").timestamp()
                yield UnfinishedUpload(
                    require(listing, upload, "Key"), require(listing, upload, "UploadId"), age_seconds
                )
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return
            markers = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

    async def _discard(self, key: str, upload_id: str) -> None:
        await self.ask(
            Call("abort the unfinished upload of", self.bucket, key),
            self.client.abort_multipart_upload,
            Bucket=self.bucket,
            Key=key,
            UploadId=upload_id,
        )

    async def ask(self, call: Call, request: Callable[..., Awaitable[Any]], **parameters: Any) -> Any:
        """Send a request and return its response; raise errors of our tree."""
        with self.asking(call):
            return await request(**parameters)
        raise AssertionError("the translation of errors swallows none")

    async def _send_part(self, call: Call, part: _Part, upload: Mapping[str, str]) -> dict[str, Any]:
        checksum = encode_crc32c(await self._checksum(part.file_slice))
        answer = await self.send_file(
            step_of(call),
            part.file_slice,
            self.client.upload_part,
            {**upload, "PartNumber": part.number, "ChecksumCRC32C": checksum},
        )
        told = answer.get("ChecksumCRC32C", checksum)
        if told != checksum:
            raise StorageUnavailable(f"{call.subject}: the store has other bytes of a part than were sent")
        return {"PartNumber": part.number, "ETag": require(call, answer, "ETag"), "ChecksumCRC32C": checksum}

    async def _checksum(self, file_slice: FileSlice) -> int:
        stop = threading.Event()
        return await finished(self.executor.submit(_read_crc32c, file_slice, stop), on_cancel=stop.set)

    async def complete(
        self,
        call: Call,
        upload: Mapping[str, str],
        entries: list[dict[str, Any]],
        condition: Mapping[str, str],
    ) -> dict[str, Any]:
        """
        Make the parts an object, and return the response.

        *entries* are the parts in order, as the completing request lists them.
        """
        call.may_have_effect = lambda: True
        answer: dict[str, Any] = await self.ask(
            call,
            self.client.complete_multipart_upload,
            **upload,
            MultipartUpload={"Parts": entries},
            **condition,
        )
        told = answer.get("ChecksumCRC32C")
        has_all = all("ChecksumCRC32C" in entry for entry in entries)
        if told is not None and has_all and answer.get("ChecksumType") != "FULL_OBJECT":
            expected = encode_crc32c(
                crc32c_of(b"".join(base64.b64decode(entry["ChecksumCRC32C"]) for entry in entries))
            )
            if told.split("-")[0] != expected:
                raise StorageUnavailable(
                    f"{call.subject}: the store assembled other parts than were sent", outcome_unknown=True
                )
        return answer


def answered_at_ms(answer: dict[str, Any]) -> int:
    """
    Return the server's time in milliseconds since 1970, or ours if the response has no Date header.

    A response to a PUT has no modification time.
    """
    return date_ms(answer["ResponseMetadata"]["HTTPHeaders"].get("date")) or wall_clock_ms()


def encode_crc32c(value: int) -> str:
    """Return a checksum as S3's headers carry it: base64 of its four bytes, big-endian."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def decode_crc32c(text: str) -> int:
    """Return the checksum in a header's value."""
    return int.from_bytes(base64.b64decode(text), "big")


def step_of(call: Call) -> Call:
    """Return the call of an intermediate request, which has no effect that others see."""
    return Call(call.operation, call.bucket, call.key)


def _require_checksum(call: Call, parts: list[_Part], entries: list[dict[str, Any]], crc32c: int) -> None:
    """Raise `ChecksumRejected` if the parts do not combine to the announced checksum."""
    whole = combined_crc32c(
        (decode_crc32c(entry["ChecksumCRC32C"]), part.file_slice.size_bytes)
        for part, entry in zip(parts, entries, strict=True)
    )
    if whole != crc32c:
        raise ChecksumRejected(
            f"{call.subject}: the checksum of the file's bytes is not the expected one", key=call.key
        )


def _parts_of(file_slice: FileSlice, part_bytes: int) -> Iterator[_Part]:
    size = max(part_bytes, -(-file_slice.size_bytes // _MAX_PARTS))
    for number, start in enumerate(range(0, file_slice.size_bytes, size), 1):
        length = min(size, file_slice.size_bytes - start)
        yield _Part(number, FileSlice(file_slice.fd, file_slice.position + start, length))


def _read_crc32c(file_slice: FileSlice, stop: threading.Event) -> int:
    """Return the CRC32C of a slice, read through one small buffer."""
    buffer = memoryview(bytearray(min(_READ_BYTES, file_slice.size_bytes)))
    position, end = file_slice.position, file_slice.position + file_slice.size_bytes
    checksum = 0
    while position < end and not stop.is_set():
        window = buffer[: end - position]
        try:
            count = os.preadv(file_slice.fd, [window], position)
        except OSError as error:
            raise unreadable(file_slice.fd, error) from error
        if count == 0:
            raise truncated(file_slice, position)
        checksum = crc32c_of(window[:count], checksum)
        position += count
    return checksum
