"""Batch headers, checksums, and the writing of batches."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GOLDEN, OLD_MESSAGE_V0, OLD_MESSAGE_V1, batch, golden_log
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import (
    CREATE_TIME,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    MAX_BATCH_BYTES,
    BatchHeader,
    NewRecord,
    OldMagicError,
    check_crc,
    encode_batch,
    encode_marker,
    parse_header,
    sealed,
)


def all_golden_logs():
    return sorted(path for path in GOLDEN.rglob("*.log") if path.stat().st_size)


def headers_of(data: bytes) -> list[BatchHeader]:
    headers, position = [], 0
    while position < len(data):
        headers.append(parse_header(data, position))
        check_crc(memoryview(data), headers[-1], position)
        position += headers[-1].size_bytes
    return headers


def test_header_of_a_golden_batch_has_the_values_the_broker_wrote():
    """The header of a broker's first gzip batch is read field by field."""
    header = parse_header(golden_log("codec-gzip"))
    assert header._replace(crc=0, length=0) == BatchHeader(
        base_offset=0,
        length=0,
        leader_epoch=0,
        magic=2,
        crc=0,
        attributes=1,
        last_offset_delta=7,
        base_timestamp_ms=1_700_000_000_000,
        max_timestamp_ms=1_700_000_000_007,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=0,
        record_count=8,
    )
    assert (header.last_offset, header.next_offset, header.codec) == (7, 8, 1)
    assert not (header.is_control)
    assert not (header.is_transactional)
    assert not (header.has_delete_horizon)
    assert header.timestamp_type == CREATE_TIME


@pytest.mark.parametrize("path", all_golden_logs(), ids=lambda path: f"{path.parent.name}/{path.stem[-2:]}")
def test_checksums_of_all_golden_batches_hold(path):
    """Batches of a real broker fill their files exactly and have the checksums they claim."""
    headers = headers_of(path.read_bytes())
    assert headers
    assert all(one.next_offset <= other.base_offset for one, other in itertools.pairwise(headers))


def test_header_of_a_compacted_batch_shows_append_time_and_delete_horizon():
    """A cleaned log keeps empty batches, and marks the one with a tombstone."""
    headers = headers_of(golden_log("compacted"))
    assert headers[0].record_count == 0
    assert headers[-1].has_delete_horizon
    assert {header.timestamp_type for header in headers} == {LOG_APPEND_TIME}


def test_encoded_batch_equals_the_broker_s_bytes():
    """The uncompressed records of a broker's batch, encoded again, are the same bytes."""
    data = golden_log("codec-none")
    size_bytes = parse_header(data).size_bytes
    records = [
        NewRecord(
            None if number == 2 else b"value %d of batch 0; " % number * 6,
            key=None if number == 1 else b"key-%d" % number,
            timestamp_ms=1_700_000_000_000 + number,
            headers=[("trace", b"\x00\x01"), ("empty", None)] if number == 3 else [],
        )
        for number in range(8)
    ]
    assert encode_batch(0, records, base_sequence=0) == data[:size_bytes]


def test_encoded_marker_equals_the_broker_s_but_for_time():
    """A control batch of ours differs from a broker's only in what the caller chose."""
    data = golden_log("transactions")
    position, theirs = next(
        (position, header)
        for position, header in zip((0, 78, 158, 236, 316), headers_of(data), strict=False)
        if header.is_control
    )
    ours = encode_marker(
        theirs.base_offset, producer_id=theirs.producer_id, marker=0, timestamp_ms=theirs.base_timestamp_ms
    )
    assert ours == data[position : position + theirs.size_bytes]


@given(
    st.integers(0, 2**62),
    st.integers(-1, 2**31 - 1),
    st.integers(-1, 2**62),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 2**50)),
)
def test_header_survives_encoding(base_offset, leader_epoch, producer_id, is_transactional, append_time_ms):
    """The header has the values that the encoder was given."""
    data = encode_batch(
        base_offset,
        [NewRecord(b"v", timestamp_ms=5)],
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        is_transactional=is_transactional,
        append_time_ms=append_time_ms,
    )
    header = parse_header(data)
    check_crc(memoryview(data), header)
    assert header.size_bytes == len(data)
    assert header.base_offset == base_offset
    assert header.leader_epoch == leader_epoch
    assert header.producer_id == producer_id
    assert header.is_transactional == is_transactional
    assert header.max_timestamp_ms == (5 if append_time_ms is None else append_time_ms)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"magic": 3}, "magic is 3", id="magic"),
        pytest.param({"length": 48}, "length 48", id="short"),
        pytest.param({"length": -1}, "length -1", id="negative-length"),
        pytest.param({"length": MAX_BATCH_BYTES}, "impossible", id="huge"),
        pytest.param({"base_offset": -1}, "offsets", id="negative-offset"),
        pytest.param({"last_offset_delta": -1}, "offsets", id="negative-delta"),
        pytest.param({"record_count": -1}, "-1 records", id="negative-count"),
        pytest.param({"record_count": 9}, "9 records", id="too-many"),
    ],
)
def test_impossible_header_is_corrupt_and_located(fields, words):
    """A header that no batch can have names its position."""
    good = parse_header(batch(7))
    bad = b"abc" + struct.pack(">qiibIhiqqqhii", *good._replace(**fields))
    with pytest.raises(CorruptDataError, match=words) as caught:
        parse_header(bad, 3)
    assert caught.value.position == 3
    assert not isinstance(caught.value, OldMagicError)


def test_cut_header_is_corrupt():
    """A buffer that ends inside the header is corrupt."""
    with pytest.raises(CorruptDataError, match="61 bytes, but only 60 are left"):
        parse_header(batch()[: HEADER_BYTES - 1])


@pytest.mark.parametrize("message", [OLD_MESSAGE_V0, OLD_MESSAGE_V1 + OLD_MESSAGE_V1], ids=["v0", "v1"])
def test_old_message_is_told_from_corruption(message):
    """Formats v0 and v1 have an error of their own, and keep it once located."""
    with pytest.raises(OldMagicError, match="is not supported") as caught:
        parse_header(message)
    located = caught.value.located("topic-0/0.log")
    assert isinstance(located, OldMagicError)
    assert (located.source, located.position, located.offset) == ("topic-0/0.log", 0, 5)


def test_checksum_covers_everything_behind_the_epoch():
    """Every flipped byte after the leader epoch is found by header or checksum."""
    data = batch(3)
    for position in range(16, len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x40
        with pytest.raises(CorruptDataError):
            headers_of(bytes(flipped))


def test_checksum_of_a_cut_batch_is_corrupt():
    """A batch that ends early is reported as cut, with its size."""
    data = batch(3)
    with pytest.raises(CorruptDataError, match=f"{len(data) - 1} of {len(data)} bytes"):
        check_crc(memoryview(data)[:-1], parse_header(data))


def test_batch_without_records_keeps_its_offsets():
    """An empty batch of a compacted log is only a header, and occupies its offsets."""
    data = encode_batch(10, [], last_offset_delta=4, producer_id=9)
    header = parse_header(data)
    assert len(data) == HEADER_BYTES
    assert (header.record_count, header.next_offset, header.max_timestamp_ms) == (0, 15, -1)


def test_sealed_fills_in_length_and_checksum():
    """A header with any length and checksum becomes valid."""
    data = sealed(parse_header(batch())._replace(length=1, crc=1, record_count=0), b"")
    check_crc(memoryview(data), parse_header(data))
