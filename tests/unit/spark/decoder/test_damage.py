"""Damaged batches: the decoder refuses what `formats.records` refuses, and tells the same about it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.builders import OLD_MESSAGE_V1, batch, segment_bytes
from tests.support.decoding import SOURCE, Decoded, by_formats, decode, row
from tieringd.errors import CorruptDataError
from tieringd.formats.compression import MAX_DECOMPRESSED_BYTES, Codec, compress
from tieringd.formats.record_batch import (
    CREATE_TIME,
    LOG_APPEND_TIME_FLAG,
    NewRecord,
    encode_batch,
    parse_header,
    sealed,
)
from tieringd.formats.records import iter_records
from tieringd.spark.decoder import COLUMNS, CorruptBatch
from tieringd.spark.decoder.segment_decoder import TEXT_BYTES_LIMIT

INT64 = st.integers(-(2**63), 2**63 - 1)
MAYBE_BYTES = st.none() | st.binary(max_size=30)
NEW_RECORDS = st.lists(
    st.builds(
        NewRecord,
        value=MAYBE_BYTES,
        key=MAYBE_BYTES,
        timestamp_ms=st.integers(-(2**62), 2**62),
        headers=st.lists(st.tuples(st.text(max_size=4), MAYBE_BYTES), max_size=3),
        offset_delta=st.none(),  # Not given, Hypothesis draws any whole number: it reads the annotation.
    ),
    min_size=1,
    max_size=8,
)
ROOM = st.fixed_dictionaries({"rows_max": st.integers(1, 12), "bytes_max": st.integers(1, 200)})
COLUMN_CHOICES = st.sampled_from([COLUMNS, ("value",), ("offset", "timestamp"), ("key", "headers")])


def with_body(body: bytes, codec: int = 0, **fields: int) -> bytes:
    """Return a batch with a right checksum around any *body*, packed with *codec* if that is one."""
    packed = compress(Codec(codec), body) if codec in set(Codec) else body
    return sealed(parse_header(batch(0, [b"v"]))._replace(**{"attributes": codec} | fields), packed)


def zigzag(value: int) -> bytes:
    """Return a variable-length number."""
    rest, raw = (value << 1 if value >= 0 else (-value << 1) - 1), bytearray()
    while rest > 127:
        raw.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*raw, rest])


def expected_of(stored: bytes, position: int, columns=COLUMNS) -> tuple[list[dict], list[CorruptBatch]]:
    """Return the rows of a batch with a right checksum, or how it is noted, from the slow reader."""
    # Where the decoder has headers to make, it unpacks less.
    limit_bytes = TEXT_BYTES_LIMIT if "headers" in columns else MAX_DECOMPRESSED_BYTES
    try:
        return [row(one) for one in iter_records(memoryview(stored), limit_bytes=limit_bytes)], []
    except CorruptDataError as error:
        return [], [CorruptBatch(position, error.offset, error.message)]


def assert_decodes_alike(batches: list[bytes], columns=COLUMNS, **options: int) -> Decoded:
    """See that the decoder has of *batches* what the slow reader has, row by row and fault by fault."""
    rows, corrupt, position = [], [], 0
    for stored in batches:
        more, faults = expected_of(stored, position, columns)
        rows += more
        corrupt += faults
        position += len(stored)
    data = b"".join(batches)
    found = decode(data, columns=columns, skip_corrupt=True, **options)
    assert found.rows == [{name: one[name] for name in columns} for one in rows]
    assert found.corrupt == corrupt
    if corrupt:
        with pytest.raises(CorruptDataError) as caught:
            decode(data, columns=columns, **options)
        first = corrupt[0]
        assert (caught.value.source, caught.value.position) == (SOURCE, first.position)
        assert (caught.value.offset, caught.value.message) == (first.offset, first.message)
    else:
        assert decode(data, columns=columns, **options).rows == found.rows
    return found


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Draw the records of a batch, with some bytes changed, left out or put in."""
    body = bytearray(encode_batch(0, draw(NEW_RECORDS))[61:])
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(body)))
        match draw(st.sampled_from(["change", "cut", "put"])):
            case "change":
                body[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del body[at : at + draw(st.integers(1, 3))]
            case _:
                body[at:at] = draw(st.binary(min_size=1, max_size=3) | INT64.map(zigzag))
    return bytes(body)


@st.composite
def stored_batches(draw: st.DrawFn) -> list[bytes]:
    """Draw batches in order with right checksums, many of them with damaged records."""
    found, base_offset = [], draw(st.sampled_from([0, 5, 2**40, 2**62 - 3, 2**63 - 400]))
    for _ in range(draw(st.integers(1, 4))):
        last_delta = draw(st.integers(0, 12))
        fields = {
            "base_offset": base_offset,
            "last_offset_delta": last_delta,
            "record_count": draw(st.integers(0, last_delta + 1)),
            "base_timestamp_ms": draw(INT64),
            "max_timestamp_ms": draw(INT64),
        }
        codec = draw(st.sampled_from([0, 0, 0, *Codec, 5, 7]))
        attributes = codec | draw(st.sampled_from([0, LOG_APPEND_TIME_FLAG]))
        stored = with_body(draw(mutated()), codec, **fields, attributes=attributes)
        if draw(st.booleans()):
            whole = encode_batch(base_offset, draw(NEW_RECORDS), codec=draw(st.sampled_from(Codec)))
            stored = stored if draw(st.booleans()) else whole
        found.append(stored)
        base_offset = parse_header(stored).next_offset
    return found


@settings(deadline=None)
@given(stored_batches(), COLUMN_CHOICES, ROOM)
def test_damaged_records_are_refused_as_by_the_slow_reader(batches, columns, room):
    """Batches with right checksums and any records give the same rows, or the same faults, in any room."""
    assert_decodes_alike(batches, columns, **room)


@settings(deadline=None)
@example(b"\x80\x80\x80\x80\x03", Codec.SNAPPY, 0, {"rows_max": 1, "bytes_max": 1})
@given(st.binary(max_size=120), st.integers(0, 7), st.integers(0, 5), ROOM)
def test_arbitrary_records_are_refused_as_by_the_slow_reader(body, codec, count, room):
    """No body, under any codec, is read otherwise than by the slow reader, or breaks anything."""
    header = parse_header(batch(0, [b"v"]))
    fields = {"attributes": codec, "record_count": count, "last_offset_delta": 5}
    assert_decodes_alike([sealed(header._replace(**fields), body)], **room)


@settings(deadline=None)
@given(st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 2**31, 2**63 - 1, -(2**63)]) | INT64, max_size=12))
def test_records_of_any_numbers_are_refused_as_by_the_slow_reader(numbers):
    """Sizes, deltas and counts at the ends of their ranges lead nowhere but to a fault."""
    body = b"\0" + b"".join(map(zigzag, numbers))
    assert_decodes_alike([with_body(zigzag(len(body)) + body), with_body(body, base_offset=1)])


ROW = bytes([0, 0, 0, 1, 1, 0])  # attributes, time delta, offset delta, null key, null value, no headers


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD], ids=lambda codec: codec.name.lower())
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
        pytest.param(b"\x0c\x00\x00\x01\x01\x01\x00", {}, "out of order", id="offset-before-batch"),
        pytest.param(
            b"\x0c" + ROW + b"\x0c" + ROW,
            {"record_count": 2, "last_offset_delta": 1},
            "out of order",
            id="same-offset",
        ),
        pytest.param(b"\x0c\x00\x00\x00\x03\x01\x00", {}, "field of -2 bytes", id="negative-key"),
        pytest.param(b"\x0c\x00\x00\x00\x7e\x01\x00", {}, "field of 63 bytes", id="long-key"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x03\x00", {}, "field of -2 bytes", id="negative-value"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x7e\x00", {}, "field of 63 bytes", id="long-value"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x01\x7e", {}, "63 record headers", id="too-many-headers"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x01\x01", {}, "-1 record headers", id="negative-headers"),
        pytest.param(b"\x10\x00\x00\x00\x01\x01\x02\x01\x01", {}, "no name", id="null-header-name"),
        pytest.param(b"\x10\x00\x00\x00\x01\x01\x02\x00\x03", {}, "field of -2", id="negative-header"),
        pytest.param(b"\x10\x00\x00\x00\x01\x01\x02\x00\x7e", {}, "field of 63", id="long-header"),
        pytest.param(b"\xff" * 10, {}, "too long", id="endless-number"),
        pytest.param(b"\xff" * 9 + b"\x7f", {}, "too long", id="number-of-70-bits"),
        pytest.param(
            b"\x1e\x00" + b"\x80" * 9 + b"\x02\x00\x01\x01\x00", {}, "too long", id="number-of-65-bits"
        ),
        pytest.param(
            b"\x0e" + ROW + b"\x0c\x00\x00\x02\x01\x01\x00",
            {"record_count": 2, "last_offset_delta": 1},
            "1 bytes of a record are left over",
            id="record-into-the-next",
        ),
    ],
)
def test_each_kind_of_damage_is_named(body, fields, words, codec):
    """Each way in which records can be wrong is refused with the reason, and its neighbours are read."""
    damaged = with_body(body, codec, base_offset=40, **fields)
    found = assert_decodes_alike([batch(0, codec=codec), damaged, batch(50, codec=codec)])
    assert [one["offset"] for one in found.rows] == [0, 1, 2, 50, 51, 52]
    (fault,) = found.corrupt
    assert words in fault.message
    assert (fault.position, fault.offset) == (len(batch(0, codec=codec)), 40)


@pytest.mark.parametrize("codec", Codec, ids=lambda codec: codec.name.lower())
def test_every_changed_byte_is_noticed(codec):
    """No byte of a batch may change but its base offset and leader epoch, which no checksum covers."""
    first, last = batch(0), batch(20)
    sound = batch(10, codec=codec, producer_id=3)
    for position in range(len(sound)):
        changed = bytearray(sound)
        changed[position] ^= 0x41
        data = first + bytes(changed) + last
        if 12 <= position < 16:
            assert decode(data).corrupt == []
            continue
        if position == 7:
            continue  # The lowest byte of the base offset: it is then 75, and the last batch is out of order.
        with pytest.raises(CorruptDataError) as caught:
            decode(data)
        assert caught.value.source == SOURCE
        found = decode(data, skip_corrupt=True)
        assert found.corrupt, position
        assert {one["offset"] for one in found.rows} <= {0, 1, 2, 20, 21, 22} | (
            {one["offset"] for one in by_formats(bytes(changed))} if position < 8 else set()
        )


def test_checksum_is_checked_before_anything_is_believed():
    """A value that changed leaves everything else possible, and the batch is refused."""
    data = bytearray(segment_bytes(batches=3, value=b"sound"))
    at = bytes(data).index(b"sound", 120)
    data[at : at + 5] = b"false"
    with pytest.raises(CorruptDataError, match=r"batch CRC is \w{8} and should be \w{8}") as caught:
        decode(bytes(data))
    size_bytes = parse_header(data).size_bytes
    assert (caught.value.source, caught.value.position, caught.value.offset) == (SOURCE, size_bytes, 3)
    found = decode(bytes(data), skip_corrupt=True)
    assert [one["offset"] for one in found.rows] == [0, 1, 2, 6, 7, 8]
    assert [(one.position, one.offset) for one in found.corrupt] == [(size_bytes, 3)]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD], ids=lambda codec: codec.name.lower())
@pytest.mark.parametrize("kind", ["checksum", "records", "size"])
def test_position_is_that_in_the_object(kind, codec):
    """A damaged batch of the second run is reported where it stands in the object."""
    first, before, damaged = segment_bytes(batches=5), batch(15, codec=codec), bytearray(batch(18))
    match kind:
        case "checksum":
            damaged[-1] ^= 1
        case "records":
            damaged[:] = with_body(b"x", codec, base_offset=18)
        case _:
            damaged[8:12] = struct.pack(">i", 1 << 30)
    at = len(first) + len(before)
    with pytest.raises(CorruptDataError) as caught:
        decode(first, before + damaged)
    assert (caught.value.position, caught.value.offset) == (at, 18)
    (noted,) = decode(first, before + damaged, skip_corrupt=True).corrupt
    assert (noted.position, noted.offset, noted.message) == (at, 18, caught.value.message)


def test_batch_that_spans_record_batches_leaves_nothing_when_its_end_is_damaged():
    """Rows that already filled a record batch go with the rest of a damaged batch; those before it stay."""
    body = encode_batch(3, [NewRecord(b"%d" % number) for number in range(100)])[61:]
    damaged = with_body(body[:-1] + b"\x7e", base_offset=3, record_count=100, last_offset_delta=99)
    data = batch(0) + damaged + batch(103)
    found = decode(data, skip_corrupt=True, rows_max=10)
    assert [one["offset"] for one in found.rows] == [0, 1, 2, 103, 104, 105]
    assert [one.num_rows for one in found.batches] == [6]
    with pytest.raises(CorruptDataError, match="63 record headers"):
        decode(data, rows_max=10)


def test_batches_out_of_order_are_damaged():
    """The base offset is outside of the checksum: a batch that begins too early is refused."""
    data = batch(10) + batch(12) + batch(13)
    with pytest.raises(CorruptDataError, match="offset 12 is out of order: 13 comes next") as caught:
        decode(data)
    assert caught.value.offset == 12
    found = decode(data, skip_corrupt=True)
    assert [one["offset"] for one in found.rows] == [10, 11, 12, 13, 14, 15]
    assert [one.offset for one in found.corrupt] == [12]


def test_order_is_kept_across_runs_and_codecs():
    """The decoder remembers where the last batch ended, whatever kind it was."""
    with pytest.raises(CorruptDataError, match="out of order"):
        decode(batch(10, codec=Codec.LZ4), batch(11))
    with pytest.raises(CorruptDataError, match="out of order"):
        decode(batch(10), batch(11, codec=Codec.LZ4))


@pytest.mark.parametrize("length", [-1, 0, 48, 2**28, 2**31 - 1, 500], ids=str)
def test_impossible_size_ends_the_run_and_no_more(length):
    """The bytes after an impossible size are skipped with it, and the next run is read."""
    damaged = bytearray(batch(3))
    damaged[8:12] = struct.pack(">i", length)
    run = batch(0) + damaged + batch(6)
    with pytest.raises(CorruptDataError, match=r"impossible|cut") as caught:
        decode(run)
    assert (caught.value.position, caught.value.offset) == (len(batch(0)), 3)
    found = decode(run, batch(9), skip_corrupt=True)
    assert [one["offset"] for one in found.rows] == [0, 1, 2, 9, 10, 11]
    assert [(one.position, one.offset) for one in found.corrupt] == [(len(batch(0)), 3)]


def test_run_that_ends_inside_a_batch_is_damaged():
    """Half a batch at the end of a run is an error, down to a single byte."""
    whole = batch(3)
    for size in range(1, len(whole)):
        with pytest.raises(CorruptDataError, match=r"are left|is cut"):
            decode(batch(0) + whole[:size])
        found = decode(batch(0) + whole[:size], skip_corrupt=True)
        assert len(found.rows) == 3
        assert len(found.corrupt) == 1


def test_message_of_an_old_format_is_skipped_alone():
    """A message of format v1 is refused with the reason; its size is believed."""
    data = batch(0) + OLD_MESSAGE_V1 + batch(6)
    with pytest.raises(CorruptDataError, match="format v1 is not supported") as caught:
        decode(data)
    assert caught.value.hint
    found = decode(data, skip_corrupt=True)
    assert [one["offset"] for one in found.rows] == [0, 1, 2, 6, 7, 8]
    assert [one.offset for one in found.corrupt] == [5]


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_arbitrary_bytes_are_damaged(data):
    """Bytes that are no batch raise CorruptDataError and nothing else."""
    with pytest.raises(CorruptDataError):
        decode(data)
    found = decode(data, skip_corrupt=True)
    assert found.batches == []
    assert found.corrupt


@settings(deadline=None)
@given(st.data(), st.sampled_from(Codec))
def test_changed_headers_are_refused_or_read_as_by_the_slow_reader(data, codec):
    """Any value in any field of a header is a fault, or makes no difference to the slow reader's."""
    whole = encode_batch(5, [NewRecord(b"v" * 20, key=b"k", timestamp_ms=9)] * 3, codec=codec)
    header = parse_header(whole)
    name = data.draw(st.sampled_from(sorted(set(header._fields) - {"length", "crc"})))
    bits = {"magic": 8, "attributes": 16, "producer_epoch": 16, "base_offset": 63}
    bits |= dict.fromkeys(["base_timestamp_ms", "max_timestamp_ms", "producer_id"], 64)
    span = 1 << bits.get(name, 32) - 1
    value = data.draw(st.integers(-8, 8) | st.integers(-span, span - 1))
    changed = sealed(header._replace(**{name: value}), whole[61:])
    if name == "attributes" and value & 0x20:
        return  # A control batch is no rows.
    assert_decodes_alike([changed])


def test_refusal_leaves_the_time_type_to_the_header():
    """A sound batch next to damage keeps its own attributes."""
    data = batch(0, append_time_ms=5) + with_body(b"x", base_offset=3) + batch(4)
    found = decode(data, skip_corrupt=True)
    assert [one["timestampType"] for one in found.rows] == [1] * 3 + [CREATE_TIME] * 3
