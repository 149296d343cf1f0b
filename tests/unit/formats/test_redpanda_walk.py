"""Walks over the headers of Redpanda segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.redpanda_builders import ARCHIVAL, TX_FENCE, RedpandaLog, Segment, raw_batch
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import ABORT_MARKER, NewRecord, encode_batch
from tieringd.formats.redpanda_batch import UnsupportedBatchTypeError
from tieringd.formats.redpanda_reframe import RedpandaWalk
from tieringd.formats.segment_scan import EndedBy
from tieringd.formats.transactions import TransactionTracker
from tieringd.model.segment import AbortedTransaction


def walk_of(segment: Segment, *, is_active: bool = False) -> RedpandaWalk:
    return RedpandaWalk(
        lambda at, size_bytes: segment.data[at : at + size_bytes],
        size_bytes=len(segment.data),
        raw_base_offset=segment.raw_base_offset,
        is_active=is_active,
        source=segment.name,
    )


@given(st.lists(st.sampled_from(["data", "large", "own", "fence", "hole"]), max_size=30), st.booleans())
def test_walk_counts_what_the_log_was_built_of(kinds, has_room):
    """Every batch is met where it stands, and the totals are those of the leader."""
    log = RedpandaLog().roll()
    for kind in kinds:
        match kind:
            case "data":
                log.data([b"a"])
            case "large":
                log.data([b"a" * 5000])
            case "own":
                log.bookkeeping(ARCHIVAL, records=3)
            case "fence":
                log.bookkeeping(TX_FENCE)
            case _:
                log.hole(2)
    segment = log.segments[0]
    size_bytes = len(segment.data)
    walk = walk_of(log.allocated(100).segments[0] if has_room else segment)
    met = [(position, header.size_bytes) for position, header in walk.batches()]
    assert [segment.data[at : at + size] for at, size in met] == segment.batches
    assert walk.uncounted_offsets == log.delta
    assert walk.position == size_bytes
    if segment.batches and kinds[-1] != "hole":
        assert walk.next_raw_offset == log.next_raw_offset
    assert walk.ended_by is (EndedBy.ZERO_TAIL if has_room else EndedBy.END_OF_FILE)


def test_walk_follows_transactions_by_kafka_offsets():
    """The tracker learns the offsets that clients see, from the delta at the base on."""
    log = RedpandaLog(next_raw_offset=100, delta=40).roll().bookkeeping().bookkeeping(TX_FENCE)
    log.data([b"a", b"b"], producer_id=9, is_transactional=True).bookkeeping(ARCHIVAL)
    log.data([b"c"], producer_id=8, is_transactional=True).marker(9, ABORT_MARKER)
    tracker = TransactionTracker(0)
    walk = walk_of(log.segments[0])
    aborted = walk.follow_transactions(tracker, delta=40, leader_epoch=1)
    assert aborted == [AbortedTransaction(9, 61, 64)]
    assert tracker.open_transactions == {8: 63}
    assert walk.next_raw_offset - 40 - walk.uncounted_offsets == log.next_offset


def test_transaction_types_of_redpanda_are_no_transactions_of_clients():
    """A fence has a producer and flags as a client's batch has, and tells nothing."""
    fence = encode_batch(0, [NewRecord(b"f")], producer_id=9, is_transactional=True)
    segment = Segment(0, 0, 1, raw_batch(fence, raw_offset=0, batch_type=TX_FENCE))
    tracker = TransactionTracker(0)
    assert walk_of(segment).follow_transactions(tracker, delta=0, leader_epoch=1) == []
    assert tracker.open_transactions == {}


def test_every_flipped_byte_of_a_header_is_found_and_placed():
    """A walk over a closed segment checks each header, and says where it failed."""
    log = RedpandaLog().roll().data([b"a"]).data([b"b"])
    segment = log.segments[0]
    first = len(segment.batches[0])
    for position in range(61):
        with pytest.raises(CorruptDataError, match="where raw offset 1 should be") as caught:
            list(walk_of(segment.damaged(first + position, 1 << position % 8)).batches())
        assert (caught.value.source, caught.value.position) == ("0-1-v1.log", first)


def test_walk_of_an_active_segment_ends_before_a_damaged_header():
    """A header that is being written ends the walk; what came before counts."""
    log = RedpandaLog().roll().data([b"a"]).data([b"b"])
    first = len(log.segments[0].batches[0])
    for data in (log.segments[0].damaged(first + 9).data, log.segments[0].data[: first + 30]):
        walk = walk_of(Segment(0, 0, 1, data), is_active=True)
        assert len(list(walk.batches())) == 1
        assert (walk.next_raw_offset, walk.position, walk.ended_by) == (1, first, EndedBy.TORN_TAIL)


def test_walk_of_an_active_segment_ends_at_a_marker_that_is_being_written():
    """Half a marker ends no transaction, and is no damage."""
    log = RedpandaLog().roll().data([b"a"], producer_id=9, is_transactional=True).marker(9)
    tracker = TransactionTracker(0)
    torn = log.segments[0].damaged(-3)
    walk = walk_of(torn, is_active=True)
    assert walk.follow_transactions(tracker, delta=0, leader_epoch=1) == []
    assert walk.ended_by is EndedBy.TORN_TAIL
    assert tracker.open_transactions == {9: 0}


def test_damaged_marker_of_a_closed_segment_is_found_and_placed():
    """The records of a marker are read, so their checksum counts."""
    log = RedpandaLog(next_raw_offset=10, delta=4).roll().data([b"a"], producer_id=9, is_transactional=True)
    segment = log.marker(9).segments[0].damaged(-3)
    with pytest.raises(CorruptDataError, match="CRC") as caught:
        walk_of(segment).follow_transactions(TransactionTracker(0), delta=4, leader_epoch=1)
    assert (caught.value.position, caught.value.offset) == (len(segment.batches[0]), 7)


def test_oversized_marker_is_not_read_whole():
    """No marker is as large as a client's batch may be."""
    big = encode_batch(0, [NewRecord(b"x" * 100_000)], producer_id=9, is_transactional=True)
    segment = Segment(0, 0, 1, raw_batch(big, raw_offset=0, attributes=0x30))
    asked = []

    def read_at(at: int, size_bytes: int) -> bytes:
        asked.append(size_bytes)
        return segment.data[at : at + size_bytes]

    walk = RedpandaWalk(read_at, size_bytes=len(segment.data), raw_base_offset=0, is_active=False)
    with pytest.raises(CorruptDataError):
        walk.follow_transactions(TransactionTracker(0), delta=0, leader_epoch=1)
    assert max(asked) <= 64 * 1024


@pytest.mark.parametrize("is_active", [False, True])
def test_walk_refuses_disorder_and_unknown_types(is_active):
    """Both are wrong whether or not the segment is still written."""
    one = raw_batch(encode_batch(0, [NewRecord(b"a")]), raw_offset=3)
    with pytest.raises(CorruptDataError, match="out of order, where raw offset 4 should be"):
        list(walk_of(Segment(3, 0, 1, one + one), is_active=is_active).batches())
    other = raw_batch(encode_batch(0, [NewRecord(b"a")]), raw_offset=4, batch_type=99)
    with pytest.raises(UnsupportedBatchTypeError, match="type 99") as caught:
        list(walk_of(Segment(3, 0, 1, one + other), is_active=is_active).batches())
    assert caught.value.hint


def test_walk_stops_before_a_cut_batch():
    """A batch that is longer than the file is not taken."""
    log = RedpandaLog().roll().data([b"a"]).data([b"b"])
    walk = walk_of(Segment(0, 0, 1, log.segments[0].data[:-1]))
    assert len(list(walk.batches())) == 1
    assert (walk.next_raw_offset, walk.ended_by) == (1, EndedBy.TORN_TAIL)
