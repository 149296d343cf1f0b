"""
Scrub: compare every byte of the archive with its manifests.

The driver reads manifests and lists the bucket. Executors read every data object and index completely. If an
executor finds a fault, it reads the object again, and reports the fault only if a manifest that was read
afterwards still names the object. Merges and retention may have replaced it meanwhile. Nothing is changed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tieringd.archive.scrub.partition_scrub import PartitionScrubber
from tieringd.archive.scrub.segment_inspection import SegmentInspector
from tieringd.archive.scrub.survey import Survey, Surveyor
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.policies.scrub import Finding
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.jobs.job_progress import Progress, silent
from tieringd.spark.jobs.report import Report, Table, Value
from tieringd.spark.jobs.segment_tasks import SegmentTask, plan_segment_tasks
from tieringd.spark.jobs.tasks import Spread, spread_over
from tieringd.spark.jobs.topic_choice import is_chosen_by, require_matched
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    # An ordinary import would load pydantic and PyYAML into processes that do not need them.
    from tieringd.config import Config

SEGMENTS_AT_ONCE = 2
"""Segments that a task reads at once. While one is checked, the first bytes of the next are fetched."""


@dataclass(frozen=True, slots=True)
class TopicCount:
    """The amount of data that was checked of one topic."""

    segments: int = 0
    size_bytes: int = 0
    """Bytes of data objects."""
    records: int = 0
    batches: int = 0
    read_bytes: int = 0
    """Bytes of data and indexes that were read."""

    def __add__(self, other: TopicCount) -> TopicCount:
        return TopicCount(
            self.segments + other.segments,
            self.size_bytes + other.size_bytes,
            self.records + other.records,
            self.batches + other.batches,
            self.read_bytes + other.read_bytes,
        )


@dataclass(frozen=True, slots=True)
class TaskFound:
    """The result of one task."""

    counts: tuple[tuple[str, TopicCount], ...]
    """Topics and their counts."""
    findings: tuple[Finding, ...]


def scrub(
    spark: SparkSession,
    config: Config,
    *,
    topics: Sequence[str] = (),
    with_orphans: bool = True,
    progress: Progress = silent,
) -> Report:
    """
    Check every object of the archive, or of *topics*, names or patterns.

    Each finding is a fault of the report. Objects that no manifest names are not faults. They are in a
    table of the report, unless *with_orphans* is false, which saves the listing of the whole bucket.

    Raises:
        ObjectNotFound: One of *topics* matches nothing.
        StorageUnavailable: The store does not answer.
        TaskFailed: An executor failed.
    """
    cores = spark.sparkContext.defaultParallelism
    return scrubbed(
        config, spread_over(spark, progress), topics=topics, with_orphans=with_orphans, cores=cores
    )


def scrubbed(
    config: Config, spread: Spread, *, topics: Sequence[str], with_orphans: bool, cores: int
) -> Report:
    """Scrub as `scrub` does; *spread* runs the tasks, on *cores* cores in parallel."""
    begun = time.monotonic()
    bucket = bucket_of(config)
    surveyor = Surveyor(
        bucket.store,
        bucket.manifests,
        is_wanted=is_chosen_by(topics),
        grace_ms=config.archive_orphan_grace_ms,
        ages_ms=bucket.clock.ages_ms,
    )
    survey = bucket.run(surveyor.survey(with_orphans=with_orphans))
    # With findings, a topic that seems missing may be one whose manifest is damaged.
    if not survey.findings:
        require_matched(topics, {one.partition.topic for one in survey.owners})
    tables = ((owner.partition, table) for owner in survey.owners for table in owner.held)
    found = spread("scrub", plan_segment_tasks(tables, cores=cores), partial(inspect_segments, config))
    survey.add(bucket.run(surveyor.confirmed(finding for one in found for finding in one.findings)))
    return scrub_report(survey, found, seconds=time.monotonic() - begun)


def inspect_segments(config: Config, task: SegmentTask) -> TaskFound:
    """Read every segment of *task* completely. Runs on an executor."""
    bucket = bucket_of(config)
    return bucket.run(_inspect_segments(bucket, task))


async def _inspect_segments(bucket: Bucket, task: SegmentTask) -> TaskFound:
    inspector = SegmentInspector(bucket.store)
    scrubber = PartitionScrubber(bucket.store, bucket.manifests)
    counts: defaultdict[str, TopicCount] = defaultdict(TopicCount)
    suspects: defaultdict[TopicIdPartition, list[Finding]] = defaultdict(list)
    for partition, table in task.stretches:

        async def inspect(segment: RemoteSegment, partition: TopicIdPartition = partition) -> None:
            seen = await inspector.inspect(partition, segment, deep=True)
            suspects[partition] += seen.findings
            counts[partition.topic] += TopicCount(
                1, segment.size_bytes, seen.records, seen.batches, seen.read_bytes
            )

        await at_once(tuple(table), inspect, count=SEGMENTS_AT_ONCE)
    held = [await scrubber.confirmed(one, some, deep=True) for one, some in suspects.items()]
    return TaskFound(tuple(counts.items()), tuple(finding for some in held for finding in some))


def scrub_report(survey: Survey, found: Iterable[TaskFound], *, seconds: float) -> Report:
    """Return the report of what the driver and the executors found."""
    counts: defaultdict[str, TopicCount] = defaultdict(TopicCount)
    for one in found:
        for topic, count in one.counts:
            counts[topic] += count
    whole = sum(counts.values(), TopicCount())
    archived = [owner for owner in survey.owners if owner.manifest is not None]
    partitions = Counter(owner.partition.topic for owner in archived)
    faults = Counter(one.partition.topic for one in survey.findings if one.partition is not None)
    figures: dict[str, Value] = {
        "partitions": len(archived),
        "segments": whole.segments,
        "objects": 2 * whole.segments + len(archived) + sum(len(owner.part_names) for owner in archived),
        "size_bytes": whole.size_bytes,
        "read_bytes": whole.read_bytes,
        "batches": whole.batches,
        "records": whole.records,
        "listed_objects": survey.listed_objects,
        "orphans": len(survey.orphans),
        "orphan_bytes": sum(one.stored.size_bytes for one in survey.orphans),
        "faults": len(survey.findings),
        "seconds": seconds,
        "gb_per_second": whole.read_bytes / 1e9 / max(seconds, 1e-9),
    }
    by_topic = Table(
        "topics",
        ("topic", "partitions", "segments", "size_bytes", "batches", "records", "faults"),
        tuple(
            (
                topic,
                partitions[topic],
                counts[topic].segments,
                counts[topic].size_bytes,
                counts[topic].batches,
                counts[topic].records,
                faults[topic],
            )
            for topic in sorted({*partitions, *faults})
        ),
    )
    return Report(
        "scrub",
        figures,
        (by_topic, _findings_table(survey), _orphans_table(survey), _uncertain_table(survey)),
        tuple(f"{one.kind}: {one}. {one.action}" for one in survey.findings),
    )


def _findings_table(survey: Survey) -> Table:
    columns = ("kind", "topic", "partition", "base_offset", "last_offset", "key", "fault", "action")
    return Table(
        "findings",
        columns,
        tuple(
            (
                one.kind.value,
                one.partition.topic if one.partition else None,
                one.partition.partition if one.partition else None,
                one.segment.base_offset if one.segment else None,
                one.segment.last_offset if one.segment else None,
                one.key,
                one.detail,
                one.action,
            )
            for one in survey.findings
        ),
        is_detail=True,
    )


def _orphans_table(survey: Survey) -> Table:
    return Table(
        "orphans",
        ("key", "topic", "partition", "size_bytes", "modified_ms", "reason"),
        tuple(
            (
                one.stored.key,
                one.partition.topic,
                one.partition.partition,
                one.stored.size_bytes,
                one.stored.modified_ms,
                one.detail,
            )
            for one in survey.orphans
        ),
    )


def _uncertain_table(survey: Survey) -> Table:
    return Table(
        "not_judged",
        ("topic", "partition", "reason"),
        tuple((one.topic, one.partition, why) for one, why in survey.uncertain.items()),
    )
