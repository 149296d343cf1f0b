"""One batch of a Redpanda segment: its header, its checksums, and its Kafka form."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import batch, golden_log
from tests.redpanda_builders import raw_batch
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import parse_header
from tieringd.formats.redpanda_batch import (
    COUNTED_TYPES,
    DATA_TYPE,
    UNCOUNTED_TYPES,
    RawHeader,
    UnsupportedBatchTypeError,
    check_raw_crc,
    parse_raw_header,
    reframed_batch,
)
from tieringd.model.offset_translation import OffsetTranslation

HEX_HEADER = (
    "4400000088776655443322110100000000"
    "030002000000e8030000000000004c04000000000000070000000000000005000900000003000000"
)
"""The fields of a header after its checksum, written out by hand; the data CRC is zero."""


def hand_made_header() -> bytes:
    rest = bytes.fromhex(HEX_HEADER)
    return struct.pack("<I", crc32c(rest)) + rest


def test_header_is_read_field_by_field_little_endian():
    """Every field of a header stands where the layout says."""
    raw = hand_made_header()
    assert parse_raw_header(raw) == RawHeader(
        header_crc=int.from_bytes(raw[:4], "little"),
        size_bytes=68,
        base_offset=0x1122334455667788,
        type=1,
        crc=0,
        attributes=3,
        last_offset_delta=2,
        base_timestamp_ms=1000,
        max_timestamp_ms=1100,
        producer_id=7,
        producer_epoch=5,
        base_sequence=9,
        record_count=3,
    )


def test_header_says_what_it_occupies_and_is_for():
    """Offsets are inclusive at the end, and flags are those of Kafka's attributes."""
    header = parse_raw_header(hand_made_header())._replace(base_offset=10)
    assert (header.last_offset, header.next_offset) == (12, 13)
    assert header.is_data
    assert not header.is_control
    assert not header.is_transactional
    marker = header._replace(attributes=0x30)
    assert marker.is_control
    assert marker.is_transactional
    assert not marker._replace(type=10).is_transactional


def test_offsets_are_counted_by_type():
    """All offsets of Redpanda's own batches are uncounted, none of the others."""
    header = parse_raw_header(hand_made_header())
    assert {header._replace(type=one).uncounted_offsets for one in UNCOUNTED_TYPES} == {3}
    assert {header._replace(type=one).uncounted_offsets for one in (DATA_TYPE, *COUNTED_TYPES)} == {0}


@pytest.mark.parametrize(
    "topic", ["codec-none", "codec-gzip", "codec-snappy", "codec-lz4", "codec-zstd", "transactions"]
)
def test_reframing_gives_back_the_batch_a_broker_wrote(topic):
    """A golden batch, stored as Redpanda would, comes out byte for byte with its offset translated."""
    data = golden_log(topic)
    size_bytes = parse_header(data).size_bytes
    golden = data[:size_bytes]
    header = parse_header(golden)
    raw = raw_batch(golden, raw_offset=header.base_offset + 5)
    place = OffsetTranslation(header.base_offset + 5, 5)
    assert raw != golden
    assert reframed_batch(memoryview(raw), place, leader_epoch=header.leader_epoch) == golden


def test_leader_epoch_is_the_one_given():
    """The term comes from outside the batch, and leaves the checksum as it is."""
    raw = raw_batch(batch(0, leader_epoch=0), raw_offset=3)
    assert reframed_batch(memoryview(raw), OffsetTranslation(3, 3), leader_epoch=77) == batch(
        0, leader_epoch=77
    )


def test_every_flipped_byte_of_a_batch_is_found():
    """One wrong byte anywhere, header or records, is an error."""
    raw = raw_batch(batch(0), raw_offset=0)
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptDataError):
            reframed_batch(memoryview(damaged), OffsetTranslation(0, 0), leader_epoch=0)


def test_batch_at_another_offset_is_refused():
    """A translation is of one place, and does for no other batch."""
    raw = raw_batch(batch(0), raw_offset=4)
    with pytest.raises(CorruptDataError, match="expected"):
        reframed_batch(memoryview(raw), OffsetTranslation(5, 0), leader_epoch=0)


def test_batch_with_bytes_left_over_is_refused():
    """A batch fills its view."""
    raw = raw_batch(batch(0), raw_offset=0) + b"\0"
    with pytest.raises(CorruptDataError, match="expected"):
        reframed_batch(memoryview(raw), OffsetTranslation(0, 0), leader_epoch=0)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"raw_offset": -1}, "batch offsets -1 to 1 are impossible"),
        ({"last_offset_delta": -1}, "batch offsets 7 to 6 are impossible"),
        ({"record_count": -1}, "-1 records cannot stand in 3 offsets"),
        ({"record_count": 4}, "4 records cannot stand in 3 offsets"),
        ({"size_bytes": 60}, "batch size 60 is impossible"),
        ({"size_bytes": (256 << 20) + 1}, "batch size 268435457 is impossible"),
    ],
)
def test_impossible_header_is_refused_though_its_checksum_is_right(fields, fault):
    """Sound bytes that no broker writes are corrupt data."""
    with pytest.raises(CorruptDataError, match=fault):
        parse_raw_header(raw_batch(batch(0), **{"raw_offset": 7, **fields}))


@pytest.mark.parametrize("batch_type", [0, 3, 4, 11, 35, 36, 37, 39, 41, 127, -1])
def test_type_of_unknown_meaning_is_refused_by_its_own_error(batch_type):
    """A batch of unknown type is refused, because every later offset would be a guess."""
    with pytest.raises(UnsupportedBatchTypeError, match=f"type {batch_type} at raw offset 7") as caught:
        parse_raw_header(raw_batch(batch(0), raw_offset=7, batch_type=batch_type))
    assert ("object storage" in str(caught.value)) == (batch_type in {36, 37})
    assert type(caught.value.located("a.log")) is UnsupportedBatchTypeError
    assert caught.value.located("a.log").source == "a.log"


@pytest.mark.parametrize("length", [0, 1, 60])
def test_header_needs_all_its_bytes(length):
    """A buffer that ends inside a header is an error that says how much is there."""
    with pytest.raises(CorruptDataError, match=f"needs 61 bytes, but only {length} are left"):
        parse_raw_header(raw_batch(batch(0), raw_offset=0)[:length])


def test_cut_batch_is_refused():
    """Records that end before their batch does are an error."""
    raw = raw_batch(batch(0), raw_offset=0)
    with pytest.raises(CorruptDataError, match="cut"):
        check_raw_crc(memoryview(raw)[:-1], parse_raw_header(raw))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_an_error(data):
    """Nothing but CorruptDataError comes of arbitrary bytes."""
    with pytest.raises(CorruptDataError):
        parse_raw_header(data)
