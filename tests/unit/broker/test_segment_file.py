"""Segment files read from disk: whole, by headers, and with the broker's indexes beside them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import GOLDEN, batch, golden_log, segment_bytes
from tests.support.unprivileged import unprivileged
from tests.unit.broker.segment_files import local_segment, one_shot, scan, scan_part, without_tracker, written
from tieringd.broker.segment_file import (
    READ_BUFFER_BYTES,
    check_broker_indexes,
    open_segment,
    position_of,
    positions_of,
    read_broker_indexes,
    scan_segment_file,
    scan_transactions,
)
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.index_files import (
    OffsetEntry,
    TimeEntry,
    TransactionEntry,
    encode_offset_index,
    encode_time_index,
    encode_transaction_index,
)
from tieringd.formats.record_batch import parse_header
from tieringd.formats.segment_scan import EndedBy
from tieringd.formats.transactions import TransactionTracker
from tieringd.model.segment import BrokerIndexes, LocalSegment, SegmentSlice


def golden_segment(topic: str, base_offset: int, next_offset: int | None) -> LocalSegment:
    return local_segment(GOLDEN / topic / f"{base_offset:020d}.log", base_offset, next_offset)


def test_scan_of_a_file_equals_a_scan_of_its_bytes(tmp_path):
    """A segment of several buffers and one batch larger than the buffer is read whole."""
    large = batch(30, [os.urandom(3 * READ_BUFFER_BYTES)])
    data = segment_bytes(0, batches=10, value=bytes(100_000)) + large + segment_bytes(31, batches=3)
    segment = written(tmp_path, data, 0, 40)
    assert without_tracker(scan(segment)) == without_tracker(one_shot(data, 0, 40))


def test_scan_of_one_batch_larger_than_the_buffer_reads_it_whole(tmp_path):
    """The buffer grows to a batch that does not fit, even when it is the first."""
    data = batch(0, [bytes(3 * READ_BUFFER_BYTES)]) + batch(1)
    assert without_tracker(scan(written(tmp_path, data))) == without_tracker(one_shot(data, 0, 12))


def test_scan_of_an_empty_file_finds_nothing(tmp_path):
    """A segment without batches is sound."""
    assert scan(written(tmp_path, b"")).batch_count == 0


@pytest.mark.parametrize("damage", ["tail", "zeros", "many-zeros", "flip"])
def test_scan_names_the_file_and_place_of_damage(tmp_path, damage):
    """Corruption carries the path, the position and the offset."""
    data = segment_bytes(0, batches=4)
    size = len(data) // 4
    bad, position, words = {
        "tail": (data[:-1], 3 * size, "last batch is cut"),
        "zeros": (data[: 3 * size] + bytes(100), 3 * size, "zero tail of 100 bytes"),
        "many-zeros": (data + bytes(3_000_000), 4 * size, "zero tail of 3000000 bytes"),
        "flip": (data[: size + 70] + b"\xff" + data[size + 71 :], size, "batch CRC"),
    }[damage]
    segment = written(tmp_path, bad)
    with pytest.raises(CorruptDataError, match=words) as caught:
        scan(segment)
    assert (caught.value.source, caught.value.position) == (segment.path, position)


def test_scan_stops_at_what_segment_says_even_when_the_file_grew(tmp_path):
    """Bytes that were appended after the directory was scanned are not read."""
    data = segment_bytes(0, batches=4)
    segment = written(tmp_path, data, 0, None)
    with Path(segment.path).open("ab") as file:
        file.write(b"garbage")
    assert scan(segment).size_bytes == len(data)


def test_scan_of_an_active_file_stops_at_the_stop_offset(tmp_path):
    """Only whole batches below the stop offset count."""
    segment = written(tmp_path, segment_bytes(0, batches=4) + bytes(5000), 0, None)
    found = scan_part(SegmentSlice(segment, 0, 7, is_open=True))
    assert (found.last_offset_found, found.ended_by) == (5, EndedBy.STOP_OFFSET)


def test_scan_of_a_file_that_shrank_says_so(tmp_path):
    """A follower that truncated its log is not taken for corruption."""
    segment = written(tmp_path, segment_bytes(0, batches=4))
    os.truncate(segment.path, 100)
    with pytest.raises(
        LocalFileError, match=r"changed while it was read: 100 of .* bytes are left"
    ) as caught:
        scan(segment)
    assert caught.value.path == segment.path


@pytest.mark.parametrize(
    ("offsets", "batches"),
    [
        ((0, 3, 20, 26), (0, 1, 2, 4)),
        ((1,), None),
        ((3, 3, 6), (1, 1, 2)),
        ((6, 19, 20, 23, 99), (2, 2, 2, 3, 4)),
        ((), ()),
        ((0, 21), None),
    ],
)
def test_positions_are_of_the_next_batch_that_is_left(tmp_path, offsets, batches):
    """
    The position of an offset in a hole is that of the next batch, and at the end the file's end.

    An offset inside a batch has no position.
    """
    data = [batch(base, [b"a", b"b", b"c"]) for base in (0, 3, 20, 23)]
    segment = written(tmp_path, b"".join(data), 0, 100)
    fd = open_segment(segment)
    try:
        if batches is None:
            with pytest.raises(CorruptDataError, match=rf"offset {offsets[-1]}, .* is inside the batch"):
                positions_of(fd, segment, offsets)
        else:
            expected = tuple(sum(map(len, data[:count])) for count in batches)
            assert positions_of(fd, segment, offsets) == expected
            assert tuple(position_of(fd, segment, one) for one in offsets) == expected
    finally:
        os.close(fd)


def test_file_that_is_gone_is_a_local_fault(tmp_path):
    """A segment that the broker removed is reported with its path."""
    segment = written(tmp_path, b"")
    Path(segment.path).unlink()
    with pytest.raises(LocalFileError, match="cannot be read: No such file") as caught:
        open_segment(segment)
    assert caught.value.path == segment.path
    with pytest.raises(LocalFileError):
        scan_transactions(segment, TransactionTracker())


def test_descriptor_that_cannot_be_read_is_a_local_fault(tmp_path):
    """An error of the operating system while reading is translated."""
    segment = written(tmp_path, segment_bytes())
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(LocalFileError, match="Is a directory"):
            scan_segment_file(fd, SegmentSlice.whole(segment))
    finally:
        os.close(fd)


def test_walk_of_a_directory_in_the_log_s_place_is_a_local_fault(tmp_path):
    """An error of the operating system while walking is translated."""
    (tmp_path / f"{0:020d}.log").mkdir()
    with pytest.raises(LocalFileError, match="Is a directory"):
        scan_transactions(
            replace(local_segment(tmp_path / f"{0:020d}.log", 0, None), size_bytes=99), TransactionTracker()
        )


def test_file_without_permission_says_what_to_do(tmp_path):
    """A denied file names the way out."""
    segment = written(tmp_path, b"")
    Path(segment.path).chmod(0)
    with unprivileged(), pytest.raises(LocalFileError, match=r"Permission denied.*group"):
        open_segment(segment)


def test_walk_finds_open_transactions_and_the_end(tmp_path):
    """The first unstable offset of a log without a broker comes from its headers."""
    data = golden_log("transactions")
    tail = batch(10, [b"v"], producer_id=77, is_transactional=True) + batch(11, [b"w"])
    segment = written(tmp_path, data + tail + b"torn", 0, None)
    tracker = TransactionTracker()
    walk = scan_transactions(segment, tracker)
    assert (walk.position, walk.next_offset, walk.ended_by) == (len(data + tail), 12, EndedBy.TORN_TAIL)
    assert [(one.first_offset, one.last_offset) for one in walk.aborted] == [(0, 4), (8, 9)]
    assert tracker.first_unstable_offset == 10


def test_walk_goes_on_where_it_ended(tmp_path):
    """Two walks over a growing file find what one finds."""
    data = golden_log("transactions")
    half = sum(parse_header(data, at).size_bytes for at in (0, 78))
    tracker = TransactionTracker()
    first = scan_transactions(written(tmp_path, data[:half], 0, None), tracker)
    second = scan_transactions(
        written(tmp_path, data, 0, None), tracker, position=first.position, next_offset=first.next_offset
    )
    whole = scan_transactions(written(tmp_path, data, 0, None), TransactionTracker())
    assert (second.position, second.next_offset) == (whole.position, whole.next_offset)
    assert first.aborted + second.aborted == whole.aborted


def test_walk_of_a_closed_segment_accepts_no_torn_end(tmp_path):
    """A torn end is accepted in an active segment, and is corruption in a closed one."""
    segment = written(tmp_path, segment_bytes(0, batches=4)[:-3])
    with pytest.raises(CorruptDataError, match="closed segment has a torn tail") as caught:
        scan_transactions(segment, TransactionTracker())
    assert (caught.value.source, caught.value.offset) == (segment.path, 9)


def test_walk_of_a_file_that_shrank_says_so(tmp_path):
    """A file that ended early while it was walked is a local fault, not corruption."""
    segment = written(tmp_path, segment_bytes(0, batches=4))
    os.truncate(segment.path, 100)
    with pytest.raises(LocalFileError, match="changed while it was read"):
        scan_transactions(segment, TransactionTracker())


def test_side_files_of_a_broker_are_read_byte_for_byte():
    """All four side files of a golden segment are found, the snapshot by the next base offset."""
    found = read_broker_indexes(golden_segment("transactions", 0, 10))
    directory = GOLDEN / "transactions"
    assert found == BrokerIndexes(
        offset_index=(directory / f"{0:020d}.index").read_bytes(),
        time_index=(directory / f"{0:020d}.timeindex").read_bytes(),
        transaction_index=(directory / f"{0:020d}.txnindex").read_bytes(),
        producer_snapshot=(directory / f"{10:020d}.snapshot").read_bytes(),
    )


def test_missing_side_files_are_none(tmp_path):
    """A log without side files, or an active one without a snapshot, is no fault."""
    assert read_broker_indexes(written(tmp_path, b"")) == BrokerIndexes()
    assert read_broker_indexes(written(tmp_path, b"", 0, None)) == BrokerIndexes()


def test_side_file_that_cannot_be_read_is_a_local_fault(tmp_path):
    """A side file that is there and unreadable is reported, not left out."""
    segment = written(tmp_path, b"")
    (tmp_path / f"{0:020d}.index").mkdir()
    with pytest.raises(LocalFileError, match=r"\.index cannot be read"):
        read_broker_indexes(segment)


def test_side_file_of_absurd_size_is_a_local_fault(tmp_path):
    """No broker writes an index of more than 64 MiB, and none is held in memory."""
    segment = written(tmp_path, b"")
    with (tmp_path / f"{0:020d}.timeindex").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(LocalFileError, match="larger than"):
        read_broker_indexes(segment)


@pytest.mark.parametrize(
    ("topic", "base_offset", "next_offset"),
    [
        ("transactions", 0, 10),
        ("rolled", 5, 10),
        ("compacted", 0, 20),
        ("codec-zstd", 0, 24),
        ("rolled", 10, None),
    ],
)
def test_indexes_of_a_broker_agree_with_its_log(topic, base_offset, next_offset):
    """Nothing is wrong with what a real broker wrote, and all of it is kept."""
    segment = golden_segment(topic, base_offset, next_offset)
    found = scan(segment, index_interval_bytes=0)
    indexes = read_broker_indexes(segment)
    assert check_broker_indexes(found, segment, indexes) == (indexes, ())


WRONG = [
    pytest.param({"offset_index": b"12345"}, "whole number of 8-byte entries", id="offset-length"),
    pytest.param(
        {"offset_index": [OffsetEntry(9, 100_000)]}, "past the end of the log", id="offset-past-end"
    ),
    pytest.param({"offset_index": [OffsetEntry(10, 700)]}, "beyond the segment", id="offset-beyond"),
    pytest.param({"offset_index": [OffsetEntry(2, 700)]}, "at byte 700, after offset 8", id="offset-skips"),
    pytest.param({"time_index": b"12345"}, "whole number of 12-byte entries", id="time-length"),
    pytest.param({"time_index": [TimeEntry(5, 10)]}, "beyond the segment", id="time-beyond"),
    pytest.param({"time_index": [TimeEntry(2**50, 3)]}, "later than the latest record", id="time-late"),
    pytest.param(
        {"transaction_index": b"12345"}, "whole number of 34-byte entries", id="transactions-length"
    ),
    pytest.param(
        {"transaction_index": [TransactionEntry(99, 1, 2, 3)]},
        "producer 99 aborted no",
        id="transactions-wrong",
    ),
    pytest.param({"transaction_index": b""}, "lacks the transaction", id="transactions-missing"),
]
ENCODERS = {
    "offset_index": lambda entries: encode_offset_index(entries, base_offset=0),
    "time_index": lambda entries: encode_time_index(entries, base_offset=0),
    "transaction_index": encode_transaction_index,
}


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_index_that_disagrees_is_reported_and_left_out(wrong, words):
    """A wrong index is named with its file and fault; the others are kept."""
    segment = golden_segment("transactions", 0, 10)
    ((name, content),) = wrong.items()
    data = content if isinstance(content, bytes) else ENCODERS[name](content)
    indexes = replace(read_broker_indexes(segment), **{name: data})
    kept, faults = check_broker_indexes(scan(segment, index_interval_bytes=0), segment, indexes)
    assert kept == replace(indexes, **{name: None})
    assert len(faults) == 1
    assert words in faults[0]
    assert segment.path in faults[0]


def test_golden_files_are_left_as_they_were(tmp_path):
    """Reading never writes: a read-only copy gives the same scan."""
    copy = tmp_path / f"{0:020d}.log"
    shutil.copy(GOLDEN / "codec-lz4" / copy.name, copy)
    copy.chmod(0o444)
    assert scan(local_segment(copy, 0, 24)).record_count == 24
