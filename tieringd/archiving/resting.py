"""
Which archivers rest, until when, and how one is woken.

A round steps the archivers that are awake and those that are due. `Resting` finds them without asking
each of ten thousand.

`WakeUp` is what the one task of an archiver waits for. An `asyncio.Event` takes a kilobyte for the list of
those that wait for it.

`ChangeFeed` tells which archived partitions have changed, for work that goes over all partitions once,
and then over the changed ones. A partition has changed when there is a new observation of it, when its
archiver has done a step, and when its archiver begins or ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from itertools import count

from tieringd.model.partition import Leadership

_STALE_DUE_TIMES = 64
"""How many outdated entries the heap of due times may hold, beyond as many as archivers rest."""


class WakeUp:
    """An event that one task at a time waits for. Used on one event loop."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Let the waiting task go on, or the next that waits."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until it is set, and clear it."""
        while not self._is_set:
            assert self._waiter is None, "one task at a time waits"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


class ChangeFeed:
    """Report changed partitions to several readers, each at its own pace. Used on one event loop."""

    def __init__(self) -> None:
        self._unread: list[set[Leadership]] = []

    def note(self, leadership: Leadership) -> None:
        """Note that a partition has changed."""
        for unread in self._unread:
            unread.add(leadership)

    def reader(self) -> Callable[[], Collection[Leadership]]:
        """Return a function that returns the partitions changed since its last call."""
        unread: set[Leadership] = set()
        self._unread.append(unread)

        def read() -> Collection[Leadership]:
            changed = tuple(unread)
            unread.clear()
            return changed

        return read


class Resting:
    """
    Keep which archivers are awake, and until when the others rest. Used on one event loop.

    An unknown leadership is neither awake nor resting: no round steps it.
    """

    def __init__(self) -> None:
        self._awake: set[Leadership] = set()
        self._until_ms: dict[Leadership, float] = {}
        self._due: list[tuple[float, int, Leadership]] = []
        """
        A heap of due times with their leaderships. An entry counts only while `_until_ms` has the same time.

        An archiver that is woken in each round adds one for each rest, long before it is due, so outdated
        entries are dropped when they are too many.
        """
        self._numbers = count()
        self._asked_ms: float = -math.inf
        """The time of the last call of `due`."""

    @property
    def due_times(self) -> int:
        """Return how many due times are kept, outdated ones included."""
        return len(self._due)

    @property
    def awake(self) -> Collection[Leadership]:
        """Return the archivers that do not rest."""
        return self._awake

    def wake(self, leadership: Leadership) -> None:
        """Let each round step this archiver until it rests."""
        self._until_ms.pop(leadership, None)
        self._awake.add(leadership)

    def rest(self, leadership: Leadership, *, until_ms: float) -> None:
        """Let no round step this archiver before *until_ms*, on the clock that `due` is asked with."""
        self._awake.discard(leadership)
        self._until_ms[leadership] = until_ms
        if until_ms == math.inf:
            return
        heappush(self._due, (until_ms, next(self._numbers), leadership))
        if len(self._due) > 2 * len(self._until_ms) + _STALE_DUE_TIMES:
            self._due = [
                (due_ms, next(self._numbers), one)
                for one, due_ms in self._until_ms.items()
                if due_ms < math.inf
            ]
            heapify(self._due)

    def forget(self, leadership: Leadership) -> None:
        """Forget an archiver that has ended."""
        self._awake.discard(leadership)
        self._until_ms.pop(leadership, None)

    def due(self, now_ms: int) -> Collection[Leadership]:
        """
        Wake the archivers that are due by *now_ms*; return all that are awake.

        A clock that was set back wakes all of them, so that it does not prolong their rest.
        """
        if now_ms < self._asked_ms:
            for leadership in tuple(self._until_ms):
                self.wake(leadership)
        self._asked_ms = now_ms
        while self._due and self._due[0][0] <= now_ms:
            until_ms, _, leadership = heappop(self._due)
            if self._until_ms.get(leadership) == until_ms:
                self.wake(leadership)
        return tuple(self._awake)
