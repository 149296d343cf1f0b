"""Work that is done again and again: at every interval, and at once on a hint."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Rounds:
    """The rounds of one piece of work."""

    def __init__(self) -> None:
        self._hinted = asyncio.Event()

    def hint(self) -> None:
        """Begin the next round now, or once the one under way is over."""
        self._hinted.set()

    async def run(self, step: Callable[[], Awaitable[None]], *, interval_seconds: float) -> None:
        """Do *step* now, on every hint, and at least every interval, until cancelled."""
        while True:
            self._hinted.clear()
            await step()
            try:
                async with asyncio.timeout(interval_seconds):
                    await self._hinted.wait()
            except TimeoutError:
                continue
