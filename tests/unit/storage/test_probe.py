"""The trial of conditional writes, against stores that keep their word and stores that do not."""

from __future__ import annotations

import pytest

from tests.fakes.memory_store import MemoryStore
from tieringd.errors import (
    BucketNotFound,
    ConfigError,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
)
from tieringd.storage.base import IfAbsent, IfVersion
from tieringd.storage.checked_puts import require_conditional_writes


class LaxStore(MemoryStore):
    """Drops the conditions of some kinds, as some emulators and gateways do."""

    def __init__(self, *ignored: type) -> None:
        super().__init__()
        self.ignored = ignored

    async def put(self, key, body, *, crc32c, condition=None):
        if isinstance(condition, self.ignored):
            condition = None
        return await super().put(key, body, crc32c=crc32c, condition=condition)


class FailingStore(MemoryStore):
    """Raises an error for puts, or only for the deletion."""

    def __init__(self, error: Exception, *, only_deletes: bool = False) -> None:
        super().__init__()
        self.error = error
        self.only_deletes = only_deletes

    async def put(self, key, body, *, crc32c, condition=None):
        if self.only_deletes:
            return await super().put(key, body, crc32c=crc32c, condition=condition)
        raise self.error

    async def delete_many(self, keys):
        raise self.error


class StrictStore(MemoryStore):
    """Refuses every conditional replacement, right or wrong."""

    async def put(self, key, body, *, crc32c, condition=None):
        if isinstance(condition, IfVersion):
            raise PreconditionFailed("no", key=key)
        return await super().put(key, body, crc32c=crc32c, condition=condition)


async def keys(store) -> list[str]:
    return [each.key for each in (await store.list_page("")).objects]


async def test_store_with_conditional_writes_passes_and_is_left_clean():
    """A store that honours conditions passes, twice as well, and keeps no probe object."""
    store = MemoryStore()
    await require_conditional_writes(store)
    await require_conditional_writes(store)
    assert await keys(store) == []


@pytest.mark.parametrize(
    "store",
    [
        # fake-gcs-server does this to uploads of the kinds `media` and `resumable`.
        pytest.param(LaxStore(IfAbsent, IfVersion), id="ignores-both"),
        pytest.param(LaxStore(IfAbsent), id="ignores-if-absent"),
        pytest.param(LaxStore(IfVersion), id="ignores-if-version"),
        pytest.param(StrictStore(), id="refuses-the-right-version"),
    ],
)
async def test_store_without_conditional_writes_is_refused(store):
    """A store on which two writers would lose data is refused, with the way out, and left clean."""
    with pytest.raises(ConfigError, match="cloud_storage_single_writer"):
        await require_conditional_writes(store)
    assert await keys(store) == []


async def test_store_that_knows_no_conditions_is_refused():
    """A store that answers a condition with an error of its own is refused as well."""
    with pytest.raises(ConfigError, match=r"NotImplemented.*cloud_storage_single_writer"):
        await require_conditional_writes(FailingStore(StorageError("501 NotImplemented")))


@pytest.mark.parametrize("error", [StorageUnavailable, StorageDenied, BucketNotFound])
@pytest.mark.parametrize("only_deletes", [False, True], ids=["put", "delete"])
async def test_trouble_that_says_nothing_of_conditions_is_raised_as_it_is(error, only_deletes):
    """A store that is away, forbids the trial or has no bucket is not called unfit."""
    with pytest.raises(error, match="trouble"):
        await require_conditional_writes(FailingStore(error("trouble"), only_deletes=only_deletes))
