"""
Copying a segment, or a part of one: checks every batch, then stores data and index in the bucket.

The file stays open from the first check to the last byte sent, and is checked for changes in between: a
follower truncates its log in place, and then the bytes checked and the bytes sent would differ. The store
compares the checksum as well, so an object with such bytes is never created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import structlog
from crc32c import crc32c

from tieringd.archiving.upload_gate import UploadGate
from tieringd.archiving.upload_queue import NO_URGENCY, Urgency
from tieringd.broker.layout import Layout
from tieringd.broker.segment_file import (
    OpenSegment,
    check_broker_indexes,
    position_of,
    positions_of,
    scan_segment_file,
)
from tieringd.compiled.loading import expect_checks
from tieringd.errors import CorruptDataError, LeadershipChanged, LocalFileError
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.segment_scan import EndedBy, SegmentScan
from tieringd.formats.sidecar import encode_sidecar
from tieringd.formats.transactions import MarkerSearch
from tieringd.model.local_log import Hole, LocalLog
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.segment import (
    NO_TIMESTAMP,
    AbortedTransaction,
    BrokerIndexes,
    CrossingTransaction,
    FilePart,
    LocalSegment,
    RemoteSegment,
    SegmentIndex,
    SegmentSlice,
)
from tieringd.policies.upload_control import is_new
from tieringd.storage.base import FileSlice, ObjectStore
from tieringd.storage.threads import in_thread, in_thread_or

log = structlog.get_logger(__name__)

_EXAMINATIONS_AT_ONCE = 2
"""
Checking a segment is half interpreter and half checksum work. One more thread would only compete for the
interpreter and evict the other threads' buffers from the cache. Uploads need neither.
"""


@dataclass(frozen=True, slots=True)
class CopiedSegment:
    """A segment that is stored, but not yet in any manifest."""

    remote: RemoteSegment
    index: SegmentIndex
    part: SegmentSlice
    """The requested slice, with the file's identity."""
    crossing: tuple[CrossingTransaction, ...]
    """Transactions with records in the slice whose markers were found after its end."""


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """What to copy, and how; see `RemoteLog.copy_segment`."""

    leadership: Leadership
    local_log: LocalLog
    """The scan that contains the slice. Transactions open at its end are followed into later segments."""
    part: SegmentSlice
    urgency: Urgency = NO_URGENCY
    """Decides the order at the gate."""
    before_put: Callable[[], None] = lambda: None
    """Called before each object is stored; may raise to prevent that."""
    on_begun: Callable[[], None] = lambda: None
    """Called when the gate has let the copy begin. Before that, cancelling the copy loses no work."""
    final_holes: Collection[Hole] = ()
    """The holes of `local_log` that a second observation has confirmed."""
    bytes_below: int | None = None
    """Store nothing unless the slice has fewer bytes."""


@dataclass(frozen=True, slots=True)
class _Examined:
    """The result of reading a slice."""

    position: int
    """The file position of the slice's first batch, in bytes."""
    scan: SegmentScan
    broker_indexes: BrokerIndexes
    aborted: tuple[AbortedTransaction, ...]
    crossing: tuple[CrossingTransaction, ...]


class SegmentCopier:
    """
    Copy segments when the gate lets them begin.

    Cancelling a copy is safe: no manifest names what it has stored.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        writer_id: str,
        now_ms: Callable[[], int],
        wall_ms: Callable[[], int],
        gate: UploadGate,
        layout: Layout,
    ) -> None:
        self._store = store
        self._writer_id = writer_id
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._gate = gate
        self._layout = layout
        self._examinations = asyncio.Semaphore(_EXAMINATIONS_AT_ONCE)
        self._under_way: set[asyncio.Task[object]] = set()

    @property
    def stored_segments(self) -> int:
        """See `RemoteLog.stored_segments`."""
        return self._gate.succeeded_uploads

    async def copy(self, request: CopyRequest) -> CopiedSegment | None:
        """See `RemoteLog.copy_segment`."""
        task = asyncio.current_task()
        assert task is not None, "copying happens in a task"
        partition, segment = request.leadership.partition, request.part.segment
        self._under_way.add(task)
        try:
            # The file's time is of this host's clock, whether that is right or wrong.
            closed_seconds_ago = self._wall_ms() / 1000 - segment.modified_ns / 1e9
            urgency = replace(request.urgency, is_new=is_new(closed_seconds_ago=closed_seconds_ago))
            expect_checks(self._gate.waiting_bytes + segment.size_bytes)
            async with self._gate.upload(partition, segment.size_bytes, urgency):
                request.on_begun()
                file = await in_thread_or(OpenSegment.close, partial(self._layout.open, segment))
                try:
                    return await self._copy_open_file(file, request)
                finally:
                    file.close()
        finally:
            self._under_way.discard(task)

    def cancel_all(self) -> None:
        """Cancel every copy that is under way."""
        for task in tuple(self._under_way):
            task.cancel()

    async def checksums_of(self, segment: LocalSegment, sizes: Sequence[int]) -> tuple[int, ...]:
        """See `RemoteLog.local_checksums`."""
        return await asyncio.to_thread(_checksums_of, self._layout, segment, sizes)

    async def parts_of(self, segment: LocalSegment, offsets: Sequence[int]) -> tuple[FilePart, ...]:
        """See `RemoteLog.local_parts`."""
        return await asyncio.to_thread(_parts_of, self._layout, segment, offsets)

    async def _copy_open_file(self, file: OpenSegment, request: CopyRequest) -> CopiedSegment | None:
        leadership, part = request.leadership, request.part
        async with self._examinations:
            # A cancelled copy waits for the thread: the thread uses a file that the caller is about to close.
            found = await in_thread(_examine, self._layout, file, request)
        if part.is_open and not found.scan.size_bytes:
            return None
        if request.bytes_below is not None and found.scan.size_bytes >= request.bytes_below:
            return None
        _require_epochs(request, found.scan)
        index = _index_of(part, found)
        sidecar = encode_sidecar(index)
        sidecar_crc32c = crc32c(sidecar)
        remote = RemoteSegment(
            base_offset=index.base_offset,
            last_offset=index.last_offset,
            size_bytes=found.scan.size_bytes,
            crc32c=found.scan.crc32c,
            base_timestamp_ms=found.scan.base_timestamp_ms,
            max_timestamp_ms=found.scan.max_timestamp_ms,
            leader_epoch=leadership.leader_epoch,
            writer_id=self._writer_id,
            uploaded_at_ms=self._now_ms(),
            index_size_bytes=len(sidecar),
            index_crc32c=sidecar_crc32c,
        )
        body = FileSlice(file.fd, found.position, found.scan.size_bytes)
        request.before_put()
        await self._store.put(data_key(leadership.partition, remote), body, crc32c=found.scan.crc32c)
        request.before_put()
        await self._store.put(index_key(leadership.partition, remote), sidecar, crc32c=sidecar_crc32c)
        if part.is_whole:
            # Read last: a broker that notes this time in an index flushes that file after it has closed
            # the segment.
            noted_ms = await asyncio.to_thread(self._layout.broker_timestamp_ms, part.segment)
            remote = replace(remote, broker_timestamp_ms=NO_TIMESTAMP if noted_ms is None else noted_ms)
        return CopiedSegment(remote, index, part, found.crossing)


def local_index(
    layout: Layout, partition: TopicIdPartition, local_log: LocalLog, part: SegmentSlice
) -> SegmentIndex | None:
    """
    Return the index that copying *part* would store now; None where it would store nothing. Blocks.

    Raises:
        CorruptDataError: A batch is wrong.
        LocalFileError: A file cannot be read, or changed while it was read; or a marker is missing.
    """
    file = layout.open(part.segment)
    try:
        request = CopyRequest(Leadership(partition, 0), local_log, part)
        found = _examine(layout, file, request)
    finally:
        file.close()
    return _index_of(part, found) if found.scan.size_bytes or not part.is_open else None


def _examine(layout: Layout, file: OpenSegment, request: CopyRequest) -> _Examined:
    """Read the slice and its side files once. Blocks; runs in a thread."""
    # A layout may store other bytes than the log has. They are in another file, with another size.
    part = replace(request.part, segment=file.segment)
    segment = part.segment
    file.require_unchanged()
    position = 0
    if part.base_offset != segment.base_offset:
        position = position_of(file.fd, segment, part.base_offset)
    scan = scan_segment_file(file.fd, part, position=position)
    if part.is_open and part.keeps_end:
        _require_whole(file, part, scan, position)
    file.require_unchanged()
    indexes = BrokerIndexes()
    if part.is_whole:
        indexes, faults = check_broker_indexes(scan, segment, layout.side_files(segment))
        for fault in faults:
            log.warning("broker index left out of the archive", path=segment.path, fault=fault)
    aborted, crossing = _ended_in(layout, scan, position, replace(request, part=part))
    return _Examined(position, scan, indexes, aborted, crossing)


def _require_epochs(request: CopyRequest, scan: SegmentScan) -> None:
    """
    Check that no batch is newer than the leadership under which the slice is to be stored.

    A log without an epoch history is not checked: it has no broker that knows its epoch.

    Raises:
        LeadershipChanged: Another leader has written to this file, so it has to be observed again first.
    """
    leader_epoch = request.leadership.leader_epoch
    newest = max((epoch for epoch, _ in scan.epochs), default=leader_epoch)
    if request.local_log.epochs and newest > leader_epoch:
        raise LeadershipChanged(
            f"{request.part.segment.path} holds a batch of leader epoch {newest}, but this broker was last "
            f"seen leading {request.leadership.partition} under epoch {leader_epoch}: the partition is "
            "scanned again first"
        )


def _require_whole(file: OpenSegment, part: SegmentSlice, scan: SegmentScan, position: int) -> None:
    """Check that *scan* of a part of a closed segment, read from *position* on, reaches the part's end."""
    # Raises where a batch extends past the end: that batch would be in neither part.
    position_of(file.fd, part.segment, part.next_offset)
    if not part.segment.is_active and scan.ended_by not in {EndedBy.STOP_OFFSET, EndedBy.END_OF_FILE}:
        raise CorruptDataError(
            f"a closed segment has a {scan.ended_by.value}",
            source=part.segment.path,
            position=position + scan.size_bytes,
        )


def _ended_in(
    layout: Layout, scan: SegmentScan, position: int, request: CopyRequest
) -> tuple[tuple[AbortedTransaction, ...], tuple[CrossingTransaction, ...]]:
    """
    Return every aborted transaction with data in the part, wherever its marker is.

    The second result is every transaction, aborted or not, with data in the part and a marker found after
    it in the same log.

    Only offsets below the last stable offset are copied, so each transaction that is open at the part's
    end has its marker further on: in the rest of the segment, or after it. A transaction whose marker may
    be in a final hole counts as aborted, because it is incomplete.
    """
    part, local_log = request.part, request.local_log
    aborted = list(scan.aborted)
    first_offsets = dict(scan.tracker.open_transactions)
    if not first_offsets:
        return tuple(aborted), ()
    search = MarkerSearch(scan.tracker)
    holes = {hole[1]: hole for hole in local_log.holes}
    for later, begin, next_offset in _after(scan, position, local_log, part):
        if later.base_offset in holes and later is not part.segment:
            if holes[later.base_offset] not in request.final_holes:
                break
            last_lost = later.base_offset - 1
            log.warning(
                "transactions whose markers are lost count as aborted",
                path=part.segment.path,
                producer_ids=sorted(search.awaited),
                last_lost_offset=last_lost,
            )
            lost = (
                AbortedTransaction(one, first, last_lost) for one, first in sorted(search.awaited.items())
            )
            return (*aborted, *lost), search.found
        found = layout.scan_transactions(later, search, position=begin, next_offset=next_offset).aborted
        aborted.extend(one for one in found if first_offsets.get(one.producer_id) == one.first_offset)
        if not search.awaited:
            return tuple(aborted), search.found
    raise LocalFileError(
        f"{part.segment.path}: the transaction that is open at offset {part.next_offset} has no marker in "
        "the local log yet",
        path=part.segment.path,
    )


def _after(
    scan: SegmentScan, position: int, local_log: LocalLog, part: SegmentSlice
) -> Iterator[tuple[LocalSegment, int, int]]:
    """Yield the rest of the log after *part*: segment, and the position and offset to continue from."""
    if part.is_open and scan.last_offset_found is not None:
        yield part.segment, position + scan.size_bytes, scan.last_offset_found + 1
    for segment in local_log.segments:
        if segment.base_offset > part.segment.base_offset:
            yield segment, 0, segment.base_offset


def _index_of(part: SegmentSlice, found: _Examined) -> SegmentIndex:
    scan = found.scan
    if scan.last_offset_found is None and scan.size_bytes:
        raise CorruptDataError("the segment has bytes but no batch", source=part.segment.path, position=0)
    if part.is_open and not part.keeps_end:
        assert scan.last_offset_found is not None, "an open slice without a batch is not copied"
        last_offset = scan.last_offset_found
    else:
        last_offset = part.next_offset - 1
    return SegmentIndex(
        base_offset=part.base_offset,
        last_offset=last_offset,
        size_bytes=scan.size_bytes,
        crc32c=scan.crc32c,
        record_count=scan.record_count,
        batch_count=scan.batch_count,
        epochs=scan.epochs,
        aborted=found.aborted,
        entries=scan.entries,
        broker=found.broker_indexes,
    )


def _checksums_of(layout: Layout, segment: LocalSegment, sizes: Sequence[int]) -> tuple[int, ...]:
    file = layout.open(segment)
    try:
        values, position = [], 0
        for size_bytes in sizes:
            values.append(file.crc32c(position, size_bytes))
            position += size_bytes
        file.require_unchanged()
    finally:
        file.close()
    return tuple(values)


def _parts_of(layout: Layout, segment: LocalSegment, offsets: Sequence[int]) -> tuple[FilePart, ...]:
    file = layout.open(segment)
    try:
        positions = positions_of(file.fd, file.segment, offsets)
        found = tuple(
            FilePart(after - position, file.crc32c(position, after - position))
            for position, after in pairwise(positions)
        )
        file.require_unchanged()
    finally:
        file.close()
    return found
