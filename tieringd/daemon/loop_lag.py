"""How late the event loop runs its timers, as a metric of the daemon and of each worker."""

from __future__ import annotations

import asyncio
from typing import Final

from tieringd.metrics import Metrics

_PROBE_SECONDS: Final = 1.0


async def measure_loop(metrics: Metrics) -> None:
    """Measure how late the event loop runs a timer, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _PROBE_SECONDS
        await asyncio.sleep(_PROBE_SECONDS)
        metrics.durations.loop_lag.observe(max(0.0, loop.time() - due))
