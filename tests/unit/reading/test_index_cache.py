"""Indexes: read once, kept in memory by bytes, and as good from the cache as from the store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.hydration import PARTITION, Host, Stored, cut, flipped, running
from tests.fakes.virtual_loop import virtually
from tieringd.errors import CorruptDataError, ObjectNotFound, StorageUnavailable
from tieringd.model.segment import BrokerIndexes
from tieringd.policies.cache_trim import TrimLimits
from tieringd.reading.index_cache import ENTRY_BYTES


def lean(stored):
    return replace(stored.index, broker=BrokerIndexes())


@virtually
async def test_index_is_read_once_and_kept_in_memory_and_in_the_cache(host, store, stored):
    """An index is kept without the broker's own indexes, which take the most room and serve no reader."""
    async with running(host) as hydrator:
        found = await asyncio.gather(*(hydrator.index(PARTITION, stored.segment) for _ in range(3)))
        assert found == [lean(stored)] * 3
        assert await hydrator.index(PARTITION, stored.segment) is found[0]
        assert store.downloads("get") == 1
        assert (host.directory.path / stored.index_key).read_bytes() == stored.sidecar
        assert (host.value("misses_total", kind="index"), host.value("hits_total", kind="index")) == (1, 1)


@virtually
async def test_index_is_read_from_the_cache_after_a_restart(tmp_path, store, stored):
    """The index's own checksum proves that it is whole."""
    for _ in range(2):
        host = Host(tmp_path / "cache", store)
        async with running(host) as hydrator:
            assert await hydrator.index(PARTITION, stored.segment) == lean(stored)
    assert store.downloads("get") == 1
    assert host.value("hits_total", kind="index") == 1


@pytest.mark.parametrize("damage", [cut, flipped, lambda data: b"x" * len(data), lambda _: b""])
@virtually
async def test_damaged_index_in_the_cache_is_read_again(tmp_path, store, stored, damage):
    """The good index replaces it in the cache."""
    path = tmp_path / "cache" / stored.index_key
    path.parent.mkdir(parents=True)
    path.write_bytes(damage(stored.sidecar))
    host = Host(tmp_path / "cache", store)
    async with running(host) as hydrator:
        assert await hydrator.index(PARTITION, stored.segment) == lean(stored)
    assert (store.downloads("get"), path.read_bytes()) == (1, stored.sidecar)


@virtually
async def test_index_of_another_segment_in_its_place_is_not_used(tmp_path, store, stored):
    """The checksum of such an index is right, but it describes another object."""
    other = Stored(store, 1000)
    assert len(other.sidecar) != len(stored.sidecar) or other.sidecar != stored.sidecar
    path = tmp_path / "cache" / stored.index_key
    path.parent.mkdir(parents=True)
    path.write_bytes(other.sidecar)
    segment = replace(stored.segment, index_size_bytes=len(other.sidecar))
    store.add(stored.index_key, other.sidecar)
    host = Host(tmp_path / "cache", store)
    async with running(host) as hydrator:
        with pytest.raises(CorruptDataError, match="describes another data object") as caught:
            await hydrator.index(PARTITION, segment)
    assert caught.value.source == stored.index_key
    assert store.downloads("get") == 2


@pytest.mark.parametrize("change", [cut, flipped])
@virtually
async def test_wrong_answer_is_asked_for_once_more(host, store, stored, change):
    """Wrong twice is corrupt, and names the object."""
    async with running(host) as hydrator:
        store.changes.append(change)
        assert await hydrator.index(PARTITION, stored.segment) == lean(stored)
        other = Stored(store, 1000)
        store.changes.extend([change, change])
        with pytest.raises(CorruptDataError) as caught:
            await hydrator.index(PARTITION, other.segment)
        assert caught.value.source == other.index_key
        assert not (host.directory.path / other.index_key).exists()
        assert host.value("corrupt_total", source="download") == 3


@virtually
async def test_missing_index_and_failing_store_are_the_callers(host, store, stored):
    """Nothing of it is remembered."""
    store.fail_next("get", lambda: StorageUnavailable("away"))
    async with running(host) as hydrator:
        with pytest.raises(StorageUnavailable):
            await hydrator.index(PARTITION, stored.segment)
        assert await hydrator.index(PARTITION, stored.segment) == lean(stored)
        with pytest.raises(ObjectNotFound):
            await hydrator.index(PARTITION, replace(stored.segment, writer_id="ff"))


@virtually
async def test_memory_is_bounded_by_the_least_recently_used(host, store):
    """An index that alone is too large is not held at all."""
    segments = [Stored(store, base) for base in (0, 100, 200)]
    each = ENTRY_BYTES * (len(segments[0].index.entries) + 1)
    async with running(host, index_bytes_max=2 * each) as hydrator:
        indexes = hydrator._indexes
        for number in (0, 1, 0, 2):
            await hydrator.index(PARTITION, segments[number].segment)
        assert indexes.held_bytes == 2 * each
        assert list(indexes._held) == [segments[0].index_key, segments[2].index_key]
        large = Stored(store, 1000, batches=40)
        await hydrator.index(PARTITION, large.segment)
        assert indexes.held_bytes == 2 * each
    assert store.downloads("get") == 4


@virtually
async def test_cache_without_room_takes_no_index(tmp_path, store, stored):
    """The index is held in memory all the same."""
    host = Host(tmp_path / "cache", store, limits=TrimLimits(0, 100))
    async with running(host) as hydrator:
        assert await hydrator.index(PARTITION, stored.segment) == lean(stored)
        assert await hydrator.index(PARTITION, stored.segment) == lean(stored)
    assert store.downloads("get") == 1


@pytest.mark.parametrize("caller", ["reader", "hydrator"])
@virtually
async def test_cancelled_at_any_moment_nothing_is_left_behind(tmp_path, store, stored, caller):
    """No descriptor, no promise, no part of a file; and the next reader gets the index."""
    store.latency_seconds = 0.01
    for moment in range(400):
        host = Host(tmp_path / f"{moment}", store)
        async with running(host) as hydrator:
            reader = asyncio.create_task(hydrator.index(PARTITION, stored.segment))
            await asyncio.sleep(moment * 0.001)
            is_done = reader.done()
            if caller == "reader":
                reader.cancel()
            else:
                await hydrator.close()
            (found,) = await asyncio.gather(reader, return_exceptions=True)
            if caller == "reader":
                assert await hydrator.index(PARTITION, stored.segment) == lean(stored)
            elif not is_done:
                assert isinstance(found, StorageUnavailable)
        if is_done:
            break
    assert 20 < moment < 399
