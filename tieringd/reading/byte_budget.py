"""
A budget of slots and bytes, given out in the order of asking.

Whoever asks for more bytes than there are in all gets its turn when nobody else holds any: one large
request is slow, never stuck. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class ByteBudget:
    """At most *slots* holders at once, with at most *size_bytes* together."""

    def __init__(self, slots: int, size_bytes: int) -> None:
        self._slots = slots
        self._size_bytes = size_bytes
        self._holders = 0
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Return how many bytes are given out."""
        return self._held_bytes

    @property
    def holders(self) -> int:
        """Return to how many."""
        return self._holders

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold a slot and *size_bytes* for the time of the context; wait for one's turn before."""
        size_bytes = min(size_bytes, self._size_bytes)
        if self._waiting or not self._has(size_bytes):
            await self._turn(size_bytes)
        else:
            self._give(size_bytes)
        try:
            yield
        finally:
            self._return(size_bytes)

    async def _turn(self, size_bytes: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        entry = (size_bytes, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._return(size_bytes)  # Its turn had come, and nobody is there to use it.
            else:
                self._waiting.remove(entry)
                self._call_next()  # The one behind may have been waiting only for its size.
            raise

    def _has(self, size_bytes: int) -> bool:
        return self._holders < self._slots and self._held_bytes + size_bytes <= self._size_bytes

    def _give(self, size_bytes: int) -> None:
        self._holders += 1
        self._held_bytes += size_bytes

    def _return(self, size_bytes: int) -> None:
        self._holders -= 1
        self._held_bytes -= size_bytes
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting and self._has(self._waiting[0][0]):
            size_bytes, turn = self._waiting.popleft()
            # A cancelled one takes itself out, a moment later.
            if turn.done():
                self._waiting.appendleft((size_bytes, turn))
                return
            self._give(size_bytes)
            turn.set_result(None)
