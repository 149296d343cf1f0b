"""
What do the Spark source and jobs cost where there are ten thousand partitions, or a million segments?

Rows in which Spark has no part are measured without it. Where a store's own speed does not matter the archive
is a directory, or in memory; the plan is made from SeaweedFS, over S3, in a process of its own. Manifests are
stored as archivers store them, but data objects only where a row reads them.

`--quick` has a tenth of the partitions and segments or fewer, and multiplies the seconds. Figures that do not
grow with the number of partitions are as in the whole run.

    python -m benchmarks.spark_scale [--quick] [--only ROW...] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import tempfile
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from crc32c import crc32c
from pyspark.sql import functions as sql
from pyspark.worker_util import pickleSer

from benchmarks.harness import machine, write_json
from tests.builders import DEFAULT_TIME_MS
from tests.fakes.file_archive import FileArchive
from tests.fakes.memory_store import MemoryStore
from tests.support.seaweedfs import running_seaweedfs
from tests.support.spark_session import running_spark
from tieringd.archive.catalog import Catalog
from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.segment_swap import Successor
from tieringd.formats.manifest_codec import encode_manifest
from tieringd.formats.object_keys import TopicKey, data_key, index_key, manifest_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition, TopicPartition
from tieringd.model.segment import REWRITER_PREFIX, RemoteSegment, Rewriting, RewritingKind, SegmentIdentity
from tieringd.model.segment_table import SegmentTable
from tieringd.policies.valid_rewritings import Candidate, RecordedRewriting, valid_rewritings
from tieringd.spark.bucket import Bucket
from tieringd.spark.jobs.chosen import chosen_partitions, shares
from tieringd.spark.jobs.compact import bitmaps_of_runs
from tieringd.spark.jobs.compaction_tasks import BITMAP_OFFSETS, offsets_in
from tieringd.spark.jobs.export.round_planning import next_round
from tieringd.spark.jobs.export.state import ExportRules
from tieringd.spark.jobs.swapping import PartitionSwap, SwapKind, SwapOutcome, delete_replaced, swap_all
from tieringd.spark.source.data_source import TieringdDataSource
from tieringd.spark.source.offset_finder import OffsetFinder
from tieringd.spark.source.options import Subscription
from tieringd.spark.source.positions import AtTime
from tieringd.spark.source.reader_settings import read_settings
from tieringd.spark.source.schema import schema_of
from tieringd.spark.source.subscribed_topics import SubscriptionTopics
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.at_once import at_once
from tieringd.storage.file import FileStore
from tieringd.storage.resilient import ResilientStore, StoreLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tieringd.storage.base import ObjectStore

_TOPIC = TopicKey("bench", "orders", "W1xNUlUlTfigw_K-dvdxsA")
_SEGMENT_OFFSETS = 1000
_SEGMENT_BYTES = 64 << 20
_MIB = 1 << 20
_ANSWER_SECONDS = 0.03
_CONNECTIONS = 40
"""Of a process on two cores, by default."""


def segment(number: int, *, writer_id: str = "0a" * 16, size_bytes: int = _SEGMENT_BYTES) -> RemoteSegment:
    """Return a segment as a manifest describes it."""
    base_offset = number * _SEGMENT_OFFSETS
    time_ms = DEFAULT_TIME_MS + number * 60_000
    return RemoteSegment(
        base_offset,
        base_offset + _SEGMENT_OFFSETS - 1,
        size_bytes - number * 4099 % 1_000_000,
        number * 2_654_435_761 % 2**32,
        time_ms,
        time_ms + 59_000,
        leader_epoch=0,
        writer_id=writer_id,
        uploaded_at_ms=time_ms + 61_000,
        index_size_bytes=30_000 + number % 999,
        index_crc32c=number * 40_503 % 2**32,
    )


def partition(number: int) -> TopicIdPartition:
    """Return one of the topic's partitions."""
    return TopicIdPartition(_TOPIC.cluster, _TOPIC.topic, _TOPIC.topic_id, number)


async def fill(store: ObjectStore, partitions: int, segments: int, **options: Any) -> None:
    """Store the manifests of a topic."""
    manifests = ManifestStore(store, writer_id="0a" * 16, now_ms=lambda: DEFAULT_TIME_MS)
    await manifests.ensure_topic(_TOPIC, partition_count=partitions)
    table = SegmentTable.of(segment(number, **options) for number in range(segments))
    begun = replace(
        PartitionManifest.begin(partition(0), start_offset=0),
        segments=table,
        next_offset=segments * _SEGMENT_OFFSETS,
        writer_id="0a" * 16,
    )

    async def put(number: int) -> None:
        data = encode_manifest(replace(begun, partition=partition(number)))
        await store.put(manifest_key(partition(number)), data, crc32c=crc32c(data))

    await at_once(range(partitions), put, count=16)


@contextmanager
def directory_archive(partitions: int, segments: int) -> Iterator[str]:
    """Yield the URL of an archive in a directory."""
    with tempfile.TemporaryDirectory() as directory:
        archive = FileArchive(Path(directory))
        asyncio.run(fill(FileStore(archive.root), partitions, segments))
        yield archive.url


def idle_stream(*, is_quick: bool) -> dict[str, float]:
    """Measure a trigger that finds nothing new: within `refreshInterval`, and one that asks the bucket."""
    count = 2_000 if is_quick else 8_000
    with directory_archive(count, 1) as url:
        idle_seconds = _trigger_seconds(url, triggers=20)
        refresh_seconds = _trigger_seconds(url, triggers=3, refreshInterval="1ms")
    scale = 8_000 / count
    return {
        "idle_trigger_cpu_seconds": idle_seconds * scale,
        "idle_refresh_cpu_seconds": refresh_seconds * scale,
    }


def _trigger_seconds(url: str, *, triggers: int, **options: str) -> float:
    given = {"path": url, "subscribe": "orders", "startingOffsets": "earliest", **options}
    reader = TieringdDataSource(given).streamReader(schema_of(("offset",)))
    limit = reader.getDefaultReadLimit()
    end = reader.latestOffset(reader.initialOffset(), limit)
    reader.latestOffset(end, limit)
    before = time.process_time()
    for _ in range(triggers):
        # Spark sends and takes JSON each time.
        start = json.loads(json.dumps(end))
        assert reader.latestOffset(start, limit) is start
        json.dumps(reader.reportLatestOffset())
    return (time.process_time() - before) / triggers


def plan(*, is_quick: bool) -> dict[str, float]:
    """Measure the plan of a batch over everything, from S3, as Spark's planning process makes it."""
    count = 1_000 if is_quick else 10_000
    with tempfile.TemporaryDirectory() as directory, running_seaweedfs(Path(directory)) as weed:
        weed.create_bucket("bench")
        options = {
            "path": "s3://bench",
            "endpoint": weed.endpoint_url,
            "region": weed.region,
            "accessKey": weed.access_key,
            "secretKey": weed.secret_key,
        }
        bucket = Bucket(read_settings(options).config())
        bucket.run(fill(bucket.store, count, 100))
        bucket.close()
        found = _in_a_process(_planned, options | {"subscribe": "orders"})
    assert found["tasks"] > 0
    scale = 10_000 / count
    return {
        "plan_seconds": found["seconds"] * scale,
        "plan_cpu_seconds": found["cpu_seconds"] * scale,
        "plan_mib": found["mib"],
        "plan_pickled_mib": found["pickled_mib"] * scale,
    }


def _planned(options: Mapping[str, str]) -> dict[str, float]:
    reader = TieringdDataSource(dict(options)).reader(schema_of(("offset", "value")))
    idle_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before, cpu_before = time.perf_counter(), time.process_time()
    tasks = reader.partitions()
    # Spark's planning process does the same next, to send the tasks to the driver.
    pickled_bytes = sum(len(pickleSer.dumps(task)) for task in tasks)
    seconds, cpu_seconds = time.perf_counter() - before, time.process_time() - cpu_before
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tasks": len(tasks),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "mib": (peak_kib - idle_kib) / 1024,
        "pickled_mib": pickled_bytes / _MIB,
    }


class _SlowStore(MemoryStore):
    """Answers each request after 30 ms."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in {"get", "put", "head", "delete_many", "list_page"}:
            return found

        async def answered(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(_ANSWER_SECONDS)
            return await found(*arguments, **options)

        return answered


def job_requests(*, is_quick: bool) -> dict[str, float]:
    """Measure a job's requests for each partition: choose it, swap in a segment, delete the old one."""
    count = 500 if is_quick else 10_000
    return {"job_requests_seconds": asyncio.run(_job_requests(count)) * 10_000 / count}


async def _job_requests(count: int) -> float:
    backend = MemoryStore()
    await fill(backend, count, 2)
    new = segment(0, writer_id=f"{REWRITER_PREFIX}0b", size_bytes=_SEGMENT_BYTES // 2)
    old = segment(0)
    for number in range(count):
        for name in (data_key, index_key):
            for one in (old, new):
                await backend.put(name(partition(number), one), b"", crc32c=0)
    slow = _SlowStore()
    slow.__dict__.update(backend.__dict__)
    store = ResilientStore(slow, StoreLimits(max_concurrent_requests=_CONNECTIONS))
    manifests = ManifestStore(store, writer_id="0b" * 16, now_ms=lambda: DEFAULT_TIME_MS)
    bucket: Any = SimpleNamespace(
        store=store,
        manifests=manifests,
        spillovers=manifests.spillovers,
        catalog=Catalog(store, manifests),
        clock=ArchiveClock(),
        config=SimpleNamespace(cloud_storage_target_manifest_size_bytes=1 << 20),
    )
    outcome = SwapOutcome()
    before = time.perf_counter()
    chosen = await chosen_partitions(bucket, ["orders"])
    swaps = [PartitionSwap(one.partition, [Successor((old,), new)]) for one in chosen.partitions]
    await swap_all(bucket, swaps, outcome, kind=SwapKind.REWRITTEN)
    await delete_replaced(bucket, [one.partition for one in chosen.partitions], outcome, after_ms=0)
    seconds = time.perf_counter() - before
    assert (len(outcome.swapped), outcome.deleted_segments, outcome.faults) == (count, count, [])
    return seconds


def time_lookup(*, is_quick: bool) -> dict[str, float]:
    """Count the bytes that finding a time costs, of segments with large and with small batches."""
    del is_quick
    return {"time_lookup_mib": max(_lookup_bytes(size) for size in (900_000, 16_000)) * 1_000 / _MIB}


def _lookup_bytes(batch_bytes: int) -> int:
    read_bytes = 0

    def counted(_operation: str, _outcome: str, _seconds: float, size_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes += size_bytes

    with tempfile.TemporaryDirectory() as directory:
        archive = FileArchive(Path(directory))
        writer = archive.writer()
        body = os.urandom(batch_bytes)
        for number in range(54_000_000 // batch_bytes):
            writer.append(body, timestamp_ms=DEFAULT_TIME_MS + number * 1_000)
        writer.roll()
        archive.add(writer)
        bucket = Bucket(read_settings({"path": archive.url}).config())
        found = SubscriptionTopics(bucket, Subscription(topics=("orders",))).existing()
        bucket.store._on_request = counted  # noqa: SLF001 - every byte, of indexes too
        starts = OffsetFinder(bucket, found).starts(
            AtTime(DEFAULT_TIME_MS + 20_500, "startingTimestamp"), on_no_match="error"
        )
        bucket.close()
    assert starts == {TopicPartition("orders", 0): 21}
    return read_bytes


def job_shares(*, is_quick: bool) -> dict[str, float]:
    """Measure how long it takes to divide a million segments into tasks."""
    count = 100_000 if is_quick else 1_000_000
    table = SegmentTable.of(segment(number, size_bytes=66_000_000) for number in range(count))
    before = time.process_time()
    assert sum(len(share.segments) for share in shares(partition(0), table)) == count
    return {"shares_cpu_seconds": (time.process_time() - before) * 1_000_000 / count}


def standing(*, is_quick: bool) -> dict[str, float]:
    """Measure how a rebuild judges the records of a year of daily jobs over 1,000 segments."""
    days, count = (60 if is_quick else 365), 1_000

    def identity(row: int, day: int) -> SegmentIdentity:
        writer = f"{REWRITER_PREFIX}{day:02x}" if day else "0a"
        base_offset = row * _SEGMENT_OFFSETS
        return SegmentIdentity(base_offset, base_offset + _SEGMENT_OFFSETS - 1, 1000 - day, 0, writer)

    recorded = []
    for day in range(1, days + 1):
        replaced = tuple(identity(row, day - 1) for row in range(count)) if day > 1 else ()
        stored_now = tuple(identity(row, day) for row in range(count))
        recorded.append(
            RecordedRewriting(Rewriting(RewritingKind.COMPACTED, replaced, stored_now), day * 86_400_000)
        )
    stored = {identity(row, days): 0 for row in range(count)}
    candidates = [Candidate(one, days * 86_400_000) for one in stored]
    before = time.process_time()
    found = valid_rewritings(recorded, stored, candidates, {0: 0})
    seconds = time.process_time() - before
    assert len(found.named) >= count
    # A second run, because the tracing of memory takes time.
    tracemalloc.start()
    valid_rewritings(recorded, stored, candidates, {0: 0})
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"standing_rewritings_seconds": seconds, "standing_rewritings_mib": peak_bytes / _MIB}


def sparse_survivors(*, is_quick: bool) -> dict[str, float]:
    """Run what compact does with the survivors of runs of 2^31 offsets, on a driver of 1 GiB."""
    buckets, runs = (1 << 31) // BITMAP_OFFSETS, (1 if is_quick else 2)

    def found(rows: Iterable[Any]) -> Iterator[int]:
        # Several runs may be in one Spark partition.
        for _, some in groupby(rows, key=attrgetter("run")):
            yield len(offsets_in((row.bucket, row.bits) for row in some if row.bits is not None))

    with tempfile.TemporaryDirectory() as directory, running_spark(Path(directory), memory="1g") as spark:
        before = time.perf_counter()
        winners = spark.range(buckets * runs).select(
            (sql.col("id") % runs).cast("int").alias("run"),
            (sql.floor(sql.col("id") / runs) * BITMAP_OFFSETS).cast("bigint").alias("offset"),
        )
        counts = bitmaps_of_runs(winners, runs=runs).rdd.mapPartitions(found).collect()
        seconds = time.perf_counter() - before
    assert sum(counts) == buckets * runs
    return {"sparse_survivors_seconds": seconds}


def export_round(*, is_quick: bool) -> dict[str, float]:
    """Measure the first round of an export over ten thousand partitions, against its size."""
    count = 1_000 if is_quick else 10_000
    with directory_archive(count, 40) as url:
        bucket = Bucket(read_settings({"path": url}).config())
        rules = ExportRules(round_bytes=ExportRules().round_bytes * count // 10_000)
        state: Any = SimpleNamespace(offsets=dict.fromkeys(range(count), 0))
        ends = {partition(number): 40 * _SEGMENT_OFFSETS for number in range(count)}
        found = next_round(bucket, state, ends, rules)
        bucket.close()
    return {"export_round_share": sum(one.size_bytes for one in found.portions) / rules.round_bytes}


ROWS: dict[str, Callable[..., dict[str, float]]] = {
    "stream": idle_stream,
    "plan": plan,
    "jobs": job_requests,
    "times": time_lookup,
    "standing": standing,
    "shares": job_shares,
    "sparse": sparse_survivors,
    "export": export_round,
}
_NAMES = {
    "idle_trigger_cpu_seconds": ("idle trigger of a stream over 8,000 partitions, CPU seconds", "24", 0.2),
    "idle_refresh_cpu_seconds": (
        "the same with a request for each partition (every refreshInterval)",
        "-",
        None,
    ),
    "plan_seconds": ("plan of 10,000 partitions and 1,000,000 segments from SeaweedFS, seconds", "-", 30),
    "plan_cpu_seconds": ("the same, CPU seconds of the driver", "-", None),
    "plan_mib": ("the same, memory above idle, MiB", "-", 512),
    "plan_pickled_mib": ("the same, MiB of the pickled tasks", "-", None),
    "job_requests_seconds": ("choose, swap, delete 10,000 partitions, 30 ms a request, seconds", "2220", 120),
    "time_lookup_mib": ("startingTimestamp for 1,000 partitions, MiB through the driver", "16384", 100),
    "standing_rewritings_seconds": ("1,000 segments after 365 daily jobs, seconds", "960", 5),
    "standing_rewritings_mib": ("the same, MiB", "4096", 200),
    "shares_cpu_seconds": ("shares of 1,000,000 segments of 64 MiB, CPU seconds", "600", 10),
    "sparse_survivors_seconds": (
        "survivors sparse over 2^31 offsets, driver of 1 GiB, seconds",
        "dies",
        None,
    ),
    "export_round_share": ("a round of an export over 10,000 partitions, of its size", "80", 1.1),
}
"""What each figure is, what it was before, and what it must reach."""


def _in_a_process(work: Callable[..., dict[str, float]], *arguments: Any, **options: Any) -> dict[str, float]:
    """Return what *work* returns in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments, options)


def main() -> None:
    """Measure, print the table, and write the JSON file if one is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer partitions and segments")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="some rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'':74} {'before':>8} {'now':>8} {'asked':>8}")
    for name in options.only:
        found = ROWS[name](is_quick=options.quick)
        for key, value in found.items():
            title, before, asked = _NAMES[key]
            limit = "" if asked is None else f"{asked:g}"
            print(f"{title:74} {before:>8} {value:8.4g} {limit:>8}", flush=True)
        figures |= found
    print()
    for key, value in figures.items():
        print(f"{key} {value:.4g}")
    if options.json:
        versions = machine("pyspark")
        write_json(options.json, name="spark_scale", machine=versions, figures=figures, ratios={})


if __name__ == "__main__":
    main()
