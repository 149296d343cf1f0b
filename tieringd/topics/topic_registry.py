"""
The topic registry: the bucket's topic manifests, kept fresh by listing.

One listing returns the versions of a thousand topic manifests; only those that changed are read. So an
operator's `tieringd topic pause` reaches every daemon within a round, and an idle cluster of ten thousand
topics costs ten requests a round.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import structlog

from tieringd.archive.manifest_store import ManifestStore
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import (
    TOPIC_MANIFESTS_PREFIX,
    TopicKey,
    parse_topic_manifest_key,
    topic_key,
)
from tieringd.formats.topic_manifest import Archiving, TieringDefaults, TopicManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.storage.base import ObjectStore
from tieringd.storage.listing import list_objects
from tieringd.topics.each_topic import each_topic

log = structlog.get_logger(__name__)

PATIENCE_SECONDS = 5.0
"""How long the first commit of a partition waits for the manifest of its topic. The store may not take it."""


def partition_counts(partitions: Iterable[TopicIdPartition]) -> dict[TopicKey, int]:
    """Return for each topic of *partitions* one more than its highest partition."""
    # The tuple has a key's fields, and is cheaper to look up ten thousand times.
    counts: dict[tuple[str, str, str], int] = {}
    for one in partitions:
        identity = (one.cluster, one.topic, one.topic_id)
        counts[identity] = max(counts.get(identity, 0), one.partition + 1)
    return {TopicKey(*identity): count for identity, count in counts.items()}


class TopicRegistry:
    """The topic manifests of one cluster, or of all, as last read. One task at a time changes it."""

    def __init__(self, store: ObjectStore, manifests: ManifestStore) -> None:
        self._store = store
        self._manifests = manifests
        self._known: dict[TopicKey, TopicManifest] = {}
        self._versions: dict[TopicKey, str] = {}
        self._damaged: dict[TopicKey, str] = {}
        """The versions of manifests that are damaged, as far as this was logged."""
        self.is_known = False
        """Whether the bucket was ever listed: until then it is not known which topics are paused."""
        self._listed: tuple[str | None, float] | None = None
        """The cluster that was listed last, and when that began, in loop time."""
        self._changed_at = -math.inf
        """When this registry changed a manifest last, in loop time."""
        self._counted_before: dict[TopicKey, int] = {}
        """How many partitions the manifests of topics counted, before this registry made them count more."""
        self._attended: dict[TopicKey, int] = {}
        """How many partitions `ensure` was asked to count, whether it could or not."""
        self._has_attended = asyncio.Event()
        """Set when a topic was attended to, and then replaced."""

    def manifest(self, key: TopicKey) -> TopicManifest | None:
        """Return a topic's manifest as last read; None when there was none."""
        return self._known.get(key)

    def counts(self, partition: TopicIdPartition) -> bool:
        """Say whether the manifest of its topic, as last read, counts *partition*."""
        known = self._known.get(topic_key(partition))
        return known is not None and partition.partition < known.partition_count

    async def is_new(self, partition: TopicIdPartition) -> bool:
        """
        Say whether the manifest of its topic counts *partition*, and none did before this registry.

        Then the bucket most likely has nothing of it. Another daemon may have begun it meanwhile. A topic's
        manifest that is about to be stored is waited for, for some seconds at most: a restore finds topics by
        their manifests, so these come before the manifests of partitions.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not (self.counts(partition) or self._was_attended(partition)):
                    await self._has_attended.wait()
        before = self._counted_before.get(topic_key(partition))
        return before is not None and partition.partition >= before and self.counts(partition)

    def _was_attended(self, partition: TopicIdPartition) -> bool:
        return partition.partition < self._attended.get(topic_key(partition), 0)

    @property
    def manifests(self) -> tuple[TopicManifest, ...]:
        """Return every topic's manifest as last read."""
        return tuple(self._known.values())

    @property
    def has_records(self) -> bool:
        """Say whether the initial values of any topic are recorded."""
        return any(manifest.defaults is not None for manifest in self._known.values())

    def is_paused(self, key: TopicKey) -> bool:
        """Say whether an operator has paused the topic."""
        known = self._known.get(key)
        return known is not None and known.archiving is Archiving.PAUSED

    def is_closed(self, key: TopicKey) -> bool:
        """Say whether archiving is closed for the topic: it is deleted, or its archive was moved."""
        known = self._known.get(key)
        return known is not None and (known.lifecycle is not Lifecycle.LIVE or known.moved_to != "")

    async def refresh(self, cluster: str | None) -> bool:
        """
        Read the topic manifests that changed; return whether any did, or this is the first listing.

        *cluster* limits the listing to one cluster, None lists all; it must be the same each time.

        Raises:
            StorageUnavailable: What was read before stays in force.
        """
        began = _now()
        seen: set[TopicKey] = set()
        is_changed = not self.is_known
        prefix = TOPIC_MANIFESTS_PREFIX if cluster is None else f"{TOPIC_MANIFESTS_PREFIX}{cluster}/topics/"
        async for info in list_objects(self._store, prefix):
            key = parse_topic_manifest_key(info.key)
            if key is not None:
                seen.add(key)
                if self._versions.get(key) != info.version:
                    is_changed |= await self._read(key, info.version)
        for missing in self._known.keys() - seen:
            # A broker that was formatted anew is of another cluster.
            if cluster not in {None, missing.cluster} or await self._is_gone(missing):
                is_changed = True
                del self._known[missing]
                self._versions.pop(missing, None)
                self._counted_before.pop(missing, None)
                self._attended.pop(missing, None)
        self._damaged = {key: version for key, version in self._damaged.items() if key in seen}
        self.is_known = True
        self._listed = cluster, began
        return is_changed

    def take(self, other: TopicRegistry, cluster: str, *, within_seconds: float) -> bool:
        """
        Know what *other* knows, if it has listed *cluster* lately; return whether it has.

        A listing that began before this registry's own last change does not count.
        """
        since = max(_now() - within_seconds, self._changed_at)
        if other._listed is None or other._listed[0] != cluster or other._listed[1] < since:
            return False
        self._known, self._versions = dict(other._known), dict(other._versions)
        self._damaged = dict(other._damaged)
        self.is_known = True
        return True

    async def ensure(self, counts: Mapping[TopicKey, int]) -> bool:
        """
        Ensure that each topic's manifest exists and counts that many partitions. Return whether one did not.

        *counts* are by topic; see `partition_counts`.

        Raises:
            StorageUnavailable: Try again in the next round.
            TopicFaults: These topics' manifests cannot be read or stored; all others are as they have to be.
        """
        lacking: dict[TopicKey, int] = {}
        for key, count in counts.items():
            known = self._known.get(key)
            if known is None or known.partition_count < count:
                lacking[key] = count
                self._counted_before.setdefault(key, known.partition_count if known is not None else 0)

        async def ensure(key: TopicKey) -> None:
            try:
                self._known[key] = await self._manifests.ensure_topic(key, partition_count=lacking[key])
            finally:
                self._attended[key] = lacking[key]
                self._has_attended.set()
                self._has_attended = asyncio.Event()

        await each_topic(lacking, ensure)
        return bool(lacking)

    async def record_defaults(self, key: TopicKey, defaults: TieringDefaults) -> None:
        """
        Record the values that a topic began with, unless they are recorded already.

        Raises:
            StorageUnavailable: Try again in the next round.
        """
        await self.change(key, lambda found: replace(found, defaults=found.defaults or defaults))

    async def record_remote_delete(self, key: TopicKey, *, is_set: bool) -> None:
        """
        Record whether deleting the topic deletes its objects: after the deletion no broker can tell.

        Raises:
            StorageUnavailable: Try again in the next round.
        """
        await self.change(key, lambda found: replace(found, remote_delete=is_set))

    async def change(self, key: TopicKey, change: Callable[[TopicManifest], TopicManifest]) -> TopicManifest:
        """
        Change a topic's manifest, and return it as stored.

        Raises:
            StorageUnavailable: Nothing is known to have changed.
        """
        self._known[key] = await self._manifests.change_topic(key, change)
        self._changed_at = _now()
        return self._known[key]

    async def _is_gone(self, key: TopicKey) -> bool:
        """Ask for one topic's manifest: a listing may be behind, and a paused topic has to stay paused."""
        try:
            return await self._manifests.load_topic(key) is None
        except CorruptDataError:
            return False

    async def _read(self, key: TopicKey, version: str) -> bool:
        """Read a topic's manifest; return whether it differs from the known one."""
        try:
            manifest = await self._manifests.load_topic(key)
        except CorruptDataError as error:
            # It is read again by each refresh, because the bytes may have been damaged on their way here.
            if self._damaged.get(key) != version:
                self._damaged[key] = version
                log.error("topic manifest is damaged", topic=key.topic, error=str(error))  # noqa: TRY400 its text is enough
            return False
        if manifest is None:
            return False
        self._damaged.pop(key, None)
        is_new = self._known.get(key) != manifest
        self._known[key] = manifest
        self._versions[key] = version
        return is_new


def _now() -> float:
    return asyncio.get_running_loop().time()
