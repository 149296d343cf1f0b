"""Transactions that are open somewhere in a log: by producer, and where each began."""

from __future__ import annotations

import pytest

from tests.fakes.log_writer import LogWriter
from tieringd.broker.layout import KafkaLayout, TransactionEnds, open_transactions_at, transaction_ends
from tieringd.model.segment import CrossingTransaction


@pytest.fixture
def writer(tmp_path):
    """Give producer 1 from 0 to a commit at 3, producer 2 from 1 over a roll to an abort at 5."""
    writer = LogWriter(tmp_path)
    writer.append(b"one", producer_id=1)
    writer.append(b"two", producer_id=2)
    writer.append(b"plain")
    writer.commit(1)
    writer.roll()
    writer.append(b"two again", producer_id=2)
    writer.abort(2)
    writer.append(b"plain")
    return writer


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (0, {}),
        (1, {1: 0}),
        (2, {1: 0, 2: 1}),
        (3, {1: 0, 2: 1}),
        (4, {2: 1}),
        (5, {2: 1}),
        (6, {}),
        (7, {}),
    ],
)
def test_transactions_without_a_marker_before_an_offset_are_open_there(writer, offset, expected):
    """Batches at or past the offset do not count, in the same segment or a later one."""
    assert open_transactions_at(KafkaLayout(), writer.local_log(), offset) == expected


def test_transaction_that_began_before_the_log_is_known_by_what_is_left_of_it(writer):
    """A log without its head shows the transactions of the records that it holds."""
    writer.drop_head()
    assert open_transactions_at(KafkaLayout(), writer.local_log(), 5) == {2: 4}


def test_empty_log_has_no_open_transaction(tmp_path):
    """There is nothing to read."""
    assert open_transactions_at(KafkaLayout(), LogWriter(tmp_path).local_log(), 0) == {}


@pytest.mark.parametrize(
    ("offset", "first_offsets", "expected"),
    [
        (2, {1: 0}, TransactionEnds((CrossingTransaction(1, 0, 3, 0),))),
        (2, {2: 1}, TransactionEnds((CrossingTransaction(2, 1, 5, 0),), frozenset({2}))),
        (4, {2: 1}, TransactionEnds((CrossingTransaction(2, 1, 5, 0),), frozenset({2}))),
        (4, {1: 0}, TransactionEnds(awaited={1: 0})),
        (4, {}, TransactionEnds()),
    ],
    ids=["commit", "abort in the next segment", "from a segment's start", "no marker", "none open"],
)
def test_end_of_a_transaction_is_its_next_marker(writer, offset, first_offsets, expected):
    """Markers before the offset belong to earlier transactions."""
    assert transaction_ends(KafkaLayout(), writer.local_log(), offset, first_offsets) == expected


def test_marker_that_the_log_no_longer_has_is_lost(writer):
    """The log begins after the offset, so a marker further on may end a later transaction."""
    writer.append(b"two anew", producer_id=2)
    writer.commit(2)
    writer.drop_head()
    found = transaction_ends(KafkaLayout(), writer.local_log(), 3, {2: 1})
    assert found == TransactionEnds(lost={2: 1})
