"""A chunk of which the beginning is there: readers get that, and nothing that is not checked."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from tests.builders import segment_bytes
from tests.fakes.hydration import (
    BATCH_BYTES,
    CHUNK_BYTES,
    PARTITION,
    Host,
    OddStore,
    Stored,
    bytes_in,
    flipped,
    read_batches,
    running,
)
from tests.fakes.memory_store import MemoryStore
from tests.fakes.virtual_loop import virtually
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.cache.cache_directory import CacheDirectory, PartFile
from tieringd.errors import StorageUnavailable
from tieringd.model.manifest import PartitionManifest
from tieringd.reading.partition_reader import PartitionReader
from tieringd.storage.resilient import ResilientStore

RECORDS = 3
"""In each batch; a chunk has three batches."""


class HeldStore(OddStore):
    """A store that hands a range on in pieces, and holds back what the test does not let through."""

    def __init__(self) -> None:
        super().__init__()
        self.piece_bytes = BATCH_BYTES // 2 + 1
        self.let_through = 3
        """How many pieces of a range pass before the rest waits for `gate`: one whole batch in three."""
        self.is_held = asyncio.Event()
        """Set when a range waits for `gate`."""
        self.breaks = 0
        """How many of the next ranges end with their connection, where the rest would wait."""

    async def read_range(self, key, *, position, size_bytes, begin):
        """Hand on the bytes of a range."""
        gate, self.gate = self.gate, None
        data = await self.get_range(key, position=position, size_bytes=size_bytes)
        self.gate = gate
        take = begin()
        for number, at in enumerate(range(0, len(data), self.piece_bytes)):
            if number == self.let_through:
                if self.breaks:
                    self.breaks -= 1
                    raise StorageUnavailable("the connection ended early")
                if self.gate is not None:
                    self.is_held.set()
                    await self.gate.wait()
            take(memoryview(data)[at : at + self.piece_bytes])
        return len(data)


@pytest.fixture
def store():
    return HeldStore()


@pytest.fixture
def stored(store):
    """Return a segment whose chunks are handed on in part."""
    store.gate = asyncio.Event()
    return Stored(store)


def reader_of(host):
    return PartitionReader(host.hydrator, SpilloverManifests(MemoryStore()))


def manifest_of(stored):
    return PartitionManifest.begin(PARTITION, start_offset=0).appended([stored.segment])


async def read(host, stored, offset):
    """Return the bytes from the batch of *offset* on that a Fetch gets, and the offset after them."""
    found = await read_batches(reader_of(host), manifest_of(stored), offset, size_bytes_max=1 << 20)
    try:
        return os.pread(found.file.fd, found.file.size_bytes, found.file.position), found.next_offset
    finally:
        found.close()


def batches_of(stored, first, end):
    return stored.data[first * BATCH_BYTES : end * BATCH_BYTES]


def part_of(found):
    """Return the bytes of a part. Its file may be longer."""
    return os.pread(found.file.fd, found.file.size_bytes, found.file.position)


async def is_waiting(store, task):
    """Say whether *task* still waits when a range is held back."""
    await store.is_held.wait()
    await asyncio.sleep(0.1)
    return not task.done()


@virtually
async def test_first_record_does_not_wait_for_the_rest_of_its_chunk(host, store, stored):
    """The rest of the range is held back. Then the same download gives the rest, and the cache the chunk."""
    async with running(host):
        async with asyncio.timeout(10):
            assert await read(host, stored, 0) == (batches_of(stored, 0, 1), RECORDS)
        later = asyncio.create_task(read(host, stored, RECORDS))
        assert await is_waiting(store, later)
        assert (store.downloads(), host.path_of(stored).exists()) == (1, False)
        store.gate.set()
        assert await later == (batches_of(stored, 1, 3), 3 * RECORDS)
        assert await read(host, stored, 0) == (batches_of(stored, 0, 3), 3 * RECORDS)
        assert store.downloads() == 1
        assert host.path_of(stored).read_bytes() == stored.data[:CHUNK_BYTES]


@virtually
async def test_reader_waits_for_its_own_batch(host, store, stored):
    """What is before it is no answer. A reader of the middle of a batch gets the whole of it."""
    store.let_through = 4
    async with running(host):
        readers = {offset: asyncio.create_task(read(host, stored, offset)) for offset in (8, 5, 3, 6)}
        assert await is_waiting(store, readers[8])
        assert readers[6].done() is False
        for offset in (5, 3):
            assert await readers[offset] == (batches_of(stored, 1, 2), 2 * RECORDS)
        store.gate.set()
        for offset in (8, 6):
            assert await readers[offset] == (batches_of(stored, 2, 3), 3 * RECORDS)


@virtually
async def test_whole_chunk_is_what_a_reader_without_an_offset_gets(host, store, stored):
    """It waits for the last byte."""
    async with running(host):
        reader = asyncio.create_task(host.read(stored))
        assert await is_waiting(store, reader)
        store.gate.set()
        assert await reader == stored.data[:CHUNK_BYTES]


@virtually
async def test_part_stays_as_it_was_checked_when_the_range_is_read_anew(tmp_path, store, stored):
    """
    The second attempt brings wrong bytes for what a reader has: the file keeps the right ones.

    They come in a piece that is written before the end of their batch is there.
    """
    host = Host(tmp_path / "cache", store)
    host.store = ResilientStore(store)
    store.breaks = 1
    async with running(host) as hydrator:
        chunk = hydrator.layout(stored.index).chunks[0]
        begun = await hydrator.open(PARTITION, stored.segment, stored.index, chunk, offset=0)
        assert begun.chunk.size_bytes == BATCH_BYTES
        store.changes.append(lambda data: data[:100] + b"?" + data[101:])
        store.gate.set()
        assert await host.read(stored) == stored.data[:CHUNK_BYTES]
        assert part_of(begun) == batches_of(stored, 0, 1)
        begun.close()
        assert (store.downloads(), host.value("corrupt_total", source="download")) == (3, 1)


@virtually
async def test_damaged_batch_is_given_to_no_reader(host, store, stored):
    """The batch before it is. The chunk comes once more, and its readers get the right bytes."""
    store.gate.set()
    async with running(host) as hydrator:
        await hydrator.index(PARTITION, stored.segment)
        store.changes.append(lambda data: data[:BATCH_BYTES] + flipped(data[BATCH_BYTES:]))
        readers = [asyncio.create_task(read(host, stored, offset)) for offset in (0, 3, 6)]
        found = [data for data, _ in await asyncio.gather(*readers)]
        assert found[0].startswith(batches_of(stored, 0, 1))
        for data, number in zip(found, (0, 1, 2), strict=True):
            assert batches_of(stored, number, 3).startswith(data)
        assert store.downloads() == 2


@virtually
async def test_segment_with_a_checksum_of_its_own_is_given_out_whole(host, store, stored):
    """Only its last byte tells whether that checksum is right."""
    small = Stored(store, 36, batches=3)
    async with running(host) as hydrator:
        (chunk,) = hydrator.layout(small.index).chunks
        reader = asyncio.create_task(hydrator.open(PARTITION, small.segment, small.index, chunk, offset=36))
        assert await is_waiting(store, reader)
        store.gate.set()
        found = await reader
        assert bytes_in(found) == small.data
        found.close()


@pytest.mark.parametrize("is_whole", [False, True])
@virtually
async def test_part_that_cannot_be_read_is_checked_again(host, store, stored, is_whole):
    """
    The disk fails for a reader of the part: the whole file is read and checked before the next reader.

    Also when the file is whole by then.
    """
    async with running(host) as hydrator:
        chunk = hydrator.layout(stored.index).chunks[0]
        begun = await hydrator.open(PARTITION, stored.segment, stored.index, chunk, offset=0)
        (part,) = (host.directory.path / "incoming").iterdir()
        with part.open("r+b") as file:
            file.write(flipped(batches_of(stored, 0, 1)))
        if is_whole:
            store.gate.set()
            await host.read(stored)
        begun.mark_corrupt()
        begun.close()
        store.gate.set()
        assert await host.read(stored) == stored.data[:CHUNK_BYTES]
        assert (store.downloads(), host.value("corrupt_total", source="file")) == (2, 1)


class FullPart(PartFile):
    """A part on a disk that takes one batch."""

    def write(self, position, data):
        if position > BATCH_BYTES * 4 // 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(position, data)


class FullDirectory(CacheDirectory):
    """A cache on such a disk."""

    def part(self, name, size_bytes):
        return FullPart.create(self._tree, name, size_bytes)


@virtually
async def test_disk_that_fills_up_leaves_readers_what_they_have(tmp_path, store, stored):
    """Those that wait are served from memory."""
    host = Host(tmp_path / "cache", store)
    host.keeper.directory = host.directory = FullDirectory(tmp_path / "cache", now_ms=host.clock)
    async with running(host) as hydrator:
        chunk = hydrator.layout(stored.index).chunks[0]
        begun = await hydrator.open(PARTITION, stored.segment, stored.index, chunk, offset=0)
        store.gate.set()
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunk, offset=3) as rest:
            assert rest.data == stored.data[:CHUNK_BYTES]
        assert part_of(begun) == batches_of(stored, 0, 1)
        begun.close()
        assert host.value("put_failures_total", reason="enospc") == 1


@pytest.mark.parametrize("caller", ["reader", "hydrator"])
@virtually
async def test_cancelled_while_a_part_is_held_nothing_is_left_behind(tmp_path, store, stored, caller):
    """No descriptor and no part of a file; and no later process takes the beginning for the chunk."""
    host = Host(tmp_path / "cache", store)
    async with running(host) as hydrator:
        chunk = hydrator.layout(stored.index).chunks[0]
        begun = await hydrator.open(PARTITION, stored.segment, stored.index, chunk, offset=0)
        waiting = asyncio.create_task(read(host, stored, RECORDS))
        assert await is_waiting(store, waiting)
        if caller == "reader":
            waiting.cancel()
        else:
            await hydrator.close()
        await asyncio.gather(waiting, return_exceptions=True)
        assert part_of(begun) == batches_of(stored, 0, 1)
        begun.close()
        if caller == "reader":
            store.gate.set()
            assert await host.read(stored) == stored.data[:CHUNK_BYTES]
    assert host.path_of(stored).exists() == (caller == "reader")


@virtually
async def test_store_that_hangs_after_the_first_batch_is_an_error_in_time(host, store, stored):
    """The reader of the next batch waits as long as for any chunk."""
    async with running(host):
        assert (await read(host, stored, 0))[1] == RECORDS
        begun_at = asyncio.get_running_loop().time()
        with pytest.raises(StorageUnavailable, match="did not arrive in 60 s"):
            await read(host, stored, RECORDS)
        assert asyncio.get_running_loop().time() - begun_at < 62


@virtually
async def test_hole_at_the_end_of_a_part_is_passed_over(host, store):
    """A reader inside a hole waits for the batch after it."""
    store.gate = asyncio.Event()
    data = b"".join(segment_bytes(base, batches=1, value=b"v" * 300) for base in range(0, 80, 10))
    sparse = Stored(store, data=data, next_offset=80)
    async with running(host):
        assert await read(host, sparse, 1) == (data[:BATCH_BYTES], RECORDS)
        reader = asyncio.create_task(read(host, sparse, 5))
        assert await is_waiting(store, reader)
        store.gate.set()
        assert (await reader)[0].startswith(data[BATCH_BYTES : 2 * BATCH_BYTES])
