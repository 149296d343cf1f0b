"""The parts for the local disks: the monitor, degraded mode, the ballast keeper and the space manager."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.broker.base import Broker
from tieringd.broker.disk_use import LocalFilesystems
from tieringd.config import Config
from tieringd.metrics import Metrics
from tieringd.space.ballast import Ballast, BallastSettings
from tieringd.space.degraded_mode import DegradedMode, DegradedParts, DegradedSettings, DiskStateBoard
from tieringd.space.disk_monitor import DiskMonitor
from tieringd.space.producer_brake import ProducerBrake
from tieringd.space.space_manager import SpaceManager
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.base import ObjectStore

if TYPE_CHECKING:
    # An ordinary import would load the archiver into commands that do not need it.
    from tieringd.archiving.reconciler import Reconciler


@dataclass(frozen=True, slots=True)
class DiskParts:
    """The parts that manage the disks of one broker."""

    monitor: DiskMonitor
    degraded: DegradedMode | None
    """Only with a Kafka broker: Redpanda refuses writes itself, and without a broker there are none."""
    ballast: Ballast | None
    """None unless it is configured."""
    space: SpaceManager

    def tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """
        Return what the parts run until they are cancelled, by the names of their tasks.

        Their order does not matter. Parts that act on the monitor's state do nothing before there is one,
        and get a hint when it changes. The space manager needs none of the others.
        """
        parts = {
            "disks": self.monitor,
            "degraded_mode": self.degraded,
            "ballast": self.ballast,
            "space": self.space,
        }
        return {name: part.run for name, part in parts.items() if part is not None}

    def set_config(self, config: Config) -> None:
        """Let running parts use *config*, as far as it can change while they run."""
        self.monitor.set_settings(config.disk_alerts)
        self.space.set_config(config)
        if self.degraded is not None:
            self.degraded.set_settings(_degraded_settings(config))
        if self.ballast is not None:
            self.ballast.set_settings(_ballast_settings(config))


def disk_parts(
    config: Config,
    metrics: Metrics,
    store: ObjectStore,
    broker: Broker,
    *,
    reconciler: Reconciler,
    clock: ArchiveClock,
    tell_cache: Callable[[int | None], None] = lambda _: None,
) -> DiskParts:
    """Build the parts; nothing runs yet. *tell_cache* gets the bytes that the chunk cache may hold."""
    monitor = DiskMonitor(
        LocalFilesystems(),
        log_dirs=[str(path) for path in config.broker.log_dirs],
        cache_dir=_made_cache_directory(config),
        settings=config.disk_alerts,
        metrics=metrics,
        now=time.monotonic,
    )
    degraded = ballast = None
    if config.broker.kind == "kafka":
        degraded = _degraded(config, metrics, store, broker, monitor=monitor, now_ms=clock.wall_ms)
        monitor.listen(degraded.hint)
    if config.tune_ballast_file:
        ballast = ballast_of(config, metrics)
        monitor.listen(ballast.hint)
    space = SpaceManager(
        config, reconciler=reconciler, metrics=metrics, ages_ms=clock.ages_ms, tell_cache=tell_cache
    )
    return DiskParts(monitor, degraded, ballast, space)


def _made_cache_directory(config: Config) -> str | None:
    """Return the chunk cache's directory, created so that its disk can be watched; None without a cache."""
    if not config.cloud_storage_enabled:
        return None
    with suppress(OSError):  # The monitor logs that a missing directory is not watched.
        config.cache_directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    return str(config.cache_directory)


def ballast_of(config: Config, metrics: Metrics) -> Ballast:
    """Return the keeper of the ballast file, whether or not the daemon is to keep one."""
    log_dirs = config.broker.log_dirs
    if config.ballast_file_path is not None:
        candidates = [config.ballast_file_path]
    else:
        beside = log_dirs[0].parent / f".{log_dirs[0].name}.tieringd-ballast"
        candidates = [config.state_directory / "ballast", beside]
    return Ballast(
        [str(path) for path in candidates],
        log_dirs=[str(path) for path in log_dirs],
        filesystems=LocalFilesystems(),
        settings=_ballast_settings(config),
        metrics=metrics,
    )


def _degraded(
    config: Config,
    metrics: Metrics,
    store: ObjectStore,
    broker: Broker,
    *,
    monitor: DiskMonitor,
    now_ms: Callable[[], int],
) -> DegradedMode:
    async def connect() -> DegradedParts:
        cluster, node_id = await broker.cluster_id(), await broker.node_id()
        board = DiskStateBoard(store, cluster=cluster, node_id=node_id, now_ms=now_ms, now=time.monotonic)
        brake = ProducerBrake(store, broker, cluster=cluster, node_id=node_id, now_ms=now_ms)
        return DegradedParts(board, brake)

    return DegradedMode(
        connect,
        own_state=lambda: monitor.state,
        settings=_degraded_settings(config),
        metrics=metrics,
    )


def _degraded_settings(config: Config) -> DegradedSettings:
    # `refuse_writes` lowers quotas as well: without a gateway nothing refuses the writes.
    return DegradedSettings(
        holds_back=config.storage_degraded_action != "alert",
        rate=config.storage_degraded_producer_byte_rate,
        refuses=config.storage_degraded_action == "refuse_writes",
    )


def _ballast_settings(config: Config) -> BallastSettings:
    return BallastSettings(
        size_bytes=config.ballast_file_size,
        alerts=config.disk_alerts,
        releases=config.ballast_release_when_degraded,
    )
