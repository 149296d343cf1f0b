"""The time of day, in the unit that manifests and policies have it in."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Return the time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
