"""Faults of a cluster's daemons: a wire that hangs for minutes, and a process that is stopped and goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from tests.fakes.wire import EFFECTS, UnreliableWire
from tieringd.errors import TieringError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

T = TypeVar("T")

HANG_SECONDS = (20.0, 240.0)
_QUICK_SECONDS = 0.5


class ClusterWire(UnreliableWire):
    """
    An unreliable wire that can also hang, and stop with its daemon.

    While it is frozen no request leaves the daemon and no answer arrives. Its timers go on, as
    they are all due at once when a stopped process continues.
    """

    def __init__(self, random: Random, *, fault_rate: float) -> None:
        super().__init__(random, fault_rate=fault_rate)
        self._running = asyncio.Event()
        self._running.set()
        self.hangs = False
        self.stops_at: tuple[str, bool] | None = None
        """The operation at which the daemon stops next, and whether that is after its effect."""
        self.stops_after = 0
        """How many of these operations pass before it stops."""
        self.refuses_writes = False
        """Whether no request that changes something gets through."""
        self.on_stop: Callable[[], None] = lambda: None
        self.disturbed_at = asyncio.get_running_loop().time()
        """When a request last failed, or took long."""
        self._under_way: list[float] = []

    def freeze(self) -> None:
        """Stop the daemon."""
        self._running.clear()

    async def sendable(self) -> None:
        """Wait until the daemon runs."""
        await self._running.wait()

    @property
    def is_disturbed(self) -> bool:
        """Say whether requests fail or hang at present."""
        oldest = min(self._under_way, default=asyncio.get_running_loop().time())
        is_waiting = asyncio.get_running_loop().time() > oldest + _QUICK_SECONDS
        return is_waiting or self.is_down or self.hangs or not self._running.is_set()

    def thaw(self) -> None:
        """Let the daemon continue."""
        self._running.set()
        self.disturbed_at = asyncio.get_running_loop().time()

    def restore(self) -> None:
        """End an outage, and let new calls be answered in time."""
        super().restore()
        self.hangs = self.refuses_writes = False
        self.disturbed_at = asyncio.get_running_loop().time()

    def end_faults(self) -> None:
        """Let every request through from now on."""
        self.restore()
        self.thaw()
        self._fault_rate = 0.0

    async def carry(
        self,
        operation: str,
        effect: Callable[[], Awaitable[T]],
        *,
        lost: Callable[[str, bool], TieringError],
        detach: Callable[[], Callable[[], Awaitable[Any]]] | None = None,
    ) -> T:
        """Bring a request to its effect, however long that takes."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        self._under_way.append(began_at)
        has_answer = False
        try:
            self._stop_if((operation, False))
            await self._running.wait()
            if self.refuses_writes and operation in EFFECTS:
                raise lost(operation, False)
            if self.hangs and self._random.random() < 0.6:
                await self._hang(detach)
            result = await super().carry(operation, effect, lost=lost, detach=detach)
            self._stop_if((operation, True))
            await self._running.wait()
            has_answer = True
        finally:
            self._under_way.remove(began_at)
            if not has_answer or loop.time() > began_at + _QUICK_SECONDS:
                self.disturbed_at = loop.time()
        return result

    def _stop_if(self, point: tuple[str, bool]) -> None:
        if point == self.stops_at and self.stops_after:
            self.stops_after -= 1
        elif point == self.stops_at:
            self.stops_at = None
            self.on_stop()

    async def _hang(self, detach: Callable[[], Callable[[], Awaitable[Any]]] | None) -> None:
        """Keep the caller waiting; a request that it gives up may take effect long after all the same."""
        seconds = self._random.uniform(*HANG_SECONDS)
        if detach is None or self._random.random() < 0.5:
            await asyncio.sleep(seconds)
            return
        happens = detach()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            task = asyncio.get_running_loop().create_task(self._happen_later(happens, seconds))
            self.late.add(task)
            task.add_done_callback(self.late.discard)
            raise

    async def _happen_later(self, effect: Callable[[], Awaitable[Any]], seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            await effect()
        except TieringError:
            # No caller is left to learn that it failed.
            return
