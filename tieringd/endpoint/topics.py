"""
The topics that an archive endpoint serves: by name, by id, and no older than the sync interval.

The bucket is listed when somebody asks and the last look is too old; only topic manifests that
changed are read. While the store is away, what was seen last is served.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import NAMESPACE_OID, UUID, uuid5

import structlog

from tieringd.errors import ConfigError, TieringError
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.served_topics import choose_topics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieringd.formats.topic_manifest import TopicManifest
    from tieringd.policies.served_topics import NamedTopics
    from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)

_PATIENCE_SECONDS: Final = 3.0
"""How long a client waits for a newer list of topics or a newer manifest where an older one is known."""
_UUID_BYTES = 16
_NO_CLUSTER = "tieringd-archive"
"""The id of a cluster that is none, or several."""


@dataclass(frozen=True, slots=True)
class ServedTopic:
    """A topic, and the id by which clients know it."""

    manifest: TopicManifest
    topic_id: UUID

    @property
    def name(self) -> str:
        """Return its name."""
        return self.manifest.key.topic

    @property
    def partition_count(self) -> int:
        """Return how many partitions it has; of some nothing may be archived."""
        return self.manifest.partition_count

    def partition(self, number: int) -> TopicIdPartition | None:
        """Return one of its partitions, if it has that one."""
        if not 0 <= number < self.manifest.partition_count:
            return None
        key = self.manifest.key
        return TopicIdPartition(key.cluster, key.topic, key.topic_id, number)


class ServedTopics:
    """The topics of one cluster, or of all. Belongs to one event loop."""

    def __init__(self, registry: TopicRegistry, *, from_cluster: str | None, interval_seconds: float) -> None:
        self._registry = registry
        self._from_cluster = from_cluster
        self._interval_seconds = interval_seconds
        self._flight: asyncio.Task[None] | None = None
        self._looked_at: float | None = None
        self._by_name: dict[str, ServedTopic] = {}
        self._by_id: dict[UUID, ServedTopic] = {}
        self._contested: Mapping[str, tuple[str, ...]] = {}

    async def start(self) -> None:
        """
        Look at the bucket for the first time.

        Raises:
            ConfigError: A name stands for topics of several clusters, or the cluster is not in the bucket.
            StorageUnavailable: The store does not answer.
        """
        await self._registry.refresh(None)
        clusters = sorted({one.key.cluster for one in self._registry.manifests})
        if self._from_cluster is not None and self._from_cluster not in clusters:
            raise ConfigError(
                f"the bucket holds nothing of cluster {self._from_cluster}",
                hint=f"It holds topics of: {', '.join(clusters) or 'none'}",
            )
        chosen = self._chosen()
        if chosen.contested:
            names = "; ".join(
                f"{topic} of {' and '.join(owners)}" for topic, owners in chosen.contested.items()
            )
            raise ConfigError(
                f"the bucket holds topics of the same name of several clusters: {names}",
                hint="Choose a cluster with --from-cluster, and serve others from endpoints of their own",
            )
        self._take(chosen)

    @property
    def cluster_id(self) -> str:
        """Return the id of the cluster that was archived, so that its clients find the same one here."""
        clusters = {one.manifest.key.cluster for one in self._by_name.values()}
        if self._from_cluster is not None:
            return self._from_cluster
        return clusters.pop() if len(clusters) == 1 else _NO_CLUSTER

    async def look(self) -> None:
        """See that what is known is no older than the interval, as far as the store lets us."""
        now = asyncio.get_running_loop().time()
        if self._flight is None:
            if self._looked_at is not None and now - self._looked_at < self._interval_seconds:
                return
            self._flight = asyncio.create_task(self._refresh())
            self._flight.add_done_callback(self._land)
        # A store that is slow or away keeps nobody waiting: there is what was seen last.
        await asyncio.wait({self._flight}, timeout=_PATIENCE_SECONDS)

    async def close(self) -> None:
        """End what is under way."""
        if self._flight is not None:
            self._flight.cancel()
            await asyncio.wait({self._flight})

    async def _refresh(self) -> None:
        try:
            await self._registry.refresh(None)
        except TieringError as error:
            log.warning("the bucket's topics cannot be listed; serving those known", error=str(error))
        else:
            self._take(self._chosen())

    def _land(self, flight: asyncio.Task[None]) -> None:
        self._flight = None
        # Also after a failure, and from its end: the store is not asked again for every client.
        self._looked_at = asyncio.get_running_loop().time()
        if not flight.cancelled():
            # A fault of ours: the loop's exception handler reports it.
            flight.result()

    def by_name(self, name: str) -> ServedTopic | None:
        """Return the topic that a name stands for."""
        return self._by_name.get(name)

    def by_id(self, topic_id: UUID) -> ServedTopic | None:
        """Return the topic with this id; an older incarnation is not served."""
        return self._by_id.get(topic_id)

    def find(self, topic: str | UUID) -> ServedTopic | None:
        """Return a topic by what a request has."""
        return self.by_id(topic) if isinstance(topic, UUID) else self.by_name(topic)

    def all(self) -> tuple[ServedTopic, ...]:
        """Return every topic, by name."""
        return tuple(self._by_name.values())

    def _chosen(self) -> NamedTopics:
        before = {name: one.manifest.key.cluster for name, one in self._by_name.items()}
        return choose_topics(self._registry.manifests, cluster=self._from_cluster, before=before)

    def _take(self, chosen: NamedTopics) -> None:
        if self._looked_at is None:
            self._looked_at = asyncio.get_running_loop().time()
        for name in chosen.contested.keys() - self._contested.keys():
            served = chosen.topics.get(name)
            log.warning(
                "several clusters have a topic of this name",
                topic=name,
                clusters=chosen.contested[name],
                served=None if served is None else served.key.cluster,
            )
        self._contested = chosen.contested
        topics = [ServedTopic(manifest, _id_of(manifest)) for manifest in chosen.topics.values()]
        self._by_name = {one.name: one for one in topics}
        self._by_id = {one.topic_id: one for one in topics}


def _id_of(manifest: TopicManifest) -> UUID:
    """Return a topic's id; brokers before 2.8 gave none, and clients need one that stays the same."""
    key = manifest.key
    try:
        data = base64.urlsafe_b64decode(key.topic_id + "==")
    except binascii.Error:
        data = b""
    if len(data) != _UUID_BYTES or not any(data):
        return uuid5(NAMESPACE_OID, f"{key.cluster}/{key.topic}/{key.topic_id}")
    return UUID(bytes=data)
