"""How large record batches are: by rows, by bytes, and where one record is larger than that."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.builders import batch
from tests.support.decoding import ALL, by_aiokafka, by_formats, decode
from tieringd.errors import CorruptDataError
from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import NewRecord, encode_batch, parse_header, sealed
from tieringd.spark.decoder import COLUMNS, SegmentDecoder

MIB = 1 << 20


def bytes_in(record_batch: pa.RecordBatch) -> int:
    """Return how many bytes of keys and values there are."""
    return sum(len(one) for name in ("key", "value") for one in record_batch.column(name).to_pylist() if one)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD], ids=lambda codec: codec.name.lower())
@pytest.mark.parametrize("rows_max", [1, 7, 10, 99, 100, 101, 1000])
def test_record_batches_have_as_many_rows_as_they_may(rows_max, codec):
    """All but the last are full, wherever the stored batches begin and end."""
    data = b"".join(
        encode_batch(at, [NewRecord(b"%d" % one) for one in range(10)], codec=codec)
        for at in range(0, 100, 10)
    )
    found = decode(data, rows_max=rows_max)
    full, rest = divmod(100, rows_max)
    assert [one.num_rows for one in found.batches] == [rows_max] * full + [rest] * (rest > 0)
    assert found.rows == by_aiokafka(data)


def test_record_batches_have_no_more_bytes_than_they_may():
    """Keys and values together stay within the bound, and the next record would not."""
    sizes = [number * 37 % 400 for number in range(300)]
    data = encode_batch(0, [NewRecord(b"v" * size, key=b"k" * (size // 3)) for size in sizes])
    found = decode(data, columns=("key", "value"), bytes_max=1000)
    assert len(found.batches) > 10
    for one, following in zip(found.batches, [*found.batches[1:], None], strict=True):
        assert bytes_in(one) <= 1000
        if following is not None:
            assert bytes_in(one) + bytes_in(following.slice(0, 1)) > 1000
    assert sum(one.num_rows for one in found.batches) == 300


def test_record_batches_stay_in_the_processor_s_caches():
    """A record batch has at most 2 MiB, also of large values: with 16 MiB, Spark took an eighth more CPU."""
    data = encode_batch(0, [NewRecord(b"%d" % number * 500, key=b"k") for number in range(3_000)])
    found = decode(data)
    assert len(found.batches) > 1
    assert max(map(bytes_in, found.batches)) <= 2 << 20
    larger = decode(data, bytes_max=16 << 20)
    assert len(larger.batches) == 1
    assert found.rows == larger.rows


def test_bytes_that_are_not_selected_do_not_count():
    """Only rows fill a record batch if only offsets are selected."""
    data = encode_batch(0, [NewRecord(b"v" * 100)] * 50)
    assert [one.num_rows for one in decode(data, columns=("offset",), bytes_max=100).batches] == [50]


def test_record_larger_than_a_record_batch_is_alone():
    """A record above the bound is read whole, without company, and the next are as before."""
    small, large = NewRecord(b"v" * 10), NewRecord(b"w" * 5000, key=b"k" * 3000)
    data = encode_batch(0, [small, small, large, small, large, large, small, small])
    found = decode(data, columns=("key", "value", "offset"), bytes_max=100)
    assert [one.column("offset").to_pylist() for one in found.batches] == [[0, 1], [2], [3], [4], [5], [6, 7]]
    assert [bytes_in(one) for one in found.batches] == [20, 8000, 10, 8000, 8000, 20]


def test_headers_have_room_however_many_there_are():
    """Records with thousands of headers are read, and only make record batches shorter."""
    records = [NewRecord(b"v", headers=[("name", b"c")] * one) for one in (0, 3000, 1, 0, 500, 200, 2)]
    data = encode_batch(0, records)
    for rows_max in (1, 3, 100):
        found = decode(data, rows_max=rows_max)
        assert found.rows == by_aiokafka(data)
    assert [one.num_rows for one in found.batches] == [1, 1, 2, 1, 2]


@pytest.mark.parametrize("codec", Codec, ids=lambda codec: codec.name.lower())
def test_batches_over_eight_mebibytes_are_read(codec):
    """A batch of 20 MiB is read like any other, then a small one, then a larger one."""
    value = bytes(range(256)) * 4096
    records = [NewRecord(value[one:], key=b"%d" % one) for one in range(20)]
    data = encode_batch(0, records, codec=codec)
    data += batch(20, codec=codec)
    data += encode_batch(23, records + records[:5], codec=codec)
    found = decode(data, columns=("key", "value", "offset"), bytes_max=4 * MIB)
    assert all(bytes_in(one) <= 4 * MIB for one in found.batches)
    table = pa.Table.from_batches(found.batches)
    assert table.column("offset").to_pylist() == list(range(48))
    values = [one.value for one in records]
    assert table.column("value").to_pylist() == [*values, b"a", b"b", b"c", *values, *values[:5]]


def test_value_of_forty_mebibytes_is_read():
    """One value may be larger than any bound that was set in advance."""
    value = b"0123456789abcdef" * (40 * MIB // 16)
    data = encode_batch(0, [NewRecord(b"a"), NewRecord(value), NewRecord(b"b")], codec=Codec.LZ4)
    found = decode(data)
    assert [one.num_rows for one in found.batches] == [1, 1, 1]
    assert found.rows == by_formats(data)


@pytest.mark.parametrize(
    "options", [{"rows_max": 0}, {"bytes_max": 0}, {"rows_max": 2**21}, {"bytes_max": 2**30}], ids=str
)
def test_room_that_arrow_could_not_count_is_refused(options):
    """Arrow counts the bytes of a column in 31 bits: more than fits for sure is an error."""
    with pytest.raises(ValueError, match="a record batch cannot have"):
        SegmentDecoder(COLUMNS, topic="t", partition=0, selection=ALL, source="s", **options)


def test_batch_that_unpacks_beyond_all_bounds_is_damaged():
    """A few bytes that claim gigabytes are refused for what they claim, before any are unpacked."""
    repeated, last = (1 << 1 | 100_000 << 3).to_bytes(3, "little"), (1 | 1 << 1).to_bytes(3, "little")
    frame = b"\x28\xb5\x2f\xfd\x00\x70" + (repeated + b"x") * 11_000 + last + b"x"
    header = parse_header(batch(0, [b"v"]))
    data = sealed(header._replace(attributes=int(Codec.ZSTD)), frame)
    with pytest.raises(CorruptDataError, match="unpack to more than"):
        decode(data)


def test_headers_that_are_not_selected_do_not_count():
    """The size of headers does not matter if only values are selected."""
    data = encode_batch(0, [NewRecord(b"v", headers=[("n", b"c" * 500)])] * 9)
    assert [one.num_rows for one in decode(data, columns=("value",), bytes_max=20).batches] == [9]


def test_what_goes_to_spark_is_what_is_filled():
    """A record batch of a few rows is sent as a few bytes, whatever room there was, and arrives whole."""
    data = encode_batch(0, [NewRecord(b"value", key=b"key", headers=[("name", b"content")])] * 3)
    (found,) = decode(data).batches
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, found.schema) as stream:
        stream.write_batch(found)
    sent = sink.getvalue()
    assert sent.size < 4096
    assert pa.ipc.open_stream(sent).read_all().to_batches() == [found]


def test_runs_are_decoded_one_after_another():
    """A run that was left in the middle is a programmer's error, found at the next one."""
    decoder = SegmentDecoder(COLUMNS, topic="t", partition=0, selection=ALL, source="s", rows_max=1)
    next(decoder.decode(memoryview(batch(0)), 0))
    with pytest.raises(AssertionError, match="before the next run"):
        next(decoder.decode(memoryview(batch(3)), 0))
