"""Records to Arrow: what aiokafka finds is what comes out, for every codec and kind of record."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from tests.builders import GOLDEN, batch, segment_bytes
from tests.support.decoding import batches_of, by_aiokafka, by_formats, decode
from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import (
    DELETE_HORIZON_FLAG,
    NewRecord,
    encode_batch,
    encode_marker,
    parse_header,
    sealed,
)
from tieringd.spark.decoder import COLUMNS

TIME_MS = 1_700_000_000_000
PLAIN = [NewRecord(b"value %d" % number, key=b"key", timestamp_ms=TIME_MS + number) for number in range(5)]
RECORDS = {
    "plain": (0, PLAIN, {}),
    "null-and-empty": (
        3,
        [NewRecord(value, key=key) for key, value in itertools.product([None, b"", b"x"], repeat=2)],
        {},
    ),
    "holes": (
        100,
        [NewRecord(b"a", offset_delta=2), NewRecord(b"b", offset_delta=1000)],
        {"last_offset_delta": 70_000},
    ),
    "times-go-back": (0, [NewRecord(b"a", timestamp_ms=TIME_MS), NewRecord(b"b", timestamp_ms=5)], {}),
    "no-time": (0, [NewRecord(b"a", timestamp_ms=-1)], {}),
    "large-offsets": (2**41, PLAIN, {}),
    "append-time": (0, PLAIN, {"append_time_ms": TIME_MS + 99}),
    "transactional": (0, PLAIN, {"producer_id": 4, "producer_epoch": 0, "is_transactional": True}),
    "headers": (
        0,
        [
            NewRecord(b"a", headers=[("name", b"content"), ("ä€𝄞", b""), ("", None)]),
            NewRecord(b"b"),
            NewRecord(None, headers=[("name", b"x" * 300)] * 20),
        ],
        {},
    ),
    "long": (0, [NewRecord(b"v" * 70_000, key=b"k" * 200), NewRecord(b"w")], {}),
    "many": (0, [NewRecord(b"%d" % number, timestamp_ms=TIME_MS) for number in range(3000)], {}),
}
GOLDEN_LOGS = sorted(
    f"{path.parent.name}/{path.name}" for path in GOLDEN.glob("*/*.log") if path.stat().st_size
)


@pytest.mark.parametrize("codec", Codec, ids=lambda codec: codec.name.lower())
@pytest.mark.parametrize("kind", RECORDS)
def test_rows_are_what_aiokafka_reads(kind, codec):
    """Every kind of record gives the same rows as with aiokafka, compressed or not, with others around it."""
    base_offset, records, fields = RECORDS[kind]
    data = encode_batch(base_offset, records, codec=codec, **fields)
    data += batch(parse_header(data).next_offset, codec=codec)
    expected = by_aiokafka(data)
    assert len(expected) == len(records) + 3
    assert decode(data).rows == expected


@pytest.mark.parametrize("codec", Codec, ids=lambda codec: codec.name.lower())
def test_batches_of_another_writer_are_read(codec):
    """Batches of aiokafka's producer are read as aiokafka reads them."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=int(codec),
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    for number in range(500):
        headers = [("one", b"1"), ("two", None)][: number % 3]
        builder.append(
            number, TIME_MS + number, b"k%d" % number if number % 7 else None, b"v" * number, headers
        )
    data = bytes(builder.build())
    expected = by_aiokafka(data)
    assert len(expected) == 500
    assert decode(data).rows == expected


@pytest.mark.parametrize("name", GOLDEN_LOGS)
def test_segments_of_a_real_broker_are_read(name):
    """A broker's own segments give the same rows as with aiokafka, and as with the slow reader."""
    data = (GOLDEN / name).read_bytes()
    rows = decode(data).rows
    assert rows == by_aiokafka(data) == by_formats(data)


def test_golden_segments_have_what_a_broker_writes():
    """The broker's segments have all codecs, control markers, append times and a delete horizon."""
    headers = [
        parse_header(batch_) for name in GOLDEN_LOGS for batch_ in batches_of((GOLDEN / name).read_bytes())
    ]
    assert {header.codec for header in headers} == set(Codec)
    assert any(header.is_control for header in headers)
    assert any(header.timestamp_type for header in headers)
    assert any(header.has_delete_horizon and header.record_count for header in headers)


def test_delete_horizon_takes_the_place_of_the_base_time():
    """Times are relative to a horizon that compaction has set."""
    plain = batch(4, [None, b"b"], timestamp_ms=TIME_MS)
    header = parse_header(plain)
    data = sealed(
        header._replace(
            attributes=header.attributes | DELETE_HORIZON_FLAG, base_timestamp_ms=TIME_MS + 86_400_000
        ),
        plain[61:],
    )
    found = decode(data).rows
    assert [row["timestamp"] for row in found] == [1000 * (TIME_MS + 86_400_000 + one) for one in range(2)]
    assert found == by_formats(data)


def test_markers_and_batches_without_records_are_no_rows():
    """Control batches and what compaction leaves of a producer have nothing to show."""
    data = encode_batch(0, [], last_offset_delta=4, producer_id=1)
    data += encode_marker(5, producer_id=1)
    assert decode(data).batches == []
    data += batch(6, [b"last"])
    assert [row["offset"] for row in decode(data).rows] == [6]


@pytest.mark.parametrize(
    ("base_ms", "delta_ms"),
    [
        (9_223_372_036_854_775, 0),
        (9_223_372_036_854_775, 1),
        (9_223_372_036_854_776, 0),
        (9_223_372_036_854_776, -1),
        (-9_223_372_036_854_775, 0),
        (-9_223_372_036_854_775, -1),
        (-9_223_372_036_854_776, 1),
        (2**63 - 1, 2**63 - 1),
        (2**63 - 1, -5),
        (2**63 - 1, -(2**63) + 1),
        (-(2**63), -(2**63)),
        (-(2**63), 2**63 - 1),
        (0, -(2**63)),
        (0, 2**63 - 1),
    ],
)
def test_time_that_microseconds_cannot_hold_is_null(base_ms, delta_ms):
    """A time out of the range of Spark's timestamps is null; one at its end is not."""
    data = encode_batch(
        0,
        [NewRecord(b"a", timestamp_ms=base_ms), NewRecord(b"b", timestamp_ms=base_ms + delta_ms)],
        append_time_ms=0,
    )
    header = parse_header(data)
    data = sealed(header._replace(attributes=0), data[61:])
    found = [row["timestamp"] for row in decode(data).rows]
    assert found == [row["timestamp"] for row in by_formats(data)]
    for time_us, time_ms in zip(found, (base_ms, base_ms + delta_ms), strict=True):
        assert time_us == (time_ms * 1000 if abs(time_ms) <= 9_223_372_036_854_775 else None)


def test_append_time_that_microseconds_cannot_hold_is_null():
    """The batch's own time has the same bounds."""
    data = batch(0, [b"a"], append_time_ms=2**60) + batch(1, [b"a"], append_time_ms=2**50)
    assert [row["timestamp"] for row in decode(data).rows] == [None, 2**50 * 1000]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(b"\xff\xfeab", "\ufffd\ufffdab", id="no-utf8"),
        pytest.param(b"ab\xed\xa0", "ab\ufffd\ufffd", id="half-a-surrogate"),
        pytest.param(b"\xc0\x80ab", "\ufffd\ufffdab", id="overlong"),
        pytest.param(b"\xf4\x90\x80\x80", "\ufffd" * 4, id="beyond-unicode"),
        pytest.param(b"\xc3\xa4\x00b", "ä\x00b", id="zero-inside"),
    ],
)
def test_header_name_that_is_no_utf8_is_read_as_java_reads_it(raw, expected):
    """Malformed bytes become replacement characters; the names beside them stay as they are."""
    body = encode_batch(0, [NewRecord(None, headers=[("good", b"1"), ("1234", b"\xff"), ("ä", None)])])[61:]
    assert body.count(b"1234") == 1
    data = sealed(parse_header(batch(0, [b"v"])), body.replace(b"1234", raw))
    (found,) = decode(data).rows
    assert found["headers"] == (("good", b"1"), (expected, b"\xff"), ("ä", None))
    assert [found] == by_formats(data)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4], ids=lambda codec: codec.name.lower())
@pytest.mark.parametrize(
    "columns",
    [
        *[(name,) for name in COLUMNS],
        ("offset", "timestamp"),
        ("headers", "key"),
        ("value", "headers"),
        ("timestampType", "value", "offset"),
        tuple(reversed(COLUMNS)),
    ],
    ids="-".join,
)
def test_some_columns_are_those_of_all(columns, codec):
    """A selected column has the values that it has beside all other columns."""
    data = b"".join(
        encode_batch(base_offset, records, codec=codec, **fields)
        for base_offset, (records, fields) in zip(
            range(0, 10**7, 10**6),
            [one[1:] for name, one in RECORDS.items() if name != "transactional"],
            strict=True,
        )
    )
    expected = [{name: row[name] for name in columns} for row in decode(data).rows]
    assert len(expected) > 3000
    assert decode(data, columns=columns).rows == expected
    assert decode(data, columns=columns, rows_max=7).rows == expected


def test_no_byte_of_what_is_not_selected_is_kept():
    """A record batch without keys, values and headers keeps no byte of them in memory."""
    data = batch(0, [b"v" * 100_000] * 10)
    (found,) = decode(data, columns=("offset", "timestamp")).batches
    assert found.num_rows == 10
    assert sum(one.size for column in found.columns for one in column.buffers() if one) == 160


@pytest.mark.parametrize("run_count", [1, 2, 5, 40])
def test_runs_make_no_difference(run_count):
    """A segment gives the same rows, however it is cut into runs of whole batches."""
    data = segment_bytes(batches=20, codec=Codec.ZSTD) + segment_bytes(60, batches=20)
    sizes = [0]
    at = 0
    while at < len(data):
        at += parse_header(data, at).size_bytes
        sizes.append(at)
    cuts = sorted({sizes[len(sizes) * number // run_count] for number in range(run_count)} | {0, len(data)})
    runs = [data[start:end] for start, end in itertools.pairwise(cuts)]
    assert len(runs) == min(run_count, 40)
    assert decode(*runs).rows == by_aiokafka(data)


def test_more_batches_than_one_call_takes():
    """A run of thousands of small batches is read whole."""
    data = segment_bytes(batches=5000, records_per_batch=1)
    found = decode(data, rows_max=999)
    assert [one.num_rows for one in found.batches] == [999] * 5 + [5]
    assert found.rows == by_aiokafka(data)


def test_record_batches_are_independent_of_the_decoder():
    """A yielded record batch stays as it is while the decoder goes on, and when the decoder has gone."""
    data = segment_bytes(batches=50, records_per_batch=10, codec=Codec.SNAPPY)
    found = decode(data, rows_max=16).batches
    assert pa.Table.from_batches(found).column("offset").to_pylist() == list(range(500))
    assert {one for batch_ in found for one in batch_.column("value").to_pylist()} == {b"v"}
