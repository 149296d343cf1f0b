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
