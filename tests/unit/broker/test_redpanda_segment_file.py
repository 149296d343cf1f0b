"""Redpanda segment files: re-framed through a spool file, and walked."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.redpanda_builders import ARCHIVAL, TX_FENCE, RedpandaLog, ordinary_log, raw_batch
from tieringd.broker.redpanda_log_dir import RedpandaLogs, read_raw_log
from tieringd.broker.redpanda_segment_file import (
    reframe_segment_file,
    scan_redpanda_transactions,
    translation_of,
    uncounted_offsets,
)
from tieringd.broker.segment_file import LogWalk, scan_segment_file
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.record_batch import ABORT_MARKER
from tieringd.formats.redpanda_batch import UnsupportedBatchTypeError
from tieringd.formats.segment_scan import EndedBy
from tieringd.formats.transactions import MarkerSearch, TransactionTracker
from tieringd.model.local_log import LocalPartition
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.partition import TopicPartition
from tieringd.model.segment import AbortedTransaction, CrossingTransaction, LocalSegment, SegmentSlice


def partition_of(directory: Path) -> LocalPartition:
    return LocalPartition(TopicPartition("orders", 0), "id", str(directory), str(directory.parent))


def written(log: RedpandaLog, tmp_path: Path) -> tuple[LocalSegment, ...]:
    log.write_to(tmp_path)
    return RedpandaLogs().read_local_log(partition_of(tmp_path)).segments


def reframed(segment: LocalSegment, tmp_path: Path) -> tuple[bytes, LocalSegment]:
    spool = tmp_path / "spool"
    fd = os.open(segment.path, os.O_RDONLY)
    spool_fd = os.open(spool, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        there = reframe_segment_file(fd, segment, spool_fd)
        scan = scan_segment_file(spool_fd, SegmentSlice.whole(there))
        assert (scan.size_bytes, scan.crc32c) == (there.size_bytes, crc32c(spool.read_bytes()))
    finally:
        os.close(fd)
        os.close(spool_fd)
    return spool.read_bytes(), there


def test_reframed_file_is_what_an_upload_scans(tmp_path):
    """Each closed segment's Kafka form is in the spool file, and passes the scan of any segment."""
    log = ordinary_log()
    segments = written(log, tmp_path)
    for segment, built in zip(segments[:-1], log.segments, strict=False):
        data, there = reframed(segment, tmp_path)
        assert data == built.kafka
        assert (there.base_offset, there.next_offset) == (segment.base_offset, segment.next_offset)
        assert (there.path, there.size_bytes) == (segment.path, len(data))


def test_batches_larger_than_the_buffer_are_reframed(tmp_path):
    """The buffer grows to the batch, and what comes after it is read on."""
    log = RedpandaLog().roll(term=1).data([b"x" * (3 << 20)]).data([b"a"]).roll()
    data, _ = reframed(written(log, tmp_path)[0], tmp_path)
    assert data == log.segments[0].kafka


def test_translation_is_in_the_segment_s_path_and_offset(tmp_path):
    """The file name has the raw base, the segment has Kafka's."""
    log = ordinary_log()
    for segment, built in zip(written(log, tmp_path), log.segments, strict=True):
        assert translation_of(segment) == OffsetTranslation(built.raw_base_offset, built.delta)


def test_segment_of_another_layout_has_no_translation():
    """A path that Redpanda did not make is refused by name."""
    with pytest.raises(LocalFileError, match="not a segment of Redpanda's"):
        translation_of(LocalSegment(0, 1, 0, "/data/orders-0/00000000000000000000.log", 1, 0))


def test_damage_in_a_file_names_the_file(tmp_path):
    """Corruption in a whole segment is corruption, with its place."""
    log = ordinary_log()
    segment = written(log, tmp_path)[0]
    path = Path(segment.path)
    path.write_bytes(log.segments[0].damaged(-2).data)
    with pytest.raises(CorruptDataError) as caught:
        reframed(segment, tmp_path)
    assert caught.value.source == str(path)


def test_damage_before_allocated_room_is_a_segment_that_is_still_written(tmp_path):
    """The last batches of a closed segment may not be on disk yet: then it is scanned again."""
    log = RedpandaLog().roll(term=1).data([b"a"]).data([b"b" * 100])
    segment = written(log.allocated().roll().data([b"c"]), tmp_path)[0]
    data = log.segments[0].data
    end = sum(map(len, log.segments[0].batches))
    Path(segment.path).write_bytes(data[: end - 50] + bytes(len(data) - end + 50))
    with pytest.raises(LocalFileError, match="preallocated space, and batch CRC") as caught:
        reframed(segment, tmp_path)
    assert caught.value.path == segment.path


def test_unknown_batch_type_before_allocated_room_is_no_matter_of_waiting(tmp_path):
    """A sound header of a type that is not known stays what it is."""
    log = RedpandaLog().roll(term=1).data([b"a"]).bookkeeping(TX_FENCE).allocated().roll().data([b"c"])
    segment = written(log, tmp_path)[0]
    unknown = raw_batch(log.served[0], raw_offset=2, batch_type=99)
    Path(segment.path).write_bytes(b"".join(log.segments[0].batches[:-1]) + unknown.ljust(9000, b"\0"))
    size_bytes = Path(segment.path).stat().st_size
    with pytest.raises(UnsupportedBatchTypeError, match="type 99"):
        reframed(replace(segment, size_bytes=size_bytes), tmp_path)


def test_segment_that_lacks_its_end_is_not_uploaded_by_what_is_known_of_it(tmp_path):
    """The upload checks that a segment is whole if all bases are known, because no file was read before."""
    log = RedpandaLog().roll(term=1).data([b"a"]).data([b"b"]).roll().data([b"c"])
    segment = written(log, tmp_path)[0]
    Path(segment.path).write_bytes(b"".join(log.segments[0].batches[:-1]))
    size_bytes = Path(segment.path).stat().st_size
    with pytest.raises(LocalFileError, match="ends before 1, and the next segment begins at 2"):
        reframed(replace(segment, size_bytes=size_bytes), tmp_path)


def test_whole_segment_with_allocated_room_is_taken(tmp_path):
    """A segment whose batches reach to the next one's base is whole, whatever follows in the file."""
    log = RedpandaLog().roll(term=1).data([b"a"]).allocated().roll().data([b"b"])
    data, _ = reframed(written(log, tmp_path)[0], tmp_path)
    assert data == log.segments[0].kafka


def test_file_that_became_shorter_is_to_be_scanned_again(tmp_path):
    """A truncation between listing and reading is no corruption."""
    segment = written(ordinary_log(), tmp_path)[0]
    os.truncate(segment.path, 100)
    with pytest.raises(LocalFileError, match="changed while it was read"):
        reframed(segment, tmp_path)
    with pytest.raises(LocalFileError, match="changed while it was read"):
        scan_redpanda_transactions(segment, TransactionTracker(0))


def test_full_spool_is_an_error_that_names_the_segment(tmp_path):
    """No room for the copy is a passing error, and says what to do."""
    segment = written(ordinary_log(), tmp_path)[0]
    fd = os.open(segment.path, os.O_RDONLY)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(LocalFileError, match=os.strerror(errno.ENOSPC)) as caught:
            reframe_segment_file(fd, segment, full)
    finally:
        os.close(fd)
        os.close(full)
    assert caught.value.path == segment.path
    assert caught.value.hint


def test_missing_file_is_an_error_that_names_it(tmp_path):
    """A segment that Redpanda has removed meanwhile is reported by its path."""
    segment = written(ordinary_log(), tmp_path)[0]
    Path(segment.path).unlink()
    with pytest.raises(LocalFileError, match="cannot be read") as caught:
        scan_redpanda_transactions(segment, TransactionTracker(0))
    assert caught.value.path == segment.path


def test_uncounted_offsets_are_those_before_a_place(tmp_path):
    """A place in the middle of a segment counts what is before it."""
    log = RedpandaLog().roll(term=1).data([b"a", b"b"]).bookkeeping(ARCHIVAL, records=2).data([b"c"]).roll()
    log.data([b"d"]).bookkeeping(ARCHIVAL).write_to(tmp_path)
    closed, active = read_raw_log(partition_of(tmp_path)).segments
    assert [uncounted_offsets(closed, before=place) for place in (1, 3, 5, 6)] == [1, 1, 3, 3]
    assert uncounted_offsets(closed) == 3
    assert [uncounted_offsets(active, before=place) for place in (7, 8)] == [0, 1]
    with pytest.raises(LocalFileError, match="ends before 8, although raw offset 9 exists"):
        uncounted_offsets(active, before=9)


def test_transactions_are_followed_over_segments(tmp_path):
    """A transaction that ends in the next, active segment is found by its Kafka offsets."""
    log = RedpandaLog().roll(term=1).bookkeeping(TX_FENCE)
    log.data([b"a"], producer_id=9, is_transactional=True).roll(term=2)
    log.data([b"b"]).marker(9, ABORT_MARKER).allocated()
    first, second = written(log, tmp_path)
    tracker = TransactionTracker(0)
    assert scan_redpanda_transactions(first, tracker).aborted == ()
    assert tracker.open_transactions == {9: 1}
    walked = scan_redpanda_transactions(second, tracker)
    end = sum(map(len, log.segments[1].batches))
    assert walked == LogWalk(end, log.next_offset, (AbortedTransaction(9, 1, 3),), EndedBy.ZERO_TAIL)


def test_marker_of_a_transaction_has_its_file_s_term_for_its_leader_epoch(tmp_path):
    """The manifest remembers the marker by this epoch."""
    log = RedpandaLog().roll(term=1).data([b"a"], producer_id=9, is_transactional=True).roll(term=2)
    first, second = written(log.data([b"b"]).marker(9, ABORT_MARKER), tmp_path)
    tracker = TransactionTracker(0)
    scan_redpanda_transactions(first, tracker)
    search = MarkerSearch(tracker)
    scan_redpanda_transactions(second, search)
    assert search.found == (CrossingTransaction(9, 0, 2, 2),)


def test_closed_segment_that_lacks_its_end_is_not_walked_over(tmp_path):
    """A marker may be in the part that is not on disk yet."""
    log = RedpandaLog().roll(term=1).data([b"a"]).data([b"b"]).roll().data([b"c"])
    segment = written(log, tmp_path)[0]
    Path(segment.path).write_bytes(b"".join(log.segments[0].batches[:-1]) + bytes(72))
    with pytest.raises(LocalFileError, match="ends before 1, and the next segment begins at 2"):
        scan_redpanda_transactions(segment, TransactionTracker(0))
