"""Which records are wanted: a slice of offsets, and what `read_committed` shows."""

from __future__ import annotations

import pytest

from tests.builders import GOLDEN, batch, golden_log
from tests.support.decoding import batches_of, by_formats, decode
from tieringd.errors import CorruptDataError
from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import (
    ABORT_MARKER,
    NewRecord,
    encode_batch,
    encode_marker,
    parse_header,
)
from tieringd.formats.records import control_type
from tieringd.formats.transactions import ReadCommittedFilter, TransactionTracker
from tieringd.model.segment import AbortedTransaction
from tieringd.spark.decoder import Selection


def aborted_in(data: bytes) -> tuple[AbortedTransaction, ...]:
    """Return the aborted transactions of a log, as the archiver finds them."""
    tracker, found = TransactionTracker(), []
    for stored in batches_of(data):
        header = parse_header(stored)
        if header.is_control:
            ended = tracker.note_marker(header, control_type(stored))
            found += [ended] if ended else []
        elif header.is_transactional:
            tracker.note_data(header)
    return tuple(found)


def transactional(base_offset: int, producer_id: int, codec: Codec = Codec.NONE) -> bytes:
    """Return two records of a transaction."""
    records = [NewRecord(b"%d" % producer_id), NewRecord(b"%d" % producer_id)]
    return encode_batch(
        base_offset, records, codec=codec, producer_id=producer_id, producer_epoch=0, is_transactional=True
    )


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4], ids=lambda codec: codec.name.lower())
@pytest.mark.parametrize("rows_max", [2, 100])
def test_slice_of_offsets_is_that_of_all_rows(codec, rows_max):
    """A slice has its rows and no others, wherever it begins and ends: in a batch or in a hole."""
    holes = [NewRecord(b"a", offset_delta=1), NewRecord(b"b", offset_delta=4)]
    data = batch(2, codec=codec) + encode_batch(5, holes, codec=codec, last_offset_delta=6)
    data += batch(12, [b"x"] * 4, codec=codec) + batch(20, codec=codec)
    rows = by_formats(data)
    assert len(rows) == 12
    for from_offset in range(25):
        for next_offset in range(from_offset, 25):
            found = decode(data, selection=Selection(from_offset, next_offset), rows_max=rows_max)
            assert found.rows == [row for row in rows if from_offset <= row["offset"] < next_offset]


def test_damage_outside_of_the_slice_does_not_matter():
    """A damaged batch without any wanted record is stepped over; one with a single wanted record is not."""
    damaged = bytearray(batch(3))
    damaged[-1] ^= 1
    data = batch(0) + bytes(damaged) + batch(6)
    for selection in (Selection(6, 9), Selection(0, 3)):
        assert len(decode(data, selection=selection).rows) == 3
    for selection in (Selection(5, 9), Selection(0, 4)):
        with pytest.raises(CorruptDataError, match="CRC"):
            decode(data, selection=selection)


def test_order_counts_outside_of_the_slice():
    """A batch that was moved out of the slice by its base offset is missed."""
    with pytest.raises(CorruptDataError, match="out of order"):
        decode(batch(0) + batch(1000) + batch(6), selection=Selection(0, 9))


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.SNAPPY], ids=lambda codec: codec.name.lower())
def test_read_committed_leaves_out_what_was_aborted(codec):
    """Records of an aborted transaction are left out up to its marker. Those of another producer stay."""
    data = b"".join(
        [
            transactional(0, 1, codec),
            transactional(2, 2, codec),
            transactional(4, 1, codec),
            encode_marker(6, producer_id=1, marker=ABORT_MARKER),
            encode_marker(7, producer_id=2),
            transactional(8, 1, codec),
            encode_marker(10, producer_id=1),
            batch(11, codec=codec, producer_id=1),
        ]
    )
    assert aborted_in(data) == (AbortedTransaction(1, 0, 6),)
    uncommitted = decode(data)
    assert [row["offset"] for row in uncommitted.rows] == [0, 1, 2, 3, 4, 5, 8, 9, 11, 12, 13]
    committed = decode(data, selection=Selection(0, 100, aborted_in(data)))
    assert [row["offset"] for row in committed.rows] == [2, 3, 8, 9, 11, 12, 13]
    from_the_middle = decode(data, selection=Selection(5, 100, aborted_in(data)))
    assert [row["offset"] for row in from_the_middle.rows] == [8, 9, 11, 12, 13]


def test_read_committed_without_aborted_transactions_is_everything():
    """No aborted transactions and no isolation give the same rows."""
    data = transactional(0, 1) + encode_marker(2, producer_id=1) + batch(3)
    assert decode(data, selection=Selection(0, 100, ())).rows == decode(data).rows


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("transactions/*.log")), ids=lambda path: path.name)
def test_transactions_of_a_real_broker(path):
    """The decoder shows the committed transactions of a broker's log, as `ReadCommittedFilter` does."""
    data = path.read_bytes()
    aborted = aborted_in(data)
    accepts = ReadCommittedFilter(aborted).accepts
    expected = [
        row for stored in batches_of(data) if accepts(parse_header(stored)) for row in by_formats(stored)
    ]
    found = decode(data, selection=Selection(0, 10**9, aborted)).rows
    assert found == expected
    assert {bytes(row["value"][:2]) for row in found} == {b"b1", b"b2", b"a3"}
    assert len(decode(golden_log("transactions")).rows) > len(found)


def test_damaged_batch_of_an_aborted_transaction_is_damaged():
    """Nothing is left out on the word of a header whose checksum is wrong."""
    data = bytearray(transactional(0, 1) + encode_marker(2, producer_id=1, marker=ABORT_MARKER))
    data[43:51] = (9).to_bytes(8, "big")
    with pytest.raises(CorruptDataError, match="CRC"):
        decode(bytes(data), selection=Selection(0, 100, (AbortedTransaction(9, 0, 2),)))
