"""
Download chunks: from the object store into the cache, or to the reader if the cache does not take them.

The bytes of an ordinary chunk are checked on their way to the file, before the file gets its name, and
readers get what is checked meanwhile (`arriving_chunk`). A larger chunk (whole-segment mode) goes to its file
piece by piece and is checked in the file. A wrong chunk is downloaded once more, and is corrupt if it is
wrong again. If the disk fails, a reader gets its chunk by another request, in memory.

`DownloadBudget` bounds how many downloads run at once and how many bytes they hold. It serves requests in
the order in which they arrive. A request for more bytes than the whole budget runs alone. A budget
belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Protocol, TypeAlias

import structlog

from tieringd.cache.cache_directory import OpenFile, PartFile
from tieringd.cache.faults import located, read_exactly
from tieringd.compiled.loading import loaded_walk
from tieringd.errors import CorruptDataError, LocalFileError, StorageUnavailable
from tieringd.formats.batch_check import check_batches, check_batches_in
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.metrics import CacheMetrics
from tieringd.policies.chunk_layout import Chunk
from tieringd.reading.arriving_chunk import ArrivingBytes, ArrivingChunk
from tieringd.reading.cache_keeper import CacheKeeper
from tieringd.reading.in_place import ObjectsInPlace
from tieringd.reading.late_ranges import LateRanges
from tieringd.storage.base import ObjectStore
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)

Downloaded: TypeAlias = "OpenFile | bytes | None"
"""The chunk in the cache or in place, or in memory, or None if neither takes it."""


class _Get(Protocol):
    """Gets a range, and returns how many bytes there were."""

    async def __call__(self, key: str, *, position: int, size_bytes: int) -> int: ...


class DownloadBudget:
    """A limit of *slots* holders at once, and of *size_bytes* for all of them together."""

    def __init__(self, slots: int, size_bytes: int) -> None:
        self._slots = slots
        self._size_bytes = size_bytes
        self._holders = 0
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Return how many bytes are given out."""
        return self._held_bytes

    @property
    def holders(self) -> int:
        """Return how many requests hold a slot."""
        return self._holders

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn, then hold a slot and *size_bytes* for the time of the context."""
        size_bytes = min(size_bytes, self._size_bytes)
        if self._waiting or not self._has(size_bytes):
            await self._turn(size_bytes)
        else:
            self._give(size_bytes)
        try:
            yield
        finally:
            self._return(size_bytes)

    async def _turn(self, size_bytes: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        entry = (size_bytes, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._return(size_bytes)  # The turn came, but its request was cancelled.
            else:
                self._waiting.remove(entry)
                self._call_next()  # The next request may fit where this one did not.
            raise

    def _has(self, size_bytes: int) -> bool:
        return self._holders < self._slots and self._held_bytes + size_bytes <= self._size_bytes

    def _give(self, size_bytes: int) -> None:
        self._holders += 1
        self._held_bytes += size_bytes

    def _return(self, size_bytes: int) -> None:
        self._holders -= 1
        self._held_bytes -= size_bytes
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting and self._has(self._waiting[0][0]):
            size_bytes, turn = self._waiting.popleft()
            # A cancelled request removes itself a moment later.
            if turn.done():
                self._waiting.appendleft((size_bytes, turn))
                return
            self._give(size_bytes)
            turn.set_result(None)


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """How much is downloaded at once. A download holds its share until it has ended."""

    downloads_max: int = 16
    bytes_max: int = 256 << 20
    """Memory of all downloads together."""
    stream_bytes_max: int = 64 << 20
    """The largest chunk that is held in memory for its readers if the cache does not take it."""
    piece_bytes: int = 16 << 20
    """How many bytes one request asks for. An ordinary chunk takes one request."""
    piece_timeout_seconds: float = 60.0
    """Deadline of one request, including its retries. A store that hangs longer is reported as an error."""


class ChunkDownloader:
    """Download chunks of one store into one cache. Belongs to one event loop."""

    def __init__(
        self, store: ObjectStore, keeper: CacheKeeper, *, limits: DownloadLimits, metrics: CacheMetrics
    ) -> None:
        self._store = store
        self._keeper = keeper
        self._limits = limits
        self._metrics = metrics
        self._budget = DownloadBudget(limits.downloads_max, limits.bytes_max)
        self._ranges = LateRanges(store, metrics)
        self._in_place = ObjectsInPlace(store, keeper.directory.path, metrics)

    async def download(
        self,
        key: str,
        name: str,
        chunk: Chunk,
        expected: ExpectedBatches,
        *,
        arriving: ArrivingChunk,
        is_cached: bool,
        is_streamed: bool,
    ) -> Downloaded:
        """
        Download *chunk* of the object *key*, with the *expected* batches, into the file *name*.

        An object on the cache's disk is not downloaded: the chunk is opened and checked there. *arriving* is
        told what is checked meanwhile. Without *is_cached* the chunk is in no file.
        With *is_streamed* it is returned in memory if the cache does not take it, unless it is too large for
        that.

        Raises:
            ObjectNotFound: The object was deleted. Read the manifest again.
            CorruptDataError: Its bytes were wrong twice. The error names the object and the position.
            StorageUnavailable: The store does not answer.
        """
        with self._metrics.hydration_seconds.labels("chunk").time():
            async with self._budget.take(self._memory_bytes(chunk)):
                with self._metrics.in_progress.track_inprogress():
                    for is_last in (False, True):
                        try:
                            return await self._attempt(
                                key,
                                name,
                                chunk,
                                expected,
                                arriving=arriving,
                                is_cached=is_cached,
                                is_streamed=is_streamed,
                            )
                        except CorruptDataError as error:
                            self._metrics.corrupt.labels("download").inc()
                            if is_last:
                                raise
                            log.warning(
                                "a chunk that arrived is wrong; it is fetched again", error=str(error)
                            )
        raise AssertionError("the last attempt returns or raises")

    async def reopened(self, key: str, name: str, chunk: Chunk) -> OpenFile | None:
        """Open a chunk in place that was checked there before; see `ObjectsInPlace.reopened`."""
        return await self._in_place.reopened(key, name, chunk)

    async def _checked_in_place(
        self, key: str, name: str, chunk: Chunk, expected: ExpectedBatches, arriving: ArrivingChunk
    ) -> OpenFile | None:
        """Open a chunk in place and check it, within the time that as many pieces of a download have."""
        seconds = self._limits.piece_timeout_seconds * ceil(chunk.size_bytes / self._limits.piece_bytes)
        try:
            async with asyncio.timeout(seconds):
                return await self._in_place.open(key, name, chunk, expected, arriving)
        except CorruptDataError as error:
            raise in_object(error, key, chunk) from error
        except TimeoutError as error:
            raise StorageUnavailable(
                f"get {key}: {chunk.size_bytes} bytes from {chunk.position} were not read in {seconds:g} s"
            ) from error

    def close(self) -> None:
        """Shut down the threads once they are idle."""
        self._in_place.close()

    def mistrust(self, name: str) -> None:
        """Have a chunk checked again when it is opened in place."""
        self._in_place.mistrust(name)

    def _memory_bytes(self, chunk: Chunk) -> int:
        """Return how many bytes a download of *chunk* may hold in memory."""
        is_streamable = chunk.size_bytes <= self._limits.stream_bytes_max
        return chunk.size_bytes if is_streamable else self._limits.piece_bytes

    async def _attempt(
        self,
        key: str,
        name: str,
        chunk: Chunk,
        expected: ExpectedBatches,
        *,
        arriving: ArrivingChunk,
        is_cached: bool,
        is_streamed: bool,
    ) -> Downloaded:
        if is_cached:
            here = await self._checked_in_place(key, name, chunk, expected, arriving)
            if here is not None:
                return here
        part = await self._keeper.begin(name, chunk.size_bytes) if is_cached else None
        if part is not None:
            found: OpenFile | None = None
            try:
                found = await self._into(part, key, chunk, expected, arriving)
            finally:
                if found is None:
                    await self._keeper.abandon(part)
                else:
                    self._keeper.settle(part)  # No await here: a cancellation would leak the open file.
            if found is not None:
                return found
        if not is_streamed or chunk.size_bytes > self._limits.stream_bytes_max:
            return None
        return await self._streamed(key, chunk, expected)

    async def _into(
        self, part: PartFile, key: str, chunk: Chunk, expected: ExpectedBatches, arriving: ArrivingChunk
    ) -> OpenFile | None:
        """Fill a part and publish it; return None if the disk fails."""
        piece_bytes = self._limits.piece_bytes
        try:
            if chunk.size_bytes <= piece_bytes:
                arriving.begin(part.fd, part.name)
                try:
                    data = ArrivingBytes(part, 0, expected, arriving)
                    await self._store_piece(key, chunk, 0, chunk.size_bytes, data)
                finally:
                    arriving.end()
            else:
                for position in range(0, chunk.size_bytes, piece_bytes):
                    size_bytes = min(piece_bytes, chunk.size_bytes - position)
                    data = ArrivingBytes(part, position, None)
                    await self._store_piece(key, chunk, position, size_bytes, data)
                await self._checked(key, chunk, partial(_check_file, part, chunk.size_bytes, expected))
        except LocalFileError as error:
            self._keeper.note_refusal(error)
            return None
        return await self._keeper.publish(part)

    async def _store_piece(
        self, key: str, chunk: Chunk, position: int, size_bytes: int, data: ArrivingBytes
    ) -> None:
        """Write a piece to the file as it arrives."""
        get = partial(self._ranges.read_range, begin=data.begin)
        await self._got(key, chunk, position, size_bytes, get)
        try:
            data.end()
        except CorruptDataError as error:
            raise in_object(error, key, chunk) from error

    async def _streamed(self, key: str, chunk: Chunk, expected: ExpectedBatches) -> bytes:
        piece_bytes = self._limits.piece_bytes
        pieces = [
            await self._piece(key, chunk, position, min(piece_bytes, chunk.size_bytes - position))
            for position in range(0, chunk.size_bytes, piece_bytes)
        ]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        await self._checked(
            key, chunk, partial(check_batches, memoryview(data), expected, walk=loaded_walk())
        )
        self._metrics.streamed_bytes.inc(len(data))
        return data

    async def _piece(self, key: str, chunk: Chunk, position: int, size_bytes: int) -> bytes:
        """Return a piece in memory."""
        found: list[bytes] = []

        async def get(key: str, *, position: int, size_bytes: int) -> int:
            found.append(await self._store.get_range(key, position=position, size_bytes=size_bytes))
            return len(found[-1])

        await self._got(key, chunk, position, size_bytes, get)
        return found[-1]

    async def _got(self, key: str, chunk: Chunk, position: int, size_bytes: int, get: _Get) -> None:
        """
        Get a piece of *chunk*.

        Raises:
            CorruptDataError: There are fewer bytes.
            StorageUnavailable: They did not arrive in time.
        """
        start = chunk.position + position
        seconds = self._limits.piece_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                found_bytes = await get(key, position=start, size_bytes=size_bytes)
        except TimeoutError as error:
            raise StorageUnavailable(
                f"get_range {key}: {size_bytes} bytes from {start} did not arrive in {seconds:g} s"
            ) from error
        if found_bytes != size_bytes:
            raise CorruptDataError(
                f"the object is {size_bytes - found_bytes} bytes shorter than its index says",
                source=key,
                position=start + found_bytes,
            )
        self._metrics.hydrated_bytes.labels("chunk").inc(size_bytes)

    async def _checked(self, key: str, chunk: Chunk, check: Callable[[], None]) -> None:
        try:
            await in_thread(check)
        except CorruptDataError as error:
            raise in_object(error, key, chunk) from error


def in_object(error: CorruptDataError, key: str, chunk: Chunk) -> CorruptDataError:
    """Return *error*, a fault in a chunk, as a fault in the object that the chunk is from."""
    return CorruptDataError(
        error.message,
        source=key,
        position=chunk.position + (error.position or 0),
        offset=error.offset,
        hint=error.hint,
    )


def check_file(fd: int, size_bytes: int, expected: ExpectedBatches) -> None:
    """
    Check that an open file holds the *expected* batches of a chunk. This blocks.

    Raises:
        CorruptDataError: The file holds other bytes.
        OSError: The file cannot be read.
    """
    check_batches_in(partial(read_exactly, fd), size_bytes, expected, walk=loaded_walk())


def _check_file(part: PartFile, size_bytes: int, expected: ExpectedBatches) -> None:
    try:
        check_file(part.fd, size_bytes, expected)
    except OSError as error:
        raise located(part.name, "be read", error) from error
