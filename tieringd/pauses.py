"""
Time in which this process ran, for judgements about the silence of others.

A process can stand still: a signal stops it, its machine is paused, or its memory comes from a slow disk.
What others sent meanwhile lies in its sockets, so their silence of that time proves nothing. `AwakeClock`
does not count such time. A silence is measured on it from its beginning to its judgement.

The age of a fact is another question: a fact grows old while this process stands still too. It is measured on
a steady clock, from the time before the question was sent.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

log = structlog.get_logger(__name__)

BEAT_SECONDS: Final = 0.5
_STEP_SECONDS_MAX: Final = 2 * BEAT_SECONDS
"""The most that this clock advances between two readings: what a pause adds is bounded by it."""
_TOLD_SECONDS: Final = 3.0
"""A pause of this length is logged."""


class AwakeClock:
    """
    The seconds in which this process ran. Belongs to one event loop.

    `run` must run in the loop, or what uses the clock reads it at least once in `BEAT_SECONDS`.
    """

    def __init__(self, *, is_telling: bool = True) -> None:
        """Log pauses if *is_telling*: one clock of a process does."""
        self._is_telling = is_telling
        self._seconds = 0.0
        self._read_at: float | None = None
        """When this clock was read last, in loop time."""

    def now(self) -> float:
        """Return the seconds since the first reading, without those in which this process stood still."""
        now = asyncio.get_running_loop().time()
        passed = 0.0 if self._read_at is None else now - self._read_at
        self._read_at = now
        self._seconds += min(passed, _STEP_SECONDS_MAX)
        if self._is_telling and passed - BEAT_SECONDS >= _TOLD_SECONDS:
            log.warning("this process stood still", seconds=round(passed, 1))
        return self._seconds

    async def run(self) -> None:
        """Read this clock again and again until cancelled."""
        while True:
            self.now()
            await asyncio.sleep(BEAT_SECONDS)
