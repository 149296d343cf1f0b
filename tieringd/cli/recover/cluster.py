"""
`tieringd recover cluster`: write the records of archived topics to topics of a live cluster.

Every check that can refuse the recovery comes before the first topic is created. Records are written
together with the marks at which a next attempt continues (`formats.recovery_mark`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer

from tieringd.archive.catalog import ArchivedTopic, OnFault
from tieringd.broker.kafka_target import TargetCluster, TargetTopic
from tieringd.cli.recover.options import Validation
from tieringd.cli.recover.recovery_progress import RecordProgress
from tieringd.cli.recover.selection import TopicSelection, matching_once, repeated
from tieringd.cli.recover.validation import MISSING, Findings, missing, validated
from tieringd.clock import wall_clock_ms
from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.local_broker import kafka_settings
from tieringd.daemon.ownership_check import admit_restored
from tieringd.errors import BrokerUnavailable, ConfigError, CorruptDataError, ObjectNotFound
from tieringd.formats.recovery_mark import RecoveryMark
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import RemoteSegment
from tieringd.policies.recovery import KEEPING, Renaming, RestoreLimits, plan_restore, target_fault
from tieringd.recovery.republisher import RepublishedPartition, Republisher, first_codec, require_same_log
from tieringd.storage.at_once import at_once

REPORTED = (
    "topic",
    "partition",
    "from_topic",
    "records",
    "new_records",
    "first_source",
    "last_source",
    "next_source",
    "first_target",
    "last_target",
    "gap_offsets",
    "retention_ms",
    "validation",
)
"""The columns of the report."""

READ_COMMITTED = "read_committed"


@dataclass(frozen=True, slots=True)
class ClusterRecovery:
    """The arguments of one recovery into a cluster."""

    wanted: TopicSelection
    limits: RestoreLimits
    renaming: Renaming
    settings: Mapping[str, str]
    """Topic settings for the topics that are created, which go over KEEPING."""
    replication_factor: int
    compression: str | None
    """`none`, or a codec; None is the codec of the archived batches."""
    isolation: str
    into_existing: bool
    parallel: int
    """Partitions that are written at once."""
    validate: Validation
    depth: int
    is_dry_run: bool = False
    """Check everything, report what would be written, and change nothing."""


@dataclass(frozen=True, slots=True)
class _Topic:
    """An archived topic, and the topic that it is written to."""

    archived: ArchivedTopic
    name: str
    target: TargetTopic | None
    """None where the topic has to be created."""
    marks: Mapping[int, RecoveryMark]
    history: Mapping[int, Sequence[PartitionManifest]]
    """Older archives that precede this one, by partition, with their spilled segments."""

    @property
    def group(self) -> str:
        key = self.archived.topic.key
        return f"tieringd-recover-{key.cluster}-{key.topic}-{key.topic_id}"


@dataclass(frozen=True, slots=True)
class _Job:
    """A partition to write, its target, and the mark at which to begin."""

    topic: _Topic
    target: TargetTopic
    manifest: PartitionManifest
    mark: RecoveryMark


async def recovered_into_cluster(
    config: Config, asked: ClusterRecovery, *, on_fault: OnFault
) -> list[dict[str, Any]]:
    """
    Write the topics that *asked* selects, and return the rows of the report.

    A selected topic that cannot be read is given to *on_fault*, and left out.

    Raises:
        ConfigError: The configuration names no cluster, or a topic may not be written to its target.
    """
    if not config.broker.bootstrap:
        raise ConfigError(
            "the configuration names no cluster to restore into",
            hint="Set broker.bootstrap to an address of the new cluster",
        )
    async with (
        opened_archive(config) as archive,
        TargetCluster(kafka_settings(config)) as cluster,
    ):
        found = await matching_once(archive, asked.wanted, on_fault=on_fault)
        findings = await validated(archive, found, asked.validate, asked.depth)
        topics = [await _checked_topic(archive, cluster, one, asked) for one in _named(found, asked.renaming)]
        if asked.is_dry_run:
            return [
                _planned(topic, one, asked, findings) for topic in topics for one in topic.archived.partitions
            ]
        await admit_restored(archive, config, await cluster.cluster_id())
        jobs = [job for topic in topics for job in await _begun(cluster, topic, asked)]
        done = await _written(archive, cluster, jobs, asked)
        _report_changed_names(jobs, done)
        rows = [_row(job, one, findings) for job, one in zip(jobs, done, strict=True)]
        return rows + [
            dict.fromkeys(REPORTED)
            | {"topic": topic.name, "partition": one.partition, "records": 0, "validation": MISSING}
            for topic in topics
            for one in missing(topic.archived)
        ]


def _named(found: Sequence[ArchivedTopic], renaming: Renaming) -> list[tuple[ArchivedTopic, str]]:
    try:
        names = [renaming.name_of(one.topic.key.topic) for one in found]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    twice = repeated(names)
    if twice:
        raise ConfigError(f"more than one topic would be restored under the name {', '.join(twice)}")
    return list(zip(found, names, strict=True))


async def _checked_topic(
    archive: Archive, cluster: TargetCluster, named: tuple[ArchivedTopic, str], asked: ClusterRecovery
) -> _Topic:
    """
    Return an archived topic with its target and its marks, after checking that it may go into that target.

    Raises:
        ConfigError: The topic may not be written to the target.
    """
    archived, name = named
    history = {}
    for one in archived.partitions:
        try:
            parts = await archive.history.parts(
                one.partition, start_offset=one.start_offset, deleted_before=one.deleted_before
            )
            spillovers = archive.manifests.spillovers
            history[one.partition.partition] = [await spillovers.with_history(part) for part in parts]
        except (ObjectNotFound, CorruptDataError) as error:
            if asked.validate is not Validation.NO_CHECK:
                raise
            typer.echo(
                f"{one.partition.topic_partition}: the records before offset {one.start_offset} are left "
                f"out: {error}",
                err=True,
            )
    target = await cluster.topic(name)
    topic = _Topic(archived, name, target, {}, history)
    if target is not None:
        topic = replace(topic, marks=await cluster.marks(topic.group, target))
        _require_ours(topic, target, asked)
        await _require_no_mark_lost(cluster, topic, target)
        await _require_same_logs(archive, topic)
    settings = target.settings if target is not None else {**KEEPING, **asked.settings}
    due = [_due(topic, one, asked) for one in archived.partitions]
    times = [one.base_timestamp_ms for segments in due for one in segments if one.base_timestamp_ms >= 0]
    fault = target_fault(
        settings,
        oldest_ms=min(times, default=-1),
        size_bytes=max((sum(one.size_bytes for one in segments) for segments in due), default=0),
        now_ms=wall_clock_ms(),
    )
    if fault is not None:
        raise ConfigError(
            f"the target cluster's topic {name} cannot take the records: {fault.reason}", hint=fault.hint
        )
    return topic


def _due(topic: _Topic, manifest: PartitionManifest, asked: ClusterRecovery) -> list[RemoteSegment]:
    """Return the segments of a partition that are not or only partly written yet, oldest first."""
    number = manifest.partition.partition
    mark = topic.marks.get(number)
    written_to = 0 if mark is None else mark.next_offset
    plan = plan_restore(manifest, asked.limits, older=topic.history.get(number, ()))
    return [one for one in plan.segments if one.next_offset > written_to]


def _require_ours(topic: _Topic, target: TargetTopic, asked: ClusterRecovery) -> None:
    name = topic.name
    if not topic.marks and not asked.into_existing:
        raise ConfigError(
            f"the target cluster already has a topic {name}, which no recovery of this archive created",
            hint="Choose another name with --rename, --prefix or --suffix, or append to this topic with "
            "--into-existing",
        )
    if target.partition_count < topic.archived.topic.partition_count:
        raise ConfigError(
            f"topic {name} of the target cluster has {target.partition_count} partitions, and the archived "
            f"topic has {topic.archived.topic.partition_count}",
            hint="Add partitions to it, or restore into another topic",
        )
    _require_one_isolation(name, topic.marks, asked)


def _require_one_isolation(name: str, marks: Mapping[int, RecoveryMark], asked: ClusterRecovery) -> None:
    others = {one.isolation for one in marks.values()} - {asked.isolation}
    if others:
        raise ConfigError(
            f"the recovery of topic {name} was begun with --isolation {min(others)}: another isolation "
            "would mix two kinds of content",
            hint="Give the same --isolation, or delete the topic and begin again",
        )


async def _require_no_mark_lost(cluster: TargetCluster, topic: _Topic, target: TargetTopic) -> None:
    """
    Check that no partition of an earlier attempt has records in the target but no mark.

    Brokers expire each mark by its own age. Without the mark the partition's records would be written again.

    Raises:
        ConfigError: Partitions in the target have records and no mark.
    """
    numbers = {one.partition.partition for one in topic.archived.partitions} - topic.marks.keys()
    if not topic.marks or not numbers:
        return
    ends = await cluster.end_offsets(target)
    lost = sorted(number for number in numbers if ends.get(number))
    if lost:
        raise ConfigError(
            f"the cluster has lost the progress of the recovery of topic {topic.name}: partitions "
            f"{', '.join(map(str, lost))} hold records, and group {topic.group} has no committed offset for "
            "them",
            hint="Delete the topic and begin again, or choose another name with --rename, --prefix or "
            "--suffix",
        )


async def _require_same_logs(archive: Archive, topic: _Topic) -> None:
    """
    Check that each partition's archive still has what is written of it.

    Raises:
        ConfigError: A partition's archive was cut back below its mark.
    """
    for partition in (one.partition for one in topic.archived.partitions):
        mark = topic.marks.get(partition.partition)
        if mark is not None:
            # Read after the mark: another attempt may have gone past the archive's end of before.
            manifest = (await archive.manifests.load(partition)).manifest
            if manifest is not None:
                require_same_log(manifest, mark)


async def _begun(cluster: TargetCluster, topic: _Topic, asked: ClusterRecovery) -> list[_Job]:
    """
    Create the target topic if it does not exist, and store a first mark for each partition without one.

    Returns:
        One job for each archived partition.
    """
    target = topic.target
    if target is None:
        target = await cluster.create(
            topic.name,
            partitions=topic.archived.topic.partition_count,
            replication_factor=asked.replication_factor,
            settings={**KEEPING, **asked.settings},
        )
        typer.echo(f"created topic {topic.name}; {_kept(topic, target)}", err=True)
    marks = dict(topic.marks)
    numbers = {one.partition.partition for one in topic.archived.partitions}
    if numbers - marks.keys():
        async with cluster.writer(
            target, name=f"{topic.group}-{topic.name}", group=topic.group, compression=None
        ) as writer:
            # Another attempt may have begun since the marks were read. From here on it is fenced.
            marks |= await cluster.marks(topic.group, target, numbers - marks.keys())
            _require_one_isolation(topic.name, marks, asked)
            new = {
                one.partition.partition: RecoveryMark(
                    _start_of(topic, one, asked.limits), target.topic_id, asked.isolation
                )
                for one in topic.archived.partitions
                if one.partition.partition not in marks
            }
            if new:
                await writer.set_marks(new)
        marks |= new
    return [_Job(topic, target, one, marks[one.partition.partition]) for one in topic.archived.partitions]


def _kept(topic: _Topic, target: TargetTopic) -> str:
    """Return a message on the retention of the target, and on that of the archived topic if it is known."""
    original = topic.archived.topic.original_retention
    was = original.effective_ms if original is not None else None
    told = f"it has retention.ms={target.settings.get('retention.ms')}"
    return told if was is None else f"{told}, and the archived topic had {was}"


def _start_of(topic: _Topic, manifest: PartitionManifest, limits: RestoreLimits) -> int:
    parts = topic.history.get(manifest.partition.partition, ())
    if limits == RestoreLimits():
        return parts[0].start_offset if parts else manifest.start_offset
    start_offset = plan_restore(manifest, limits, older=parts).start_offset
    return manifest.next_offset if start_offset is None else start_offset


async def _written(
    archive: Archive, cluster: TargetCluster, jobs: Sequence[_Job], asked: ClusterRecovery
) -> list[RepublishedPartition]:
    """Write all partitions, `parallel` of them at once. The first failure cancels the others."""
    progress = RecordProgress(
        {job.manifest.partition: job.mark.next_offset for job in jobs},
        sum(max(job.mark.next_offset, job.manifest.next_offset) for job in jobs),
    )
    republisher = Republisher(archive.manifests, archive.records, archive.history)

    async def write(job: _Job) -> RepublishedPartition:
        partition = job.manifest.partition
        codec = asked.compression
        if codec is None:
            codec = (await first_codec(archive.remote_log, archive.reader, job.manifest)).name.lower()
        async with cluster.writer(
            job.target,
            name=f"{job.topic.group}-{job.topic.name}-{partition.partition}",
            group=job.topic.group,
            compression=None if codec == "none" else codec,
        ) as writer:
            # The writer has fenced an earlier attempt, which may have stored a mark since the last read.
            # The first mark is from another writer, whose transaction the coordinator may still see as open.
            marks = await cluster.marks(job.topic.group, job.target, {partition.partition})
            mark = marks.get(partition.partition)
            if mark is None:
                raise BrokerUnavailable(
                    f"the progress mark of {job.topic.name}-{partition.partition} is missing: group "
                    f"{job.topic.group} was deleted during the recovery"
                )
            # Stored again even if nothing is written: brokers expire marks by age, and so all of a
            # topic's marks have the same age.
            await writer.set_marks({partition.partition: mark})
            return await republisher.republish(
                partition,
                mark,
                writer,
                read_committed=asked.isolation == READ_COMMITTED,
                on_records=progress.note,
            )

    return await at_once(list(jobs), write, count=asked.parallel)


def _report_changed_names(jobs: Sequence[_Job], done: Sequence[RepublishedPartition]) -> None:
    """Say on standard error how many header names were not kept byte by byte, where there are any."""
    for job, one in zip(jobs, done, strict=True):
        if one.changed_names:
            typer.echo(
                f"{job.topic.name}-{one.partition.partition}: {one.changed_names} header names that are not "
                "UTF-8 were written with U+FFFD in place of the other bytes",
                err=True,
            )


def _planned(
    topic: _Topic, manifest: PartitionManifest, asked: ClusterRecovery, findings: Findings
) -> dict[str, Any]:
    """Return the report row of a partition that would be written, from its mark if it has one."""
    partition = manifest.partition.partition
    mark = topic.marks.get(partition)
    return dict.fromkeys(REPORTED) | {
        "topic": topic.name,
        "partition": partition,
        "from_topic": topic.archived.topic.key.topic,
        "first_source": _start_of(topic, manifest, asked.limits) if mark is None else mark.next_offset,
        "next_source": manifest.next_offset,
        "validation": findings.of(manifest.partition),
    }


def _row(job: _Job, done: RepublishedPartition, findings: Findings) -> dict[str, Any]:
    mark = done.mark
    return {
        "topic": job.topic.name,
        "partition": done.partition.partition,
        "from_topic": done.partition.topic,
        "records": mark.records,
        "new_records": done.records,
        "first_source": mark.first_source,
        "last_source": mark.last_source,
        "next_source": mark.next_offset,
        "first_target": mark.first_target,
        "last_target": mark.last_target,
        "gap_offsets": sum(gap.next_offset - gap.base_offset for gap in done.gaps),
        "retention_ms": job.target.settings.get("retention.ms"),
        "validation": findings.of(done.partition),
    }
