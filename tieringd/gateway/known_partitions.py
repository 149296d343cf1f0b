"""
What a gateway knows of its broker's partitions, behind one interface.

In the daemon's own loop `ReadablePartitions` answers from what the daemon knows at that moment. In a worker
`PublishedPartitions` answers from what the daemon has told it, and asks the daemon again once a second.
"""

from __future__ import annotations

import math
from base64 import urlsafe_b64encode
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import NO_TOPIC_ID, LogBounds, TopicIdPartition
from tieringd.policies.pinning import Pin

FORGOTTEN_AFTER_SECONDS: Final = 3600.0
"""How long a partition may not be readable before a deletion that was noted of it is forgotten."""


@dataclass(frozen=True, slots=True)
class UnarchivedOffsets:
    """The offsets between a partition's archive and the broker's log, as the last scan showed them."""

    lost_before: int
    """Two scans found no offset before it after the archive's end, in no file and no pin; 0 without such."""
    log_start_offset: int
    """Where the broker's log began."""
    active_offset: float
    """Where its active segment begins; infinity without one. Closed segments are archived soon, or lost."""

    def is_undecided(self, offset: int) -> bool:
        """
        Say whether the archive may still get *offset*, which the broker's log no longer has.

        Inside the active segment only a user deletes, and nothing else is going to happen.
        """
        return offset >= self.log_start_offset or offset < self.active_offset


@dataclass(frozen=True, slots=True)
class ReadablePartition:
    """What is known of one partition."""

    manifest: PartitionManifest
    bounds: LogBounds | None
    """The bounds of the broker's own log, as it told them in the last second; None if it only follows."""
    pins: tuple[Pin, ...] = ()
    """Segments that the broker has deleted and that this daemon still holds, until they are archived."""
    deleted_before: int = 0
    """
    A user has deleted the records before it.

    Clients of the gateway are not served them, also before the manifest is read that says so.
    """
    as_of: float = -math.inf
    """When the oldest of this was true, by the monotonic clock, which all processes of a host share."""
    unarchived: UnarchivedOffsets | None = None
    """None where this daemon does not archive the partition under the broker's leader epoch."""

    @property
    def awaits_pins(self) -> bool:
        """Say whether pins alone have a part of the log, so that the archive will have it later."""
        return self.bounds is not None and have_part_of_log(
            self.pins, self.bounds, after_offset=max(self.manifest.next_offset, self.deleted_before)
        )

    def is_before_log(self, offset: int) -> bool:
        """Say whether *offset* is between the archive's end and the start of the broker's log."""
        return (
            self.bounds is not None
            and self.manifest.segment_count > 0
            and max(self.manifest.next_offset, self.deleted_before) <= offset < self.bounds.log_start_offset
        )

    def is_pinned(self, offset: int) -> bool:
        """Say whether a pin holds *offset*: the archive will have it."""
        return offset >= self.deleted_before and any(
            not pin.is_stray and pin.segment.base_offset <= offset < (pin.segment.next_offset or 0)
            for pin in self.pins
        )


def have_part_of_log(pins: Sequence[Pin], bounds: LogBounds, *, after_offset: int) -> bool:
    """
    Say whether *pins* have offsets of a log from *after_offset* on that the broker's log no longer has.

    *after_offset* is where the archive ends, or what a user has deleted does. *bounds* are the broker's. A
    pin of a segment in which the log begins has nothing that the log lacks and that is uploaded later.
    """
    return any(
        not pin.is_stray and after_offset < (pin.segment.next_offset or 0) <= bounds.log_start_offset
        for pin in pins
    )


class PartitionName(NamedTuple):
    """A partition as a client calls it. A topic may have the id of another topic as its name."""

    topic: str
    number: int
    is_id: bool


def name_of(topic: str | UUID, number: int) -> PartitionName:
    """Return the name, with an id in the form that the archive uses."""
    if isinstance(topic, UUID):
        return PartitionName(urlsafe_b64encode(topic.bytes).decode().rstrip("="), number, is_id=True)
    return PartitionName(topic, number, is_id=False)


class KnownPartitions(Protocol):
    """The partitions of the broker behind a gateway, and which of them have an archive to read."""

    def may_have(self, topic: str | UUID, number: int) -> bool:
        """Say whether the archive of a partition may be readable here. An unseen partition's may be."""

    @property
    def readable(self) -> Mapping[TopicIdPartition, None]:
        """Return the partitions whose archive may be read. It is the same object until they change."""

    def identified(self, topic: str | UUID, number: int) -> TopicIdPartition | None:
        """Return a partition whose archive may be read, or None if it may not be read or was not seen."""

    def last_manifest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Return what a partition's archiver in this daemon has read under its leader epoch; None without."""

    def deleted_before(self, partition: TopicIdPartition) -> int:
        """Return the offset before which clients of the gateway deleted the records, or 0."""

    def may_be_deleted_before(self, partition: TopicIdPartition) -> int:
        """
        Return an offset at or after which no client of the gateway has deleted anything.

        It is `deleted_before` while the manifest is known. Otherwise a noted deletion may be of an earlier
        leader epoch, and concern none of the records that are there now.
        """

    async def note_deletion(self, partition: TopicIdPartition, deletion: RecordDeletion) -> None:
        """
        Hide what *deletion* deletes from all clients of the port, from the return on until the daemon ends.

        Records of later leader epochs are never hidden.

        Raises:
            RetryableError: The daemon cannot be told. The client must not be told that the records are gone.
        """

    async def leader_epoch(self, topic: str | UUID, number: int) -> int | None:
        """
        Return a leader epoch that has begun: the broker carries out later requests in it or in a later one.

        None if the partition has no archive readable here.

        Raises:
            StorageUnavailable: It may have an archive, whose content is unknown now.
            CorruptDataError: Its manifest is damaged.
        """

    async def record_deletion(self, found: ReadablePartition, deletion: RecordDeletion) -> ReadablePartition:
        """
        Record in the bucket what the broker beside this gateway has deleted. Returns what is known then.

        The deletion names what `leader_epoch` returned before the broker got the request. Brokers that have
        led since may have other records at these offsets, and no client has deleted those.

        Raises:
            StorageUnavailable: The deletion is not known to be recorded. Calling again is safe.
            StorageError: An operator must act.
            FencedError: The archive is closed, and never changes again.
            CorruptDataError: A manifest is damaged.
        """

    async def find(
        self, topic: str | UUID, number: int, *, since: float = -math.inf
    ) -> ReadablePartition | None:
        """
        Return a partition of *topic*, which is a name or an id; None if it has no archive readable here.

        What the broker says, and a manifest that is read, are of *since* or later, by the monotonic clock.

        Raises:
            StorageUnavailable: It may have an archive, whose content is unknown now.
            CorruptDataError: Its manifest is damaged.
        """

    async def newest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Return the manifest that the bucket holds now, or None if there is no archive."""

    async def archived_bytes(self) -> Mapping[tuple[str, int], int]:
        """Return the archived bytes of every readable partition that this daemon archives."""

    async def close(self) -> None:
        """End the questions that are under way."""


class NotedDeletions:
    """
    The deletions of records that clients made through the gateway since the daemon started.

    A scan may miss a partition for a moment, as when its log directory cannot be read. So a deletion counts
    until its partition has not been readable for an hour. A topic without an id may be another one when it is
    seen again: what was deleted of it is forgotten at once.
    """

    def __init__(
        self, noted: Mapping[TopicIdPartition, tuple[RecordDeletion, ...]], *, now: Callable[[], float]
    ) -> None:
        """Begin with *noted*; *now* is a monotonic clock in seconds."""
        self._noted = dict(noted)
        self._now = now
        self._absent_since: dict[TopicIdPartition, float] = {}

    def __contains__(self, partition: TopicIdPartition) -> bool:
        return partition in self._noted

    @property
    def all(self) -> Mapping[TopicIdPartition, tuple[RecordDeletion, ...]]:
        """Return the deletions of each partition."""
        return self._noted

    def of(self, partition: TopicIdPartition) -> tuple[RecordDeletion, ...]:
        """Return the deletions of one partition."""
        return self._noted.get(partition, ())

    def add(self, partition: TopicIdPartition, deletion: RecordDeletion) -> None:
        """Note one more deletion."""
        self._noted[partition] = with_noted(self.of(partition), deletion)

    def keep(self, readable: Container[TopicIdPartition]) -> None:
        """Forget what has not been *readable* for long."""
        now = self._now()
        for partition in tuple(self._noted):
            if partition in readable:
                self._absent_since.pop(partition, None)
                continue
            absent_seconds = now - self._absent_since.setdefault(partition, now)
            if partition.topic_id == NO_TOPIC_ID or absent_seconds >= FORGOTTEN_AFTER_SECONDS:
                del self._noted[partition], self._absent_since[partition]


def hidden_in(manifest: PartitionManifest, noted: tuple[RecordDeletion, ...]) -> int:
    """Return the offset before which records are deleted: by *manifest*, and by deletions *noted* since."""
    for one in noted:
        manifest = manifest.with_deletion(one)
    return manifest.deleted_before


def hidden_at_most(noted: tuple[RecordDeletion, ...]) -> int:
    """Return the offset before which *noted* deletions may hide records of a manifest that is not known."""
    return max((one.before_offset for one in noted), default=0)


def with_noted(noted: tuple[RecordDeletion, ...], deletion: RecordDeletion) -> tuple[RecordDeletion, ...]:
    """Return *noted* with one more *deletion*, without those that it includes."""
    others = (
        one
        for one in noted
        if one.before_offset > deletion.before_offset or one.leader_epoch > deletion.leader_epoch
    )
    return (*others, deletion)


class TopicNames(NamedTuple):
    """The partitions of one topic on this broker's disks."""

    topic: str
    topic_id: str
    is_readable: bool
    numbers: tuple[int, ...]


class PublishedNames(NamedTuple):
    """The partitions on this broker's disks, as the last scan saw them."""

    cluster: str
    topics: tuple[TopicNames, ...]
