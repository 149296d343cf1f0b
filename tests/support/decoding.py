"""The rows that the decoder reads from stored batches, and those of two other parsers, for comparison."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from aiokafka.record import MemoryRecords

from tieringd.formats.record_batch import parse_header
from tieringd.formats.records import iter_records
from tieringd.spark.decoder import COLUMNS, CorruptBatch, SegmentDecoder, Selection, arrow_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALL = Selection(0, 2**63 - 1)
TOPIC, PARTITION, SOURCE = "orders", 7, "objects/orders/7/0.log"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoder's output for one or several runs."""

    batches: list[pa.RecordBatch]
    corrupt: list[CorruptBatch]

    @property
    def rows(self) -> list[Row]:
        """Return the rows, with timestamps in microseconds, headers as tuples, and None for no headers."""
        return [row for batch in self.batches for row in rows_of(batch)]


def decode(
    *runs: bytes, columns: Sequence[str] = COLUMNS, selection: Selection = ALL, **options: Any
) -> Decoded:
    """Decode consecutive runs of one object, and check that every resulting record batch is valid."""
    decoder = SegmentDecoder(
        columns, topic=TOPIC, partition=PARTITION, selection=selection, source=SOURCE, **options
    )
    found, position = [], 0
    for run in runs:
        found += decoder.decode(memoryview(run), position)
        position += len(run)
    found += decoder.finish()
    for batch in found:
        batch.validate(full=True)
        assert batch.schema.equals(arrow_schema(columns), check_metadata=True)
    return Decoded(found, decoder.corrupt)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Return the rows of *batch* in the form of `Decoded.rows`."""
    values = {}
    for name in batch.schema.names:
        column = batch.column(name)
        values[name] = (column.cast(pa.int64()) if name == "timestamp" else column).to_pylist()
        if name == "headers":
            values[name] = [
                one and tuple((pair["key"], pair["value"]) for pair in one) for one in values[name]
            ]
    return [
        dict(zip(values, row, strict=True)) for row in itertools.zip_longest(*values.values(), fillvalue=...)
    ]


def row(record: Any) -> Row:
    """Return a record of `formats.records` as a row."""
    timestamp_us = record.timestamp_ms * 1000
    return {
        "key": record.key,
        "value": record.value,
        "topic": TOPIC,
        "partition": PARTITION,
        "offset": record.offset,
        "timestamp": timestamp_us if -(2**63) <= timestamp_us < 2**63 else None,
        "timestampType": record.timestamp_type,
        "headers": record.headers or None,
    }


def batches_of(data: bytes) -> Iterable[memoryview]:
    """Yield each of the valid batches in *data*."""
    position = 0
    while position < len(data):
        size_bytes = parse_header(data, position).size_bytes
        yield memoryview(data)[position : position + size_bytes]
        position += size_bytes


def by_formats(data: bytes) -> list[Row]:
    """Return the rows that `formats.records` finds in valid batches, without transaction markers."""
    return [
        row(one)
        for batch in batches_of(data)
        if not parse_header(batch).is_control
        for one in iter_records(batch)
    ]


def by_aiokafka(data: bytes) -> list[Row]:
    """Return the rows that aiokafka finds, without transaction markers."""
    found = []
    parser = MemoryRecords(data)
    while (batch := parser.next_batch()) is not None:
        assert batch.validate_crc()
        found += [
            {
                "key": one.key,
                "value": one.value,
                "topic": TOPIC,
                "partition": PARTITION,
                "offset": one.offset,
                "timestamp": one.timestamp * 1000,
                "timestampType": one.timestamp_type,
                "headers": tuple(one.headers) or None,
            }
            for one in batch
            if not batch.is_control_batch
        ]
    return found
