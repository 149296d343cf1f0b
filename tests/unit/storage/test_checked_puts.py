"""Puts to a store that does not compare checksums: it is found out, and what it stores is read back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from crc32c import crc32c
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tests.fakes.trusting_store import TrustingStore
from tests.fakes.virtual_loop import virtually
from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StoreFull,
)
from tieringd.formats.object_keys import data_key
from tieringd.storage.base import IfAbsent, IfVersion, Joined
from tieringd.storage.checked_puts import CheckedPuts
from tieringd.storage.resilient import ResilientStore, StoreLimits

DATA = b"the bytes of an object"
LIMITS = StoreLimits(initial_backoff_seconds=0.01, max_backoff_seconds=0.02)


async def put(puts, **changes):
    return await puts.put("key", DATA, crc32c=crc32c(DATA), **changes)


@pytest.mark.parametrize(("store", "reads_back"), [(MemoryStore(), False), (TrustingStore(), True)])
async def test_one_wrong_checksum_tells(store, reads_back):
    """A store that takes it is warned of; nothing stays of the trial."""
    puts = CheckedPuts(store)
    with capture_logs() as lines:
        await puts.find_out()
    assert puts.reads_back is reads_back
    assert [line["log_level"] for line in lines] == ["warning"] * reads_back
    assert store.objects == {}


@pytest.mark.parametrize("error", [BucketNotFound, StorageDenied, StoreFull, StorageUnavailable])
async def test_trial_that_tells_nothing_is_none(error):
    """A store that is away, full or forbids to write has not refused the checksum."""
    store = MemoryStore()
    store.fail_next("put", lambda: error("trouble"))
    with pytest.raises(error, match="trouble"):
        await CheckedPuts(store).find_out()


async def test_refusal_in_other_words_is_one():
    """A refusal counts as one in other words too: not every store calls it a bad digest."""
    store = MemoryStore()
    store.fail_next("put", lambda: StorageError("400 InvalidRequest"))
    puts = CheckedPuts(store)
    await puts.find_out()
    assert not puts.reads_back


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("condition", [None, IfAbsent(), IfVersion("1")])
async def test_damaged_object_is_stored_again(tells, condition):
    """The answer tells, or reading back; the version that was replaced is our own."""
    store = TrustingStore(tells=tells)
    if isinstance(condition, IfVersion):
        store.add("key", b"before")
    puts = CheckedPuts(store)
    await puts.find_out() if not tells else None
    store.flips = 2
    if isinstance(condition, IfVersion):
        condition = IfVersion((await store.head("key")).version)
    info = await put(puts, condition=condition)
    found, stored = await store.get("key")
    assert (found, info.version, info.crc32c) == (DATA, stored.version, crc32c(DATA))
    assert store.flips == 0


async def test_store_that_keeps_other_bytes_is_given_up():
    """No caller takes the object for stored."""
    store = TrustingStore(tells=True)
    store.flips = 3
    with pytest.raises(ChecksumRejected, match="3 times in a row"):
        await put(CheckedPuts(store))


async def test_another_writers_object_is_not_replaced():
    """A writer between our put and the check has the object, damaged or not."""
    store = TrustingStore()
    puts = CheckedPuts(store)
    await puts.find_out()
    head = store.head

    async def overtaken(key):
        store.add(key, b"another writer's")
        return await head(key)

    store.head = overtaken
    with pytest.raises(PreconditionFailed):
        await put(puts, condition=IfAbsent())
    assert (await store.get("key"))[0] == b"another writer's"


async def test_object_that_cannot_be_read_back_may_be_stored():
    """The caller of a conditional put checks before it writes again."""
    store = TrustingStore()
    puts = CheckedPuts(store)
    await puts.find_out()
    store.fail_next("get_range", lambda: store_unavailable("get_range"))
    with pytest.raises(StorageUnavailable, match="could not be read back") as caught:
        await put(puts)
    assert caught.value.outcome_unknown


async def test_damaged_object_that_is_not_replaced_may_be_stored():
    """A conditional put that was begun anew would be refused because of the damaged object of its own."""

    class Throttled(TrustingStore):
        async def get_range(self, key, *, position, size_bytes):
            busy = StorageUnavailable("503 SlowDown", is_throttling=True, retry_after_seconds=3)
            self.fail_next("put", lambda: busy)
            return await super().get_range(key, position=position, size_bytes=size_bytes)

    backend = Throttled()
    store = ResilientStore(backend, LIMITS, tries_checksums=True)
    backend.flips = 1
    with pytest.raises(StorageUnavailable, match="other bytes than it was sent") as caught:
        await put(store, condition=IfAbsent())
    assert caught.value.outcome_unknown
    assert (caught.value.is_throttling, caught.value.retry_after_seconds) == (True, 3)
    assert [operation for operation, key in backend.requests if key == "key"].count("put") == 2


@pytest.mark.parametrize("operation", ["head", "get_range"])
async def test_throttled_reading_back_is_throttling(operation):
    """A refusal to read an object back asks for fewer requests, as any other does."""
    store = TrustingStore()
    puts = CheckedPuts(store)
    await puts.find_out()
    store.fail_next(operation, lambda: StorageUnavailable("503", is_throttling=True, retry_after_seconds=3))
    with pytest.raises(StorageUnavailable, match="could not be read back") as caught:
        await put(puts)
    assert (caught.value.is_throttling, caught.value.retry_after_seconds) == (True, 3)


@virtually
async def test_store_is_tried_once_and_before_the_first_put():
    """A store is tried once, even if many PUTs come at once, or it is away at first. Readers do not wait."""
    backend = TrustingStore()
    backend.add("there", DATA)
    store = ResilientStore(backend, LIMITS, tries_checksums=True)
    await store.get("there")
    assert [operation for operation, _ in backend.requests] == ["get"]
    backend.fail_next("put", lambda: store_unavailable("put"))
    await asyncio.gather(*(store.put(f"key-{n}", DATA, crc32c=crc32c(DATA)) for n in range(3)))
    trials = [key for operation, key in backend.requests if key.startswith("tieringd-probe/")]
    assert len(set(trials)) == 1
    assert sorted(backend.objects) == ["key-0", "key-1", "key-2", "there"]
    assert [operation for operation, _ in backend.requests].count("get_range") == 3


async def test_join_in_such_a_store_proves_nothing():
    """The caller of the put reads the object back then."""

    class Joining(TrustingStore):
        async def join(self, key, sources, *, crc32c, condition=None):
            return Joined(replace(self.add(key, DATA), crc32c=crc32c), is_proven=True, host_bytes=0)

    for tries_checksums in (True, False):
        store = ResilientStore(Joining(), tries_checksums=tries_checksums)
        joined = await store.join("key", [], crc32c=crc32c(DATA))
        assert joined.is_proven is not tries_checksums


@virtually
async def test_segment_that_the_store_keeps_damaged_is_never_trimmed(tmp_path):
    """A damaged object is sent again. If that does not help, the local file is the only copy."""
    writer, backend = LogWriter(tmp_path), TrustingStore()
    store = ResilientStore(backend, LIMITS, tries_checksums=True)
    archiver = archiver_of(writer, archive_in(store), FakeBroker(writer))
    first = writer.closed_segment()
    second = writer.closed_segment()
    backend.flips = 1
    await archiver.step(observed(writer, target_bytes=1))
    assert len(backend.damaged) == 1
    manifest = stored_manifest(backend, writer)
    assert [segment.base_offset for segment in manifest.segments] == [first, second]
    for segment in manifest.segments:
        assert crc32c(backend.objects[data_key(manifest.partition, segment)][0]) == segment.crc32c
    await archiver.step(observed(writer, target_bytes=1))
    assert first not in writer.bases_on_disk

    third = writer.closed_segment()
    backend.flips = 10**6
    with pytest.raises(ChecksumRejected):
        await archiver.step(observed(writer, target_bytes=1))
    assert third in writer.bases_on_disk
