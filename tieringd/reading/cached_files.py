"""
Small whole objects in the chunk cache's directory: read when they are there, put when there is room.

A file in the cache is as good as the object only where the caller checks its bytes. Whatever goes wrong
with the disk, the caller does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tieringd.cache.faults import located, read_exactly
from tieringd.errors import LocalFileError
from tieringd.storage.blocking import in_thread

if TYPE_CHECKING:
    from tieringd.cache.directory import CacheDirectory
    from tieringd.cache.part_file import PartFile
    from tieringd.reading.cache_keeper import CacheKeeper

log = structlog.get_logger(__name__)


class CachedFiles:
    """Whole objects in one cache. Belongs to one event loop."""

    def __init__(self, keeper: CacheKeeper) -> None:
        self._keeper = keeper

    @property
    def buckets(self) -> int:
        """Return the number of buckets that names are made for."""
        return self._keeper.directory.buckets

    async def read(self, name: str, size_bytes: int) -> bytes | None:
        """Return the bytes of a file that is to have *size_bytes*; None where they cannot be had."""
        if not self._keeper.is_started:
            await self._keeper.step()
        try:
            return await in_thread(_read, self._keeper.directory, name, size_bytes)
        except LocalFileError as error:
            log.warning("a cached file cannot be read; its object is fetched again", error=str(error))
            return None

    def touch(self, name: str) -> None:
        """Note that a file was of use."""
        self._keeper.touch(name)

    async def discard(self, name: str) -> None:
        """Delete a file whose bytes are not what they should be."""
        await self._keeper.discard(name)

    async def put(self, name: str, data: bytes) -> None:
        """Put bytes that were checked into the cache, where that takes them."""
        part = await self._keeper.begin(name, len(data))
        if part is None:
            return
        is_published = False
        try:
            await in_thread(_write, part, data)
            opened = await self._keeper.publish(part)
            if opened is not None:
                is_published = True
                opened.close()
        except LocalFileError as error:
            self._keeper.note_refusal(error)
        finally:
            if is_published:
                self._keeper.settle(part)
            else:
                await self._keeper.abandon(part)


def _read(directory: CacheDirectory, name: str, size_bytes: int) -> bytes | None:
    opened = directory.open(name, size_bytes)
    if opened is None:
        return None
    try:
        return read_exactly(opened.fd, 0, size_bytes)
    except OSError as error:
        raise located(name, "be read", error) from error
    finally:
        opened.close()


def _write(part: PartFile, data: bytes) -> None:
    try:
        part.write(0, data)
    except OSError as error:
        raise located(part.name, "be cached", error) from error
