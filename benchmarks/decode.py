"""
How fast do stored batches become Arrow, beside aiokafka's parser, which is compiled too?

One segment lies in memory. Each round both alternatives make record batches of all its records, in turns,
one record batch after another as Spark takes them; each has to have the same rows. Only the making is
timed. CPU seconds count: a core is what a Spark task has, and others may use this machine.

    python -m benchmarks.decode [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from aiokafka.record import MemoryRecords
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from benchmarks.harness import Figures, Sample, machine, print_table, write_json
from tieringd.formats.compression import Codec
from tieringd.spark.decoder import COLUMNS, SegmentDecoder, Selection, arrow_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TOPIC, PARTITION = "bench", 3
TIME_MS = 1_700_000_000_000
ROWS_MAX = 16_384
RUN_BYTES = 8 << 20
"""What a reader of the bucket fetches at once."""

ALL_BUT_HEADERS = COLUMNS[:7]
OURS, THEIRS = "tieringd", "aiokafka"


@dataclass(frozen=True, slots=True)
class Case:
    """Records of one kind, packed in one way, and what is wanted of them."""

    value: Callable[[random.Random, int], bytes]
    records_per_batch: int
    codec: Codec = Codec.NONE
    columns: Sequence[str] = ALL_BUT_HEADERS
    share: float = 1
    """Share of the records that other cases have: fewer where a record takes longer."""


def short_value(values: random.Random, _number: int) -> bytes:
    """Return 88 bytes, which make records of 100 with the key."""
    return values.randbytes(44).hex().encode()


def document(values: random.Random, number: int) -> bytes:
    """Return a document of about 1 KiB, half of it the same in all of them."""
    items = [
        {"sku": f"SKU-{values.randrange(10**6):06d}", "quantity": values.randrange(9), "unit": "piece"}
        for _ in range(14)
    ]
    order = {"order": number, "customer": values.randbytes(8).hex(), "state": "accepted", "items": items}
    return json.dumps(order).encode()


CASES = {
    "100 B": Case(short_value, 1000),
    "100 B, 16 KiB batches": Case(short_value, 140),
    "100 B, one a batch": Case(short_value, 1, share=0.1),
    "100 B, only offset and timestamp": Case(short_value, 1000, columns=("offset", "timestamp")),
    **{f"1 KiB, {codec.name.lower()}": Case(document, 250, codec, share=0.25) for codec in Codec},
}


def segment(case: Case, count: int) -> list[bytes]:
    """Return *count* records in whole batches, in runs."""
    values = random.Random(20240229)
    known = [case.value(values, number) for number in range(4096)]
    runs, run = [], bytearray()
    for base_offset in range(0, count, case.records_per_batch):
        builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=int(case.codec),
            is_transactional=False,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
            batch_size=1 << 30,
        )
        for delta in range(case.records_per_batch):
            number = base_offset + delta
            value = known[number * 7919 % len(known)]
            builder.append(delta, TIME_MS + number, b"key-%08d" % (number % 10**8), value, [])
        stored = builder.build()
        # As a broker does it; the checksum leaves this out.
        stored[:8] = base_offset.to_bytes(8, "big")
        run += stored
        if len(run) >= RUN_BYTES:
            runs.append(bytes(run))
            run.clear()
    return [*runs, bytes(run)]


def by_tieringd(runs: list[bytes], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of our decoder."""
    decoder = SegmentDecoder(
        columns,
        topic=TOPIC,
        partition=PARTITION,
        selection=Selection(0, 1 << 62),
        source="bench",
    )
    for run in runs:
        yield from decoder.decode(memoryview(run), 0)
    yield from decoder.finish()


def by_aiokafka(runs: list[bytes], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """
    Yield record batches made with aiokafka's parser, and of each record no more than is wanted.

    A list for each column, filled a record at a time, is the fastest way that was found: records that are
    kept, were it for one stored batch, cost Python's garbage collector more than the parser takes.
    """
    lists: dict[str, list[object]] = {name: [] for name in COLUMNS}
    add_key, add_value, add_type = (lists[name].append for name in ("key", "value", "timestampType"))
    add_offset, add_time = (lists[name].append for name in ("offset", "timestamp"))
    for run in runs:
        parser = MemoryRecords(run)
        while (batch := parser.next_batch()) is not None:
            assert batch.validate_crc(), "a checksum is wrong"
            if "value" in columns:
                for record in batch:
                    add_key(record.key)
                    add_value(record.value)
                    add_offset(record.offset)
                    add_time(record.timestamp)
                    add_type(record.timestamp_type)
            else:
                for record in batch:
                    add_offset(record.offset)
                    add_time(record.timestamp)
            if len(lists["offset"]) >= ROWS_MAX:
                yield record_batch(lists, columns)
                for column in lists.values():
                    column.clear()
    if lists["offset"]:
        yield record_batch(lists, columns)


def record_batch(lists: dict[str, list[object]], columns: Sequence[str]) -> pa.RecordBatch:
    """Return *columns* of *lists* as Arrow."""
    schema, count = arrow_schema(columns), len(lists["offset"])
    arrays = []
    for field in schema:
        match field.name:
            case "topic":
                arrays.append(pa.repeat(TOPIC, count))
            case "partition":
                arrays.append(pa.repeat(pa.scalar(PARTITION, pa.int32()), count))
            case "timestamp":
                times_ms = pa.array(lists["timestamp"], pa.timestamp("ms", "UTC"))
                arrays.append(times_ms.cast(field.type))
            case name:
                arrays.append(pa.array(lists[name], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


ALTERNATIVES = {OURS: by_tieringd, THEIRS: by_aiokafka}


def timed(
    decode: Callable[[list[bytes], Sequence[str]], Iterator[pa.RecordBatch]],
    runs: list[bytes],
    case: Case,
    expected: pa.Table,
) -> Sample:
    """Decode *runs* once; all that comes out equals the rows of *expected*."""
    seconds = cpu_seconds = 0.0
    found, batches = 0, decode(runs, case.columns)
    while True:
        begun, cpu_begun = time.perf_counter(), time.process_time()
        batch = next(batches, None)
        seconds += time.perf_counter() - begun
        cpu_seconds += time.process_time() - cpu_begun
        if batch is None:
            break
        assert pa.Table.from_batches([batch]).equals(expected.slice(found, batch.num_rows)), (
            f"{decode.__name__}: rows {found} to {found + batch.num_rows} differ"
        )
        found += batch.num_rows
    assert found == expected.num_rows, f"{decode.__name__}: {found} of {expected.num_rows} rows"
    return Sample(seconds, cpu_seconds, found / 1e6)


def measure(case: Case, count: int, rounds: int) -> dict[str, Figures]:
    """Return the figures of each alternative, in millions of records."""
    runs = segment(case, int(count * case.share))
    expected = pa.Table.from_batches(by_aiokafka(runs, case.columns))
    samples: dict[str, list[Sample]] = {name: [] for name in ALTERNATIVES}
    for number in range(rounds + 1):
        for name, decode in ALTERNATIVES.items():
            sample = timed(decode, runs, case, expected)
            # The first round loads code and takes memory.
            if number:
                samples[name].append(sample)
    return {name: Figures.of(taken) for name, taken in samples.items()}


def main() -> None:
    """Measure, print a table for each case, and write the figures where they are wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    count, rounds = (200_000, 3) if options.quick else (1_000_000, 7)
    where = machine("aiokafka", "cramjam", "numba", "pyarrow")
    print(f"{where}\n{count:,} records of 100 bytes (of others a share), {rounds} rounds")
    figures: dict[str, Figures] = {}
    ratios: dict[str, float] = {}
    for name, case in CASES.items():
        print(f"\n{name}")
        rows = measure(case, count, rounds)
        print_table(rows, reference=OURS, unit="Mrec")
        figures |= {f"{name}, {alternative}": row for alternative, row in rows.items()}
        ratios[name] = rows[THEIRS].cpu_seconds_per_gib / rows[OURS].cpu_seconds_per_gib
    print("\ntieringd against aiokafka, by CPU seconds")
    for name, ratio in ratios.items():
        print(f"{name:>34} {ratio:6.2f}x")
    ratios["decode_vs_aiokafka"] = ratios["100 B"]
    speed = 1 / figures[f"100 B, {OURS}"].cpu_seconds_per_gib
    print(f"{'decode_vs_aiokafka':>34} {ratios['decode_vs_aiokafka']:6.2f}x")
    print(f"{'decode_mrec_per_s':>34} {speed:6.2f}")
    if options.json:
        all_figures = figures | {"decode_mrec_per_s": speed}
        write_json(options.json, name="decode", machine=where, figures=all_figures, ratios=ratios)


if __name__ == "__main__":
    main()
