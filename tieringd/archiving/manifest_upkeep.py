"""
Manifest upkeep: the daemon's requests to the object store outside its archivers and rounds.

It reads and writes topic manifests, keeps followed manifests fresh, and manages retention. All of it may
wait for a store that hangs. A round of reconciliation must not wait, because it pins the files that a
broker deletes meanwhile.

`FollowedManifests` keeps the manifests of partitions that other brokers lead fresh enough for a takeover: a
new leader then asks the store only for the version of one manifest, and does not load its history. A followed
manifest can only make this daemon more careful. The daemon never trims, deletes or uploads because of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

import structlog

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archiving.observer import BrokerSnapshot, Observation
from tieringd.archiving.operator_desk import LeftDecisions
from tieringd.errors import STORE_FAULTS, CorruptDataError, StorageUnavailable, TieringError
from tieringd.formats.object_keys import TopicKey
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.topics.each_topic import TopicFaults, each_topic
from tieringd.topics.retention_manager import RetentionManager
from tieringd.topics.topic_defaults import TopicDefaultsRecorder
from tieringd.topics.topic_registry import TopicRegistry, partition_counts

log = structlog.get_logger(__name__)

REFRESH_INTERVAL_MS = 60_000
"""How old a followed manifest may become before it is read again."""
REFRESHES_PER_STEP = 200
"""Requests of one step, so that ten thousand followed partitions cause a steady trickle of requests."""
FAILURES_IN_A_ROW = 3
"""
Manifests that may fail one after another before a step ends: then it is the store, and not these manifests.
"""

DECISIONS_INTERVAL_SECONDS = 3600.0
"""How often operators' decisions are searched for that a process left when it ended."""

LAST_STEP_SECONDS = 5.0
"""How long the end of the daemon may wait for the store after its archivers have ended."""

CLEAN_UP_INTERVAL_SECONDS = 6 * 3600.0
"""How often parts of abandoned uploads are searched for: they cost storage and no listing shows them."""


class FollowedManifests:
    """Hold the followed manifests of one daemon. One task at a time calls `step`; `take` may run any time."""

    def __init__(self, manifests: ManifestStore, *, steady_ms: Callable[[], int]) -> None:
        """Start without manifests; *steady_ms* returns milliseconds of a clock that is never set back."""
        self._manifests = manifests
        self._steady_ms = steady_ms
        self._known: dict[TopicIdPartition, StoredManifest] = {}
        self._removed: set[TopicIdPartition] = set()
        """
        Partitions whose manifest was read once, and has gone from the bucket since.

        They are remembered as long as this process lives, whatever a scan lacks: an operator restarts it once
        the reason is known.
        """
        self._asked_at_ms: dict[TopicIdPartition, int] = {}

    def manifest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """Return a partition's manifest as last read; None when none was read, or it is not stored now."""
        known = self._known.get(partition)
        return known.manifest if known and partition not in self._removed else None

    def take(self, partition: TopicIdPartition) -> StoredManifest | None:
        """
        Return the last read manifest of a partition that this broker leads from now on, if any.

        A manifest that was removed from the bucket is returned as well. It fences the new leader, which would
        begin a new archive otherwise.
        """
        return self._known.get(partition)

    def note_removed(self, partition: TopicIdPartition, known: StoredManifest | None) -> None:
        """Note that the manifest *known*, which an archiver of this daemon used, has gone from the bucket."""
        if known is not None and known.manifest is not None:
            self._known[partition] = known
            self._removed.add(partition)

    async def step(self, followed: Collection[TopicIdPartition]) -> int:
        """Refresh those of *followed* that were asked for the longest ago; return how many were read."""
        for gone in self._asked_at_ms.keys() - set(followed):
            del self._asked_at_ms[gone]
            if gone not in self._removed:
                self._known.pop(gone, None)
        now_ms = self._steady_ms()
        due = [
            one
            for one in followed
            if now_ms - self._asked_at_ms.get(one, -REFRESH_INTERVAL_MS) >= REFRESH_INTERVAL_MS
        ]
        due.sort(key=lambda one: self._asked_at_ms.get(one, 0))
        refreshed = failed_in_a_row = 0
        failed: list[tuple[TopicIdPartition, TieringError]] = []
        for partition in due[:REFRESHES_PER_STEP]:
            # Noted also for one that fails: otherwise it would come before all others in each step.
            self._asked_at_ms[partition] = now_ms
            try:
                known = self._known.get(partition)
                found = await self._manifests.refreshed(partition, known)
            except CorruptDataError as error:
                log.error("followed manifest is damaged", partition=str(partition), error=str(error))  # noqa: TRY400 its text is enough
            except TieringError as error:
                failed.append((partition, error))
                # A final answer, as for a topic that may not be read, is about one manifest.
                failed_in_a_row += isinstance(error, StorageUnavailable)
                if failed_in_a_row == FAILURES_IN_A_ROW:
                    break
                continue
            else:
                self._note(partition, found)
            refreshed += 1
            failed_in_a_row = 0
        if failed:
            partition, first_error = failed[0]
            log.warning(
                "followed manifests are not fresh",
                manifests=len(failed),
                partition=str(partition),
                error=str(first_error),
            )
        return refreshed

    def _note(self, partition: TopicIdPartition, found: StoredManifest) -> None:
        known = self._known.get(partition)
        if found.manifest is None and known is not None and known.manifest is not None:
            self._removed.add(partition)
            return
        self._known[partition] = found
        self._removed.discard(partition)


class ManifestUpkeep:
    """Do the periodic store work for the partitions of a round. One task at a time calls `step`."""

    def __init__(
        self,
        *,
        registry: TopicRegistry,
        followed_manifests: FollowedManifests,
        defaults_recorder: TopicDefaultsRecorder,
        retention: RetentionManager,
        interval_seconds: float,
        check_store: Callable[[str], Awaitable[None]] | None = None,
        clean_up: Callable[[], Awaitable[int]] | None = None,
        left_decisions: LeftDecisions | None = None,
    ) -> None:
        """
        Take the collaborators.

        *check_store* gets the cluster's id, and raises unless the store is fit for use and the archive is
        that of this cluster. Until it passes no topic is known, so nothing is archived. *clean_up* removes
        uploads that killed processes left incomplete, and returns their number. *left_decisions* completes
        the records of operators' decisions that killed processes carried out. At most one listing of the
        bucket for topic changes is made in *interval_seconds*.
        """
        self.registry = registry
        """The topic manifests as the rounds list them. Only this upkeep changes it."""
        self._followed_manifests = followed_manifests
        self._defaults_recorder = defaults_recorder
        self._retention = retention
        self._check_store = check_store
        self._clean_up = clean_up
        self._clean_up_due = 0.0
        self._left_decisions = left_decisions
        self._decisions_due = 0.0
        self.interval_seconds = interval_seconds
        """Minimum seconds between two listings of the bucket for topic changes."""
        self._refresh_due = 0.0
        self._begun: set[TopicIdPartition] = set()
        """Partitions whose archivers have begun, and that no topic manifest counts yet."""
        self._counted: tuple[Mapping[Leadership, Observation], dict[TopicKey, int]] = ({}, {})
        """The observations of the last step, and how many partitions of each topic they are of."""
        self._faults: dict[str, str] = {}
        self._store_faults: dict[str, str] = {}
        """The subset of `_faults` that the object store caused."""

    @property
    def fault(self) -> str:
        """Return why a chore failed at its last attempt; empty when all succeeded."""
        return next(iter(self._faults.values()), "")

    @property
    def store_fault(self) -> str:
        """Return which chore the object store made fail at its last attempt; empty for none."""
        return next(iter(self._store_faults.values()), "")

    @property
    def knows_topics(self) -> bool:
        """Say whether topic manifests were read from the store; before that nothing is archived."""
        return self.registry.is_known

    def note_begun(self, partition: TopicIdPartition) -> None:
        """
        Note that the archiver of *partition* begins: it stores a manifest, and the topic's has to count it.

        This holds although the topic may be deleted before the next step: otherwise its archive would never
        be found, neither by a restore nor by a purge.
        """
        self._begun.add(partition)

    async def end(self) -> None:
        """Store the topic manifests that archivers which have ended still lack, or give up soon."""
        if not (self.registry.is_known and self._begun):
            return
        try:
            async with asyncio.timeout(LAST_STEP_SECONDS):
                await self._try("topic manifests cannot be kept", self._ensure({}))
        except TimeoutError:
            log.warning("topic manifests cannot be stored before the end", partitions=len(self._begun))

    async def _ensure(self, wanted: Mapping[Leadership, Observation]) -> bool:
        """Ensure that topic manifests count *wanted*, and what has begun; see `TopicRegistry`."""
        if self._counted[0] is not wanted:
            self._counted = (wanted, partition_counts(one.partition for one in wanted))
        counts = self._counted[1]
        try:
            if self._begun:
                begun = partition_counts(self._begun)
                counts = counts | {key: max(counts.get(key, 0), count) for key, count in begun.items()}
            return await self.registry.ensure(counts)
        finally:
            self._begun = {one for one in self._begun if not self.registry.counts(one)}

    async def step(self, snapshot: BrokerSnapshot) -> bool:
        """Do what is due for *snapshot*; return whether another observation would differ."""
        is_changed = await self.keep_topics(snapshot)
        await self._followed_manifests.step([one.partition for one in snapshot.followed])
        if self.registry.is_known:
            await self._try("abandoned uploads cannot be removed", self._remove_abandoned())
            await self._try("operators' decisions cannot be ended", self._end_decisions(snapshot))
        return is_changed

    async def keep_topics(self, snapshot: BrokerSnapshot) -> bool:
        """Read and write topic manifests, and manage their retention; return as `step` does."""
        is_changed = False

        async def refresh() -> None:
            nonlocal is_changed
            is_changed = await self._refresh(snapshot.cluster)

        async def ensure() -> None:
            nonlocal is_changed
            try:
                is_changed |= await self._ensure(snapshot.wanted)
            except TopicFaults as error:
                is_changed |= error.done > 0
                raise

        await self._try("topic manifests cannot be read", refresh())
        if self.registry.is_known:
            # Topic manifests come first: a restore finds topics by them, and nothing is trimmed before that.
            await self._try("topic manifests cannot be kept", ensure())
            await self._try("topics first seen cannot be recorded", self._record_first_seen(snapshot))
            await self._try("topics' remote.delete cannot be recorded", self._record_remote_delete(snapshot))
            await self._try("retention cannot be managed", self._retention.step(snapshot.managed))
        return is_changed

    async def _remove_abandoned(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._clean_up is None or now < self._clean_up_due:
            return
        self._clean_up_due = now + CLEAN_UP_INTERVAL_SECONDS
        count = await self._clean_up()
        if count:
            log.info("abandoned uploads removed", uploads=count)

    async def _end_decisions(self, snapshot: BrokerSnapshot) -> None:
        now = asyncio.get_running_loop().time()
        if self._left_decisions is None or now < self._decisions_due:
            return
        self._decisions_due = now + DECISIONS_INTERVAL_SECONDS
        await self._left_decisions.end(snapshot.wanted)

    async def _record_first_seen(self, snapshot: BrokerSnapshot) -> None:
        if snapshot.unrecorded_topics:
            assert snapshot.defaults is not None, "they come with what is first seen"
            await self._defaults_recorder.step(snapshot.unrecorded_topics, snapshot.defaults)

    async def _record_remote_delete(self, snapshot: BrokerSnapshot) -> None:
        async def record(key: TopicKey) -> None:
            is_set = snapshot.remote_delete[key]
            known = self.registry.manifest(key)
            if known is not None and known.partition_count and known.remote_delete is not is_set:
                await self.registry.record_remote_delete(key, is_set=is_set)

        await each_topic(snapshot.remote_delete, record)

    async def _refresh(self, cluster: str) -> bool:
        """Look for changed topic manifests, if that is due; return whether there were any."""
        # The check is for each cluster, and a broker may be of another one in any round.
        if self._check_store is not None:
            await self._check_store(cluster)
        now = asyncio.get_running_loop().time()
        if now < self._refresh_due:
            return False
        is_changed = await self.registry.refresh(cluster)
        self._refresh_due = now + self.interval_seconds
        return is_changed

    async def _try(self, what: str, chore: Awaitable[object]) -> None:
        """Do one chore. A failure is logged once, and does not keep the other chores from being done."""
        try:
            await chore
        except TieringError as error:
            fault = f"{what}: {error}"
            # Another topic that fails is news; another text of a store that is away is not.
            if what not in self._faults or (isinstance(error, TopicFaults) and self._faults[what] != fault):
                log.warning(what, error=str(error))
            self._faults[what] = fault
            self._store_faults.pop(what, None)
            if isinstance(error, STORE_FAULTS):
                self._store_faults[what] = self._faults[what]
        else:
            self._store_faults.pop(what, None)
            if self._faults.pop(what, None) is not None:
                log.info("no longer so", fault=what)
