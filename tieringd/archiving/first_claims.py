"""
The order in which archivers that begin claim their partitions.

A claim reads the partition's manifest, and commits it where the last leader was another one. Beside ten
thousand partitions that takes half a minute. If all claims began at once, a segment that was closed before
the daemon started would wait for the claims of all partitions in which nothing happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count

from tieringd.model.local_log import LocalLog

CLAIMS_AT_ONCE = 32
"""Enough where a store answers in tens of milliseconds, and a short queue where it flushes to a disk."""


def closed_at_ns(log: LocalLog) -> int:
    """
    Return when the last closed segment of *log* was written to, in nanoseconds since 1970; 0 without one.

    Segments that were closed while no daemon ran are not archived yet. They are newer than those that are.
    """
    return max((one.modified_ns for one in log.segments if not one.is_active), default=0)


class FirstClaims:
    """Lets first claims begin, a few at a time: first those of the logs with the newest closed segments."""

    def __init__(self, at_once: int = CLAIMS_AT_ONCE) -> None:
        self._free = at_once
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._asked = count()

    @asynccontextmanager
    async def turn(self, closed_at: int) -> AsyncIterator[None]:
        """Wait for a turn, and keep it in the context. *closed_at* is that of `closed_at_ns`."""
        if self._free:
            self._free -= 1
        else:
            await self._given_a_turn(closed_at)
        try:
            yield
        finally:
            self._pass_on()

    async def _given_a_turn(self, closed_at: int) -> None:
        given = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (-closed_at, next(self._asked), given))
        try:
            await given
        except asyncio.CancelledError:
            # A cancelled future stays in the heap, and is passed over. A turn that came meanwhile goes on.
            if given.done() and not given.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give a turn that has become free to the first that waits."""
        while self._waiting:
            _, _, given = heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1
