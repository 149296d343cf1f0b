"""
Move archives to another bucket, prefix or provider: copy, switch, and verify.

Daemons go on uploading while the mover copies, pass after pass, until little is left. Then each topic is
switched: its topic manifest says where it went, its partitions are closed in the source one after the
other, and the target gets exactly the closed versions. A daemon whose configuration names the target
goes on from there. A daemon whose configuration names the source archives nothing of the topic, and logs
why. Nothing is deleted in the source. Every step leaves a state from which the next call goes on.

A topic may be moved back. The target's topic manifest says that the topic is elsewhere until the switch
begins, so that of two closed archives it is known which one is moved into the other. From then on it names
the target itself, and nothing when all partitions are open there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace

from crc32c import crc32c

from tieringd.archive.catalog import Catalog, OnFault, raised
from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.scrub.segment_inspection import Verifier
from tieringd.errors import (
    ConfigError,
    CorruptDataError,
    ObjectNotFound,
    PreconditionFailed,
    StorageUnavailable,
    TieringError,
)
from tieringd.formats.disk_state import decode_quota_record
from tieringd.formats.object_keys import client_quotas_key, history_link_key
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.reading.history import History
from tieringd.recovery.partition_mover import PartitionCopy, PartitionMover, is_copy
from tieringd.storage.base import IfVersion, ObjectStore
from tieringd.storage.checked_puts import create

SWITCH_BELOW_BYTES = 64 << 20
"""A pass that copied no more than this is the last before the switch: another would find as much again."""
PASSES_MAX = 20
"""If more than that is written all the time, the switch has more to copy, and takes longer."""
_MOVED = (Lifecycle.LIVE, Lifecycle.KEPT)
"""Lifecycle states of topics that are not being deleted from the source."""


@dataclass(frozen=True, slots=True)
class Site:
    """One of the two buckets."""

    store: ObjectStore
    manifests: ManifestStore
    catalog: Catalog
    history: History
    verifier: Verifier
    place: str
    """Its address, for people."""


@dataclass(frozen=True, slots=True)
class MovedPartition:
    """The final state of one partition, or why it could not be copied."""

    copy: PartitionCopy
    is_switched: bool = False
    fault: str = ""


class ArchiveMover:
    """Copy or move topics from one bucket to another. One task at a time uses it."""

    def __init__(
        self,
        source: Site,
        target: Site,
        partitions: PartitionMover,
        *,
        on_progress: Callable[[str, PartitionCopy], None] = lambda *_: None,
        on_fault: OnFault = raised,
    ) -> None:
        """
        Keep the arguments.

        *on_progress* is called after each partition with the name of the pass, *on_fault* with a topic that
        no caller named and that cannot be read.
        """
        self._source = source
        self._target = target
        self._partitions = partitions
        self._on_progress = on_progress
        self._on_fault = on_fault
        self._totals: dict[TopicIdPartition, PartitionCopy] = {}

    def _every_topic(self, names: Collection[str]) -> AsyncIterator[TopicManifest]:
        """Yield the source's topics of these names, or all that can be read."""
        if names:
            return self._source.catalog.every_topic(lambda key: key.topic in names)
        return self._source.catalog.every_topic(on_fault=self._on_fault)

    async def half_purged(self, names: Collection[str]) -> list[TopicManifest]:
        """
        Return topics that were moved to the target and are half purged here.

        *names* limits them; empty means all.
        """
        return [
            one
            async for one in self._every_topic(names)
            if one.lifecycle is Lifecycle.PURGING and one.moved_to == self._target.place
        ]

    async def topics(
        self, names: Collection[str], *, half_purged: Collection[TopicManifest] = ()
    ) -> list[TopicManifest]:
        """
        Return the topics of these names, or all, with the topics whose archives they continue.

        Topics that were deleted, or moved elsewhere, are left out; deleted topics whose archive is kept
        are not. A name that only *half_purged* topics have is not unknown.

        Raises:
            ObjectNotFound: The source has no topic of some name.
            ConfigError: One of the named topics was moved somewhere else before.
        """
        found = [one async for one in self._every_topic(names) if one.lifecycle in _MOVED]
        unknown = set(names) - {one.key.topic for one in (*found, *half_purged)}
        if unknown:
            raise ObjectNotFound(
                f"the source holds no topic named {', '.join(sorted(unknown))}",
                hint="`tieringd archive topics` lists what it holds",
            )
        elsewhere = [one for one in found if one.moved_to not in {"", self._target.place}]
        if names and elsewhere:
            raise ConfigError(
                f"topic {elsewhere[0].key.topic} was moved to {elsewhere[0].moved_to}",
                hint="Copy it from there",
            )
        wanted = {one.key: one for one in found if one not in elsewhere}
        ahead = list(wanted)
        while ahead:
            link = await self._source.history.link_of(ahead.pop())
            if link is not None and link.history not in wanted:
                earlier = await self._source.manifests.load_topic(link.history)
                if earlier is not None and earlier.lifecycle in _MOVED:
                    wanted[link.history] = earlier
                    ahead.append(link.history)
        return list(wanted.values())

    async def copy(self, topics: Sequence[TopicManifest]) -> list[MovedPartition]:
        """Bring the target up to date once. A partition that cannot be copied has a fault in the report."""
        return await self._pass("copy", topics)

    async def move(self, topics: Sequence[TopicManifest]) -> list[MovedPartition]:
        """
        Copy until little is left, and then switch every topic whose partitions could all be copied.

        Raises:
            StorageUnavailable: A bucket does not answer. Another call goes on.
        """
        moved: list[MovedPartition] = []
        for number in range(1, PASSES_MAX + 1):
            before = sum(one.copied_bytes for one in self._totals.values())
            moved = await self._pass(f"pass {number}", topics)
            if sum(one.copied_bytes for one in self._totals.values()) - before <= SWITCH_BELOW_BYTES:
                break
        faulty = {_topic_of(one.copy.partition) for one in moved if one.fault}
        done = [one for one in moved if _topic_of(one.copy.partition) in faulty]
        for topic in topics:
            if (topic.key.cluster, topic.key.topic, topic.key.topic_id) not in faulty:
                done += await self._switch(topic)
        return done

    async def verify(self, topics: Sequence[TopicManifest], *, deep: bool = False) -> list[str]:
        """
        Compare the target with the source, and its manifests with its objects. Return the differences.

        Daemons go on in a source that is not closed. What they add after this mover's copy is no difference.
        """
        faults: list[str] = []
        for topic in topics:
            for partition in topic.partitions():
                ours = (await self._source.manifests.load(partition)).manifest
                theirs = (await self._target.manifests.load(partition)).manifest
                due_offset = self._due_offset(ours) if ours is not None else 0
                if theirs is None:
                    if ours is not None and ours.segment_count and due_offset:
                        faults.append(f"{partition}: the target has no manifest of the partition")
                    continue
                report = await self._target.verifier.verify(theirs, deep=deep)
                faults += [f"{partition}: {fault}" for fault in report.faults]
                lacks = await self._partitions.takeover_fault(theirs, ours) if ours is not None else ""
                if lacks:
                    faults.append(f"{partition}: {lacks}")
                if ours is not None and ours.is_closed and is_copy(theirs):
                    counts = [(one.segment_count, one.size_bytes) for one in (ours, theirs)]
                    if counts[0] != counts[1]:
                        faults.append(
                            f"{partition}: the source has {counts[0][0]} segments of {counts[0][1]} bytes, "
                            f"and the target {counts[1][0]} of {counts[1][1]}"
                        )
                if theirs.next_offset < due_offset:
                    faults.append(
                        f"{partition}: the target ends before offset {theirs.next_offset}, and the source "
                        f"before {due_offset}"
                    )
        return faults

    def _due_offset(self, ours: PartitionManifest) -> int:
        """Return the offset before which the target must have what the source's manifest *ours* names."""
        copied = self._totals.get(ours.partition)
        if ours.is_closed or copied is None:
            return ours.next_offset
        return min(ours.next_offset, copied.next_offset)

    async def _pass(self, name: str, topics: Sequence[TopicManifest]) -> list[MovedPartition]:
        moved: list[MovedPartition] = []
        for topic in topics:
            is_moved_here = await self._copy_topic(topic)
            for partition in topic.partitions():
                try:
                    copy = await self._partitions.copy(partition, reopens=is_moved_here)
                except TieringError as error:
                    moved.append(MovedPartition(self._total(PartitionCopy(partition)), fault=str(error)))
                    continue
                self._on_progress(name, copy)
                moved.append(MovedPartition(self._total(copy)))
        await self._copy_quotas(topics)
        return moved

    async def _switch(self, topic: TopicManifest) -> list[MovedPartition]:
        """Close a topic in the source, partition by partition. After the first one it cannot be undone."""
        place = self._target.place
        if not topic.moved_to:
            # Where an earlier move led away from the target: it is on its way there once this begins.
            await self._target.manifests.change_topic(
                topic.key, lambda there: replace(there, moved_to=place if there.moved_to else "")
            )
        # Settings made until now are copied. From now on no daemon changes them in the source.
        closing = await self._source.manifests.change_topic(
            topic.key, lambda found: replace(found, moved_to=place)
        )
        if not topic.moved_to:
            await self._put_topic(closing)
        moved: list[MovedPartition] = []
        for partition in closing.partitions():
            copy = await self._partitions.switch(partition)
            self._on_progress("switch", copy)
            moved.append(MovedPartition(self._total(copy), is_switched=True))
        # A daemon there that sees the topic before would find closed partitions, and stop until a restart.
        await self._target.manifests.change_topic(
            topic.key,
            lambda there: replace(there, moved_to="" if there.moved_to == place else there.moved_to),
        )
        return moved

    async def _copy_topic(self, topic: TopicManifest) -> bool:
        """
        Write the topic's manifest and link in the target.

        After the switch only the target changes them.

        Returns:
            Whether the switch to the target has begun, and the topic has not been moved on from there.
        """
        found = await self._source.manifests.load_topic(topic.key)
        there = await self._target.manifests.load_topic(topic.key)
        if found is not None and (there is None or not found.moved_to):
            await self._put_topic(found)
        await self._copy_document(history_link_key(topic.key))
        return (
            found is not None
            and found.moved_to == self._target.place
            and there is not None
            and there.moved_to in {"", self._target.place}
        )

    async def _put_topic(self, topic: TopicManifest) -> None:
        """Write the topic's manifest in the target. One that was moved away from there stays elsewhere."""
        await self._target.manifests.change_topic(
            topic.key,
            lambda there: replace(
                topic,
                # Of a purged archive nothing is left, so that no manifest of it is closed.
                moved_to="" if there.lifecycle is Lifecycle.PURGED else there.moved_to,
                partition_count=max(topic.partition_count, there.partition_count),
            ),
        )

    async def _copy_quotas(self, topics: Sequence[TopicManifest]) -> None:
        """Copy the original client quotas of clusters: the daemons that restore them need them."""
        for cluster in sorted({one.key.cluster for one in topics}):
            await self._copy_quota_record(client_quotas_key(cluster))

    async def _copy_quota_record(self, key: str) -> None:
        """
        Bring the target's record of quotas up to that of the source, unless the target's is as new.

        Raises:
            CorruptDataError: One of the two records is damaged.
            StorageUnavailable: A daemon changed the target's record at the same time.
        """
        try:
            data, _ = await self._source.store.get(key)
        except ObjectNotFound:
            return
        if await create(self._target.store, key, data, crc32c=crc32c(data)):
            return
        known, info = await self._target.store.get(key)
        if known == data or _changed_at_ms(known, key, self._target) >= _changed_at_ms(
            data, key, self._source
        ):
            return
        # An older record, from an earlier copy, would hide that producers are held back.
        try:
            await self._target.store.put(key, data, crc32c=crc32c(data), condition=IfVersion(info.version))
        except PreconditionFailed as error:
            raise StorageUnavailable(
                f"{key} in {self._target.place} was changed while it was replaced: run this again"
            ) from error

    async def _copy_document(self, key: str) -> None:
        """Copy a small object, if it exists in the source and not in the target."""
        try:
            data, _ = await self._source.store.get(key)
        except ObjectNotFound:
            return
        # An existing one is from an earlier pass, or from a daemon that uses the target.
        await create(self._target.store, key, data, crc32c=crc32c(data))

    def _total(self, copy: PartitionCopy) -> PartitionCopy:
        """Add *copy* to the partition's totals so far, and return the sum."""
        before = self._totals.get(copy.partition, PartitionCopy(copy.partition))
        total = replace(
            copy,
            copied_objects=before.copied_objects + copy.copied_objects,
            copied_bytes=before.copied_bytes + copy.copied_bytes,
        )
        self._totals[copy.partition] = total
        return total


def _changed_at_ms(data: bytes, key: str, site: Site) -> int:
    try:
        return decode_quota_record(data).changed_at_ms
    except CorruptDataError as error:
        raise error.located(f"{key} in {site.place}") from error


def _topic_of(partition: TopicIdPartition) -> tuple[str, str, str]:
    return partition.cluster, partition.topic, partition.topic_id
