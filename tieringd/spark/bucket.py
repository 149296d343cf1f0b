"""
A bucket for synchronous code. A Spark driver plans tasks from it, and executors read from it.

An event loop in a thread of its own makes the requests, so that it fetches the next item while the caller
works on the present one. A process keeps one open bucket for each configuration, because Spark's workers live
for many tasks and a store's client is costly to build.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import wait
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, TypeVar

from tieringd.archive.archive_reader import CHUNK_BYTES, ArchiveReader, SegmentIndexes
from tieringd.archive.catalog import Catalog
from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.record_reader import RecordReader
from tieringd.metrics import Metrics
from tieringd.model.segment import JOB_PREFIX
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.resilient import ResilientStore
from tieringd.storage.store_opening import opened_store

if TYPE_CHECKING:
    # An ordinary import would load pydantic and PyYAML into processes that do not need them.
    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.config import Config
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition

MANIFESTS_KEPT: Final = 4
"""Manifests that a process keeps for its next tasks."""

T = TypeVar("T")


class Bucket:
    """
    An open bucket. Its methods may be called from any thread, but never from its own event loop.

    `close` closes it, and cancels the work that is still under way.
    """

    def __init__(self, config: Config, *, writer_id: str = JOB_PREFIX) -> None:
        """
        Open the bucket.

        Args:
            config: Where the archive is and how to reach it.
            writer_id: The writer of manifests, which matters only to jobs that write.

        Raises:
            TieringError: The bucket cannot be opened. Its thread and clients are closed again.
        """
        self.config = config
        # The standard loop reads from stores faster than uvloop does.
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
        self._seen: dict[TopicIdPartition, StoredManifest] = {}
        """Manifests of `current_manifest`, the last one used at the end."""
        self.indexes = SegmentIndexes(self.store)
        self.reader = ArchiveReader(self.store)
        self.records = RecordReader(self.indexes, self.reader, self.spillovers)

    async def current_manifest(self, partition: TopicIdPartition) -> PartitionManifest | None:
        """
        Return a partition's current manifest; None without one. It is loaded only if it has changed.

        The last ones are kept for the next tasks of this process: tasks of one partition ask again and again,
        and a manifest of a long history has tens of megabytes.

        Raises:
            CorruptDataError: The stored bytes are not a manifest, or belong to another partition.
        """
        found = await self.manifests.refreshed(partition, self._seen.pop(partition, None))
        self._seen[partition] = found
        while len(self._seen) > MANIFESTS_KEPT:
            del self._seen[next(iter(self._seen))]
        return found.manifest

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run *work* on the bucket's loop, and return its result. An interrupt cancels it."""
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

        The next runs are fetched while the caller works on one.
        """
        return self.iterate(self.reader.runs(key, position, end, chunk_bytes))

    def iterate(self, items: AsyncGenerator[T]) -> Generator[T]:
        """Run *items* on the bucket's loop, one item ahead of the caller, and yield its items."""
        following = asyncio.run_coroutine_threadsafe(_next(items), self._loop)
        try:
            while (found := following.result()) is not None:
                following = asyncio.run_coroutine_threadsafe(_next(items), self._loop)
                yield found[0]
        finally:
            # A running generator cannot be closed. The result of this last step is not needed.
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
    """Return the next item in a tuple of one element; None after the last."""
    try:
        return (await anext(items),)
    except StopAsyncIteration:
        return None


_open: list[tuple[int, Bucket]] = []
_lock = threading.Lock()


def bucket_of(config: Config) -> Bucket:
    """
    Return this process's open bucket of a configuration. The bucket stays open until the process ends.

    Raises:
        TieringError: The bucket cannot be opened.
    """
    process_id = os.getpid()
    with _lock:
        for opener, bucket in _open:
            # Spark forks its workers, and the parent's event loop does not run in a forked process.
            if opener == process_id and bucket.config == config:
                return bucket
        bucket = Bucket(config)
        _open.append((process_id, bucket))
        atexit.register(bucket.close)
        return bucket
