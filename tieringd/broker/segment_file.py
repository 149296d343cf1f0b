"""
Segment files on disk: scanned whole before an upload, or walked by their headers.

Every function blocks; services call them in a thread. Files are read with positioned reads into one
buffer and never mapped into memory: a follower truncates its log in place, and touching a page past the
new end would kill the process.

The broker's own index files are archived unchanged when they agree with the log. One that disagrees is
reported and left out: no reader of ours uses it, and a broker rebuilds a missing index but trusts a
wrong one.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from crc32c import crc32c

from tieringd.broker.local_errors import named_errors
from tieringd.compiled.loading import loaded_walk, note_checked
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.index_files import (
    offset_index_columns,
    parse_transaction_index,
    time_index_columns,
)
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.formats.segment_scan import (
    DEFAULT_INDEX_INTERVAL_BYTES,
    EndedBy,
    HeaderWalk,
    SegmentScan,
    SegmentScanner,
)
from tieringd.formats.transactions import TransactionTracker
from tieringd.model.segment import AbortedTransaction, BrokerIndexes, LocalSegment, SegmentSlice

READ_BUFFER_BYTES = 1 << 20
"""Small enough to stay in a core's cache between the read and the two checksums."""

_MAX_INDEX_BYTES = 64 << 20
"""No broker writes a larger side file. This limits the memory that one damaged file can take."""
_reading = partial(named_errors, belongs_to="the broker's log directories")


@dataclass(frozen=True, slots=True)
class LogWalk:
    """The end of a walk over headers, and the aborted transactions that it found."""

    position: int
    """Position in the file after the last whole batch."""
    next_offset: int
    """Offset after the last whole batch."""
    aborted: tuple[AbortedTransaction, ...]
    ended_by: EndedBy


def open_segment(segment: LocalSegment) -> int:
    """
    Open a segment's `.log` for reading; the caller closes the descriptor.

    Raises:
        LocalFileError: It is gone, or may not be read.
    """
    with _reading(segment.path):
        return os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """A segment's `.log`, open for reading, with its description from a directory scan. Blocks."""

    fd: int
    segment: LocalSegment

    @classmethod
    def open(cls, segment: LocalSegment) -> OpenSegment:
        """
        Open the file; the caller closes it.

        Raises:
            LocalFileError: It is gone, or may not be read.
        """
        return cls(open_segment(segment), segment)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def require_unchanged(self) -> None:
        """
        Compare the file with the scan; an active one may have grown since.

        Raises:
            LocalFileError: The file has changed, or its path belongs to another file.
        """
        status, segment = os.fstat(self.fd), self.segment
        is_same = (
            status.st_ino == segment.inode and status.st_size >= segment.size_bytes
            if segment.is_active
            else (status.st_ino, status.st_size, status.st_mtime_ns) == segment.identity
        )
        if not is_same:
            raise LocalFileError(f"{segment.path} changed after it was listed", path=segment.path)

    def read_at(self, position: int, size_bytes: int) -> bytes:
        """
        Return exactly *size_bytes* bytes of the file.

        Raises:
            LocalFileError: It cannot be read, or is shorter than before.
        """
        return _read_at(self.fd, position, size_bytes, self.segment)

    def crc32c(self, position: int, size_bytes: int) -> int:
        """
        Return the CRC32C of a range of the file.

        Raises:
            LocalFileError: It cannot be read, or is shorter than before.
        """
        value, end = 0, position + size_bytes
        buffer = memoryview(bytearray(min(READ_BUFFER_BYTES, size_bytes)))
        with _reading(self.segment.path):
            while position < end:
                view = buffer[: min(len(buffer), end - position)]
                _read_fully(self.fd, view, position, self.segment)
                value = crc32c(view, value)
                position += len(view)
        return value


def position_of(fd: int, segment: LocalSegment, offset: int) -> int:
    """
    Return the position in the open file of the first batch at or past *offset*.

    Raises:
        OldMagicError: The segment holds message format v0 or v1.
        CorruptDataError: *offset* is inside a batch, or a header before it is impossible.
        LocalFileError: The file cannot be read, or is shorter than before.
    """
    (position,) = positions_of(fd, segment, (offset,))
    return position


def positions_of(fd: int, segment: LocalSegment, offsets: Sequence[int]) -> tuple[int, ...]:
    """
    Return the position in the open file of the first batch at or past each of *offsets*.

    *offsets* ascend. The position of an offset past the last batch is the end of that batch.

    Raises:
        OldMagicError: The segment holds message format v0 or v1.
        CorruptDataError: An offset is inside a batch, or a header before the last one is impossible.
        LocalFileError: The file cannot be read, or is shorter than before.
    """
    walk = HeaderWalk(
        lambda at, size_bytes: _read_at(fd, at, size_bytes, segment),
        size_bytes=segment.size_bytes,
        base_offset=segment.base_offset,
        source=segment.path,
    )
    found: list[int] = []
    for position, header in walk.batches():
        while len(found) < len(offsets) and offsets[len(found)] <= header.last_offset:
            offset = offsets[len(found)]
            if header.base_offset < offset:
                raise CorruptDataError(
                    f"offset {offset}, the next one to archive, is inside the batch from "
                    f"{header.base_offset} to {header.last_offset}",
                    source=segment.path,
                    position=position,
                    offset=header.base_offset,
                    hint="The local log is not the log that was archived",
                )
            found.append(position)
        if len(found) == len(offsets):
            break
    return (*found, *(walk.position for _ in offsets[len(found) :]))


def end_by_headers(segment: LocalSegment) -> tuple[int, bool]:
    """
    Return the offset after the last whole batch of a segment's `.log`, and whether the file ends there.

    The offset is the base offset if there is no batch. The walk ends at a header that is impossible, out of
    order or of an old format, and at a batch that is not whole.

    Raises:
        LocalFileError: The file cannot be read, or is shorter than before.
    """
    file = OpenSegment.open(segment)
    try:
        walk = HeaderWalk(
            file.read_at, size_bytes=segment.size_bytes, base_offset=segment.base_offset, source=segment.path
        )
        for _ in walk.batches():
            pass
    except CorruptDataError:
        return walk.next_offset, False
    finally:
        file.close()
    return walk.next_offset, walk.ended_by is EndedBy.END_OF_FILE


class FileEnds:
    """
    Where files end, as `end_by_headers` says. Each scan asks for the same pins, while a store is away.

    An end that a scan asks for is kept for the next scan. It is dropped if that scan does not ask for it.
    """

    def __init__(self) -> None:
        """Begin without a file."""
        self._before: dict[LocalSegment, tuple[int, bool]] = {}
        self._asked: dict[LocalSegment, tuple[int, bool]] = {}

    def begin_scan(self) -> None:
        """Drop what the last scan did not ask for."""
        self._before, self._asked = self._asked, {}

    def of(self, segment: LocalSegment) -> tuple[int, bool]:
        """
        Return what `end_by_headers` does.

        Raises:
            LocalFileError: The file is read, and cannot be.
        """
        end = self._asked.get(segment) or self._before.get(segment) or end_by_headers(segment)
        self._asked[segment] = end
        return end


def batch_start_in(file: OpenSegment, segment: LocalSegment, offset: int) -> int:
    """
    Return the base offset of the batch of the open *segment* that *offset* is inside of, or *offset*.

    Raises:
        CorruptDataError: A header before *offset* is impossible.
        LocalFileError: The file cannot be read, or is shorter than before.
    """
    walk = HeaderWalk(
        file.read_at,
        size_bytes=file.segment.size_bytes,
        base_offset=segment.base_offset,
        source=segment.path,
    )
    for _position, header in walk.batches():
        if header.last_offset >= offset:
            return min(header.base_offset, offset)
    return offset


def is_inside_batch(segment: LocalSegment, offset: int) -> bool:
    """
    Say whether *offset* is inside a batch of a segment's `.log`, and not its first offset.

    Raises:
        CorruptDataError: A header before *offset* is impossible.
        LocalFileError: The file cannot be read, or is shorter than before.
    """
    file = OpenSegment.open(segment)
    try:
        return batch_start_in(file, segment, offset) < offset
    finally:
        file.close()


def scan_segment_file(
    fd: int,
    part: SegmentSlice,
    *,
    position: int = 0,
    index_interval_bytes: int = DEFAULT_INDEX_INTERVAL_BYTES,
) -> SegmentScan:
    """
    Read *part* of the open file once, and check every batch.

    *position* is the beginning of its first batch. Positions in the result are relative to it, as in the
    object that will hold the part. An open slice ends before the first batch that reaches its bound.

    Raises:
        OldMagicError: The segment holds message format v0 or v1.
        CorruptDataError: A batch is damaged, or not at its place.
        LocalFileError: The file cannot be read, or is shorter than before.
    """
    segment, begin = part.segment, position
    scanner = SegmentScanner(
        part.base_offset,
        None if part.is_open else part.next_offset,
        stop_offset=part.next_offset,
        index_interval_bytes=index_interval_bytes,
        walk=loaded_walk(),
        source=segment.path,
    )
    buffer = memoryview(bytearray(min(READ_BUFFER_BYTES, segment.size_bytes - begin)))
    try:
        with _reading(segment.path):
            # Each read begins at the first byte that was not consumed. The bytes read twice are less than a
            # batch, and come from the page cache.
            while not scanner.is_done and (left := segment.size_bytes - position):
                if len(buffer) < scanner.wanted_bytes <= left:
                    buffer = memoryview(bytearray(scanner.wanted_bytes))
                view = buffer[: min(left, len(buffer))]
                _read_fully(fd, view, position, segment)
                consumed = scanner.feed(view)
                if not consumed and scanner.wanted_bytes > left:
                    break
                position += consumed
    finally:
        note_checked(position - begin, scanner.batch_count)
    return scanner.finish(segment.size_bytes - position)


def scan_transactions(
    segment: LocalSegment,
    tracker: TransactionTracker,
    *,
    position: int = 0,
    next_offset: int | None = None,
) -> LogWalk:
    """
    Walk a segment's headers from *position* to its end, and add its transactions to *tracker*.

    To continue an earlier walk, pass that walk's position and next offset. The end of an active segment
    is its last whole batch.

    Raises:
        OldMagicError: The segment holds message format v0 or v1.
        CorruptDataError: A header is impossible or out of order, or a closed segment does not end with a
            whole batch. *tracker* holds the transactions before the fault.
        LocalFileError: The file cannot be read, or is shorter than before.
    """
    fd = open_segment(segment)
    try:
        walk = HeaderWalk(
            lambda at, size_bytes: _read_at(fd, at, size_bytes, segment),
            size_bytes=segment.size_bytes,
            base_offset=segment.base_offset if next_offset is None else next_offset,
            position=position,
            source=segment.path,
        )
        aborted = walk.follow_transactions(tracker)
    finally:
        os.close(fd)
    if walk.ended_by is not EndedBy.END_OF_FILE and not segment.is_active:
        raise CorruptDataError(
            f"closed segment has a {walk.ended_by.value} of {segment.size_bytes - walk.position} bytes",
            source=segment.path,
            position=walk.position,
            offset=walk.next_offset,
        )
    return LogWalk(walk.position, walk.next_offset, tuple(aborted), walk.ended_by)


def read_broker_indexes(segment: LocalSegment) -> BrokerIndexes:
    """
    Return the broker's side files of *segment*; None for each that is missing.

    Raises:
        LocalFileError: A side file exists and cannot be read.
    """
    stem = segment.path.removesuffix(LogFileKind.LOG.value)
    snapshot = None
    if segment.next_offset is not None:
        name = encode_file_name(segment.next_offset, LogFileKind.PRODUCER_SNAPSHOT)
        snapshot = _read_side_file(f"{os.path.dirname(segment.path)}/{name}")  # noqa: PTH120 - a name, no file
    return BrokerIndexes(
        offset_index=_read_side_file(f"{stem}{LogFileKind.OFFSET_INDEX.value}"),
        time_index=_read_side_file(f"{stem}{LogFileKind.TIME_INDEX.value}"),
        transaction_index=_read_side_file(f"{stem}{LogFileKind.TRANSACTION_INDEX.value}"),
        producer_snapshot=snapshot,
    )


def check_broker_indexes(
    scan: SegmentScan, segment: LocalSegment, indexes: BrokerIndexes
) -> tuple[BrokerIndexes, tuple[str, ...]]:
    """
    Return those of *indexes* that agree with the log, and the faults of the others in words.

    The offset index is compared with our own sparse one, so an error smaller than the distance of two of
    our entries can stay unnoticed.
    """
    checks: dict[str, Callable[[bytes], str | None]] = {
        "offset_index": lambda data: _offset_index_fault(scan, segment, data),
        "time_index": lambda data: _time_index_fault(scan, segment, data),
        "transaction_index": lambda data: _transaction_index_fault(scan, segment, data),
    }
    kept: dict[str, bytes | None] = {}
    faults: list[str] = []
    for name, check in checks.items():
        data: bytes | None = getattr(indexes, name)
        fault = None if data is None else check(data)
        kept[name] = None if fault else data
        if fault:
            faults.append(f"the broker's {name.replace('_', ' ')} of {segment.path} is wrong: {fault}")
    return BrokerIndexes(**kept, producer_snapshot=indexes.producer_snapshot), tuple(faults)


def _offset_index_fault(scan: SegmentScan, segment: LocalSegment, data: bytes) -> str | None:
    try:
        offsets, positions = offset_index_columns(data, base_offset=segment.base_offset)
    except CorruptDataError as error:
        return str(error)
    if not offsets:
        return None
    # Both columns ascend, so it is enough to check the last entry, and the first one after each of ours.
    if positions[-1] >= scan.size_bytes:
        return f"offset {offsets[-1]} is at byte {positions[-1]}, past the end of the log"
    if segment.next_offset is not None and offsets[-1] >= segment.next_offset:
        return f"offset {offsets[-1]} is beyond the segment"
    for own in reversed(scan.entries):
        nearest = bisect_left(positions, own.position)
        if nearest < len(positions) and offsets[nearest] < own.offset:
            # A reader that searches this offset would start after it.
            return f"offset {offsets[nearest]} is at byte {positions[nearest]}, after offset {own.offset}"
    return None


def _time_index_fault(scan: SegmentScan, segment: LocalSegment, data: bytes) -> str | None:
    try:
        timestamps, offsets = time_index_columns(data, base_offset=segment.base_offset)
    except CorruptDataError as error:
        return str(error)
    if not timestamps:
        return None
    if segment.next_offset is not None and offsets[-1] >= segment.next_offset:
        return f"offset {offsets[-1]} is beyond the segment"
    if timestamps[-1] > scan.max_timestamp_ms:
        return f"time {timestamps[-1]} is later than the latest record's, {scan.max_timestamp_ms}"
    return None


def _transaction_index_fault(scan: SegmentScan, segment: LocalSegment, data: bytes) -> str | None:
    try:
        entries = parse_transaction_index(data)
    except CorruptDataError as error:
        return str(error)
    listed = {(entry.producer_id, entry.last_offset) for entry in entries}
    found = {(one.producer_id, one.last_offset) for one in scan.aborted}
    # The broker lists no transaction that begins before the segment and has no records in it.
    begun_here = {
        (one.producer_id, one.last_offset) for one in scan.aborted if one.first_offset > segment.base_offset
    }
    if wrong := sorted(listed - found):
        return f"producer {wrong[0][0]} aborted no transaction at offset {wrong[0][1]}"
    if missing := sorted(begun_here - listed):
        return (
            f"the index lacks the transaction of producer {missing[0][0]} that was aborted at offset "
            f"{missing[0][1]}"
        )
    return None


def _read_fully(fd: int, view: memoryview, position: int, segment: LocalSegment) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], position + done)
        if count == 0:
            raise _changed(segment, position + done)
        done += count


def _read_at(fd: int, position: int, size_bytes: int, segment: LocalSegment) -> bytes:
    with _reading(segment.path):
        data = os.pread(fd, size_bytes, position)
    if len(data) < size_bytes:
        raise _changed(segment, position + len(data))
    return data


def _changed(segment: LocalSegment, size_bytes: int) -> LocalFileError:
    return LocalFileError(
        f"{segment.path} changed while it was read: {size_bytes} of {segment.size_bytes} bytes are left",
        path=segment.path,
    )


def _read_side_file(path: str) -> bytes | None:
    with _reading(path):
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - Path would only wrap the name again
                data = file.read(_MAX_INDEX_BYTES + 1)
        except FileNotFoundError:
            return None
    if len(data) > _MAX_INDEX_BYTES:
        raise LocalFileError(f"{path} is larger than {_MAX_INDEX_BYTES} bytes", path=path)
    return data
