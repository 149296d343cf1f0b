"""
Redpanda segment files on disk: re-framed for an upload, walked by their headers, dated by their index.

Every function blocks; services call them in a thread. A `LocalSegment` of such a file has Kafka offsets
like any other. Its path has the raw base offset, so the path and the Kafka base offset are the segment's
own translation, and no further state is needed.

Redpanda opens a new segment before the last bytes of the previous one are on disk, so a file is not
whole just because a later one exists. A closed segment is whole when its last batch ends where the next
segment begins. Only a compacted topic's segment may end earlier, and then its file ends there too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from tieringd.broker.local_errors import named_errors
from tieringd.broker.segment_file import READ_BUFFER_BYTES, LogWalk
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.redpanda_index import parse_base_index
from tieringd.formats.redpanda_names import RawFileKind, RawFileName, parse_raw_file_name
from tieringd.formats.redpanda_reframe import RedpandaWalk, Reframing, SegmentReframer
from tieringd.formats.segment_scan import EndedBy
from tieringd.formats.transactions import TransactionTracker
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.segment import LocalSegment

_ALLOCATED_TAIL_BYTES = 4096
"""Redpanda allocates megabytes ahead. A tail of at least this many zeros counts as allocated space."""
_MAX_INDEX_BYTES = 16 << 20
"""An entry has 16 bytes, and a segment has at most one entry per 32 KiB."""
_reading = partial(named_errors, belongs_to="Redpanda's data directory")


@dataclass(frozen=True, slots=True)
class RawSegment:
    """One `.log` file of a Redpanda partition in a directory scan. Offsets are raw."""

    raw_base_offset: int
    next_raw_offset: int | None
    """The base of the following segment; None for the active one."""
    leader_epoch: int
    size_bytes: int
    path: str
    inode: int
    modified_ns: int

    @property
    def identity(self) -> tuple[int, int, int]:
        """Return a value that changes when the bytes may have changed (inode, size, mtime)."""
        return (self.inode, self.size_bytes, self.modified_ns)


def translation_of(segment: LocalSegment) -> OffsetTranslation:
    """Return the translation of the segment's base, from its path and its Kafka offset."""
    return OffsetTranslation.at(
        raw_offset=_name_of(segment.path).raw_base_offset, kafka_offset=segment.base_offset
    )


def uncounted_offsets(segment: RawSegment, *, before: int | None = None) -> int:
    """
    Return how many raw offsets of *segment* are not Kafka's; with *before*, of those below it.

    Raises:
        UnsupportedBatchTypeError: A batch has a type for which it is unknown whether it has Kafka
            offsets.
        CorruptDataError: A header is damaged, impossible or out of order.
        LocalFileError: The file cannot be read, or is not whole (yet).
    """
    with _opened(segment.path) as fd, _waiting_for_the_rest(fd, segment):
        walk = _walk(fd, segment, segment.raw_base_offset, is_active=segment.next_raw_offset is None)
        counted = 0
        for _, header in walk.batches():
            if before is not None and header.base_offset >= before:
                return counted
            counted = walk.uncounted_offsets
    if segment.next_raw_offset is not None:
        _require_whole(segment.path, walk.next_raw_offset, segment.next_raw_offset, walk.ended_by)
    elif before is not None and before > walk.next_raw_offset:
        raise _not_whole(
            segment.path, f"ends before {walk.next_raw_offset}, although raw offset {before} exists"
        )
    return counted


def reframe_segment_file(fd: int, segment: LocalSegment, spool_fd: int) -> LocalSegment:
    """
    Write the closed *segment*, open as *fd*, to *spool_fd* as Kafka batches.

    Returns the segment with its size in the spool, for `scan_segment_file`.

    Raises:
        UnsupportedBatchTypeError: A batch has a type for which it is unknown whether it has Kafka
            offsets.
        CorruptDataError: A batch is damaged, or not at its place.
        LocalFileError: The file cannot be read or is not whole yet, or the spool cannot be written.
    """

    def write(out: bytearray) -> None:
        try:
            done = 0
            while done < len(out):
                done += os.write(spool_fd, memoryview(out)[done:])
        except OSError as error:
            raise LocalFileError(
                f"{segment.path} cannot be spooled: {error.strerror}",
                path=segment.path,
                hint="Free space on the disk of the spool directory: each upload needs the size of a segment",
            ) from error

    done = _reframe(fd, segment, write)
    return replace(segment, size_bytes=done.size_bytes)


def scan_redpanda_transactions(segment: LocalSegment, tracker: TransactionTracker) -> LogWalk:
    """
    Walk a segment's headers to its end, and add its transactions to *tracker*.

    In the result, the position is in the Redpanda file, and the offsets are Kafka's.

    Raises:
        CorruptDataError: A header is damaged or out of order, or a marker unreadable.
        LocalFileError: The file cannot be read, or is closed and not whole yet.
    """
    base = translation_of(segment)
    with _opened(segment.path) as fd, _waiting_for_the_rest(fd, segment):
        walk = _walk(fd, segment, base.raw_offset, is_active=segment.is_active)
        leader_epoch = _name_of(segment.path).leader_epoch
        aborted = walk.follow_transactions(tracker, delta=base.delta, leader_epoch=leader_epoch)
    next_offset = walk.next_raw_offset - base.delta - walk.uncounted_offsets
    if segment.next_offset is not None:
        _require_whole(segment.path, next_offset, segment.next_offset, walk.ended_by)
    return LogWalk(walk.position, next_offset, tuple(aborted), walk.ended_by)


def read_broker_timestamp_ms(segment: LocalSegment, *, last_raw_offset: int) -> int | None:
    """
    Return when Redpanda last appended to the closed *segment*, by its own clock.

    None if its index does not hold the time: an older version wrote it, or it was rebuilt after a crash.

    Raises:
        CorruptDataError: The index is damaged, or of a version that cannot be read.
        LocalFileError: There is no index, it cannot be read, or it does not reach from the segment's
            base to *last_raw_offset*.
    """
    path = _side_file(segment.path, RawFileKind.INDEX)
    with _opened(path) as fd, _reading(path), os.fdopen(fd, "rb", closefd=False) as file:
        data = file.read(_MAX_INDEX_BYTES + 1)
    if len(data) > _MAX_INDEX_BYTES:
        raise LocalFileError(f"{path} is larger than {_MAX_INDEX_BYTES} bytes", path=path)
    try:
        index = parse_base_index(data)
    except CorruptDataError as error:
        raise error.located(path) from error
    base = _name_of(segment.path).raw_base_offset
    if (index.base_offset, index.max_offset) != (base, last_raw_offset):
        # Redpanda rewrites the index some time after the segment was closed.
        raise LocalFileError(
            f"{path} is stale: it covers raw offsets {index.base_offset} to {index.max_offset}, but the "
            f"segment has {base} to {last_raw_offset}",
            path=path,
        )
    return index.broker_timestamp_ms


def _reframe(fd: int, segment: LocalSegment, write: Callable[[bytearray], None]) -> Reframing:
    assert segment.next_offset is not None, "only closed segments are re-framed"
    reframer = SegmentReframer(
        translation_of(segment),
        segment.next_offset,
        leader_epoch=_name_of(segment.path).leader_epoch,
        source=segment.path,
    )
    with _waiting_for_the_rest(fd, segment):
        done = _run(reframer, fd, segment, write)
    _require_whole(segment.path, done.translation.kafka_offset, segment.next_offset, done.ended_by)
    return done


def _run(
    reframer: SegmentReframer, fd: int, segment: LocalSegment, write: Callable[[bytearray], None]
) -> Reframing:
    buffer = memoryview(bytearray(min(READ_BUFFER_BYTES, segment.size_bytes)))
    out = bytearray()
    position = 0
    while left := segment.size_bytes - position:
        if len(buffer) < reframer.wanted_bytes <= left:
            buffer = memoryview(bytearray(reframer.wanted_bytes))
        view = buffer[: min(left, len(buffer))]
        _read_fully(fd, view, position, segment)
        consumed = reframer.feed(view, out)
        if out:
            write(out)
            out.clear()
        if not consumed and reframer.wanted_bytes > left:
            return reframer.finish(view)
        position += consumed
    return reframer.finish()


def _require_whole(path: str, end: int, next_base: int, ended_by: EndedBy) -> None:
    """
    Check that the batches found in a closed segment reach to the next one's base.

    Raises:
        LocalFileError: They do not, and compaction does not explain it.
    """
    if end == next_base:
        return
    if end > next_base:
        raise _not_whole(path, f"reaches to {end}, beyond the next segment's base {next_base}")
    if ended_by is not EndedBy.END_OF_FILE or not _has_compaction_index(path):
        raise _not_whole(path, f"ends before {end}, and the next segment begins at {next_base}")


def _has_compaction_index(path: str) -> bool:
    """Return whether the segment at *path* belongs to a compacted topic."""
    # Paths are text throughout this layer.
    return os.path.exists(_side_file(path, RawFileKind.COMPACTION_INDEX))  # noqa: PTH110


def _side_file(path: str, kind: RawFileKind) -> str:
    """Return the path of another file of the segment at *path*."""
    return path.removesuffix(RawFileKind.LOG.value) + kind.value


def _not_whole(path: str, fault: str) -> LocalFileError:
    return LocalFileError(
        f"{path} {fault}",
        path=path,
        hint="Redpanda may still be writing or replacing it. If this message persists, a part of the log is "
        "missing",
    )


@contextmanager
def _waiting_for_the_rest(fd: int, segment: RawSegment | LocalSegment) -> Iterator[None]:
    """Report damage as bytes that are not on disk yet, if the file still ends in allocated zeros."""
    try:
        yield
    except CorruptDataError as error:
        size_bytes = min(_ALLOCATED_TAIL_BYTES, segment.size_bytes)
        tail = _read_at(fd, segment.size_bytes - size_bytes, size_bytes, segment)
        if type(error) is CorruptDataError and not tail.strip(b"\0"):
            raise _not_whole(segment.path, f"has preallocated space, and {error.message}") from error
        raise


def _name_of(path: str) -> RawFileName:
    name = parse_raw_file_name(os.path.basename(path))  # noqa: PTH119  (a name, no file)
    if name is None:
        raise LocalFileError(f"{path} is not a segment of Redpanda's", path=path)
    return name


def _walk(
    fd: int, segment: RawSegment | LocalSegment, raw_base_offset: int, *, is_active: bool
) -> RedpandaWalk:
    return RedpandaWalk(
        lambda at, size_bytes: _read_at(fd, at, size_bytes, segment),
        size_bytes=segment.size_bytes,
        raw_base_offset=raw_base_offset,
        is_active=is_active,
        source=segment.path,
    )


def _read_fully(fd: int, view: memoryview, position: int, segment: RawSegment | LocalSegment) -> None:
    with _reading(segment.path):
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], position + done)
            if count == 0:
                raise _changed(segment, position + done)
            done += count


def _read_at(fd: int, position: int, size_bytes: int, segment: RawSegment | LocalSegment) -> bytes:
    with _reading(segment.path):
        data = os.pread(fd, size_bytes, position)
    if len(data) < size_bytes:
        raise _changed(segment, position + len(data))
    return data


def _changed(segment: RawSegment | LocalSegment, size_bytes: int) -> LocalFileError:
    return LocalFileError(
        f"{segment.path} changed while it was read: {size_bytes} of {segment.size_bytes} bytes are left",
        path=segment.path,
    )


@contextmanager
def _opened(path: str) -> Iterator[int]:
    with _reading(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
