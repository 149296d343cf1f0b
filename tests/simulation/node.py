"""One life of a daemon's process in a cluster: all its services, over its own wires to store and broker."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from tests.fakes.archive import archive_in, reconciler_of, tiered_config
from tests.fakes.host import FakeHost
from tests.fakes.store import DistantStore
from tests.simulation.cluster_broker import ClusterBroker
from tests.simulation.faults import ClusterWire
from tieringd.archiving.reconciler import PIN_UNKNOWN_AFTER_SECONDS
from tieringd.archiving.upload_controller import UploadController
from tieringd.broker.pins import PinDirectory
from tieringd.metrics import Metrics
from tieringd.policies.upload_control import ControllerLimits, PaceLimits
from tieringd.storage.resilient import ResilientStore, StoreLimits

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

ROUND_SECONDS = 3.0
_PIN_PATIENCE_SECONDS = PIN_UNKNOWN_AFTER_SECONDS + 4 * ROUND_SECONDS
_LIMITS = StoreLimits(
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
            DistantStore(cluster.store, self.store_wire, on_put=lambda key: cluster.on_put(number, key)),
            _LIMITS,
            random=Random(cluster.random.random()),
        )
        log_dir, pin_root = cluster.directories(number)
        self.reconciler = reconciler_of(
            tiered_config(log_dir, target_bytes=cluster.target_bytes, interval_ms=int(ROUND_SECONDS * 1000)),
            archive := archive_in(store, writer_id=writer_id, now_ms=cluster.now_ms),
            ClusterBroker(
                number,
                cluster.partitions,
                self.broker_wire,
                on_trim=cluster.on_trim,
                elects_uncleanly=cluster.elects_uncleanly,
            ),
            now_ms=cluster.now_ms,
            pins={str(log_dir): PinDirectory(str(pin_root))} if cluster.has_pins else None,
            max_interval_ms=cluster.max_interval_ms,
        )
        self._controller = UploadController(
            archive.gate,
            control=ControllerLimits(),
            pace=PaceLimits(4),
            free_bytes_at_start=10**9,
            backlog_bytes=lambda: self.reconciler.backlog_bytes,
            counters=FakeHost(others=1.0).counters,
            metrics=Metrics(),
        )
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def wires(self) -> tuple[ClusterWire, ClusterWire]:
        """Return its ways to the outside."""
        return self.store_wire, self.broker_wire

    def has_looked_since(self, moment: float) -> bool:
        """Say whether the daemon must have seen everything that lay on its disk at *moment*, in loop time."""
        wire = self.broker_wire
        rested_at = max(wire.disturbed_at, moment)
        return not wire.is_disturbed and asyncio.get_running_loop().time() > rested_at + _PIN_PATIENCE_SECONDS

    @property
    def faults(self) -> dict[str, str]:
        """Return what holds each of its partitions back."""
        statuses = self.reconciler.statuses().items()
        return {str(one.partition): f"{each.fault}{each.waits_because}" for one, each in statuses}

    async def kill(self) -> None:
        """End it wherever it is."""
        self._task.cancel()
        await asyncio.wait({self._task})
        assert self._task.cancelled(), self._task.exception()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reconciler.run())
            tasks.create_task(self._controller.run(interval_seconds=10))
