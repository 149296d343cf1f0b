"""The hydrator: each chunk downloaded once, checked, and given to every reader that wants it."""

from __future__ import annotations

import asyncio
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
    cut,
    flipped,
    running,
)
from tests.fakes.virtual_loop import virtually
from tieringd.errors import CorruptDataError, LocalFileError, ObjectNotFound, StorageUnavailable
from tieringd.policies.cache_trim import TrimLimits
from tieringd.reading import hydrator as hydrator_module
from tieringd.reading.chunk_download import DownloadLimits
from tieringd.storage.resilient import ResilientStore

NOTHING = TrimLimits(size_bytes=0, objects=1000)


def chunk_of(host, stored, number=0):
    return host.hydrator.layout(stored.index).chunks[number]


@virtually
async def test_chunk_is_downloaded_once_and_then_read_from_its_file(host, store, stored):
    """The second reader does not wait, and gets the same bytes from the page cache."""
    async with running(host) as hydrator:
        chunk = chunk_of(host, stored, 1)
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunk) as found:
            assert found.file is not None
            assert (found.file.position, found.file.size_bytes) == (0, CHUNK_BYTES)
            assert bytes_in(found) == stored.bytes_of(chunk)
        assert host.path_of(stored, 1).read_bytes() == stored.bytes_of(chunk)
        assert await host.read(stored, 1) == stored.bytes_of(chunk)
        assert store.downloads() == 1
        assert (host.value("hits_total", kind="chunk"), host.value("misses_total", kind="chunk")) == (1, 1)
        assert host.value("hydrated_bytes_total", kind="chunk") == CHUNK_BYTES
        assert (host.value("bytes"), host.value("objects")) == (CHUNK_BYTES, 1)


class PassingStore(OddStore):
    """A store that hands ranges on in pieces. Its first connection breaks in the middle of one."""

    def __init__(self, piece_bytes):
        super().__init__()
        self.piece_bytes = piece_bytes
        self.is_broken = False

    async def read_range(self, key, *, position, size_bytes, begin):
        data = await self.get_range(key, position=position, size_bytes=size_bytes)
        take = begin()
        for at in range(0, len(data), self.piece_bytes):
            if at > len(data) // 2 and not self.is_broken:
                self.is_broken = True
                raise StorageUnavailable("the connection ended early")
            take(memoryview(data)[at : at + self.piece_bytes])
        return len(data)


@virtually
@pytest.mark.parametrize("piece_bytes", [100, CHUNK_BYTES // 2 + 1])
async def test_chunk_is_the_same_when_it_arrives_in_pieces(tmp_path, piece_bytes):
    """Also when the first attempt breaks, when the bytes are wrong once, and when there are too few."""
    store = PassingStore(piece_bytes)
    host, stored = Host(tmp_path / "cache", store), Stored(store)
    host.store = ResilientStore(store)
    async with running(host):
        assert await host.read(stored, 1) == stored.bytes_of(chunk_of(host, stored, 1))
        assert (store.is_broken, store.downloads(), host.value("corrupt_total", source="download")) == (
            True,
            2,
            0,
        )
        store.changes.append(flipped)
        assert await host.read(stored, 2) == stored.bytes_of(chunk_of(host, stored, 2))
        assert (store.downloads(), host.value("corrupt_total", source="download")) == (4, 1)
        store.changes.extend([cut, cut])
        with pytest.raises(CorruptDataError, match="1 bytes shorter"):
            await host.read(stored, 3)


@virtually
async def test_all_chunks_are_the_segment(host, stored):
    """Each at its place."""
    async with running(host) as hydrator:
        numbers = range(len(hydrator.layout(stored.index).chunks))
        assert len(numbers) == 4
        assert b"".join([await host.read(stored, number) for number in numbers]) == stored.data


@virtually
async def test_readers_of_one_chunk_wait_for_one_download(host, store, stored):
    """Readers of one chunk wait for one download, however many there are. Another chunk has its own."""
    store.gate = asyncio.Event()
    async with running(host):
        readers = [asyncio.create_task(host.read(stored, number)) for number in (0, 0, 2, 0, 2)]
        await asyncio.sleep(1)
        assert (store.downloads(), host.value("hydrations_in_progress")) == (2, 2)
        store.gate.set()
        found = await asyncio.gather(*readers)
        first, third = (stored.bytes_of(chunk_of(host, stored, number)) for number in (0, 2))
        assert found == [first, first, third, first, third]
        assert store.downloads() == 2


@virtually
async def test_reader_that_leaves_does_not_end_the_download_of_the_others(host, store, stored):
    """The last reader does not end it either: the download is finished for the next one."""
    store.gate = asyncio.Event()
    async with running(host):
        readers = [asyncio.create_task(host.read(stored)) for _ in range(3)]
        await asyncio.sleep(1)
        readers[0].cancel()
        await asyncio.sleep(1)
        assert readers[0].cancelled()
        store.gate.set()
        assert await readers[1] == stored.bytes_of(chunk_of(host, stored))
        store.gate = asyncio.Event()
        others = [asyncio.create_task(host.read(stored, 2)) for _ in range(2)]
        await asyncio.sleep(1)
        for other in others:
            other.cancel()
        await asyncio.sleep(1)
        store.gate.set()
        await asyncio.sleep(1)
        assert await host.read(stored, 2) == stored.bytes_of(chunk_of(host, stored, 2))
        assert store.downloads() == 2


@virtually
async def test_file_of_before_a_restart_is_checked_and_then_served(tmp_path, store, stored):
    """The file is checked once, and not downloaded again."""
    async with running(Host(tmp_path / "cache", store)) as hydrator:
        await hydrator.open(PARTITION, stored.segment, stored.index, hydrator.layout(stored.index).chunks[0])
        (found,) = hydrator._open._entries.values()
        hydrator._open.give_back(found)
    again = Host(tmp_path / "cache", store)
    async with running(again) as hydrator:
        assert await again.read(stored) == stored.bytes_of(chunk_of(again, stored))
        assert again.directory.accounts.checked(found.file.name) is not None
        hydrator._open.sweep()
        assert not hydrator._open.holds(found.file.name)
        assert await again.read(stored) == stored.bytes_of(chunk_of(again, stored))
        assert store.downloads() == 1
        assert again.value("hits_total", kind="chunk") == 2


def damage_bit(path):
    data = path.read_bytes()
    path.write_bytes(flipped(data))


def damage_shorter(path):
    os.truncate(path, path.stat().st_size - 1)


def damage_longer(path):
    with path.open("ab") as file:
        file.write(b"x")


def damage_gone(path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_bit, damage_shorter, damage_longer, damage_gone])
@pytest.mark.parametrize("when", ["open", "closed", "restarted"])
@virtually
async def test_cached_file_that_is_not_what_it_was_is_fetched_again(tmp_path, store, stored, damage, when):
    """No reader sees a wrong byte, with an open descriptor of the file or without one."""
    host = Host(tmp_path / "cache", store)
    async with running(host) as hydrator:
        await host.read(stored)
        if when == "closed":
            hydrator._open.sweep()
        if when != "restarted":
            damage(host.path_of(stored))
            assert await host.read(stored) == stored.bytes_of(chunk_of(host, stored))
    if when == "restarted":
        damage(host.path_of(stored))
        host = Host(tmp_path / "cache", store)
        async with running(host):
            assert await host.read(stored) == stored.bytes_of(chunk_of(host, stored))
    assert store.downloads() == 2
    assert host.path_of(stored).read_bytes() == stored.data[:CHUNK_BYTES]


@virtually
async def test_wrong_file_goes_even_where_nothing_can_take_its_place(tmp_path, store, stored):
    """The store is away: there is an error, and no reader gets the file later."""
    host = Host(tmp_path / "cache", store)
    async with running(host):
        await host.read(stored)
        damage_bit(host.path_of(stored))
        store.fail_next("get_range", lambda: StorageUnavailable("away"))
        with pytest.raises(StorageUnavailable):
            await host.read(stored)
        assert not host.path_of(stored).exists()


@virtually
async def test_chunk_that_a_client_found_wrong_is_checked_again(host, store, stored):
    """A disk may give other bytes without a trace in the file's times; right ones are kept."""
    async with running(host) as hydrator:
        chunk = chunk_of(host, stored)
        await host.read(stored)
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunk) as found:
            found.mark_corrupt()
            assert bytes_in(found) == stored.bytes_of(chunk)
        assert await host.read(stored) == stored.bytes_of(chunk)
        assert store.downloads() == 1
        path = host.path_of(stored)
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunk) as found:
            damage_bit(path)
            entry = hydrator._open._entries[f"{stored.key}_chunks/0"]
            host.directory.accounts.set_checked(entry.file.name, None)
            found.mark_corrupt()
        assert await host.read(stored) == stored.bytes_of(chunk)
        assert store.downloads() == 2
        assert host.value("corrupt_total", source="file") == 1


@pytest.mark.parametrize("change", [flipped, cut, lambda data: data[BATCH_BYTES:] + data[:BATCH_BYTES]])
@pytest.mark.parametrize("limits", [None, NOTHING], ids=["cached", "streamed"])
@virtually
async def test_wrong_download_is_tried_once_more(tmp_path, store, stored, change, limits):
    """A bit that fell over on the way is no reason to stop."""
    host = Host(tmp_path / "cache", store, **({"limits": limits} if limits else {}))
    store.changes.append(change)
    async with running(host):
        assert await host.read(stored, 1) == stored.bytes_of(chunk_of(host, stored, 1))
    assert store.downloads() == 2
    assert host.value("corrupt_total", source="download") == 1


@pytest.mark.parametrize("limits", [None, NOTHING], ids=["cached", "streamed"])
@virtually
async def test_object_that_is_wrong_twice_is_corrupt(tmp_path, store, stored, limits):
    """The error names the object and the position in it; nothing of it is cached, and readers share it."""
    host = Host(tmp_path / "cache", store, **({"limits": limits} if limits else {}))
    store.changes.extend([flipped, flipped])
    async with running(host):
        found = await asyncio.gather(host.read(stored, 1), host.read(stored, 1), return_exceptions=True)
        assert [type(one) for one in found] == [CorruptDataError] * 2
        assert (found[0].source, found[0].position) == (stored.key, CHUNK_BYTES + BATCH_BYTES)
        assert "CRC" in str(found[0])
        assert not host.path_of(stored, 1).exists()
        assert store.downloads() == 2
        assert await host.read(stored, 1) == stored.bytes_of(chunk_of(host, stored, 1))


@virtually
async def test_batch_with_another_offset_than_the_index_says_is_corrupt(host, store):
    """No checksum covers a base offset, and compaction may have left room for another one."""
    batches = [segment_bytes(base, batches=1, value=b"v" * 300) for base in range(0, 80, 10)]
    stored = Stored(store, data=b"".join(batches), next_offset=80)
    moved = (12).to_bytes(8, "big") + batches[1][8:]
    store.add(stored.key, b"".join([batches[0], moved, *batches[2:]]))
    async with running(host):
        with pytest.raises(CorruptDataError, match="it has to begin at offset 10") as caught:
            await host.read(stored, 0)
    assert (caught.value.source, caught.value.position) == (stored.key, BATCH_BYTES)


@virtually
async def test_object_that_is_too_short_is_corrupt(host, store, stored):
    """The index says where the object should end."""
    store.add(stored.key, stored.data[:-10])
    async with running(host):
        with pytest.raises(CorruptDataError, match="is 10 bytes shorter than its index says") as caught:
            await host.read(stored, 3)
    assert (caught.value.source, caught.value.position) == (stored.key, len(stored.data) - 10)


@virtually
async def test_object_that_vanished_is_reported_to_the_caller(host, store, stored):
    """A merge or retention took it: its manifest has another; what is cached is served all the same."""
    async with running(host):
        await host.read(stored, 0)
        await store.delete_many([stored.key])
        with pytest.raises(ObjectNotFound):
            await host.read(stored, 1)
        assert await host.read(stored, 0) == stored.bytes_of(chunk_of(host, stored))


@virtually
async def test_store_that_fails_is_told_to_all_waiting_readers_and_asked_anew(host, store, stored):
    """No failure is remembered."""
    store.fail_next("get_range", lambda: StorageUnavailable("away"))
    async with running(host):
        found = await asyncio.gather(*(host.read(stored) for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in found] == [StorageUnavailable] * 3
        assert await host.read(stored) == stored.bytes_of(chunk_of(host, stored))
    assert store.downloads() == 2


@virtually
async def test_store_that_hangs_is_an_error_in_time(host, store, stored):
    """The request gives its place to others."""
    store.gate = asyncio.Event()
    async with running(host, downloads=DownloadLimits(downloads_max=1, piece_timeout_seconds=60)):
        begun = asyncio.get_running_loop().time()
        with pytest.raises(StorageUnavailable, match="did not arrive in 60 s"):
            await host.read(stored)
        assert 60 <= asyncio.get_running_loop().time() - begun < 62
        store.gate = None
        assert await host.read(stored) == stored.bytes_of(chunk_of(host, stored))


@virtually
async def test_downloads_and_their_bytes_are_bounded(host, store):
    """The rest wait for their turn."""
    segments = [Stored(store, base) for base in range(0, 360, 36)]
    store.latency_seconds = 0.5
    limits = DownloadLimits(downloads_max=3, bytes_max=2 * CHUNK_BYTES)
    async with running(host, downloads=limits):
        await asyncio.gather(*(host.read(segment) for segment in segments))
        assert store.most_at_once == 2
    async with running(host, downloads=DownloadLimits(downloads_max=3)):
        await asyncio.gather(*(host.read(segment, 2) for segment in segments))
        assert store.most_at_once == 3


@virtually
async def test_sequential_reader_finds_the_next_chunk_there(host, store, stored):
    """Prefetching begins after a step to the next chunk. A reader that jumps about gets nothing ahead."""
    async with running(host):
        await host.read(stored, 0)
        await asyncio.sleep(1)
        assert store.downloads() == 1
        await host.read(stored, 1)
        await asyncio.sleep(1)
        assert (store.downloads(), host.value("prefetched_chunks_total")) == (3, 1)
        assert host.path_of(stored, 2).exists()
        await host.read(stored, 2)
        await asyncio.sleep(1)
        assert store.downloads() == 4
        assert await host.read(stored, 3) == stored.bytes_of(chunk_of(host, stored, 3))
        assert store.downloads() == 4
        other = Stored(store, 1000)
        for number in (2, 0, 3):
            await host.read(other, number)
        await asyncio.sleep(1)
        assert store.downloads() == 7


@virtually
async def test_reader_in_the_second_half_of_a_chunk_finds_the_next_one_there(host, store, stored):
    """It came from the first half. One that begins in the second half may want nothing else."""

    async def read_from(offset):
        chunk = hydrator.layout(stored.index).holding(offset)
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunk, offset=offset):
            pass
        await asyncio.sleep(1)
        return store.downloads()

    async with running(host) as hydrator:
        assert [await read_from(offset) for offset in (0, 3, 6)] == [1, 1, 2]
        assert host.path_of(stored, 1).exists()
        assert await read_from(24) == 3


@virtually
async def test_prefetch_under_way_is_not_begun_again(host, store, stored):
    """A reader comes back for the rest of its chunk many times before the next one is there."""
    async with running(host):
        await host.read(stored, 0)
        store.latency_seconds = 1
        for _ in range(5):
            await host.read(stored, 1)
        await asyncio.sleep(5)
        assert (store.downloads(), host.value("prefetched_chunks_total")) == (3, 1)


@virtually
async def test_sequential_reader_finds_the_next_segment_there(host, store):
    """
    The first chunk of the next segment is prefetched, and then its second.

    This holds for segments of one chunk and of several.
    """
    small = [Stored(store, 9 * number, batches=3) for number in range(3)]
    large = Stored(store, 27)
    ends = Stored(store, 63, batches=3)
    following = dict(zip(small, [*small[1:], large], strict=True)) | {large: ends, ends: None}

    async def read(one, number=0):
        chunk = chunk_of(host, one, number)
        next_segment = None if following[one] is None else following[one].segment
        async with host.hydrator.chunk(
            PARTITION, one.segment, one.index, chunk, next_segment=next_segment
        ) as found:
            assert bytes_in(found) == one.bytes_of(chunk)
        await asyncio.sleep(1)

    def is_here(one, number=0):
        return host.path_of(one, number).exists()

    async with running(host):
        await read(small[0])
        assert not is_here(small[1])
        await read(small[1])
        assert is_here(small[2])
        await read(small[2])
        assert is_here(large)
        assert not is_here(large, 1)
        await read(large)
        assert is_here(large, 1)
        for number in (1, 2, 3):
            await read(large, number)
        assert is_here(ends)
        await read(ends)


@virtually
async def test_next_segment_that_has_gone_is_no_reader_s_error(host, store):
    """A reader that comes there reads the manifest again."""
    first, second, gone = (Stored(store, 9 * number, batches=3) for number in range(3))
    await store.delete_many([gone.index_key])
    async with running(host):
        for one, following in ((first, second), (second, gone)):
            chunk = chunk_of(host, one)
            async with host.hydrator.chunk(
                PARTITION, one.segment, one.index, chunk, next_segment=following.segment
            ):
                await asyncio.sleep(1)
        assert not host.path_of(gone).exists()


@virtually
async def test_prefetch_that_fails_or_finds_no_room_is_no_reader_s_error(tmp_path, store, stored):
    """The reader that comes there asks anew; without room nothing is downloaded ahead."""
    host = Host(tmp_path / "cache", store)
    async with running(host):
        await host.read(stored, 0)
        await host.read(stored, 1)
        store.fail_next("get_range", lambda: StorageUnavailable("away"))
        await asyncio.sleep(1)
        assert store.downloads() == 3
        assert await host.read(stored, 2) == stored.bytes_of(chunk_of(host, stored, 2))
    store.requests.clear()
    without = Host(tmp_path / "other", store, limits=NOTHING)
    async with running(without):
        await without.read(stored, 0)
        await without.read(stored, 1)
        await asyncio.sleep(1)
        assert store.downloads() == 2


@virtually
async def test_reader_that_joins_a_refused_prefetch_is_streamed_to(tmp_path, store, stored):
    """The prefetch gives up for want of room; its waiter gets the bytes all the same."""
    host = Host(tmp_path / "cache", store, limits=NOTHING)
    async with running(host) as hydrator:
        chunk = chunk_of(host, stored, 1)
        hydrator.prefetch(PARTITION, stored.segment, stored.index, chunk)
        assert await host.read(stored, 1) == stored.bytes_of(chunk)
        # One that would take the beginning of the chunk waits for that, and sees the prefetch end.
        hydrator.prefetch(PARTITION, stored.segment, stored.index, chunk)
        async with hydrator.chunk(
            PARTITION, stored.segment, stored.index, chunk, offset=chunk.base_offset
        ) as streamed:
            assert streamed.data == stored.bytes_of(chunk)


@virtually
async def test_without_room_chunks_are_streamed_from_memory(tmp_path, store, stored):
    """Readers at the same time share one download; the next one begins another."""
    host = Host(tmp_path / "cache", store, limits=NOTHING)
    async with running(host) as hydrator:
        chunk = chunk_of(host, stored)
        found = await asyncio.gather(host.read(stored), host.read(stored))
        assert found == [stored.bytes_of(chunk)] * 2
        assert store.downloads() == 1
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunk) as streamed:
            assert (streamed.file, streamed.data) == (None, stored.bytes_of(chunk))
            streamed.mark_corrupt()
        assert store.downloads() == 2
        assert host.value("streamed_bytes_total") == 2 * CHUNK_BYTES
        assert host.value("put_failures_total", reason="full") == 2


@virtually
async def test_whole_segment_mode_downloads_in_pieces_into_one_file(host, store, stored):
    """The file is checked before it gets its name."""
    store.changes.append(flipped)
    async with running(host, is_whole=True, downloads=DownloadLimits(piece_bytes=5 * BATCH_BYTES // 2)):
        (chunk,) = host.hydrator.layout(stored.index).chunks
        assert await host.read(stored) == stored.data
        assert host.path_of(stored).stat().st_size == chunk.size_bytes
        assert store.downloads() == 10
        assert host.value("corrupt_total", source="download") == 1


@virtually
async def test_whole_segment_that_fits_nowhere_is_cut_into_chunks(tmp_path, store, stored):
    """The reader gets the part in which its offset is, which the cache may have room for."""
    host = Host(tmp_path / "cache", store, limits=TrimLimits(2 * CHUNK_BYTES, 100))
    limits = DownloadLimits(stream_bytes_max=BATCH_BYTES)
    async with running(host, is_whole=True, downloads=limits) as hydrator:
        (chunk,) = hydrator.layout(stored.index).chunks
        parts = []
        for offset in (0, 20):
            async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunk, offset=offset) as found:
                assert found.chunk.base_offset <= offset < found.chunk.next_offset
                assert bytes_in(found) == stored.bytes_of(found.chunk)
                parts.append((found.chunk.number, found.file is not None))
        assert parts == [(0, True), (2, True)]


@virtually
async def test_chunk_that_fits_nowhere_and_cannot_be_cut_is_an_error(tmp_path, store, stored):
    """The error says what an operator can do."""
    host = Host(tmp_path / "cache", store, limits=NOTHING)
    async with running(host, downloads=DownloadLimits(stream_bytes_max=BATCH_BYTES)):
        with pytest.raises(LocalFileError, match="fit neither in the cache nor in memory"):
            await host.read(stored)


@virtually
async def test_chunk_that_is_evicted_before_its_reader_comes_is_streamed_in_the_end(host, store, stored):
    """A cache that thrashes makes readers slow, and not wait for ever."""
    async with running(host) as hydrator:
        add = hydrator._open.add

        def add_and_lose(file, **options):
            add(file, **options)
            hydrator._open.forget((file.name,))
            host.directory.discard(file.name)

        hydrator._open.add = add_and_lose
        chunk = chunk_of(host, stored)
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunk) as found:
            assert found.data == stored.bytes_of(chunk)
        assert store.downloads() == 4


@virtually
async def test_layouts_of_two_chunk_sizes_do_not_mix(host, store, stored):
    """A chunk has another size after a reload, and a reader from before keeps the chunk that it has."""
    async with running(host) as hydrator:
        old = chunk_of(host, stored)
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, old) as found:
            hydrator.set_limits(type(hydrator._limits)(chunk_bytes=2 * CHUNK_BYTES))
            new = chunk_of(host, stored)
            assert new.size_bytes == 2 * CHUNK_BYTES
            assert await host.read(stored) == stored.bytes_of(new)
            assert bytes_in(found) == stored.bytes_of(old)


@virtually
async def test_closed_hydrator_ends_what_is_under_way(host, store, stored):
    """Waiting readers get an error to try again after, and new readers get it at once."""
    store.gate = asyncio.Event()
    async with running(host) as hydrator:
        reader = asyncio.create_task(host.read(stored))
        await asyncio.sleep(1)
        await hydrator.close()
        with pytest.raises(StorageUnavailable, match="closed"):
            await reader
        with pytest.raises(StorageUnavailable, match="closed"):
            await host.read(stored)


@pytest.mark.parametrize("how", ["cached", "streamed", "restarted"])
@pytest.mark.parametrize("caller", ["reader", "hydrator"])
@virtually
async def test_cancelled_at_any_moment_nothing_is_left_behind(tmp_path, store, stored, caller, how):
    """No descriptor, no promise, no part of a file; and the next reader gets the chunk."""
    store.latency_seconds = 0.01
    moments = 0
    for moment in range(400):
        root = tmp_path / f"{moment}"
        if how == "restarted":
            path = root / f"{stored.key}_chunks/{CHUNK_BYTES}"
            path.parent.mkdir(parents=True)
            path.write_bytes(stored.data[CHUNK_BYTES : 2 * CHUNK_BYTES])
        host = Host(root, store, **({"limits": NOTHING} if how == "streamed" else {}))
        async with running(host) as hydrator:
            reader = asyncio.create_task(host.read(stored, 1))
            await asyncio.sleep(moment * 0.001)
            is_done = reader.done()
            if caller == "reader":
                reader.cancel()
            else:
                await hydrator.close()
            await asyncio.gather(reader, return_exceptions=True)
            if caller == "reader":
                assert await host.read(stored, 1) == stored.bytes_of(chunk_of(host, stored, 1))
        moments += not is_done
        if is_done:
            break
    assert 20 < moments < 399


@virtually
async def test_downloads_without_readers_do_not_fill_the_line(host, store):
    """Some downloads are finished for the next reader; all others that readers leave behind are ended."""
    segments = [Stored(store, 36 * number) for number in range(hydrator_module.FLIGHTS_MAX + 20)]
    store.latency_seconds = 10
    async with running(host):
        readers = [asyncio.create_task(host.read(one)) for one in segments]
        await asyncio.sleep(1)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await asyncio.sleep(1000)
        assert sum(host.path_of(one).exists() for one in segments) == hydrator_module.FLIGHTS_MAX
        assert await host.read(segments[0]) == segments[0].bytes_of(chunk_of(host, segments[0]))


@virtually
async def test_download_that_others_wait_for_goes_on(host, store, stored):
    """The other readers may leave."""
    others = [Stored(store, 36 * number + 360) for number in range(hydrator_module.FLIGHTS_MAX)]
    store.latency_seconds = 10
    async with running(host):
        stays = asyncio.create_task(host.read(stored))
        leaves = [asyncio.create_task(host.read(one)) for one in (stored, *others)]
        await asyncio.sleep(1)
        for reader in leaves:
            reader.cancel()
        await asyncio.gather(*leaves, return_exceptions=True)
        assert await stays == stored.bytes_of(chunk_of(host, stored))
