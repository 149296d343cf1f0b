"""
Copying one closed segment: every batch checked, then data and index into the bucket.

The file stays open from the first check to the last byte sent, and is looked at again in
between: a follower truncates its log in place, and then the bytes checked and the bytes sent
would differ. The store compares the checksum as well, so such a copy never gets a name.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from crc32c import crc32c

from tieringd.broker.segment_file import (
    READ_BUFFER_BYTES,
    check_broker_indexes,
    open_segment,
    read_broker_indexes,
    scan_segment_file,
    scan_transactions,
)
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import encode_sidecar
from tieringd.model.segment import RemoteSegment, SegmentIndex
from tieringd.storage.base import FileSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieringd.formats.segment_scan import SegmentScan
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import Leadership, TopicIdPartition
    from tieringd.model.segment import AbortedTransaction, BrokerIndexes, LocalSegment
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

_EXAMINATIONS_AT_ONCE = 2
"""
Checking a segment is half interpreter, half checksum. One more thread would only fight the others
for the interpreter and their buffers out of the cache, while uploads need neither.
"""


@dataclass(frozen=True, slots=True)
class CopiedSegment:
    """A segment that is stored, and not yet in any manifest."""

    remote: RemoteSegment
    index: SegmentIndex
    identity: tuple[int, int, int]
    """Of the local file whose bytes were stored (`LocalSegment.identity`)."""


class SegmentCopier:
    """
    Copy segments, at most *concurrent_copies* at once for the whole daemon.

    Cancelling a copy is safe: what it has stored is not in a manifest.
    """

    def __init__(
        self, store: ObjectStore, *, writer_id: str, now_ms: Callable[[], int], concurrent_copies: int
    ) -> None:
        self._store = store
        self._writer_id = writer_id
        self._now_ms = now_ms
        self._slots = asyncio.Semaphore(concurrent_copies)
        self._examinations = asyncio.Semaphore(_EXAMINATIONS_AT_ONCE)
        self._under_way: defaultdict[TopicIdPartition, set[asyncio.Task[object]]] = defaultdict(set)

    async def copy(self, leadership: Leadership, local_log: LocalLog, segment: LocalSegment) -> CopiedSegment:
        """See `RemoteLog.copy_segment`."""
        task = asyncio.current_task()
        assert task is not None, "copying happens in a task"
        partition = leadership.partition
        self._under_way[partition].add(task)
        try:
            async with self._slots:
                fd = await _opened(segment)
                try:
                    return await self._copy_open_file(fd, leadership, local_log, segment)
                finally:
                    os.close(fd)
        finally:
            self._under_way[partition].discard(task)
            if not self._under_way[partition]:
                del self._under_way[partition]

    def cancel(self, partition: TopicIdPartition) -> int:
        """Cancel the partition's copies; return how many there were."""
        tasks = tuple(self._under_way.get(partition, ()))
        for task in tasks:
            task.cancel()
        return len(tasks)

    def cancel_all(self) -> None:
        """Cancel every copy that is under way."""
        for partition in tuple(self._under_way):
            self.cancel(partition)

    async def crc32c_of(self, segment: LocalSegment) -> int:
        """See `RemoteLog.local_crc32c`."""
        return await asyncio.to_thread(_crc32c_of, segment)

    async def _copy_open_file(
        self, fd: int, leadership: Leadership, local_log: LocalLog, segment: LocalSegment
    ) -> CopiedSegment:
        partition = leadership.partition
        async with self._examinations:
            scan, broker_indexes, aborted = await asyncio.to_thread(_examine, fd, local_log, segment)
        index = _index_of(segment, scan, aborted, broker_indexes)
        sidecar = encode_sidecar(index)
        remote = RemoteSegment(
            base_offset=index.base_offset,
            last_offset=index.last_offset,
            size_bytes=scan.size_bytes,
            crc32c=scan.crc32c,
            base_timestamp_ms=scan.base_timestamp_ms,
            max_timestamp_ms=scan.max_timestamp_ms,
            leader_epoch=leadership.leader_epoch,
            writer_id=self._writer_id,
            uploaded_at_ms=self._now_ms(),
            index_size_bytes=len(sidecar),
        )
        await self._store.put(
            data_key(partition, remote), FileSlice(fd, 0, scan.size_bytes), crc32c=scan.crc32c
        )
        await self._store.put(index_key(partition, remote), sidecar, crc32c=crc32c(sidecar))
        return CopiedSegment(remote, index, segment.identity)


async def _opened(segment: LocalSegment) -> int:
    """Open a segment's file in a thread. When cancelled meanwhile, it is closed once it is open."""
    opening = asyncio.create_task(asyncio.to_thread(open_segment, segment))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_opened)
        raise


def _close_opened(opening: asyncio.Task[int]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        os.close(opening.result())


def _examine(
    fd: int, local_log: LocalLog, segment: LocalSegment
) -> tuple[SegmentScan, BrokerIndexes, tuple[AbortedTransaction, ...]]:
    """Read the file once, and what belongs to it. Blocks; runs in a thread."""
    _require_unchanged(fd, segment)
    scan = scan_segment_file(fd, segment)
    _require_unchanged(fd, segment)
    indexes, faults = check_broker_indexes(scan, segment, read_broker_indexes(segment))
    for fault in faults:
        log.warning("broker index left out of the archive", path=segment.path, fault=fault)
    return scan, indexes, _aborted_in(scan, local_log, segment)


def _aborted_in(
    scan: SegmentScan, local_log: LocalLog, segment: LocalSegment
) -> tuple[AbortedTransaction, ...]:
    """
    Return every aborted transaction with data in *segment*, wherever its marker is.

    Only segments below the last stable offset are copied, so each transaction that is open at
    the segment's end has its marker further on in the local log.
    """
    aborted = list(scan.aborted)
    undecided = set(scan.tracker.open_transactions)
    if not undecided:
        return tuple(aborted)
    tracker = scan.tracker.copy()
    first_offsets = dict(tracker.open_transactions)
    for later in _following(local_log.segments, segment):
        found = scan_transactions(later, tracker).aborted
        aborted.extend(one for one in found if first_offsets.get(one.producer_id) == one.first_offset)
        undecided = {
            producer
            for producer in undecided
            if tracker.open_transactions.get(producer) == first_offsets[producer]
        }
        if not undecided:
            return tuple(aborted)
    raise LocalFileError(
        f"{segment.path}: a transaction that is open at its end has no marker in the local log yet",
        path=segment.path,
    )


def _following(segments: Sequence[LocalSegment], segment: LocalSegment) -> list[LocalSegment]:
    return [one for one in segments if one.base_offset > segment.base_offset]


def _index_of(
    segment: LocalSegment,
    scan: SegmentScan,
    aborted: tuple[AbortedTransaction, ...],
    broker_indexes: BrokerIndexes,
) -> SegmentIndex:
    assert segment.next_offset is not None, "only closed segments are copied"
    if scan.last_offset_found is None and scan.size_bytes:
        raise CorruptDataError("the segment has bytes and no batch", source=segment.path, position=0)
    return SegmentIndex(
        base_offset=segment.base_offset,
        last_offset=segment.next_offset - 1,
        size_bytes=scan.size_bytes,
        crc32c=scan.crc32c,
        record_count=scan.record_count,
        batch_count=scan.batch_count,
        epochs=scan.epochs,
        aborted=aborted,
        entries=scan.entries,
        broker=broker_indexes,
    )


def _require_unchanged(fd: int, segment: LocalSegment) -> None:
    status = os.fstat(fd)
    if (status.st_ino, status.st_size, status.st_mtime_ns) != segment.identity:
        raise LocalFileError(f"{segment.path} changed after it was listed", path=segment.path)


def _crc32c_of(segment: LocalSegment) -> int:
    fd = open_segment(segment)
    try:
        _require_unchanged(fd, segment)
        value, position = 0, 0
        buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        while count := os.preadv(fd, [buffer], position):
            value = crc32c(buffer[:count], value)
            position += count
        _require_unchanged(fd, segment)
    except OSError as error:
        raise LocalFileError(f"{segment.path} cannot be read: {error.strerror}", path=segment.path) from error
    finally:
        os.close(fd)
    return value
