"""
Compact archived topics: keep the latest record of each key, and tombstones for a time.

Keys are compared as bytes and not by a hash, because a collision would lose a record. Keys go through one
shuffle, and values through none. The task that rewrites a segment gets the offsets of the records that stay.
When all new segments of a partition are stored, one commit swaps them in. So a job that dies leaves each
partition either unchanged or compacted. Another run does the rest, and writes nothing for a partition that
would lose no records.

Records are removed only as `policies.record_removal` allows. If a broker may still have the log, the
replaced segments are held until the log's start has passed all that the job read. The partition's daemon
releases them.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from tieringd.archive.segment_swap import Successor
from tieringd.config import Config
from tieringd.config.topic import DEFAULT_SEGMENT_BYTES
from tieringd.errors import ConfigError
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import REWRITER_PREFIX
from tieringd.policies.rewriting import Remainder, plan_rewrites
from tieringd.policies.segment_merge import job_limit_offset
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.jobs.chosen import chosen_partitions, rounds, shares
from tieringd.spark.jobs.compaction_range import CompactionRange, CompactOptions, compaction_ranges
from tieringd.spark.jobs.compaction_tasks import KEY_SCHEMA, KeyReader, RunRewriter
from tieringd.spark.jobs.job_progress import Progress, silent, spark_may_be_gone, watched
from tieringd.spark.jobs.report import Report, Table, Value
from tieringd.spark.jobs.swapping import (
    PartitionSwap,
    SwapKind,
    SwapOutcome,
    delete_replaced,
    expired_parts,
    outcome_reported,
    swap_all,
)
from tieringd.spark.jobs.tasks import failures_in_words

EXPECTED_COLUMNS: Final = (
    "topic",
    "partition",
    "topic_id",
    "segments_before",
    "segments_after",
    "size_bytes_before",
    "expected_size_bytes",
    "records_removed",
)
"""The columns of a dry run's table."""
_IS_KEY: Final = "summary_of < 0"
_IS_KEPT: Final = "summary_of < 0 and not is_due"


@dataclass(slots=True)
class _Counts:
    segments: int = 0
    records: int = 0
    keys: int = 0
    tombstones_removed: int = 0


@dataclass(frozen=True, slots=True)
class _PlannedRun:
    """Segments that become one segment."""

    number: int
    """The partition's place in the job's list of ranges."""
    rows: range
    """The segments' rows in the partition's range."""
    removed_of_rows: tuple[int, ...]
    """The number of records to remove from each of the segments."""
    expected_bytes: int
    """The estimated bytes that are left, if all records of a segment have the same size."""

    @property
    def removed_records(self) -> int:
        """Return how many records are removed."""
        return sum(self.removed_of_rows)

    def without_head(self, rows: int) -> _PlannedRun | None:
        """Return the run without its first *rows* segments; None if nothing is left to do."""
        left = replace(self, rows=self.rows[rows:], removed_of_rows=self.removed_of_rows[rows:])
        return left if len(left.rows) > 1 or left.removed_records else None


@dataclass(frozen=True, slots=True)
class _StoredRun:
    """A run, and its stored segment or the reason why it has none."""

    run: _PlannedRun
    done: Successor | str


def compact(
    spark: SparkSession,
    config: Config,
    *,
    topics: Sequence[str],
    options: CompactOptions | None = None,
    has_broker: bool = True,
    delete_after_ms: int | None = None,
    is_dry_run: bool = False,
    progress: Progress = silent,
) -> Report:
    """
    Keep only the latest record of each key in the archives of *topics*.

    Segments with offsets that a broker's log may still have are not joined with others. They are joined if
    the topic is deleted in its cluster, or if *has_broker* is false.

    Args:
        spark: The session that runs the tasks.
        config: The archive's configuration.
        topics: Names or patterns.
        options: What to keep; None is the default of each option.
        has_broker: Whether a broker may still have the topics' logs.
        delete_after_ms: Delete objects that this or another run replaced at least this many ms ago. Held
            objects stay if a broker may have the log. None leaves the deletion to the daemon that archives
            the topic.
        is_dry_run: Read everything, change nothing, and report what would be removed.
        progress: Called with the progress of each step.

    Raises:
        ConfigError: This host's clock is wrong, so that the ages of records are not certain.
        ObjectNotFound: The bucket holds no such topic.
        StorageError: An operator must act, and nothing was changed. After a change the error is a fault of
            the report instead.
        StorageUnavailable: The store does not answer, and nothing was changed; else a fault as well.
        TaskFailed: An executor failed, and nothing was changed; else a fault as well.
    """
    bucket, outcome = bucket_of(config), SwapOutcome()
    chosen = bucket.run(chosen_partitions(bucket, topics))
    clock_status = bucket.clock.status()
    if clock_status.doubt:
        raise ConfigError(
            f"nothing is compacted: {clock_status.doubt}",
            hint="Set this host's clock: the job removes records and tombstones by their age",
        )
    outcome.faults += chosen.faults
    options = options or CompactOptions()
    with_log = chosen.with_log(has_broker=has_broker)
    job = _Compaction(spark, bucket, outcome, with_log=with_log, progress=progress)
    expected: list[tuple[Value, ...]] = []
    with outcome_reported(outcome):
        for some in rounds(bucket, chosen.partitions, outcome.faults):
            ranges = bucket.run(compaction_ranges(bucket, some, options, now_ms=clock_status.now_ms))
            with_any = [one for one in ranges if one.segments]
            if is_dry_run:
                expected += job.expected(with_any)
            else:
                job.compact(with_any)
    if delete_after_ms is not None and not is_dry_run:
        named = [one.partition for one in chosen.partitions]
        without_log = frozenset(named) - with_log
        bucket.run(
            delete_replaced(
                bucket,
                named,
                outcome,
                after_ms=delete_after_ms,
                gone_since=chosen.gone_since,
                without_log=without_log,
            )
        )
    figures: dict[str, Value] = {
        "topics": len(chosen.topics),
        "partitions": len(chosen.partitions),
        "segments_read": job.counts.segments,
        "records_read": job.counts.records,
        "keys": job.counts.keys,
        "tombstones_removed": job.counts.tombstones_removed,
    }
    if is_dry_run:
        table = Table("partitions", EXPECTED_COLUMNS, tuple(expected))
        mode: dict[str, Value] = {"mode": "dry run: nothing is changed"}
        return Report("compact", mode | figures, (table, *chosen.tables()), tuple(outcome.faults))
    tables = (outcome.table(), *chosen.tables())
    return Report("compact", figures | outcome.figures(), tables, tuple(outcome.faults))


def latest_rows(read: DataFrame) -> DataFrame:
    """
    Return the latest row of each key, and all summaries, of rows of `KEY_SCHEMA`.

    Spark aggregates by hash only if the values have a fixed size. So there is no maximum over a struct, and
    the fault of a summary is a column to group by. A later record of a partition has a later row as well.
    """
    return (
        read.groupBy("partition", "summary_of", "key", "fault")
        .agg(
            sql.max("offset").alias("offset"),
            sql.max("row").alias("row"),
            sql.max(sql.expr("offset * 2 + cast(is_due as bigint)")).alias("marked"),
            sql.max("records").alias("records"),
            sql.max("keyless").alias("keyless"),
        )
        .selectExpr(
            "partition",
            "summary_of",
            "offset",
            "row",
            "marked & 1 = 1 as is_due",
            "records",
            "keyless",
            "fault",
        )
    )


def bitmaps_of_runs(winners: DataFrame, *, runs: int) -> DataFrame:
    """
    Return bitmaps of the winners' offsets, with one bit for each offset, as input of `RunRewriter`.

    *winners* has columns `run`, from 0 to before *runs*, and `offset`. All rows of a run are in one Spark
    partition, in the order of runs and buckets, and each run has one row more without a bitmap. The bitmaps
    of a run are not collected into one row: winners that are far apart have hundreds of MiB of them.
    """
    # Spark counts buckets from 1 only for positive numbers.
    positive = sql.col("offset") + 1
    bitmaps = winners.groupBy("run", sql.bitmap_bucket_number(positive).alias("bucket")).agg(
        sql.bitmap_construct_agg(sql.bitmap_bit_position(positive)).alias("bits")
    )
    all_runs = winners.sparkSession.range(runs).selectExpr(
        "cast(id as int) as run", "cast(null as bigint) as bucket", "cast(null as binary) as bits"
    )
    # There are as many tasks as runs: bitmaps are small, and Spark would put all of them into one task.
    return bitmaps.unionByName(all_runs).repartition(runs, "run").sortWithinPartitions("run", "bucket")


class _Compaction:
    """One run of the job. Owned by the driver."""

    def __init__(
        self,
        spark: SparkSession,
        bucket: Bucket,
        outcome: SwapOutcome,
        *,
        with_log: frozenset[TopicIdPartition],
        progress: Progress,
    ) -> None:
        self._spark = spark
        self._bucket = bucket
        self._outcome = outcome
        self._with_log = with_log
        self._progress = progress
        self._writer_id = f"{REWRITER_PREFIX}{secrets.token_hex(8)}"
        self.counts = _Counts()

    def expected(self, ranges: Sequence[CompactionRange]) -> list[tuple[Value, ...]]:
        """Return rows of `EXPECTED_COLUMNS` for the partitions that a compaction would change."""
        if not ranges:
            return []
        with self._latest_records(ranges) as found:
            runs = self._planned(ranges, found)
        rows: list[tuple[Value, ...]] = []
        for number, some in groupby(runs, key=attrgetter("number")):
            of_partition, segments = list(some), ranges[number].segments
            name = ranges[number].manifest.partition
            parts = [segments[row] for run in of_partition for row in run.rows]
            rows.append(
                (
                    name.topic,
                    name.partition,
                    name.topic_id,
                    len(parts),
                    len(of_partition),
                    sum(part.size_bytes for part in parts),
                    sum(run.expected_bytes for run in of_partition),
                    sum(run.removed_records for run in of_partition),
                )
            )
        return rows

    def compact(self, ranges: Sequence[CompactionRange]) -> None:
        """Compact some partitions. Partitions that would lose no records are not changed."""
        if not ranges:
            return
        with self._latest_records(ranges) as found:
            runs = self._planned(ranges, found)
            stored: defaultdict[int, list[_StoredRun]] = defaultdict(list)
            while runs or stored:
                rewritten = self._rewritten(ranges, runs, found) if runs else []
                for run, done in zip(runs, rewritten, strict=True):
                    stored[run.number].append(_StoredRun(run, done))
                stored, runs = self._swapped(ranges, stored)

    def _swapped(
        self, ranges: Sequence[CompactionRange], stored: Mapping[int, Sequence[_StoredRun]]
    ) -> tuple[defaultdict[int, list[_StoredRun]], list[_PlannedRun]]:
        """
        Swap in the new segments, by partition. Return what retention has overtaken, and what to rewrite.

        If retention took the first segments of a run, the run is rewritten without them. That takes seconds,
        and each time there are fewer segments. So the job ends even if retention takes a segment each time.
        """
        swaps = {
            number: one
            for number, some in stored.items()
            if (one := self._swap_of(ranges[number], some)) is not None
        }
        overtaken = self._bucket.run(
            swap_all(self._bucket, list(swaps.values()), self._outcome, kind=SwapKind.COMPACTED)
        ).overtaken
        left: defaultdict[int, list[_StoredRun]] = defaultdict(list)
        runs: list[_PlannedRun] = []
        for number, one in swaps.items():
            manifest = overtaken.get(one.partition)
            if manifest is None:
                continue
            for each in stored[number]:
                assert not isinstance(each.done, str), "its partition was not swapped"
                expired = expired_parts(each.done, manifest)
                if expired == 0:
                    left[number].append(each)
                elif shorter := each.run.without_head(expired):
                    runs.append(shorter)
        return left, runs

    @contextmanager
    def _latest_records(self, ranges: Sequence[CompactionRange]) -> Iterator[DataFrame]:
        """
        Yield a computed frame with the latest record of each key in each partition, and segment summaries.

        Raises:
            TaskFailed: Spark gave up, in the computation or in the work of the context.
        """
        with failures_in_words():
            found = self._keys_read(ranges)
            try:
                with watched(self._spark, "reading keys", self._progress):
                    found.count()
                yield found
            finally:
                with spark_may_be_gone():
                    found.unpersist()

    def _keys_read(self, ranges: Sequence[CompactionRange]) -> DataFrame:
        some = [
            (number, share)
            for number, one in enumerate(ranges)
            for share in shares(one.manifest.partition, one.segments)
        ]
        rules = {number: one.rules for number, one in enumerate(ranges)}
        rows = self._spark.sparkContext.parallelize(some, len(some)).flatMap(
            KeyReader(self._bucket.config, rules)
        )
        read = self._spark.createDataFrame(rows, KEY_SCHEMA, verifySchema=False)
        return latest_rows(read).persist(StorageLevel.MEMORY_AND_DISK)

    def _planned(self, ranges: Sequence[CompactionRange], found: DataFrame) -> list[_PlannedRun]:
        """Return the runs to rewrite. Partitions with an unreadable segment are left out, with a fault."""
        counted = found.groupBy("partition", "row").agg(
            sql.count_if(sql.expr(_IS_KEY)).alias("key_count"),
            sql.count_if(sql.expr(_IS_KEPT)).alias("kept"),
            sql.sum("records").alias("records"),
            sql.sum("keyless").alias("keyless"),
            sql.max("fault").alias("fault"),
        )
        remainders: dict[int, dict[int, Remainder]] = defaultdict(dict)
        faulty: set[int] = set()
        counts = self.counts
        for row in counted.collect():
            one = ranges[row.partition]
            counts.segments += 1
            counts.records += row.records
            counts.keys += row.key_count
            counts.tombstones_removed += row.key_count - row.kept
            if row.fault is not None:
                faulty.add(row.partition)
                self._outcome.faults.append(f"{one.manifest.partition}: not compacted: {row.fault}")
            remainders[row.partition][row.row] = Remainder(
                one.segments[row.row], row.records, row.kept + row.keyless
            )
        planned: list[_PlannedRun] = []
        limits = self._bucket.config.merge_settings.limits(segment_bytes=DEFAULT_SEGMENT_BYTES)
        for number in sorted(remainders.keys() - faulty):
            manifest, table = ranges[number].manifest, ranges[number].segments
            of_partition = [remainder for _, remainder in sorted(remainders[number].items())]
            up_to = job_limit_offset(manifest, has_log=manifest.partition in self._with_log)
            for run in plan_rewrites(
                manifest, of_partition, target_bytes=limits.target_bytes, joined_up_to=up_to
            ):
                first = table.row_at_or_after(run[0].segment.base_offset)
                planned.append(
                    _PlannedRun(
                        number,
                        range(first, first + len(run)),
                        tuple(each.records - each.kept for each in run),
                        sum(each.expected_bytes for each in run),
                    )
                )
        return planned

    def _rewritten(
        self, ranges: Sequence[CompactionRange], runs: Sequence[_PlannedRun], found: DataFrame
    ) -> list[Successor | str]:
        """Rewrite *runs* on executors; return each run's stored segment, or why it has none."""
        spark = self._spark
        tasks = [ranges[one.number].run_of(one.rows, removed_records=one.removed_records) for one in runs]
        rewriter = RunRewriter(self._bucket.config, spark.sparkContext.broadcast(tasks), self._writer_id)
        places = [(one.number, row, run) for run, one in enumerate(runs) for row in one.rows]
        runs_of = spark.createDataFrame(places, "partition int, row int, run int")
        winners = found.where(_IS_KEPT).join(sql.broadcast(runs_of), ["partition", "row"])
        todo = bitmaps_of_runs(winners, runs=len(runs))
        with watched(spark, "rewriting segments", self._progress):
            done = todo.rdd.mapPartitions(rewriter).collect()
        return [outcome for _, outcome in sorted(done, key=itemgetter(0))]

    def _swap_of(self, one: CompactionRange, stored: Sequence[_StoredRun]) -> PartitionSwap | None:
        """Return the swap of a partition's new segments; None with a fault if one of them is missing."""
        partition = one.manifest.partition
        faults = [each.done for each in stored if isinstance(each.done, str)]
        if faults:
            # The new segments belong together: one may lack tombstones that hide records of another.
            self._outcome.faults += [f"{partition}: not compacted: {fault}" for fault in faults]
            return None
        in_order = sorted(stored, key=lambda each: each.run.rows.start)
        successors = [each.done for each in in_order if not isinstance(each.done, str)]
        return PartitionSwap(partition, successors, one.basis(has_log=partition in self._with_log))
