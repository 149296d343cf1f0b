"""
Indexes of stored segments: in memory, in the cache directory, and from the object store.

The memory is bounded: the least recently used indexes are dropped first. A file in the cache is as good
as the object, as both carry a checksum and name the data object that they describe. The broker's own
index files are dropped from the indexes in memory: they are needed to restore a segment, not to read it.

`CachedFiles` keeps small whole objects in the chunk cache's directory. The caller checks the bytes of
each file. After a fault of the disk the caller goes on without the file.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial

import structlog

from tieringd.cache.cache_directory import CacheDirectory, PartFile
from tieringd.cache.faults import located, read_exactly
from tieringd.errors import CorruptDataError, LocalFileError, StorageUnavailable
from tieringd.formats.cache_names import cached_name
from tieringd.formats.object_keys import index_key
from tieringd.formats.sidecar import decode_sidecar_of
from tieringd.metrics import CacheMetrics
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import BrokerIndexes, RemoteSegment, SegmentIndex
from tieringd.reading.cache_keeper import CacheKeeper
from tieringd.storage.base import ObjectStore
from tieringd.storage.single_flight import SingleFlight
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)

ENTRY_BYTES = 200
"""Memory that an entry of a decoded index takes: an object with three integers, and a reference to it."""
_TIMEOUT_SECONDS = 60.0


class CachedFiles:
    """Whole objects in one cache. Belongs to one event loop."""

    def __init__(self, keeper: CacheKeeper) -> None:
        self._keeper = keeper

    @property
    def buckets(self) -> int:
        """Return the number of buckets that file names are spread over."""
        return self._keeper.directory.buckets

    async def read(self, name: str, size_bytes: int) -> bytes | None:
        """Return the bytes of a file of *size_bytes*, or None if they are not available."""
        if not self._keeper.is_started:
            await self._keeper.step()
        try:
            return await in_thread(_read, self._keeper.directory, name, size_bytes)
        except LocalFileError as error:
            log.warning("a cached file cannot be read; its object is fetched again", error=str(error))
            return None

    def touch(self, name: str) -> None:
        """Record a use of a file."""
        self._keeper.touch(name)

    async def discard(self, name: str) -> None:
        """Delete a file whose bytes are wrong."""
        await self._keeper.discard(name)

    async def put(self, name: str, data: bytes) -> None:
        """Put bytes that were checked into the cache, if it takes them."""
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


@dataclass(frozen=True, slots=True)
class _Held:
    index: SegmentIndex
    size_bytes: int


class IndexCache:
    """Indexes by segment. Belongs to one event loop."""

    def __init__(
        self, store: ObjectStore, keeper: CacheKeeper, *, size_bytes_max: int, metrics: CacheMetrics
    ) -> None:
        self._store = store
        self._files = CachedFiles(keeper)
        self._size_bytes_max = size_bytes_max
        self._metrics = metrics
        self._hits = metrics.hits.labels("index")
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._held_bytes = 0
        self._flights: SingleFlight[str, SegmentIndex] = SingleFlight(
            lambda key: f"{key}: reading was cancelled: the hydrator is closed"
        )

    @property
    def held_bytes(self) -> int:
        """Return the approximate memory in bytes that the indexes take."""
        return self._held_bytes

    async def get(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """
        Return a segment's index.

        An index that is wrong in the store is read twice before it is an error.
        """
        key = index_key(partition, segment)
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            self._hits.inc()
            return held.index
        return await self._flights.arrived(self._flights.join(key, partial(self._find, key, segment)))

    async def close(self) -> None:
        """Cancel the reads under way."""
        await self._flights.close()

    async def _find(self, key: str, segment: RemoteSegment) -> SegmentIndex:
        name = cached_name(key, buckets=self._files.buckets)
        index = await self._from_disk(key, name, segment)
        if index is not None:
            self._hits.inc()
            self._files.touch(name)
        else:
            self._metrics.misses.labels("index").inc()
            with self._metrics.hydration_seconds.labels("index").time():
                data, index = await self._from_store(key, segment)
            await self._files.put(name, data)
        index = replace(index, broker=BrokerIndexes())
        self._hold(key, index)
        return index

    async def _from_disk(self, key: str, name: str, segment: RemoteSegment) -> SegmentIndex | None:
        data = await self._files.read(name, segment.index_size_bytes)
        try:
            return None if data is None else await in_thread(decode_sidecar_of, data, segment, key=key)
        except CorruptDataError as error:
            self._metrics.corrupt.labels("file").inc()
            log.warning("a cached index is wrong; it is fetched again", name=name, error=str(error))
            await self._files.discard(name)
        return None

    async def _from_store(self, key: str, segment: RemoteSegment) -> tuple[bytes, SegmentIndex]:
        for is_last in (False, True):
            try:
                return await self._fetched(key, segment)
            except CorruptDataError as error:
                self._metrics.corrupt.labels("download").inc()
                if is_last:
                    raise
                log.warning("an index that arrived is wrong; it is read once more", error=str(error))
        raise AssertionError("the last attempt returns or raises")

    async def _fetched(self, key: str, segment: RemoteSegment) -> tuple[bytes, SegmentIndex]:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                data, _ = await self._store.get(key)
        except TimeoutError as error:
            raise StorageUnavailable(f"get {key}: no response in {_TIMEOUT_SECONDS:g} s") from error
        self._metrics.hydrated_bytes.labels("index").inc(len(data))
        if len(data) != segment.index_size_bytes:
            raise CorruptDataError(
                f"the index has {len(data)} bytes, but the manifest has {segment.index_size_bytes}",
                source=key,
            )
        return data, await in_thread(decode_sidecar_of, data, segment, key=key)

    def _hold(self, key: str, index: SegmentIndex) -> None:
        size_bytes = ENTRY_BYTES * (len(index.entries) + len(index.aborted) + 1)
        if size_bytes > self._size_bytes_max:
            return
        self._held[key] = _Held(index, size_bytes)
        self._held_bytes += size_bytes
        while self._held_bytes > self._size_bytes_max:
            _, oldest = self._held.popitem(last=False)
            self._held_bytes -= oldest.size_bytes
