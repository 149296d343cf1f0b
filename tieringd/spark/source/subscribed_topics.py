"""
The topics and partitions of a subscription, as they are in the bucket now.

A scan lists the topic manifests and loads the manifests of the partitions, and reads nothing else. A second
scan loads only manifests that have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class SubscribedPartitions:
    """The archived partitions of a subscription."""

    manifests: Mapping[TopicPartition, PartitionManifest]
    unarchived: frozenset[TopicPartition] = frozenset()
    """Known partitions of which nothing has been archived yet."""

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """Return every known partition."""
        return self.unarchived | self.manifests.keys()

    @property
    def topic_ids(self) -> dict[str, str]:
        """Return the topic id of each topic with archived data."""
        return {name.topic: manifest.partition.topic_id for name, manifest in self.manifests.items()}


class SubscriptionTopics:
    """Scans the bucket for the topics of a subscription. Loaded manifests are kept for the next scan."""

    def __init__(self, bucket: Bucket, subscription: Subscription) -> None:
        self._bucket = bucket
        self._subscription = subscription
        self._known: dict[TopicIdPartition, StoredManifest] = {}
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
        wanted = [
            partition
            for topic in topics
            for partition in topic.partitions()
            if not subscription.assigned or partition.topic_partition in subscription.assigned
        ]
        stored = dict(zip(wanted, await at_once(wanted, self._load, count=LOADS_AT_ONCE), strict=True))
        self._known = stored
        manifests = {
            partition.topic_partition: one.manifest
            for partition, one in stored.items()
            if one.manifest is not None
        }
        names = {partition.topic_partition for partition in wanted}
        return topics, SubscribedPartitions(manifests, frozenset(names - manifests.keys()))

    async def _load(self, partition: TopicIdPartition) -> StoredManifest:
        return await self._bucket.manifests.refreshed(partition, self._known.get(partition))

    def _tell_moved(self, topics: Iterable[TopicManifest]) -> None:
        for topic in topics:
            if topic.moved_to and topic.key.topic not in self._warned:
                self._warned.add(topic.key.topic)
                log.warning(
                    "the archive of this topic goes on in another bucket",
                    topic=topic.key.topic,
                    bucket=topic.moved_to,
                )


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
