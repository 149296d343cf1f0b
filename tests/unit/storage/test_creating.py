"""Creating an object: one that is there stays, and one that is not is never taken for there."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from tests.fakes.memory_store import MemoryStore
from tieringd.errors import PreconditionFailed, StorageUnavailable
from tieringd.storage.checked_puts import create


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
