"""
The hydrator: gives readers archived chunks from the cache, and downloads missing chunks into it.

    async with hydrator.chunk(partition, segment, index, chunk) as found:
        if found.file: send the bytes of found.file, from page cache to socket
        else: send found.data

Readers that want the same chunk wait for one download. If one of them leaves, the others still get the
chunk. If all of them leave, the download is finished for the next reader. A reader that is content with a
part of the chunk gets one as soon as its first record is there, while the rest is still on its way
(`arriving_chunk`). When readers go on from one chunk to the next, or to the second half of one, the chunk
after it is prefetched. Every batch is checked before a reader sees it: at the download, and once more after a
restart or when a cached file was changed. An object on the cache's disk is not downloaded: its own file is
checked and read (`reading.in_place`). A chunk that the cache does not take is handed out in memory, checked
in the same way. The hydrator does not read manifests: after `ObjectNotFound` the caller reads the
manifest again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import structlog

from tieringd.cache.cache_directory import OpenFile
from tieringd.errors import CorruptDataError, LocalFileError, TieringError
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.formats.cache_names import chunk_name
from tieringd.formats.object_keys import data_key
from tieringd.metrics import CacheMetrics
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment, SegmentIndex
from tieringd.policies.chunk_layout import Chunk, ChunkLayout, ReadSequences, plan_chunks
from tieringd.reading.arriving_chunk import ArrivedPart, ArrivingChunk
from tieringd.reading.cache_keeper import CacheKeeper, OpenEntry
from tieringd.reading.chunk_download import ChunkDownloader, DownloadLimits, check_file
from tieringd.reading.index_cache import IndexCache
from tieringd.storage.base import FileSlice, ObjectStore
from tieringd.storage.single_flight import Flight, SingleFlight
from tieringd.storage.threads import in_thread, in_thread_or

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 10.0
_ATTEMPTS = 3
"""How often a chunk may be evicted between its download and its reader. After that it is not cached."""
_LAYOUTS = 1024
FLIGHTS_MAX = 64
"""How many downloads may be running or queued before those without a waiting reader are cancelled."""


@dataclass(frozen=True, slots=True)
class HydrationLimits:
    """How segments are cut into chunks, and how much is held and downloaded."""

    chunk_bytes: int = 16 << 20
    """`cloud_storage_cache_chunk_size`."""
    is_whole: bool = False
    """`cloud_storage_disable_chunk_reads`."""
    prefetches_max: int = 4
    """How many chunks are prefetched at once."""
    index_bytes_max: int = 64 << 20
    """Memory of the cached indexes."""
    downloads: DownloadLimits = field(default_factory=DownloadLimits)


class HydratedChunk:
    """A chunk with checked batches for one reader, which must close it."""

    def __init__(
        self,
        chunk: Chunk,
        *,
        data: bytes | None = None,
        file: FileSlice | None = None,
        give_back: Callable[[], None] | None = None,
        mark_corrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.chunk = chunk
        """
        The chunk that it holds.

        It is a part of the wanted chunk if the rest is still on its way, or if that was too large for cache
        and memory.
        """
        self.data = data
        """All its bytes, if they are not in a file."""
        self.file = file
        """All its bytes in an open file, until `close`."""
        self._give_back = give_back
        self._mark_corrupt = mark_corrupt

    @classmethod
    def opened(
        cls, chunk: Chunk, entry: OpenEntry, give_back: Callable[[], None], mistrust: Callable[[], None]
    ) -> HydratedChunk:
        """Return a chunk whose file the reader of *entry* holds."""
        file = FileSlice(entry.file.fd, entry.file.position, entry.file.size_bytes)
        return cls(chunk, file=file, give_back=give_back, mark_corrupt=mistrust)

    @classmethod
    def arrived(cls, part: ArrivedPart, mistrust: Callable[[], None]) -> HydratedChunk:
        """Return the part of a chunk that has arrived."""

        def mark_corrupt() -> None:
            part.mark_corrupt()
            mistrust()  # The whole chunk may be listed by now.

        file = FileSlice(part.fd, part.position, part.chunk.size_bytes)
        return cls(part.chunk, file=file, give_back=part.close, mark_corrupt=mark_corrupt)

    def mark_corrupt(self) -> None:
        """Make the next reader check the chunk again, because a client or the disk reported wrong bytes."""
        if self._give_back is not None:
            self._mark_corrupt()

    def close(self) -> None:
        """Give the chunk back. Closing twice is allowed."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            self.file = None
            give_back()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A wanted chunk, and its object key, file name, and number of chunks and index of its segment."""

    key: str
    name: str
    chunk: Chunk
    chunk_count: int
    index: SegmentIndex

    @property
    def expected(self) -> ExpectedBatches:
        """Return what the index says of the chunk's batches."""
        return ExpectedBatches.of_index(self.index, self.chunk.position, self.chunk.end)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """The outcome of a flight that did not fail."""

    is_hit: bool = False
    """Whether the chunk was in the cache already."""
    data: bytes | None = None
    """The bytes of the chunk, if the cache did not take them."""
    is_refused: bool = False
    """Whether neither the cache nor the memory takes it."""


WAITED_FOR_STORE: ContextVar[list[str] | None] = ContextVar("WAITED_FOR_STORE", default=None)
"""
A list of the reader's own, to which the name of each chunk is added that it awaited from the store.

It is empty in the end if the cache had all that was read.
"""

_Place: TypeAlias = tuple[str, int]
"""The file name and size in bytes of a chunk."""


def _when_closed(_: object) -> str:
    return "the download was cancelled: the hydrator is closed"


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
        self._hits, self._misses = metrics.hits.labels("chunk"), metrics.misses.labels("chunk")
        self._downloader = ChunkDownloader(store, keeper, limits=self._limits.downloads, metrics=metrics)
        self._indexes = IndexCache(
            store, keeper, size_bytes_max=self._limits.index_bytes_max, metrics=metrics
        )
        # Downloads, and checks of cached files. Clients that disconnect early must not fill the queue with
        # downloads that no reader waits for.
        self._flights: SingleFlight[_Place, _Arrival] = SingleFlight(_when_closed, unwaited_above=FLIGHTS_MAX)
        self._prefetches: set[Flight[_Place, _Arrival]] = set()
        self._arriving: dict[Flight[_Place, _Arrival], ArrivingChunk] = {}
        """The arrived part of the chunk of each flight."""
        self._sequences = ReadSequences()
        self._ahead: SingleFlight[str, None] = SingleFlight(_when_closed)
        self._layouts: OrderedDict[tuple[int, ...], ChunkLayout] = OrderedDict()

    def set_limits(self, limits: HydrationLimits) -> None:
        """Cut segments by *limits* from now on. The limits on concurrent downloads do not change."""
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
            ObjectNotFound: The bucket has no such segment. Read the manifest again.
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
        Return a chunk for a reader, which must close it.

        *next_segment* is the segment that a reader reads after *segment*. With *offset*, the returned chunk
        may be a part of the wanted one that has a record at or after *offset*, if the rest is still on its
        way. A chunk that is too large for both the cache and the memory is cut: the returned chunk is then
        the part of it that holds *offset*, by default its first part.

        Raises:
            ObjectNotFound: The object was deleted. Read the manifest again.
            CorruptDataError: Its bytes were wrong in two downloads.
            StorageUnavailable: The store does not answer, or the hydrator was closed.
            LocalFileError: Even the smallest part of the chunk fits neither the cache nor the memory.
        """
        wanted = self._wanted(partition, segment, index, chunk)
        found = await self._hydrated(wanted, offset)
        if found is None:
            # Cutting by size splits a whole-segment chunk. Only a giant batch cannot be split.
            smaller = plan_chunks(index, chunk_bytes=self._limits.chunk_bytes)
            part = smaller.holding(chunk.base_offset if offset is None else offset)
            if part is None or part.size_bytes >= chunk.size_bytes:
                raise LocalFileError(
                    f"{wanted.name}: {chunk.size_bytes} bytes fit neither in the cache nor in memory",
                    path=wanted.name,
                    hint="free some space for the cache, or set a smaller cloud_storage_cache_chunk_size",
                )
            return await self.open(partition, segment, index, part)
        self._note_reader(partition, segment, wanted, next_segment, offset)
        return found

    def prefetch(
        self, partition: TopicIdPartition, segment: RemoteSegment, index: SegmentIndex, chunk: Chunk
    ) -> None:
        """Hydrate a chunk that a reader will want soon, if the cache has room. Errors are not reported."""
        self._prefetch(self._wanted(partition, segment, index, chunk))

    def _prefetch(self, wanted: _Wanted) -> None:
        is_here = (
            (wanted.name, wanted.chunk.size_bytes) in self._flights
            or self._open.holds(wanted.name)
            or self._keeper.directory.accounts.holds(wanted.name)
        )
        is_full = len(self._prefetches) >= self._limits.prefetches_max
        if not (self._flights.is_closed or is_here or is_full):
            flight = self._begin_flight(wanted, is_cached=True, is_prefetch=True)
            self._prefetches.add(flight)
            flight.task.add_done_callback(lambda _: self._prefetches.discard(flight))

    async def close(self) -> None:
        """
        Cancel all downloads and close every file without a reader.

        The hydrator cannot be used afterwards.
        """
        await self._ahead.close()
        await self._flights.close()
        await self._indexes.close()
        self._downloader.close()
        self._open.close()

    def _wanted(
        self, partition: TopicIdPartition, segment: RemoteSegment, index: SegmentIndex, chunk: Chunk
    ) -> _Wanted:
        key = data_key(partition, segment)
        name = chunk_name(key, chunk.position, buckets=self._keeper.directory.buckets)
        return _Wanted(key, name, chunk, len(self.layout(index).chunks), index)

    async def _hydrated(self, wanted: _Wanted, offset: int | None) -> HydratedChunk | None:
        """
        Return a chunk for a reader, or None if neither the cache nor the memory takes it.

        With *offset*, it may be the part that has arrived, if there is a record at or after *offset* in it.
        """
        chunk, is_hit = wanted.chunk, True
        for attempt in range(_ATTEMPTS + 1):
            entry = self._open.take(wanted.name, chunk.size_bytes)
            if entry is not None:
                self._keeper.touch(wanted.name)
                self._count(is_hit=is_hit)
                give_back = partial(self._open.give_back, entry)
                return HydratedChunk.opened(chunk, entry, give_back, partial(self._mistrust, wanted.name))
            is_cached = attempt < _ATTEMPTS
            flight = self._flights.get((wanted.name, chunk.size_bytes)) if is_cached else None
            if flight is None:
                flight = self._begin_flight(wanted, is_cached=is_cached, is_prefetch=False)
            # Now: a prefetch that ends while this waits is no longer among them.
            is_prefetch = flight in self._prefetches
            if offset is not None and (found := await self._arrived_part(wanted, flight, offset)) is not None:
                return found
            arrival = await self._flights.arrived(flight)
            is_hit = is_hit and arrival.is_hit
            if not arrival.is_hit:
                _note_wait(wanted)
            if arrival.is_refused and not is_prefetch:
                return None
            if arrival.data is not None:
                self._count(is_hit=False)
                return HydratedChunk(chunk, data=arrival.data)
        return None

    async def _arrived_part(
        self, wanted: _Wanted, flight: Flight[_Place, _Arrival], offset: int
    ) -> HydratedChunk | None:
        """Return the part of the chunk that has arrived, once it has *offset*; None if the flight ends."""
        arriving = self._arriving.get(flight)
        is_hit = True
        while arriving is not None and not flight.task.done():
            part = arriving.take(offset)
            if part is not None:
                if not is_hit:
                    _note_wait(wanted)
                self._count(is_hit=is_hit)
                return HydratedChunk.arrived(part, partial(self._mistrust, wanted.name))
            is_hit = False
            await self._flights.arrived_or(flight, arriving.until(offset))
        return None

    def _begin_flight(
        self, wanted: _Wanted, *, is_cached: bool, is_prefetch: bool
    ) -> Flight[_Place, _Arrival]:
        arriving = ArrivingChunk(wanted.chunk)
        work = partial(self._arrival, wanted, arriving, is_cached=is_cached, is_prefetch=is_prefetch)
        flight = self._flights.begin((wanted.name, wanted.chunk.size_bytes), work)
        self._arriving[flight] = arriving
        flight.task.add_done_callback(lambda _: self._arriving.pop(flight))
        return flight

    def _count(self, *, is_hit: bool) -> None:
        (self._hits if is_hit else self._misses).inc()

    async def _arrival(
        self, wanted: _Wanted, arriving: ArrivingChunk, *, is_cached: bool, is_prefetch: bool
    ) -> _Arrival:
        opened = await self._from_disk(wanted) if is_cached else None
        is_hit = opened is not None
        if opened is None:
            got = await self._downloader.download(
                wanted.key,
                wanted.name,
                wanted.chunk,
                wanted.expected,
                arriving=arriving,
                is_cached=is_cached,
                is_streamed=not is_prefetch,
            )
            if got is None or isinstance(got, bytes):
                return _Arrival(data=got, is_refused=got is None)
            opened = got
            if is_prefetch:
                self._metrics.prefetches.inc()
            if arriving.is_mistrusted:
                # A reader could not read what had arrived.
                opened.close()
                self._mistrust(wanted.name)
                return _Arrival()
        self._open.add(opened, segment=wanted.key, number=wanted.chunk.number, chunk_count=wanted.chunk_count)
        return _Arrival(is_hit=is_hit)

    def _mistrust(self, name: str) -> None:
        """Have a chunk checked again before the next reader gets it."""
        self._keeper.mistrust(name)
        self._downloader.mistrust(name)

    async def _from_disk(self, wanted: _Wanted) -> OpenFile | None:
        """Return the chunk's cached file, checked, or the object's own; None if it is missing or wrong."""
        if not self._keeper.is_started:
            await self._keeper.step()
        directory = self._keeper.directory
        try:
            opened = await in_thread_or(_close, partial(directory.open, wanted.name, wanted.chunk.size_bytes))
        except LocalFileError as error:
            log.warning("a cached chunk cannot be read; it is fetched again", error=str(error))
            return None
        if opened is None:
            return await self._downloader.reopened(wanted.key, wanted.name, wanted.chunk)
        if opened.is_checked:
            return opened
        try:
            await in_thread(check_file, opened.fd, wanted.chunk.size_bytes, wanted.expected)
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
        wanted: _Wanted,
        next_segment: RemoteSegment | None,
        offset: int | None,
    ) -> None:
        """
        Prefetch the next chunk if readers go on to it.

        They came to this one from the chunk before it, or from the beginning of this one to its second half.
        """
        layout, chunk, sequences = self.layout(wanted.index), wanted.chunk, self._sequences
        if chunk.number >= len(layout.chunks) or layout.chunks[chunk.number] != chunk:
            return
        if chunk.number:
            buckets = self._keeper.directory.buckets
            before = layout.chunks[chunk.number - 1]
            reads_on = sequences.was_read(chunk_name(wanted.key, before.position, buckets=buckets))
        else:
            reads_on = sequences.was_read((partition, segment.base_offset))
        if offset is not None and 2 * offset >= chunk.base_offset + chunk.next_offset:
            reads_on = reads_on or sequences.was_read(wanted.name)
        sequences.note(wanted.name)
        following = layout.after(chunk)
        if following is None:
            sequences.note((partition, segment.next_offset))
        if not reads_on:
            return
        if following is not None:
            name = chunk_name(wanted.key, following.position, buckets=self._keeper.directory.buckets)
            self._prefetch(replace(wanted, name=name, chunk=following))
        elif next_segment is not None:
            self._prefetch_begin_of(partition, next_segment)

    def _prefetch_begin_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> None:
        """Prefetch the first chunk of a segment, whose index may still have to be read."""
        key = data_key(partition, segment)
        if key in self._ahead or self._ahead.is_closed:
            return
        self._ahead.begin(key, partial(self._begin_of, partition, segment))

    async def _begin_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> None:
        try:
            index = await self.index(partition, segment)
        except TieringError as error:
            log.info("a segment is not prefetched; its reader asks anew", error=str(error))
            return
        for chunk in self.layout(index).chunks[:1]:
            self.prefetch(partition, segment, index, chunk)


def _note_wait(wanted: _Wanted) -> None:
    """Note for the running reader that it has awaited a chunk from the store."""
    waited = WAITED_FOR_STORE.get()
    if waited is not None:
        waited.append(wanted.name)


def _close(opened: OpenFile | None) -> None:
    if opened is not None:
        opened.close()
