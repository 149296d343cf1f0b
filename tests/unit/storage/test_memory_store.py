"""What the store in memory does beyond the contract: failing and waiting on demand."""

from __future__ import annotations

import asyncio

import pytest
from crc32c import crc32c

from tests.fakes.memory_store import MemoryStore
from tieringd.errors import ObjectNotFound, StorageUnavailable


def unavailable() -> StorageUnavailable:
    return StorageUnavailable("503")


async def put(store: MemoryStore, key: str, data: bytes):
    return await store.put(key, data, crc32c=crc32c(data))


async def test_fault_before_the_effect_leaves_nothing():
    """A queued fault is raised as often as asked for, and the calls it meets do nothing."""
    store = MemoryStore()
    store.fail_next("put", unavailable, times=2)
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await put(store, "key", b"content")
        with pytest.raises(ObjectNotFound):
            await store.get("key")
    await put(store, "key", b"content")
    assert (await store.get("key"))[0] == b"content"


async def test_fault_after_the_effect_hides_it():
    """A fault after the effect lets the write happen, and its caller does not hear of it."""
    store = MemoryStore()
    store.fail_next("put", unavailable, after_effect=True)
    with pytest.raises(StorageUnavailable):
        await put(store, "key", b"content")
    assert (await store.get("key"))[0] == b"content"


async def test_faults_of_one_operation_do_not_touch_another():
    """A fault waits for its operation, and faults come in the order they were queued."""
    store = MemoryStore()
    store.fail_next("head", unavailable)
    store.fail_next("head", lambda: ObjectNotFound("gone"))
    await put(store, "key", b"content")
    with pytest.raises(StorageUnavailable):
        await store.head("key")
    with pytest.raises(ObjectNotFound):
        await store.head("key")
    assert (await store.head("key")).size_bytes == 7


@pytest.mark.looptime
async def test_latency_passes_on_the_clock_of_the_loop():
    """Every call takes the latency, on a virtual clock too."""
    store = MemoryStore(latency_seconds=3)
    await put(store, "key", b"content")
    await store.get("key")
    assert asyncio.get_running_loop().time() == 6


async def test_requests_are_kept():
    """The calls so far can be read: operation and key."""
    store = MemoryStore()
    await put(store, "a", b"")
    await store.list_page("b/")
    await store.delete_many(["a"])
    assert store.requests == [("put", "a"), ("list_page", "b/"), ("delete_many", "")]


async def test_objects_are_a_view_that_costs_no_request():
    """The view shows each later write, and cannot be written to."""
    store = MemoryStore()
    objects = store.objects
    info = await put(store, "key", b"content")
    assert objects == {"key": (b"content", info)}
    with pytest.raises(TypeError):
        objects["other"] = (b"", info)
    assert store.requests == [("put", "key")]


async def test_object_is_removed_and_placed_as_it_was():
    """Set-up makes no request, and checks nothing: the checksum may be another than the bytes'."""
    store = MemoryStore()
    info = store.add("key", b"content")
    assert store.remove("key") == (b"content", info)
    assert store.objects == {}
    store.place("key", b"c0ntent", info)
    assert await store.get("key") == (b"c0ntent", info)
    assert store.requests == [("get", "key")]
