"""
The hydrator: archived chunks for readers, from the cache, and into it when they are missing.

    async with hydrator.chunk(partition, segment, index, chunk) as found:
        if found.file: send the bytes of found.file, from page cache to socket
        else: send found.data

Readers that want the same chunk wait for one download; when one of them leaves, the others get it
all the same, and when all leave it is finished for the next. When readers go on from one chunk to the
next, the one after is hydrated meanwhile. Every batch is checked before a reader sees it: at the
download, and once more after a restart or when a cached file was touched. What the cache does not take
is handed out in memory, checked likewise. Nothing here knows a manifest: `ObjectNotFound` means that
the caller looks at it again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import CorruptDataError, LocalFileError, StorageUnavailable, TieringError
from tieringd.formats.cache_names import chunk_name
from tieringd.formats.object_keys import data_key
from tieringd.policies.reading import ReadSequences, plan_chunks
from tieringd.reading.chunk_download import ChunkDownloader, DownloadLimits, check_file
from tieringd.reading.index_cache import IndexCache
from tieringd.storage.base import FileSlice
from tieringd.storage.threads import in_thread, in_thread_or

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tieringd.cache.directory import OpenFile
    from tieringd.metrics import CacheMetrics
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment, SegmentIndex
    from tieringd.policies.reading import Chunk, ChunkLayout
    from tieringd.reading.cache_keeper import CacheKeeper, OpenEntry
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 10.0
_ATTEMPTS = 3
"""So often a chunk may be evicted between its arrival and its reader; then it is not cached."""
_LAYOUTS = 1024
FLIGHTS_MAX = 64
"""Downloads that may be under way or in line while nobody waits for them any more."""


@dataclass(frozen=True, slots=True)
class HydrationLimits:
    """How segments are cut, and how much is held and fetched."""

    chunk_bytes: int = 16 << 20
    """`cloud_storage_cache_chunk_size`."""
    is_whole: bool = False
    """`cloud_storage_disable_chunk_reads`."""
    prefetches_max: int = 4
    """Chunks that are hydrated ahead of their readers at once."""
    index_bytes_max: int = 64 << 20
    """Indexes in memory."""
    downloads: DownloadLimits = field(default_factory=DownloadLimits)


class HydratedChunk:
    """A chunk for one reader, who closes it. Its batches were checked."""

    def __init__(
        self, chunk: Chunk, *, data: bytes | None = None, entry: OpenEntry | None = None, keeper: CacheKeeper
    ) -> None:
        self.chunk = chunk
        """What it holds: a part of the wanted chunk where that one was too large for cache and memory."""
        self.data = data
        """All its bytes, where they are not in a file."""
        self.file = FileSlice(entry.file.fd, 0, entry.file.size_bytes) if entry else None
        """All its bytes in an open file, until `close`."""
        self._entry = entry
        self._keeper = keeper

    def mark_corrupt(self) -> None:
        """Let the next reader fetch it again: a client, or the disk, says that its bytes are wrong."""
        if self._entry is not None:
            self._keeper.mistrust(self._entry.file.name)

    def close(self) -> None:
        """Give it back; again does nothing."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self.file = None
            self._keeper.open_chunks.give_back(entry)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One chunk, with all that it takes to get it."""

    key: str
    name: str
    chunk: Chunk
    chunk_count: int


@dataclass(frozen=True, slots=True)
class _Arrival:
    """How a flight ended well."""

    is_hit: bool = False
    """It was in the cache already."""
    data: bytes | None = None
    """Its bytes, where the cache did not take them."""
    is_refused: bool = False
    """Neither the cache nor the memory takes it."""


@dataclass(eq=False, slots=True)
class _Flight:
    """One download, or one look at the disk, for all who wait for it."""

    task: asyncio.Task[_Arrival]
    is_prefetch: bool
    waiters: int = 0


class Hydrator:
    """Give out chunks and indexes of one store's segments. Belongs to one event loop."""

    def __init__(
        self,
        store: ObjectStore,
        keeper: CacheKeeper,
        *,
        limits: HydrationLimits | None = None,
        metrics: CacheMetrics,
    ) -> None:
        self._keeper = keeper
        self._open = keeper.open_chunks
        self._limits = limits or HydrationLimits()
        self._metrics = metrics
        self._downloader = ChunkDownloader(store, keeper, limits=self._limits.downloads, metrics=metrics)
        self._indexes = IndexCache(
            store, keeper, size_bytes_max=self._limits.index_bytes_max, metrics=metrics
        )
        self._flights: dict[tuple[str, int], _Flight] = {}
        self._sequences = ReadSequences()
        self._ahead: dict[str, asyncio.Task[None]] = {}
        self._ended: set[asyncio.Task[_Arrival]] = set()
        self._layouts: OrderedDict[tuple[int, ...], ChunkLayout] = OrderedDict()
        self._is_closed = False

    def set_limits(self, limits: HydrationLimits) -> None:
        """Cut segments by *limits* from now on; how much is fetched at once stays as it was."""
        self._limits = limits

    async def run(self) -> None:
        """Close open chunks by the eviction strategy, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._open.sweep()

    async def index(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """
        Return a stored segment's index, without the broker's own index files.

        Raises:
            ObjectNotFound: The bucket has no such segment: look at the manifest again.
            CorruptDataError: The index is damaged, or describes another object.
        """
        return await self._indexes.get(partition, segment)

    def layout(self, index: SegmentIndex) -> ChunkLayout:
        """Return how a segment is cut into chunks now."""
        limits = self._limits
        bounds = (index.base_offset, index.last_offset, index.size_bytes, index.crc32c)
        place = (*bounds, limits.chunk_bytes, limits.is_whole)
        layout = self._layouts.get(place)
        if layout is None:
            layout = plan_chunks(index, chunk_bytes=limits.chunk_bytes, is_whole=limits.is_whole)
            self._layouts[place] = layout
            if len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
        return layout

    @asynccontextmanager
    async def chunk(
        self,
        partition: TopicIdPartition,
        segment: RemoteSegment,
        index: SegmentIndex,
        chunk: Chunk,
        *,
        offset: int | None = None,
        next_segment: RemoteSegment | None = None,
    ) -> AsyncIterator[HydratedChunk]:
        """Hold a chunk for the time of the context; see `open`."""
        found = await self.open(partition, segment, index, chunk, offset=offset, next_segment=next_segment)
        try:
            yield found
        finally:
            found.close()

    async def open(
        self,
        partition: TopicIdPartition,
        segment: RemoteSegment,
        index: SegmentIndex,
        chunk: Chunk,
        *,
        offset: int | None = None,
        next_segment: RemoteSegment | None = None,
    ) -> HydratedChunk:
        """
        Return a chunk for a reader, who closes it.

        *next_segment* is where a reader goes on behind *segment*. A chunk that is too large for both the
        cache and the memory is cut: what is returned is the part of it where reading from *offset* begins,
        by default its first, and says so.

        Raises:
            ObjectNotFound: The object has gone: look at the manifest again.
            CorruptDataError: Its bytes are wrong, downloaded twice.
            StorageUnavailable: The store does not answer, or the hydrator was closed.
        """
        wanted = self._wanted(partition, segment, index, chunk)
        found = await self._hydrated(wanted)
        if found is None:
            # A layout by size cuts what whole-segment mode does not; only a giant batch stays as it is.
            smaller = plan_chunks(index, chunk_bytes=self._limits.chunk_bytes)
            part = smaller.holding(chunk.base_offset if offset is None else offset)
            if part is None or part.size_bytes >= chunk.size_bytes:
                raise LocalFileError(
                    f"{wanted.name}: {chunk.size_bytes} bytes fit neither the cache nor the memory",
                    path=wanted.name,
                    hint="make room for the cache, or set a smaller cloud_storage_cache_chunk_size",
                )
            return await self.open(partition, segment, index, part)
        self._note_reader(partition, segment, index, wanted, next_segment)
        return found

    def prefetch(
        self, partition: TopicIdPartition, segment: RemoteSegment, index: SegmentIndex, chunk: Chunk
    ) -> None:
        """Hydrate a chunk that a reader will want soon, if the cache has room; nobody hears how it ends."""
        wanted = self._wanted(partition, segment, index, chunk)
        under_way = sum(flight.is_prefetch for flight in self._flights.values())
        is_here = (
            (wanted.name, chunk.size_bytes) in self._flights
            or self._open.holds(wanted.name)
            or self._keeper.directory.accounts.holds(wanted.name)
        )
        if not (self._is_closed or is_here or under_way >= self._limits.prefetches_max):
            self._fly(wanted, is_cached=True, is_prefetch=True)

    async def close(self) -> None:
        """End what is under way and close every file that nobody reads; nothing may be asked afterwards."""
        self._is_closed = True
        tasks = [*self._ahead.values(), *self._ended, *(flight.task for flight in self._flights.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._indexes.close()
        self._open.close()

    def _wanted(
        self, partition: TopicIdPartition, segment: RemoteSegment, index: SegmentIndex, chunk: Chunk
    ) -> _Wanted:
        key = data_key(partition, segment)
        name = chunk_name(key, chunk.position, buckets=self._keeper.directory.buckets)
        return _Wanted(key, name, chunk, len(self.layout(index).chunks))

    async def _hydrated(self, wanted: _Wanted) -> HydratedChunk | None:
        """Return a chunk for a reader; None where neither the cache nor the memory takes it."""
        chunk, is_hit = wanted.chunk, True
        for attempt in range(_ATTEMPTS + 1):
            entry = self._open.take(wanted.name, chunk.size_bytes)
            if entry is not None:
                self._keeper.touch(wanted.name)
                (self._metrics.hits if is_hit else self._metrics.misses).labels("chunk").inc()
                return HydratedChunk(chunk, entry=entry, keeper=self._keeper)
            is_cached = attempt < _ATTEMPTS
            flight = self._flights.get((wanted.name, chunk.size_bytes))
            if flight is None or not is_cached:
                flight = self._fly(wanted, is_cached=is_cached, is_prefetch=False)
            arrival = await self._arrived(flight)
            is_hit = is_hit and arrival.is_hit
            if arrival.is_refused and not flight.is_prefetch:
                return None
            if arrival.data is not None:
                self._metrics.misses.labels("chunk").inc()
                return HydratedChunk(chunk, data=arrival.data, keeper=self._keeper)
        return None

    def _fly(self, wanted: _Wanted, *, is_cached: bool, is_prefetch: bool) -> _Flight:
        if self._is_closed:
            raise StorageUnavailable(f"{wanted.name}: the hydrator is closed")
        place = (wanted.name, wanted.chunk.size_bytes)
        work = self._arrival(wanted, is_cached=is_cached, is_prefetch=is_prefetch)
        flight = _Flight(asyncio.get_running_loop().create_task(work), is_prefetch)
        self._flights[place] = flight
        flight.task.add_done_callback(partial(self._land, place, flight))
        return flight

    def _land(self, place: tuple[str, int], flight: _Flight, task: asyncio.Task[_Arrival]) -> None:
        if self._flights.get(place) is flight:
            del self._flights[place]
        if not task.cancelled():
            task.exception()  # Looked at: where nobody waited, nobody has to hear of it.

    async def _arrived(self, flight: _Flight) -> _Arrival:
        """Wait for a flight; a waiter that is cancelled leaves it to the others, or to the next one."""
        flight.waiters += 1
        try:
            await asyncio.wait({flight.task})
        finally:
            flight.waiters -= 1
            # Clients that leave at once must not fill the line with what nobody waits for.
            if not flight.task.done() and not flight.waiters and len(self._flights) > FLIGHTS_MAX:
                self._flights = {
                    place: other for place, other in self._flights.items() if other is not flight
                }
                flight.task.cancel()
                self._ended.add(flight.task)
                flight.task.add_done_callback(self._ended.discard)
        if flight.task.cancelled():
            raise StorageUnavailable("the download was ended: the hydrator is closed")
        return flight.task.result()

    async def _arrival(self, wanted: _Wanted, *, is_cached: bool, is_prefetch: bool) -> _Arrival:
        opened = await self._from_disk(wanted) if is_cached else None
        is_hit = opened is not None
        if opened is None:
            got = await self._downloader.download(
                wanted.key, wanted.name, wanted.chunk, is_cached=is_cached, is_streamed=not is_prefetch
            )
            if got is None or isinstance(got, bytes):
                return _Arrival(data=got, is_refused=got is None)
            opened = got
            if is_prefetch:
                self._metrics.prefetches.inc()
        self._open.add(opened, segment=wanted.key, number=wanted.chunk.number, chunk_count=wanted.chunk_count)
        return _Arrival(is_hit=is_hit)

    async def _from_disk(self, wanted: _Wanted) -> OpenFile | None:
        """Return the cached file, checked; None when there is none, or it is not what it should be."""
        if not self._keeper.is_started:
            await self._keeper.step()
        directory = self._keeper.directory
        try:
            opened = await in_thread_or(_close, partial(directory.open, wanted.name, wanted.chunk.size_bytes))
        except LocalFileError as error:
            log.warning("a cached chunk cannot be read; it is fetched again", error=str(error))
            return None
        if opened is None or opened.is_checked:
            return opened
        try:
            await in_thread(check_file, opened.fd, wanted.chunk)
        except (CorruptDataError, OSError) as error:
            opened.close()
            self._metrics.corrupt.labels("file").inc()
            log.warning("a cached chunk is wrong; it is fetched again", name=wanted.name, error=str(error))
            await self._keeper.discard(wanted.name)
            return None
        except BaseException:
            opened.close()
            raise
        directory.accounts.set_checked(wanted.name, opened.identity)
        return replace(opened, is_checked=True)

    def _note_reader(
        self,
        partition: TopicIdPartition,
        segment: RemoteSegment,
        index: SegmentIndex,
        wanted: _Wanted,
        next_segment: RemoteSegment | None,
    ) -> None:
        """Hydrate the next chunk where readers have come here from the one before."""
        layout, chunk, sequences = self.layout(index), wanted.chunk, self._sequences
        if chunk.number >= len(layout.chunks) or layout.chunks[chunk.number] != chunk:
            return
        if chunk.number:
            buckets = self._keeper.directory.buckets
            before = layout.chunks[chunk.number - 1]
            reads_on = sequences.was_read(chunk_name(wanted.key, before.position, buckets=buckets))
        else:
            reads_on = sequences.was_read((partition, segment.base_offset))
        sequences.note(wanted.name)
        following = layout.after(chunk)
        if following is None:
            sequences.note((partition, segment.next_offset))
        if not reads_on:
            return
        if following is not None:
            self.prefetch(partition, segment, index, following)
        elif next_segment is not None:
            self._prefetch_begin_of(partition, next_segment)

    def _prefetch_begin_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> None:
        """Hydrate the first chunk of a segment, whose index may not be here yet."""
        key = data_key(partition, segment)
        if key in self._ahead or self._is_closed:
            return
        task = asyncio.get_running_loop().create_task(self._begin_of(partition, segment))
        self._ahead[key] = task
        task.add_done_callback(lambda _: self._ahead.pop(key))

    async def _begin_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> None:
        try:
            index = await self.index(partition, segment)
        except TieringError as error:
            log.info("a segment is not prefetched; its reader asks anew", error=str(error))
            return
        for chunk in self.layout(index).chunks[:1]:
            self.prefetch(partition, segment, index, chunk)


def _close(opened: OpenFile | None) -> None:
    if opened is not None:
        opened.close()
