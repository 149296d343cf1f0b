"""The broker's index files."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.builders import GOLDEN, golden_log
from tieringd.errors import CorruptDataError
from tieringd.formats.index_files import (
    OffsetEntry,
    TimeEntry,
    TransactionEntry,
    encode_offset_index,
    encode_time_index,
    encode_transaction_index,
    offset_index_columns,
    parse_offset_index,
    parse_time_index,
    parse_transaction_index,
    time_index_columns,
)
from tieringd.formats.record_batch import parse_header

ASCENDING = st.lists(st.integers(1, 2**32 - 1), unique=True, max_size=10).map(sorted)


def test_offset_index_of_a_broker_points_at_batches():
    """Each golden entry names the last offset of the batch at its position."""
    data = golden_log("rolled", 10)
    entries = parse_offset_index((GOLDEN / "rolled" / f"{10:020d}.index").read_bytes(), base_offset=10)
    assert [entry.offset for entry in entries] == [11, 12, 13, 14]
    assert [parse_header(data, entry.position).last_offset for entry in entries] == [11, 12, 13, 14]


def test_time_index_of_a_broker_ends_with_the_latest_record():
    """The golden codec topics are indexed by the times of their batches."""
    data = (GOLDEN / "codec-none" / f"{0:020d}.timeindex").read_bytes()
    assert parse_time_index(data, base_offset=0)[-1] == TimeEntry(1_700_000_002_007, 23)


def test_transaction_index_of_a_broker_lists_the_aborted_ones():
    """The golden log has two aborted transactions of one producer."""
    data = (GOLDEN / "transactions" / f"{0:020d}.txnindex").read_bytes()
    entries = parse_transaction_index(data)
    assert [entry[1:] for entry in entries] == [(0, 4, 1), (8, 9, 10)]
    assert encode_transaction_index(entries) == data


@given(st.integers(0, 2**40), ASCENDING, ASCENDING, st.integers(0, 5))
def test_offset_index_survives_encoding_and_allocated_room(base_offset, offsets, positions, room):
    """Entries are read as written, and zeros behind them are room."""
    entries = [
        OffsetEntry(base_offset + offset, position)
        for offset, position in zip(offsets, positions, strict=False)
    ]
    data = encode_offset_index(entries, base_offset=base_offset) + bytes(8 * room)
    assert parse_offset_index(data, base_offset=base_offset) == entries


@given(st.integers(0, 2**40), ASCENDING, ASCENDING, st.integers(0, 5))
def test_time_index_survives_encoding_and_allocated_room(base_offset, offsets, times, room):
    """Entries are read as written, and zeros behind them are room."""
    entries = [TimeEntry(time, base_offset + offset) for offset, time in zip(offsets, times, strict=False)]
    data = encode_time_index(entries, base_offset=base_offset) + bytes(12 * room)
    assert parse_time_index(data, base_offset=base_offset) == entries


@given(st.integers(0, 2**40), st.binary(max_size=40) | st.integers(0, 5).map(lambda count: bytes(24 * count)))
@example(0, bytes(12) + b"\x80" + bytes(11))
def test_columns_of_arbitrary_bytes_are_those_of_the_entries(base_offset, data):
    """Columns and entries are two views of one index, faults included."""
    for columns_of, entries_of in (
        (offset_index_columns, parse_offset_index),
        (time_index_columns, parse_time_index),
    ):
        try:
            entries = entries_of(data, base_offset=base_offset)
        except CorruptDataError as error:
            with pytest.raises(CorruptDataError, match=re.escape(str(error))):
                columns_of(data, base_offset=base_offset)
        else:
            first, second = columns_of(data, base_offset=base_offset)
            assert list(zip(first, second, strict=True)) == entries


@given(st.integers(0, 2**40), ASCENDING, ASCENDING, st.integers(0, 5))
def test_columns_survive_encoding_and_allocated_room(base_offset, offsets, seconds, room):
    """Columns hold what was written, and zeros behind them are room."""
    rows = [(base_offset + offset, second) for offset, second in zip(offsets, seconds, strict=False)]
    offset_entries = [OffsetEntry(offset, position) for offset, position in rows]
    data = encode_offset_index(offset_entries, base_offset=base_offset) + bytes(8 * room)
    assert list(zip(*offset_index_columns(data, base_offset=base_offset), strict=True)) == offset_entries
    time_entries = [TimeEntry(time << 20, offset) for offset, time in rows]
    data = encode_time_index(time_entries, base_offset=base_offset) + bytes(12 * room)
    assert list(zip(*time_index_columns(data, base_offset=base_offset), strict=True)) == time_entries


@given(ASCENDING, st.integers(-1, 2**62))
def test_transaction_index_survives_encoding(offsets, last_stable_offset):
    """Entries are read as written."""
    entries = [TransactionEntry(offset * 3, offset - 1, offset, last_stable_offset) for offset in offsets]
    assert parse_transaction_index(encode_transaction_index(entries)) == entries


def test_time_index_may_repeat_an_offset():
    """The entry that closes a segment can name the offset of the one before it."""
    entries = [TimeEntry(5, 3), TimeEntry(6, 3)]
    assert parse_time_index(encode_time_index(entries, base_offset=0), base_offset=0) == entries


def test_index_that_is_all_room_has_no_entries():
    """A preallocated index of an active segment is empty."""
    assert parse_offset_index(bytes(80), base_offset=7) == []
    assert parse_time_index(bytes(120), base_offset=7) == []


@pytest.mark.parametrize(
    "entries",
    [
        [OffsetEntry(5, 10), OffsetEntry(5, 20)],
        [OffsetEntry(5, 10), OffsetEntry(6, 10)],
        [OffsetEntry(5, 10), OffsetEntry(0, 0), OffsetEntry(6, 20)],
    ],
    ids=["offset", "position", "hole"],
)
def test_offset_index_that_does_not_ascend_is_corrupt(entries):
    """Both columns of an offset index rise."""
    with pytest.raises(CorruptDataError, match="do not ascend") as caught:
        parse_offset_index(encode_offset_index(entries, base_offset=0), base_offset=0)
    assert caught.value.position == 8


@pytest.mark.parametrize(
    "entries",
    [[TimeEntry(5, 3), TimeEntry(5, 4)], [TimeEntry(5, 3), TimeEntry(6, 2)]],
    ids=["time", "offset"],
)
def test_time_index_that_does_not_ascend_is_corrupt(entries):
    """Times rise, and offsets do not fall."""
    with pytest.raises(CorruptDataError, match="do not ascend") as caught:
        parse_time_index(encode_time_index(entries, base_offset=0), base_offset=0)
    assert caught.value.position == 12


@pytest.mark.parametrize(
    "entries",
    [
        [TransactionEntry(1, 5, 4, 0)],
        [TransactionEntry(1, -1, 4, 0)],
        [TransactionEntry(1, 0, 4, 0), TransactionEntry(2, 0, 4, 0)],
    ],
    ids=["ends-before-it-begins", "negative", "same-marker"],
)
def test_transaction_index_with_impossible_offsets_is_corrupt(entries):
    """A transaction ends after it begins, and each at its own marker."""
    with pytest.raises(CorruptDataError, match="do not ascend"):
        parse_transaction_index(encode_transaction_index(entries))


def test_transaction_index_of_another_version_is_corrupt():
    """Only version 0 is known."""
    data = b"\x00\x01" + encode_transaction_index([TransactionEntry(1, 2, 3, 4)])[2:]
    with pytest.raises(CorruptDataError, match="version 1"):
        parse_transaction_index(data)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_entries_or_corrupt(data):
    """No content raises anything but CorruptDataError, and a broken length always does."""
    for size, parse in (
        (8, lambda: parse_offset_index(data, base_offset=0)),
        (12, lambda: parse_time_index(data, base_offset=0)),
        (34, lambda: parse_transaction_index(data)),
    ):
        if len(data) % size:
            with pytest.raises(CorruptDataError, match=f"{size}-byte entries"):
                parse()
            continue
        try:
            parse()
        except CorruptDataError:
            continue
