"""
Chunks that are read in place: from the file of the object itself.

Where the archive is a directory on the disk of the cache, a copy of a chunk would take room on that disk,
cost the reading of the object and the writing of the copy, and be no faster to read afterwards. So the
object's own file is opened there, checked once, and held open for readers as a cached file is. It is checked
again when it was changed, or when a reader reported wrong bytes.

An archive on another disk is cached: it may be slower than the cache's disk, or be unmounted.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import structlog

from tieringd.cache.accounts import Identity, identity_of
from tieringd.cache.cache_directory import OpenFile
from tieringd.compiled.loading import loaded_walk
from tieringd.errors import LocalFileError, StorageUnavailable
from tieringd.formats.batch_check import BatchCheck
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.metrics import CacheMetrics
from tieringd.policies.chunk_layout import Chunk
from tieringd.reading.arriving_chunk import ArrivingChunk
from tieringd.storage.base import ObjectStore, OpenableStore
from tieringd.storage.ranges import FileReading, Windows
from tieringd.storage.threads import finished

log = structlog.get_logger(__name__)

LOOK_AGAIN_SECONDS = 60.0
"""How long an archive that is not on the cache's disk is not looked at again."""
_CHECKED_MAX = 1 << 14
"""The chunks of 256 GiB, by default. Each takes half a KiB of memory."""
_THREADS = 8


class ObjectsInPlace:
    """The chunks of one store that are on the disk of *directory*. Belongs to one event loop."""

    def __init__(self, store: ObjectStore, directory: Path, metrics: CacheMetrics) -> None:
        self._store = store
        self._directory = directory
        self._read_bytes = metrics.in_place_bytes
        self._looks_at = -math.inf
        """When the next object is looked at, in loop time."""
        self._checked: OrderedDict[str, tuple[Identity, int]] = OrderedDict()
        """The names of checked chunks, each with the identity of its object's file then, and its own size."""
        self._windows = Windows()
        # A check waits for the archive's disk. What else the daemon does in threads must not wait for it.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tieringd-in-place")

    async def open(
        self, key: str, name: str, chunk: Chunk, expected: ExpectedBatches, arriving: ArrivingChunk
    ) -> OpenFile | None:
        """
        Open a chunk of the object *key*, whose batches are checked and *expected*; the caller closes it.

        *arriving* is told what is checked meanwhile. None: the object is on another disk or in a bucket, or
        it is too short, or cannot be read in place. Then the chunk must be downloaded.

        Raises:
            ObjectNotFound: The object was deleted. Read the manifest again.
            CorruptDataError: Its bytes are wrong, with the position in the chunk.
        """
        opened = await self._opened(key, name, chunk)
        if opened is None or opened.is_checked:
            return opened
        try:
            arriving.begin(opened.fd, name, position=chunk.position)
            try:
                await self._check(opened.fd, chunk, expected, arriving)
            finally:
                arriving.end()
        except (OSError, LocalFileError) as error:
            opened.close()
            log.warning("an object cannot be read in place; it is fetched", key=key, error=str(error))
            return None
        except BaseException:
            opened.close()
            raise
        self._read_bytes.inc(chunk.size_bytes)
        self._checked[name] = (opened.identity, chunk.size_bytes)
        if len(self._checked) > _CHECKED_MAX:
            self._checked.popitem(last=False)
        return replace(opened, is_checked=True)

    async def reopened(self, key: str, name: str, chunk: Chunk) -> OpenFile | None:
        """
        Open a chunk that was checked before, and whose file was not changed since; None if there is none.

        Raises:
            ObjectNotFound: The object was deleted. Read the manifest again.
        """
        if name not in self._checked:
            return None
        opened = await self._opened(key, name, chunk)
        if opened is not None and not opened.is_checked:
            opened.close()
            return None
        return opened

    async def _opened(self, key: str, name: str, chunk: Chunk) -> OpenFile | None:
        """Open the object for one of its chunks; None if it is not on the cache's disk."""
        now = asyncio.get_running_loop().time()
        if now < self._looks_at or not isinstance(self._store, OpenableStore):
            return None
        try:
            fd = await self._store.open_object(key)
        except StorageUnavailable as error:
            log.warning("an object cannot be read in place; it is fetched", key=key, error=str(error))
            return None
        if fd is None:
            self._looks_at = now + LOOK_AGAIN_SECONDS
            return None
        try:
            opened = self._chunk_in(fd, name, chunk)
        except BaseException:
            os.close(fd)
            raise
        if opened is None:
            os.close(fd)
            self._looks_at = now + LOOK_AGAIN_SECONDS
        return opened

    def close(self) -> None:
        """Shut down the threads once they are idle."""
        self._threads.shutdown(wait=False)

    def mistrust(self, name: str) -> None:
        """Have a chunk checked again when it is opened next."""
        self._checked.pop(name, None)

    def _chunk_in(self, fd: int, name: str, chunk: Chunk) -> OpenFile | None:
        """Return a chunk of the open object *fd*; None if that is not on the cache's disk."""
        found = os.fstat(fd)
        try:
            # Asked each time: either of the two may be mounted while the daemon runs.
            cache_device = self._directory.stat().st_dev
        except OSError:
            return None
        if found.st_dev != cache_device:
            return None
        identity = identity_of(found)
        # A reload may have made the chunk larger: then not all of it was checked.
        is_checked = self._checked.get(name) == (identity, chunk.size_bytes)
        if is_checked:
            self._checked.move_to_end(name)
        return OpenFile(name, fd, chunk.size_bytes, identity, is_checked, position=chunk.position)

    async def _check(self, fd: int, chunk: Chunk, expected: ExpectedBatches, arriving: ArrivingChunk) -> None:
        """
        Check the batches of a chunk, and tell *arriving* how far they are right.

        Raises:
            CorruptDataError: They are wrong.
            OSError: The file cannot be read.
        """
        check = BatchCheck(expected, walk=loaded_walk())
        # A checksum over the whole chunk is known to be right at its end only.
        is_proven_by_batches = expected.checksum is None
        is_stopped = threading.Event()

        def take(data: memoryview) -> None:
            if is_stopped.is_set():
                raise InterruptedError(errno.EINTR, "the check was cancelled")
            check.take(data)
            if is_proven_by_batches:
                arriving.grow(*check.passed)

        def run() -> None:
            self._windows.pour(chunk.size_bytes, FileReading(fd, chunk.position).fill, take)
            check.end()

        await finished(self._threads.submit(run), on_cancel=is_stopped.set)
