"""A store whose answers come late, as they seem to for a process that was stopped."""

from __future__ import annotations

import asyncio

from tieringd.storage.memory import MemoryStore


class SlowStore(MemoryStore):
    """Stores an object at once, and says so *seconds* later."""

    seconds = 0.0

    async def put(self, key, body, *, crc32c, condition=None):
        """Store an object; the answer comes later."""
        info = await super().put(key, body, crc32c=crc32c, condition=condition)
        await asyncio.sleep(self.seconds)
        return info
