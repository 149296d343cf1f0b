"""The host's clocks: the time of day, which can be wrong and can be set, and a monotonic clock."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Return the time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def steady_seconds() -> float:
    """Return seconds that pass evenly, also while the host sleeps; this clock cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
