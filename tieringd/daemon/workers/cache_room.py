"""
How workers share the cache directory: the daemon's side, and the worker's.

The daemon's keeper counts what all workers have written and reserved. A worker that ends leaves its
reservations behind, and perhaps a file that it could not report, or had not finished: the daemon releases
the reservations, and compares its counts with the disk, which removes what is unfinished.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from tieringd.daemon.workers.link import Handlers, Link
from tieringd.daemon.workers.worker_pool import Worker
from tieringd.errors import TieringError
from tieringd.reading.cache_keeper import CacheKeeper


class CacheRooms:
    """The daemon's side."""

    def __init__(self, keeper: CacheKeeper) -> None:
        self._keeper = keeper
        self._reserved: dict[Worker, Counter[int]] = {}
        """The sizes that each worker has reserved."""

    def handlers(self, worker: Worker) -> Handlers:
        """Return what a worker may ask of the cache."""
        keeper, reserved = self._keeper, self._reserved.setdefault(worker, Counter())

        async def reserve(size_bytes: int) -> bool:
            has_room = await keeper.reserve(size_bytes)
            if not has_room:
                return False
            if worker not in self._reserved:
                # It ended meanwhile.
                keeper.release(size_bytes)
                return False
            reserved[size_bytes] += 1
            return True

        def release(size_bytes: int) -> None:
            reserved[size_bytes] -= 1
            keeper.release(size_bytes)

        def published(name: str, size_bytes: int) -> None:
            reserved[size_bytes] -= 1
            keeper.note_published(name, size_bytes)

        def touched(names: Sequence[str]) -> None:
            for name in names:
                keeper.touch(name)

        return {
            "cache_reserve": reserve,
            "cache_release": release,
            "cache_make_room": keeper.make_room,
            "cache_published": published,
            "cache_discarded": keeper.note_discarded,
            "cache_touched": touched,
        }

    def end(self, worker: Worker) -> None:
        """Take back what a worker that has ended had reserved."""
        for size_bytes in self._reserved.pop(worker, Counter()).elements():
            self._keeper.release(size_bytes)
        self._keeper.compare_soon()


class RemoteRoom:
    """The worker's side; see `CacheRoom`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def reserve(self, size_bytes: int) -> bool:
        """Ask the daemon for room. Without an answer the file stays out of the cache."""
        asking = asyncio.ensure_future(self._link.ask("cache_reserve", size_bytes))
        try:
            return bool(await asyncio.shield(asking))
        except asyncio.CancelledError:
            # The daemon may have reserved it by now.
            asking.add_done_callback(partial(self._give_back, size_bytes))
            raise
        except TieringError:
            return False

    def _give_back(self, size_bytes: int, asking: asyncio.Future[Any]) -> None:
        if not asking.cancelled() and asking.exception() is None and asking.result():
            self.release(size_bytes)

    def release(self, size_bytes: int) -> None:
        """End a reservation without a file."""
        self._link.tell("cache_release", size_bytes)

    async def make_room(self, size_bytes: int) -> None:
        """Ask for as many bytes to be evicted, because the disk is full."""
        await self._link.ask("cache_make_room", size_bytes)

    def published(self, name: str, size_bytes: int) -> None:
        """Tell of a file that has got its name."""
        self._link.tell("cache_published", name, size_bytes)

    def discarded(self, name: str) -> None:
        """Tell of a file that was deleted because its bytes are wrong."""
        self._link.tell("cache_discarded", name)

    def touched(self, names: Sequence[str]) -> None:
        """Tell which files were read."""
        self._link.tell("cache_touched", names)
