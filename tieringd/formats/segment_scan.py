"""
One pass over a segment's bytes that checks every batch and collects all facts for an upload.

The scanner does no I/O and copies nothing: its caller feeds it views of any buffer with the bytes. A
scan that ends without an error means that every batch is whole, has the right checksum, and is in order
inside the segment's bounds.

An active segment has no known end. Its scan stops at *stop_offset*, or where the broker may still be
writing: at a cut batch, or at zeros that were allocated ahead. In a closed segment both are faults.

The loop in `feed` is the hot path of every upload: one unpack and one checksum per batch, and one
checksum per chunk.

`HeaderWalk` walks over batch headers alone: no checksums, no records. It finds the end of a log and its
transactions at little cost, and proves nothing about the bytes in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from crc32c import crc32c

from tieringd.compiled.walks import BatchWalk, Scanned
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import (
    CRC_STARTS_AT,
    DELETE_HORIZON_FLAG,
    HEADER,
    HEADER_BYTES,
    LENGTH_STARTS_AT,
    LOG_APPEND_TIME_FLAG,
    MAGIC,
    MAX_BATCH_BYTES,
    MIN_LENGTH,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    header_fault,
    is_of_old_format,
    located_fault,
)
from tieringd.formats.records import control_type
from tieringd.formats.transactions import Marker, TransactionTracker
from tieringd.model.segment import NO_TIMESTAMP, AbortedTransaction, EpochStart, IndexEntry

DEFAULT_INDEX_INTERVAL_BYTES = 65536

_MAX_LENGTH = MAX_BATCH_BYTES - LENGTH_STARTS_AT
_NO_LIMIT = 1 << 63
_OWN_TIME_FLAGS = DELETE_HORIZON_FLAG | LOG_APPEND_TIME_FLAG
_ZERO_HEADER = bytes(HEADER_BYTES)
_COUNT_STARTS_AT = 57
"""The record count is the last field of a header, and never zero in a batch just written."""

_READ_BYTES = 4096
"""A header costs a page of the page cache anyway, and small batches share one."""

_MAGIC_STARTS_AT = 16

_MAX_MARKER_BATCH_BYTES = 64 * 1024


class EndedBy(Enum):
    """Why a scan ended."""

    END_OF_FILE = "end of file"
    STOP_OFFSET = "stop offset"
    TORN_TAIL = "torn tail"
    """The last batch is not whole: the broker may be writing it."""
    ZERO_TAIL = "zero tail"
    """Only zeros follow: space that the broker allocated ahead."""


@dataclass(frozen=True, slots=True)
class SegmentScan:
    """The result of one pass over a segment."""

    size_bytes: int
    """Size of the whole batches that were scanned."""
    crc32c: int
    """CRC32C of these batches."""
    base_timestamp_ms: int
    """The smallest batch base timestamp (or the append time), or NO_TIMESTAMP."""
    max_timestamp_ms: int
    record_count: int
    batch_count: int
    epochs: tuple[EpochStart, ...]
    """The leader epochs of the batches, the first clipped to the segment's base."""
    entries: tuple[IndexEntry, ...]
    last_offset_found: int | None
    """The last offset of the last batch; None without any. Not the segment's last offset."""
    has_transactions: bool
    aborted: tuple[AbortedTransaction, ...]
    """The transactions whose abort marker is among the scanned batches."""
    tracker: TransactionTracker
    """The state of transactions at the end of the scan."""
    ended_by: EndedBy


class SegmentScanner:
    """
    Checks a segment's bytes as they are fed, and collects the facts for an upload.

    Feed it views that begin where the last one was consumed to, until `is_done` or the end of the bytes;
    then call `finish`. It cannot be used after an error. With *next_offset* the segment is closed, and
    every byte must be part of it. Without it, the segment is active, and batches that do not end below
    *stop_offset* are left out.

    Plain batches are scanned by *walk* where there is one; see `compiled.walks`. It gives the same results.

    Index entries are an interval apart. The ascending *index_positions* are positions of additional
    entries. With the positions of an existing index, a scan finds the same entries, or that index is wrong.
    """

    def __init__(
        self,
        base_offset: int,
        next_offset: int | None,
        *,
        stop_offset: int | None = None,
        index_interval_bytes: int = DEFAULT_INDEX_INTERVAL_BYTES,
        index_positions: Sequence[int] = (),
        walk: BatchWalk | None = None,
        source: str | None = None,
    ) -> None:
        self._base_offset = base_offset
        self._is_active = next_offset is None
        self._stop_offset = stop_offset if self._is_active else None
        bounds = [bound for bound in (next_offset, self._stop_offset) if bound is not None]
        self._limit_offset = bounds[0] if bounds else _NO_LIMIT
        self._interval_bytes = index_interval_bytes
        self._index_positions = index_positions
        # The compiled walk makes entries an interval apart, and no others.
        self._walk = None if index_positions else walk
        self._source = source
        self._tracker = TransactionTracker(base_offset)
        self._wanted_bytes = HEADER_BYTES
        self._ended_by: EndedBy | None = None
        self._is_in_zeros = False
        self._zero_bytes = 0
        self._is_rest_zero = False
        self._position = 0
        self._crc32c = 0
        self._expected_offset = base_offset
        self._next_index_position = 0
        self._base_timestamp_ms = _NO_LIMIT
        self._max_timestamp_ms = NO_TIMESTAMP
        self._record_count = 0
        self._batch_count = 0
        self._epoch = -1
        self._epochs: list[EpochStart] = []
        self._entries: list[tuple[int, int, int]] = []
        self._has_transactions = False
        self._aborted: list[AbortedTransaction] = []

    @property
    def wanted_bytes(self) -> int:
        """Return how many bytes the next view must have for `feed` to make progress."""
        return self._wanted_bytes

    @property
    def is_done(self) -> bool:
        """Return whether the end was found before the bytes ended. More bytes change nothing."""
        return self._ended_by is not None

    @property
    def batch_count(self) -> int:
        """Return the number of whole batches that were scanned so far."""
        return self._batch_count

    def feed(self, view: memoryview) -> int:  # noqa: C901, PLR0912, PLR0915 - flat: the hot path
        """
        Scan the whole batches at the front of *view*; return their size in bytes.

        Raises:
            OldMagicError: The segment holds message format v0 or v1.
            CorruptDataError: A batch is damaged, or not at its place.
        """
        if self._ended_by is not None:
            return 0
        if self._is_in_zeros:
            return self._feed_zeros(view)
        position = walked = 0 if self._walk is None else self._walk_over(self._walk, view)
        unpack_from, checksum = HEADER.unpack_from, crc32c
        limit_offset, epoch = self._limit_offset, self._epoch
        expected, index_at = self._expected_offset, self._next_index_position - self._position
        base_timestamp_ms, max_timestamp_ms = self._base_timestamp_ms, self._max_timestamp_ms
        records = batches = 0
        size = len(view)
        last_header = size - HEADER_BYTES
        self._wanted_bytes, self._is_rest_zero = HEADER_BYTES, False
        while position <= last_header:
            header = unpack_from(view, position)
            (offset, length, batch_epoch, magic, crc, flags, delta, base_ms, max_ms, _, _, _, count) = header
            if not (
                magic == MAGIC
                and expected <= offset
                and 0 <= delta < limit_offset - offset
                and MIN_LENGTH <= length <= _MAX_LENGTH
                and 0 <= count <= delta + 1
            ):
                self._expected_offset = expected
                self._stop_or_fail(view, position, BatchHeader._make(header))
                break
            end = position + LENGTH_STARTS_AT + length
            if end > size:
                self._wanted_bytes = end - position
                break
            if checksum(view[position + CRC_STARTS_AT : end]) != crc:
                self._stop_or_fail_crc(view, position, BatchHeader._make(header))
                break
            if count:
                if flags & _OWN_TIME_FLAGS:
                    base_ms = max_ms if flags & LOG_APPEND_TIME_FLAG else min(base_ms, max_ms)
                if NO_TIMESTAMP < base_ms < base_timestamp_ms:
                    base_timestamp_ms = base_ms
                if max_ms > max_timestamp_ms:  # noqa: PLR1730 - max() costs a call for each batch
                    max_timestamp_ms = max_ms
                records += count
            if batch_epoch != epoch:
                epoch = self._note_epoch(batch_epoch, offset, position)
            if position >= index_at:
                self._entries.append((offset, self._position + position, max_timestamp_ms))
                index_at = self._next_entry_at(self._position + position) - self._position
            if flags & TRANSACTIONAL_FLAG:
                self._note_transaction(view[position:end], position, BatchHeader._make(header))
            batches += 1
            expected = offset + delta + 1
            position = end
        else:
            self._is_rest_zero = position < size and _is_zero(view[position:])
        self._crc32c = checksum(view[walked:position], self._crc32c)
        self._expected_offset, self._next_index_position = expected, self._position + index_at
        self._base_timestamp_ms, self._max_timestamp_ms = base_timestamp_ms, max_timestamp_ms
        self._record_count += records
        self._batch_count += batches
        self._position += position
        return position

    def finish(self, left_bytes: int = 0) -> SegmentScan:
        """
        Return the result; *left_bytes* is the number of bytes that `feed` did not consume.

        Raises:
            CorruptDataError: The segment is closed, and its last bytes are not a whole batch.
        """
        if self._ended_by is None:
            self._ended_by = EndedBy.END_OF_FILE
            if self._is_in_zeros or left_bytes:
                self._end_before(left_bytes)
        has_batches = self._batch_count > 0
        return SegmentScan(
            size_bytes=self._position,
            crc32c=self._crc32c,
            base_timestamp_ms=NO_TIMESTAMP
            if self._base_timestamp_ms == _NO_LIMIT
            else self._base_timestamp_ms,
            max_timestamp_ms=self._max_timestamp_ms,
            record_count=self._record_count,
            batch_count=self._batch_count,
            epochs=tuple(self._epochs),
            entries=tuple(IndexEntry(*entry) for entry in self._entries),
            last_offset_found=self._expected_offset - 1 if has_batches else None,
            has_transactions=self._has_transactions,
            aborted=tuple(self._aborted),
            tracker=self._tracker,
            ended_by=self._ended_by,
        )

    def _walk_over(self, walk: BatchWalk, view: memoryview) -> int:
        """Scan the plain batches at the front of *view* in machine code; return where they end."""
        no_time = self._base_timestamp_ms == _NO_LIMIT
        found = walk.scan(
            view,
            Scanned(
                self._expected_offset,
                self._epoch,
                self._crc32c,
                None if no_time else self._base_timestamp_ms,
                self._max_timestamp_ms,
                self._next_index_position - self._position,
            ),
            limit_offset=self._limit_offset,
            interval_bytes=self._interval_bytes,
        )
        if found.leader_epoch != self._epoch:
            # Only the first epoch is found by a walk, and it begins with the segment.
            self._note_epoch(found.leader_epoch, self._base_offset, self._position)
        self._expected_offset, self._crc32c = found.expected_offset, found.checksum
        if found.base_timestamp_ms is not None:
            self._base_timestamp_ms = found.base_timestamp_ms
        self._max_timestamp_ms = found.max_timestamp_ms
        self._next_index_position = self._position + found.size_bytes + found.index_at
        self._record_count += found.record_count
        self._batch_count += found.batch_count
        self._entries += [(offset, self._position + at, time_ms) for offset, at, time_ms in found.entries]
        return found.size_bytes

    def _next_entry_at(self, position: int) -> int:
        """Return the position from which the next index entry is due, after one at *position*."""
        row = bisect_right(self._index_positions, position)
        return min([position + self._interval_bytes, *self._index_positions[row : row + 1]])

    def _stop_or_fail(self, view: memoryview, position: int, header: BatchHeader) -> None:
        """End the scan before a header that is not the next batch's, or raise its fault."""
        if view[position : position + HEADER_BYTES] == _ZERO_HEADER:
            if self._is_active:
                self._ended_by = EndedBy.ZERO_TAIL
            else:
                # The error reports their number, so the rest is still fed, as zeros.
                self._is_in_zeros = True
            return
        if self._is_past_stop(header):
            self._ended_by = EndedBy.STOP_OFFSET
            return
        if not self._may_be_torn(view, position, written_to=position + _COUNT_STARTS_AT):
            message = view[position : position + max(0, header.size_bytes)]
            if is_of_old_format(header) and len(message) < header.size_bytes:
                # Its checksum tells an old message from a batch whose magic is damaged.
                self._wanted_bytes = header.size_bytes
                return
            raise located_fault(
                header,
                header_fault(header) or self._order_fault(header),
                position=self._position + position,
                source=self._source,
                message=message,
            )

    def _stop_or_fail_crc(self, view: memoryview, position: int, header: BatchHeader) -> None:
        """End the scan before a batch that the broker may be writing, or raise that it is damaged."""
        if not self._may_be_torn(view, position, written_to=position + header.size_bytes):
            found = crc32c(view[position + CRC_STARTS_AT : position + header.size_bytes])
            self._fail(
                f"batch CRC is {found:08x} and should be {header.crc:08x}", position, header.base_offset
            )

    def _is_past_stop(self, header: BatchHeader) -> bool:
        if self._stop_offset is None:
            return False
        is_next = header.magic == MAGIC and header.base_offset >= self._expected_offset
        return self._expected_offset >= self._stop_offset or (
            is_next and header.last_offset >= self._stop_offset
        )

    def _may_be_torn(self, view: memoryview, position: int, *, written_to: int) -> bool:
        """
        Return whether a batch may look wrong because the broker has not finished writing it.

        It may in an active segment if only the end of the file or allocated zeros follow. If there are
        too few bytes to decide, `wanted_bytes` asks for more.
        """
        if not self._is_active:
            return False
        after = view[written_to : written_to + HEADER_BYTES]
        if len(after) < HEADER_BYTES:
            self._wanted_bytes = written_to + HEADER_BYTES - position
            return True
        if _is_zero(after):
            self._ended_by = EndedBy.TORN_TAIL
            return True
        return False

    def _end_before(self, left_bytes: int) -> None:
        """
        Set why the scan ended before the last *left_bytes*, which are no whole batch.

        Raises:
            CorruptDataError: The segment is closed.
        """
        is_zero = self._is_in_zeros or self._is_rest_zero
        if self._is_active:
            self._ended_by = EndedBy.ZERO_TAIL if is_zero else EndedBy.TORN_TAIL
        elif is_zero:
            zero_bytes = self._zero_bytes + left_bytes
            self._fail(
                f"zero tail of {zero_bytes} bytes; preallocated or lost in a crash", 0, self._expected_offset
            )
        else:
            self._fail(
                f"the last batch is cut: only {left_bytes} of at least {self._wanted_bytes} bytes exist",
                0,
                self._expected_offset,
            )

    def _feed_zeros(self, view: memoryview) -> int:
        if not _is_zero(view):
            self._fail(
                "zeros stand where a batch should begin, and data follows them", 0, self._expected_offset
            )
        self._zero_bytes += len(view)
        return len(view)

    def _order_fault(self, header: BatchHeader) -> str:
        """Return what is wrong with the place of *header*, which is possible by itself."""
        if header.base_offset < self._base_offset:
            return (
                f"batch offset {header.base_offset} is before the segment's base offset {self._base_offset}"
            )
        if header.base_offset < self._expected_offset:
            return f"batch offset {header.base_offset} is out of order: {self._expected_offset} comes next"
        return (
            f"batch offset {header.last_offset} is beyond the segment's last offset {self._limit_offset - 1}"
        )

    def _note_epoch(self, epoch: int, offset: int, position: int) -> int:
        """Record a change of the leader epoch; return the epoch that applies from here on."""
        known = self._epochs[-1][0] if self._epochs else -1
        if epoch < 0:
            # A batch that no leader has stamped has no information about epochs.
            return known
        if epoch < known:
            self._fail(f"leader epoch {epoch} follows {known}", position, offset)
        self._epochs.append((epoch, offset if self._epochs else self._base_offset))
        self._epoch = epoch
        return epoch

    def _note_transaction(self, batch: memoryview, position: int, header: BatchHeader) -> None:
        self._has_transactions = True
        if not header.is_control:
            self._tracker.note_data(header)
            return
        try:
            marker = control_type(batch)
        except CorruptDataError as error:
            raise CorruptDataError(
                error.message,
                source=self._source,
                position=self._position + position,
                offset=header.base_offset,
            ) from error
        aborted = self._tracker.note_marker(header, marker)
        if aborted is not None:
            self._aborted.append(aborted)

    def _fail(self, fault: str, position: int, offset: int) -> NoReturn:
        raise CorruptDataError(fault, source=self._source, position=self._position + position, offset=offset)


def _is_zero(view: memoryview) -> bool:
    return not bytes(view).strip(b"\0")


class HeaderWalk:
    """
    A walk over the headers of one segment file, from *position* to the last whole batch.

    *read_at* returns the bytes at a position, fewer only at the end of the file.
    """

    def __init__(
        self,
        read_at: Callable[[int, int], bytes],
        *,
        size_bytes: int,
        base_offset: int,
        position: int = 0,
        source: str | None = None,
    ) -> None:
        self._read_at = read_at
        self._size_bytes = size_bytes
        self._source = source
        self.position = position
        """Position of the next batch; after the walk, the end of the log."""
        self.next_offset = base_offset
        """The first offset after the last batch."""
        self.ended_by = EndedBy.END_OF_FILE

    def batches(self) -> Iterator[tuple[int, BatchHeader]]:
        """
        Yield each batch's position and header, ascending.

        Raises:
            OldMagicError: The segment holds message format v0 or v1.
            CorruptDataError: A header is impossible or out of order.
        """
        block, block_at = b"", 0
        while (left := self._size_bytes - self.position) > 0:
            in_block = self.position - block_at
            if not 0 <= in_block <= len(block) - HEADER_BYTES:
                block_at, in_block = self.position, 0
                block = self._read_at(block_at, min(_READ_BYTES, left))
            if left < HEADER_BYTES or not block[in_block + _MAGIC_STARTS_AT]:
                # Magic 0 may be an old message; then the header's other bytes are not all zero.
                raw = block[in_block : in_block + HEADER_BYTES]
                if not raw.strip(b"\0"):
                    self.ended_by = EndedBy.ZERO_TAIL
                    return
                if left < HEADER_BYTES:
                    self.ended_by = EndedBy.TORN_TAIL
                    return
            header = BatchHeader._make(HEADER.unpack_from(block, in_block))
            self._check(header)
            size_bytes = header.size_bytes
            if size_bytes > left:
                self.ended_by = EndedBy.TORN_TAIL
                return
            at = self.position
            self.position += size_bytes
            self.next_offset = header.next_offset
            yield at, header

    def follow_transactions(self, tracker: TransactionTracker) -> list[AbortedTransaction]:
        """
        Walk to the end with *tracker*; return the transactions whose abort marker was met.

        Raises:
            CorruptDataError: A header is impossible or out of order, or a marker unreadable.
        """
        aborted = []
        for position, header in self.batches():
            if not header.is_transactional:
                continue
            if not header.is_control:
                tracker.note_data(header)
                continue
            try:
                ended = tracker.note_marker(header, self._marker(position, header))
            except CorruptDataError as error:
                raise self._fault(error.message, position, header) from error
            if ended is not None:
                aborted.append(ended)
        return aborted

    def _marker(self, position: int, header: BatchHeader) -> Marker:
        if header.size_bytes > _MAX_MARKER_BATCH_BYTES:
            raise self._fault(f"a control batch of {header.size_bytes} bytes is impossible", position, header)
        return control_type(memoryview(self._read_at(position, header.size_bytes)))

    def _check(self, header: BatchHeader) -> None:
        fault = header_fault(header)
        if fault is None and header.base_offset < self.next_offset:
            fault = f"batch offset {header.base_offset} is out of order: {self.next_offset} comes next"
        if fault is not None:
            left = self._size_bytes - self.position
            size_bytes = header.size_bytes if is_of_old_format(header) and header.size_bytes <= left else 0
            message = self._read_at(self.position, size_bytes)
            raise located_fault(header, fault, position=self.position, source=self._source, message=message)

    def _fault(self, fault: str, position: int, header: BatchHeader) -> CorruptDataError:
        return CorruptDataError(fault, source=self._source, position=position, offset=header.base_offset)
