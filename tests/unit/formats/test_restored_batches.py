"""Batches and indexes of a log that another cluster goes on with: producer ids, epochs, checksums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GOLDEN, batch
from tieringd.errors import CorruptDataError
from tieringd.formats.batch_check import check_batches
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.formats.index_files import parse_transaction_index
from tieringd.formats.record_batch import ABORT_MARKER, HEADER_BYTES, encode_marker, parse_header
from tieringd.formats.restored_batches import (
    IDS_OF_A_CLUSTER,
    restored_batch,
    restored_index,
    restored_producer_id,
    turn_back,
)
from tieringd.model.segment import AbortedTransaction, BrokerIndexes, SegmentIndex

MAX_ID = 2**63 - 1
EPOCH = 37
ids = st.one_of(
    st.integers(0, 10_000),
    st.integers(0, MAX_ID),
    st.sampled_from([0, IDS_OF_A_CLUSTER - 1, IDS_OF_A_CLUSTER, MAX_ID - IDS_OF_A_CLUSTER, MAX_ID]),
)
producers = st.one_of(st.just(-1), ids)


@st.composite
def stored_batches(draw):
    """Return whole batches of a few producers, each with its header, and markers among them."""
    found, offset = [], 100
    for producer_id in draw(st.lists(producers, min_size=1, max_size=5)):
        if producer_id >= 0 and draw(st.booleans()):
            data = encode_marker(
                offset, producer_id=producer_id, producer_epoch=3, marker=ABORT_MARKER, leader_epoch=EPOCH
            )
        else:
            values = draw(st.lists(st.binary(max_size=20), min_size=1, max_size=3))
            fields = {"producer_id": producer_id, "producer_epoch": 3, "base_sequence": 17}
            data = batch(offset, values, leader_epoch=EPOCH, **(fields if producer_id >= 0 else {}))
        found.append(data)
        offset = parse_header(data).next_offset
    return found


def restored(stored: bytes) -> bytes:
    return b"".join(restored_batch(memoryview(stored)))


@given(stored_batches())
def test_restored_batch_is_sound_and_has_another_producer_id(batches):
    """The leader epoch is the first one, the checksum is new, and nothing else changes."""
    new = [restored(one) for one in batches]
    for stored, moved in zip(map(parse_header, batches), map(parse_header, new), strict=True):
        assert moved.leader_epoch == 0
        assert moved.producer_id == restored_producer_id(stored.producer_id)
        same = {"leader_epoch": EPOCH, "producer_id": stored.producer_id, "crc": stored.crc}
        assert moved._replace(**same) == stored
    assert [one[HEADER_BYTES:] for one in new] == [one[HEADER_BYTES:] for one in batches]
    first, last = parse_header(new[0]), parse_header(new[-1])
    check_batches(memoryview(b"".join(new)), ExpectedBatches(first.base_offset, last.last_offset + 1))


@given(ids)
def test_no_cluster_reaches_a_restored_id(producer_id):
    """A restored id is no id of a cluster, and still a producer's for Kafka: a negative id means none."""
    assert IDS_OF_A_CLUSTER <= restored_producer_id(producer_id) <= MAX_ID


@given(st.sets(st.integers(-1, MAX_ID - IDS_OF_A_CLUSTER), max_size=20))
def test_two_ids_never_become_one(some):
    """Two ids stay two, even if a restored log with ids of two clusters is restored again."""
    some |= {restored_producer_id(one) for one in some if one < MAX_ID - 2 * IDS_OF_A_CLUSTER}
    assert len({restored_producer_id(one) for one in some}) == len(some)
    assert restored_producer_id(-1) == -1


@given(stored_batches(), st.binary(max_size=HEADER_BYTES - 1))
def test_restored_batches_are_turned_back(batches, rest):
    """The stored bytes come back, up to a part of a batch. An id that could not grow is not found."""
    stored = b"".join(batches)
    data = bytearray(b"".join(map(restored, batches)) + rest)
    epochs = {parse_header(one).base_offset: EPOCH for one in batches}
    turned = turn_back(data, epochs.__getitem__)
    assert turned == (len(stored), True)
    assert data[len(stored) :] == rest
    is_grown = all(parse_header(one).producer_id <= MAX_ID - IDS_OF_A_CLUSTER for one in batches)
    assert (data[: len(stored)] == stored) == is_grown


@pytest.mark.parametrize("fault", ["old epoch", "id of a cluster", "damage", "no batch"])
def test_batch_that_was_not_restored_ends_it(fault):
    """A batch of an older version is not taken for a restored one, and damage is not hidden."""
    first, second = (batch(offset, producer_id=5, producer_epoch=0, base_sequence=0) for offset in (0, 3))
    sound, other = restored(first), bytearray(restored(second))
    if fault == "old epoch":
        other[12:16] = bytes([0, 0, 0, EPOCH])
    elif fault == "id of a cluster":
        other = bytearray(second)
    elif fault == "damage":
        other[-1] ^= 1
    else:
        other = bytearray(200)
    data = bytearray(sound + other)
    assert turn_back(data, lambda _: 0) == (len(first), fault == "no batch")
    assert data == first + other


def index_of(transaction_index: bytes | None) -> SegmentIndex:
    aborted = (AbortedTransaction(3, 10, 20), AbortedTransaction(7, 12, 30))
    broker = BrokerIndexes(b"i", b"t", transaction_index, b"p")
    return SegmentIndex(10, 30, 0, 0, 0, 0, epochs=(), aborted=aborted, entries=(), broker=broker)


def test_index_names_the_same_transactions_under_the_new_ids():
    """Ours, and the one that a broker wrote; its other files are the same."""
    (path,) = (GOLDEN / "transactions").glob("*.txnindex")
    stored = path.read_bytes()
    moved = restored_index(index_of(stored))
    assert moved.aborted == (
        AbortedTransaction(restored_producer_id(3), 10, 20),
        AbortedTransaction(restored_producer_id(7), 12, 30),
    )
    before, after = parse_transaction_index(stored), parse_transaction_index(moved.broker.transaction_index)
    assert before
    assert after == [one._replace(producer_id=restored_producer_id(one.producer_id)) for one in before]
    assert replace(moved.broker, transaction_index=stored) == index_of(stored).broker


def test_index_without_the_brokers_keeps_it_so():
    """No broker index is made for a segment without one, and a damaged one is an error."""
    assert restored_index(index_of(None)).broker == index_of(None).broker
    with pytest.raises(CorruptDataError):
        restored_index(index_of(b"damaged"))
