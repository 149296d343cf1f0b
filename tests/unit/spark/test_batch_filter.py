"""Records taken out of batches: what is left reads as if the others had never been there."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
from aiokafka.record import MemoryRecords
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import golden_log
from tests.unit.formats.test_records import NEW_RECORDS, TOPICS, batches_of, with_body
from tieringd.errors import CorruptDataError
from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import (
    DELETE_HORIZON_FLAG,
    HEADER_BYTES,
    NewRecord,
    check_crc,
    encode_batch,
    parse_header,
    sealed,
)
from tieringd.formats.records import iter_records
from tieringd.spark.record_spans import NULL, filtered_batch, record_spans


def filtered(data: memoryview, is_kept):
    return filtered_batch(record_spans(parse_header(data), data), data, np.array(is_kept, bool))


def size_of(field: bytes | None) -> int:
    return NULL if field is None else len(field)


@st.composite
def batches(draw) -> memoryview:
    """Draw a valid batch: any codec, holes between offsets, either kind of time, in a transaction or not."""
    records = draw(NEW_RECORDS)
    deltas = draw(
        st.lists(st.integers(0, 2**31 - 1), unique=True, min_size=len(records), max_size=len(records))
    )
    rows = [one._replace(offset_delta=delta) for one, delta in zip(records, sorted(deltas), strict=True)]
    return memoryview(
        encode_batch(
            draw(st.integers(0, 2**62)),
            rows,
            codec=draw(st.sampled_from(Codec)),
            leader_epoch=draw(st.integers(-1, 9)),
            last_offset_delta=draw(st.integers(max(deltas, default=0), 2**31 - 1)),
            producer_id=draw(st.integers(-1, 2**62)),
            is_transactional=draw(st.booleans()),
            append_time_ms=draw(st.none() | st.integers(0, 2**50)),
        )
    )


@given(batches())
@settings(deadline=None)
def test_spans_say_what_the_records_are(data):
    """Each record's offset, time, key and size of the value are those that the plain parser finds."""
    records, spans = list(iter_records(data)), record_spans(parse_header(data), data)
    assert spans.offsets.tolist() == [one.offset for one in records]
    assert spans.timestamps_ms.tolist() == [one.timestamp_ms for one in records]
    assert spans.keys() == [one.key for one in records]
    assert spans.key_bytes.tolist() == [size_of(one.key) for one in records]
    assert spans.value_bytes.tolist() == [size_of(one.value) for one in records]


@given(batches(), st.data())
@settings(deadline=None)
def test_what_is_left_is_just_what_was_to_be_kept(data, choices):
    """The rest reads the same by two parsers. Offsets, producer and epoch of the batch stay."""
    records, before = list(iter_records(data)), parse_header(data)
    is_kept = choices.draw(st.lists(st.booleans(), min_size=len(records), max_size=len(records)))
    kept = [one for one, is_wanted in zip(records, is_kept, strict=True) if is_wanted]

    left = filtered(data, is_kept)

    if len(kept) == len(records):
        assert left is data
        return
    if not kept:
        assert left is None
        return
    after = parse_header(left)
    check_crc(memoryview(left), after)
    assert list(iter_records(memoryview(left))) == kept
    theirs = MemoryRecords(bytes(left)).next_batch()
    assert [(one.offset, one.key, one.value) for one in theirs] == [
        (one.offset, one.key, one.value) for one in kept
    ]
    assert after.max_timestamp_ms == max(one.timestamp_ms for one in kept)
    changed = {"length", "crc", "record_count", "max_timestamp_ms"}
    assert after == before._replace(**{name: getattr(after, name) for name in changed})


@pytest.mark.parametrize("topic", TOPICS)
def test_batches_of_a_real_broker_lose_every_other_record(topic):
    """Every other record is removed from a broker's batches of every codec, and the rest reads as before."""
    removed = 0
    for data in batches_of(golden_log(topic)):
        records = list(iter_records(data))
        is_kept = [one.offset % 2 == 0 for one in records]
        left = filtered(data, is_kept)
        found = [] if left is None else list(iter_records(memoryview(left)))
        assert found == [one for one in records if one.offset % 2 == 0]
        removed += len(records) - len(found)
    assert removed


def test_times_count_from_the_delete_horizon_where_there_is_one():
    """The base time of such a batch is that horizon, and no record's time; it stays."""
    plain = encode_batch(3, [NewRecord(b"a", timestamp_ms=50), NewRecord(b"b", timestamp_ms=40)])
    header = parse_header(plain)
    flags = header.attributes | DELETE_HORIZON_FLAG
    data = memoryview(sealed(header._replace(attributes=flags, base_timestamp_ms=1000), plain[HEADER_BYTES:]))
    left = memoryview(filtered(data, [False, True]))
    assert [(one.offset, one.timestamp_ms) for one in iter_records(left)] == [(4, 990)]
    after = parse_header(left)
    assert (after.base_timestamp_ms, after.max_timestamp_ms, after.attributes) == (1000, 990, flags)


def test_batch_without_records_stays():
    """An empty batch, as a broker's cleaner leaves of a producer, was not asked to be removed."""
    data = memoryview(encode_batch(7, [], last_offset_delta=3, producer_id=4))
    assert filtered(data, []) is data


@pytest.mark.parametrize(
    ("body", "fields", "fault"),
    [
        pytest.param(b"", {}, "cut short", id="nothing"),
        pytest.param(b"\x80" * 11, {}, "cut short", id="endless number"),
        pytest.param(b"\xff" * 9 + b"\x7f", {}, "cut short", id="number of more than 64 bits"),
        pytest.param(
            b"\x1e\x00" + b"\xff" * 9 + b"\x7f" + b"\x00\x01\x01\x00",
            {},
            "cut short",
            id="time of more than 64 bits",
        ),
        pytest.param(b"\x00", {}, "does not fit", id="record of no bytes"),
        pytest.param(b"\x01" + b"\x00" * 20, {}, "does not fit", id="record of fewer than no bytes"),
        pytest.param(b"\x40\x00\x00\x00\x01", {}, "does not fit", id="record past the end"),
        pytest.param(b"\x0c\x00\x00\x00\x03\x01\x00", {}, "does not fit", id="key of -2 bytes"),
        pytest.param(b"\x0c\x00\x00\x00\x14\x01\x00", {}, "does not fit", id="key past the record"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x03\x00", {}, "does not fit", id="value of -2 bytes"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x14\x00", {}, "does not fit", id="value past the record"),
        pytest.param(b"\x0c\x00\x00\x02\x01\x01\x00", {}, "out of order", id="offset past the batch"),
        pytest.param(b"\x0c\x00\x00\x01\x01\x01\x00", {}, "out of order", id="offset before the batch"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x01\x00!", {}, "bytes follow", id="left over"),
        pytest.param(
            b"\x0c\x00\x00\x00\x01\x01\x00" * 2,
            {"record_count": 2, "last_offset_delta": 1},
            "out of order",
            id="offset twice",
        ),
        pytest.param(
            b"\x22\x00\x00\x00" + b"\xfe" + b"\xff" * 8 + b"\x01" + b"\x01\x00!",
            {},
            "does not fit",
            id="key of all addresses",
        ),
    ],
)
def test_damaged_records_are_told(body, fields, fault):
    """A checksum may be right over bytes that are not records."""
    data = with_body(body, **fields)
    with pytest.raises(CorruptDataError, match=fault):
        record_spans(parse_header(data), data)


@given(st.binary(max_size=80), st.integers(0, 4), st.integers(0, 4))
@settings(deadline=None)
def test_arbitrary_bytes_are_records_or_damage(body, count, last_delta):
    """Nothing else comes of them; and where the plain parser finds records, these are the same."""
    header = parse_header(with_body(b"", record_count=0))
    header = header._replace(record_count=min(count, last_delta + 1), last_offset_delta=last_delta)
    data = memoryview(sealed(header, body))
    header = parse_header(data)
    try:
        records = list(iter_records(data))
    except CorruptDataError:
        # The plain parser looks into headers as well.
        with contextlib.suppress(CorruptDataError):
            record_spans(header, data)
        return
    spans = record_spans(header, data)
    assert [(one.offset, one.key) for one in records] == list(
        zip(spans.offsets.tolist(), spans.keys(), strict=True)
    )


@pytest.mark.parametrize("count", [10**6, 2**31 - 1])
def test_count_of_more_records_than_there_are_bytes(count):
    """The count is refused before memory is taken for so many records."""
    stored = encode_batch(0, [NewRecord(b"v", key=b"k")])
    header = parse_header(stored)._replace(record_count=count, last_offset_delta=2**31 - 1)
    data = sealed(header, stored[HEADER_BYTES:])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError, match="does not fit"):
            record_spans(parse_header(data), memoryview(data))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
