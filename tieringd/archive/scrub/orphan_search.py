"""
The search for orphans: the whole bucket is listed, page by page, and compared with the manifests' names.

Objects of one partition lie all over the bucket, by the hash in their names. So all names are collected
first, as hashes of eight bytes, and the listing is compared with them. An object whose name is not among them
is a suspect. Suspects are judged by manifests that are read after they were listed, so an object that was
committed meanwhile is no orphan. If two names have the same hash, an orphan may stay; nothing worse happens.

A search may be interrupted after any page. It moves no object.

`OwnerLookup` returns what is known of a partition now, to judge objects that belong to it by their names. A
manifest that cannot be read makes an owner uncertain, and no object of an uncertain owner is touched.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import xxhash

from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.scrub.spilled_chain import SpilledChain, SpilledTally
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import (
    data_key,
    manifest_key,
    owner_of,
    rewriting_prefix,
    spillover_key,
    topic_key,
    topic_manifest_key,
)
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.spillover import SpilloverManifest, SpilloverName
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies.scrub import (
    INDEX_SUFFIX,
    FaultKind,
    Finding,
    Keep,
    Orphan,
    Owner,
    StoredObject,
    TopicState,
    has_rewritten,
    manifest_findings,
    plan_orphans,
    tables_of,
    twice_named_findings,
)
from tieringd.policies.topic_lifecycle import BEYOND_RETURN
from tieringd.storage.base import ObjectStore
from tieringd.storage.threads import in_thread

_RECORD: Final = re.compile(r"(/rewriting\.)[^/]+$")


class OwnerLookup:
    """Look owners up in the bucket, with new reads for each call."""

    def __init__(self, store: ObjectStore, manifests: ManifestStore) -> None:
        self._manifests = manifests
        self._chain = SpilledChain(store)

    async def owner(self, partition: TopicIdPartition) -> Owner:
        """
        Return what is known of a partition now: all objects that its manifests name.

        Raises:
            StorageUnavailable: The store does not answer; the owner is unknown.
        """
        key = topic_key(partition)
        findings: list[Finding] = []
        manifest = topic = None
        # In this order: a topic is marked as leaving before its manifests are deleted.
        try:
            manifest = (await self._manifests.load(partition)).manifest
        except CorruptDataError as error:
            kind, damaged = FaultKind.MANIFEST_DAMAGED, manifest_key(partition)
            findings.append(Finding(kind, damaged, error.message, partition))
        try:
            topic = await self._manifests.load_topic(key)
            state = _state(topic)
        except CorruptDataError as error:
            state = TopicState.LIVE
            kind, damaged = FaultKind.TOPIC_MANIFEST_DAMAGED, topic_manifest_key(key)
            findings.append(Finding(kind, damaged, error.message))
        uncertain = str(findings[0]) if findings else ""
        owner = Owner(partition, state, manifest, uncertain=uncertain, findings=tuple(findings))
        return await self._with_parts(owner, manifest) if manifest else owner

    async def _with_parts(self, owner: Owner, manifest: PartitionManifest) -> Owner:
        """Return *owner* with all spilled parts, and the faults of these and of *manifest*."""
        rules = manifest_findings(manifest)
        parts: list[SpilloverManifest] = []
        names: list[SpilloverName] = []
        of_parts: list[Finding] = []
        tally = SpilledTally(manifest)
        async for link in self._chain.walk(manifest):
            tally.take(link)
            names.append(link.name)
            parts += [link.part] if link.part else []
            of_parts += [link.finding] if link.finding else []
        uncertain = owner.uncertain or "; ".join(one.detail for one in rules)
        return replace(
            owner,
            parts=tuple(parts),
            part_names=frozenset(names),
            uncertain=uncertain or (str(of_parts[0]) if of_parts else ""),
            findings=(
                *owner.findings,
                *rules,
                *twice_named_findings(manifest, parts),
                *of_parts,
                *tally.findings(),
            ),
        )


def _state(topic: TopicManifest | None) -> TopicState:
    if topic is None:
        return TopicState.UNKNOWN
    if topic.lifecycle in BEYOND_RETURN:
        return TopicState.LEAVING
    return TopicState.LIVE if topic.lifecycle is Lifecycle.LIVE else TopicState.RESTORABLE


@dataclass(slots=True)
class OrphanPage:
    """The result of one page of the listing."""

    orphans: list[Orphan] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    uncertain: dict[TopicIdPartition, str] = field(default_factory=dict)
    """Partitions whose objects cannot be judged, and why."""
    partitions: list[TopicIdPartition] = field(default_factory=list)
    """The partitions whose live manifest is on this page."""
    objects: int = 0
    requests: int = 0
    next_start_after: str | None = None
    """The key after which the next page begins; None after the last page."""


class NamedObjects:
    """The hashes of all object names in a set of manifests, at the time when they were read."""

    def __init__(self) -> None:
        self._hashes = array("Q")
        self.partitions: set[TopicIdPartition] = set()
        """The partitions whose names are all known."""

    def add(self, owner: Owner) -> None:
        """Add all names in an owner's manifests."""
        if owner.manifest is not None and not owner.uncertain:
            self.partitions.add(owner.partition)
        self._hashes.extend(_hash(key) for key in _names(owner))

    def seal(self) -> None:
        """Sort the hashes. Names can be looked up after that."""
        self._hashes = array("Q", sorted(self._hashes))

    def __contains__(self, key: str) -> bool:
        wanted = _hash(_RECORD.sub(r"\1", key.removesuffix(INDEX_SUFFIX)))
        row = bisect_left(self._hashes, wanted)
        return row < len(self._hashes) and self._hashes[row] == wanted


class OrphanSearch:
    """
    Search one bucket.

    A search may resume after any page, with the names collected before the first page.
    """

    def __init__(
        self, store: ObjectStore, manifests: ManifestStore, *, grace_ms: int, ages_ms: Callable[[], int]
    ) -> None:
        self._store = store
        self._owners = OwnerLookup(store, manifests)
        self._ages_ms = ages_ms
        self.grace_ms = grace_ms
        """A younger object is no orphan. *ages_ms* returns the current time for computing ages."""

    async def names(self, partitions: Iterable[TopicIdPartition]) -> NamedObjects:
        """
        Return the names in the manifests of *partitions*, as they are now.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        named = NamedObjects()
        for partition in partitions:
            await self.add_names(named, partition)
        await in_thread(named.seal)
        return named

    async def add_names(self, named: NamedObjects, partition: TopicIdPartition) -> int:
        """
        Add the names in the manifests of one partition to *named*; return the requests.

        Raises:
            StorageUnavailable: The store does not answer, and nothing was added.
        """
        owner = await self._owners.owner(partition)
        await in_thread(named.add, owner)
        return 2 + 2 * len(owner.part_names)

    async def pages(
        self, named: NamedObjects, *, is_ours: Callable[[TopicIdPartition], bool], prefix: str = ""
    ) -> AsyncIterator[OrphanPage]:
        """Yield all pages, see `page`."""
        start_after: str | None = None
        while True:
            page = await self.page(named, start_after=start_after, is_ours=is_ours, prefix=prefix)
            yield page
            start_after = page.next_start_after
            if start_after is None:
                return

    async def page(
        self,
        named: NamedObjects,
        *,
        start_after: str | None,
        is_ours: Callable[[TopicIdPartition], bool] = lambda _: True,
        prefix: str = "",
    ) -> OrphanPage:
        """
        List the next page, and judge the objects of wanted partitions that are not *named*.

        *is_ours* says which partitions are wanted. *prefix* limits the listed keys: several searches may
        divide a bucket.

        Raises:
            StorageUnavailable: The store does not answer; the page counts as not listed.
        """
        listed = await self._store.list_page(prefix, start_after=start_after)
        page = OrphanPage(objects=len(listed.objects), requests=1, next_start_after=listed.next_start_after)
        suspects: defaultdict[TopicIdPartition, list[StoredObject]] = defaultdict(list)
        for info in listed.objects:
            partition = owner_of(info.key)
            if partition is None or not is_ours(partition):
                continue
            if info.key == manifest_key(partition):
                page.partitions.append(partition)
            # Young objects are mostly committed soon, so no manifest is read for them.
            is_young = info.modified_ms + self.grace_ms > self._ages_ms()
            if info.key not in named and not (is_young and partition in named.partitions):
                suspects[partition].append(StoredObject(info.key, info.size_bytes, info.modified_ms))
        for partition, objects in suspects.items():
            await self._judge(page, partition, objects)
        return page

    async def still_orphans(
        self, partition: TopicIdPartition, objects: Iterable[StoredObject]
    ) -> dict[str, Orphan]:
        """
        Judge *objects* of one partition again, by manifests read now. Return the orphans by their keys.

        Raises:
            StorageUnavailable: The store does not answer; no object may be touched.
        """
        owner = await self._owners.owner(partition)
        plan = plan_orphans(owner, objects, grace_ms=self.grace_ms, now_ms=self._ages_ms())
        return {one.stored.key: one for one in plan.orphans}

    async def _judge(
        self, page: OrphanPage, partition: TopicIdPartition, objects: list[StoredObject]
    ) -> None:
        owner = await self._owners.owner(partition)
        page.requests += 2 + 2 * len(owner.part_names)
        plan = plan_orphans(owner, objects, grace_ms=self.grace_ms, now_ms=self._ages_ms())
        page.orphans += plan.orphans
        reasons = {reason for _, reason in plan.kept}
        if Keep.UNCERTAIN in reasons:
            page.uncertain[partition] = owner.uncertain
        if Keep.NO_MANIFEST in reasons:
            page.findings.append(
                Finding(
                    FaultKind.MANIFEST_MISSING,
                    manifest_key(partition),
                    "the manifest is missing, but the bucket has objects of the partition",
                    partition,
                )
            )
        if Keep.BEFORE_MANIFEST in reasons and owner.manifest is not None:
            older = sum(reason is Keep.BEFORE_MANIFEST for _, reason in plan.kept)
            page.findings.append(
                Finding(
                    FaultKind.MANIFEST_MISSING,
                    manifest_key(partition),
                    f"an earlier manifest is missing: {older} objects are older than this one, which begins "
                    f"at offset {owner.manifest.start_offset} and names none of them",
                    partition,
                )
            )
        if owner.topic is TopicState.UNKNOWN and owner.manifest is not None:
            key = topic_manifest_key(topic_key(partition))
            page.findings.append(
                Finding(
                    FaultKind.TOPIC_MANIFEST_MISSING,
                    key,
                    "the topic manifest is missing, but the bucket has manifests of its partitions",
                )
            )


def _names(owner: Owner) -> Iterator[str]:
    """
    Yield the keys that an owner's manifests name.

    An index is covered by the key of its data object, and records of rewritings by their common prefix.
    """
    manifest = owner.manifest
    if manifest is None or owner.uncertain:
        return
    yield manifest_key(owner.partition)
    for name in owner.part_names:
        yield spillover_key(owner.partition, name)
    for table in tables_of(owner):
        for segment in table:
            yield data_key(owner.partition, segment)
    if any(map(has_rewritten, tables_of(owner))):
        yield rewriting_prefix(owner.partition)


def _hash(key: str) -> int:
    return xxhash.xxh64_intdigest(key.encode())
