"""
The upload controller: sets the pace of uploads by the backlog and by other load on the machine.

`policies.upload_control` decides both. The backlog sets the number of shares that uploads have, once
every interval. The machine's load shows whether other work wants the machine; it is judged twice a second
while uploads run or wait, and not at all otherwise. The pace follows from both, and the gate enforces it.

`LoadWatch` measures the machine's load, over all time and over the moments without uploads. It reads the
kernel's counters when it is asked, when the first upload begins, and when the last one ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tieringd.archiving.upload_gate import UploadGate
from tieringd.broker.host_load import HostCounters, growth_between, load_between, load_of, sum_of
from tieringd.metrics import Metrics
from tieringd.policies.upload_control import (
    ContentionLimits,
    ContentionState,
    ControllerLimits,
    ControllerState,
    HostLoad,
    PaceLimits,
    judge,
    pace_for,
    update,
)

log = structlog.get_logger(__name__)

_RECENT_SECONDS = 5.0
"""A longer interval does not describe the machine's current load."""

PROBE_SECONDS = 0.5
"""Interval of load probes while uploads run or wait."""
LISTENING_PROBE_SECONDS = 0.05
"""Interval of load probes while no upload may begin, short because it delays uploads."""


class LoadWatch:
    """Split a machine's load by whether uploads were under way. Belongs to one event loop."""

    def __init__(self, counters: Callable[[], HostCounters]) -> None:
        self._counters = counters
        self._last_sample = self._quiet_since = counters()
        self._is_uploading = False
        self._others: list[HostCounters] = []
        """The growth of the counters in the moments without uploads."""

    def uploads_begin(self) -> None:
        """Note that the first upload begins."""
        reading = self._counters()
        self._note_quiet(reading)
        self._is_uploading = True
        if reading.at - self._last_sample.at > _RECENT_SECONDS:
            self._last_sample = reading

    def uploads_end(self) -> None:
        """Note that the last upload has ended."""
        self._is_uploading, self._quiet_since = False, self._counters()

    def probe(self) -> tuple[HostLoad, HostLoad]:
        """Return the load since the last probe, and the load of the moments without uploads so far."""
        reading = self._counters()
        total, self._last_sample = load_between(self._last_sample, reading), reading
        if not self._is_uploading:
            self._note_quiet(reading)
        return total, load_of(sum_of(self._others))

    def forget_others(self) -> None:
        """Discard the load measured in the moments without uploads."""
        self._others.clear()

    def _note_quiet(self, reading: HostCounters) -> None:
        growth, self._quiet_since = growth_between(self._quiet_since, reading), reading
        if 0 < growth.at <= _RECENT_SECONDS:
            self._others = [sum_of((*self._others, growth))]


class UploadController:
    """Keep one daemon's upload gate at the pace that its backlog asks for and the machine allows."""

    def __init__(
        self,
        gate: UploadGate,
        *,
        control: ControllerLimits,
        pace: PaceLimits,
        free_bytes_at_start: int,
        backlog_bytes: Callable[[], int],
        counters: Callable[[], HostCounters],
        metrics: Metrics,
        contention: ContentionLimits | None = None,
    ) -> None:
        """Take the collaborators; *counters* reads the machine's load counters."""
        self._gate = gate
        self._control = control
        self._pace = pace
        self._free_bytes_at_start = free_bytes_at_start
        self._backlog_bytes = backlog_bytes
        self._metrics = metrics
        self._limits = contention or ContentionLimits()
        self._state = ControllerState()
        self._shares, self._backlog_seen = control.min_shares, 0
        self._said_shares = 0
        self._contention = ContentionState()
        self._load = LoadWatch(counters)
        self._active = asyncio.Event()
        self._succeeded = 0
        """The number of succeeded uploads when listening began."""
        gate.on_asked = self._active.set
        gate.on_busy, gate.on_quiet = self._load.uploads_begin, self._load.uploads_end

    def set_pace(self, pace: PaceLimits) -> None:
        """Use *pace* from now on."""
        self._pace = pace
        self._apply()

    async def run(self, *, interval_seconds: float) -> None:
        """Set the shares every interval, and probe the load in between, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            while True:
                self.step()
                await asyncio.sleep(interval_seconds)

    async def _watch(self) -> None:
        while True:
            await self._active.wait()
            await asyncio.sleep(LISTENING_PROBE_SECONDS if self._contention.is_listening else PROBE_SECONDS)
            self.probe()

    def step(self) -> None:
        """Set the shares by the current backlog."""
        self._backlog_seen = self._backlog_bytes()
        self._state, self._shares = update(
            self._control,
            self._state,
            backlog_bytes=self._backlog_seen,
            free_bytes_at_start=self._free_bytes_at_start,
        )
        self._apply()
        if self._shares != self._said_shares:
            self._said_shares = self._shares
            log.info(
                "upload shares",
                shares=self._shares,
                backlog_bytes=self._backlog_seen,
                concurrent_uploads=self._gate.pace.concurrent_uploads,
                bytes_per_second=self._gate.pace.bytes_per_second,
            )
        self._metrics.upload_shares.set(self._shares)
        self._metrics.upload_controller_error.set(self._state.error)
        self._metrics.upload_backlog_bytes.set(self._backlog_seen)
        self._metrics.health.loop_succeeded("upload_controller")

    def probe(self) -> None:
        """Judge by the load since the last probe whether other work wants the machine."""
        before = self._contention
        total, others = self._load.probe()
        self._contention = judge(
            before,
            self._limits,
            total=total,
            others=others,
            is_catching_up=self._gate.waiting_old_uploads > 0,
            is_moving=self._gate.succeeded_uploads > self._succeeded,
            now=self._gate.time(),
        )
        if others.seconds >= self._limits.heard_seconds:
            self._load.forget_others()
        if not self._contention.is_listening or not before.is_listening:
            self._succeeded = self._gate.succeeded_uploads
        if self._contention != before:
            self._apply()
            if self._contention.contended_by != before.contended_by:
                log.debug("uploads meet others", contended_by=self._contention.contended_by)
        self._count_held()
        has_uploads = self._gate.uploads_in_flight or self._gate.waiting_uploads
        if not has_uploads and not self._contention.is_listening:
            # While listening no upload begins, so probing goes on until enough was heard.
            self._active.clear()

    def _apply(self) -> None:
        self._gate.set_pace(
            pace_for(
                self._shares,
                self._control,
                self._pace,
                contention=self._contention,
                measured_bytes_per_second=self._gate.measured_bytes_per_second,
                backlog_bytes=self._backlog_seen,
            )
        )

    def _count_held(self) -> None:
        for by, seconds in self._gate.take_held_seconds().items():
            self._metrics.upload_held_seconds.labels(by).inc(seconds)
