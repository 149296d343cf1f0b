"""
Read archived batches of one partition as a broker would return them: whole, and without a copy.

The batches lie in an open file of the cache where possible, and go from the page cache to a socket. They
begin with the batch that holds the wanted offset, or with the first one after it if the archive has a
hole there. Only batch headers are decoded.
"""

from __future__ import annotations

import asyncio
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from tieringd.archive.archive_reader import floor_position
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.kafka_wire.pieces import FileRegion, Piece
from tieringd.formats.record_batch import HEADER_BYTES, BatchHeader, encode_passage, parse_header
from tieringd.formats.restored_batches import put_first_epoch
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import AbortedTransaction, SegmentIndex
from tieringd.policies.chunk_layout import Chunk
from tieringd.reading.hydrator import WAITED_FOR_STORE, HydratedChunk, Hydrator
from tieringd.storage.at_once import cancelled
from tieringd.storage.base import FileSlice

_LAST_OFFSET_DELTA_MAX = 2**31 - 1
"""The largest delta that a batch header can hold."""


def release_nothing() -> None:
    """Do nothing: these bytes need no release."""


@dataclass(frozen=True, slots=True)
class ArchivedBatches:
    """Batches of one partition for one response. *close* is called once, after sending or on failure."""

    size_bytes: int
    close: Callable[[], None]
    next_offset: int = -1
    """The offset to read next after the batches; -1 if there are none."""
    file: FileSlice | None = None
    """The file range that holds the batches, or None."""
    data: memoryview | None = None
    """The bytes of the batches, if they are not in a file."""
    aborted: tuple[AbortedTransaction, ...] = ()
    """Every aborted transaction with data in the batches, and perhaps more of the same segment."""
    mark_corrupt: Callable[[], None] = release_nothing
    """A function to call when the file cannot be read, so that the next reader checks the file again."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the batches as parts of a response. A file's bytes are not copied."""
        if self.file is not None:
            return (FileRegion(self.file.fd, self.file.position, self.file.size_bytes, self.mark_corrupt),)
        return () if self.data is None else (self.data,)

    def aborted_pairs(self, *, read_committed: bool) -> tuple[tuple[int, int], ...] | None:
        """
        Return the producer id and first offset of each aborted transaction.

        None for a client that reads uncommitted records too.
        """
        if not read_committed:
            return None
        return tuple((one.producer_id, one.first_offset) for one in self.aborted)


NO_BATCH = ArchivedBatches(0, release_nothing)
"""Returned when the first batch is larger than the limit."""


def under_first_epoch(batches: ArchivedBatches) -> ArchivedBatches:
    """
    Return the same batches under the first leader epoch of any cluster, in memory.

    The original batches are closed: files of the cache are never changed.

    Raises:
        LocalFileError: The cached file cannot be read.
    """
    if batches.file is None and batches.data is None:
        return batches
    try:
        if batches.file is not None:
            data = bytearray(os.pread(batches.file.fd, batches.size_bytes, batches.file.position))
        else:
            data = bytearray(batches.data or b"")
    except OSError as error:
        raise LocalFileError(
            f"a cached chunk cannot be read: {error}", path="", hint="check the disk of the cache"
        ) from error
    finally:
        batches.close()
    put_first_epoch(data)
    return replace(
        batches, close=release_nothing, file=None, data=memoryview(data), mark_corrupt=release_nothing
    )


class HeldBatches:
    """The place where reading goes on, in a chunk that is held until `take` or `close`."""

    def __init__(
        self, found: HydratedChunk, index: SegmentIndex, begin: int, header: BatchHeader, *, end_offset: int
    ) -> None:
        """Hold *found* from the batch at *begin* on. No batch with an offset past *end_offset* is taken."""
        self._end_offset = end_offset
        self._found = found
        self._index = index
        self._begin = begin
        self._header = header

    @property
    def is_in_memory(self) -> bool:
        """Say whether the chunk is in memory: the cache did not take it."""
        return self._found.file is None

    def close(self) -> None:
        """Give the chunk back."""
        self._found.close()

    def take(
        self, *, size_bytes_max: int, needs_a_batch: bool, before_offset: float = math.inf
    ) -> ArchivedBatches:
        """
        Return batches of the chunk, at most *size_bytes_max*. Closing them gives the chunk back.

        If *needs_a_batch*, the first batch is returned whatever its size. No later one begins at
        *before_offset* or after it.

        Raises:
            LocalFileError: The cached file cannot be read. The next reader checks it again.
        """
        found, index, begin, header = self._found, self._index, self._begin, self._header
        chunk = found.chunk
        if header.size_bytes > size_bytes_max and not needs_a_batch:
            found.close()
            return NO_BATCH
        before_offset = min(before_offset, self._end_offset)
        end, next_offset = _last_boundary(index, chunk, begin + size_bytes_max, before_offset)
        if end < begin + header.size_bytes:
            end, next_offset = begin + header.size_bytes, header.last_offset + 1
        if chunk.next_offset > before_offset:
            end, next_offset = self._up_to(before_offset, end, next_offset, begin + size_bytes_max)
        size_bytes = end - begin
        aborted = tuple(
            one
            for one in index.aborted
            if one.last_offset >= header.base_offset and one.first_offset < chunk.next_offset
        )
        if found.file is not None:
            file = FileSlice(found.file.fd, found.file.position + begin, size_bytes)
            return ArchivedBatches(
                size_bytes, found.close, next_offset, file, aborted=aborted, mark_corrupt=found.mark_corrupt
            )
        assert found.data is not None, "a chunk is in a file or in memory"
        if size_bytes < len(found.data) // 2:
            # A view would keep the whole chunk in memory until a slow client has read it.
            data = memoryview(found.data[begin:end])
        else:
            data = memoryview(found.data)[begin:end]
        return ArchivedBatches(size_bytes, found.close, next_offset, data=data, aborted=aborted)

    def _up_to(self, before_offset: float, end: int, next_offset: int, limit: int) -> tuple[int, int]:
        """
        Return *end* and *next_offset* after the further batches that begin before *before_offset*.

        The index is sparse. These batches are in one of its intervals, and only their headers are read.
        """
        found = self._found
        try:
            while (header := _header_at(found, end)) is not None:
                is_past = header.base_offset >= before_offset or header.next_offset > self._end_offset
                if is_past or end + header.size_bytes > limit:
                    break
                end, next_offset = end + header.size_bytes, header.last_offset + 1
        except (OSError, CorruptDataError) as error:
            found.close()
            raise _unreadable(found, error) from error
        return end, next_offset


class PassageBatch:
    """A batch without records for users. It moves every client past offsets of which no record is left."""

    is_in_memory: Final = False
    """Its few bytes do not count."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def close(self) -> None:
        """Do nothing: no chunk is held."""

    def take(
        self,
        *,
        size_bytes_max: int,  # noqa: ARG002 it is tiny
        needs_a_batch: bool,  # noqa: ARG002
        before_offset: float = math.inf,  # noqa: ARG002
    ) -> ArchivedBatches:
        """Return the batch."""
        return ArchivedBatches(len(self._data), release_nothing, data=memoryview(self._data))


def passage(manifest: PartitionManifest, offset: int, *, next_offset: int) -> PassageBatch:
    """Return a batch that moves clients from *offset* to *next_offset*, or as far as one batch can."""
    last_offset = min(next_offset - 1, offset + _LAST_OFFSET_DELTA_MAX)
    # Never a negative time, which clients would ask for as one of Kafka's special ones.
    timestamp_ms = max(manifest.segments.latest_timestamp_ms or 0, 0)
    return PassageBatch(encode_passage(offset, last_offset=last_offset, timestamp_ms=timestamp_ms))


@dataclass(eq=False, slots=True, kw_only=True)
class HeldRead:
    """The batches of one partition that are held for a response, until they are taken or given back."""

    held: HeldBatches | PassageBatch | None = None
    is_history: bool = False
    """Whether they are of an older archive, perhaps of another cluster."""
    waited_for: list[str] = field(default_factory=list)
    """The chunks that were awaited from the object store."""

    @property
    def takes_memory(self) -> bool:
        """Say whether `take` returns batches in memory, not in a file of the cache."""
        return self.held is not None and (self.is_history or self.held.is_in_memory)

    def note_waits(self) -> None:
        """Note in `waited_for` what the running task awaits from now on."""
        WAITED_FOR_STORE.set(self.waited_for)

    def take(
        self, *, size_bytes_max: int, needs_a_batch: bool, before_offset: float = math.inf
    ) -> ArchivedBatches:
        """
        Take batches of what is held. The batches own it from then on; see `HeldBatches.take`.

        Raises:
            LocalFileError: The cached file cannot be read.
        """
        held, self.held = self.held, None
        if held is None:
            return NO_BATCH
        batches = held.take(
            size_bytes_max=size_bytes_max, needs_a_batch=needs_a_batch, before_offset=before_offset
        )
        return under_first_epoch(batches) if self.is_history else batches

    def close(self) -> None:
        """Give back what is held, unless it was taken."""
        held, self.held = self.held, None
        if held is not None:
            held.close()


async def unfinished_reads(
    tasks: Collection[asyncio.Task[None]],
    reads: Iterable[HeldRead],
    left_seconds: Callable[[set[asyncio.Task[None]]], float | None],
    *,
    due: asyncio.Future[None] | None = None,
) -> set[asyncio.Task[None]]:
    """
    Wait for the *tasks* of the *reads* of one Fetch, and return those that run on when the time is over.

    *left_seconds* returns how long the Fetch may wait for the given tasks; None for as long as they take.
    The time is over as well when *due* is done.
    If this is cancelled or a task fails, all tasks end and all reads are closed.
    """
    pending = set(tasks)
    try:
        while pending and not (due is not None and due.done()):
            waited: set[asyncio.Future[None]] = {*pending} if due is None else {*pending, due}
            await asyncio.wait(waited, timeout=left_seconds(pending), return_when=asyncio.FIRST_COMPLETED)
            done = {task for task in pending if task.done()}
            pending -= done
            if not done:
                break
            for task in done:
                # Raises programming errors. Errors that clients can be told are kept in the read.
                task.result()
    except BaseException:
        try:
            await cancelled(tasks)
        finally:
            # A second cancellation is raised when the tasks have ended.
            for read in reads:
                read.close()
        raise
    return pending


class PartitionReader:
    """Read archived batches. Keeps no state of a partition; reads may run concurrently."""

    def __init__(self, hydrator: Hydrator, spillovers: SpilloverManifests) -> None:
        self._hydrator = hydrator
        self._spillovers = spillovers

    async def hold(self, manifest: PartitionManifest, offset: int) -> HeldBatches | PassageBatch | None:
        """
        Hold the chunk with the batch of *offset*, or the first one after it.

        Returns None if *manifest* does not hold *offset*. Offsets at the end of a piece that have no
        records, such as a gap at the archive's end, are answered by a batch that moves clients past them.

        Raises:
            ObjectNotFound: An object was deleted. Read the manifest again.
            CorruptDataError: Stored bytes are damaged.
            StorageUnavailable: The store does not answer.
            LocalFileError: A cached file cannot be read, or a chunk fits neither the cache nor the memory.
        """
        if not manifest.start_offset <= offset < manifest.next_offset:
            return None
        manifest = await self._spillovers.piece_at(manifest, offset)
        segments, end_offset = manifest.segments, manifest.records_end
        for row in range(segments.row_at_or_after(offset), len(segments)):
            segment = segments[row]
            index = await self._hydrator.index(manifest.partition, segment)
            layout = self._hydrator.layout(index)
            at = max(offset, segment.base_offset)
            chunk = layout.holding(at)
            while chunk is not None and at < end_offset:
                is_last = layout.after(chunk) is None and row + 1 < len(segments)
                next_segment = segments[row + 1] if is_last else None
                found = await self._hydrator.open(
                    manifest.partition, segment, index, chunk, offset=at, next_segment=next_segment
                )
                held = _held(found, index, offset, end_offset=end_offset)
                if held is not None:
                    return held
                # The opened chunk may be only a part of the wanted chunk.
                at = max(at, found.chunk.next_offset)
                chunk = layout.holding(at)
        # No records follow in this piece: the rest is a gap, or was compacted away.
        return passage(manifest, offset, next_offset=manifest.next_offset)


def _held(found: HydratedChunk, index: SegmentIndex, offset: int, *, end_offset: int) -> HeldBatches | None:
    """
    Return where the batch of *offset* begins in a chunk, or the next one that has records.

    If no such batch of the chunk reaches *offset*, or it has an offset past *end_offset* (exclusive), the
    chunk is given back and None is returned.

    Raises:
        LocalFileError: The cached file cannot be read. The next reader checks it again.
    """
    is_held = False
    try:
        begin = max(0, floor_position(index, offset) - found.chunk.position)
        header = _header_at(found, begin)
        # Compaction leaves a batch without records for a producer. KafkaJS does not go on behind it alone.
        while header is not None and (header.last_offset < offset or not header.record_count):
            begin += header.size_bytes
            header = _header_at(found, begin)
        if header is None or header.next_offset > end_offset:
            return None
        is_held = True
        return HeldBatches(found, index, begin, header, end_offset=end_offset)
    except (OSError, CorruptDataError) as error:
        raise _unreadable(found, error) from error
    finally:
        if not is_held:
            found.close()


def _unreadable(found: HydratedChunk, error: Exception) -> LocalFileError:
    """Have the next reader check the chunk, and return the error for this one."""
    found.mark_corrupt()
    return LocalFileError(
        f"a cached chunk cannot be read: {error}",
        path=str(found.chunk),
        hint="check the disk of the cache",
    )


def _last_boundary(index: SegmentIndex, chunk: Chunk, limit: int, before_offset: float) -> tuple[int, int]:
    """
    Return the last position within *chunk* up to *limit* where a batch begins, and the offset there.

    Positions are relative to the chunk's first byte. The offset is *before_offset* at most.
    """
    row = len(index.entries)
    if chunk.next_offset > before_offset:
        row = bisect_right(index.entries, before_offset, key=lambda entry: entry.offset)
    elif limit >= chunk.size_bytes:
        return chunk.size_bytes, chunk.next_offset
    row = min(row, bisect_right(index.entries, chunk.position + limit, key=lambda entry: entry.position)) - 1
    if row < 0:
        return 0, chunk.base_offset
    return index.entries[row].position - chunk.position, index.entries[row].offset


def _header_at(found: HydratedChunk, position: int) -> BatchHeader | None:
    """Return the header of the batch at *position* of a chunk, or None at the chunk's end."""
    if position >= found.chunk.size_bytes:
        return None
    if found.file is not None:
        return parse_header(os.pread(found.file.fd, HEADER_BYTES, found.file.position + position))
    assert found.data is not None, "a chunk is in a file or in memory"
    return parse_header(memoryview(found.data)[position : position + HEADER_BYTES])
