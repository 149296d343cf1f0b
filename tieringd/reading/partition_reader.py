"""
Reading archived batches of one partition as a broker would hand them out: whole, and without a copy.

What is returned lies in an open file of the cache wherever that is possible, and goes from the page cache
to a socket. It begins with the batch that holds the wanted offset, or with the first one after it where
the archive has a hole. Nothing is decoded but batch headers.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tieringd.archive.archive_reader import floor_position
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.record_batch import HEADER_BYTES, encode_batch, parse_header
from tieringd.formats.restored_batches import put_first_epoch
from tieringd.storage.base import FileSlice

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.archive.spillover_manifests import SpilloverManifests
    from tieringd.formats.record_batch import BatchHeader
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import AbortedTransaction, SegmentIndex
    from tieringd.policies.reading import Chunk
    from tieringd.reading.hydrator import HydratedChunk, Hydrator


NO_EPOCH = -1
"""Of a batch that no leader has written."""
_LAST_OFFSET_DELTA_MAX = 2**31 - 1
"""What a batch header holds."""


def _nothing() -> None:
    """Release what needs no release."""


@dataclass(frozen=True, slots=True)
class ArchivedBatches:
    """Batches of one partition for one answer; *close* is called once, when they were sent or given up."""

    size_bytes: int
    close: Callable[[], None]
    next_offset: int = -1
    """Where reading goes on after them; without any, nowhere."""
    file: FileSlice | None = None
    """Where they are, if they are in a file."""
    data: memoryview | None = None
    """What they are, if they are not."""
    aborted: tuple[AbortedTransaction, ...] = ()
    """Every aborted transaction with data in them; perhaps some more of the same segment."""
    mark_corrupt: Callable[[], None] = _nothing
    """To be called when the file turns out to be unreadable: the next reader fetches it again."""


NO_BATCH = ArchivedBatches(0, _nothing)
"""The first batch is larger than what was asked for."""


def under_first_epoch(batches: ArchivedBatches) -> ArchivedBatches:
    """
    Return the same batches under the first leader epoch of any cluster, in memory.

    What they were in is closed: files of the cache are never changed.
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
            f"a cached chunk cannot be read: {error}", path="", hint="look at the cache's disk"
        ) from error
    finally:
        batches.close()
    put_first_epoch(data)
    return replace(batches, close=_nothing, file=None, data=memoryview(data), mark_corrupt=_nothing)


class HeldBatches:
    """Where reading goes on, in a chunk that is held until `take` or `close`."""

    def __init__(self, found: HydratedChunk, index: SegmentIndex, begin: int, header: BatchHeader) -> None:
        self._found = found
        self._index = index
        self._begin = begin
        self._header = header

    def close(self) -> None:
        """Give the chunk back."""
        self._found.close()

    def take(self, *, size_bytes_max: int, needs_a_batch: bool) -> ArchivedBatches:
        """
        Return batches of the chunk, no more than *size_bytes_max*, and give it back with them.

        The first batch comes whatever its size, when one is needed.
        """
        found, index, begin, header = self._found, self._index, self._begin, self._header
        chunk = found.chunk
        if header.size_bytes > size_bytes_max and not needs_a_batch:
            found.close()
            return NO_BATCH
        end, next_offset = _last_boundary(index, chunk, begin + size_bytes_max)
        if end < begin + header.size_bytes:
            end, next_offset = begin + header.size_bytes, header.last_offset + 1
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
            # A view would keep the whole chunk in memory, for as long as a client takes.
            data = memoryview(found.data[begin:end])
        else:
            data = memoryview(found.data)[begin:end]
        return ArchivedBatches(size_bytes, found.close, next_offset, data=data, aborted=aborted)


class HeldGap:
    """A batch without records, on which every client goes on after what nobody has."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def close(self) -> None:
        """Give nothing back."""

    def take(self, *, size_bytes_max: int, needs_a_batch: bool) -> ArchivedBatches:  # noqa: ARG002 it is tiny
        """Return the batch."""
        return ArchivedBatches(len(self._data), _nothing, data=memoryview(self._data))


@dataclass(eq=False, slots=True, kw_only=True)
class HeldRead:
    """What is held of one partition for an answer, until it is taken or given back."""

    held: HeldBatches | HeldGap | None = None
    is_history: bool = False
    """It is of an older archive, of another cluster."""

    def take(self, *, size_bytes_max: int, needs_a_batch: bool) -> ArchivedBatches:
        """
        Take batches of what is held, which is theirs then; see `HeldBatches.take`.

        Raises:
            CorruptDataError: They cannot be brought under the first epoch.
        """
        held, self.held = self.held, None
        if held is None:
            return NO_BATCH
        batches = held.take(size_bytes_max=size_bytes_max, needs_a_batch=needs_a_batch)
        return under_first_epoch(batches) if self.is_history else batches

    def close(self) -> None:
        """Give back what is held, unless it was taken."""
        held, self.held = self.held, None
        if held is not None:
            held.close()


class PartitionReader:
    """Read archived batches. Keeps no state of a partition; reads may run side by side."""

    def __init__(self, hydrator: Hydrator, spillovers: SpilloverManifests) -> None:
        self._hydrator = hydrator
        self._spillovers = spillovers

    async def read(
        self, manifest: PartitionManifest, offset: int, *, size_bytes_max: int, needs_a_batch: bool
    ) -> ArchivedBatches | None:
        """Return batches from *offset* on; see `hold` and `HeldBatches.take`."""
        held = await self.hold(manifest, offset)
        if held is None:
            return None
        return held.take(size_bytes_max=size_bytes_max, needs_a_batch=needs_a_batch)

    async def hold(self, manifest: PartitionManifest, offset: int) -> HeldBatches | HeldGap | None:
        """
        Hold the chunk with the batch of *offset*, or the first one after it.

        None when *manifest* does not reach there. Offsets in a gap at the archive's end are answered by a
        batch without records.

        Raises:
            ObjectNotFound: An object has gone: look at the manifest again.
            CorruptDataError: Stored bytes are wrong.
            StorageUnavailable: The store does not answer.
        """
        if not manifest.start_offset <= offset < manifest.next_offset:
            return None
        manifest = await self._spillovers.piece_at(manifest, offset)
        segments = manifest.segments
        for row in range(segments.row_at_or_after(offset), len(segments)):
            segment = segments[row]
            index = await self._hydrator.index(manifest.partition, segment)
            layout = self._hydrator.layout(index)
            next_segment = segments[row + 1] if row + 1 < len(segments) else None
            at = max(offset, segment.base_offset)
            chunk = layout.holding(at)
            while chunk is not None:
                found = await self._hydrator.open(
                    manifest.partition, segment, index, chunk, offset=at, next_segment=next_segment
                )
                held = _held(found, index, offset)
                if held is not None:
                    return held
                # What was opened may be less than the chunk that was asked for.
                at = max(at, found.chunk.next_offset)
                chunk = layout.holding(at)
        # Nothing with records follows in this piece: only what was lost, or compacted away.
        delta = min(manifest.next_offset - 1 - offset, _LAST_OFFSET_DELTA_MAX)
        # It is of no leader: a client that took an epoch from it would ask where that epoch ends.
        return HeldGap(encode_batch(offset, (), last_offset_delta=delta, leader_epoch=NO_EPOCH))


def _held(found: HydratedChunk, index: SegmentIndex, offset: int) -> HeldBatches | None:
    """
    Return where the batch of *offset* begins in a chunk.

    None, and the chunk is given back, when no batch there reaches so far.

    Raises:
        LocalFileError: The cached file cannot be read; it is fetched again next time.
    """
    is_held = False
    try:
        begin = max(0, floor_position(index, offset) - found.chunk.position)
        header = _header_at(found, begin)
        while header is not None and header.last_offset < offset:
            begin += header.size_bytes
            header = _header_at(found, begin)
        is_held = header is not None
        return None if header is None else HeldBatches(found, index, begin, header)
    except (OSError, CorruptDataError) as error:
        found.mark_corrupt()
        raise LocalFileError(
            f"a cached chunk cannot be read: {error}", path=str(found.chunk), hint="look at the cache's disk"
        ) from error
    finally:
        if not is_held:
            found.close()


def _last_boundary(index: SegmentIndex, chunk: Chunk, limit: int) -> tuple[int, int]:
    """
    Return the last position within *chunk* up to *limit* where a batch begins, and the offset there.

    The position is counted from the chunk's begin.
    """
    if limit >= chunk.size_bytes:
        return chunk.size_bytes, chunk.next_offset
    row = bisect_right(index.entries, chunk.position + limit, key=lambda entry: entry.position) - 1
    if row < 0:
        return 0, chunk.base_offset
    return index.entries[row].position - chunk.position, index.entries[row].offset


def _header_at(found: HydratedChunk, position: int) -> BatchHeader | None:
    """Return the header of the batch at *position* of a chunk; None at its end."""
    if position >= found.chunk.size_bytes:
        return None
    if found.file is not None:
        return parse_header(os.pread(found.file.fd, HEADER_BYTES, found.file.position + position))
    assert found.data is not None, "a chunk is in a file or in memory"
    return parse_header(memoryview(found.data)[position : position + HEADER_BYTES])
