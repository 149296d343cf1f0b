"""
Merge the small segments of whole archives, spilled history included.

The job decides which segments become one as a daemon does (`policies.segment_merge`). If the store can join
objects itself, executors only make the requests; otherwise the bytes go through executors. Merged runs are
swapped in portions. A job that dies leaves the rest unchanged, and another run merges it.

Topics that the configuration knows to be compacted are left alone.
"""

from __future__ import annotations

import secrets
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tieringd.archive.object_joiner import ObjectJoiner, PreparedMerge, index_of_parts, store_merged
from tieringd.archive.segment_swap import Successor
from tieringd.config import Config
from tieringd.config.topic import DEFAULT_SEGMENT_BYTES
from tieringd.errors import ChecksumRejected, CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import topic_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import JOB_PREFIX, RemoteSegment
from tieringd.policies.segment_merge import job_limit_offset, plan_merges
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.jobs.chosen import LOADS_AT_ONCE, chosen_partitions, loaded_again
from tieringd.spark.jobs.job_progress import Progress, silent
from tieringd.spark.jobs.report import Report, Value
from tieringd.spark.jobs.swapping import (
    PartitionSwap,
    SwapKind,
    SwapOutcome,
    delete_replaced,
    outcome_reported,
    swap_all,
)
from tieringd.spark.jobs.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUNS_AT_ONCE: Final = 1_000
"""Runs between two rounds of swaps."""
_EVERYTHING: Final = 2**62


@dataclass(frozen=True, slots=True)
class _Task:
    """Segments of one partition that become one segment."""

    partition: TopicIdPartition
    parts: tuple[RemoteSegment, ...]


@dataclass(frozen=True, slots=True)
class _Done:
    """The result of a task: a stored merge, or a fault."""

    task: _Task
    merge: PreparedMerge | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Merger:
    """Merges runs of segments. Runs on an executor."""

    config: Config
    job_id: str

    def __call__(self, task: _Task) -> _Done:
        """Store the objects of a run's merged segment."""
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
            # The parts were listed when the portion was planned, and may have been replaced since.
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
    Merge adjacent small segments in the archives of *topics*.

    `cloud_storage_segment_size_target` and `cloud_storage_segment_size_min` decide. Segments with offsets
    that a broker's log may still have stay as they are. They are merged if the topic is deleted in its
    cluster, or if *has_broker* is false.

    Args:
        spark: The session that runs the tasks.
        config: The archive's configuration.
        topics: Names or patterns.
        has_broker: Whether a broker may still have the topics' logs.
        delete_after_ms: Delete objects that were replaced at least this many ms ago. None leaves the
            deletion to the daemon that archives the topic.
        progress: Called with the progress of each step.

    Raises:
        ObjectNotFound: The bucket holds no such topic.
        StorageError: An operator must act, and nothing was merged. After a merge the error is a fault of the
            report instead.
        StorageUnavailable: The store does not answer, and nothing was merged; else a fault as well.
        TaskFailed: An executor failed, and nothing was merged; else a fault as well.
    """
    bucket, outcome = bucket_of(config), SwapOutcome()
    chosen = bucket.run(chosen_partitions(bucket, topics))
    outcome.faults += chosen.faults
    compacted = {one.key for one in chosen.topics if config.topic(one.key.topic, {}, one).is_compacted}
    partitions = [one for one in chosen.partitions if topic_key(one.partition) not in compacted]
    with_log = chosen.with_log(has_broker=has_broker)
    merger, runs, host_bytes = _Merger(config, secrets.token_hex(8)), 0, 0
    with outcome_reported(outcome):
        for some in portions(bucket, partitions, outcome.faults, with_log=with_log):
            done = run_tasks(spark, "merging segments", some, merger, progress=progress)
            runs += len(some)
            host_bytes += _swap(bucket, done, outcome)
    if delete_after_ms is not None:
        named = [one.partition for one in partitions]
        bucket.run(
            delete_replaced(bucket, named, outcome, after_ms=delete_after_ms, gone_since=chosen.gone_since)
        )
    figures: dict[str, Value] = {
        "topics": len(chosen.topics),
        "compacted_topics_left": len(compacted),
        "partitions": len(partitions),
        "runs": runs,
        "bytes_through_executors": host_bytes,
    }
    return Report(
        "merge", figures | outcome.figures(), (outcome.table(), *chosen.tables()), tuple(outcome.faults)
    )


def portions(
    bucket: Bucket,
    partitions: Iterable[PartitionManifest],
    faults: list[str],
    *,
    with_log: Collection[TopicIdPartition],
    runs_max: int = RUNS_AT_ONCE,
) -> Iterator[list[_Task]]:
    """
    Yield the runs to merge, *runs_max* at a time. Offsets that a log in *with_log* may have are left out.

    *partitions* are manifests with their spilled segments. Runs after the first portion are planned when the
    portion before is done, from newly loaded manifests: a daemon merges as well, and retention deletes. For a
    partition that cannot be read then a message is appended to *faults*.
    """
    limits = bucket.config.merge_settings.limits(segment_bytes=DEFAULT_SEGMENT_BYTES)
    some: list[_Task] = []
    chosen = list(partitions)
    current = _CurrentManifests(bucket, chosen, faults)
    for number in range(len(chosen)):
        from_offset, is_complete = 0, False
        while not is_complete:
            manifest = current.of(number)
            if manifest is None:
                break
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
                some = []
                current.forget()
    if some:
        yield some


class _CurrentManifests:
    """The manifests of partitions, by number. Once they were forgotten, some are loaded at a time."""

    def __init__(self, bucket: Bucket, chosen: Sequence[PartitionManifest], faults: list[str]) -> None:
        self._bucket = bucket
        self._chosen = chosen
        self._faults = faults
        self._known: dict[int, PartitionManifest | None] = dict(enumerate(chosen))

    def forget(self) -> None:
        """Load manifests anew from now on: time has passed."""
        self._known = {}

    def of(self, number: int) -> PartitionManifest | None:
        """Return a partition's manifest; None with a fault if it cannot be read any more."""
        if number not in self._known:
            some = self._chosen[number : number + LOADS_AT_ONCE]
            found = self._bucket.run(loaded_again(self._bucket, some, self._faults))
            by_partition = {one.partition: one for one in found}
            self._known = {number + place: by_partition.get(one.partition) for place, one in enumerate(some)}
        return self._known[number]


def _swap(bucket: Bucket, done: Sequence[_Done], outcome: SwapOutcome) -> int:
    """Swap in the merged segments; return how many bytes went through executors."""
    merges: dict[TopicIdPartition, list[PreparedMerge]] = defaultdict(list)
    for one in done:
        if one.merge is None:
            offset = one.task.parts[0].base_offset
            outcome.faults.append(
                f"{one.task.partition}: the segments from offset {offset} on stay as they are: {one.fault}"
            )
        else:
            merges[one.task.partition].append(one.merge)
    swaps = [
        PartitionSwap(partition, [Successor(each.parts, each.segment) for each in some])
        for partition, some in merges.items()
    ]
    bucket.run(swap_all(bucket, swaps, outcome, kind=SwapKind.MERGED))
    return sum(each.host_bytes for some in merges.values() for each in some)
