"""
What does the manifest of a million segments cost, in memory, to search, and to commit?

The segments are of three shapes: those of a busy topic, of a slow one whose times lie far apart, and of
one that was archived late from a Redpanda broker. The dearest counts. Lookups are spread over all rows;
a lookup by offset returns the segment, and one by time the first row that may have a record as late. Most
times ascend, and some are of the wrong year, as clients' clocks are.

Then one archive is filled by commits of a segment or a batch, with spilling as the daemon does it, into a
store in memory. A commit's bytes are those of all objects that it stores, spillover manifests included.
`commit_growth` is the median of single commits around a million segments over that around a thousand, with
the default target. A thousand segments may be below it, and a commit grows until a manifest reaches it: so
the figure says how far a commit of a young archive is from the largest there will be.
`commit_growth_past_target` is the same up to fifty thousand with a target of 16 KiB, which a thousand
segments are past: what is left is growth with the length of history. The growth in seconds has the noise
of the machine.

    python -m benchmarks.manifest [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
import tracemalloc
from array import array
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import machine, write_json
from tests.fakes.memory_store import MemoryStore
from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.model.segment_table import COLUMNS, SegmentTable
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.policies.spillover import plan_spillover

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.storage.base import Body, Condition, ObjectInfo

MILLION, QUICK = 1_000_000, 50_000
TARGET_BYTES = 64 << 10
"""The default of `cloud_storage_target_manifest_size_bytes`."""
SMALL_TARGET_BYTES = 16 << 10
_PARTITION = TopicIdPartition("MkU3OEVBNTcwNTJENDM2Qk", "orders", "wJalrXUtnFEMI-K7MDENGg", 7)
_WRITERS = tuple(f"{number:016x}" for number in range(1, 9))
_TIME_MS = 1_700_000_000_000
_RECORDS = 20_000
_LOOKUPS = 20_000
_COMMITS = 300
"""Of one segment each, around each length of history."""
_BATCH = 100
"""Segments in a commit between those that are measured."""
_LOCAL = 100
"""Segments that the local log holds: they stay live."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How segments of a topic follow each other."""

    every_ms: int
    """Time between the ends of two segments."""
    upload_lag_ms: int
    """The longest time between a segment's end and its upload. The first segment waits so long."""
    has_broker_times: bool = False
    epoch_segments: int = 1000
    """How many segments a leader archives."""


SHAPES = {
    "busy": Shape(every_ms=20_000, upload_lag_ms=5_000),
    "slow": Shape(every_ms=86_400_000, upload_lag_ms=60_000, epoch_segments=20),
    "late": Shape(every_ms=3_600_000, upload_lag_ms=3_600_000 * MILLION, has_broker_times=True),
}


def segments(shape: Shape, count: int, *, first: int = 0) -> list[RemoteSegment]:
    """Return *count* segments of an archive, from the number *first* on."""
    values = random.Random(first)
    found = []
    for number in range(first, first + count):
        end_ms = _TIME_MS + number * shape.every_ms + values.randrange(shape.every_ms // 2)
        if number % 997 == 0:
            end_ms += 31_536_000_000  # A client's clock is a year ahead.
        base_offset = number * _RECORDS
        found.append(
            RemoteSegment(
                base_offset,
                base_offset + _RECORDS - 1,
                size_bytes=values.randrange(900 << 20, 1 << 30),
                crc32c=values.getrandbits(32),
                base_timestamp_ms=end_ms - values.randrange(shape.every_ms),
                max_timestamp_ms=end_ms,
                leader_epoch=number // shape.epoch_segments,
                writer_id=_WRITERS[number // shape.epoch_segments % len(_WRITERS)],
                uploaded_at_ms=end_ms
                + max(0, shape.upload_lag_ms - number * shape.every_ms)
                + values.randrange(5000),
                index_size_bytes=values.randrange(20_000, 40_000),
                broker_timestamp_ms=end_ms + values.randrange(500) if shape.has_broker_times else -1,
                index_crc32c=values.getrandbits(32),
            )
        )
    return found


def table_of(shape: Shape, count: int) -> tuple[SegmentTable, float]:
    """Return a table, and the bytes that each of its segments takes."""
    codes = dict.fromkeys(COLUMNS, "q")
    columns = {name: array(code) for name, code in codes.items()}
    numbers = array("H")
    for first in range(0, count, 10_000):
        for one in segments(shape, min(10_000, count - first), first=first):
            for name, column in columns.items():
                column.append(getattr(one, name))
            numbers.append(_WRITERS.index(one.writer_id))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    table = SegmentTable.from_columns(columns, numbers, _WRITERS)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return table, (held - before) / count


def seconds_each(lookup: Callable[[int], object], wanted: list[int]) -> float:
    """Return how long one lookup takes, in the best of three rounds."""
    rounds = []
    for _ in range(3):
        begin = time.perf_counter()
        for one in wanted:
            lookup(one)
        rounds.append((time.perf_counter() - begin) / len(wanted))
    return min(rounds)


def find_figures(table: SegmentTable) -> dict[str, float]:
    """Return the microseconds of one lookup of each kind."""
    values = random.Random(7)
    rows = [values.randrange(len(table)) for _ in range(_LOOKUPS)]
    bases, times = table.column("base_offset"), table.column("max_timestamp_ms")
    offsets = [bases[row] + values.randrange(_RECORDS) for row in rows]
    for row, offset in zip(rows[:100], offsets[:100], strict=True):
        assert table.covering(offset) == table[row], "the wrong segment was found"
    wanted = [times[row] for row in rows]
    listed = list(times)
    for time_ms in wanted[:20]:
        expected = next(row for row, one in enumerate(listed) if one >= time_ms)
        assert next(table.rows_reaching(time_ms)) == expected, "the wrong time was found"
    return {
        "offset_us": 1e6 * seconds_each(table.covering, offsets),
        "time_us": 1e6 * seconds_each(lambda time_ms: next(table.rows_reaching(time_ms)), wanted),
    }


class CountingStore(MemoryStore):
    """A store in memory that counts what is stored."""

    stored_bytes = 0

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object."""
        assert isinstance(body, bytes), "manifests are bytes"
        self.stored_bytes += len(body)
        return await super().put(key, body, crc32c=crc32c, condition=condition)


class Archive:
    """One partition's manifest, committed and spilled as the archiver does."""

    def __init__(self, target_bytes: int) -> None:
        self.store = CountingStore()
        self._target_bytes = target_bytes
        self._manifests = ManifestStore(self.store, writer_id=_WRITERS[0], now_ms=lambda: _TIME_MS)
        self._stored = StoredManifest(None, None)
        self._manifest = PartitionManifest.begin(_PARTITION, start_offset=0)

    @property
    def segment_count(self) -> int:
        """Return how many segments there are."""
        return self._manifest.segment_count

    async def append(self, count: int) -> tuple[int, float]:
        """Append segments with one commit, and spill if it is time; return its bytes and its seconds."""
        added = segments(SHAPES["busy"], count, first=self.segment_count)
        begin, before = time.perf_counter(), self.store.stored_bytes
        await self._commit(self._manifest.appended(added))
        plan = plan_spillover(
            self._manifest,
            size_bytes=self._stored.size_bytes,
            target_bytes=self._target_bytes,
            local_offset=max(0, self._manifest.next_offset - _LOCAL * _RECORDS),
        )
        appended_bytes, largest = self.store.stored_bytes - before, 0
        if plan:
            before = self.store.stored_bytes
            manifest = self._manifest
            for rows in plan:
                part = part_to_spill(manifest, rows)
                manifest = spilled(manifest, part, await self._manifests.spillovers.put(part))
            await self._commit(manifest)
            largest = self.store.stored_bytes - before
        return max(appended_bytes, largest), time.perf_counter() - begin

    async def _commit(self, manifest: PartitionManifest) -> None:
        self._stored = await self._manifests.commit(self._stored, manifest, leader_epoch=1)
        self._manifest = self._stored.existing


async def commit_figures(lengths: tuple[int, int], *, target_bytes: int) -> dict[str, float]:
    """Return what commits cost around two lengths of history, and the largest of all."""
    archive, largest = Archive(target_bytes), 0
    medians: list[tuple[float, float]] = []
    for length in lengths:
        while archive.segment_count < length:
            size_bytes, _ = await archive.append(min(_BATCH, length - archive.segment_count))
            largest = max(largest, size_bytes)
        samples = [await archive.append(1) for _ in range(_COMMITS if length < MILLION else 8 * _COMMITS)]
        largest = max(largest, *(size_bytes for size_bytes, _ in samples))
        medians.append((median(one for one, _ in samples), median(one for _, one in samples)))
    (short_bytes, short_seconds), (long_bytes, long_seconds) = medians
    return {
        "commit_bytes_largest": largest,
        "commit_bytes_vs_target": largest / target_bytes,
        "commit_bytes_at_first": short_bytes,
        "commit_bytes_at_last": long_bytes,
        "commit_growth": long_bytes / short_bytes,
        "commit_seconds_growth": long_seconds / short_seconds,
        "commit_ms_at_last": 1e3 * long_seconds,
    }


def main() -> None:
    """Measure, print and perhaps write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fifty thousand segments instead of a million")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    count = QUICK if arguments.quick else MILLION
    figures: dict[str, float] = {}
    for name, shape in SHAPES.items():
        table, bytes_per_segment = table_of(shape, count)
        found = find_figures(table) | {"bytes_per_segment": bytes_per_segment}
        print(f"{name:>5}: " + ", ".join(f"{what} {value:.1f}" for what, value in found.items()))
        figures["bytes_per_segment"] = max(figures.get("bytes_per_segment", 0), bytes_per_segment)
        figures["find_us"] = max(figures.get("find_us", 0), found["offset_us"], found["time_us"])
    small = asyncio.run(commit_figures((1000, QUICK), target_bytes=SMALL_TARGET_BYTES))
    figures |= asyncio.run(commit_figures((1000, count), target_bytes=TARGET_BYTES))
    for name in ("commit_growth", "commit_seconds_growth"):
        figures[f"{name}_past_target"] = small[name]
    figures["commit_bytes_vs_target"] = max(
        figures["commit_bytes_vs_target"], small["commit_bytes_vs_target"]
    )
    print(f"\n{count:,} segments")
    for name, value in figures.items():
        print(f"{name:>32} {value:12.3f}")
    if arguments.json:
        where = machine().rstrip(", ")
        write_json(arguments.json, name="manifest", machine=where, figures=figures, ratios={})


if __name__ == "__main__":
    main()
