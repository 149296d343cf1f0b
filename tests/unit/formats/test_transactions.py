"""Open and aborted transactions, and what a read_committed reader sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import batch, golden_log
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import ABORT_MARKER, COMMIT_MARKER, encode_marker, parse_header
from tieringd.formats.records import NO_MARKER
from tieringd.formats.segment_scan import HeaderWalk
from tieringd.formats.transactions import MarkerSearch, ReadCommittedFilter, TransactionTracker
from tieringd.model.segment import AbortedTransaction, CrossingTransaction


def data(offset: int, producer_id: int, *, records: int = 1):
    return parse_header(batch(offset, [b"v"] * records, producer_id=producer_id, is_transactional=True))


def marker(offset: int, producer_id: int, kind: int = COMMIT_MARKER):
    return parse_header(encode_marker(offset, producer_id=producer_id, marker=kind))


def test_open_transaction_holds_the_first_unstable_offset():
    """The oldest open transaction bounds what is stable, until it ends."""
    tracker = TransactionTracker()
    assert tracker.first_unstable_offset is None
    for header in (data(5, 1), data(6, 2), data(7, 1)):
        tracker.note_data(header)
    assert tracker.first_unstable_offset == 5
    assert tracker.note_marker(marker(8, 1), "commit") is None
    assert tracker.first_unstable_offset == 6
    assert tracker.open_transactions == {2: 6}


def test_abort_reports_the_whole_transaction():
    """An abort marker yields the transaction from its first record to the marker."""
    tracker = TransactionTracker(3)
    tracker.note_data(data(4, 9))
    tracker.note_data(data(6, 9))
    assert tracker.note_marker(marker(8, 9), "abort") == AbortedTransaction(9, 4, 8)
    assert tracker.first_unstable_offset is None


def test_abort_of_a_transaction_from_before_the_start_begins_at_the_start():
    """A producer not met before has its aborted transaction reported from the start offset."""
    assert TransactionTracker(100).note_marker(marker(120, 9), "abort") == AbortedTransaction(9, 100, 120)


def test_commit_of_an_unknown_producer_changes_nothing():
    """A commit of a transaction from before the start leaves nothing open."""
    tracker = TransactionTracker(100)
    assert tracker.note_marker(marker(120, 9), "commit") is None
    assert tracker.open_transactions == {}


def test_empty_aborted_transaction_does_not_hide_committed_records():
    """An abort without records, after a commit of the same producer, aborts nothing."""
    tracker = TransactionTracker(0)
    tracker.note_data(data(0, 7))
    tracker.note_marker(marker(1, 7), "commit")
    assert tracker.note_marker(marker(2, 7), "abort") is None


def test_other_control_records_end_no_transaction():
    """A control record that is neither commit nor abort leaves the transaction open."""
    tracker = TransactionTracker(0)
    tracker.note_data(data(0, 7))
    assert tracker.note_marker(marker(1, 7), 5) is None
    assert tracker.first_unstable_offset == 0


def test_search_goes_its_own_way():
    """A search knows what its tracker knew, and neither sees the other's later batches."""
    tracker = TransactionTracker(0)
    tracker.note_data(data(0, 7))
    twin = MarkerSearch(tracker)
    assert twin.note_marker(marker(1, 7), "abort") == AbortedTransaction(7, 0, 1)
    assert tracker.first_unstable_offset == 0
    assert MarkerSearch(twin).note_marker(marker(2, 7), "abort") is None
    assert tracker.note_marker(marker(3, 7), "abort") == AbortedTransaction(7, 0, 3)


def test_search_takes_no_later_marker_for_one_that_the_cleaner_emptied():
    """An emptied marker hides how an awaited transaction ended; those of others make no difference."""
    tracker = TransactionTracker(0)
    tracker.note_data(data(0, 7))
    search = MarkerSearch(tracker)
    assert search.note_marker(marker(1, 8), NO_MARKER) is None
    with pytest.raises(CorruptDataError, match="removed by the cleaner") as caught:
        search.note_marker(marker(2, 7), NO_MARKER)
    assert caught.value.offset == 2
    assert (search.awaited, search.found) == ({7: 0}, ())


def test_search_finds_the_first_marker_of_each_open_transaction():
    """Later markers of a producer, and other producers, make no difference."""
    tracker = TransactionTracker(0)
    for header in (data(0, 7), data(1, 8), data(2, 9)):
        tracker.note_data(header)
    search = MarkerSearch(tracker)
    search.note_data(data(3, 7))
    assert search.note_marker(marker(4, 7), 5) is None, "no marker that ends anything"
    assert search.note_marker(marker(5, 6), "commit") is None, "of a producer with nothing open"
    assert search.note_marker(marker(6, 8, ABORT_MARKER), "abort") == AbortedTransaction(8, 1, 6)
    assert search.awaited == {7: 0, 9: 2}
    search.note_marker(marker(7, 7), "commit")
    search.note_data(data(8, 7))
    search.note_marker(marker(9, 7), "commit")
    epoch = marker(9, 7).leader_epoch
    assert search.found == (CrossingTransaction(8, 1, 6, epoch), CrossingTransaction(7, 0, 7, epoch))
    assert (search.awaited, search.open_transactions) == ({9: 2}, {9: 2})
    assert tracker.open_transactions == {7: 0, 8: 1, 9: 2}


def test_filter_shows_the_committed_records_of_a_broker_s_log():
    """Only committed records are visible with the golden log's aborted transactions."""
    raw = golden_log("transactions")

    def walk():
        return HeaderWalk(lambda at, size: raw[at : at + size], size_bytes=len(raw), base_offset=0)

    tracker = TransactionTracker(0)
    aborted = walk().follow_transactions(tracker)
    assert [(one.first_offset, one.last_offset) for one in aborted] == [(0, 4), (8, 9)]
    shown = ReadCommittedFilter(aborted)
    visible = [raw[at : at + one.size_bytes] for at, one in walk().batches() if shown.accepts(one)]
    assert [part[-13:-1].lstrip(b"\x00\x01\x18").strip(b"\x1a") for part in visible] == [
        b"b1 committed",
        b"b2 committed",
        b"a3 committed",
    ]


def test_filter_passes_what_is_not_transactional():
    """Batches outside of transactions are visible even between an aborted producer's."""
    shown = ReadCommittedFilter([AbortedTransaction(1, 0, 9)])
    assert not shown.accepts(data(0, 1))
    assert shown.accepts(parse_header(batch(1, [b"v"])))
    assert shown.accepts(data(2, 2))
    assert not shown.accepts(data(3, 1))
    assert not shown.accepts(marker(9, 1, ABORT_MARKER))
    assert shown.accepts(data(10, 1))


def test_filter_takes_a_transaction_that_began_before_the_first_batch():
    """A reader that starts in the middle of an aborted transaction does not see its rest."""
    shown = ReadCommittedFilter([AbortedTransaction(1, 50, 60), AbortedTransaction(1, 0, 20)])
    assert not shown.accepts(data(15, 1))
    assert shown.accepts(data(30, 1))
    assert not shown.accepts(data(55, 1))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["data", "commit", "abort", "plain"])), max_size=40)
)
def test_filter_agrees_with_a_replay_of_the_log(events):
    """A batch is visible exactly if its own transaction's marker is no abort."""
    tracker, aborted, headers = TransactionTracker(0), [], []
    fate: list[bool | None] = []
    pending: dict[int, list[int]] = {}
    for offset, (producer_id, kind) in enumerate(events):
        if kind == "plain":
            headers.append(parse_header(batch(offset, [b"v"])))
            fate.append(True)
        elif kind == "data":
            headers.append(data(offset, producer_id))
            tracker.note_data(headers[-1])
            pending.setdefault(producer_id, []).append(offset)
            fate.append(None)
        else:
            headers.append(marker(offset, producer_id, ABORT_MARKER if kind == "abort" else COMMIT_MARKER))
            ended = tracker.note_marker(headers[-1], kind)
            aborted += [ended] if ended else []
            fate.append(False)
            for at in pending.pop(producer_id, []):
                fate[at] = kind == "commit"
    unstable = tracker.first_unstable_offset
    assert unstable == min((offsets[0] for offsets in pending.values()), default=None)
    shown = ReadCommittedFilter(aborted)
    for header, is_visible in zip(headers[:unstable], fate[:unstable], strict=True):
        assert shown.accepts(header) == is_visible
