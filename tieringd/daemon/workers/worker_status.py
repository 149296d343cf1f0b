"""What the status page and `tieringd status` show of a worker of the gateway."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, for the status page."""

    number: int
    pid: int | None
    """None while it waits to be started."""
    is_serving: bool
    connections: int
    seconds: float
    """Since it was started, or since it ended."""
    restarts: int
    last_end: str
    """How the one before it ended; empty if none did."""
