"""Segment files for the tests that read them, and what scanning them should find."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from tieringd.broker.segment_file import open_segment, position_of, scan_segment_file
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.model.segment import LocalSegment, SegmentSlice

if TYPE_CHECKING:
    from pathlib import Path


def local_segment(path: Path, base_offset: int, next_offset: int | None) -> LocalSegment:
    status = path.stat()
    return LocalSegment(
        base_offset, next_offset, status.st_size, str(path), status.st_ino, status.st_mtime_ns
    )


def written(tmp_path: Path, data: bytes, base_offset: int = 0, next_offset: int | None = 12) -> LocalSegment:
    path = tmp_path / f"{base_offset:020d}.log"
    path.write_bytes(data)
    return local_segment(path, base_offset, next_offset)


def all_of(segment: LocalSegment) -> SegmentSlice:
    """Return a slice of every batch, of an active segment too."""
    if segment.next_offset is not None:
        return SegmentSlice.whole(segment)
    return SegmentSlice(segment, segment.base_offset, 2**62, is_open=True)


def scan(segment: LocalSegment, **options):
    return scan_part(all_of(segment), **options)


def scan_part(part: SegmentSlice, **options):
    """Scan a slice of a file from where it begins in it."""
    fd = open_segment(part.segment)
    try:
        position = position_of(fd, part.segment, part.base_offset)
        return scan_segment_file(fd, part, position=position, **options)
    finally:
        os.close(fd)


def one_shot(data: bytes, base_offset: int, next_offset: int | None):
    scanner = SegmentScanner(base_offset, next_offset)
    return scanner.finish(len(data) - scanner.feed(memoryview(data)))


def without_tracker(found):
    return replace(found, tracker=None)
