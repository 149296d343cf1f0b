"""
Store neighbouring segments again, as one segment without some of their records.

A `Cut` decides batch by batch what is removed. The input is checked: the checksum of each batch and of each
whole object. The output is scanned as an upload is, and indexed from that scan. The objects are stored, data
first. No manifest is touched: the objects do not belong to the archive until a swap names them.

Memory is bounded by two runs of batches. The new segment waits in an unnamed temporary file: a killed
process leaves nothing of it behind.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

from crc32c import crc32c

from tieringd.archive.archive_reader import (
    ArchiveReader,
    Batch,
    SegmentIndexes,
    checked_batches,
    require_checksum,
)
from tieringd.archive.segment_swap import Successor
from tieringd.errors import CorruptDataError
from tieringd.formats.batch_offsets import ExpectedBatches, OffsetCheck
from tieringd.formats.index_merge import IndexedSegment, merged_index
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.segment_scan import SegmentScan, SegmentScanner
from tieringd.formats.sidecar import encode_sidecar
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import BrokerIndexes, RemoteSegment, SegmentIndex
from tieringd.policies.rewriting import rewritten_segment
from tieringd.storage.base import FileSlice, ObjectStore
from tieringd.storage.threads import in_thread
from tieringd.storage.work_file import work_file


class Cut(Protocol):
    """Decides what is left of segments. A cut is used once, for neighbours in their order."""

    removed_records: int
    """How many records the cut has removed so far."""
    keeps_aborted: bool
    """Whether records of aborted transactions may be left: then the index has to list those transactions."""

    def begin(self, index: SegmentIndex) -> None:
        """Begin a segment: *index* is the index of the segment whose batches come next."""
        ...

    def left_of(self, batch: Batch) -> bytes | memoryview | None:
        """
        Return what is left of a batch: the same bytes, other bytes, or None for nothing.

        Runs in a thread.
        """
        ...


class SegmentRewriter:
    """Rewrite segments of one bucket. Its only state is its writer id; it may be cancelled at any await."""

    def __init__(
        self, store: ObjectStore, reader: ArchiveReader, *, writer_id: str, work_directory: Path
    ) -> None:
        """
        Keep the arguments.

        *writer_id* is unique to this rewriter and begins with the prefix of rewriters.
        """
        self._store = store
        self._reader = reader
        self._indexes = SegmentIndexes(store)
        self._writer_id = writer_id
        self._directory = work_directory

    async def removes_any(
        self, partition: TopicIdPartition, segment: RemoteSegment, cut: Cut, *, reads_all: bool = False
    ) -> bool:
        """
        Say whether *cut* removes anything from *segment*. Reading stops at the first run with a removal.

        With *reads_all* the segment is read to its end, so that damage after a removal is noticed as well.

        Raises:
            ObjectNotFound: The segment was deleted.
            CorruptDataError: The segment is damaged.
        """
        index = await self._indexes.index_of(partition, segment)
        cut.begin(index)
        source = _Source(partition, segment, index, cut)
        async with aclosing(self._reader.runs(source.key, 0, segment.size_bytes)) as runs:
            async for run, position in runs:
                if reads_all:
                    await in_thread(source.left_of, run, position)
                elif await in_thread(source.removes_any, run, position):
                    return True
        source.require_whole()
        return cut.removed_records > 0

    async def rewrite(
        self, partition: TopicIdPartition, parts: tuple[RemoteSegment, ...], cut: Cut
    ) -> Successor:
        """
        Store what *cut* leaves of *parts*, which are neighbours, as one segment.

        Raises:
            ObjectNotFound: A part was deleted.
            CorruptDataError: A part is damaged.
            LocalFileError: The work directory cannot take the bytes.
        """
        async with work_file(
            self._directory,
            f"segments cannot be rewritten in the directory {self._directory}",
            hint="Free some space there, or set TMPDIR to a disk with more space",
        ) as opened:
            target = _Target(SegmentScanner(parts[0].base_offset, parts[-1].next_offset), opened.file)
            indexes = []
            for part in parts:
                index = await self._indexes.index_of(partition, part)
                indexes.append(IndexedSegment(part, index))
                cut.begin(index)
                await self._copy(_Source(partition, part, index, cut), target)
            scan = await in_thread(target.finish)
            index = _index_of(indexes, scan, keeps_aborted=cut.keeps_aborted)
            sidecar = encode_sidecar(index)
            segment = rewritten_segment(
                parts,
                scan,
                sidecar_bytes=len(sidecar),
                sidecar_crc32c=crc32c(sidecar),
                writer_id=self._writer_id,
            )
            body = FileSlice(opened.file.fileno(), 0, scan.size_bytes) if scan.size_bytes else b""
            await self._store.put(data_key(partition, segment), body, crc32c=scan.crc32c)
            await self._store.put(index_key(partition, segment), sidecar, crc32c=segment.index_crc32c)
        return Successor(parts, segment, cut.removed_records)

    async def _copy(self, source: _Source, target: _Target) -> None:
        async with aclosing(self._reader.runs(source.key, 0, source.segment.size_bytes)) as runs:
            async for run, position in runs:
                await in_thread(target.take, source, run, position)
        source.require_whole()


class _Source:
    """A segment that is read: the cut filters its batches, and its checksum is computed. Methods block."""

    def __init__(
        self, partition: TopicIdPartition, segment: RemoteSegment, index: SegmentIndex, cut: Cut
    ) -> None:
        self.key = data_key(partition, segment)
        self._check = OffsetCheck(ExpectedBatches.of_index(index))
        self.segment = segment
        self._cut = cut
        self._checksum = 0

    def left_of(self, run: memoryview, position: int) -> bytearray:
        """Return what is left of a run of batches."""
        self._checksum = crc32c(run, self._checksum)
        left = bytearray()
        for batch in checked_batches(run, position, self.key, self._check):
            left += self._left_of(batch) or b""
        return left

    def removes_any(self, run: memoryview, position: int) -> bool:
        """Say whether the cut removes anything from a run."""
        self._checksum = crc32c(run, self._checksum)
        for batch in checked_batches(run, position, self.key, self._check):
            self._left_of(batch)
            if self._cut.removed_records:
                return True
        return False

    def require_whole(self) -> None:
        """Check that the bytes that were read have the segment's checksum."""
        require_checksum(self.segment, self._checksum, self.key)

    def _left_of(self, batch: Batch) -> bytes | memoryview | None:
        try:
            return self._cut.left_of(batch)
        except CorruptDataError as error:
            raise CorruptDataError(
                error.message, source=self.key, position=batch.position, offset=batch.header.base_offset
            ) from error


class _Target:
    """The new segment. Methods block."""

    def __init__(self, scanner: SegmentScanner, file: IO[bytes]) -> None:
        self._scanner = scanner
        self._file = file

    def take(self, source: _Source, run: memoryview, position: int) -> None:
        """Write what is left of a run."""
        left = source.left_of(run, position)
        if left:
            scanned = self._scanner.feed(memoryview(left))
            assert scanned == len(left), "whole batches are left of whole batches"
            self._file.write(left)

    def finish(self) -> SegmentScan:
        """Return the scan of what was written."""
        self._file.flush()
        return self._scanner.finish()


def _index_of(parts: list[IndexedSegment], scan: SegmentScan, *, keeps_aborted: bool) -> SegmentIndex:
    """
    Return the index of the new segment.

    The broker's positions no longer hold, but the state of its producers at the end does. The broker's
    list of aborted transactions holds as well if records of them may be left.
    """
    before = merged_index(parts)
    broker = BrokerIndexes(producer_snapshot=before.broker.producer_snapshot)
    if keeps_aborted:
        broker = replace(broker, transaction_index=before.broker.transaction_index)
    return SegmentIndex(
        base_offset=before.base_offset,
        last_offset=before.last_offset,
        size_bytes=scan.size_bytes,
        crc32c=scan.crc32c,
        record_count=scan.record_count,
        batch_count=scan.batch_count,
        epochs=scan.epochs,
        aborted=before.aborted if keeps_aborted else (),
        entries=scan.entries,
        broker=broker,
    )
