"""`tieringd recover directory`: restore topics with their offsets for a stopped broker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tieringd.archive.catalog import ArchivedTopic, OnFault, raised
from tieringd.broker.log_dir import scan_log_dirs
from tieringd.broker.restored_log import RestoredLog
from tieringd.cli.recover.options import Validation
from tieringd.cli.recover.recovery_progress import ByteProgress
from tieringd.cli.recover.selection import TopicSelection, matching_once
from tieringd.cli.recover.validation import MISSING, Findings, missing, validated
from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.ownership_check import admit_restored
from tieringd.errors import ConfigError, CorruptDataError, ObjectNotFound, TieringError
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import TopicKey
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import NO_TOPIC_ID, TopicIdPartition
from tieringd.policies.recovery import RestoreLimits, plan_restore
from tieringd.recovery.restorer import RestoredPartition, Restorer

REPORTED = (
    "topic",
    "partition",
    "start_offset",
    "next_offset",
    "segments",
    "found_segments",
    "size_bytes",
    "records",
    "ended_transactions",
    "gap_offsets",
    "left_segments",
    "validation",
    "failure",
)
"""The columns of the report."""


@dataclass(frozen=True, slots=True)
class DirectoryRecovery:
    """The arguments of one recovery into a log directory."""

    wanted: TopicSelection
    log_dir: Path
    staging: Path
    limits: RestoreLimits
    validate: Validation
    depth: int
    is_shallow: bool = False
    """Leave the records in the archive. The new logs begin where the archive ends."""
    is_dry_run: bool = False
    """Check everything, report what would be restored, and change nothing."""


async def restored_into_directory(
    config: Config, asked: DirectoryRecovery, *, on_fault: OnFault
) -> list[dict[str, Any]]:
    """
    Restore the topics that *asked* selects, and return the rows of the report.

    A selected topic that cannot be read is given to *on_fault*, and left out. With `no_check` a partition
    whose manifest cannot be read has its reason in its row, and the other partitions are restored. A shallow
    restore leaves its whole topic out: the link to the archive, which stays for good, would lack it.

    Raises:
        ConfigError: A topic cannot be restored into this directory.
        CorruptDataError: The archive is damaged, and validation is not `no_check`.
        ObjectNotFound: No archived topic is selected; or an object is missing, and validation is not
            `no_check`.
    """
    async with opened_archive(config) as archive:
        unreadable: dict[TopicIdPartition, TieringError] = {}
        is_partial = asked.validate is Validation.NO_CHECK and not asked.is_shallow
        found = await matching_once(
            archive,
            asked.wanted,
            on_fault=on_fault,
            on_partition_fault=unreadable.__setitem__ if is_partial else raised,
        )
        findings = await validated(archive, found, asked.validate, asked.depth)
        manifests = [manifest for topic in found for manifest in topic.partitions]
        progress = ByteProgress(sum(plan_restore(one, asked.limits).size_bytes for one in manifests))
        restorer = Restorer(archive.remote_log, archive.reader)
        cluster = await asyncio.to_thread(_cluster_of, asked.log_dir)
        # Every check that can refuse the restore comes before the first link: a link cannot be taken back.
        places = [(topic, await asyncio.to_thread(_places_of, topic, asked)) for topic in found]
        for topic, topic_ids in places:
            if asked.is_shallow:
                _require_one_id(topic, topic_ids, asked)
            else:
                await _require_no_history(archive, topic, [_key(topic, cluster, one) for one in topic_ids])
        if asked.is_dry_run:
            planned = [_planned(one, asked, findings) for one in manifests]
            return planned + _left_out(found, unreadable, findings)
        await admit_restored(archive, config, cluster)
        for topic, topic_ids in places if asked.is_shallow else ():
            await _link(archive, topic, [_key(topic, cluster, one) for one in topic_ids])
        rows = [await _restored(restorer, one, asked, findings, progress) for one in manifests]
        await asyncio.to_thread(_remove_empty, asked.staging)
        rows += [
            _empty(one, validation=MISSING)
            for topic in found
            for one in missing(topic)
            if one not in unreadable
        ]
        return rows + _left_out(found, unreadable, findings)


def _left_out(
    found: Sequence[ArchivedTopic], unreadable: Mapping[TopicIdPartition, TieringError], findings: Findings
) -> list[dict[str, Any]]:
    """Return the report rows of the partitions of *found* whose manifests cannot be read."""
    return [
        _empty(one, validation=findings.of(one), failure=str(unreadable[one]))
        for topic in found
        for one in topic.topic.partitions()
        if one in unreadable
    ]


async def _restored(
    restorer: Restorer,
    manifest: PartitionManifest,
    asked: DirectoryRecovery,
    findings: Findings,
    progress: ByteProgress,
) -> dict[str, Any]:
    plan = plan_restore(manifest, asked.limits)
    target = RestoredLog(asked.log_dir, asked.staging, manifest.partition.topic_partition)
    if asked.is_shallow:
        return _row(await restorer.restore_shallow(manifest, target), findings)
    try:
        done = await restorer.restore(manifest, plan, target, on_bytes=progress.note)
    except (CorruptDataError, ObjectNotFound) as error:
        if asked.validate is not Validation.NO_CHECK:
            raise
        return _empty(manifest.partition, validation=findings.of(manifest.partition), failure=str(error))
    return _row(done, findings)


def _planned(manifest: PartitionManifest, asked: DirectoryRecovery, findings: Findings) -> dict[str, Any]:
    """Return the report row of a partition that would be restored."""
    plan = plan_restore(manifest, asked.limits)
    row = _empty(manifest.partition, validation=findings.of(manifest.partition))
    if asked.is_shallow:
        return row | {"start_offset": manifest.next_offset, "next_offset": manifest.next_offset}
    return row | {
        "start_offset": plan.start_offset,
        "next_offset": manifest.next_offset,
        "segments": len(plan.segments),
        "size_bytes": plan.size_bytes,
        "left_segments": plan.left_segments,
    }


def _places_of(topic: ArchivedTopic, asked: DirectoryRecovery) -> set[str]:
    """Check that a topic's partition directories can be replaced; return the topic ids in their metadata."""
    topic_ids: set[str] = set()
    for one in topic.partitions:
        target = RestoredLog(asked.log_dir, asked.staging, one.partition.topic_partition)
        target.check(() if asked.is_shallow else plan_restore(one, asked.limits).segments)
        topic_ids.add(target.topic_id)
    return topic_ids


def _require_one_id(topic: ArchivedTopic, topic_ids: set[str], asked: DirectoryRecovery) -> None:
    if len(topic_ids) > 1 or NO_TOPIC_ID in topic_ids:
        raise ConfigError(
            f"the directories of topic {topic.topic.key.topic} in {asked.log_dir} do not name one topic id",
            hint="Delete the topic, create it again on a broker of Kafka 2.8 or newer, stop the broker, and "
            "run this again",
        )


async def _require_no_history(archive: Archive, topic: ArchivedTopic, places: Sequence[TopicKey]) -> None:
    """
    Check that the topic has no older archive, and that the new topic is not linked to one.

    A restore into a directory does not bring back an older archive. A link would put old records before the
    restored ones.

    Raises:
        ConfigError: The topic continues an older archive, or one of *places* has a link to one.
    """
    name = topic.topic.key.topic
    for one in topic.partitions:
        parts = await archive.history.parts(
            one.partition, start_offset=one.start_offset, deleted_before=one.deleted_before
        )
        if parts:
            old = parts[-1].partition
            raise ConfigError(
                f"topic {name} continues an older archive, of cluster {old.cluster} (topic id "
                f"{old.topic_id}), which a restore into a directory does not restore",
                hint="Restore it with --shallow, which keeps the whole history readable, or write it to a "
                "cluster with `recover cluster`",
            )
    for key in places:
        if await archive.history.link_of(key) is not None:
            raise ConfigError(
                f"a shallow restore of topic {name} was begun for its id {key.topic_id}: the link to the "
                "old archive exists already, and would put old records before the restored ones",
                hint="Continue with --shallow, or delete the topic, create it again under a new id, and run "
                "this again",
            )


def _key(topic: ArchivedTopic, cluster: str, topic_id: str) -> TopicKey:
    return TopicKey(cluster, topic.topic.key.topic, topic_id)


async def _link(archive: Archive, topic: ArchivedTopic, places: Sequence[TopicKey]) -> None:
    """Store a link from the new topic to its old archive, for each of *places*."""
    for key in places:
        starts = tuple(sorted((one.partition.partition, one.next_offset) for one in topic.partitions))
        await archive.history.link(HistoryLink(key, topic.topic.key, starts))


def _cluster_of(log_dir: Path) -> str:
    found = scan_log_dirs([str(log_dir)]).cluster_id
    if found is None:
        raise ConfigError(
            f"{log_dir}/meta.properties does not name the cluster",
            hint="Start the new broker once, stop it, and run this again",
        )
    return found


def _row(done: RestoredPartition, findings: Findings) -> dict[str, Any]:
    fields = asdict(done)
    del fields["partition"]
    return {
        "topic": done.partition.topic,
        "partition": done.partition.partition,
        **fields,
        "validation": findings.of(done.partition),
        "failure": None,
    }


def _empty(partition: TopicIdPartition, *, validation: str, failure: str | None = None) -> dict[str, Any]:
    """Return the report row of a partition of which nothing was restored."""
    return dict.fromkeys(REPORTED) | {
        "topic": partition.topic,
        "partition": partition.partition,
        "segments": 0,
        "validation": validation,
        "failure": failure,
    }


def _remove_empty(staging: Path) -> None:
    """Remove the staging directory, unless something is left in it."""
    if staging.is_dir() and not any(staging.iterdir()):
        staging.rmdir()
