"""Slices of segment files, where they begin, and whether an open file is still what was listed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.builders import batch, segment_bytes
from tests.unit.broker.segment_files import one_shot, scan, scan_part, without_tracker, written
from tieringd.broker.segment_file import READ_BUFFER_BYTES, OpenSegment, open_segment, position_of
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.segment_scan import EndedBy
from tieringd.model.segment import LocalSegment, SegmentSlice

CUTS = [0, 3, 6, 9, 12]
"""Where the batches of `segment_bytes(0, batches=4)` begin and end."""


@pytest.mark.parametrize("begin", CUTS[:-1])
@pytest.mark.parametrize("end", range(13))
@pytest.mark.parametrize("is_active", [True, False])
def test_open_slice_is_the_whole_batches_between_its_bounds(tmp_path, begin, end, is_active):
    """An open slice has the whole batches from one bound up to the other, as a file of its own would."""
    data = segment_bytes(0, batches=4)
    size = len(data) // 4
    segment = written(tmp_path, data, 0, None if is_active else 12)
    found = scan_part(SegmentSlice(segment, begin, end, is_open=True))
    inside = data[begin // 3 * size : max(begin, end) // 3 * size]
    expected = one_shot(inside, begin, None)
    assert replace(without_tracker(found), ended_by=None) == replace(without_tracker(expected), ended_by=None)
    assert found.ended_by is (EndedBy.END_OF_FILE if end == 12 else EndedBy.STOP_OFFSET)


@pytest.mark.parametrize("begin", CUTS)
def test_slice_to_the_end_of_a_closed_segment_begins_inside_it(tmp_path, begin):
    """The rest of a closed segment is checked to its last byte; its positions count from its own begin."""
    data = segment_bytes(0, batches=4)
    segment = written(tmp_path, data, 0, 12)
    found = scan_part(SegmentSlice(segment, begin, 12))
    rest = data[begin // 3 * (len(data) // 4) :]
    assert without_tracker(found) == without_tracker(one_shot(rest, begin, 12))
    assert [entry.position for entry in found.entries][:1] == ([0] if rest else [])


def test_slices_of_a_file_have_the_bytes_of_the_whole(tmp_path):
    """A file's slices are its bytes, none twice and none left out, wherever it is cut between batches."""
    data = segment_bytes(0, batches=4, value=os.urandom(5000))
    segment = written(tmp_path, data, 0, 12)
    whole = scan(segment)
    parts = [
        scan_part(SegmentSlice(segment, 0, 4, is_open=True)),
        scan_part(SegmentSlice(segment, 3, 9, is_open=True)),
        scan_part(SegmentSlice(segment, 9, 12)),
    ]
    assert sum(each.size_bytes for each in parts) == whole.size_bytes == len(data)
    assert sum(each.record_count for each in parts) == whole.record_count == 12
    position, found = 0, []
    for each in parts:
        found.append(crc32c(data[position : position + each.size_bytes]))
        position += each.size_bytes
    assert [each.crc32c for each in parts] == found


def test_open_slice_without_a_whole_batch_is_empty(tmp_path):
    """A bound inside the first batch leaves nothing, and that is no fault."""
    segment = written(tmp_path, segment_bytes(0, batches=2), 0, None)
    found = scan_part(SegmentSlice(segment, 0, 2, is_open=True))
    assert (found.size_bytes, found.batch_count, found.last_offset_found) == (0, 0, None)


@pytest.mark.parametrize("tail", [b"", b"torn", bytes(5000)], ids=["nothing", "torn", "zeros"])
def test_open_slice_of_an_active_file_ends_before_what_is_not_written_yet(tmp_path, tail):
    """A torn or preallocated end of an active file is past any batch of the slice."""
    data = segment_bytes(0, batches=4)
    found = scan_part(SegmentSlice(written(tmp_path, data + tail, 0, None), 3, 12, is_open=True))
    assert (found.size_bytes, found.last_offset_found) == (len(data) // 4 * 3, 11)


def test_slice_of_a_closed_file_accepts_no_torn_end(tmp_path):
    """The rest of a closed segment is corrupt where the whole would be; positions are those of the slice."""
    segment = written(tmp_path, segment_bytes(0, batches=4)[:-3], 0, 12)
    with pytest.raises(CorruptDataError, match="last batch is cut"):
        scan_part(SegmentSlice(segment, 6, 12))


@pytest.mark.parametrize("offset", range(-1, 14))
def test_position_of_an_offset_is_where_its_batch_begins(tmp_path, offset):
    """A batch's first offset has its position; before the first is 0, and at the end the file's size."""
    data = segment_bytes(0, batches=4)
    segment = written(tmp_path, data)
    size = len(data) // 4
    fd = open_segment(segment)
    try:
        if 0 < offset < 12 and offset % 3:
            base = offset - offset % 3
            with pytest.raises(
                CorruptDataError, match=f"inside the batch from {base} to {base + 2}"
            ) as caught:
                position_of(fd, segment, offset)
            assert (caught.value.source, caught.value.position) == (segment.path, base // 3 * size)
        else:
            assert position_of(fd, segment, offset) == min(max(offset, 0) // 3, 4) * size
    finally:
        os.close(fd)


@pytest.mark.parametrize(("offset", "batch_number"), [(3, 1), (5, 1), (9, 1), (10, 1), (12, 2), (13, 2)])
def test_position_of_an_offset_that_compaction_removed_is_that_of_the_next_batch(
    tmp_path, offset, batch_number
):
    """An offset in a hole between batches has the position of the next batch: an archive may end there."""
    batches = [batch(0), batch(10, [b"x", b"y"]), batch(20)]
    segment = written(tmp_path, b"".join(batches), 0, 30)
    fd = open_segment(segment)
    try:
        expected = sum(len(each) for each in batches[:batch_number])
        assert position_of(fd, segment, offset) == expected
    finally:
        os.close(fd)


def test_position_of_an_offset_in_a_file_that_shrank_says_so(tmp_path):
    """A file that was truncated meanwhile is a local fault, not corruption."""
    segment = written(tmp_path, segment_bytes(0, batches=4, value=bytes(9000)))
    fd = open_segment(segment)
    try:
        os.truncate(segment.path, 5000)
        with pytest.raises(LocalFileError, match="changed while it was read"):
            position_of(fd, segment, 9)
    finally:
        os.close(fd)


@pytest.fixture
def opened():
    """Give a function that opens segments, and close them all in the end."""
    files: list[OpenSegment] = []

    def open_one(segment: LocalSegment) -> OpenSegment:
        files.append(OpenSegment.open(segment))
        return files[-1]

    yield open_one
    for file in files:
        file.close()


@pytest.mark.parametrize("next_offset", [12, None], ids=["closed", "active"])
def test_open_file_that_is_as_it_was_listed_is_unchanged(tmp_path, opened, next_offset):
    """Checking the same bytes twice finds nothing to complain about."""
    opened(written(tmp_path, segment_bytes(0, batches=4), 0, next_offset)).require_unchanged()


@pytest.mark.parametrize(
    ("change", "if_closed", "if_active"),
    [
        pytest.param(lambda path: os.truncate(path, 100), True, True, id="shorter"),
        pytest.param(
            lambda path: path.open("ab").close() or os.utime(path, ns=(1, 1)), True, False, id="touched"
        ),
        pytest.param(lambda path: os.truncate(path, 10**6), True, False, id="longer"),
    ],
)
def test_open_file_that_changed_after_it_was_listed_is_noticed(
    tmp_path, opened, change, if_closed, if_active
):
    """A closed file must be the same in every way; an active one may have grown, and not shrunk."""
    for next_offset, is_noticed in ((12, if_closed), (None, if_active)):
        segment = written(tmp_path, segment_bytes(0, batches=4), 0, next_offset)
        file = opened(segment)
        change(Path(segment.path))
        if is_noticed:
            with pytest.raises(LocalFileError, match="changed after it was listed") as caught:
                file.require_unchanged()
            assert caught.value.path == segment.path
        else:
            file.require_unchanged()


@pytest.mark.parametrize("next_offset", [12, None], ids=["closed", "active"])
def test_open_file_whose_name_was_given_to_another_is_noticed(tmp_path, opened, next_offset):
    """A file that was opened after a compaction is not the file that was listed."""
    segment = written(tmp_path, segment_bytes(0, batches=4), 0, next_offset)
    other = tmp_path / "other"
    shutil.copy2(segment.path, other)
    other.rename(segment.path)
    with pytest.raises(LocalFileError, match="changed after it was listed"):
        opened(segment).require_unchanged()


@pytest.mark.parametrize(
    ("position", "size_bytes"),
    [
        (0, 0),
        (0, 1),
        (7, 100),
        (0, 3 * READ_BUFFER_BYTES + 5),
        (5, 3 * READ_BUFFER_BYTES),
        (3_000_000, 145_728),
    ],
)
def test_checksum_of_a_range_is_that_of_its_bytes(tmp_path, opened, position, size_bytes):
    """Ranges smaller and larger than the buffer, at the beginning, inside and at the end."""
    data = os.urandom(3 * READ_BUFFER_BYTES + 5)
    file = opened(written(tmp_path, data))
    expected = data[position : position + size_bytes]
    assert len(expected) == size_bytes
    assert file.crc32c(position, size_bytes) == crc32c(expected)
    assert file.read_at(position, size_bytes) == expected


def test_range_past_the_end_of_the_file_says_that_it_changed(tmp_path, opened):
    """Fewer bytes than were asked for are never returned as if they were all."""
    file = opened(written(tmp_path, bytes(1000)))
    for read in (file.read_at, file.crc32c):
        with pytest.raises(LocalFileError, match="1000 of 1000 bytes are left"):
            read(900, 101)
