"""
The partitions of the broker behind a gateway whose archive clients may read.

Only the topic's remote read setting decides this: a topic may be paused, or no longer be archived, and
its archived records are still part of its log. Leadership does not matter here: a broker that does not
lead a partition says so itself, and then the archive is not asked.

A partition that the last scan of the log directories did not see may still have an archive: it is new,
it has just moved to this broker, or its directory could not be read. So `find` brings a scan forward and
waits for it. If that does not help, clients are told to try again.

Manifests of partitions that this daemon archives come from their archivers, which have the newest: under the
leader epoch that the broker tells now, and once they have read the bucket under it. All other manifests are
read again on use, so that a broker that has just become a leader, also for the second time, answers with its
predecessor's last commit.

`LogStarts` knows where whole logs begin: at the older of the archive's first offset and the broker's.
The broker's responses tell only where its own log begins, and clients remember that: librdkafka seeks to
the beginning by the last log start that it was told, without asking again. So each response tells where
the whole log begins. Responses pass within one turn of the event loop, so `LogStarts` answers at once
with what it knows, and otherwise with -1, which clients take for unknown. Meanwhile it looks up unknown
starts, once for all connections.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from uuid import UUID

import structlog

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archive.record_deletion import delete_archived
from tieringd.archive.record_reader import RecordReader
from tieringd.archiving.observer import BrokerSnapshot
from tieringd.archiving.reconciler import Reconciler
from tieringd.broker.base import Broker
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.gateway.archive_answers import PartitionKey
from tieringd.gateway.current_bounds import CurrentBounds
from tieringd.gateway.known_partitions import (
    KnownPartitions,
    NotedDeletions,
    PartitionName,
    PublishedNames,
    ReadablePartition,
    TopicNames,
    UnarchivedOffsets,
    have_part_of_log,
    hidden_at_most,
    hidden_in,
    name_of,
)
from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.policies.pinning import Pin
from tieringd.reading.history import History
from tieringd.storage.single_flight import SingleFlight

log = structlog.get_logger(__name__)

FRESH_SECONDS = 1.0
"""How old a manifest may be that does not come from an archiver."""
SCAN_WAIT_SECONDS: Final = 5.0
"""How long a question may wait for scans of the log directories to see its partition."""
_SCANS: Final = 2
"""The first scan may have begun before the partition existed."""
_UNSEEN_SECONDS: Final = 10.0
"""How long no scan is brought forward for a partition that two scans did not see."""

UNKNOWN: Final = -1
START_FRESH_SECONDS: Final = 30.0
"""How old a log start may be. Retention moves it on; a client that reads below it gets an error then."""
RETRY_SECONDS: Final = 1.0
"""How long to wait after a failed look-up."""
_AT_ONCE: Final = 16
"""How many look-ups may wait for the store at once."""


@dataclass(frozen=True, slots=True)
class _ManifestRead:
    at: float
    stored: StoredManifest


class ReadablePartitions:
    """Look partitions up in the reconciler's last snapshot."""

    def __init__(
        self,
        reconciler: Reconciler,
        manifests: ManifestStore,
        history: History,
        *,
        now: Callable[[], float],
        now_ms: Callable[[], int],
        broker: Broker | None = None,
    ) -> None:
        """
        Keep the arguments. *now* is a monotonic clock in seconds; *now_ms* dates commits.

        Without *broker* the bounds of its logs are those of the last scan.
        """
        self._bounds = (
            None if broker is None else CurrentBounds(broker, now=now, on_other_topic=reconciler.hint)
        )
        self._local: dict[TopicIdPartition, LocalLog] = {}
        self._now_ms = now_ms
        self._reconciler = reconciler
        self._manifests = manifests
        self._history = history
        self._now = now
        self._snapshot: BrokerSnapshot | None = None
        self._seen: set[PartitionName] = set()
        self._by_name: dict[PartitionName, TopicIdPartition] = {}
        self._leaderships: dict[TopicIdPartition, Leadership] = {}
        self._last_led: dict[TopicIdPartition, int] = {}
        """The last leader epoch under which the broker was seen to lead each readable partition."""
        self._pins: dict[TopicIdPartition, tuple[Pin, ...]] = {}
        self._archived: frozenset[TopicIdPartition] = frozenset()
        """The partitions that this daemon archives, or that it would if this broker led them."""
        self._manifest_reads: dict[TopicIdPartition, _ManifestRead] = {}
        self._deletions = NotedDeletions({}, now=now)
        self._unseen_until: dict[PartitionName, float] = {}
        self._readable: Mapping[TopicIdPartition, None] = {}

    def may_have(self, topic: str | UUID, number: int) -> bool:
        """Say whether the archive of a partition may be readable here. An unseen partition's may be."""
        self._refresh()
        name = name_of(topic, number)
        return name in self._by_name or name not in self._seen

    @property
    def readable(self) -> Mapping[TopicIdPartition, None]:
        """Return the partitions whose archive may be read. It is the same object until they change."""
        self._refresh()
        return self._readable

    def identified(self, topic: str | UUID, number: int) -> TopicIdPartition | None:
        """Return a partition whose archive may be read, or None if it may not be read or was not seen."""
        self._refresh()
        return self._by_name.get(name_of(topic, number))

    def last_manifest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """See `KnownPartitions`."""
        leadership = self._leaderships.get(partition)
        return None if leadership is None else self._reconciler.held_manifest(leadership)

    def deleted_before(self, partition: TopicIdPartition) -> int:
        """Return the offset before which clients of the gateway deleted the records, or 0."""
        manifest = self._known_manifest(partition)
        return self._hidden_in(manifest, partition) if manifest is not None else 0

    def may_be_deleted_before(self, partition: TopicIdPartition) -> int:
        """See `KnownPartitions`."""
        if self._known_manifest(partition) is not None:
            return self.deleted_before(partition)
        return hidden_at_most(self._deletions.of(partition))

    def _known_manifest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        manifest = self.last_manifest(partition)
        if manifest is None and partition in self._manifest_reads:
            manifest = self._manifest_reads[partition].stored.manifest
        return manifest

    async def note_deletion(self, partition: TopicIdPartition, deletion: RecordDeletion) -> None:
        """See `KnownPartitions`."""
        self.hide(partition, deletion)

    def hide(self, partition: TopicIdPartition, deletion: RecordDeletion) -> None:
        """Hide what *deletion* deletes, from now on until this process ends."""
        self._deletions.add(partition, deletion)

    @property
    def noted_deletions(self) -> Mapping[TopicIdPartition, tuple[RecordDeletion, ...]]:
        """Return what clients of the gateway have deleted since the start."""
        return self._deletions.all

    def _hidden_in(self, manifest: PartitionManifest, partition: TopicIdPartition) -> int:
        """Return the offset before which *manifest* has deleted records: recorded ones and noted ones."""
        return hidden_in(manifest, self._deletions.of(partition))

    async def leader_epoch(self, topic: str | UUID, number: int) -> int | None:
        """
        Return a leader epoch that has begun: the broker carries out later requests in it or in a later one.

        It is the last one under which this daemon saw its broker lead. For a partition that this daemon never
        saw its broker lead (the topic is paused, or not written any more) it is the epoch of the manifest.
        None if the partition has no archive readable here.

        Raises:
            StorageUnavailable: It may have an archive, whose content is unknown now.
            CorruptDataError: Its manifest is damaged.
        """
        partition = self.identified(topic, number)
        if partition is not None and partition in self._last_led:
            return self._last_led[partition]
        found = await self.find(topic, number)
        return None if found is None else found.manifest.leader_epoch

    async def record_deletion(self, found: ReadablePartition, deletion: RecordDeletion) -> ReadablePartition:
        """See `KnownPartitions`."""
        partition = found.manifest.partition
        manifest = await self.record_in_bucket(partition, deletion)
        return replace(found, manifest=manifest, deleted_before=self._hidden_in(manifest, partition))

    async def record_in_bucket(
        self, partition: TopicIdPartition, deletion: RecordDeletion
    ) -> PartitionManifest:
        """Record a deletion; return the manifest as it is stored now. Raises as `record_deletion` does."""
        stored = await delete_archived(self._manifests, partition, deletion, now_ms=self._now_ms)
        log.info(
            "a client has deleted records; the deletion is recorded in the bucket",
            topic=partition.topic,
            partition=partition.partition,
            before_offset=deletion.before_offset,
            archive_start_offset=stored.existing.start_offset,
        )
        return stored.existing

    async def find(
        self, topic: str | UUID, number: int, *, since: float = -math.inf
    ) -> ReadablePartition | None:
        """
        Return a partition of *topic*, which is a name or an id; None if it has no archive readable here.

        What the broker says, and a manifest that is read, are of *since* or later, by this object's clock.

        Raises:
            StorageUnavailable: It may have an archive, whose content is unknown now.
            CorruptDataError: Its manifest is damaged.
        """
        name = name_of(topic, number)
        snapshot = await self._snapshot_with(name, f"{topic}-{number}")
        partition = self._by_name.get(name)
        if partition is None:
            return None
        pins = self._pins.get(partition, ())
        leadership = self._leaderships.get(partition)
        bounds = snapshot.wanted[leadership].bounds if leadership is not None else None
        as_of = self._now()
        if self._bounds is not None:
            told = await self._bounds.told_of(partition, self._local_log(partition), since=since)
            as_of, bounds = told.asked_at, told.bounds
            if bounds is None or leadership is None or told.leader_epoch != leadership.leader_epoch:
                # Another broker leads or has led since the last scan, and may have archived and trimmed.
                leadership = None
        if leadership is not None:
            manifest = self._reconciler.held_manifest(leadership)
            if manifest is not None:
                self._manifest_reads.pop(partition, None)
                hidden = self._hidden_in(manifest, partition)
                unarchived = self._unarchived(leadership, manifest)
                return ReadablePartition(manifest, bounds, pins, hidden, as_of, unarchived)
        read = self._manifest_reads.get(partition)
        if read is None or read.at < max(since, self._now() - FRESH_SECONDS):
            read = await self._read_manifest(partition, read)
        manifest = read.stored.manifest
        if manifest is None:
            if partition in self._archived and await self._history.precedes(partition):
                # The broker's log begins behind that history. Its own answer would have a client skip it.
                raise StorageUnavailable(
                    f"{partition} continues an older archive, and its own manifest is not stored yet"
                )
            deleted_before = hidden_at_most(self._deletions.of(partition))
            if bounds is not None and have_part_of_log(pins, bounds, after_offset=deleted_before):
                raise StorageUnavailable(
                    f"pins hold the head of {partition}, and its manifest is not stored yet"
                )
            return None
        hidden = self._hidden_in(manifest, partition)
        return ReadablePartition(manifest, bounds, pins, hidden, min(as_of, read.at))

    def _unarchived(self, leadership: Leadership, manifest: PartitionManifest) -> UnarchivedOffsets | None:
        archived = self._reconciler.archived_one(leadership)
        if archived is None:
            return None
        archiver, seen = archived
        lost, segments = archiver.lost_offsets, seen.log.segments
        return UnarchivedOffsets(
            # A cut of the archive's end leaves offsets that no observation has looked for yet.
            lost.last_offset + 1 if lost is not None and lost.base_offset <= manifest.next_offset else 0,
            seen.bounds.log_start_offset,
            segments[-1].base_offset if segments else math.inf,
        )

    def _local_log(self, partition: TopicIdPartition) -> LocalLog:
        """Return the log of a partition on this broker; without segments where no round reads them."""
        leadership = self._leaderships.get(partition)
        if leadership is not None and self._snapshot is not None and leadership in self._snapshot.wanted:
            return self._snapshot.wanted[leadership].log
        return self._local[partition]

    async def close(self) -> None:
        """End the questions to the broker."""
        if self._bounds is not None:
            await self._bounds.close()

    async def _snapshot_with(self, name: PartitionName, text: str) -> BrokerSnapshot:
        """Return the last snapshot, once it includes *name*. Scans are brought forward for it."""
        self._refresh()
        if name not in self._seen and self._unseen_until.get(name, -math.inf) <= self._now():
            await self._await_scan_of(name)
        if self._snapshot is None:
            raise StorageUnavailable("the first round of reconciliation has not ended yet")
        if name not in self._seen:
            raise StorageUnavailable(
                f"the last scan of the log directories did not find {text}",
                hint="If this persists, check that broker.log_dirs names every log directory of the broker",
            )
        return self._snapshot

    async def _await_scan_of(self, name: PartitionName) -> None:
        """Bring scans forward until one sees *name*. Remember the name if all of them missed it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SCAN_WAIT_SECONDS):
                for _ in range(_SCANS):
                    self._reconciler.hint()
                    await self._reconciler.next_scan()
                    self._refresh()
                    if name in self._seen:
                        return
                self._unseen_until[name] = self._now() + _UNSEEN_SECONDS

    async def newest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Return the manifest that the bucket holds now, or None if there is no archive."""
        return (await self._manifests.load(partition)).manifest

    async def archived_bytes(self) -> Mapping[tuple[str, int], int]:
        """See `KnownPartitions`."""
        self._refresh()
        readable = set(self._by_name.values())
        found = (
            self._reconciler.last_manifest(leadership)
            for partition, leadership in self._leaderships.items()
            if partition in readable
        )
        return {
            (one.partition.topic, one.partition.partition): one.size_bytes for one in found if one is not None
        }

    def published(self) -> PublishedNames | None:
        """Return the partitions on this broker's disks, for workers; None before the first scan."""
        self._refresh()
        snapshot = self._snapshot
        if snapshot is None:
            return None
        numbers: dict[tuple[str, str], list[int]] = {}
        for local in snapshot.local:
            numbers.setdefault((local.topic_partition.topic, local.topic_id), []).append(
                local.topic_partition.partition
            )
        topics = (
            TopicNames(topic, topic_id, snapshot.topics[topic].remote_read, tuple(sorted(found)))
            for (topic, topic_id), found in sorted(numbers.items())
        )
        return PublishedNames(snapshot.cluster, tuple(topics))

    async def _read_manifest(self, partition: TopicIdPartition, known: _ManifestRead | None) -> _ManifestRead:
        at = self._now()
        stored = await self._manifests.refreshed(partition, known.stored if known else None)
        self._manifest_reads[partition] = _ManifestRead(at, stored)
        return self._manifest_reads[partition]

    def _refresh(self) -> None:
        snapshot = self._reconciler.snapshot
        if snapshot is None or snapshot is self._snapshot:
            return
        self._snapshot = snapshot
        self._leaderships = {one.partition: one for one in snapshot.wanted}
        self._archived = frozenset((*self._leaderships, *(one.partition for one in snapshot.followed)))
        self._seen, self._by_name, self._local = set(), {}, {}
        for local in snapshot.local:
            topic, number = local.topic_partition.topic, local.topic_partition.partition
            names = (
                PartitionName(topic, number, is_id=False),
                PartitionName(local.topic_id, number, is_id=True),
            )
            self._seen.update(names)
            if snapshot.topics[topic].remote_read:
                partition = TopicIdPartition(snapshot.cluster, topic, local.topic_id, number)
                self._by_name |= dict.fromkeys(names, partition)
                self._local[partition] = LocalLog(local, (), ())
        self._pins = {
            **{one: pins for one, pins in self._pins.items() if one.topic_partition in snapshot.unclear},
            **{one.partition: seen.pins for one, seen in snapshot.wanted.items() if seen.pins},
            **{one.partition: one.pins for one in (*snapshot.followed, *snapshot.held_back) if one.pins},
        }
        readable = set(self._by_name.values())
        led = {one: leadership.leader_epoch for one, leadership in self._leaderships.items()}
        self._last_led = {one: epoch for one, epoch in (self._last_led | led).items() if one in readable}
        self._manifest_reads = {one: read for one, read in self._manifest_reads.items() if one in readable}
        self._deletions.keep(readable)
        now = self._now()
        self._unseen_until = {
            one: until for one, until in self._unseen_until.items() if until > now and one not in self._seen
        }
        if readable != self._readable.keys():
            self._readable = dict.fromkeys(readable)


@dataclass(frozen=True, slots=True)
class _LogStart:
    """The result of a look-up of one partition."""

    archive_offset: int | None
    """The first offset of its archive; None if it has no archive."""
    broker_offset: int
    """
    A lower bound of the broker's log start. An archive that is created later begins at or after it: no pin
    has an earlier part of the log.
    """
    looked_up_at: float

    def tells(self, broker_offset: int) -> bool:
        """Say whether this tells the whole log's start, if the broker's log begins at *broker_offset*."""
        return self.archive_offset is not None or broker_offset <= self.broker_offset


_NEVER_SHORTENED: Final = _LogStart(0, 0, math.inf)


class LogStarts:
    """The starts of the logs of one broker. Belongs to one loop; closed once."""

    def __init__(
        self,
        partitions: KnownPartitions,
        records: RecordReader,
        history: History,
        *,
        now: Callable[[], float],
    ) -> None:
        """Keep the arguments. *now* is a monotonic clock in seconds."""
        self._partitions = partitions
        self._records = records
        self._history = history
        self._now = now
        self._known: dict[TopicIdPartition, _LogStart] = {}
        self._readable: Mapping[TopicIdPartition, None] = {}
        self._lookups: SingleFlight[PartitionKey, None] = SingleFlight(
            lambda key: f"looking up the log start of {key[0]}-{key[1]} was cancelled: the gateway is closed"
        )
        self._not_before: dict[PartitionKey, float] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)

    def known_log_start(self, topic: str | UUID, number: int, broker_offset: int) -> int:
        """Return the log start to report if the broker's log begins at *broker_offset*; -1 is unknown."""
        if broker_offset <= 0:
            return broker_offset
        partition = self._partitions.identified(topic, number)
        if partition is None and not self._partitions.may_have(topic, number):
            return broker_offset
        known = None if partition is None else self._known_of(partition)
        is_complete = known is not None and known.tells(broker_offset)
        if known is None or not is_complete or self._now() - known.looked_up_at > START_FRESH_SECONDS:
            self._begin_lookup(topic, number, broker_offset)
        if known is None or partition is None or not is_complete:
            return UNKNOWN
        if known.archive_offset is None:
            return broker_offset
        return min(max(known.archive_offset, self._partitions.deleted_before(partition)), broker_offset)

    async def first_offset(self, found: ReadablePartition) -> int | None:
        """
        Return where a partition's archive begins, including older archives; None if nothing is archived.

        Raises:
            ObjectNotFound: An object was deleted. Read the manifest again.
            CorruptDataError: A stored object is damaged.
        """
        return await self.first_of(await self.archives(found))

    async def first_of(self, archives: Sequence[PartitionManifest]) -> int | None:
        """Return the first offset of *archives*, oldest first; None if there are none."""
        if not archives:
            return None
        # A gap at the beginning is not part of the log.
        return await self._records.first_offset(archives[0]) or archives[0].start_offset

    async def archives(self, found: ReadablePartition, *, is_fresh: bool = False) -> list[PartitionManifest]:
        """Return the archives that make up a partition's log, oldest first, without deleted records."""
        manifest, hidden = found.manifest, found.deleted_before
        parts = await self._history.parts(
            manifest.partition, start_offset=manifest.start_offset, is_fresh=is_fresh
        )
        seen = [one.seen_from(hidden) for one in (*parts, manifest) if one.next_offset > hidden]
        return [one for one in seen if one.segment_count]

    async def close(self) -> None:
        """Cancel every look-up."""
        await self._lookups.close()

    def _known_of(self, partition: TopicIdPartition) -> _LogStart | None:
        manifest = self._partitions.last_manifest(partition)
        if manifest is not None and manifest.start_offset == 0 and manifest.segment_count:
            # Most archives were never shortened, and need no look-up.
            return _NEVER_SHORTENED
        return self._known.get(partition)

    def _forget_unreadable(self) -> None:
        """Forget partitions that are no longer readable. Called before a result is remembered."""
        readable = self._partitions.readable
        if readable is not self._readable:
            self._readable = readable
            self._known = {one: known for one, known in self._known.items() if one in readable}
            now = self._now()
            self._not_before = {key: then for key, then in self._not_before.items() if then > now}

    def _begin_lookup(self, topic: str | UUID, number: int, broker_offset: int) -> None:
        """Look a partition up, unless a look-up is running or has just failed."""
        key = (topic, number)
        is_due = self._not_before.get(key, -math.inf) <= self._now()
        if is_due and key not in self._lookups and not self._lookups.is_closed:
            self._lookups.begin(key, partial(self._look_up, key, broker_offset))

    async def _first_of_key(self, key: PartitionKey, *, since: float = -math.inf) -> int | None:
        found = await self._partitions.find(*key, since=since)
        if found is None:
            return None
        first_offset = await self.first_offset(found)
        if first_offset is None and found.awaits_pins:
            raise StorageUnavailable(
                f"pins hold the head of {found.manifest.partition}, which is not archived yet"
            )
        return first_offset

    async def _look_up(self, key: PartitionKey, broker_offset: int) -> None:
        looked_up_at = self._now()
        try:
            async with self._places:
                archive_offset = await self._first_of_key(key)
                if archive_offset is None:
                    # The answer may be a second old, and the log may have been archived and trimmed since.
                    archive_offset = await self._first_of_key(key, since=looked_up_at)
        except TieringError as error:
            # Clients are told that the start is unknown, and ask. Their request is answered, or its
            # failure logged.
            log.debug(
                "the start of a log cannot be looked up now", partition=f"{key[0]}-{key[1]}", error=str(error)
            )
            self._forget_unreadable()
            self._not_before[key] = self._now() + RETRY_SECONDS
            return
        self._forget_unreadable()
        partition = self._partitions.identified(*key)
        if partition is not None:
            self._known[partition] = _LogStart(archive_offset, broker_offset, looked_up_at)
