"""A store with late answers, as seen by a process that was paused."""

from __future__ import annotations

import asyncio

from tieringd.storage.memory import MemoryStore


class SlowStore(MemoryStore):
    """Stores an object at once, and answers *seconds* later."""

    seconds = 0.0

    async def put(self, key, body, *, crc32c, condition=None):
        """Store an object, and answer later."""
        info = await super().put(key, body, crc32c=crc32c, condition=condition)
        await asyncio.sleep(self.seconds)
        return info
