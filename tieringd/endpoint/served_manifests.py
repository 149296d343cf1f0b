"""
The manifests that an archive endpoint reads from: each no older than the sync interval.

A manifest is checked again when a client needs it and the last check is too old, so a partition without
readers costs nothing. Only its version is read if it did not change. While the store is unavailable the
last known manifest is served. Reading then shows whether the objects that it names still exist.

`ServedTopics` holds the topics, by name and by id, and no older than the sync interval. It lists the
bucket when a client asks and the last listing is too old, and reads only topic manifests that changed.
While the store is unavailable, it serves the last listing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal
from uuid import NAMESPACE_OID, UUID, uuid5

import structlog

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.errors import ConfigError, StorageUnavailable, TieringError
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.topic_lifecycle import NamedTopics, choose_topics
from tieringd.storage.at_once import at_once
from tieringd.storage.single_flight import Flight, SingleFlight
from tieringd.storage.threads import in_steps
from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)

_PATIENCE_SECONDS: Final = 3.0
"""How long a client waits for a newer topic list or manifest if an older one is known."""
_UUID_BYTES = 16
_NO_CLUSTER = "tieringd-archive"
"""The cluster id for topics of no cluster, or of several."""

_RETRY_SECONDS: Final = 1.0
"""How long a failed read is not repeated, as many clients may ask."""
_FORGOTTEN_AFTER_SECONDS: Final = 3600.0
KEPT_MAX: Final = 2048
"""How many manifests are kept. A manifest of a long history is large."""


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
        """Return how many partitions it has. Some of them may have no archived record."""
        return self.manifest.partition_count

    def partition(self, number: int) -> TopicIdPartition | None:
        """Return one of its partitions, or None if it has no partition of this number."""
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
        self._listings: SingleFlight[Literal["topics"], None] = SingleFlight(
            lambda key: f"listing the {key} was cancelled: the endpoint is closed"
        )
        self._listed_at: float | None = None
        self._known_at = -math.inf
        """When the last listing that succeeded was begun."""
        self._failed_at = -math.inf
        self._by_name: dict[str, ServedTopic] = {}
        self._by_id: dict[UUID, ServedTopic] = {}
        self._contested: Mapping[str, tuple[str, ...]] = {}

    async def start(self) -> None:
        """
        List the bucket for the first time.

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
                f"the bucket has topics of the same name from several clusters: {names}",
                hint="Choose a cluster with --from-cluster, and serve each of the others by its own endpoint",
            )
        self._take(chosen)

    @property
    def cluster_id(self) -> str:
        """Return the id of the archived cluster, so that its clients find the same id here."""
        clusters = {one.manifest.key.cluster for one in self._by_name.values()}
        if self._from_cluster is not None:
            return self._from_cluster
        return clusters.pop() if len(clusters) == 1 else _NO_CLUSTER

    async def ensure_fresh(self) -> None:
        """Make sure that the listing is no older than the interval, if the store answers in time."""
        now = asyncio.get_running_loop().time()
        is_recent = self._listed_at is not None and now - self._listed_at < self._interval_seconds
        if is_recent and "topics" not in self._listings:
            return
        listing = self._listings.join("topics", self._refresh)
        # A slow or unavailable store does not block clients: they get the last listing.
        await asyncio.wait({listing.task}, timeout=_PATIENCE_SECONDS)

    async def ensure_newest(self) -> None:
        """
        Make sure that the listing is no older than a second, because another endpoint knows a topic anew.

        Raises:
            StorageUnavailable: The bucket's topics cannot be listed now.
        """
        since = asyncio.get_running_loop().time() - _RETRY_SECONDS
        while self._known_at < since:
            asked_at = asyncio.get_running_loop().time()
            await self._listings.arrived(self._listings.join("topics", self._refresh))
            if self._failed_at >= asked_at:
                raise StorageUnavailable("the bucket's topics cannot be listed now")

    async def close(self) -> None:
        """Cancel the listing that is running."""
        await self._listings.close()

    async def _refresh(self) -> None:
        begun_at = asyncio.get_running_loop().time()
        try:
            await self._registry.refresh(None)
        except TieringError as error:
            self._failed_at = asyncio.get_running_loop().time()
            log.warning("the bucket's topics cannot be listed; serving those known", error=str(error))
        else:
            self._known_at = begun_at
            self._take(self._chosen())
        finally:
            # Set also after a failure, and at its end: the store is not asked again for every client.
            self._listed_at = asyncio.get_running_loop().time()

    def by_name(self, name: str) -> ServedTopic | None:
        """Return the topic of this name."""
        return self._by_name.get(name)

    def by_id(self, topic_id: UUID) -> ServedTopic | None:
        """Return the topic with this id. Older incarnations are not served."""
        return self._by_id.get(topic_id)

    def find(self, topic: str | UUID) -> ServedTopic | None:
        """Return a topic by the name or id in a request."""
        return self.by_id(topic) if isinstance(topic, UUID) else self.by_name(topic)

    def all(self) -> tuple[ServedTopic, ...]:
        """Return every topic, by name."""
        return tuple(self._by_name.values())

    def _chosen(self) -> NamedTopics:
        before = {name: one.manifest.key.cluster for name, one in self._by_name.items()}
        return choose_topics(self._registry.manifests, cluster=self._from_cluster, before=before)

    def _take(self, chosen: NamedTopics) -> None:
        if self._listed_at is None:
            self._listed_at = asyncio.get_running_loop().time()
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
    """Return a topic's id. For topics of brokers before 2.8, which had none, it is derived and stable."""
    key = manifest.key
    try:
        data = base64.urlsafe_b64decode(key.topic_id + "==")
    except binascii.Error:
        data = b""
    if len(data) != _UUID_BYTES or not any(data):
        return uuid5(NAMESPACE_OID, f"{key.cluster}/{key.topic}/{key.topic_id}")
    return UUID(bytes=data)


@dataclass(eq=False, slots=True)
class _ServedPartition:
    """The state of one partition."""

    stored: StoredManifest | None = None
    checked_at: float = 0.0
    """When the last read ended."""
    known_at: float = -math.inf
    """When the last read that succeeded began: *stored* was in the bucket then."""
    asked_at: float = 0.0
    error: TieringError | None = None
    """The error of the last read, if it failed."""
    is_late: bool = False
    """Whether a caller timed out on the running read. Later callers do not wait for it."""
    waiting: set[asyncio.Event] = field(default_factory=set)


class ServedPartitions:
    """Manifests by partition. Belongs to one event loop."""

    def __init__(
        self,
        manifests: ManifestStore,
        *,
        interval_seconds: float,
        at_once: int = 16,
        kept_max: int = KEPT_MAX,
    ) -> None:
        """Keep the arguments. *at_once* manifests are read concurrently, and about *kept_max* are kept."""
        self._manifests = manifests
        self._at_once = at_once
        self._kept_max = kept_max
        self._interval_seconds = interval_seconds
        self._known: dict[TopicIdPartition, _ServedPartition] = {}
        self._flights: SingleFlight[TopicIdPartition, StoredManifest] = SingleFlight(
            lambda _: "reading a manifest was cancelled: the endpoint is closed"
        )
        self._reading = asyncio.Semaphore(at_once)
        self.is_ending = False
        """Whether waiting for changes should end."""

    def known(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Return the last known manifest, without waiting, or None before the first read."""
        known = self._known.get(partition)
        return None if known is None or known.stored is None else _manifest_of(partition, known.stored)

    def read_before(self) -> list[TopicIdPartition]:
        """Return the partitions whose manifests are known."""
        return [partition for partition, known in self._known.items() if known.stored is not None]

    async def manifest(self, partition: TopicIdPartition) -> PartitionManifest:
        """
        Return a partition's manifest, or an empty one if nothing of the partition is archived.

        Raises:
            StorageUnavailable: No manifest is known yet, and the store does not answer.
            CorruptDataError: No manifest is known yet, and the stored bytes are no manifest.
        """
        now = asyncio.get_running_loop().time()
        known = self._entry(partition, now)
        if known.stored is None:
            if known.error is not None and now - known.checked_at < _RETRY_SECONDS:
                raise StorageUnavailable(f"the manifest of {partition} could not be read") from known.error
            return _manifest_of(partition, await self._flights.arrived(self._fly(partition, known)))
        if now - known.checked_at >= self._interval_seconds:
            flight = self._fly(partition, known)
            if not known.is_late:
                await asyncio.wait({flight.task}, timeout=_PATIENCE_SECONDS)
                known.is_late = not flight.task.done()
        return _manifest_of(partition, known.stored)

    async def ensure_fresh(self, partitions: Iterable[TopicIdPartition]) -> None:
        """
        Make sure that the manifests of *partitions* are no older than the interval, many concurrently.

        A manifest that cannot be read stays as it was. A caller that needs it gets the error from `manifest`.
        """
        now = asyncio.get_running_loop().time()

        async def refresh(partition: TopicIdPartition) -> None:
            with suppress(TieringError):
                await self.manifest(partition)

        due = [one async for one in in_steps(dict.fromkeys(partitions)) if self._is_due(one, now)]
        await at_once(due, refresh, count=self._at_once)

    async def size_bytes(self, partition: TopicIdPartition) -> int:
        """
        Return the archived bytes of a partition.

        A manifest that is not known yet is read but not kept, because a client may ask for all partitions.

        Raises:
            StorageUnavailable: The store does not answer.
            CorruptDataError: The stored bytes are no manifest.
        """
        known = self._known.get(partition)
        if known is not None and known.stored is not None:
            return (await self.manifest(partition)).size_bytes
        async with self._reading:
            stored = await self._manifests.load(partition)
        return _manifest_of(partition, stored).size_bytes

    async def newest(self, partition: TopicIdPartition) -> PartitionManifest:
        """
        Return the manifest as stored now, because an object that the last one names is gone.

        Raises:
            StorageUnavailable: The store does not answer.
            CorruptDataError: The stored bytes are no manifest.
        """
        known = self._entry(partition, asyncio.get_running_loop().time())
        return _manifest_of(partition, await self._flights.arrived(self._fly(partition, known)))

    async def reaching(self, partition: TopicIdPartition, offset: int) -> PartitionManifest:
        """
        Return the known manifest, or the one stored since the call if the known one ends before *offset*.

        A client may have learned the offset from a newer manifest, at another endpoint. So an older one must
        not make it out of range. The manifest is not read again within a second of the last read: the caller
        waits until then.

        Raises:
            StorageUnavailable: The store does not answer.
            CorruptDataError: The stored bytes are no manifest.
        """
        return await self._since_now(
            partition, unless=lambda known: offset <= known.next_offset, pause_seconds=_RETRY_SECONDS
        )

    async def past_epoch(self, partition: TopicIdPartition, leader_epoch: int) -> PartitionManifest:
        """
        Return the known manifest, or the one stored since the call if no epoch follows *leader_epoch* in it.

        A client may have read on at another endpoint, by a newer manifest. Where an older one ends is not
        where the epoch does: the client would take its log for cut off there.

        Raises:
            StorageUnavailable: The store does not answer.
            CorruptDataError: The stored bytes are no manifest.
        """
        return await self._since_now(
            partition, unless=lambda known: bool(known.epochs) and leader_epoch < known.epochs[-1][0]
        )

    async def _since_now(
        self,
        partition: TopicIdPartition,
        *,
        unless: Callable[[PartitionManifest], bool],
        pause_seconds: float = 0.0,
    ) -> PartitionManifest:
        """Return the known manifest, or one stored since the call, *pause_seconds* after the last read."""
        now = asyncio.get_running_loop().time
        called_at, manifest = now(), await self.manifest(partition)
        while not unless(manifest):
            known = self._entry(partition, now())
            if known.known_at >= called_at:
                break
            age = now() - known.checked_at
            if known.error is not None and age < _RETRY_SECONDS:
                raise StorageUnavailable(f"the manifest of {partition} could not be read") from known.error
            await asyncio.sleep(max(0.0, pause_seconds - age))
            # A read that is under way began before the call, perhaps.
            manifest = await self.newest(partition)
        return manifest

    @contextmanager
    def watching(self, partitions: Iterable[TopicIdPartition]) -> Iterator[asyncio.Event]:
        """Give an event that is set when the manifest of one of *partitions* has changed."""
        changed = asyncio.Event()
        now = asyncio.get_running_loop().time()
        watched = [self._entry(one, now) for one in partitions]
        for known in watched:
            known.waiting.add(changed)
        try:
            yield changed
        finally:
            for known in watched:
                known.waiting.discard(changed)

    def end_waits(self) -> None:
        """Wake all watchers for a last read. After that they do not wait any more."""
        self.is_ending = True
        for known in self._known.values():
            for waiting in known.waiting:
                waiting.set()

    async def close(self) -> None:
        """Cancel the reads that are running."""
        await self._flights.close()

    def _entry(self, partition: TopicIdPartition, now: float) -> _ServedPartition:
        known = self._known.pop(partition, None)
        if known is None:
            self._forget(now)
            known = _ServedPartition()
        # Moved to the end: the least recently used come first.
        self._known[partition] = known
        known.asked_at = now
        return known

    def _is_due(self, partition: TopicIdPartition, now: float) -> bool:
        known = self._known.get(partition)
        return known is None or known.stored is None or now - known.checked_at >= self._interval_seconds

    def _forget(self, now: float) -> None:
        """Make room for one more: drop entries that are unused for an hour, or the least recently used."""
        spare = len(self._known) + 1 - self._kept_max
        for partition, known in tuple(self._known.items()):
            if spare <= 0 and now - known.asked_at <= _FORGOTTEN_AFTER_SECONDS:
                break
            if partition not in self._flights and not known.waiting:
                del self._known[partition]
                spare -= 1

    def _fly(
        self, partition: TopicIdPartition, known: _ServedPartition
    ) -> Flight[TopicIdPartition, StoredManifest]:
        return self._flights.join(partition, partial(self._read, partition, known))

    async def _read(self, partition: TopicIdPartition, known: _ServedPartition) -> StoredManifest:
        begun_at = asyncio.get_running_loop().time()
        try:
            found = await self._manifests.refreshed(partition, known.stored)
        except Exception as error:
            known.error = error if isinstance(error, TieringError) else None
            if known.error is not None:
                log.warning("a manifest cannot be read", partition=str(partition), error=str(error))
            raise
        finally:
            known.is_late = False
            # Set also after a failure: the store is not asked again for every client.
            known.checked_at = asyncio.get_running_loop().time()
        is_changed = known.stored is None or found.version != known.stored.version
        known.error, known.stored, known.known_at = None, found, begun_at
        for waiting in known.waiting if is_changed else ():
            waiting.set()
        return found


def _manifest_of(partition: TopicIdPartition, stored: StoredManifest) -> PartitionManifest:
    return stored.manifest or PartitionManifest.begin(partition, start_offset=0)
