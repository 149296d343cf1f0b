"""
One snapshot of one topic, for commands: what the broker on this host, its disks and the bucket have of it.

The daemon's own scan (`archiving.observer`) covers everything, repeats, and keeps state. This snapshot is
for a person who asks once. Nothing is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tieringd.archiving.share_groups import ShareGroups
from tieringd.broker.base import Broker, topic_settings
from tieringd.config import Config, TopicConfig
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.local_broker import opened_broker
from tieringd.errors import CorruptDataError, LocalFileError, ObjectNotFound
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import Archiving, TopicManifest
from tieringd.metrics import Metrics
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import ClusterView, LogBounds, TopicIdPartition
from tieringd.policies.trim_target import ShareGroupHold


@dataclass(frozen=True, slots=True)
class PartitionSnapshot:
    """A snapshot of one partition, as far as this host knows it."""

    partition: TopicIdPartition
    manifest: PartitionManifest | None
    log: LocalLog | None
    """None where this broker has no replica, or its files could not be read."""
    bounds: LogBounds | None
    """None where this broker does not lead the partition, or did not report bounds."""
    is_held: bool
    is_led: bool
    problem: str = ""
    """Why *log* or *bounds* are unknown although this broker should have them; empty if they are known."""
    share_group_hold: ShareGroupHold | None = None
    """The records that share groups still need; None where they need none, or without a partition number."""


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A snapshot of a topic and of its partitions, in order of their numbers."""

    key: TopicKey
    config: TopicConfig
    is_paused: bool
    partitions: tuple[PartitionSnapshot, ...]
    clock_doubt: str = ""
    """Why this host deletes nothing by age; empty when its clock can be trusted."""


async def take_topic_snapshot(config: Config, topic: str, *, number: int | None = None) -> TopicSnapshot:
    """
    Return a snapshot of *topic*, with all its partitions or only partition *number*.

    Raises:
        ObjectNotFound: Neither this broker nor the bucket has the topic, or it has no such partition.
        BrokerUnavailable: The broker does not answer.
        BrokerDenied: This user may not read the topic's settings.
    """
    async with opened_archive(config) as archive, opened_broker(config) as broker:
        return await topic_snapshot_with(config, archive, broker, topic, number=number)


async def topic_snapshot_with(
    config: Config, archive: Archive, broker: Broker, topic: str, *, number: int | None = None
) -> TopicSnapshot:
    """
    Return a snapshot as `take_topic_snapshot` does, from an archive and a broker that are open already.

    With *number*, the partition's manifest includes its spilled segments, and share groups are asked for.
    """
    held, view = await _held(config, archive, broker, topic)
    key, known = await _identified(archive, await broker.cluster_id(), topic, held)
    properties = await topic_settings(broker, topic)
    numbers = _numbers(held, view, topic, known)
    if number is not None:
        if number not in numbers:
            raise ObjectNotFound(f"topic {topic} has {len(numbers)} partitions, and no partition {number}")
        numbers = range(number, number + 1)
    partitions = await _partition_snapshots(archive, broker, key, {n: held.get(n) for n in numbers}, view)
    if number is not None:
        groups = ShareGroups(
            broker,
            metrics=Metrics(),
            steady_ms=archive.clock.steady_ms,
            hold_ms=config.share_group_trim_hold_ms,
        )
        partitions = tuple([await _in_full(archive, groups, one) for one in partitions])
    return TopicSnapshot(
        key,
        config.topic(topic, properties, known),
        is_paused=known is not None and known.archiving is Archiving.PAUSED,
        partitions=partitions,
        clock_doubt=archive.clock.status().doubt,
    )


async def _held(
    config: Config, archive: Archive, broker: Broker, topic: str
) -> tuple[dict[int, LocalPartition], ClusterView]:
    """
    Return the replicas on this host by partition number, and the broker's view of the cluster.

    Directories of an earlier incarnation of the topic do not count as replicas.
    """
    scan = await asyncio.to_thread(archive.layout.scan, [str(path) for path in config.broker.log_dirs])
    found = [one for one in scan.partitions if one.topic_partition.topic == topic]
    view = await broker.replicas(found)
    held = {
        one.topic_partition.partition: replace(one, topic_id=view.topic_ids.get(topic, one.topic_id))
        for one in found
        if one.topic_partition in view.replicas
    }
    return held, view


async def _identified(
    archive: Archive, cluster: str, topic: str, held: Mapping[int, LocalPartition]
) -> tuple[TopicKey, TopicManifest | None]:
    """
    Return the key and manifest of the incarnation of *topic* that this broker has, else the bucket's latest.

    Raises:
        ObjectNotFound: Neither this broker nor the bucket has a topic of that name.
    """
    for one in held.values():
        key = TopicKey(cluster, topic, one.topic_id)
        return key, await archive.manifests.load_topic(key)
    try:
        latest = (await archive.catalog.topic(topic, cluster=cluster)).topic
    except ObjectNotFound as error:
        raise ObjectNotFound(
            f"neither this broker nor the bucket has a topic named {topic} of cluster {cluster}"
        ) from error
    return latest.key, latest


def _numbers(
    held: Mapping[int, LocalPartition], view: ClusterView, topic: str, known: TopicManifest | None
) -> range:
    archived = known.partition_count if known else 0
    return range(max(archived, view.partition_counts.get(topic, 0), *(number + 1 for number in held), 0))


async def _partition_snapshots(
    archive: Archive,
    broker: Broker,
    key: TopicKey,
    held: Mapping[int, LocalPartition | None],
    view: ClusterView,
) -> tuple[PartitionSnapshot, ...]:
    names = [TopicIdPartition(key.cluster, key.topic, key.topic_id, number) for number in held]
    stored = await asyncio.gather(*(archive.manifests.load(name) for name in names))
    snapshots: list[PartitionSnapshot] = []
    for name, found, local in zip(names, stored, held.values(), strict=True):
        log, problem = None, ""
        if local is not None:
            try:
                log = await asyncio.to_thread(_read, archive, local, found.manifest)
            except (LocalFileError, CorruptDataError) as error:
                problem = str(error)
        replica = view.replicas.get(name.topic_partition) if local else None
        is_led = replica is not None and replica.is_leader
        snapshots.append(
            PartitionSnapshot(name, found.manifest, log, None, local is not None, is_led, problem)
        )
    return await _with_bounds(broker, snapshots, view)


async def _in_full(archive: Archive, groups: ShareGroups, one: PartitionSnapshot) -> PartitionSnapshot:
    if one.manifest is None:
        return one
    manifest = await archive.manifests.spillovers.with_history(one.manifest)
    hold = None
    if one.is_led:
        ages_ms = archive.clock.status().ages_ms(manifest.committed_at_ms)
        hold = await groups.hold(one.partition.topic_partition, now_ms=ages_ms)
    return replace(one, manifest=manifest, share_group_hold=hold)


def _read(archive: Archive, local: LocalPartition, manifest: PartitionManifest | None) -> LocalLog:
    translation = manifest.translation if manifest else None
    return archive.layout.read_log(local, () if translation is None else (translation,))


async def _with_bounds(
    broker: Broker, snapshots: Sequence[PartitionSnapshot], view: ClusterView
) -> tuple[PartitionSnapshot, ...]:
    found = await broker.log_bounds(
        [one.log for one in snapshots if one.is_led and one.log is not None],
        leader_epochs={name: replica.leader_epoch for name, replica in view.replicas.items()},
    )
    done: list[PartitionSnapshot] = []
    for one in snapshots:
        bounds = found.get(one.partition.topic_partition)
        if isinstance(bounds, LogBounds):
            done.append(replace(one, bounds=bounds))
        else:
            done.append(one if bounds is None else replace(one, problem=str(bounds)))
    return tuple(done)
