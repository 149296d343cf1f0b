"""
A bucket for code that does not await: a Spark driver plans from it, and executors read from it.

An event loop in a thread of its own does the requests, so that what comes next is fetched while the caller
works on what is there. A process keeps one open bucket for each configuration: workers of Spark live for
many tasks, and a client of a store is costly to make.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from concurrent.futures import wait
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

from tieringd.archive.archive_reader import CHUNK_BYTES, ArchiveReader, SegmentIndexes
from tieringd.archive.catalog import Catalog
from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.record_reader import RecordReader
from tieringd.metrics import Metrics
from tieringd.model.segment import JOB_PREFIX
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.opening import opened_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Generator

    from tieringd.config import Config
    from tieringd.storage.resilient import ResilientStore

T = TypeVar("T")


class Bucket:
    """
    An open bucket. Its methods may be called from any thread; none of them from its own loop.

    `close` ends it; what is under way then is cancelled.
    """

    def __init__(self, config: Config, *, writer_id: str = JOB_PREFIX) -> None:
        """
        Open the bucket; *writer_id* matters only to those who write.

        Raises:
            TieringError: It cannot be opened; nothing is left behind.
        """
        self.config = config
        # It reads from stores faster than uvloop does.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tieringd-bucket", daemon=True)
        self._thread.start()
        self._opened = AsyncExitStack()
        try:
            self.store: ResilientStore = self.run(
                self._opened.enter_async_context(opened_store(config, Metrics()))
            )
            self.clock = ArchiveClock()
            self.clock.listen_to(self.store.backend)
        except BaseException:
            self._stop()
            raise
        self.manifests = ManifestStore(self.store, writer_id=writer_id, now_ms=self.clock)
        self.spillovers = self.manifests.spillovers
        self.catalog = Catalog(self.store, self.manifests)
        self.indexes = SegmentIndexes(self.store)
        self.reader = ArchiveReader(self.store)
        self.records = RecordReader(self.indexes, self.reader, self.spillovers)

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Return what *work* returns; it runs on the bucket's loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def runs(
        self, key: str, *, position: int, end: int, chunk_bytes: int = CHUNK_BYTES
    ) -> Generator[tuple[memoryview, int]]:
        """
        Yield a data object's bytes from *position* up to *end*, as `ArchiveReader.runs` does.

        While the caller works on a run, the next ones are fetched.
        """
        return self.iterate(self.reader.runs(key, position, end, chunk_bytes))

    def iterate(self, items: AsyncGenerator[T]) -> Generator[T]:
        """Yield what *items* yields, one ahead of the caller; it runs on the bucket's loop."""
        following = asyncio.run_coroutine_threadsafe(_next(items), self._loop)
        try:
            while (found := following.result()) is not None:
                following = asyncio.run_coroutine_threadsafe(_next(items), self._loop)
                yield found[0]
        finally:
            # A generator that runs cannot be closed; how a step ends that nobody asked for is of no interest.
            wait([following])
            self.run(items.aclose())

    def close(self) -> None:
        """Close the bucket and end its thread."""
        try:
            self.run(self._opened.aclose())
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(items: AsyncGenerator[T]) -> tuple[T] | None:
    """Return the next of *items* in a tuple of its own; None after the last."""
    try:
        return (await anext(items),)
    except StopAsyncIteration:
        return None


_open: list[tuple[int, Bucket]] = []
_lock = threading.Lock()


def bucket_of(config: Config) -> Bucket:
    """
    Return this process's open bucket of a configuration; it stays open until the process ends.

    Raises:
        TieringError: It cannot be opened.
    """
    process_id = os.getpid()
    with _lock:
        for opener, bucket in _open:
            # Spark forks its workers; a loop of the parent's is of no use in them.
            if opener == process_id and bucket.config == config:
                return bucket
        bucket = Bucket(config)
        _open.append((process_id, bucket))
        atexit.register(bucket.close)
        return bucket
