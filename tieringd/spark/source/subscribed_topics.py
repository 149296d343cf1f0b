"""
The topics and partitions of a subscription, as they are in the bucket now.

A scan lists the topic manifests and loads the manifests of the partitions, and reads nothing else. A second
scan loads only manifests that have changed. If none has, the second scan returns the result of the first one
itself, so that callers recognise it without comparing thousands of partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import is_not
from typing import TYPE_CHECKING, Final

import structlog

from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition, TopicPartition
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    # An ordinary import would load numba and pyarrow into processes that do not need them.
    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.formats.topic_manifest import TopicManifest
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.source.options import Subscription

log = structlog.get_logger(__name__)

LOADS_AT_ONCE: Final = 16


# Without slots, so that the sets below are computed once: a stream asks for them at each trigger.
@dataclass(frozen=True)
class SubscribedPartitions:
    """The archived partitions of a subscription."""

    manifests: Mapping[TopicPartition, PartitionManifest]
    unarchived: frozenset[TopicPartition] = frozenset()
    """Known partitions without a manifest: nothing of them has been archived yet, or it is lost."""

    @cached_property
    def partitions(self) -> frozenset[TopicPartition]:
        """Return every known partition."""
        return self.unarchived | self.manifests.keys()

    @cached_property
    def topic_ids(self) -> dict[str, str]:
        """Return the topic id of each topic with archived data."""
        return {name.topic: manifest.partition.topic_id for name, manifest in self.manifests.items()}


@dataclass(frozen=True, slots=True)
class _Scan:
    """The result of a scan, for the next one."""

    topics: tuple[TopicManifest, ...]
    wanted: tuple[TopicIdPartition, ...]
    found: SubscribedPartitions
    stored: tuple[StoredManifest, ...] = ()
    """The stored manifest of each of *wanted*."""


class SubscriptionTopics:
    """Scans the bucket for the topics of a subscription. Loaded manifests are kept for the next scan."""

    def __init__(self, bucket: Bucket, subscription: Subscription) -> None:
        self._bucket = bucket
        self._subscription = subscription
        self._scan = _Scan((), (), SubscribedPartitions({}))
        self._warned: set[str] = set()

    def existing(self) -> SubscribedPartitions:
        """
        Return what the bucket has now. Every topic and partition that the subscription names must exist.

        Raises:
            ObjectNotFound: The bucket does not have a topic or partition that is named.
            ConfigError: Several clusters have a topic of this name.
        """
        topics, archived = self._bucket.run(self._read())
        subscription = self._subscription
        missing = subscription.names - {topic.key.topic for topic in topics}
        if missing:
            where = f" of cluster {subscription.cluster}" if subscription.cluster else ""
            raise ObjectNotFound(
                f"the bucket holds no topic named {', '.join(sorted(missing))}{where}",
                hint="`tieringd archive topics` lists what it holds. A topic is listed after its first "
                "segment is archived",
            )
        unknown = set(subscription.assigned) - archived.partitions
        if unknown:
            raise ObjectNotFound(
                f"the bucket holds nothing of {_names(unknown)}",
                hint=f"Archived partitions: {_names(archived.manifests)}",
            )
        if not topics:
            log.warning("no archived topic has such a name", subscribePattern=subscription.pattern)
        if archived.unarchived:
            log.warning(
                "partitions have no manifest: it is lost, or was not stored yet",
                partitions=_names(archived.unarchived),
            )
        return archived

    def current(self) -> SubscribedPartitions:
        """
        Return what the bucket has now, which may be nothing.

        Raises:
            ConfigError: Several clusters have a topic of this name.
        """
        return self._bucket.run(self._read())[1]

    async def _read(self) -> tuple[tuple[TopicManifest, ...], SubscribedPartitions]:
        subscription = self._subscription
        topics = await self._bucket.catalog.readable(subscription.accepts, cluster=subscription.cluster)
        _require_one_cluster(topics)
        self._tell_moved(topics)
        before = self._scan
        wanted = before.wanted if topics == before.topics else self._wanted(topics)
        known = before.stored if wanted is before.wanted else self._known(wanted)
        stored = tuple(await at_once(list(zip(wanted, known, strict=True)), self._load, count=LOADS_AT_ONCE))
        if topics != before.topics or any(map(is_not, stored, known)):
            self._scan = _Scan(topics, wanted, _subscribed(wanted, stored), stored)
        return topics, self._scan.found

    def _wanted(self, topics: Iterable[TopicManifest]) -> tuple[TopicIdPartition, ...]:
        assigned = frozenset(self._subscription.assigned)
        return tuple(
            partition
            for topic in topics
            for partition in topic.partitions()
            if not assigned or partition.topic_partition in assigned
        )

    def _known(self, wanted: Iterable[TopicIdPartition]) -> tuple[StoredManifest | None, ...]:
        known = dict(zip(self._scan.wanted, self._scan.stored, strict=True))
        return tuple(map(known.get, wanted))

    async def _load(self, one: tuple[TopicIdPartition, StoredManifest | None]) -> StoredManifest:
        partition, known = one
        found = await self._bucket.manifests.refreshed(partition, known)
        is_still_unarchived = known is not None and known.manifest is None and found.manifest is None
        return known if known is not None and is_still_unarchived else found

    def _tell_moved(self, topics: Iterable[TopicManifest]) -> None:
        for topic in topics:
            if topic.moved_to and topic.key.topic not in self._warned:
                self._warned.add(topic.key.topic)
                log.warning(
                    "the archive of this topic goes on in another bucket",
                    topic=topic.key.topic,
                    bucket=topic.moved_to,
                )


def _subscribed(wanted: Iterable[TopicIdPartition], stored: Iterable[StoredManifest]) -> SubscribedPartitions:
    manifests: dict[TopicPartition, PartitionManifest] = {}
    unarchived: set[TopicPartition] = set()
    for partition, one in zip(wanted, stored, strict=True):
        if one.manifest is None:
            unarchived.add(partition.topic_partition)
        else:
            manifests[partition.topic_partition] = one.manifest
    return SubscribedPartitions(manifests, frozenset(unarchived))


def _require_one_cluster(topics: Iterable[TopicManifest]) -> None:
    clusters: dict[str, list[str]] = {}
    for topic in topics:
        clusters.setdefault(topic.key.topic, []).append(topic.key.cluster)
    for name, found in clusters.items():
        if len(found) > 1:
            raise ConfigError(
                f"option cluster: topic {name} is archived from the clusters {', '.join(found)}",
                hint="Set the option cluster to one of them",
            )


def _names(partitions: Iterable[TopicPartition]) -> str:
    return ", ".join(str(one) for one in sorted(partitions)) or "none"
