"""Creating an object: one that is there stays, and one that is not is never taken for there."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tests.fakes.trusting_store import TrustingStore
from tieringd.errors import PreconditionFailed, StorageUnavailable
from tieringd.storage.checked_puts import create
from tieringd.storage.resilient import ResilientStore

DATA = b"the bytes of a file"
OTHER = b"as many other bytes"


async def test_object_is_created_once():
    """The first one stays, and the second caller hears that it is there."""
    store = MemoryStore()
    assert await create(store, "key", b"first", crc32c=crc32c(b"first"))
    assert not await create(store, "key", b"second", crc32c=crc32c(b"second"))
    assert (await store.get("key"))[0] == b"first"


async def test_refusal_without_an_object_is_tried_again():
    """A store that refuses a write because two met has stored neither of them."""
    store = MemoryStore()
    store.fail_next("put", lambda: PreconditionFailed("409 Conflict"))
    with pytest.raises(StorageUnavailable, match="finds no such object"):
        await create(store, "key", b"first", crc32c=crc32c(b"first"))
    assert await create(store, "key", b"first", crc32c=crc32c(b"first"))


async def created(store, *, replaces_damaged: bool = True) -> bool:
    return await create(store, "key", DATA, crc32c=crc32c(DATA), replaces_damaged=replaces_damaged)


async def test_object_that_arrived_damaged_is_replaced():
    """A put of which only the read-back failed left a damaged object, and its caller tries again."""
    backend = TrustingStore()
    store = ResilientStore(backend, tries_checksums=True)
    await store.try_checksums()
    backend.flips = 1
    backend.fail_next("head", lambda: store_unavailable("head"))
    with pytest.raises(StorageUnavailable, match="could not be read back"):
        await created(store)
    assert backend.damaged == ["key"]
    assert await created(store)
    assert (await store.get("key"))[0] == DATA
    assert not await created(store)


@pytest.mark.parametrize(
    ("backend", "there", "replaces_damaged"),
    [
        pytest.param(TrustingStore(), OTHER + b"!", True, id="of-another-size"),
        pytest.param(TrustingStore(), OTHER, False, id="of-another-writer"),
        pytest.param(MemoryStore(), OTHER, True, id="whose-checksum-the-store-compared"),
    ],
)
async def test_object_that_is_another_one_stays(backend, there, replaces_damaged):
    """An object is not damaged if its size or its writers differ, or if the store compares checksums."""
    store = ResilientStore(backend, tries_checksums=True)
    backend.add("key", there)
    assert not await created(store, replaces_damaged=replaces_damaged)
    assert (await store.get("key"))[0] == there
    assert "get_range" not in {operation for operation, _ in backend.requests}


async def test_damaged_object_that_another_writer_replaces_is_tried_again():
    """A writer of the same bytes that comes first has replaced the damaged object, and its own is kept."""

    class Overtaken(TrustingStore):
        async def get_range(self, key, *, position, size_bytes):
            found = await super().get_range(key, position=position, size_bytes=size_bytes)
            self.add("key", DATA)
            return found

    backend = Overtaken()
    store = ResilientStore(backend, tries_checksums=True)
    backend.add("key", OTHER)
    with pytest.raises(StorageUnavailable, match="another writer replaced it"):
        await created(store)
    assert not await created(store)
    assert (await store.get("key"))[0] == DATA
