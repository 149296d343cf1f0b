"""The cache keeper: within its limits, at once when they shrink, and never at a reader's expense."""

from __future__ import annotations

import asyncio
import os
import subprocess

from structlog.testing import capture_logs

from tests.fakes.hydration import (
    CHUNK_BYTES,
    LARGE,
    PARTITION,
    Host,
    Stored,
    bytes_in,
    running,
)
from tests.fakes.virtual_loop import virtually
from tests.support.small_disks import small_disk_at
from tieringd.policies.cache_trim import TrimLimits
from tieringd.reading.cache_keeper import PAUSE_SECONDS, KeeperSettings

MIB = 1 << 20


def room_for(chunks, **changes):
    return TrimLimits(**{"size_bytes": chunks * CHUNK_BYTES, "objects": 1000, **changes})


def host_with(tmp_path, store, limits):
    return Host(tmp_path / "cache", store, limits=limits)


def make_read_only(disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


async def read_all(host, stored, numbers=range(4)):
    """Read chunks, each a second after the one before."""
    for number in numbers:
        host.clock.now_ms += 1000
        await host.read(stored, number)
        host.open_chunks.sweep()


def cached(host, stored):
    return [number for number in range(4) if host.path_of(stored, number).exists()]


@virtually
async def test_put_without_room_evicts_the_least_recently_used(tmp_path, store, stored):
    """The cache evicts down to the low watermark, and counts the evictions."""
    host = host_with(tmp_path, store, room_for(3, low_watermark=0.4))
    async with running(host):
        await read_all(host, stored, (0, 2, 1, 0, 3))
        # 2 and 1 are older than 0; two fifths of three chunks are one.
        assert cached(host, stored) == [0, 3]
        assert (host.value("evictions_total", kind="chunk"), host.value("evicted_bytes_total")) == (
            2,
            2 * CHUNK_BYTES,
        )
        assert host.value("bytes") == 2 * CHUNK_BYTES


@virtually
async def test_evicted_chunk_is_not_kept_open(tmp_path, store, stored):
    """The space of an evicted chunk is free only once it is closed."""
    host = host_with(tmp_path, store, room_for(3))
    async with running(host):
        await host.read(stored)
        assert host.value("open_chunks") == 1
        host.keeper.set_space(0)
        await host.keeper.step()
        assert host.value("open_chunks") == 0


@virtually
async def test_objects_are_limited_as_bytes_are(tmp_path, store, stored):
    """The limit of objects holds whatever their size is."""
    host = host_with(tmp_path, store, room_for(1000, objects=2))
    async with running(host):
        await read_all(host, stored)
        assert cached(host, stored) == [2, 3]


@virtually
async def test_chunk_that_is_read_stays_however_old_it_is(tmp_path, store, stored):
    """Other chunks go. The next chunk is streamed if all are being read."""
    host = host_with(tmp_path, store, room_for(2))
    async with running(host) as hydrator:
        chunks = hydrator.layout(stored.index).chunks
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunks[0]) as first:
            host.clock.now_ms += 1000
            await read_all(host, stored, (2, 3))
            assert cached(host, stored) == [0, 3]
            async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunks[3]) as last:
                async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunks[1]) as third:
                    assert third.file is None
                    assert bytes_in(third) == stored.bytes_of(chunks[1])
                assert bytes_in(last) == stored.bytes_of(chunks[3])
            assert bytes_in(first) == stored.bytes_of(chunks[0])
        assert host.value("put_failures_total", reason="full") == 1


@virtually
async def test_after_no_room_was_found_no_plan_is_made_for_a_while(tmp_path, store, stored):
    """A plan over all files for each put would cost more than the puts."""
    host = host_with(tmp_path, store, room_for(1))
    async with running(host) as hydrator:
        chunks = hydrator.layout(stored.index).chunks
        async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunks[0]):
            await host.read(stored, 2)
        await host.read(stored, 2)
        assert cached(host, stored) == [0]
        await asyncio.sleep(PAUSE_SECONDS)
        await host.read(stored, 2)
        assert cached(host, stored) == [2]


@virtually
async def test_concurrent_puts_are_never_promised_the_same_room(tmp_path, store):
    """The cache stays within its limits at every moment, however many puts come at once."""
    host = host_with(tmp_path, store, room_for(3))
    segments = [Stored(store, base) for base in range(0, 720, 36)]
    most = 0
    async with running(host):
        readers = [asyncio.create_task(host.read(segment)) for segment in segments]
        while not all(reader.done() for reader in readers):
            use = host.directory.accounts.use()
            most = max(most, use.size_bytes + use.reserved_bytes)
            assert most <= 3 * CHUNK_BYTES
            await asyncio.sleep(0.001)
        assert [reader.result() for reader in readers] == [one.data[:CHUNK_BYTES] for one in segments]
    assert most == 3 * CHUNK_BYTES


@virtually
async def test_smaller_area_is_evicted_at_once(tmp_path, store, stored):
    """A smaller area is evicted at once and not at the next interval: the log may wait for the room."""
    host = host_with(tmp_path, store, room_for(10))
    async with running(host):
        keeping = asyncio.create_task(host.keeper.run())
        await read_all(host, stored)
        await asyncio.sleep(1)
        assert cached(host, stored) == [0, 1, 2, 3]
        host.keeper.set_space(4 * CHUNK_BYTES)
        await asyncio.sleep(1)
        assert cached(host, stored) == [0, 1, 2, 3]
        host.keeper.set_space(2 * CHUNK_BYTES)
        await asyncio.sleep(1)
        assert cached(host, stored) == [3]
        assert host.value("limit_bytes") == 2 * CHUNK_BYTES
        host.keeper.set_space(0)
        await asyncio.sleep(1)
        assert cached(host, stored) == []
        assert await host.read(stored) == stored.bytes_of(host.hydrator.layout(stored.index).chunks[0])
        assert cached(host, stored) == []
        host.keeper.set_space(None)
        assert host.value("limit_bytes") == 10 * CHUNK_BYTES
        await host.read(stored)
        assert cached(host, stored) == [0]
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@virtually
async def test_threshold_is_kept_by_the_periodic_check_alone(tmp_path, store, stored):
    """A put goes up to the limit; the check after it goes down to the threshold's low watermark."""
    host = host_with(tmp_path, store, room_for(4, threshold_percent_size=70))
    async with running(host):
        await read_all(host, stored)
        assert cached(host, stored) == [0, 1, 2, 3]
        plan = await host.keeper.step()
        assert plan.demand.because == f"the cache holds {4 * CHUNK_BYTES} bytes of {int(2.8 * CHUNK_BYTES)}"
        assert cached(host, stored) == [2, 3]
        assert (await host.keeper.step()).evictions == ()


@virtually
async def test_interval_is_that_of_the_settings(tmp_path, store, stored):
    """Tighter settings are applied at once."""
    host = host_with(tmp_path, store, room_for(4, threshold_percent_size=70))
    host.keeper.set_settings(KeeperSettings(room_for(4, threshold_percent_size=70), 20.0))
    async with running(host):
        keeping = asyncio.create_task(host.keeper.run())
        await asyncio.sleep(1)
        await read_all(host, stored)
        await asyncio.sleep(15)
        assert cached(host, stored) == [0, 1, 2, 3]
        await asyncio.sleep(10)
        assert cached(host, stored) == [2, 3]
        host.keeper.set_settings(KeeperSettings(room_for(1), 20.0))
        await asyncio.sleep(1)
        assert cached(host, stored) == []
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@virtually
async def test_disk_without_enough_free_space_lets_chunks_go_and_takes_none(tmp_path, store, stored):
    """`storage_min_free_bytes` is kept free by the cache first."""
    host = host_with(tmp_path, store, LARGE)
    async with running(host):
        await read_all(host, stored)
        free = [10 * CHUNK_BYTES]
        host.directory.free_bytes = lambda: free[0]
        host.keeper.set_settings(KeeperSettings(TrimLimits(1 << 40, 1000, 10 * CHUNK_BYTES)))
        assert (await host.keeper.step()).evictions == ()
        free[0] -= CHUNK_BYTES + 1
        plan = await host.keeper.step()
        assert f"{CHUNK_BYTES + 1} bytes less free space than required" in plan.demand.because
        assert cached(host, stored) == [2, 3]
        free[0] = 0
        await host.read(stored, 0)
        assert cached(host, stored) == []


@virtually
async def test_carried_over_candidates_save_a_plan_over_all_files(tmp_path, store, stored):
    """The next put takes the one that was next in turn, unless it was read since."""
    limits = room_for(4, carryover_bytes=2 * CHUNK_BYTES, low_watermark=0.9)
    host = host_with(tmp_path, store, limits)
    other = Stored(store, 1000)
    async with running(host):
        await read_all(host, stored)
        await read_all(host, other, (0,))
        # The first trim took 0, and remembers 1 and 2; 1 is read again.
        assert cached(host, stored) == [1, 2, 3]
        await read_all(host, stored, (1,))
        asked = []
        files = host.directory.accounts.files
        host.directory.accounts.files = lambda: asked.append(1) or files()
        await read_all(host, other, (2,))
        assert (cached(host, stored), asked) == ([1, 3], [])
        await read_all(host, other, (3,))
        assert (cached(host, stored), asked) == ([1], [1])


@virtually
async def test_access_times_outlive_a_restart_in_the_order_of_eviction(tmp_path, store, stored):
    """The access times are saved when the keeper ends."""
    host = host_with(tmp_path, store, LARGE)
    async with running(host):
        keeping = asyncio.create_task(host.keeper.run())
        await read_all(host, stored, (0, 1, 2, 3, 0))
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    for number in range(4):
        os.utime(host.path_of(stored, number), (4 - number, 4 - number))
    again = host_with(tmp_path, store, room_for(2, low_watermark=1.0))
    async with running(again):
        await again.keeper.step()
        assert cached(again, stored) == [0, 3]


@virtually
async def test_foreign_files_are_said_once_and_stay(tmp_path, store, stored):
    """The cache was configured to use a directory with other files."""
    (tmp_path / "cache" / "photos").mkdir(parents=True)
    (tmp_path / "cache" / "photos" / "me.jpg").write_text("x")
    host = host_with(tmp_path, store, room_for(1))
    host.assert_tidy = lambda: None
    with capture_logs() as lines:
        async with running(host):
            await read_all(host, stored)
            await host.keeper.step()
    assert [line["files"] for line in lines if "not the cache's" in line["event"]] == [1]
    assert (tmp_path / "cache" / "photos" / "me.jpg").exists()


@virtually
async def test_directory_that_cannot_be_used_is_tried_again(tmp_path, store, stored):
    """Readers are streamed to meanwhile, and the fault is logged once."""
    (tmp_path / "cache").write_text("a file")
    host = host_with(tmp_path, store, LARGE)
    host.assert_tidy = lambda: None
    with capture_logs() as lines:
        async with running(host):
            assert await host.keeper.step() is None
            for number in (0, 2, 0):
                chunk = host.hydrator.layout(stored.index).chunks[number]
                assert await host.read(stored, number) == stored.bytes_of(chunk)
            assert host.value("put_failures_total", reason="unusable") == 3
            (tmp_path / "cache").unlink()
            await asyncio.sleep(PAUSE_SECONDS)
            await host.read(stored)
            assert cached(host, stored) == [0]
    assert len([line for line in lines if "does not take files" in line["event"]]) == 1


@virtually
async def test_drift_is_found_by_the_hourly_comparison(tmp_path, store, stored):
    """Files that others deleted are not counted for ever."""
    host = host_with(tmp_path, store, LARGE)
    async with running(host):
        await read_all(host, stored)
        keeping = asyncio.create_task(host.keeper.run())
        host.path_of(stored, 1).unlink()
        await asyncio.sleep(60)
        assert host.value("objects") == 4
        await asyncio.sleep(3600)
        assert host.value("objects") == 3
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@virtually
async def test_full_disk_degrades_to_streaming_and_recovers(tmp_path, store):
    """Eight MiB that other files have filled: the cache gives up what it holds, and then streams."""
    segments = [Stored(store, base, batches=3000) for base in range(0, 54_000, 9000)]
    with small_disk_at(tmp_path / "disk", 8 * MIB) as disk:
        host = Host(disk / "cache", store)
        async with running(host, chunk_bytes=4 * MIB):
            size_bytes = segments[0].index.size_bytes
            assert 2 * MIB < size_bytes < 4 * MIB
            for segment in segments[:2]:
                assert await host.read(segment) == segment.data
            host.open_chunks.sweep()
            assert host.value("objects") == 2
            # The third does not fit the disk, though it fits the limits: an older one goes for it.
            host.clock.now_ms += 1000
            assert await host.read(segments[2]) == segments[2].data
            assert (host.value("objects"), host.value("evictions_total", kind="chunk")) == (2, 1)
            host.open_chunks.sweep()
            host.directory.evict([file.name for file in host.directory.accounts.files()])
            found = os.statvfs(disk)
            (disk / "filler").write_bytes(b"x" * (found.f_bavail * found.f_frsize))
            assert await host.read(segments[3]) == segments[3].data
            assert await host.read(segments[4]) == segments[4].data
            assert host.value("put_failures_total", reason="enospc") == 1
            assert host.value("put_failures_total", reason="disk") == 1
            assert host.value("streamed_bytes_total") == 2 * size_bytes
            (disk / "filler").unlink()
            await asyncio.sleep(PAUSE_SECONDS)
            assert await host.read(segments[5]) == segments[5].data
            assert host.path_of(segments[5]).exists()


@virtually
async def test_read_only_disk_serves_what_it_has_and_streams_the_rest(tmp_path, store, stored):
    """A restart on it as well, which checks what it serves."""
    with small_disk_at(tmp_path / "disk", 8 * MIB) as disk:
        host = Host(disk / "cache", store)
        async with running(host):
            await host.read(stored, 0)
        make_read_only(disk)
        again = Host(disk / "cache", store)
        store.requests.clear()
        async with running(again) as hydrator:
            chunks = hydrator.layout(stored.index).chunks
            async with hydrator.chunk(PARTITION, stored.segment, stored.index, chunks[0]) as found:
                assert found.file is not None
                assert bytes_in(found) == stored.bytes_of(chunks[0])
            assert await again.read(stored, 2) == stored.bytes_of(chunks[2])
            assert store.downloads() == 1
            assert again.value("put_failures_total", reason="erofs") == 1
            again.keeper.set_space(0)
            assert (await again.keeper.step()).evictions != ()
            assert again.value("evictions_total", kind="chunk") == 0
