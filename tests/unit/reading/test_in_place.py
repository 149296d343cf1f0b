"""Chunks in place: an object on the cache's own disk is checked and read there, and never copied."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.builders import segment_bytes
from tests.fakes.hydration import (
    BATCH_BYTES,
    BATCHES,
    CHUNK_BYTES,
    PARTITION,
    Host,
    Stored,
    flipped,
    open_files,
    running,
)
from tests.fakes.virtual_loop import virtually
from tieringd.errors import CorruptDataError, ObjectNotFound, StorageUnavailable
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.formats.record_batch import LENGTH_STARTS_AT
from tieringd.metrics import Metrics
from tieringd.policies.cache_trim import ChunkEvictionLimits, EvictionStrategy
from tieringd.policies.chunk_layout import plan_chunks
from tieringd.reading import hydrator as hydrators
from tieringd.reading.arriving_chunk import ArrivingChunk
from tieringd.reading.cache_keeper import OpenChunks
from tieringd.reading.chunk_download import DownloadLimits
from tieringd.reading.hydrator import HydrationLimits
from tieringd.reading.in_place import LOOK_AGAIN_SECONDS, ObjectsInPlace
from tieringd.storage.file import FileStore
from tieringd.storage.ranges import FIRST_PIECE_BYTES, WINDOW_BYTES, Windows
from tieringd.storage.resilient import ResilientStore

LARGE_BATCHES = 900
"""A chunk of these is handed on in two pieces: the first of them has 256 KiB."""


class Disk(FileStore):
    """An archive in a directory, on a disk of this host by default."""

    def __init__(self, root: Path, *, filesystem: str = "ext4") -> None:
        root.mkdir()
        self.root = root
        self.filesystem = filesystem
        self.opened = 0
        super().__init__(root, filesystem_of=lambda _: self.filesystem)

    def add(self, key: str, data: bytes) -> None:
        """Store an object."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def delete(self, key: str) -> None:
        """Delete an object, as another process does."""
        (self.root / key).unlink()

    async def open_object(self, key: str) -> int | None:
        """Open an object, and count that."""
        self.opened += 1
        return await super().open_object(key)


class DiskHost(Host):
    """A host whose readers get what lies in the midst of a file."""

    async def read(self, stored: Stored, number: int = 0) -> bytes:
        """Read a chunk as one reader, and return its bytes."""
        chunk = self.hydrator.layout(stored.index).chunks[number]
        async with self.hydrator.chunk(PARTITION, stored.segment, stored.index, chunk) as found:
            assert found.chunk == chunk
            return part_of(found)


def part_of(found) -> bytes:
    """Return the bytes that a reader gets."""
    if found.file is None:
        return found.data
    return os.pread(found.file.fd, found.file.size_bytes, found.file.position)


@pytest.fixture
async def disk(tmp_path):
    disk = Disk(tmp_path / "archive")
    yield disk
    await disk.close()


@pytest.fixture
def stored(disk):
    return Stored(disk)


@pytest.fixture
def host(tmp_path, disk):
    return DiskHost(tmp_path / "cache", ResilientStore(disk))


def read_bytes(host):
    """Return how many bytes were checked in place, downloaded, and are in the cache."""
    values = ("in_place_bytes_total", {}), ("hydrated_bytes_total", {"kind": "chunk"}), ("bytes", {})
    return tuple(host.value(name, **labels) for name, labels in values)


async def test_every_chunk_has_its_own_bytes_and_no_copy(host, stored):
    """The chunks lie one after the other in the object."""
    async with running(host) as hydrator:
        for number, chunk in enumerate(hydrator.layout(stored.index).chunks):
            assert await host.read(stored, number) == stored.bytes_of(chunk)
        assert read_bytes(host) == (len(stored.data), 0, 0)


async def test_chunk_is_checked_once(host, disk, stored):
    """The next reader finds it open. A reader that comes after its file was closed finds it checked."""
    async with running(host):
        await host.read(stored)
        await host.read(stored)
        assert disk.opened == 1
        host.open_chunks.close()
        await host.read(stored)
        assert disk.opened == 2
        assert read_bytes(host) == (CHUNK_BYTES, 0, 0)
        assert host.value("misses_total", kind="chunk") == 1
        assert host.value("hits_total", kind="chunk") == 2
        assert host.value("hydration_seconds_count", kind="chunk") == 1


async def test_checked_chunk_is_opened_while_all_downloads_are_under_way(host, stored):
    """Nothing is read for it, so it waits for no place among them."""
    async with running(host, downloads=DownloadLimits(downloads_max=1)) as hydrator:
        await host.read(stored)
        host.open_chunks.close()
        async with hydrator._downloader._budget.take(1), asyncio.timeout(5):
            assert await host.read(stored) == stored.data[:CHUNK_BYTES]


async def test_changed_object_is_checked_again(host, disk, stored):
    """Also while it is open. Nothing of what is wrong comes to a reader."""
    async with running(host):
        await host.read(stored)
        disk.add(stored.key, stored.data)
        await host.read(stored)
        assert read_bytes(host) == (2 * CHUNK_BYTES, 0, 0)
        disk.add(stored.key, flipped(stored.data[:CHUNK_BYTES]) + stored.data[CHUNK_BYTES:])
        with pytest.raises(CorruptDataError) as caught:
            await host.read(stored)
        assert caught.value.source == stored.key
        assert host.value("corrupt_total", source="download") == 2
        chunk = stored.data[CHUNK_BYTES : 2 * CHUNK_BYTES]
        assert await host.read(stored, 1) == chunk


async def test_fault_is_placed_in_the_object(host, disk, stored):
    """Its position counts from the object's first byte; a short object ends inside its last chunk."""
    async with running(host):
        data = stored.data
        disk.add(stored.key, data[:CHUNK_BYTES] + flipped(data[CHUNK_BYTES:][:CHUNK_BYTES]))
        with pytest.raises(CorruptDataError) as caught:
            await host.read(stored, 1)
        assert caught.value.position == CHUNK_BYTES + BATCH_BYTES
        disk.add(stored.key, data[:-1])
        with pytest.raises(CorruptDataError, match="1 bytes shorter") as caught:
            await host.read(stored, 3)
        assert caught.value.position == len(data) - 1
        assert await host.read(stored, 2) == data[2 * CHUNK_BYTES :][:CHUNK_BYTES]
        disk.add(stored.key, data[: CHUNK_BYTES - 1])
        with pytest.raises(CorruptDataError, match=f" {CHUNK_BYTES} bytes shorter") as caught:
            await host.read(stored, 2)
        assert caught.value.position == 2 * CHUNK_BYTES


async def test_larger_chunk_at_the_same_place_is_checked_whole(host, disk, stored):
    """A reload changes `cloud_storage_cache_chunk_size`. The check of the smaller chunk is not enough."""
    async with running(host) as hydrator:
        disk.add(stored.key, stored.data[:CHUNK_BYTES] + flipped(stored.data[CHUNK_BYTES : 2 * CHUNK_BYTES]))
        await host.read(stored)
        hydrator.set_limits(HydrationLimits(chunk_bytes=2 * CHUNK_BYTES))
        with pytest.raises(CorruptDataError):
            await host.read(stored)


@pytest.mark.parametrize("is_open", [True, False])
async def test_reader_that_reports_wrong_bytes_has_the_chunk_checked_again(host, stored, is_open):
    """The next reader gets checked bytes, whether the file is still open by then or not."""
    async with running(host) as hydrator:
        chunk = hydrator.layout(stored.index).chunks[0]
        found = await hydrator.open(PARTITION, stored.segment, stored.index, chunk)
        if not is_open:
            host.open_chunks.close()
        found.mark_corrupt()
        found.close()
        assert await host.read(stored) == stored.data[:CHUNK_BYTES]
        assert read_bytes(host) == (2 * CHUNK_BYTES, 0, 0)


async def test_deleted_object_is_read_to_the_end_and_then_gives_its_room_back(host, disk, stored, tmp_path):
    """A reader that has it open reads on. The next one is told, and the file is not held open for another."""
    async with running(host) as hydrator:
        before = open_files(tmp_path)
        chunk = hydrator.layout(stored.index).chunks[0]
        found = await hydrator.open(PARTITION, stored.segment, stored.index, chunk)
        disk.delete(stored.key)
        host.open_chunks.sweep()
        assert part_of(found) == stored.data[:CHUNK_BYTES]
        found.close()
        assert open_files(tmp_path) == before
        with pytest.raises(ObjectNotFound):
            await host.read(stored)


async def test_idle_chunk_of_a_deleted_object_is_closed_by_the_next_sweep(host, disk, stored, tmp_path):
    """No reader has to ask for it."""
    host.open_chunks.limits = ChunkEvictionLimits(EvictionStrategy.CAPPED, min_chunks_threshold=1)
    async with running(host):
        before = open_files(tmp_path)
        await host.read(stored)
        host.open_chunks.sweep()
        assert open_files(tmp_path) == before + 1
        disk.delete(stored.key)
        host.open_chunks.sweep()
        assert open_files(tmp_path) == before


@pytest.mark.parametrize("filesystem", ["nfs4", "fuse.rclone", "tmpfs", ""])
async def test_archive_that_is_on_no_disk_of_this_host_is_cached(tmp_path, filesystem):
    """A server may change its files, or be away, while they are open here."""
    disk = Disk(tmp_path / "archive", filesystem=filesystem)
    stored = Stored(disk)
    host = Host(tmp_path / "cache", ResilientStore(disk))
    async with running(host):
        for number in range(2):
            await host.read(stored, number)
            assert host.path_of(stored, number).exists()
        assert read_bytes(host) == (0, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES)
        assert disk.opened == 1
    await disk.close()


async def test_chunk_that_is_cached_already_is_read_there(host, disk, stored):
    """An upgrade finds the chunks of before, which need no second check."""
    disk.filesystem = ""
    async with running(host):
        await host.read(stored)
    disk.filesystem = "ext4"
    async with running(host):
        assert await host.read(stored) == stored.data[:CHUNK_BYTES]
        assert host.value("hits_total", kind="chunk") == 1
        assert disk.opened == 1


async def test_next_chunk_is_prefetched_in_place(host, disk, stored):
    """A reader that goes on finds the chunk after its own checked."""
    async with running(host):
        for number in range(2):
            await host.read(stored, number)
        await host.read(stored, 2)
        assert read_bytes(host)[0] >= 3 * CHUNK_BYTES
        assert host.value("prefetched_chunks_total") >= 1


async def test_whole_segments_are_read_in_place_too(host, stored):
    """`cloud_storage_disable_chunk_reads` makes the segment one chunk, whose own checksum counts as well."""
    async with running(host, is_whole=True):
        assert await host.read(stored) == stored.data
        assert read_bytes(host) == (len(stored.data), 0, 0)


async def test_right_batches_of_another_segment_are_not_those_of_this_one(host, disk, stored):
    """The checksum of a whole segment tells, at its end. Both have the same offsets and sizes."""
    async with running(host, is_whole=True):
        disk.add(stored.key, segment_bytes(0, batches=BATCHES, value=b"w" * 300))
        with pytest.raises(CorruptDataError, match="checksum"):
            await host.read(stored)


async def test_batch_that_is_cut_at_the_end_of_its_chunk_is_found(host, disk, stored):
    """Its header says that it goes on in the next chunk."""
    data = bytearray(stored.data)
    at = CHUNK_BYTES - BATCH_BYTES + LENGTH_STARTS_AT - 4
    data[at : at + 4] = (int.from_bytes(data[at : at + 4], "big") + 1).to_bytes(4, "big")
    disk.add(stored.key, bytes(data))
    async with running(host):
        with pytest.raises(CorruptDataError, match="cut short"):
            await host.read(stored)
        assert read_bytes(host)[0] == 0


async def test_object_that_cannot_be_read_in_place_is_fetched(tmp_path, stored, disk):
    """The reader notices nothing of it."""

    class Unreadable(Disk):
        async def open_object(self, key: str) -> int | None:
            return os.open(self.root / key, os.O_WRONLY)

    unreadable = Unreadable(tmp_path / "other")
    there = Stored(unreadable)
    host = Host(tmp_path / "cache", unreadable)
    async with running(host):
        assert await host.read(there) == there.data[:CHUNK_BYTES]
        assert read_bytes(host) == (0, CHUNK_BYTES, CHUNK_BYTES)
    await unreadable.close()


async def test_chunk_that_is_too_wanted_to_stay_open_is_read_in_memory(host, stored):
    """A file that is gone whenever its reader comes is not tried for ever."""

    class ClosedChunks(OpenChunks):
        def add(self, file, **_) -> None:
            file.close()

    host.keeper.open_chunks = ClosedChunks(
        ChunkEvictionLimits(), now=time.monotonic, metrics=host.metrics.cache
    )
    async with running(host):
        assert await host.read(stored) == stored.data[:CHUNK_BYTES]
        assert host.value("streamed_bytes_total") == CHUNK_BYTES


@pytest.mark.parametrize("caller", ["reader", "hydrator"])
async def test_cancelled_reader_leaves_no_open_file(host, disk, stored, caller):
    """The chunk may be at any stage. `running` counts the descriptors."""
    for steps in range(12):
        async with running(host) as hydrator:
            task = asyncio.create_task(host.read(stored))
            for _ in range(steps):
                await asyncio.sleep(0)
            if caller == "reader":
                task.cancel()
            else:
                await hydrator.close()
            await asyncio.gather(task, return_exceptions=True)


async def test_cancelled_opening_leaves_no_open_file(disk, stored, tmp_path):
    """The thread may have opened the file before the caller is told."""
    for steps in range(6):
        before = open_files(tmp_path)
        task = asyncio.create_task(disk.open_object(stored.key))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            os.close(await task)
        assert open_files(tmp_path) == before


class Part(ArrivingChunk):
    """An arriving chunk that reads what it may give out, as soon as it may."""

    def __init__(self, chunk) -> None:
        super().__init__(chunk)
        self.read: list[tuple[int, bytes]] = []

    def grow(self, size_bytes: int, next_offset: int) -> None:
        before = self.arrived_bytes
        super().grow(size_bytes, next_offset)
        if self.arrived_bytes > before:
            part = self.take(self._chunk.base_offset)
            data = os.pread(part.fd, part.chunk.size_bytes, part.position)
            self.read.append((part.chunk.next_offset, data))
            part.close()


async def test_first_records_are_given_out_while_the_rest_is_checked(tmp_path, disk):
    """They are those of the chunk, which begins in the middle of the object."""
    stored = Stored(disk, batches=2 * LARGE_BATCHES)
    layout = plan_chunks(stored.index, chunk_bytes=LARGE_BATCHES * BATCH_BYTES)
    chunk = layout.chunks[1]
    part = Part(chunk)
    in_place = ObjectsInPlace(disk, tmp_path, Metrics().cache)
    expected = ExpectedBatches.of_index(stored.index, chunk.position, chunk.end)
    before = open_files(tmp_path)
    opened = await in_place.open(stored.key, "a", chunk, expected, part)
    ((next_offset, data),) = part.read
    assert chunk.base_offset < next_offset < chunk.next_offset
    assert data == stored.bytes_of(chunk)[: len(data)]
    assert len(data) == (next_offset - chunk.base_offset) // 3 * BATCH_BYTES
    opened.close()
    assert open_files(tmp_path) == before
    in_place.close()


class HeldWindows(Windows):
    """Windows that wait before each but the first piece, until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def pour(self, size_bytes, fill, take) -> None:
        def held(buffer: memoryview) -> None:
            if self.filled:
                self.may_go_on.wait(10)
            self.filled += 1
            self.has_begun.set()
            fill(buffer)

        super().pour(size_bytes, held, take)


@pytest.fixture
def windows(monkeypatch):
    windows = HeldWindows()
    monkeypatch.setattr("tieringd.reading.in_place.Windows", lambda: windows)
    return windows


async def test_check_that_is_cancelled_ends_with_the_piece_that_it_reads(host, disk, windows):
    """A whole segment may have hundreds of pieces, and the end of the daemon waits for the check."""
    stored = Stored(disk, batches=6 * LARGE_BATCHES)
    async with running(host, is_whole=True):
        reader = asyncio.create_task(host.read(stored))
        assert await asyncio.to_thread(windows.has_begun.wait, 10)
        closing = asyncio.create_task(host.hydrator.close())
        await asyncio.sleep(0.05)
        windows.may_go_on.set()
        await closing
        await asyncio.gather(reader, return_exceptions=True)
        assert windows.filled <= 2
        assert len(stored.data) > FIRST_PIECE_BYTES + 2 * WINDOW_BYTES


async def test_disk_that_does_not_answer_is_an_error_in_time(host, disk, windows):
    """A reader waits for as long as for a download."""
    stored = Stored(disk, batches=LARGE_BATCHES)
    limits = DownloadLimits(piece_timeout_seconds=0.05)
    async with running(host, chunk_bytes=1 << 20, downloads=limits):
        asyncio.get_running_loop().call_later(0.3, windows.may_go_on.set)
        with pytest.raises(StorageUnavailable, match=r"were not read in 0\.05 s"):
            await host.read(stored)


@virtually
async def test_archive_on_another_disk_is_looked_at_once_a_minute(tmp_path):
    """Either of the two may be mounted while the daemon runs. /proc is no disk that holds an archive."""

    class NowDisk(Disk):
        async def open_object(self, key: str) -> int | None:
            self.opened += 1
            return os.open(self.root / key, os.O_RDONLY)

    disk = NowDisk(tmp_path / "archive")
    stored = Stored(disk, batches=BATCHES)
    (chunk,) = plan_chunks(stored.index, chunk_bytes=1 << 20).chunks
    expected = ExpectedBatches.of_index(stored.index, chunk.position, chunk.end)

    async def opened():
        return await in_place.open(stored.key, "a", chunk, expected, ArrivingChunk(chunk))

    in_place = ObjectsInPlace(disk, Path("/proc"), Metrics().cache)
    before = open_files(tmp_path)
    assert [await opened() for _ in range(3)] == [None, None, None]
    assert disk.opened == 1
    await asyncio.sleep(LOOK_AGAIN_SECONDS)
    assert await opened() is None
    assert disk.opened == 2
    assert open_files(tmp_path) == before
    in_place.close()
    await disk.close()


def test_sweeps_are_as_frequent_as_a_deleted_object_may_wait():
    """The page on the file store says ten seconds."""
    assert hydrators.SWEEP_SECONDS == 10
