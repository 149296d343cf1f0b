"""
The reconciler: makes the running archivers match the partitions this broker leads.

Each round begins with one scan (`archiving.observer`) of all partitions together. Each archiver gets its
part of it as an `Observation`; a directory event only brings the next round forward.

An archiver whose last step left nothing to do rests (`archiving.resting`): no round steps it. These wake it:

| what happens                                    | what wakes the archiver                                |
|-------------------------------------------------|--------------------------------------------------------|
| a file, an offset, a pin or a setting changed   | the round's observation is another object              |
| a directory watch reports a closed segment      | `rescan_partitions` hands it a new observation at once |
| an upload, a hint or retention becomes due      | `Resting.due`: the last step returned that time        |
| a trim failed, or was refused, a minute ago     | the same                                               |
| a job may have edited the manifest              | the same: the archiver polls for edits now and then    |
| the upload limits changed                       | `set_config`; the next round steps every archiver      |
| a disk needs room                               | `request_space` steps it at once                       |
| a change is offered for its manifest            | `offer` steps it at once                               |
| this broker leads under another epoch           | a new archiver takes over, and begins awake            |

An archiver does not rest after a step that failed, as while the store is away, nor while its partition is
quarantined or an open transaction holds a segment back: each round steps it until that is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import structlog

from tieringd.archiving.archiver import Archiver
from tieringd.archiving.manifest_upkeep import FollowedManifests, ManifestUpkeep
from tieringd.archiving.observer import BrokerSnapshot, Observation, Observer
from tieringd.archiving.partition_status import OperatorWaitGauge, PartitionFault, PartitionStatus, PassResult
from tieringd.archiving.pin_rounds import PinRounds
from tieringd.archiving.pinner import Pinner
from tieringd.archiving.resting import ChangeFeed, Resting, WakeUp
from tieringd.archiving.uploader import LeadershipConfirmation
from tieringd.config import Config
from tieringd.errors import (
    STORE_FAULTS,
    CorruptDataError,
    FencedError,
    ManifestEdited,
    ManifestRemoved,
    TieringError,
)
from tieringd.formats.object_keys import TopicKey
from tieringd.metrics import Metrics
from tieringd.metrics.restarts import restarted
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicPartition
from tieringd.pauses import AwakeClock
from tieringd.policies.upload_plan import UploadLimits, plan_assignment
from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)

LEADERSHIP_FRESH_SECONDS = 30.0
"""
Minimum time after a round's last question to the broker during which an archiver may still store objects. The
effective limit is the largest of this, three round intervals, and three times the last scan's duration.
"""

PINS_GO_WITHIN_SECONDS = 8.0
"""
How long after the last question to the broker a pin may be released. An unclean election there and back, with
an archive that is cut in between, takes longer: a broker counts as gone after `broker.session.timeout.ms`.
"""

_SCANS_FOR_TOPICS = 2
"""Scans of a single pass that may follow a change of topic manifests."""
_SHOWN_AT_ONCE = 50
"""Partitions whose figures are shown between two pauses. With a backlog each takes 0.1 ms."""
_HINTS_IN_A_ROW = 3
"""Rounds that changes of topic manifests bring forward, until a round without a change."""


def _without_fault(status: PartitionStatus) -> PartitionStatus:
    return replace(status, fault="", fault_kind=None, is_store_fault=False)


@dataclass(slots=True)
class _Running:
    """An archiver with its task and its mailbox of one: a newer observation replaces an unread one."""

    archiver: Archiver
    task: asyncio.Task[None] | None = None
    newest: Observation | None = None
    arrived: WakeUp = field(default_factory=WakeUp)
    status: PartitionStatus = field(default_factory=PartitionStatus)
    """The status after the last step."""

    @property
    def status_now(self) -> PartitionStatus:
        """
        Return the last status; a fault of the store is over while the next step waits in the upload queue.

        A backlog after an outage is there for hours. The store has taken segments of others by then.
        """
        waits = self.status.is_store_fault and self.archiver.waits_for_a_store_that_takes
        return _without_fault(self.status) if waits else self.status

    def note_stored(self) -> None:
        """Note that the store has taken a segment: more steps on the same observation may take hours."""
        if self.status.is_store_fault:
            self.status = _without_fault(self.status)

    def end(self, _: asyncio.Task[None]) -> None:
        """Close the archiver when its task is over, even if the task was cancelled before it began."""
        self.archiver.close()


@dataclass(frozen=True, slots=True)
class _Matched:
    """The last scan's partitions and the archivers that were matched with them."""

    wanted: Mapping[Leadership, Observation]
    """The mapping of the `BrokerSnapshot`: the same object again where nothing has changed."""
    unclear: frozenset[TopicPartition]
    confirmation: LeadershipConfirmation
    """The confirmation that the archivers of *wanted* share. Each round prolongs it for all of them."""


class Reconciler:
    """
    Own the archivers of one daemon.

    `run` lives as long as the daemon and holds every archiver's task in one group. Stopping is gentle:
    each archiver ends the step it is in, which commits what it has uploaded.
    """

    def __init__(
        self,
        *,
        interval_seconds: float,
        observer: Observer,
        pinner: Pinner,
        followed_manifests: FollowedManifests,
        upkeep: ManifestUpkeep,
        metrics: Metrics,
        make_archiver: Callable[[Leadership], Archiver],
        now_ms: Callable[[], int],
        archive_ms: Callable[[], int],
    ) -> None:
        """Take the collaborators; *now_ms* is this host's clock, *archive_ms* the clock of the archivers."""
        self._observer = observer
        self._followed_manifests = followed_manifests
        self._upkeep = upkeep
        self._metrics = metrics
        self._make_archiver = make_archiver
        self._archive_ms = archive_ms
        self._snapshot: BrokerSnapshot | None = None
        self._topics: frozenset[str] = frozenset()
        """Topics with a partition on this broker's disks, or with an archiver, at the last scan."""
        self._paused: frozenset[TopicKey] = frozenset()
        self._running: dict[Leadership, _Running] = {}
        self._faulty: dict[Leadership, _Running] = {}
        """Those whose last step had a fault: few of ten thousand, and asked for by each round and scrape."""
        self._resting = Resting()
        self._matched: _Matched | None = None
        """What the running archivers were matched with; None when one of them has ended since."""
        self._paths: tuple[str, ...] | None = None
        """The cached result of `paths`; None after an observation has changed."""
        self.changes = ChangeFeed()
        """Feeds the partitions in which something changed to work that goes over all of them."""
        self._pins = PinRounds(
            pinner,
            followed_manifests=followed_manifests,
            manifest_of=self.last_manifest,
            archivers=self._resting,
            changes=self.changes,
            now_ms=now_ms,
        )
        self._operator_waits = OperatorWaitGauge(metrics)
        self._fenced: dict[Leadership, str] = {}
        self._defects: dict[Leadership, str] = {}
        """The defect that ended a partition's last archiver, until a step ends without one."""
        self._stopping = False
        self._hint = asyncio.Event()
        self._scan_ended = asyncio.Event()
        self._fault = ""
        self._awake = AwakeClock()
        self.interval_seconds = interval_seconds
        """Maximum time between two rounds; a hint brings the next one forward."""
        self.rounds = 0
        self.scan_seconds = 0.0
        """Seconds from the start of the last scan until the archivers had its observations."""

    @property
    def fault(self) -> str:
        """Return the first reason why the daemon is not ready; empty when all is well."""
        return next(filter(None, self.readiness().values()), "")

    def readiness(self) -> dict[str, str]:
        """
        Return what keeps the daemon from being ready, by a reason's name; empty text where nothing does.

        The same reasons are there at all times, for metrics.
        """
        # A scrape reads this in another thread, so the dictionary is copied before it is walked.
        upkeep, statuses = self._upkeep, (running.status_now for running in self._faulty.copy().values())
        unready = next((status.fault for status in statuses if status.is_store_fault), "")
        starting = ""
        if self.rounds == 0:
            starting = "the first round of reconciliation has not ended yet"
        elif not upkeep.knows_topics:
            starting = "the topics of the archive could not be read from the object store yet"
        return {
            "round": self._fault,
            "store": upkeep.store_fault or unready,
            "bookkeeping": "" if upkeep.store_fault else upkeep.fault,
            "log_directory": self._observer.log_dir_fault,
            "starting": starting,
        }

    def set_config(self, config: Config, limits: UploadLimits) -> None:
        """Use *config* from the next round on, and upload by *limits*."""
        self.interval_seconds = config.cloud_storage_reconciliation_interval_ms / 1000
        self._upkeep.interval_seconds = self.interval_seconds
        self._observer.set_config(config)
        for leadership, running in self._running.items():
            running.archiver.set_limits(limits)
            self._resting.wake(leadership)

    def hint(self) -> None:
        """Bring the next round forward: something in the log directories changed."""
        self._hint.set()

    async def rescan_partitions(self, paths: Collection[str]) -> bool:
        """
        Hand a new observation to the archivers of the partitions in *paths*, between two rounds.

        Returns whether that was enough; if not, it takes a whole round.
        """
        try:
            again = await self._observer.rescan_partitions(paths)
        except TieringError as error:
            log.info("looking at what changed takes a whole round", reason=str(error))
            return False
        for leadership, observation in (again or {}).items():
            if (known := self._running.get(leadership)) is not None:
                self._hand_over(leadership, known, observation)
        return again is not None

    def _hand_over(self, leadership: Leadership, running: _Running, observation: Observation) -> None:
        """Give an archiver its new observation, and wake it."""
        running.newest, self._paths = observation, None
        running.arrived.set()
        self._resting.wake(leadership)
        self.changes.note(leadership)

    async def next_scan(self) -> None:
        """Wait until the next scan has ended and `snapshot` and `paths` show its result."""
        await self._scan_ended.wait()

    @property
    def registry(self) -> TopicRegistry:
        """Return the topic manifests as the rounds list them, to be read only."""
        return self._upkeep.registry

    @property
    def paused_topics(self) -> tuple[str, ...]:
        """Return the topics that an operator has paused."""
        return tuple(sorted(key.topic for key in self._paused))

    @property
    def backlog_bytes(self) -> int:
        """Return the bytes that could be uploaded now and are not yet."""
        return sum(running.archiver.backlog_bytes for running in self._running.values())

    @property
    def snapshot(self) -> BrokerSnapshot | None:
        """Return the result of the last scan; None before the first."""
        return self._snapshot

    def archiver(self, leadership: Leadership) -> Archiver | None:
        """Return the archiver of a partition; None where none runs."""
        running = self._running.get(leadership)
        return running.archiver if running else None

    def archived(self) -> Iterator[tuple[Leadership, Archiver, Observation]]:
        """Yield the partitions that have an archiver and an observation."""
        for leadership in self._running:
            if (found := self.archived_one(leadership)) is not None:
                yield leadership, *found

    def archived_one(self, leadership: Leadership) -> tuple[Archiver, Observation] | None:
        """Return a partition's archiver and its newest observation; None unless it has both."""
        running = self._running.get(leadership)
        return None if running is None or running.newest is None else (running.archiver, running.newest)

    def last_manifest(self, leadership: Leadership) -> PartitionManifest | None:
        """Return a partition's manifest as its archiver last knew it; None where none is known."""
        archiver = self.archiver(leadership)
        return archiver.last_manifest if archiver else None

    def held_manifest(self, leadership: Leadership) -> PartitionManifest | None:
        """Return the last manifest that was certain under a leadership's epoch; None before the first one."""
        archiver = self.archiver(leadership)
        return archiver.held_manifest if archiver else None

    def request_space(self, leadership: Leadership, next_offset: int, *, age_ms: int = 0) -> None:
        """
        Let an archiver trim durable segments before *next_offset*, because the disk needs room.

        *age_ms* is how long ago the disk was measured.
        """
        running = self._running.get(leadership)
        if running is not None:
            running.archiver.request_space(next_offset, age_ms=age_ms)
            running.arrived.set()

    def stop(self) -> None:
        """Let every archiver end its step, then let `run` return."""
        self._stopping = True
        self._hint.set()
        for running in self._running.values():
            running.arrived.set()

    def statuses(self) -> dict[Leadership, PartitionStatus]:
        """Return the status of each archiver, including the fenced ones."""
        return self._statuses_of(self._running)

    def _statuses_of(self, archivers: Mapping[Leadership, _Running]) -> dict[Leadership, PartitionStatus]:
        """Return the status of each of *archivers*, and of those that have ended by a defect or a fence."""
        # A scrape reads this in another thread, so the dictionaries are copied before they are walked.
        found = {leadership: running.status_now for leadership, running in dict(archivers).items()}
        found.update(
            {
                one: PartitionStatus(fault=why, fault_kind=PartitionFault.OTHER)
                for one, why in self._defects.copy().items()
            }
        )
        found.update(
            {
                one: PartitionStatus(fault=why, fault_kind=PartitionFault.FENCED)
                for one, why in self._fenced.copy().items()
            }
        )
        return found

    def faults(self) -> dict[str, int]:
        """Return the number of partitions by the kind of their fault, also of those that none has."""
        found = dict.fromkeys(PartitionFault, 0)
        for status in self._statuses_of(self._faulty).values():
            if status.fault_kind is not None:
                found[status.fault_kind] += 1
        return {kind.value: partitions for kind, partitions in found.items()}

    @property
    def problems(self) -> Mapping[str, str]:
        """Return what the last scan could not read, and why."""
        return self._observer.problems

    def paths(self) -> tuple[str, ...]:
        """Return the directories of the archived partitions; the same tuple while nothing changed."""
        if self._paths is None:
            self._paths = tuple(
                running.newest.log.partition.path
                for running in self._running.values()
                if running.newest is not None
            )
        return self._paths

    async def run(self) -> None:
        """Do a round every reconciliation interval, or sooner on a hint, until stopped."""
        async with asyncio.TaskGroup() as tasks:
            upkeep = tasks.create_task(
                restarted("bookkeeping", self._run_upkeep, on_failure=self._metrics.health.task_failed)
            )
            awake = tasks.create_task(self._awake.run())
            while not self._stopping:
                try:
                    await self.step(tasks)
                except TieringError as error:
                    self._fault = str(error)
                    log.error("reconciliation round failed", error=self._fault)  # noqa: TRY400 its text is enough
                except Exception as error:
                    # The boundary between rounds: archivers go on with what they know.
                    self._fault = f"a defect ended the round: {error!r}"
                    self._metrics.health.task_failed("reconciliation")
                    log.exception("reconciliation round failed by a defect")
                else:
                    self._fault = ""
                if not self.fault:
                    self._metrics.reconciled_at.set_to_current_time()
                # The interval that this wait has: a reload changes the one of the next wait.
                self._metrics.reconcile_interval.set(self.interval_seconds)
                await self._wait_for_next_round(self.interval_seconds)
            upkeep.cancel()
            awake.cancel()
        await self._upkeep.end()

    async def step(self, tasks: asyncio.TaskGroup) -> None:
        """Do one round: scan, start and stop archivers, hand each its observation, and adjust pins."""
        clock = asyncio.get_running_loop().time
        started, awake_started = clock(), self._awake.now()
        snapshot = await self._observer.scan()
        awake_seconds = self._awake.now() - awake_started
        matched, before = self._matched, self._snapshot
        # Nearly all of ten thousand partitions are idle, and matching them all is a large part of a round.
        if matched is None or matched.wanted is not snapshot.wanted or matched.unclear != snapshot.unclear:
            matched = self._match(snapshot, tasks)
            self._forget_topics(snapshot)
        elif before is None or before.local is not snapshot.local or before.unnamed is not snapshot.unnamed:
            self._forget_topics(snapshot)
        matched.confirmation.until = self._fresh_until(snapshot.asked_at, scan_seconds=awake_seconds)
        for leadership in self._resting.due(self._archive_ms()):
            running = self._running[leadership]
            if running.newest is not None and leadership in snapshot.wanted:
                running.newest = snapshot.confirmed(running.newest)
            running.arrived.set()
        self._snapshot = snapshot
        self.rounds += 1
        self.scan_seconds = clock() - started
        self._scan_ended.set()
        self._scan_ended.clear()
        await self._pins.step(snapshot, good_until=snapshot.asked_at + PINS_GO_WITHIN_SECONDS)
        self._paused = snapshot.paused
        await self._show_figures()
        self._publish(clock() - started)

    def _match(self, snapshot: BrokerSnapshot, tasks: asyncio.TaskGroup) -> _Matched:
        """Stop and start archivers, and hand each one its observation if it changed."""
        running = set(self._running)
        if snapshot.unclear:
            running = {one for one in running if one.partition.topic_partition not in snapshot.unclear}
        plan = plan_assignment(set(snapshot.wanted), running, set(self._fenced))
        for leadership in plan.stop:
            self._stop_archiver(leadership)
        for leadership in plan.start:
            fresh = _Running(self._make_archiver(leadership))
            self._upkeep.note_begun(leadership.partition)
            self._running[leadership] = fresh
            fresh.archiver.on_offer = fresh.arrived.set
            # Without a name each task keeps a text of its own.
            fresh.task = tasks.create_task(self._archive(leadership, fresh), name="archiver")
            fresh.task.add_done_callback(fresh.end)
        # The archivers of other partitions keep the one of an earlier match, which ends.
        confirmation = LeadershipConfirmation(until=-math.inf)
        for leadership, observation in snapshot.wanted.items():
            if (known := self._running.get(leadership)) is not None:
                known.archiver.confirm_leadership(confirmation)
                if not observation.shows_same(known.newest):
                    self._hand_over(leadership, known, observation)
        lasting = snapshot.wanted.keys() | {
            one
            for one in self._fenced.keys() | self._defects.keys()
            if one.partition.topic_partition in snapshot.unclear
        }
        self._fenced = {one: why for one, why in self._fenced.items() if one in lasting}
        self._defects = {one: why for one, why in self._defects.items() if one in lasting}
        self._matched = _Matched(snapshot.wanted, snapshot.unclear, confirmation)
        return self._matched

    def _fresh_until(self, asked_at: float, *, scan_seconds: float) -> float:
        """
        Return until when, in loop time, archivers may store objects because of this round's leadership.

        The leadership was true at *asked_at*, when the broker was asked. A long scan, as over a large log
        that is read for the first time, is likely to be followed by another long one, so it extends the
        limit. Time in which this process stood still is not in *scan_seconds*.
        """
        return asked_at + max(LEADERSHIP_FRESH_SECONDS, 3 * self.interval_seconds, 3 * scan_seconds)

    async def _run_upkeep(self) -> None:
        """Run the manifest upkeep after each round, concurrently with the next ones."""
        self._metrics.health.loop_succeeded("bookkeeping")
        changed_in_a_row = 0
        while True:
            await self._scan_ended.wait()
            if self._snapshot is not None:
                is_changed = await self._upkeep.step(self._snapshot)
                changed_in_a_row = changed_in_a_row + 1 if is_changed else 0
                # A store that loses what is put into it changes every time, and round would follow round.
                if is_changed and changed_in_a_row <= _HINTS_IN_A_ROW:
                    self.hint()
            if not self._upkeep.fault:
                self._metrics.health.loop_succeeded("bookkeeping")

    async def run_once(self, *, concurrency: int = 16) -> PassResult:
        """
        Step every archiver until a whole round finds nothing more to do.

        A partition whose step fails is tried again as long as other partitions make progress.
        """
        totals: dict[Leadership, PartitionStatus] = {}
        archivers: dict[Leadership, Archiver] = {}
        slots = asyncio.Semaphore(concurrency)

        async def drain(leadership: Leadership, seen: Observation) -> bool:
            if leadership in self._fenced:
                return False
            archiver = archivers.setdefault(leadership, self._make_archiver(leadership))
            async with slots:
                status, progressed = await self._drain(leadership, archiver, seen)
            before = totals.get(leadership, PartitionStatus())
            totals[leadership] = replace(
                status,
                uploaded=before.uploaded + status.uploaded,
                trimmed=before.trimmed + status.trimmed,
            )
            return progressed

        progressing = True
        while progressing and not self._stopping:
            snapshot = await self._observer.scan()
            # The first time shows which topics are archived. The second stores their manifests, before a
            # pass that may be stopped stores segments: a restore finds topics by them. It is not repeated
            # without end: what another writer changes meanwhile is for the next scan.
            for _ in range(_SCANS_FOR_TOPICS):
                if self._stopping or not await self._upkeep.keep_topics(snapshot):
                    break
                snapshot = await self._observer.scan()
            self.rounds += 1
            async with asyncio.TaskGroup() as tasks:
                drains = [
                    tasks.create_task(drain(one, snapshot.confirmed(seen)))
                    for one, seen in snapshot.wanted.items()
                ]
            progressing = any(task.result() for task in drains)
            self._publish(0.0)
        problems = dict(self.problems)
        if self._upkeep.fault:
            problems["object store"] = self._upkeep.fault
        return PassResult(totals, problems)

    async def _archive(self, leadership: Leadership, running: _Running) -> None:
        """Run one archiver: a step for each observation, and more while it makes progress."""
        while not self._stopping:
            await running.arrived.wait()
            if self._stopping or running.newest is None:
                continue
            if running.archiver.is_at_rest(running.newest):
                # A round came during the last step, and found nothing new. At a start that is most of them.
                self._resting.rest(leadership, until_ms=running.archiver.rest_due_ms(running.newest))
                continue
            self._resting.wake(leadership)
            try:
                running.status, _ = await self._drain(
                    leadership,
                    running.archiver,
                    running.newest,
                    newest=lambda: running.newest,
                    on_stored=running.note_stored,
                )
            except Exception as error:
                topic = leadership.partition.topic
                self._metrics.upload_failures.labels(topic, type(error).__name__).inc()
                log.exception("archiver failed; starting it anew", partition=str(leadership.partition))
                self._defects[leadership] = f"a defect ended the archiver: {error!r}"
                # Leadership may be lost before the next archiver starts; then nothing else removes the
                # series.
                self._metrics.forget_partition(leadership.partition.topic_partition)
                self._forget(leadership)
                return
            self._defects.pop(leadership, None)
            if leadership in self._fenced:
                self._forget(leadership)
                return
            if running.status.fault or running.status.fault_kind is not None:
                self._faulty[leadership] = running
            else:
                self._faulty.pop(leadership, None)
            self.changes.note(leadership)
            if (due_ms := running.archiver.rest_due_ms(running.newest)) > -math.inf:
                self._resting.rest(leadership, until_ms=due_ms)
            if running.status.trimmed and running.status.pending_segments:
                self.hint()

    async def _drain(
        self,
        leadership: Leadership,
        archiver: Archiver,
        seen: Observation,
        *,
        newest: Callable[[], Observation | None] = lambda: None,
        on_stored: Callable[[], None] = lambda: None,
    ) -> tuple[PartitionStatus, bool]:
        """
        Step on one observation until nothing is left in it.

        It is *seen*, or what *newest* returns once a first claim has waited for its turn. *on_stored* is
        called after each step that has uploaded.

        Returns the summed status, and whether another observation may bring more progress.
        """
        uploaded = trimmed = pending = gaps = 0
        fault, waits_because, is_store_fault, needs_another_scan = "", "", False, False
        kind: PartitionFault | None = None

        def taken() -> Observation | None:
            nonlocal seen
            later = newest()
            seen = later or seen
            return later

        try:
            while True:
                try:
                    result = await archiver.step(seen, newest=taken)
                except ManifestEdited as edit:
                    # No fault of the store: the next step begins with what the job wrote.
                    log.info(
                        "archiver met a job's edit", partition=str(leadership.partition), reason=str(edit)
                    )
                    continue
                uploaded, trimmed = uploaded + result.uploaded, trimmed + result.trimmed
                pending, fault, gaps = result.pending_segments, result.fault, gaps + result.gaps
                waits_because = result.waits_because
                kind = PartitionFault.CORRUPT if fault else None
                needs_another_scan = result.needs_another_scan
                if result.uploaded:
                    on_stored()
                # A later observation waits for the next call, so a busy partition shows its status before it.
                if not result.made_progress or self._stopping:
                    break
        except FencedError as error:
            fault, kind = self._fence(leadership, archiver, error), PartitionFault.FENCED
        except TieringError as error:
            fault, is_store_fault = str(error), isinstance(error, STORE_FAULTS)
            kind = PartitionFault.STORE if is_store_fault else PartitionFault.OTHER
            self._metrics.upload_failures.labels(leadership.partition.topic, type(error).__name__).inc()
            report = log.error if isinstance(error, CorruptDataError) else log.warning
            report("archiver step failed", partition=str(leadership.partition), error=fault)
        moved = bool(uploaded or trimmed or gaps) or needs_another_scan
        if kind is None and archiver.operator_wait is not None:
            kind = PartitionFault.OPERATOR
        figures = self._metrics.partitions.get(leadership.partition.topic_partition)
        if kind is not None and figures is not None:
            pending = figures.pending_segments  # A step that failed has no result.
        status = PartitionStatus(
            uploaded, trimmed, pending, fault, waits_because, is_store_fault, archiver.operator_wait, kind
        )
        return status, moved

    def _fence(self, leadership: Leadership, archiver: Archiver, error: FencedError) -> str:
        """Let *archiver* not be started again under its leadership; return why."""
        fault = self._fenced[leadership] = str(error)
        if isinstance(error, ManifestRemoved):
            # This broker may lead under a later epoch, and would begin a new archive then.
            self._followed_manifests.note_removed(leadership.partition, archiver.last_stored)
        self._metrics.forget_partition(leadership.partition.topic_partition)
        log.error("archiver stopped", partition=str(leadership.partition), reason=fault)
        return fault

    def _stop_archiver(self, leadership: Leadership) -> None:
        running = self._running[leadership]
        self._forget(leadership)
        if running.task is not None:
            running.task.cancel()
        self._metrics.forget_partition(leadership.partition.topic_partition)
        log.info("archiver stopped: this broker no longer leads", partition=str(leadership.partition))

    def _forget_topics(self, snapshot: BrokerSnapshot) -> None:
        """Drop the counters of topics that have left this broker's disks."""
        topics = {one.topic_partition.topic for one in (*snapshot.local, *snapshot.unnamed)}
        topics |= {one.partition.topic for one in self._running}
        for gone in self._topics - topics:
            self._metrics.forget_topic(gone)
        self._topics = frozenset(topics)

    def _forget(self, leadership: Leadership) -> None:
        """Forget an archiver that has ended; the next round decides whether to start another one."""
        self._running.pop(leadership, None)
        self._faulty.pop(leadership, None)
        self._resting.forget(leadership)
        self._matched = self._paths = None
        self.changes.note(leadership)

    async def _wait_for_next_round(self, interval_seconds: float) -> None:
        try:
            async with asyncio.timeout(interval_seconds):
                await self._hint.wait()
        except TimeoutError:
            return
        self._hint.clear()

    async def _show_figures(self) -> None:
        """
        Show the figures of the partitions whose archivers are awake.

        A step shows them at its end, but it may wait in the upload queue for hours, and alerts rest on them.
        """
        for number, leadership in enumerate(tuple(self._resting.awake), start=1):
            if (found := self.archived_one(leadership)) is not None:
                archiver, seen = found
                archiver.show(seen)
            if number % _SHOWN_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _publish(self, seconds: float) -> None:
        # An archiver that is quarantined, waits or knows no manifest does not rest: the awake ones do.
        awake = [
            (leadership.partition.topic_partition, running.archiver)
            for leadership in self._resting.awake
            if (running := self._running.get(leadership)) is not None
        ]
        self._operator_waits.publish(
            (partition, wait) for partition, archiver in awake if (wait := archiver.operator_wait) is not None
        )
        held_back = self._snapshot.held_back if self._snapshot is not None else ()
        archived = {one.partition for one in self._running} if held_back else set()
        self._metrics.unknown_loss_partitions.set(
            sum(one.partition not in archived for one in held_back)
            + sum(archiver.last_manifest is None for _, archiver in awake)
        )
        self._metrics.led_partitions.set(len(self._running))
        self._metrics.quarantined_partitions.set(sum(bool(one.quarantine_fault) for _, one in awake))
        self._metrics.fenced_partitions.set(len(self._fenced))
        self._metrics.reconcile_seconds.set(seconds)
