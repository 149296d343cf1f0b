"""Stores in memory that answer late."""

from __future__ import annotations

import asyncio

from tests.fakes.memory_store import MemoryStore


class SlowStore(MemoryStore):
    """Stores an object at once, and answers *seconds* later, as a process sees it that was paused."""

    seconds = 0.0

    async def put(self, key, body, *, crc32c, condition=None):
        """Store an object, and answer later."""
        info = await super().put(key, body, crc32c=crc32c, condition=condition)
        await asyncio.sleep(self.seconds)
        return info


class HoldingStore(MemoryStore):
    """Answers reads of *held_key* only once *may_read* is set."""

    def __init__(self) -> None:
        super().__init__()
        self.held_key = ""
        self.may_read = asyncio.Event()

    async def get(self, key):
        """Return an object whole."""
        await self._turn(key)
        return await super().get(key)

    async def get_range(self, key, *, position, size_bytes):
        """Return the bytes of a range."""
        await self._turn(key)
        return await super().get_range(key, position=position, size_bytes=size_bytes)

    async def _turn(self, key):
        if key == self.held_key:
            await self.may_read.wait()


class LateStore(MemoryStore):
    """Reads an object at once, and answers as many seconds later as `late_seconds` has next."""

    def __init__(self) -> None:
        super().__init__()
        self.late_seconds: list[float] = []

    async def get(self, key):
        """Return an object as it was when it was asked for."""
        found = await super().get(key)
        if self.late_seconds:
            await asyncio.sleep(self.late_seconds.pop(0))
        return found
