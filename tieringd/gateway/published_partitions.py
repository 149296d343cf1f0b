"""
What a worker of a gateway knows of the broker's partitions: what the daemon has told it.

The daemon sends the names of the partitions after each scan that changed them, and each deletion by a client
before that client is answered. All else of a partition is asked for: its manifest, the bounds of the broker's
log and the pins, together and as of one moment. An answer is used for a second, as the broker's own are, and
asked for again in the background before the second is over. So a client that reads on does not wait for the
daemon, and while the daemon's loop stands still, nothing is served by what it knew more than a second ago.

A manifest is sent once: the daemon is told which version the worker has. Manifests of the partitions that
were read last are kept, and those with a deletion that was noted here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from tieringd.archive.manifest_store import ManifestStore
from tieringd.gateway.known_partitions import (
    NotedDeletions,
    PartitionName,
    PublishedNames,
    ReadablePartition,
    UnarchivedOffsets,
    hidden_at_most,
    hidden_in,
    name_of,
)
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import LogBounds, TopicIdPartition
from tieringd.policies.pinning import Pin
from tieringd.storage.single_flight import SingleFlight

FRESH_SECONDS: Final = 1.0
"""How old the daemon's answer may be."""
REFRESHED_SECONDS: Final = 0.5
"""An answer that is used at this age is asked for again in the background."""
KEPT_MAX: Final = 1024
"""How many manifests are kept."""


class Daemon(Protocol):
    """The way to the daemon."""

    async def ask(self, name: str, *arguments: Any) -> Any:
        """Return the daemon's answer. Raises its error, and a `RetryableError` if it has ended."""


class FoundPartition(NamedTuple):
    """The daemon's answer about one partition."""

    version: int
    """The number of the manifest, for this worker."""
    manifest: PartitionManifest | None
    """None if the worker has that version."""
    bounds: LogBounds | None
    pins: tuple[Pin, ...]
    deleted_before: int
    as_of: float
    unarchived: UnarchivedOffsets | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    manifest: PartitionManifest


@dataclass(frozen=True, slots=True)
class _Answer:
    as_of: float
    found: ReadablePartition | None


class PublishedPartitions:
    """The knowledge of one worker; see `KnownPartitions`. Belongs to one event loop."""

    def __init__(
        self,
        daemon: Daemon,
        manifests: ManifestStore,
        *,
        names: PublishedNames | None,
        deletions: Mapping[TopicIdPartition, tuple[RecordDeletion, ...]],
        now: Callable[[], float],
    ) -> None:
        """Keep the arguments. *now* is the monotonic clock, in seconds, that the daemon has as well."""
        self._daemon = daemon
        self._manifests = manifests
        self._now = now
        self._seen: set[PartitionName] = set()
        self._by_name: dict[PartitionName, TopicIdPartition] = {}
        self._readable: Mapping[TopicIdPartition, None] = {}
        self._deletions = NotedDeletions(deletions, now=now)
        self._answers: OrderedDict[PartitionName, _Answer] = OrderedDict()
        self._kept: OrderedDict[TopicIdPartition, _Kept] = OrderedDict()
        self._questions: SingleFlight[PartitionName, _Answer] = SingleFlight(
            lambda name: f"the question for {name.topic}-{name.number} was cancelled: the gateway is closed"
        )
        if names is not None:
            self.set_names(names)

    def set_names(self, names: PublishedNames) -> None:
        """Use the partitions that the daemon's last scan saw."""
        seen: set[PartitionName] = set()
        by_name: dict[PartitionName, TopicIdPartition] = {}
        for topic, topic_id, is_readable, numbers in names.topics:
            for number in numbers:
                both = (
                    PartitionName(topic, number, is_id=False),
                    PartitionName(topic_id, number, is_id=True),
                )
                seen.update(both)
                if is_readable:
                    found = TopicIdPartition(names.cluster, topic, topic_id, number)
                    by_name |= dict.fromkeys(both, found)
        self._seen, self._by_name = seen, by_name
        readable = dict.fromkeys(by_name.values())
        if readable.keys() != self._readable.keys():
            self._readable = readable
        self._deletions.keep(readable)
        for gone in [one for one in self._kept if one not in readable]:
            del self._kept[gone]

    def hide(self, partition: TopicIdPartition, deletion: RecordDeletion) -> None:
        """Hide what a client of the port has deleted."""
        self._deletions.add(partition, deletion)

    def may_have(self, topic: str | UUID, number: int) -> bool:
        """See `KnownPartitions`."""
        name = name_of(topic, number)
        return name in self._by_name or name not in self._seen

    @property
    def readable(self) -> Mapping[TopicIdPartition, None]:
        """See `KnownPartitions`."""
        return self._readable

    def identified(self, topic: str | UUID, number: int) -> TopicIdPartition | None:
        """See `KnownPartitions`."""
        return self._by_name.get(name_of(topic, number))

    def last_manifest(self, partition: TopicIdPartition) -> PartitionManifest | None:  # noqa: ARG002 the interface
        """Return None: what was told before may be old, and what is asked for is in `find`."""
        return None

    def deleted_before(self, partition: TopicIdPartition) -> int:
        """See `KnownPartitions`."""
        kept = self._kept.get(partition)
        return 0 if kept is None else hidden_in(kept.manifest, self._deletions.of(partition))

    def may_be_deleted_before(self, partition: TopicIdPartition) -> int:
        """See `KnownPartitions`. Only the manifests that were read last are known."""
        noted = self._deletions.of(partition)
        return self.deleted_before(partition) if partition in self._kept else hidden_at_most(noted)

    async def note_deletion(self, partition: TopicIdPartition, deletion: RecordDeletion) -> None:
        """Hide the records here, and have the daemon hide them in all other workers."""
        self.hide(partition, deletion)
        await self._daemon.ask("note_deletion", partition, deletion)

    async def leader_epoch(self, topic: str | UUID, number: int) -> int | None:
        """See `KnownPartitions`."""
        found: int | None = await self._daemon.ask("leader_epoch", topic, number)
        return found

    async def record_deletion(self, found: ReadablePartition, deletion: RecordDeletion) -> ReadablePartition:
        """Have the daemon record the deletion: it alone writes to the bucket."""
        partition = found.manifest.partition
        manifest = await self._daemon.ask("record_deletion", partition, deletion)
        hidden = hidden_in(manifest, self._deletions.of(partition))
        return replace(found, manifest=manifest, deleted_before=hidden)

    async def find(
        self, topic: str | UUID, number: int, *, since: float = -math.inf
    ) -> ReadablePartition | None:
        """See `KnownPartitions`."""
        name = name_of(topic, number)
        if name in self._seen and name not in self._by_name:
            return None
        needed_at = max(since, self._now() - FRESH_SECONDS)
        ask = partial(self._ask, name, topic, number)
        answer = self._answers.get(name)
        if answer is not None and answer.as_of >= needed_at:
            is_aging = self._now() - answer.as_of > REFRESHED_SECONDS
            if is_aging and name not in self._questions and not self._questions.is_closed:
                self._questions.begin(name, partial(ask, -math.inf))
        while answer is None or answer.as_of < needed_at:
            answer = await self._questions.arrived(self._questions.join(name, partial(ask, needed_at)))
        return self._without_deleted(answer.found)

    async def newest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """See `KnownPartitions`."""
        return (await self._manifests.load(partition)).manifest

    async def archived_bytes(self) -> Mapping[tuple[str, int], int]:
        """See `KnownPartitions`."""
        found: Mapping[tuple[str, int], int] = await self._daemon.ask("archived_bytes")
        return found

    async def close(self) -> None:
        """Cancel the questions that are under way."""
        await self._questions.close()

    async def _ask(self, name: PartitionName, topic: str | UUID, number: int, since: float) -> _Answer:
        asked_at = self._now()
        expected = self._by_name.get(name)
        kept = None if expected is None else self._kept.get(expected)
        told: FoundPartition | None = await self._daemon.ask(
            "find", topic, number, since, 0 if kept is None else kept.version
        )
        answer = _Answer(asked_at, None) if told is None else self._taken(told, kept)
        self._answers[name] = answer
        self._answers.move_to_end(name)
        while len(self._answers) > 2 * KEPT_MAX:
            self._answers.popitem(last=False)
        return answer

    def _taken(self, told: FoundPartition, kept: _Kept | None) -> _Answer:
        manifest = told.manifest
        if manifest is None:
            assert kept is not None, "the daemon sends what this worker does not have"
            manifest = kept.manifest
        self._kept[manifest.partition] = _Kept(told.version, manifest)
        self._kept.move_to_end(manifest.partition)
        if len(self._kept) > KEPT_MAX:
            spare = next((one for one in self._kept if one not in self._deletions), None)
            if spare is not None:
                del self._kept[spare]
        found = ReadablePartition(
            manifest, told.bounds, told.pins, told.deleted_before, told.as_of, told.unarchived
        )
        return _Answer(told.as_of, found)

    def _without_deleted(self, found: ReadablePartition | None) -> ReadablePartition | None:
        """Return *found* without what was deleted since the daemon told it."""
        noted = () if found is None else self._deletions.of(found.manifest.partition)
        if found is None or not noted:
            return found
        return replace(found, deleted_before=max(found.deleted_before, hidden_in(found.manifest, noted)))
