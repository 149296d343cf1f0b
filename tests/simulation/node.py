"""One life of a daemon's process in a cluster: all its services, over its own wires to store and broker."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

from tests.fakes.archive import archive_in, reconciler_of, unread_metrics
from tests.fakes.host import FakeHost
from tests.simulation.faults import ClusterWire
from tieringd.archiving.pinner import PIN_UNKNOWN_AFTER_SECONDS
from tieringd.archiving.upload_controller import UploadController
from tieringd.broker.pins import PinDirectory
from tieringd.errors import TieringError
from tieringd.policies.upload_control import ControllerLimits, PaceLimits
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.resilient import ResilientStore, StoreLimits

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.simulation.cluster import Cluster
    from tieringd.housekeeping.partition_sweep import HousekeepingJob

ROUND_SECONDS = 3.0
JOB_SECONDS = 7.0
_PIN_PATIENCE_SECONDS = PIN_UNKNOWN_AFTER_SECONDS + 4 * ROUND_SECONDS
LIMITS = StoreLimits(
    initial_backoff_seconds=0.1,
    max_backoff_seconds=1.0,
    segment_upload_timeout_seconds=6.0,
    manifest_upload_timeout_seconds=4.0,
)


class Node:
    """The daemon beside broker *number*. It ends at `kill`; what it has sent may still arrive."""

    def __init__(self, cluster: Cluster, number: int, writer_id: str, *, fault_rate: float) -> None:
        self.number = number
        self.store_wire = ClusterWire(cluster.random, fault_rate=fault_rate)
        self.broker_wire = ClusterWire(cluster.random, fault_rate=fault_rate / 2)
        store = ResilientStore(
            cluster.store_over(self.store_wire, number),
            LIMITS,
            random=Random(cluster.random.random()),
            tries_checksums=cluster.tries_checksums,
        )
        log_dir, pin_root = cluster.directories(number)
        clock = ArchiveClock(
            wall_ms=lambda: cluster.now_ms() + cluster.clock_errors_ms.get(number, 0),
            steady_seconds=lambda: cluster.now_ms() / 1000,
        )
        clock.listen_to(store.backend)
        pins = {str(log_dir): PinDirectory(str(pin_root))} if cluster.has_pins else {}
        metrics = unread_metrics()
        self.pinner = cluster.pinner_of(pins, metrics)
        self.reconciler = reconciler_of(
            config := cluster.config(log_dir),
            archive := archive_in(store, writer_id=writer_id, clock=clock, layout=cluster.layout()),
            cluster.broker_over(self.broker_wire, number),
            metrics=metrics,
            pinner=self.pinner,
            max_interval_ms=cluster.max_interval_ms,
        )
        self._controller = UploadController(
            archive.gate,
            control=ControllerLimits(),
            pace=PaceLimits(4),
            free_bytes_at_start=10**9,
            backlog_bytes=lambda: self.reconciler.backlog_bytes,
            counters=FakeHost(others=1.0).counters,
            metrics=metrics,
        )
        self._jobs = cluster.jobs(config, archive, self.reconciler, writer_id, metrics)
        self._asides: set[asyncio.Task[Any]] = set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def wires(self) -> tuple[ClusterWire, ClusterWire]:
        """Return its ways to the outside."""
        return self.store_wire, self.broker_wire

    def has_scanned_since(self, moment: float) -> bool:
        """Say whether the daemon must have seen everything that lay on its disk at *moment*, in loop time."""
        wire = self.broker_wire
        rested_at = max(wire.disturbed_at, moment)
        return not wire.is_disturbed and asyncio.get_running_loop().time() > rested_at + _PIN_PATIENCE_SECONDS

    def has_rested_since(self, moment: float, *, seconds: float = 10 * ROUND_SECONDS) -> bool:
        """Say whether nothing kept the daemon from its work for *seconds* at least, all after *moment*."""
        rested_at = max(moment, *(wire.disturbed_at for wire in self.wires))
        is_disturbed = any(wire.is_disturbed for wire in self.wires)
        return not is_disturbed and asyncio.get_running_loop().time() > rested_at + seconds

    def has_reached_store_since(self, moment: float) -> bool:
        """Say whether the bucket answered the daemon in time for a while, all after *moment*."""
        wire = self.store_wire
        rested_at = max(moment, wire.disturbed_at) + 10 * ROUND_SECONDS
        return not wire.is_disturbed and asyncio.get_running_loop().time() > rested_at

    @property
    def faults(self) -> dict[str, str]:
        """Return what holds each of its partitions back."""
        statuses = self.reconciler.statuses().items()
        return {str(one.partition): f"{each.fault}{each.waits_because}" for one, each in statuses}

    def aside(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something in this process beside its loops, for as long as it lives."""
        task = asyncio.get_running_loop().create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    async def kill(self) -> None:
        """End it wherever it is."""
        self._task.cancel()
        for task in self._asides:
            task.cancel()
        await asyncio.wait({self._task, *self._asides})
        assert self._task.cancelled(), self._task.exception()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reconciler.run())
            tasks.create_task(self._controller.run(interval_seconds=10))
            for job in self._jobs:
                tasks.create_task(_turn_on(job))


async def _turn_on(job: HousekeepingJob) -> None:
    """Let a job of housekeeping do its turns, as its service does."""
    while True:
        await asyncio.sleep(JOB_SECONDS)
        with suppress(TieringError):
            await job.turn(requests_max=50)
