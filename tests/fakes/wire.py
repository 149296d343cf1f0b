"""
The connection between the daemon and other systems, on which requests are slow, lost or cut off.

A fake store or broker passes each request to a `Wire` as an effect. The plain wire carries requests at
once; the others lose and delay them on purpose. No wire depends on the meaning of a request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from tieringd.errors import TieringError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

T = TypeVar("T")

EFFECTS = frozenset({"put", "join", "delete_many", "trim", "alter_client_quotas"})
"""The operations that change another system."""


class Wire:
    """Carries every request at once."""

    async def sendable(self) -> None:
        """Wait until the daemon may send. A paused daemon may not."""

    async def carry(
        self,
        operation: str,
        effect: Callable[[], Awaitable[T]],
        *,
        lost: Callable[[str, bool], TieringError],
        detach: Callable[[], Callable[[], Awaitable[Any]]] | None = None,
    ) -> T:
        """
        Carry a request to its effect, and return its answer.

        Args:
            operation: The name of the request.
            effect: Carries out the request, and gives its answer.
            lost: Makes the error for a lost request, from the operation and whether the effect may have
                happened.
            detach: Makes an effect that is independent of the caller, for a request that takes effect late.
                None if the request cannot.
        """
        await asyncio.sleep(0)
        return await effect()


class UnreliableWire(Wire):
    """
    A slow wire that loses requests and answers at random, determined by a seed.

    The effect of a request that was given up may still happen later. `late` has those that are under way.
    """

    def __init__(self, random: Random, *, fault_rate: float, latency_seconds: float = 0.02) -> None:
        self._random = random
        self._fault_rate = fault_rate
        self._latency_seconds = latency_seconds
        self.is_down = False
        self.late: set[asyncio.Task[Any]] = set()

    def restore(self) -> None:
        """End an outage."""
        self.is_down = False

    def end_faults(self) -> None:
        """End an outage, and lose nothing from here on."""
        self.restore()
        self.become_reliable()

    def become_reliable(self) -> None:
        """Lose nothing from now on. Late effects that are under way still happen."""
        self._fault_rate = 0.0

    async def carry(
        self,
        operation: str,
        effect: Callable[[], Awaitable[T]],
        *,
        lost: Callable[[str, bool], TieringError],
        detach: Callable[[], Callable[[], Awaitable[Any]]] | None = None,
    ) -> T:
        """Carry a request to its effect; or lose the request, delay its effect, or lose the answer."""
        await self._delay()
        fate = self._random.random()
        if self.is_down or fate < self._fault_rate:
            raise lost(operation, False)
        if fate < 2 * self._fault_rate and detach is not None:
            task = asyncio.get_running_loop().create_task(self._happen_late(detach()))
            self.late.add(task)
            task.add_done_callback(self.late.discard)
            raise lost(operation, True)
        result = await effect()
        await self._delay()
        if fate > 1 - self._fault_rate:
            raise lost(operation, True)
        return result

    async def _delay(self) -> None:
        # Some requests take a hundred times as long as others.
        slow = 100 if self._random.random() < self._fault_rate else 1
        await asyncio.sleep(slow * self._random.expovariate(1 / self._latency_seconds))

    async def _happen_late(self, effect: Callable[[], Awaitable[Any]]) -> None:
        await asyncio.sleep(self._random.uniform(0, 5))
        try:
            await effect()
        except TieringError:
            # The caller has given up, so there is nowhere to report the error.
            return


class CrashingWire(Wire):
    """
    A wire on which the daemon's process ends at the *at*-th point.

    Each effect has a point before and after it. From the end on no request has an effect or an answer. The
    caller must be cancelled, and never used again.
    """

    def __init__(self, at: int | None = None) -> None:
        self._at = at
        self.points = 0
        self.crashed = asyncio.Event()

    async def carry(
        self,
        operation: str,
        effect: Callable[[], Awaitable[T]],
        *,
        lost: Callable[[str, bool], TieringError],
        detach: Callable[[], Callable[[], Awaitable[Any]]] | None = None,
    ) -> T:
        """Carry a request to its effect. The process may end before and after the effect."""
        await asyncio.sleep(0)
        await self._point(operation)
        result = await effect()
        await self._point(operation)
        return result

    async def _point(self, operation: str) -> None:
        if operation in EFFECTS and not self.crashed.is_set():
            self.points += 1
            if self.points == self._at:
                self.crashed.set()
        if self.crashed.is_set():
            await asyncio.get_running_loop().create_future()
