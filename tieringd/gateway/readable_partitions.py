"""
The partitions of the broker behind a gateway whose archive clients may read.

That is a matter of the topic's remote read alone: a topic may be paused, or not be written to the archive
any more, and what was archived of it is still a part of its log. Who leads a partition is no question
here: a broker that does not lead it says so itself, and then nobody asks.

A partition that the last look at the log directories did not see may have an archive all the same: it is new,
it has just come to this broker, or its directory could not be read. So `find` brings a look forward and waits
for it. Where that does not help, clients are told to try again.

Manifests of partitions that are archived from here come from their archivers, which know best. All
others are looked at again when they are asked for, so that a broker that has just become a leader
answers by what its predecessor did last.
"""

from __future__ import annotations

import asyncio
import math
from base64 import urlsafe_b64encode
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from tieringd.errors import StorageUnavailable
from tieringd.model.partition import TopicIdPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tieringd.archive.manifest_store import ManifestStore, StoredManifest
    from tieringd.archiving.observer import World
    from tieringd.archiving.reconciler import Reconciler
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import Leadership, LogBounds
    from tieringd.policies.pinning import Pin

FRESH_SECONDS = 1.0
"""How old a manifest may be that is not an archiver's."""
LOOK_SECONDS: Final = 5.0
"""How long a question may wait for looks at the log directories that see its partition."""
_LOOKS: Final = 2
"""The first look may have begun before the partition was there."""
_UNSEEN_SECONDS: Final = 10.0
"""How long no look is brought forward for a partition that two looks did not see."""


@dataclass(frozen=True, slots=True)
class ReadablePartition:
    """What is known of one partition."""

    manifest: PartitionManifest
    bounds: LogBounds | None
    """Of the broker's own log; None where it is not looked at."""
    pins: tuple[Pin, ...] = ()
    """What the broker has deleted and we still hold, on its way into the archive."""
    deleted_before: int = 0
    """A client of the gateway has deleted what lies before it: it is hidden until the manifest follows."""

    def is_pinned(self, offset: int) -> bool:
        """Say whether a pin holds *offset*: the archive will have it."""
        return offset >= self.deleted_before and any(
            not pin.is_stray and pin.segment.base_offset <= offset < (pin.segment.next_offset or 0)
            for pin in self.pins
        )


@dataclass(frozen=True, slots=True)
class _Looked:
    at: float
    stored: StoredManifest


class ReadablePartitions:
    """Look partitions up in what the reconciler saw last."""

    def __init__(self, reconciler: Reconciler, manifests: ManifestStore, *, now: Callable[[], float]) -> None:
        """Take the parts; *now* returns seconds that only grow."""
        self._reconciler = reconciler
        self._manifests = manifests
        self._now = now
        self._world: World | None = None
        self._seen: set[_Name] = set()
        self._by_name: dict[_Name, TopicIdPartition] = {}
        self._leaderships: dict[TopicIdPartition, Leadership] = {}
        self._pins: dict[TopicIdPartition, tuple[Pin, ...]] = {}
        self._looked: dict[TopicIdPartition, _Looked] = {}
        self._deleted_before: dict[TopicIdPartition, int] = {}
        self._unseen_until: dict[_Name, float] = {}
        self._readable: Mapping[TopicIdPartition, None] = {}

    def may_have(self, topic: str | UUID, number: int) -> bool:
        """Say whether the archive of a partition may be read here; of one that was not seen it may."""
        self._refresh()
        name = _name(topic, number)
        return name in self._by_name or name not in self._seen

    @property
    def readable(self) -> Mapping[TopicIdPartition, None]:
        """Return the partitions whose archive may be read; the same object until they change."""
        self._refresh()
        return self._readable

    def identified(self, topic: str | UUID, number: int) -> TopicIdPartition | None:
        """Return a partition whose archive may be read; None where it may not, or was not seen."""
        self._refresh()
        return self._by_name.get(_name(topic, number))

    def last_manifest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Return the manifest of a partition as its archiver here knows it; None where there is none."""
        leadership = self._leaderships.get(partition)
        return None if leadership is None else self._reconciler.last_manifest(leadership)

    def deleted_before(self, partition: TopicIdPartition) -> int:
        """Return before which offset clients of the gateway have deleted the records; 0 where none did."""
        return self._deleted_before.get(partition, 0)

    def note_deletion(self, partition: TopicIdPartition, before_offset: int) -> None:
        """Hide what lies before *before_offset* from now on."""
        self._deleted_before[partition] = max(self.deleted_before(partition), before_offset)

    async def find(self, topic: str | UUID, number: int) -> ReadablePartition | None:
        """
        Return a partition of *topic*, which is a name or an id; None where it has no archive to be read here.

        Raises:
            StorageUnavailable: It may have one, and what is in it cannot be told now.
            CorruptDataError: Its manifest is damaged.
        """
        name = _name(topic, number)
        world = await self._world_with(name, f"{topic}-{number}")
        partition = self._by_name.get(name)
        if partition is None:
            return None
        pins, deleted_before = self._pins.get(partition, ()), self.deleted_before(partition)
        leadership = self._leaderships.get(partition)
        if leadership is not None:
            manifest = self._reconciler.last_manifest(leadership)
            if manifest is not None:
                self._looked.pop(partition, None)
                return ReadablePartition(manifest, world.wanted[leadership].bounds, pins, deleted_before)
        looked = self._looked.get(partition)
        if looked is None or self._now() - looked.at > FRESH_SECONDS:
            looked = await self._look(partition, looked)
        manifest = looked.stored.manifest
        return None if manifest is None else ReadablePartition(manifest, None, pins, deleted_before)

    async def _world_with(self, name: _Name, text: str) -> World:
        """Return what was seen last, once that includes *name*; looks are brought forward for it."""
        self._refresh()
        if name not in self._seen and self._unseen_until.get(name, -math.inf) <= self._now():
            await self._look_for(name)
        if self._world is None:
            raise StorageUnavailable("the first round of reconciliation is not over")
        if name not in self._seen:
            raise StorageUnavailable(
                f"the last look at the log directories did not see {text}",
                hint="If it persists, see that broker.log_dirs names every log directory of the broker",
            )
        return self._world

    async def _look_for(self, name: _Name) -> None:
        """Bring looks forward until one sees *name*; remember when that did not help."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                for _ in range(_LOOKS):
                    self._reconciler.hint()
                    await self._reconciler.next_look()
                    self._refresh()
                    if name in self._seen:
                        return
                self._unseen_until[name] = self._now() + _UNSEEN_SECONDS

    async def newest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Return what the bucket holds now, whatever is known; None when there is no archive."""
        return (await self._manifests.load(partition)).manifest

    def archived_here(self) -> tuple[PartitionManifest, ...]:
        """Return the manifest of every partition that is archived from here and may be read."""
        self._refresh()
        readable = set(self._by_name.values())
        found = (
            self._reconciler.last_manifest(leadership)
            for partition, leadership in self._leaderships.items()
            if partition in readable
        )
        return tuple(manifest for manifest in found if manifest is not None)

    async def _look(self, partition: TopicIdPartition, known: _Looked | None) -> _Looked:
        at = self._now()
        if known is None or known.stored.manifest is None:
            stored = await self._manifests.load(partition)
        else:
            stored = await self._manifests.refreshed(partition, known.stored)
        self._looked[partition] = _Looked(at, stored)
        return self._looked[partition]

    def _refresh(self) -> None:
        world = self._reconciler.world
        if world is None or world is self._world:
            return
        self._world = world
        self._leaderships = {one.partition: one for one in world.wanted}
        self._seen, self._by_name = set(), {}
        for local in world.local:
            topic, number = local.topic_partition.topic, local.topic_partition.partition
            names = (_Name(topic, number, is_id=False), _Name(local.topic_id, number, is_id=True))
            self._seen.update(names)
            if world.topics[topic].remote_read:
                partition = TopicIdPartition(world.cluster, topic, local.topic_id, number)
                self._by_name |= dict.fromkeys(names, partition)
        self._pins = {one.partition: seen.pins for one, seen in world.wanted.items() if seen.pins} | {
            one.partition: one.pins for one in (*world.followed, *world.held_back) if one.pins
        }
        readable = set(self._by_name.values())
        self._looked = {one: looked for one, looked in self._looked.items() if one in readable}
        self._deleted_before = {
            one: offset for one, offset in self._deleted_before.items() if one in readable
        }
        now = self._now()
        self._unseen_until = {
            one: until for one, until in self._unseen_until.items() if until > now and one not in self._seen
        }
        if readable != self._readable.keys():
            self._readable = dict.fromkeys(readable)


class _Name(NamedTuple):
    """A partition as a client calls it: a topic may be named like the id of another."""

    topic: str
    number: int
    is_id: bool


def _name(topic: str | UUID, number: int) -> _Name:
    """Return the name with an id in the form that the archive knows."""
    if isinstance(topic, UUID):
        return _Name(urlsafe_b64encode(topic.bytes).decode().rstrip("="), number, is_id=True)
    return _Name(topic, number, is_id=False)
