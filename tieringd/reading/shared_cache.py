"""
The part of a cache keeper that a worker of the gateway has: the daemon keeps the cache directory for all.

Workers write files into the directory and read them. How much room there is, what is evicted, and when each
file was last read is known to the daemon alone, so the limits hold for all workers together. A worker asks
the daemon for room before it writes, and tells it what it has written. The daemon tells the workers what it
has evicted, so that they close it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tieringd.cache.cache_directory import CacheDirectory, PartFile
from tieringd.metrics import CacheMetrics
from tieringd.policies.cache_trim import EvictionPlan, TrimLimits
from tieringd.reading.cache_keeper import CacheKeeper, KeeperSettings, OpenChunks

_TELL_SECONDS = 1.0
_NO_LIMITS = TrimLimits(size_bytes=2**63 - 1, objects=2**63 - 1)
"""The daemon has the limits."""


class CacheRoom(Protocol):
    """What a worker asks and tells the process that keeps the cache."""

    async def reserve(self, size_bytes: int) -> bool:
        """Reserve room for one file. False: the cache does not take it, or the keeper does not answer."""

    def release(self, size_bytes: int) -> None:
        """End a reservation without a file."""

    async def make_room(self, size_bytes: int) -> None:
        """Ask for as many bytes to be evicted, because the disk is full."""

    def published(self, name: str, size_bytes: int) -> None:
        """Tell of a file that has got its name. Its reservation ends."""

    def discarded(self, name: str) -> None:
        """Tell of a file that was deleted because its bytes are wrong."""

    def touched(self, names: Sequence[str]) -> None:
        """Tell which files were read since the last call."""


class SharedCacheKeeper(CacheKeeper):
    """A keeper whose room is in another process. Belongs to one event loop."""

    def __init__(
        self, directory: CacheDirectory, open_chunks: OpenChunks, *, room: CacheRoom, metrics: CacheMetrics
    ) -> None:
        super().__init__(directory, open_chunks, settings=KeeperSettings(_NO_LIMITS), metrics=metrics)
        self._room = room
        self._touched: dict[str, None] = {}

    @property
    def is_started(self) -> bool:
        """Return True: the daemon has read the directory."""
        return True

    def set_settings(self, settings: KeeperSettings) -> None:
        """Change nothing: the daemon has the limits."""

    async def run(self) -> None:
        """Tell the daemon now and then which files were read, until cancelled."""
        while True:
            await asyncio.sleep(_TELL_SECONDS)
            self.tell_touched()

    async def step(self) -> EvictionPlan | None:
        """Do nothing: the daemon evicts."""
        return None

    async def reserve(self, size_bytes: int) -> bool:
        """Ask the daemon for room."""
        if self._is_paused:
            self._refuse("disk")
            return False
        return await self._room.reserve(size_bytes)

    def release(self, size_bytes: int) -> None:
        """Give room back to the daemon."""
        self._room.release(size_bytes)

    async def make_room(self, size_bytes: int) -> None:
        """Have the daemon evict, because another program filled the disk."""
        await self._room.make_room(size_bytes)

    def settle(self, part: PartFile) -> None:
        """End a part that was published."""
        self._room.published(part.name, part.size_bytes)

    async def discard(self, name: str) -> None:
        """Delete a file whose bytes are wrong."""
        await super().discard(name)
        self._room.discarded(name)

    def touch(self, name: str) -> None:
        """Record that a file is read now. `tell_touched` passes it on."""
        self._touched[name] = None

    def tell_touched(self) -> None:
        """Tell the daemon which files were read since the last call."""
        if self._touched:
            names, self._touched = tuple(self._touched), {}
            self._room.touched(names)

    def note_evicted(self, names: Sequence[str]) -> None:
        """Close files that the daemon has evicted. Readers that have them read on."""
        self.open_chunks.forget(names)
        for name in names:
            self.directory.accounts.remove(name)

    def _publish(self) -> None:
        """Show nothing: the daemon has the figures of the whole cache."""
