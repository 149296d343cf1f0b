"""
Work on the archive that waits for an idle object store, and the service that gives it turns.

`topic_purge_job` builds the job that purges the archives of deleted topics from a daemon's parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archiving.claim import ManifestChange, ended
from tieringd.archiving.reconciler import Reconciler
from tieringd.archiving.remote_log import RemoteLog
from tieringd.broker.base import Broker
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.daemon.scrubbing import scrub_job
from tieringd.housekeeping.merging import MergeJob, SegmentMerger
from tieringd.housekeeping.partition_sweep import ArchivedPartition, HousekeepingJob
from tieringd.housekeeping.reupload import CompactedReuploadJob
from tieringd.housekeeping.scrub import ScrubJob
from tieringd.housekeeping.service import Housekeeping, TrafficWatch
from tieringd.housekeeping.topic_purge import TopicObjectDeleter, TopicPurgeJob
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.storage.resilient import ResilientStore
from tieringd.topics.topic_registry import TopicRegistry


def topic_purge_job(
    config: Config,
    metrics: Metrics,
    archive: Archive,
    broker: Broker,
    *,
    listed: TopicRegistry,
    writer_id: str,
) -> TopicPurgeJob:
    """
    Return the job, with a topic registry of its own, because only one task at a time may change one.

    *listed* is the one that the daemon's rounds keep.
    """
    return TopicPurgeJob(
        broker=broker,
        registry=TopicRegistry(archive.store, archive.manifests),
        listed=listed,
        purger=TopicObjectDeleter(archive.store, archive.manifests, metrics=metrics.purge),
        history=archive.history,
        owner=writer_id,
        grace_ms=config.cloud_storage_topic_purge_grace_period_ms,
        is_to_stay=config.keeps_deleted,
        clock=archive.clock,
        metrics=metrics.purge,
    )


@dataclass(frozen=True, slots=True)
class HousekeepingParts:
    """The service, and those of its jobs that have settings of their own."""

    service: Housekeeping
    scrub: ScrubJob
    purge: TopicPurgeJob

    def set_config(self, config: Config) -> None:
        """Use *config* from now on."""
        self.service.set_limits(config.housekeeping_limits)
        self.scrub.set_pace(config.scrub_pace)
        self.purge.grace_ms = config.cloud_storage_topic_purge_grace_period_ms
        self.purge.is_to_stay = config.keeps_deleted


class ArchivedPartitions(Mapping[Leadership, ArchivedPartition]):
    """The partitions that a daemon currently archives, looked up in the reconciler at each access."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    def __getitem__(self, leadership: Leadership) -> ArchivedPartition:
        found = self._reconciler.archived_one(leadership)
        if found is None:
            raise KeyError(leadership)
        return ArchivedPartition(leadership, *found)

    def __iter__(self) -> Iterator[Leadership]:
        return (leadership for leadership, _, _ in self._reconciler.archived())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, leadership: object) -> bool:
        return isinstance(leadership, Leadership) and self._reconciler.archived_one(leadership) is not None


def housekeeping_of(
    config: Config,
    metrics: Metrics,
    archive: Archive,
    broker: Broker,
    *,
    reconciler: Reconciler,
    writer_id: str,
) -> HousekeepingParts:
    """Return the service with its jobs; nothing runs yet, but the store's traffic is counted from now on."""
    limits, loop_time = config.housekeeping_limits, asyncio.get_running_loop().time
    traffic = TrafficWatch(window_seconds=limits.window_seconds, now=loop_time)
    archive.store.listen(traffic.note)
    scrub = scrub_job(
        config,
        metrics,
        archive,
        reconciler=reconciler,
        writer_id=writer_id,
        offer=_offer_to(reconciler),
    )
    purge = topic_purge_job(config, metrics, archive, broker, listed=reconciler.registry, writer_id=writer_id)
    jobs: list[HousekeepingJob] = [
        merge_job(
            config,
            metrics,
            archive.store,
            reconciler=reconciler,
            writer_id=writer_id,
            now_ms=archive.clock,
        ),
        reupload_job(metrics, archive.remote_log, reconciler=reconciler, now_ms=archive.clock),
        scrub,
        purge,
    ]
    service = Housekeeping(jobs, traffic=traffic, limits=limits, metrics=metrics.housekeeping, now=loop_time)
    return HousekeepingParts(service, scrub, purge)


def merge_job(
    config: Config,
    metrics: Metrics,
    store: ResilientStore,
    *,
    reconciler: Reconciler,
    writer_id: str,
    now_ms: Callable[[], int],
) -> MergeJob:
    """Return the job that merges the segments of the archived partitions."""
    joiner = ObjectJoiner(store, work_directory=config.state_directory)

    def make_merger(leadership: Leadership) -> SegmentMerger:
        return SegmentMerger(
            leadership, store, joiner=joiner, writer_id=writer_id, metrics=metrics, now_ms=now_ms
        )

    archived = ArchivedPartitions(reconciler)
    return MergeJob(lambda: archived, make_worker=make_merger, changed=reconciler.changes.reader())


def reupload_job(
    metrics: Metrics, remote_log: RemoteLog, *, reconciler: Reconciler, now_ms: Callable[[], int]
) -> CompactedReuploadJob:
    """Return the job that replaces archived segments by their compacted forms."""
    archived = ArchivedPartitions(reconciler)
    return CompactedReuploadJob(
        lambda: archived,
        remote_log=remote_log,
        metrics=metrics,
        now_ms=now_ms,
        changed=reconciler.changes.reader(),
    )


def _offer_to(reconciler: Reconciler) -> Callable[[TopicIdPartition, ManifestChange], Awaitable[None]]:
    async def offer(partition: TopicIdPartition, change: ManifestChange) -> None:
        for leadership, archiver, _ in reconciler.archived():
            if leadership.partition == partition:
                await ended(archiver.offer(change))
                return

    return offer
