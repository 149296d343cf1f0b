"""
The catalog: what a bucket holds, read from the bucket alone.

Topic manifests lie under one prefix and lead to partition manifests. The catalog never writes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from tieringd.archive.manifest_store import ManifestStore
from tieringd.errors import STORE_FAULTS, ConfigError, ObjectNotFound, RetryableError, TieringError
from tieringd.formats.object_keys import TOPIC_MANIFESTS_PREFIX, TopicKey, parse_topic_manifest_key
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.topic_lifecycle import BEYOND_RETURN
from tieringd.storage.at_once import at_once
from tieringd.storage.base import ObjectStore
from tieringd.storage.listing import list_objects

LOADS_AT_ONCE = 16
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class ArchivedTopic:
    """A topic, and the manifests of its partitions that have one."""

    topic: TopicManifest
    partitions: tuple[PartitionManifest, ...]

    @property
    def without_manifest(self) -> tuple[TopicIdPartition, ...]:
        """
        Return the counted partitions that have no manifest: it is lost, or was not stored yet.

        A purge deletes manifests, so a topic that is purged lacks none.
        """
        if self.topic.lifecycle in BEYOND_RETURN:
            return ()
        found = {one.partition for one in self.partitions}
        return tuple(one for one in self.topic.partitions() if one not in found)


OnFault: TypeAlias = Callable[[TopicKey, TieringError], None]
"""Takes a topic that cannot be read, and why."""
OnPartitionFault: TypeAlias = Callable[[TopicIdPartition, TieringError], None]
"""Takes a partition that cannot be read, and why."""


def raised(_: TopicKey | TopicIdPartition, error: TieringError) -> None:
    """Raise *error*: the `OnFault` of a caller that needs every topic, or every partition."""
    raise error


@contextmanager
def _faults_go_to(on_fault: Callable[[_Key, TieringError], None], key: _Key) -> Iterator[None]:
    """Give a fault of this one object to *on_fault*; what the whole store suffers from is raised."""
    try:
        yield
    except (RetryableError, *STORE_FAULTS):
        raise
    except TieringError as error:
        on_fault(key, error)


class Catalog:
    """List and find what a bucket holds. Keeps no state."""

    def __init__(self, store: ObjectStore, manifests: ManifestStore) -> None:
        self._store = store
        self._manifests = manifests

    async def topics(
        self, accepts: Callable[[TopicKey], bool] = lambda _: True, *, on_fault: OnFault = raised
    ) -> AsyncIterator[TopicManifest]:
        """
        Yield every topic of every cluster with at least one archived partition, by cluster and name.

        Only the manifests of topics that *accepts* takes are loaded. A topic whose manifest cannot be read
        is given to *on_fault*, and the others go on.

        Raises:
            TieringError: A manifest cannot be read, and there is no *on_fault*.
            RetryableError: The store is away. So do the `STORE_FAULTS` end the walk.
        """
        async for manifest in self.every_topic(accepts, on_fault=on_fault):
            if manifest.partition_count:
                yield manifest

    async def every_topic(
        self, accepts: Callable[[TopicKey], bool] = lambda _: True, *, on_fault: OnFault = raised
    ) -> AsyncIterator[TopicManifest]:
        """Yield every topic that has a manifest, as `topics` does, even with no archived partition."""
        async for key in self._topic_keys():
            manifest = None
            with _faults_go_to(on_fault, key):
                manifest = await self._manifests.load_topic(key) if accepts(key) else None
            if manifest is not None:
                yield manifest

    async def archived_topics(
        self,
        accepts: Callable[[TopicKey], bool] = lambda _: True,
        *,
        with_history: bool = False,
        on_fault: OnFault = raised,
        on_partition_fault: OnPartitionFault = raised,
    ) -> AsyncIterator[ArchivedTopic]:
        """
        Yield the topics that `topics` yields, with their partitions.

        *with_history* adds the spilled segments. A partition whose manifest cannot be read is given to
        *on_partition_fault*, and left out. Without it, its whole topic is given to *on_fault*.
        """
        async for topic in self.topics(accepts, on_fault=on_fault):
            found = None
            with _faults_go_to(on_fault, topic.key):
                live = await self.with_partitions(topic, on_fault=on_partition_fault)
                found = await self.with_history(live, on_fault=on_partition_fault) if with_history else live
            if found is not None:
                yield found

    async def readable(
        self, accepts: Callable[[str], bool], *, cluster: str | None = None
    ) -> tuple[TopicManifest, ...]:
        """
        Return the readable topics whose names *accepts* takes, by cluster and name.

        If a cluster has several incarnations of a topic, `topic` and this method choose the same one.
        """
        found: dict[tuple[str, str], list[TopicManifest]] = {}
        for manifest in await self.readable_incarnations(accepts, cluster=cluster):
            found.setdefault((manifest.key.cluster, manifest.key.topic), []).append(manifest)
        return tuple(_latest(found[name]) for name in sorted(found))

    async def readable_incarnations(
        self, accepts: Callable[[str], bool], *, cluster: str | None = None
    ) -> tuple[TopicManifest, ...]:
        """
        Return every readable incarnation of the topics whose names *accepts* takes, in the order of the keys.

        A topic that is being purged, or was purged, is not readable. Only manifests of accepted names are
        loaded.
        """
        keys = [
            key async for key in self._topic_keys() if cluster in {None, key.cluster} and accepts(key.topic)
        ]
        return tuple(
            manifest
            for manifest in await at_once(keys, self._manifests.load_topic, count=LOADS_AT_ONCE)
            if manifest is not None and manifest.partition_count and manifest.lifecycle not in BEYOND_RETURN
        )

    async def topic(
        self, name: str, *, cluster: str | None = None, own_cluster: str | None = None
    ) -> ArchivedTopic:
        """
        Return a topic of *cluster*, or of any where it is None, with its partitions.

        Where several clusters have a topic of this name, that of *own_cluster* is returned: a cluster that
        was restored under a new id has the topics of the old one beside its own. Of several incarnations it
        is the latest one that is not purged.

        Raises:
            ObjectNotFound: The bucket has no topic of this name.
            ConfigError: Several clusters have a topic of this name, and none is told to choose by.
        """
        found = [
            manifest
            async for key in self._topic_keys()
            if key.topic == name
            and cluster in {None, key.cluster}
            and (manifest := await self._manifests.load_topic(key)) is not None
            and manifest.partition_count
        ]
        if not found:
            raise ObjectNotFound(
                f"the bucket holds no topic named {name}{f' of cluster {cluster}' if cluster else ''}",
                hint="`tieringd archive topics` lists what it holds",
            )
        # A purged topic of another cluster leaves the name to the cluster that still has one.
        readable = [one for one in found if one.lifecycle not in BEYOND_RETURN] or found
        clusters = sorted({one.key.cluster for one in readable})
        if own_cluster in clusters:
            readable = [one for one in readable if one.key.cluster == own_cluster]
        elif len(clusters) > 1:
            raise ConfigError(
                f"several clusters have a topic named {name} in the bucket: {', '.join(clusters)}",
                hint=f"Choose one: --from-cluster {' or --from-cluster '.join(clusters)}",
            )
        return await self.with_partitions(_latest(readable))

    async def incarnation(self, name: str, topic_id: str) -> TopicManifest:
        """
        Return the manifest of one incarnation of a topic, in any lifecycle state.

        Raises:
            ObjectNotFound: The bucket has no incarnation with this id.
        """
        ids: list[str] = []
        async for key in self._topic_keys():
            if key.topic == name:
                ids.append(key.topic_id)
                manifest = await self._manifests.load_topic(key) if key.topic_id == topic_id else None
                if manifest is not None:
                    return manifest
        raise ObjectNotFound(
            f"the bucket holds no topic named {name} with the id {topic_id}; ids of that name: "
            f"{', '.join(ids) or 'none'}"
        )

    async def with_partitions(
        self, topic: TopicManifest, *, on_fault: OnPartitionFault = raised
    ) -> ArchivedTopic:
        """Return *topic* with the manifests of its partitions that can be read."""
        found: dict[TopicIdPartition, PartitionManifest] = {}

        async def load(partition: TopicIdPartition) -> None:
            with _faults_go_to(on_fault, partition):
                stored = await self._manifests.load(partition)
                if stored.manifest is not None:
                    found[partition] = stored.manifest

        await at_once(topic.partitions(), load, count=LOADS_AT_ONCE)
        return ArchivedTopic(topic, tuple(found[one] for one in topic.partitions() if one in found))

    async def with_history(
        self, topic: ArchivedTopic, *, on_fault: OnPartitionFault = raised
    ) -> ArchivedTopic:
        """
        Return *topic* with all segments of its partitions, including those in spillover manifests.

        A partition with a spillover manifest that cannot be read is given to *on_fault*, and left out.
        """
        whole: list[PartitionManifest] = []
        for manifest in topic.partitions:
            with _faults_go_to(on_fault, manifest.partition):
                whole.append(await self._manifests.spillovers.with_history(manifest))
        return replace(topic, partitions=tuple(whole))

    async def partition(
        self, name: str, number: int, *, cluster: str | None = None, own_cluster: str | None = None
    ) -> PartitionManifest:
        """
        Return the manifest of one partition of a topic that is chosen as `topic` does.

        Raises:
            ObjectNotFound: The bucket has no such topic, or nothing of this partition.
            ConfigError: Several clusters have a topic of this name, and none is told to choose by.
        """
        archived = await self.topic(name, cluster=cluster, own_cluster=own_cluster)
        for manifest in archived.partitions:
            if manifest.partition.partition == number:
                return manifest
        numbers = ", ".join(str(one.partition.partition) for one in archived.partitions) or "none"
        raise ObjectNotFound(f"the bucket holds nothing of {name}-{number}; partitions archived: {numbers}")

    async def _topic_keys(self) -> AsyncIterator[TopicKey]:
        async for info in list_objects(self._store, TOPIC_MANIFESTS_PREFIX):
            key = parse_topic_manifest_key(info.key)
            if key is not None:
                yield key


def _latest(incarnations: Iterable[TopicManifest]) -> TopicManifest:
    """Return the latest of several incarnations. A purged one is returned only if all are purged."""
    return max(
        incarnations, key=lambda manifest: (manifest.lifecycle not in BEYOND_RETURN, manifest.created_at_ms)
    )
