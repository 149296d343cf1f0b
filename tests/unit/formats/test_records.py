"""Records out of batches: five codecs, other parsers, and damage."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from aiokafka.record import MemoryRecords
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import batch, golden_log
from tieringd.errors import CorruptDataError
from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import (
    ABORT_MARKER,
    COMMIT_MARKER,
    CONTROL_FLAG,
    NewRecord,
    encode_batch,
    encode_marker,
    parse_header,
    sealed,
)
from tieringd.formats.records import NO_MARKER, Record, control_type, iter_records, read_varint

TEXT = st.text(max_size=8)
MAYBE_BYTES = st.one_of(st.none(), st.binary(max_size=40))
NEW_RECORDS = st.lists(
    st.builds(
        NewRecord,
        value=MAYBE_BYTES,
        key=MAYBE_BYTES,
        timestamp_ms=st.integers(0, 2**50),
        headers=st.lists(st.tuples(TEXT, MAYBE_BYTES), max_size=3),
        offset_delta=st.none(),  # Not given, Hypothesis draws any whole number: it reads the annotation.
    ),
    max_size=8,
)
TOPICS = ("codec-none", "codec-gzip", "codec-snappy", "codec-lz4", "codec-zstd", "compacted", "rolled")


def batches_of(data: bytes):
    position = 0
    while position < len(data):
        size_bytes = parse_header(data, position).size_bytes
        yield memoryview(data)[position : position + size_bytes]
        position += size_bytes


def with_body(body: bytes, **fields) -> memoryview:
    """Return a valid batch around any body: one record unless *fields* say otherwise."""
    return memoryview(sealed(parse_header(batch(0, [b"v"]))._replace(**fields), body))


@pytest.mark.parametrize("topic", TOPICS)
def test_records_of_golden_batches_equal_aiokafka_s(topic):
    """Another parser finds the same records in a real broker's batches, for every codec."""
    data = golden_log(topic)
    theirs = []
    parser = MemoryRecords(data)
    while (found := parser.next_batch()) is not None:
        theirs += [
            (one.offset, one.timestamp, one.timestamp_type, one.key, one.value, tuple(one.headers))
            for one in found
        ]
    ours = [tuple(one) for one in itertools.chain.from_iterable(map(iter_records, batches_of(data)))]
    assert ours
    assert ours == theirs


def test_golden_record_carries_null_key_null_value_and_headers():
    """Nulls and headers of the fourth golden record are read as they were written."""
    records = list(iter_records(next(batches_of(golden_log("codec-lz4")))))
    assert (records[1].key, records[2].value) == (None, None)
    assert records[3] == Record(
        offset=3,
        timestamp_ms=1_700_000_000_003,
        timestamp_type=0,
        key=b"key-3",
        value=b"value 3 of batch 0; " * 6,
        headers=(("trace", b"\x00\x01"), ("empty", None)),
    )


@given(st.integers(0, 2**62), NEW_RECORDS, st.sampled_from(Codec))
def test_records_survive_encoding(base_offset, records, codec):
    """The same records come out of a batch as went into it, for every codec."""
    found = list(iter_records(memoryview(encode_batch(base_offset, records, codec=codec))))
    assert found == [
        Record(base_offset + place, one.timestamp_ms, 0, one.key, one.value, tuple(one.headers))
        for place, one in enumerate(records)
    ]


def test_append_time_replaces_the_records_own():
    """A batch with log append time gives its maximum timestamp to every record."""
    data = encode_batch(
        0, [NewRecord(b"a", timestamp_ms=1), NewRecord(b"b", timestamp_ms=2)], append_time_ms=9
    )
    assert [(one.timestamp_ms, one.timestamp_type) for one in iter_records(memoryview(data))] == [(9, 1)] * 2


def test_holes_of_compaction_stay_holes():
    """Records of a compacted batch keep the offsets they had."""
    data = encode_batch(
        10, [NewRecord(b"a", offset_delta=2), NewRecord(b"b", offset_delta=5)], last_offset_delta=9
    )
    assert [one.offset for one in iter_records(memoryview(data))] == [12, 15]


def test_header_name_that_is_no_utf8_is_read_as_java_reads_it():
    """Malformed bytes in a header's name become replacement characters."""
    body = bytearray(encode_batch(0, [NewRecord(None, headers=[("ab", b"")])])[61:])
    place = body.index(b"ab")
    body[place] = 0xFF
    (record,) = iter_records(with_body(bytes(body)))
    assert record.headers == (("\ufffdb", b""),)


@pytest.mark.parametrize(
    ("marker", "expected"), [(COMMIT_MARKER, "commit"), (ABORT_MARKER, "abort"), (3, 3)], ids=str
)
def test_control_type_names_the_marker(marker, expected):
    """Commit and abort have names, other control records their number."""
    assert control_type(memoryview(encode_marker(0, producer_id=1, marker=marker))) == expected


@pytest.mark.parametrize("key", [None, b"\x00"], ids=["null", "short"])
def test_control_batch_without_marker_is_corrupt(key):
    """A control record whose key holds no type is corrupt."""
    data = encode_batch(4, [NewRecord(b"", key=key)])
    header = parse_header(data)
    data = sealed(header._replace(attributes=CONTROL_FLAG), data[61:])
    with pytest.raises(CorruptDataError, match="holds no marker") as caught:
        control_type(memoryview(data))
    assert caught.value.offset == 4


def test_control_batch_that_the_cleaner_emptied_ends_no_transaction():
    """A marker of which the cleaner left the header is sound."""
    header = parse_header(encode_marker(4, producer_id=1))._replace(record_count=0)
    assert control_type(memoryview(sealed(header, b""))) == NO_MARKER


def test_batch_without_a_record_that_is_no_emptied_marker_is_corrupt():
    """A batch of zero records is corrupt here with bytes behind its header, or without the control flag."""
    whole = encode_marker(4, producer_id=1)
    cut = sealed(parse_header(whole)._replace(record_count=0), whole[61:])
    for data in (cut, encode_batch(4, [])):
        with pytest.raises(CorruptDataError) as caught:
            control_type(memoryview(data))
        assert caught.value.offset == 4


ROW = bytes([0, 0, 0, 1, 1, 0])  # attributes, time delta, offset delta, null key, null value, no headers


@pytest.mark.parametrize(
    ("body", "fields", "words"),
    [
        pytest.param(b"", {}, "end inside a number", id="missing-record"),
        pytest.param(b"\x0c" + ROW + b"x", {}, "1 bytes follow", id="trailing-bytes"),
        pytest.param(b"\x0c" + ROW, {"record_count": 0}, "7 bytes follow", id="count-too-small"),
        pytest.param(b"\x10" + ROW, {}, "does not fit in the batch", id="record-too-long"),
        pytest.param(b"\x00", {}, "does not fit in the batch", id="record-of-nothing"),
        pytest.param(b"\x01", {}, "does not fit in the batch", id="negative-record"),
        pytest.param(b"\x0e" + ROW + b"\x00", {}, "left over", id="record-too-short"),
        pytest.param(b"\x0c\x00\x00\x02\x01\x01\x00", {}, "out of order", id="offset-beyond-batch"),
        pytest.param(
            b"\x0c" + ROW + b"\x0c" + ROW,
            {"record_count": 2, "last_offset_delta": 1},
            "out of order",
            id="same-offset",
        ),
        pytest.param(b"\x0c\x00\x00\x00\x03\x01\x00", {}, "field of -2 bytes", id="negative-key"),
        pytest.param(b"\x0c\x00\x00\x00\x7e\x01\x00", {}, "field of 63 bytes", id="long-key"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x01\x7e", {}, "63 record headers", id="too-many-headers"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x01\x01", {}, "-1 record headers", id="negative-headers"),
        pytest.param(b"\x10\x00\x00\x00\x01\x01\x02\x01\x01", {}, "no name", id="null-header-name"),
        pytest.param(b"\xff" * 10, {}, "too long", id="endless-number"),
        pytest.param(b"\xff" * 9 + b"\x7f", {}, "too long", id="number-of-70-bits"),
        pytest.param(b"x", {"attributes": 7}, "codec 7 is unknown", id="unknown-codec"),
    ],
)
def test_damaged_records_are_corrupt_and_located(body, fields, words):
    """Each way in which records can be wrong is named, with the batch's offset."""
    view = with_body(body, **{"base_offset": 40} | fields)
    with pytest.raises(CorruptDataError, match=words) as caught:
        list(iter_records(view))
    assert caught.value.offset == 40


def test_view_of_another_size_is_corrupt():
    """A view must hold exactly one batch."""
    with pytest.raises(CorruptDataError, match="does not fill"):
        list(iter_records(memoryview(batch() + b"x")))


@given(st.binary(max_size=200), st.integers(0, 7), st.integers(0, 5))
def test_arbitrary_bodies_give_records_or_corruption(body, codec, count):
    """No body, under any codec, raises anything but CorruptDataError."""
    view = with_body(body, attributes=codec, record_count=count, last_offset_delta=5)
    try:
        records = list(iter_records(view))
    except CorruptDataError:
        return
    assert len(records) == count


@given(st.sampled_from(TOPICS), st.data())
def test_flipped_bytes_in_packed_records_give_records_or_corruption(topic, data):
    """Damage inside a compressed body never raises anything but CorruptDataError."""
    whole = bytearray(next(batches_of(golden_log(topic))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(61, max(61, len(whole) - 1))) % len(whole)] ^= data.draw(
            st.integers(1, 255)
        )
    with contextlib.suppress(CorruptDataError):
        list(iter_records(memoryview(whole)))


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_no_batch(data):
    """Bytes that are no batch raise CorruptDataError and nothing else."""
    with pytest.raises(CorruptDataError):
        list(iter_records(memoryview(data)))


@pytest.mark.parametrize("value", [0, -1, 1, 63, -64, 2**31, 2**63 - 1, -(2**63)])
def test_varint_reads_both_ends_of_its_range(value):
    """Numbers of either sign are read, up to 64 bits."""
    zigzag = value << 1 if value >= 0 else (-value << 1) - 1
    raw = bytearray()
    while zigzag > 127:
        raw.append(zigzag & 127 | 128)
        zigzag >>= 7
    raw.append(zigzag)
    assert read_varint(memoryview(raw), 0) == (value, len(raw))
