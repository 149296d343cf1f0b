"""
Merging the small segments of whole archives, spilled history included.

What becomes one is decided as a daemon decides it (`policies.segment_merge`). Where the store can join
objects itself, executors only ask it to; else the bytes go through them. Runs are swapped some at a time. A
job that dies leaves the rest as it was, and another run does that.

Compacted topics are left alone, where the configuration knows them for such.
"""

from __future__ import annotations

import secrets
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tieringd.archive.object_joiner import ObjectJoiner, PreparedMerge, index_of_parts, store_merged
from tieringd.archive.segment_swap import Successor
from tieringd.config.topic import DEFAULT_SEGMENT_BYTES
from tieringd.errors import ChecksumRejected, CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import topic_key
from tieringd.model.segment import JOB_PREFIX
from tieringd.policies.segment_merge import job_limit_offset, plan_merges
from tieringd.spark.bucket import bucket_of
from tieringd.spark.jobs.chosen import chosen_partitions, loaded_again
from tieringd.spark.jobs.progress import silent, watched
from tieringd.spark.jobs.report import Report
from tieringd.spark.jobs.swapping import Outcome, SwapKind, delete_replaced, swap, what_is_done_is_told
from tieringd.spark.jobs.tasks import failures_in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from tieringd.config import Config
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.progress import Progress
    from tieringd.spark.jobs.report import Value

RUNS_AT_ONCE: Final = 1_000
"""Runs between two rounds of swaps."""
_EVERYTHING: Final = 2**62


@dataclass(frozen=True, slots=True)
class _Task:
    """Segments that become one."""

    partition: TopicIdPartition
    parts: tuple[RemoteSegment, ...]


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a task."""

    task: _Task
    merge: PreparedMerge | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Merger:
    """Merge runs. Runs on an executor."""

    config: Config
    job_id: str

    def __call__(self, task: _Task) -> _Done:
        """Store the objects of what a run becomes."""
        bucket = bucket_of(self.config)
        try:
            return _Done(task, bucket.run(self._merged(bucket, task)))
        except (ChecksumRejected, CorruptDataError, ObjectNotFound) as error:
            return _Done(task, None, str(error))

    async def _merged(self, bucket: Bucket, task: _Task) -> PreparedMerge:
        return await store_merged(
            bucket.store,
            ObjectJoiner(bucket.store, work_directory=Path(tempfile.gettempdir())),
            task.partition,
            task.parts,
            await index_of_parts(bucket.indexes, task.partition, task.parts),
            leader_epoch=max(part.leader_epoch for part in task.parts),
            writer_id=f"{JOB_PREFIX}{self.job_id}",
            # What it is made of was listed when the job began, and may have been replaced since.
            is_recorded=False,
        )


def merge(
    spark: SparkSession,
    config: Config,
    *,
    topics: Sequence[str],
    has_broker: bool = True,
    delete_after_ms: int | None = None,
    progress: Progress = silent,
) -> Report:
    """
    Merge adjacent small segments in the archives of *topics*, which are names or patterns.

    By `cloud_storage_segment_size_target` and `_min`. What a broker's log may still hold stays as it is,
    unless the topic is deleted there, or there is no broker any more: *has_broker* is false. What is replaced
    is deleted by the daemon that archives the topic. Where there is none, this deletes what was replaced at
    least *delete_after_ms* ago.

    Raises:
        ObjectNotFound: The bucket holds no such topic.
        StorageError: An operator must act. Nothing was merged: else it is a fault of the report.
        StorageUnavailable: The store is away; likewise.
        TaskFailed: An executor could not do its part; likewise.
    """
    bucket, outcome = bucket_of(config), Outcome()
    chosen = bucket.run(chosen_partitions(bucket, topics))
    outcome.faults += chosen.faults
    compacted = {one.key for one in chosen.topics if config.topic(one.key.topic, {}, one).is_compacted}
    partitions = [one for one in chosen.partitions if topic_key(one.partition) not in compacted]
    with_log = chosen.with_log(has_broker=has_broker)
    merger, runs, host_bytes = _Merger(config, secrets.token_hex(8)), 0, 0
    with what_is_done_is_told(outcome):
        for some in portions(bucket, partitions, outcome.faults, with_log=with_log):
            with watched(spark, "merging segments", progress), failures_in_words():
                done = spark.sparkContext.parallelize(some, len(some)).map(merger).collect()
            runs += len(some)
            host_bytes += _swap(bucket, done, outcome)
    if delete_after_ms is not None:
        named = [one.partition for one in partitions]
        bucket.run(delete_replaced(bucket, named, outcome, after_ms=delete_after_ms))
    figures: dict[str, Value] = {
        "topics": len(chosen.topics),
        "compacted_topics_left": len(compacted),
        "partitions": len(partitions),
        "runs": runs,
        "bytes_through_executors": host_bytes,
    }
    return Report("merge", figures | outcome.figures(), (outcome.table(),), tuple(outcome.faults))


def portions(
    bucket: Bucket,
    partitions: Iterable[PartitionManifest],
    faults: list[str],
    *,
    with_log: Collection[TopicIdPartition],
    runs_max: int = RUNS_AT_ONCE,
) -> Iterator[list[_Task]]:
    """
    Yield the runs of archives that have their history some at a time, as far as no log may hold the same.

    What comes after the first *runs_max* is planned when those before are done, of what the archives are by
    then: a daemon merges as well, and retention deletes. What cannot be read by then comes to *faults*.
    """
    limits = bucket.config.merge_settings.limits(segment_bytes=DEFAULT_SEGMENT_BYTES)
    some: list[_Task] = []
    is_first = True
    for chosen in partitions:
        manifest, from_offset, is_complete = chosen, 0, False
        while not is_complete:
            if not is_first:
                found = bucket.run(loaded_again(bucket, [chosen], faults))
                if not found:
                    break
                manifest = found[0]
            plan = plan_merges(
                manifest,
                replace(limits, runs_max=runs_max - len(some), rows_max=_EVERYTHING),
                from_offset=from_offset,
                up_to=job_limit_offset(manifest, has_log=manifest.partition in with_log),
            )
            some += [
                _Task(manifest.partition, manifest.segments.overlapping(run.base_offset, run.next_offset))
                for run in plan.runs
            ]
            from_offset, is_complete = plan.resume_offset, plan.is_complete
            if len(some) == runs_max:
                yield some
                some, is_first = [], False
    if some:
        yield some


def _swap(bucket: Bucket, done: Sequence[_Done], outcome: Outcome) -> int:
    """Swap what was merged; return how many bytes came through executors."""
    merges: dict[TopicIdPartition, list[PreparedMerge]] = defaultdict(list)
    for one in done:
        if one.merge is None:
            offset = one.task.parts[0].base_offset
            outcome.faults.append(
                f"{one.task.partition}: the segments from offset {offset} on stay as they are: {one.fault}"
            )
        else:
            merges[one.task.partition].append(one.merge)
    for partition, some in merges.items():
        successors = [Successor(each.parts, each.segment) for each in some]
        bucket.run(swap(bucket, partition, successors, outcome, kind=SwapKind.MERGED))
    return sum(each.host_bytes for some in merges.values() for each in some)
