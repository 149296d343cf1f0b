"""
Store the part of a segment that stays valid, with an index that says how its open transactions ended.

After an unclean election the end of a segment may be wrong, or its index may name a wrong outcome of a
transaction.
The valid part is the segment's batches before some offset, which may be all of them. It is stored as a
segment of its own, under the present leader epoch, in the order data, index. No manifest is touched: a
crash after either object leaves objects that no manifest names. Repeating stores the same objects.

The batches are read once and checked, because the old index describes the whole segment. A segment that
stays whole is copied inside the store where the store can do that. When a segment is split, the batches
before the offset pass through an unnamed temporary file on this host.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeAlias

from crc32c import crc32c

from tieringd.archive.archive_reader import (
    ArchiveReader,
    SegmentIndexes,
    require_checksum,
    require_offsets,
)
from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archive.segment_swap import store_rewriting
from tieringd.errors import CorruptDataError
from tieringd.formats.batch_offsets import ExpectedBatches, OffsetCheck
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.record_batch import parse_header
from tieringd.formats.segment_scan import SegmentScan, SegmentScanner
from tieringd.formats.sidecar import encode_sidecar
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import (
    AbortedTransaction,
    RemoteSegment,
    Rewriting,
    RewritingKind,
    SegmentIndex,
    rewriter_of,
)
from tieringd.storage.base import FileSlice, JoinSource, ObjectStore
from tieringd.storage.threads import in_thread
from tieringd.storage.work_file import work_file

EndsOf: TypeAlias = Callable[[Mapping[int, int]], Awaitable[Mapping[int, int | None]]]
"""
Says how transactions ended, given the first offset by producer of those that are open at the part's end.

The answer has, by producer, the offset of the abort marker, or None for a commit. For a producer that is
missing in it, the index stays as it is.
"""


@dataclass(frozen=True, slots=True)
class PartRequest:
    """Which part of a segment to store, and under which leader epoch."""

    partition: TopicIdPartition
    segment: RemoteSegment
    next_offset: int
    """Exclusive end of the part: a batch boundary, or the segment's end or later."""
    leader_epoch: int
    ends_of: EndsOf

    @property
    def is_whole(self) -> bool:
        """Say whether the part is the whole segment."""
        return self.next_offset >= self.segment.next_offset


class SegmentParts:
    """Store parts of the segments of one bucket. Keeps no state; may be cancelled at any await."""

    def __init__(
        self, store: ObjectStore, reader: ArchiveReader, *, writer_id: str, work_directory: Path
    ) -> None:
        self._store = store
        self._reader = reader
        self._indexes = SegmentIndexes(store)
        self._joiner = ObjectJoiner(store, work_directory=work_directory)
        self._writer_id = writer_id
        self._directory = work_directory

    async def store(self, request: PartRequest) -> RemoteSegment:
        """
        Store the part; return its row, or the segment itself where all of it, and its index, stays right.

        Raises:
            ObjectNotFound: The data or the index was deleted.
            CorruptDataError: The data or the index is damaged, or the part's end is inside a batch.
            RetryableError: The store or the work directory is temporarily unavailable.
        """
        index = await self._indexes.index_of(request.partition, request.segment)
        if request.is_whole:
            return await self._store_whole(request, index)
        async with work_file(
            self._directory,
            f"segments cannot be split in the directory {self._directory}",
            hint="Free some space there, or set TMPDIR to a disk with more space",
        ) as opened:
            scan = await self._scan(request, index, opened.file)
            aborted = await _aborted(index, request, scan.tracker.open_transactions)
            part = SegmentIndex(
                base_offset=index.base_offset,
                last_offset=request.next_offset - 1,
                size_bytes=scan.size_bytes,
                crc32c=scan.crc32c,
                record_count=scan.record_count,
                batch_count=scan.batch_count,
                epochs=scan.epochs,
                aborted=aborted,
                entries=scan.entries,
            )
            sidecar = encode_sidecar(part)
            head = replace(
                _named(request, sidecar, self._writer_id),
                last_offset=part.last_offset,
                size_bytes=scan.size_bytes,
                crc32c=scan.crc32c,
                base_timestamp_ms=scan.base_timestamp_ms,
                max_timestamp_ms=scan.max_timestamp_ms,
            )
            await in_thread(opened.file.flush)
            body = FileSlice(opened.file.fileno(), 0, scan.size_bytes) if scan.size_bytes else b""
            await self._store.put(data_key(request.partition, head), body, crc32c=scan.crc32c)
        await self._store_index(request, head, sidecar)
        return head

    async def _store_whole(self, request: PartRequest, index: SegmentIndex) -> RemoteSegment:
        segment, partition = request.segment, request.partition
        scan = await self._scan(request, index, None)
        require_checksum(segment, scan.crc32c, data_key(partition, segment))
        aborted = await _aborted(index, request, scan.tracker.open_transactions)
        if aborted == index.aborted:
            return segment
        sidecar = encode_sidecar(replace(index, aborted=aborted))
        renewed = _named(request, sidecar, self._writer_id)
        sources = [JoinSource(data_key(partition, segment), segment.size_bytes, segment.crc32c)]
        await self._joiner.join(data_key(partition, renewed), sources, crc32c=segment.crc32c)
        await self._store_index(request, renewed, sidecar)
        return renewed

    async def _store_index(self, request: PartRequest, segment: RemoteSegment, sidecar: bytes) -> None:
        await self._store.put(index_key(request.partition, segment), sidecar, crc32c=segment.index_crc32c)
        if segment.is_rewritten:
            # A rebuild takes a rewritten segment only where a record says that it is stored whole.
            rewriting = Rewriting.of(RewritingKind.REWRITTEN, (request.segment,), (segment,))
            await store_rewriting(self._store, request.partition, rewriting)

    async def _scan(self, request: PartRequest, index: SegmentIndex, target: IO[bytes] | None) -> SegmentScan:
        """Check the part's batches, and write them to *target*."""
        segment, key = request.segment, data_key(request.partition, request.segment)
        scanner = (
            SegmentScanner(segment.base_offset, segment.next_offset, source=key)
            if request.is_whole
            else SegmentScanner(segment.base_offset, None, stop_offset=request.next_offset, source=key)
        )
        check = OffsetCheck(ExpectedBatches.of_index(index))
        async with aclosing(self._reader.runs(key, 0, segment.size_bytes)) as runs:
            async for run, position in runs:
                require_offsets(run, position, key, check)
                size_bytes = await in_thread(_fed, scanner, run, target)
                if size_bytes < len(run):
                    _require_boundary(run, size_bytes, position, request, key)
                    break
        return scanner.finish()


def _fed(scanner: SegmentScanner, run: memoryview, target: IO[bytes] | None) -> int:
    """Scan a run of batches, and write those before the scan's end to *target*. Blocks."""
    size_bytes = scanner.feed(run)
    if target is not None:
        target.write(run[:size_bytes])
    return size_bytes


def _require_boundary(run: memoryview, at: int, position: int, request: PartRequest, key: str) -> None:
    """Check that the first batch that is left out begins at the part's end or later."""
    header = parse_header(run, at)
    if header.base_offset < request.next_offset:
        raise CorruptDataError(
            f"the segment cannot be split at offset {request.next_offset}: the batch of offsets "
            f"{header.base_offset} to {header.last_offset} is damaged, or holds that offset",
            source=key,
            position=position + at,
            offset=header.base_offset,
        )


async def _aborted(
    index: SegmentIndex, request: PartRequest, open_transactions: Mapping[int, int]
) -> tuple[AbortedTransaction, ...]:
    """Return the aborted transactions with data in the part, at whose end *open_transactions* are open."""
    ended = await request.ends_of(open_transactions)
    next_offset = min(request.next_offset, request.segment.next_offset)
    kept = [
        one
        for one in index.aborted
        # A transaction with a later marker is open at the part's end. After a split, `ended` has all of them.
        if one.last_offset < next_offset or (request.is_whole and one.producer_id not in ended)
    ]
    return (
        *kept,
        *(
            AbortedTransaction(producer_id, open_transactions[producer_id], marker_offset)
            for producer_id, marker_offset in sorted(ended.items())
            if marker_offset is not None and producer_id in open_transactions
        ),
    )


def _named(request: PartRequest, sidecar: bytes, writer_id: str) -> RemoteSegment:
    """Return the segment under the name that it has with another index and writer."""
    return replace(
        request.segment,
        leader_epoch=request.leader_epoch,
        writer_id=rewriter_of(writer_id) if request.segment.is_rewritten else writer_id,
        index_size_bytes=len(sidecar),
        index_crc32c=crc32c(sidecar),
    )
