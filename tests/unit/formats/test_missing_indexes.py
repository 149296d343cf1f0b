"""Side files of a segment that are made where the archive has none."""

from __future__ import annotations

from dataclasses import replace

from tests.builders import DEFAULT_TIME_MS
from tieringd.formats.index_files import (
    OffsetEntry,
    TimeEntry,
    parse_offset_index,
    parse_time_index,
    parse_transaction_index,
    whole_indexes,
)
from tieringd.model.segment import (
    AbortedTransaction,
    BrokerIndexes,
    IndexEntry,
    RemoteSegment,
    SegmentIndex,
)

NOW = DEFAULT_TIME_MS
SEGMENT = RemoteSegment(
    base_offset=100,
    last_offset=199,
    size_bytes=3_000,
    crc32c=1,
    base_timestamp_ms=NOW,
    max_timestamp_ms=NOW + 9,
    leader_epoch=0,
    writer_id="w",
    uploaded_at_ms=NOW,
    index_size_bytes=100,
)
INDEX = SegmentIndex(
    base_offset=100,
    last_offset=199,
    size_bytes=3_000,
    crc32c=1,
    record_count=100,
    batch_count=10,
    epochs=((0, 100),),
    aborted=(),
    entries=(IndexEntry(100, 0, NOW), IndexEntry(140, 1_000, NOW + 5), IndexEntry(170, 2_000, NOW + 5)),
)


def test_made_index_has_the_batches_that_ours_has():
    """The made index lacks the first batch, which every reader begins with."""
    made = whole_indexes(SEGMENT, INDEX, ())
    assert parse_offset_index(made.offset_index, base_offset=100) == [
        OffsetEntry(140, 1_000),
        OffsetEntry(170, 2_000),
    ]


def test_made_time_index_leads_to_the_first_record_of_a_time():
    """A time reached between two entries is looked for from the first; the last entry is the newest."""
    made = whole_indexes(SEGMENT, INDEX, ())
    assert parse_time_index(made.time_index, base_offset=100) == [
        TimeEntry(NOW, 100),
        TimeEntry(NOW + 5, 100),
        TimeEntry(NOW + 9, 170),
    ]


def test_made_transaction_index_has_those_that_end_in_the_segment():
    """Sorted by their markers; none where none ends."""
    before, late, early, after = (
        AbortedTransaction(number, 50, last_offset) for number, last_offset in enumerate((99, 199, 100, 200))
    )
    made = whole_indexes(SEGMENT, INDEX, (before, late, early, after))
    entries = parse_transaction_index(made.transaction_index)
    assert [one.last_offset for one in entries] == [100, 199]
    assert whole_indexes(SEGMENT, INDEX, (before, after)).transaction_index is None


def test_side_files_of_the_broker_are_kept():
    """All side files but that of the producers, which a new cluster does not know."""
    theirs = BrokerIndexes(b"offsets", b"times", b"transactions", b"producers")
    found = whole_indexes(SEGMENT, replace(INDEX, broker=theirs), (AbortedTransaction(1, 100, 150),))
    assert found == BrokerIndexes(b"offsets", b"times", b"transactions", None)


def test_segment_without_a_batch_has_empty_indexes():
    """An index that is there and empty is a whole one."""
    made = whole_indexes(SEGMENT, replace(INDEX, entries=()), ())
    assert (made.offset_index, made.time_index) == (b"", b"")
