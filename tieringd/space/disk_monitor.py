"""
The disk monitor: measures the disks every second, for metrics, the log and other parts.

It judges with `policies.disk_alert` and only reports: degraded mode and the ballast keeper listen to it.
The cache's disk has metrics and a log line of its own, and never makes the broker degraded.

`Rounds` repeats work at every interval, and at once on a hint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from tieringd.broker.disk_use import FilesystemReading, Filesystems
from tieringd.errors import LocalFileError
from tieringd.metrics import DiskGauges, Metrics
from tieringd.model.disk_state import DiskState
from tieringd.policies.disk_alert import AlertSettings, DiskReading, DiskVerdict, alert_line, judge_disk

log = structlog.get_logger(__name__)

LINE_INTERVAL_SECONDS: Final = 3600.0
"""A disk whose state does not change is logged once in this time."""


class Rounds:
    """The rounds of one repeated piece of work."""

    def __init__(self) -> None:
        self._hinted = asyncio.Event()

    def hint(self) -> None:
        """Start the next round now, or once the current one is over."""
        self._hinted.set()

    async def run(self, step: Callable[[], Awaitable[None]], *, interval_seconds: float) -> None:
        """Do *step* now, on every hint, and at least every interval, until cancelled."""
        while True:
            self._hinted.clear()
            await step()
            try:
                async with asyncio.timeout(interval_seconds):
                    await self._hinted.wait()
            except TimeoutError:
                continue


@dataclass(slots=True)
class _Disk:
    """What is known of one filesystem, since it was first measured."""

    verdict: DiskVerdict
    said_at: float | None = None


class DiskMonitor:
    """Watch the filesystems of one broker's log directories, and of the cache."""

    def __init__(
        self,
        filesystems: Filesystems,
        *,
        log_dirs: Sequence[str],
        cache_dir: str | None,
        settings: AlertSettings,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        """Take the directories to watch; *now* is a clock in seconds that never goes back."""
        self._filesystems = filesystems
        self._settings = settings
        self._now = now
        self._health = metrics.health
        self._listeners: list[Callable[[], None]] = []
        self._watches = [_Watch(tuple(log_dirs), metrics.disk)]
        if cache_dir is not None:
            self._watches.append(_Watch((cache_dir,), metrics.cache_disk))

    @property
    def state(self) -> DiskState | None:
        """Return the worst state of a log directory's disk; None before one could be measured."""
        disks = self._watches[0].disks
        return max((disk.verdict.state for disk in disks.values()), default=None)

    def set_settings(self, settings: AlertSettings) -> None:
        """Judge by *settings* from the next round on."""
        self._settings = settings

    def listen(self, listener: Callable[[], None]) -> None:
        """Call *listener* whenever the state of a disk has changed."""
        self._listeners.append(listener)

    async def run(self, *, interval_seconds: float = 1.0) -> None:
        """Measure now, and again every interval, until cancelled."""
        self._health.loop_succeeded("disks")
        while True:
            await self.step()
            await asyncio.sleep(interval_seconds)

    async def step(self) -> None:
        """Measure once, and report changes."""
        is_changed, has_seen_all = False, True
        for watch in self._watches:
            measurement = await self._filesystems.measure(watch.paths)
            for reading in measurement.readings:
                is_changed |= self._judge(watch, reading)
            watch.keep_only({reading.name for reading in measurement.readings})
            watch.report(measurement.problems)
            has_seen_all = has_seen_all and not measurement.problems
        if has_seen_all:
            self._health.loop_succeeded("disks")
        if is_changed:
            for listener in self._listeners:
                listener()

    def _judge(self, watch: _Watch, found: FilesystemReading) -> bool:
        """Judge one reading; return whether its disk's state has changed."""
        reading = DiskReading(found.name, total_bytes=found.total_bytes, free_bytes=found.free_bytes)
        disk = watch.disks.get(found.name)
        before = disk.verdict.state if disk else None
        verdict = judge_disk(reading, self._settings, previous=before or DiskState.OK)
        watch.gauges.set(
            found.name, total_bytes=found.total_bytes, free_bytes=found.free_bytes, state=verdict.state
        )
        disk = watch.disks.setdefault(found.name, _Disk(verdict))
        disk.verdict = verdict
        self._tell(disk, reading, is_changed=verdict.state != (before or DiskState.OK))
        return verdict.state is not before

    def _tell(self, disk: _Disk, reading: DiskReading, *, is_changed: bool) -> None:
        if disk.verdict.state is DiskState.OK:
            if is_changed:
                log.info("storage space is enough again", path=reading.path, free_bytes=reading.free_bytes)
            disk.said_at = None
        elif is_changed or disk.said_at is None or self._now() - disk.said_at >= LINE_INTERVAL_SECONDS:
            disk.said_at = self._now()
            log.error(alert_line(reading, disk.verdict))


class _Watch:
    """Some directories, their disks by name, and the gauges that show them."""

    def __init__(self, paths: tuple[str, ...], gauges: DiskGauges) -> None:
        self.paths = paths
        self.gauges = gauges
        self.disks: dict[str, _Disk] = {}
        self._problems: dict[str, str] = {}

    def keep_only(self, names: set[str]) -> None:
        """Forget the disks without a current reading: the broker does not write to them either."""
        for gone in self.disks.keys() - names:
            self.gauges.forget(gone)
            del self.disks[gone]

    def report(self, problems: dict[str, LocalFileError]) -> None:
        """Log once for each directory why it cannot be measured."""
        found = {path: str(error) for path, error in problems.items()}
        for path, problem in found.items():
            if self._problems.get(path) != problem:
                log.warning("disk is not watched", path=path, error=problem)
        self._problems = found
