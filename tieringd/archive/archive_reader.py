"""
Read stored segments: object, index and offset in; checked record batches out.

A read starts at the last index entry at or before the wanted offset, and fetches one chunk ahead of the
chunk that is being parsed. The CRC of every batch is checked, for every caller, and its offsets against the
index.

`SegmentIndexes` reads the index of a stored segment from its own object beside the data.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Protocol

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.batch_offsets import BatchPlace, ExpectedBatches, OffsetCheck, places_in
from tieringd.formats.object_keys import index_key
from tieringd.formats.record_batch import HEADER_BYTES, BatchHeader, check_crc, parse_header
from tieringd.formats.sidecar import decode_sidecar_of
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment, SegmentIndex
from tieringd.storage.base import ObjectStore

CHUNK_BYTES = 8 << 20
"""Large enough to make a request's fixed cost negligible, small enough to hold two chunks in memory."""
LOOKUP_BYTES = 32 << 10
"""Bytes of one request of a search among batch headers; half of what lies between two index entries."""


class Indexes(Protocol):
    """A source of the indexes of stored segments."""

    async def index_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """
        Return a stored segment's index: offsets, times, aborted transactions, epochs.

        Raises:
            ObjectNotFound: The bucket has no such segment.
            CorruptDataError: The index is damaged, or describes another object.
        """
        ...


class SegmentIndexes:
    """Read indexes from the bucket, one request for each call. Keeps no state."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def index_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """See `Indexes.index_of`."""
        key = index_key(partition, segment)
        data, _ = await self._store.get(key)
        return decode_sidecar_of(data, segment, key=key)


@dataclass(frozen=True, slots=True)
class Batch:
    """A record batch as it is stored."""

    header: BatchHeader
    data: memoryview
    """The whole batch, header included. The memory stays valid while a reference to it is held."""
    position: int
    """Byte position in the data object."""


@dataclass(frozen=True, slots=True)
class FoundHeader:
    """A batch header, and where its batch lies."""

    header: BatchHeader
    position: int
    """Byte position in the data object."""
    batch: Batch | None
    """The batch with its CRC checked; None for a batch that is larger than one request of the search."""


class ArchiveReader:
    """Read data objects of a store. Keeps no state; readers may run side by side."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def batches(
        self, key: str, index: SegmentIndex, *, from_offset: int, chunk_bytes: int = CHUNK_BYTES
    ) -> AsyncGenerator[Batch]:
        """
        Yield the batches of one data object, starting with the batch that holds *from_offset*.

        Raises:
            ObjectNotFound: The object was deleted. Read the manifest again.
            CorruptDataError: The object is shorter than its index says, a batch is damaged or has offsets
                that it cannot have, or the object was read whole and its checksum is not that in its index.
        """
        return self._batches_of(key, index, from_offset=from_offset, chunk_bytes=chunk_bytes)

    async def _batches_of(
        self, key: str, index: SegmentIndex, *, from_offset: int, chunk_bytes: int
    ) -> AsyncGenerator[Batch]:
        expected = ExpectedBatches.of_index(index)
        check, checksum = OffsetCheck(expected), 0
        begin, boundaries = floor_position(index, from_offset), batch_boundaries(index)
        async with aclosing(
            self.runs(key, begin, index.size_bytes, chunk_bytes, boundaries=boundaries)
        ) as runs:
            async for view, position in runs:
                checksum = crc32c(view, checksum)
                for batch in checked_batches(view, position, key, check):
                    if batch.header.last_offset >= from_offset:
                        yield batch
        if not begin:
            with fault_in(key):
                expected.require_checksum(checksum)

    async def batches_between(
        self,
        key: str,
        position: int,
        end: int,
    ) -> AsyncGenerator[Batch]:
        """
        Yield the batches from byte *position* up to *end*.

        This is for objects without an index: nothing tells whether the batches' offsets are right.

        Raises:
            ObjectNotFound: The object was deleted. Read the manifest again.
            CorruptDataError: The object is shorter than *end*, *end* lies inside a batch, or a batch is
                damaged.
        """
        async for view, start in self.runs(key, position, end):
            for batch in checked_batches(view, start, key):
                yield batch

    async def headers(
        self, key: str, index: SegmentIndex, *, from_offset: int, lookup_bytes: int = LOOKUP_BYTES
    ) -> AsyncGenerator[FoundHeader]:
        """
        Yield the batch headers of one data object, from the last index entry at or before *from_offset* on.

        For a search that ends after a few batches: *lookup_bytes* are read at a time, nothing is fetched
        ahead, and of a larger batch only the beginning is read.

        Raises:
            ObjectNotFound: The object was deleted. Read the manifest again.
            CorruptDataError: The object is shorter than its index says, or a batch is damaged.
        """
        boundaries, end = batch_boundaries(index), index.size_bytes
        at = start = floor_position(index, from_offset)
        data = memoryview(b"")
        while at < end:
            if at + HEADER_BYTES > start + len(data):
                data, start = memoryview(await self._fetch(key, at, min(lookup_bytes, end - at))), at
            try:
                header = parse_header(data, at - start)
            except CorruptDataError as error:
                raise error.located(key) from error
            _require_possible(key, at, header.size_bytes, end, boundaries)
            if at + header.size_bytes <= start + len(data):
                (batch,) = checked_batches(data[at - start :][: header.size_bytes], at, key)
                yield FoundHeader(header, at, batch)
            elif at > start and header.size_bytes <= lookup_bytes:
                data = data[:0]
                continue
            else:
                yield FoundHeader(header, at, None)
            at += header.size_bytes

    async def runs(
        self,
        key: str,
        position: int,
        end: int,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        boundaries: Sequence[int] = (),
    ) -> AsyncGenerator[tuple[memoryview, int]]:
        """
        Yield the bytes from *position* up to *end* as runs of whole batches, each with its position.

        One run is fetched ahead. Only the sizes in the batch headers are read; no CRC is checked. A batch
        whose size cannot be true is refused at once, after the batches before it: a damaged size would
        otherwise gather the rest of the object in memory.

        Args:
            key: The data object.
            position: Where a batch begins.
            end: Where a batch ends.
            chunk_bytes: Bytes of one request.
            boundaries: Positions at which batches are known to begin, ascending (`batch_boundaries`). No
                batch reaches over one of them.

        Raises:
            ObjectNotFound: The object was deleted. Read the manifest again.
            CorruptDataError: The object is shorter than *end* (after the batches before the cut), a
                batch would reach over *end* or over one of
                *boundaries*, or *end* lies inside a batch's header.
        """
        held: list[bytes] = []
        """The beginning of a batch that is not whole yet, in pieces."""
        held_bytes, needed_bytes = 0, HEADER_BYTES
        ahead: asyncio.Task[bytes] | None = None
        fetched_to = position
        try:
            while fetched_to < end:
                size_bytes = min(chunk_bytes, end - fetched_to)
                if ahead is None:
                    chunk = await self._fetch(key, fetched_to, size_bytes)
                else:
                    chunk = await ahead
                fetched_to += len(chunk)
                following = min(chunk_bytes, end - fetched_to)
                ahead = (
                    asyncio.get_running_loop().create_task(self._fetch(key, fetched_to, following))
                    if following and len(chunk) == size_bytes
                    else None
                )
                held.append(chunk)
                held_bytes += len(chunk)
                is_cut = len(chunk) < size_bytes
                if held_bytes < needed_bytes and not is_cut:
                    continue
                data = held[0] if len(held) == 1 else b"".join(held)
                start = fetched_to - held_bytes
                whole = whole_batches_bytes(data)
                if whole:
                    yield memoryview(data)[:whole], start
                if is_cut:
                    raise CorruptDataError(
                        f"the object ends at byte {fetched_to}: it is at least {end - fetched_to} bytes "
                        "shorter than its index says",
                        source=key,
                        position=fetched_to,
                    )
                held, held_bytes, needed_bytes = [data[whole:]], held_bytes - whole, HEADER_BYTES
                if held_bytes >= HEADER_BYTES:
                    needed_bytes = _batch_bytes(data, whole)
                    _require_possible(key, start + whole, needed_bytes, end, boundaries)
            if held_bytes:
                raise CorruptDataError(
                    f"the object is cut short inside its last batch: {held_bytes} bytes are left over",
                    source=key,
                    position=end - held_bytes,
                )
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _fetch(self, key: str, position: int, size_bytes: int) -> bytes:
        return await self._store.get_range(key, position=position, size_bytes=size_bytes)


def checked_batches(
    run: memoryview, position: int, key: str, check: OffsetCheck | None = None
) -> Iterator[Batch]:
    """
    Yield the batches of a run, which begins at byte *position* of the object *key*.

    *check* holds their offsets against the object's index, and has seen the runs before this one.

    Raises:
        CorruptDataError: A batch is damaged. The error names its position.
    """
    at = 0
    while at < len(run):
        try:
            header = parse_header(run, at)
            check_crc(run, header, at)
        except CorruptDataError as error:
            raise CorruptDataError(
                error.message, source=key, position=position + at, offset=error.offset, hint=error.hint
            ) from error
        if check is not None:
            with fault_in(key):
                check.require(BatchPlace(position + at, header.base_offset, header.next_offset))
        yield Batch(header, run[at : at + header.size_bytes], position + at)
        at += header.size_bytes


def require_offsets(run: memoryview, position: int, key: str, check: OffsetCheck) -> None:
    """
    Check the offsets of the batches of a run, and nothing else of them.

    Raises:
        CorruptDataError: A batch has offsets that it cannot have. The error names its position.
    """
    with fault_in(key):
        for place in places_in(run, position):
            check.require(place)


@contextmanager
def fault_in(key: str) -> Iterator[None]:
    """
    Name the object *key* in an error that is raised inside.

    Raises:
        CorruptDataError: The error, with the object's name.
    """
    try:
        yield
    except CorruptDataError as error:
        raise error.located(key) from error


def require_checksum(segment: RemoteSegment, checksum: int, key: str) -> None:
    """
    Check that an object that was read whole is the one its manifest names, and not other valid batches.

    Raises:
        CorruptDataError: The checksums differ.
    """
    if checksum != segment.crc32c:
        raise CorruptDataError(
            f"the object has checksum {checksum:08x}, but the manifest has {segment.crc32c:08x}", source=key
        )


def floor_position(index: SegmentIndex, offset: int) -> int:
    """Return the position of the last index entry at or before *offset*, or 0 if there is none."""
    row = bisect_right(index.entries, offset, key=lambda entry: entry.offset) - 1
    return index.entries[row].position if row >= 0 else 0


def ceiling_position(index: SegmentIndex, next_offset: int) -> int:
    """Return the position of the first index entry at or past *next_offset*, or the data's end if none is."""
    row = bisect_left(index.entries, next_offset, key=lambda entry: entry.offset)
    return index.entries[row].position if row < len(index.entries) else index.size_bytes


def offset_at_or_after_time(index: SegmentIndex, timestamp_ms: int) -> int:
    """Return an offset to start a scan from: at or before the first record at or after *timestamp_ms*."""
    earlier = [entry for entry in index.entries if entry.max_timestamp_ms < timestamp_ms]
    return earlier[-1].offset if earlier else index.base_offset


def whole_batches_bytes(data: bytes) -> int:
    """Return how many bytes at the start of *data* are whole batches."""
    at = 0
    while at + HEADER_BYTES <= len(data):
        size_bytes = _batch_bytes(data, at)
        if at + size_bytes > len(data):
            break
        at += size_bytes
    return at


def batch_boundaries(index: SegmentIndex) -> list[int]:
    """Return the positions at which the index says that batches begin, ascending."""
    return [entry.position for entry in index.entries]


def _batch_bytes(data: bytes, at: int) -> int:
    return 12 + int.from_bytes(data[at + 8 : at + 12], "big")


def _require_possible(key: str, position: int, size_bytes: int, end: int, boundaries: Sequence[int]) -> None:
    following = bisect_right(boundaries, position)
    limit = min(end, boundaries[following]) if following < len(boundaries) else end
    if position + size_bytes > limit:
        raise CorruptDataError(
            f"a batch says that it has {size_bytes} bytes, and {limit - position} are left for it: "
            "either its size is damaged, or the object is cut short",
            source=key,
            position=position,
        )
