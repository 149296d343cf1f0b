"""
The bytes of a stored segment, found again in the local log: proved by size and CRC32C, or not given.

A stored segment is a local one, a part of one, or several that were merged; a compacted local log has other
bytes, and gives none. Blocks; services call it in a thread.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from crc32c import crc32c as crc32c_of

from tieringd.broker.segment_file import position_of
from tieringd.errors import LocalFileError
from tieringd.storage.base import FileSlice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tieringd.broker.layout import Layout
    from tieringd.broker.segment_file import OpenSegment
    from tieringd.model.local_log import LocalLog
    from tieringd.model.segment import RemoteSegment

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Range:
    """A part of an open file."""

    file: OpenSegment
    position: int
    size_bytes: int


@contextmanager
def local_bytes(
    layout: Layout, log: LocalLog, segment: RemoteSegment, *, work_directory: Path
) -> Iterator[FileSlice | None]:
    """
    Give the bytes of *segment* as the local log has them, for as long as the context lasts.

    None where the log does not have these offsets, or has other bytes there. Bytes of several files are
    put together in an unlinked file in *work_directory*.

    Raises:
        LocalFileError: A file cannot be read, or changed meanwhile.
        CorruptDataError: A file is not what a log's should be.
    """
    with ExitStack() as files:
        ranges = _ranges(layout, log, segment, files)
        if sum(one.size_bytes for one in ranges) != segment.size_bytes:
            yield None
            return
        if len(ranges) == 1:
            (only,) = ranges
            checksum = only.file.crc32c(only.position, only.size_bytes)
            found = FileSlice(only.file.fd, only.position, only.size_bytes)
        else:
            joined = files.enter_context(_temporary(work_directory))
            checksum = _joined(ranges, joined, work_directory)
            found = FileSlice(joined.fileno(), 0, segment.size_bytes)
        for one in ranges:
            one.file.require_unchanged()
        yield found if checksum == segment.crc32c else None


def _ranges(layout: Layout, log: LocalLog, segment: RemoteSegment, files: ExitStack) -> list[_Range]:
    """Return where the files have the offsets of *segment*, as many bytes as it has, or fewer."""
    ranges: list[_Range] = []
    left, offset = segment.size_bytes, segment.base_offset
    for local in log.segments:
        is_after = local.next_offset is not None and local.next_offset <= offset
        if is_after or not left or local.base_offset >= segment.next_offset:
            continue
        if local.base_offset > offset:
            break
        file = layout.open(local)
        files.callback(file.close)
        position = 0
        if local.base_offset < offset:
            position = position_of(file.fd, file.segment, offset)
        size_bytes = min(left, file.segment.size_bytes - position)
        ranges.append(_Range(file, position, size_bytes))
        left -= size_bytes
        offset = segment.next_offset if local.next_offset is None else local.next_offset
    return ranges


def _joined(ranges: list[_Range], target: IO[bytes], work_directory: Path) -> int:
    checksum = 0
    for one in ranges:
        position, end = one.position, one.position + one.size_bytes
        while position < end:
            piece = one.file.read_at(position, min(_PIECE_BYTES, end - position))
            checksum = crc32c_of(piece, checksum)
            with _naming(work_directory):
                target.write(piece)
            position += len(piece)
    with _naming(work_directory):
        target.flush()
    return checksum


@contextmanager
def _temporary(work_directory: Path) -> Iterator[IO[bytes]]:
    with _naming(work_directory):
        file = tempfile.TemporaryFile(dir=work_directory)  # noqa: SIM115 - closed below
    try:
        yield file
    finally:
        file.close()


@contextmanager
def _naming(work_directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalFileError(
            f"a segment cannot be put together in {work_directory}: {error.strerror or error}",
            path=str(work_directory),
            hint="Make room there, or set state_directory to a disk that has some",
        ) from error
