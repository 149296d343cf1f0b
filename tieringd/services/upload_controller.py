"""
The upload controller: sets the pace of uploads by how much waits to be uploaded.

It sums the backlog, asks the policy (`policies.upload_control`) for shares and pace, and gives
the pace to the gate. A small backlog is uploaded politely; one that threatens to fill the disk,
as after an outage of the store, with everything there is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from tieringd.policies.upload_control import ControllerState, pace_for, update

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.metrics import Metrics
    from tieringd.policies.upload_control import ControllerLimits, PaceLimits
    from tieringd.services.upload_gate import UploadGate

log = structlog.get_logger(__name__)


class UploadController:
    """Keep one daemon's upload gate at the pace that its backlog asks for."""

    def __init__(
        self,
        gate: UploadGate,
        *,
        control: ControllerLimits,
        pace: PaceLimits,
        free_bytes_at_start: int,
        backlog_bytes: Callable[[], int],
        metrics: Metrics,
    ) -> None:
        self._gate = gate
        self._control = control
        self._pace = pace
        self._free_bytes_at_start = free_bytes_at_start
        self._backlog_bytes = backlog_bytes
        self._metrics = metrics
        self._state = ControllerState()
        self._shares = 0

    def set_pace(self, pace: PaceLimits) -> None:
        """Keep to *pace* from the next step on."""
        self._pace = pace

    async def run(self, *, interval_seconds: float) -> None:
        """Set the pace now, and again every interval, until cancelled."""
        while True:
            self.step()
            await asyncio.sleep(interval_seconds)

    def step(self) -> None:
        """Set the pace by the backlog as it is now."""
        backlog_bytes = self._backlog_bytes()
        self._state, shares = update(
            self._control,
            self._state,
            backlog_bytes=backlog_bytes,
            free_bytes_at_start=self._free_bytes_at_start,
        )
        pace = pace_for(
            shares,
            self._control,
            self._pace,
            measured_bytes_per_second=self._gate.measured_bytes_per_second,
            backlog_bytes=backlog_bytes,
        )
        if shares != self._shares:
            log.info(
                "upload shares",
                shares=shares,
                backlog_bytes=backlog_bytes,
                concurrent_uploads=pace.concurrent_uploads,
                bytes_per_second=pace.bytes_per_second,
            )
        self._shares = shares
        self._gate.set_pace(pace)
        self._metrics.upload_shares.set(shares)
        self._metrics.upload_controller_error.set(self._state.error)
        self._metrics.upload_backlog_bytes.set(backlog_bytes)
