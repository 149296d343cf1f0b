"""
The reconciler: makes the running archivers match the partitions this broker leads.

Each round it reads the world once, for all partitions together: the log directories, the
cluster's leadership, the topics' configuration and the logs' bounds. Archivers get their part
of that look as an `Observation`; a directory event only brings the next round forward.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from tieringd.broker.log_dir import read_local_log, scan_log_dirs
from tieringd.errors import (
    BucketNotFound,
    CorruptDataError,
    FencedError,
    LocalFileError,
    StorageDenied,
    StorageUnavailable,
    StoreFull,
    TieringError,
)
from tieringd.formats.object_keys import TopicKey
from tieringd.model.partition import Leadership, LogBounds, TopicIdPartition
from tieringd.policies.assignment import plan_assignment
from tieringd.services.observation import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tieringd.broker.base import Broker
    from tieringd.broker.log_dir import LogDirScan
    from tieringd.config import Config, TopicConfig
    from tieringd.metrics import Metrics
    from tieringd.model.local_log import LocalLog, LocalPartition
    from tieringd.services.archiver import Archiver
    from tieringd.services.manifest_store import ManifestStore

log = structlog.get_logger(__name__)

_STORE_FAULTS = (StorageUnavailable, StorageDenied, BucketNotFound, StoreFull)
"""What a whole store suffers from, and not one partition's objects."""


@dataclass(frozen=True, slots=True)
class World:
    """What one round saw: an observation for each partition to archive, and what was in the way."""

    wanted: Mapping[Leadership, Observation]
    problems: Mapping[str, str]
    """Why a path or partition was left out of this round, by its name."""


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """How an archiver stands, for the admin page and for `--once`."""

    uploaded: int = 0
    trimmed: int = 0
    pending_segments: int = 0
    fault: str = ""
    is_store_fault: bool = False
    """The fault is the object store's, so other partitions suffer from it as well."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """How one pass over everything ended."""

    statuses: Mapping[Leadership, PartitionStatus]
    problems: Mapping[str, str]
    """What was left out, and why: the pass is not whole while there is any."""


@dataclass(slots=True)
class _Running:
    """An archiver with its task and its mailbox of one: a newer observation replaces an unread one."""

    archiver: Archiver
    task: asyncio.Task[None] | None = None
    newest: Observation | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    status: PartitionStatus = PartitionStatus()


class Reconciler:
    """
    Own the archivers of one daemon.

    `run` lives as long as the daemon and holds every archiver's task in one group. Stopping is
    gentle: each archiver ends the step it is in, which commits what it has uploaded.
    """

    def __init__(
        self,
        config: Config,
        *,
        broker: Broker,
        manifests: ManifestStore,
        metrics: Metrics,
        make_archiver: Callable[[Leadership], Archiver],
    ) -> None:
        self._config = config
        self._log_dirs = tuple(str(path) for path in config.broker.log_dirs)
        self._broker = broker
        self._manifests = manifests
        self._metrics = metrics
        self._make_archiver = make_archiver
        self._running: dict[Leadership, _Running] = {}
        self._fenced: dict[Leadership, str] = {}
        self._topics_ensured: dict[TopicKey, int] = {}
        self._problems: dict[str, str] = {}
        self._topic_problems: set[str] = set()
        self._stopping = False
        self._hint = asyncio.Event()
        self._fault = ""
        self.rounds = 0

    @property
    def fault(self) -> str:
        """Return why the last round failed, or why the object store takes nothing; empty when all is well."""
        if self._fault:
            return self._fault
        statuses = (running.status for running in self._running.values())
        return next((status.fault for status in statuses if status.is_store_fault), "")

    def hint(self) -> None:
        """Bring the next round forward: something in the log directories changed."""
        self._hint.set()

    def stop(self) -> None:
        """Let every archiver end its step, then let `run` return."""
        self._stopping = True
        self._hint.set()
        for running in self._running.values():
            running.arrived.set()

    def statuses(self) -> dict[Leadership, PartitionStatus]:
        """Return how each archiver stands, the fenced ones included."""
        found = {leadership: running.status for leadership, running in self._running.items()}
        found.update({one: PartitionStatus(fault=why) for one, why in self._fenced.items()})
        return found

    @property
    def problems(self) -> Mapping[str, str]:
        """Return what the last round could not look at, and why."""
        return dict(self._problems)

    @property
    def interval_seconds(self) -> float:
        """Return how long to wait for the next round when nothing hints at one."""
        return self._config.cloud_storage_reconciliation_interval_ms / 1000

    def paths(self) -> tuple[str, ...]:
        """Return the directories of the partitions that are archived."""
        return tuple(
            running.newest.log.partition.path
            for running in self._running.values()
            if running.newest is not None
        )

    async def run(self) -> None:
        """Do a round every reconciliation interval, or sooner on a hint, until stopped."""
        async with asyncio.TaskGroup() as tasks:
            while not self._stopping:
                try:
                    await self.step(tasks)
                except TieringError as error:
                    self._fault = str(error)
                    log.error("reconciliation round failed", error=self._fault)  # noqa: TRY400 its text is enough
                else:
                    self._fault = ""
                await self._wait_for_next_round(self.interval_seconds)

    async def step(self, tasks: asyncio.TaskGroup) -> None:
        """Read the world, start and stop archivers, and hand each its observation."""
        started = time.monotonic()
        world = await self.observe()
        plan = plan_assignment(set(world.wanted), set(self._running), set(self._fenced))
        for leadership in plan.stop:
            self._stop_archiver(leadership)
        for leadership in plan.start:
            running = _Running(self._make_archiver(leadership))
            self._running[leadership] = running
            running.task = tasks.create_task(self._archive(leadership, running))
        for leadership, observation in world.wanted.items():
            if (known := self._running.get(leadership)) is not None:
                known.newest = observation
                known.arrived.set()
        self._fenced = {one: why for one, why in self._fenced.items() if one in world.wanted}
        self._publish(time.monotonic() - started)

    async def run_once(self, *, concurrency: int = 16) -> PassResult:
        """
        Step every archiver until a whole round finds nothing more to do.

        A partition whose step fails is tried again for as long as others make progress.
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
            totals[leadership] = PartitionStatus(
                before.uploaded + status.uploaded,
                before.trimmed + status.trimmed,
                status.pending_segments,
                status.fault,
                status.is_store_fault,
            )
            return progressed

        progressing = True
        while progressing and not self._stopping:
            world = await self.observe()
            async with asyncio.TaskGroup() as tasks:
                drains = [tasks.create_task(drain(one, seen)) for one, seen in world.wanted.items()]
            progressing = any(task.result() for task in drains)
            self._publish(0.0)
        return PassResult(totals, self.problems)

    async def observe(self) -> World:
        """
        Read the log directories and ask the broker, once for all partitions.

        Raises:
            BrokerUnavailable: The broker does not answer; archivers go on with what they have.
        """
        scan = await asyncio.to_thread(scan_log_dirs, self._log_dirs)
        problems: dict[str, str] = {problem.path: str(problem) for problem in scan.problems}
        cluster = await self._broker.cluster_id()
        epochs = await self._broker.led_partitions(scan.partitions)
        led = [one for one in scan.partitions if one.topic_partition in epochs]
        topics = await self._topic_configs(led)
        archived = [one for one in led if topics[one.topic_partition.topic].remote_write]
        logs = await asyncio.to_thread(_read_logs, archived, problems)
        bounds = await self._broker.log_bounds(logs)
        wanted: dict[Leadership, Observation] = {}
        for local_log in logs:
            name = local_log.partition.topic_partition
            found = bounds[name]
            if isinstance(found, LogBounds):
                leadership = Leadership(_identify(cluster, local_log.partition), epochs[name])
                wanted[leadership] = Observation(local_log, found, topics[name.topic])
            else:
                problems[local_log.partition.path] = str(found)
        self._report(problems, scan)
        await self._ensure_topics([one.partition for one in wanted])
        self.rounds += 1
        return World(wanted, problems)

    async def _topic_configs(self, led: Sequence[LocalPartition]) -> dict[str, TopicConfig]:
        names = sorted({one.topic_partition.topic for one in led})
        from_broker = await self._broker.topic_configs(names)
        configs = {name: self._config.topic(name, from_broker.get(name, {})) for name in names}
        faults = {fault for config in configs.values() for fault in config.problems}
        for fault in sorted(faults - self._topic_problems):
            log.warning("topic configuration ignored in part", fault=fault)
        self._topic_problems = faults
        return configs

    async def _ensure_topics(self, partitions: Sequence[TopicIdPartition]) -> None:
        """See that each topic's manifest counts the partitions that are archived from here."""
        counts: dict[TopicKey, int] = {}
        for one in partitions:
            key = TopicKey(one.cluster, one.topic, one.topic_id)
            counts[key] = max(counts.get(key, 0), one.partition + 1)
        for key, count in counts.items():
            if self._topics_ensured.get(key, 0) < count:
                await self._manifests.ensure_topic(key, partition_count=count)
                self._topics_ensured[key] = count

    async def _archive(self, leadership: Leadership, running: _Running) -> None:
        """Run one archiver: a step for each observation, and more while it makes progress."""
        while not self._stopping:
            await running.arrived.wait()
            running.arrived.clear()
            if self._stopping or running.newest is None:
                continue
            try:
                running.status, _ = await self._drain(leadership, running.archiver, running.newest)
            except Exception as error:
                topic = leadership.partition.topic
                self._metrics.upload_failures.labels(topic, type(error).__name__).inc()
                log.exception("archiver failed; starting it anew", partition=str(leadership.partition))
                self._running.pop(leadership, None)
                return
            if leadership in self._fenced:
                self._running.pop(leadership, None)
                return
            if running.status.trimmed and running.status.pending_segments:
                self.hint()

    async def _drain(
        self, leadership: Leadership, archiver: Archiver, seen: Observation
    ) -> tuple[PartitionStatus, bool]:
        """Step on one observation until nothing is left in it; return the sum and whether to look again."""
        uploaded = trimmed = pending = gaps = 0
        fault, is_store_fault, needs_another_look = "", False, False
        try:
            while True:
                result = await archiver.step(seen)
                uploaded, trimmed = uploaded + result.uploaded, trimmed + result.trimmed
                pending, fault, gaps = result.pending_segments, result.fault, gaps + result.gaps
                needs_another_look = result.needs_another_look
                if not result.made_progress or self._stopping:
                    break
        except FencedError as error:
            fault = self._fenced[leadership] = str(error)
            self._metrics.forget_partition(leadership.partition.topic_partition)
            log.error("archiver stopped", partition=str(leadership.partition), reason=fault)  # noqa: TRY400 an expected end, not a fault of ours
        except TieringError as error:
            fault, is_store_fault = str(error), isinstance(error, _STORE_FAULTS)
            self._metrics.upload_failures.labels(leadership.partition.topic, type(error).__name__).inc()
            report = log.error if isinstance(error, CorruptDataError) else log.warning
            report("archiver step failed", partition=str(leadership.partition), error=fault)
        moved = bool(uploaded or trimmed or gaps) or needs_another_look
        return PartitionStatus(uploaded, trimmed, pending, fault, is_store_fault), moved

    def _stop_archiver(self, leadership: Leadership) -> None:
        running = self._running.pop(leadership)
        if running.task is not None:
            running.task.cancel()
        self._metrics.forget_partition(leadership.partition.topic_partition)
        log.info("archiver stopped: this broker no longer leads", partition=str(leadership.partition))

    async def _wait_for_next_round(self, interval_seconds: float) -> None:
        try:
            async with asyncio.timeout(interval_seconds):
                await self._hint.wait()
        except TimeoutError:
            return
        self._hint.clear()

    def _report(self, problems: Mapping[str, str], scan: LogDirScan) -> None:
        """Say what is in the way when it is new, and when it is over."""
        for path in sorted(problems.keys() - self._problems.keys()):
            log.error("left out of this round", path=path, reason=problems[path])
        for path in sorted(self._problems.keys() - problems.keys()):
            log.info("readable again", path=path)
        self._problems = dict(problems)
        self._metrics.unreadable_paths.set(len(problems))
        if self.rounds == 0 and scan.left_alone:
            log.info("directories left alone", paths=sorted(scan.left_alone))

    def _publish(self, seconds: float) -> None:
        quarantined = sum(1 for running in self._running.values() if running.archiver.quarantine_fault)
        self._metrics.led_partitions.set(len(self._running))
        self._metrics.quarantined_partitions.set(quarantined)
        self._metrics.fenced_partitions.set(len(self._fenced))
        self._metrics.reconcile_seconds.set(seconds)
        self._metrics.reconciled_at.set_to_current_time()


def _identify(cluster: str, partition: LocalPartition) -> TopicIdPartition:
    name = partition.topic_partition
    return TopicIdPartition(cluster, name.topic, partition.topic_id, name.partition)


def _read_logs(partitions: Sequence[LocalPartition], problems: dict[str, str]) -> list[LocalLog]:
    """Scan each partition's directory; one that cannot be read is a problem, not the end."""
    logs: list[LocalLog] = []
    for partition in partitions:
        try:
            logs.append(read_local_log(partition))
        except (LocalFileError, CorruptDataError) as error:
            problems[partition.path] = str(error)
    return logs
