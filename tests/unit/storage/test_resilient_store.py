"""Retries, deadlines and limits, on a virtual clock with faults on demand."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from crc32c import crc32c

from tests.fakes.memory_store import MemoryStore
from tieringd.errors import (
    ChecksumRejected,
    LocalFileError,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageUnavailable,
)
from tieringd.storage.base import IfAbsent, IfVersion
from tieringd.storage.resilient import ResilientStore, StoreLimits

pytestmark = pytest.mark.looptime


class FullJitter(Random):
    """Always draws the upper end: the longest pause that the policy allows."""

    def uniform(self, a: float, b: float) -> float:
        assert a == 0
        return b


def store_over(memory: MemoryStore, *, limits: StoreLimits | None = None, **options) -> ResilientStore:
    return ResilientStore(memory, limits, **{"random": FullJitter(), **options})


def unavailable(**details):
    return lambda: StorageUnavailable("the store said 503", **details)


def now() -> float:
    return asyncio.get_running_loop().time()


async def put(store: ResilientStore, key: str, data: bytes, **conditions):
    return await store.put(key, data, crc32c=crc32c(data), **conditions)


def operations(memory: MemoryStore) -> list[str]:
    return [operation for operation, _ in memory.requests]


async def test_every_operation_is_tried_again():
    """A store that fails once is asked twice, whatever for, and the caller does not notice."""
    memory = MemoryStore()
    store = store_over(memory)
    for operation in ("put", "get", "get_range", "head", "list_page", "delete_many"):
        memory.fail_next(operation, unavailable())
    await put(store, "key", b"content")
    assert (await store.get("key"))[0] == b"content"
    assert await store.get_range("key", position=0, size_bytes=3) == b"con"
    assert (await store.head("key")).size_bytes == 7
    assert [each.key for each in (await store.list_page("k")).objects] == ["key"]
    await store.delete_many(["key"])
    assert operations(memory) == [
        operation
        for operation in ("put", "get", "get_range", "head", "list_page", "delete_many")
        for _ in range(2)
    ]


async def test_range_that_is_read_in_parts_begins_anew_with_each_attempt():
    """What an attempt handed on before it failed is not continued, and counts once."""

    class Breaking(MemoryStore):
        async def read_range(self, key, *, position, size_bytes, begin):
            take = begin()
            take(memoryview(b"con"))
            if len(attempts) == 1:
                raise StorageUnavailable("the connection ended early")
            take(memoryview(b"tent"))
            return 7

    attempts, reports = [], []

    def begin():
        attempts.append(bytearray())
        return attempts[-1].extend

    store = store_over(Breaking(), on_request=lambda *report: reports.append(report))
    assert await store.read_range("key", position=0, size_bytes=7, begin=begin) == 7
    assert attempts == [b"con", b"content"]
    assert [(name, outcome, size) for name, outcome, _, size in reports] == [
        ("get_range", "StorageUnavailable", 0),
        ("get_range", "ok", 7),
    ]


async def test_object_is_opened_by_a_store_that_has_files():
    """Any other store is asked for nothing. Opening waits for no request, and is not tried again."""

    class Files(MemoryStore):
        async def open_object(self, key: str) -> int:
            self.opened.append(key)
            if key == "gone":
                raise StorageUnavailable("the disk is away")
            return 7

    assert await store_over(MemoryStore()).open_object("key") is None
    files = Files(latency_seconds=0.1)
    files.opened = []
    store = store_over(files, limits=StoreLimits(max_concurrent_requests=1))
    put_under_way = asyncio.create_task(put(store, "another", b"content"))
    await asyncio.sleep(0)
    assert await store.open_object("key") == 7
    assert not put_under_way.done()
    await put_under_way
    with pytest.raises(StorageUnavailable):
        await store.open_object("gone")
    assert files.opened == ["key", "gone"]


async def test_backoff_doubles_up_to_its_limit():
    """Pauses grow from the first one, twofold each time, and stay at the maximum."""
    memory = MemoryStore()
    limits = StoreLimits(initial_backoff_seconds=0.1, max_backoff_seconds=0.5)
    memory.fail_next("get", unavailable(), times=5)
    memory.add("key", b"content")
    await store_over(memory, limits=limits).get("key")
    assert now() == pytest.approx(0.1 + 0.2 + 0.4 + 0.5 + 0.5)


async def test_backoff_is_jittered_over_its_whole_length():
    """Each pause is drawn between nothing and the ceiling, from the given source of chance."""
    draws = []

    class Recording(Random):
        def uniform(self, a: float, b: float) -> float:
            draws.append((a, b))
            return 0.0

    memory = MemoryStore()
    memory.fail_next("get", unavailable(), times=3)
    memory.add("key", b"content")
    await store_over(memory, random=Recording()).get("key")
    assert draws == [(0, 0.1), (0, 0.2), (0, 0.4)]
    assert now() == 0


async def test_pause_that_the_store_asks_for_is_kept():
    """Retry-After is waited for when it is longer than the backoff."""
    memory = MemoryStore()
    memory.fail_next("get", unavailable(retry_after_seconds=4))
    memory.add("key", b"content")
    await store_over(memory).get("key")
    assert now() == 4


async def test_success_after_an_outage_ends_the_backoff_of_others():
    """The first request that succeeds again shows that the store is back: no request waits any longer."""
    memory = MemoryStore()
    memory.add("key", b"content")
    memory.fail_next("get", unavailable(), times=6)
    store = store_over(memory)
    waiting = asyncio.create_task(store.get("key"))
    await asyncio.sleep(4)
    await put(store, "other", b"x")
    await waiting
    assert now() == 4
    assert operations(memory) == ["get"] * 6 + ["put", "get"]


async def test_store_that_fails_now_and_then_ends_no_backoff():
    """A request that fails keeps to its pauses while others succeed."""
    memory = MemoryStore()
    memory.add("key", b"content")
    store = store_over(memory)
    await put(store, "other", b"x")
    memory.fail_next("get", unavailable(), times=5)
    waiting = asyncio.create_task(store.get("key"))
    while not waiting.done():
        await put(store, "other", b"x")
        await asyncio.sleep(0.5)
    assert now() == pytest.approx(3.5)  # It ended at 3.1, between two puts.
    assert operations(memory).count("get") == 6


async def test_pause_that_the_store_asks_for_outlasts_the_success_of_others():
    """A store that named a time is not asked before it, whatever else it answers meanwhile."""
    memory = MemoryStore()
    memory.add("key", b"content")
    memory.fail_next("get", unavailable(retry_after_seconds=5))
    store = store_over(memory)
    waiting = asyncio.create_task(store.get("key"))
    await asyncio.sleep(2)
    await put(store, "other", b"x")
    await waiting
    assert now() == 5


async def test_deadline_ends_the_attempts():
    """
    The error after the deadline names operation, key, attempts and seconds.

    The last error is its cause.
    """
    memory = MemoryStore()
    memory.fail_next("get", unavailable(), times=1000)
    limits = StoreLimits(manifest_upload_timeout_seconds=2, max_backoff_seconds=0.5)
    with pytest.raises(
        StorageUnavailable, match=r"get dir/key: gave up after 6 attempts in 1\.7 s"
    ) as caught:
        await store_over(memory, limits=limits).get("dir/key")
    assert "503" in str(caught.value.__cause__)
    assert now() == pytest.approx(1.7)


async def test_pause_past_the_deadline_is_not_waited_for():
    """A store that asks for more time than is left is given up at once."""
    memory = MemoryStore()
    memory.fail_next("get", unavailable(retry_after_seconds=60))
    with pytest.raises(StorageUnavailable):
        await store_over(memory).get("key")
    assert now() == 0


async def test_hanging_request_is_cut_off_at_the_deadline():
    """A request that does not end is cancelled when the time is over."""
    store = store_over(MemoryStore(latency_seconds=100))
    with pytest.raises(StorageUnavailable, match="get key: gave up after 1 attempts in 10"):
        await store.get("key")
    assert now() == 10


async def test_segments_have_longer_than_manifests(slice_of):
    """A put from a file has the segment's deadline, a put from bytes the manifest's."""
    store = store_over(MemoryStore(latency_seconds=100))
    with pytest.raises(StorageUnavailable):
        await put(store, "key", b"content")
    assert now() == 10
    with pytest.raises(StorageUnavailable):
        await store.put("key", slice_of(b"content"), crc32c=crc32c(b"content"))
    assert now() == 40


async def test_put_that_is_cut_off_has_an_unknown_outcome():
    """The store may have acted on a put that was cut off; of a read there is nothing to know."""
    store = store_over(MemoryStore(latency_seconds=100))
    with pytest.raises(StorageUnavailable) as caught:
        await put(store, "key", b"content", condition=IfAbsent())
    assert caught.value.outcome_unknown
    with pytest.raises(StorageUnavailable) as caught:
        await store.get("key")
    assert not caught.value.outcome_unknown


@pytest.mark.parametrize("condition", [IfAbsent(), IfVersion("1")], ids=["absent", "version"])
async def test_conditional_put_of_unknown_outcome_is_not_repeated(condition):
    """The write won, its answer was lost: repeated, it would lose to itself. The caller gets the doubt."""
    memory = MemoryStore()
    if isinstance(condition, IfVersion):
        memory.add("key", b"before")
    memory.fail_next("put", unavailable(outcome_unknown=True), after_effect=True)
    with pytest.raises(StorageUnavailable) as caught:
        await put(store_over(memory), "key", b"content", condition=condition)
    assert caught.value.outcome_unknown
    assert operations(memory) == ["put"]


async def test_conditional_put_without_effect_is_repeated():
    """A store that refused to begin is asked again, with the same condition."""
    memory = MemoryStore()
    memory.fail_next("put", unavailable(), times=3)
    await put(store_over(memory), "key", b"content", condition=IfAbsent())
    assert operations(memory) == ["put"] * 4


async def test_plain_put_of_unknown_outcome_is_repeated():
    """The same bytes under the same key do no harm twice."""
    memory = MemoryStore()
    memory.fail_next("put", unavailable(outcome_unknown=True), after_effect=True, times=2)
    await put(store_over(memory), "key", b"content")
    assert operations(memory) == ["put"] * 3


async def test_doubt_of_an_earlier_attempt_is_kept():
    """The outcome is unknown if one attempt may have stored, even if the last one did not."""
    memory = MemoryStore()
    memory.fail_next("put", unavailable(outcome_unknown=True), after_effect=True)
    memory.fail_next("put", unavailable(), times=1000)
    with pytest.raises(StorageUnavailable) as caught:
        await put(store_over(memory), "key", b"content")
    assert caught.value.outcome_unknown


@pytest.mark.parametrize(
    "error",
    [
        ObjectNotFound("x"),
        PreconditionFailed("x"),
        StorageDenied("x"),
        ChecksumRejected("x"),
        LocalFileError("x", path="p"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_final_errors_pass_at_once(error):
    """An error that another attempt cannot mend is not attempted again."""
    memory = MemoryStore()
    memory.fail_next("put", lambda: error)
    with pytest.raises(type(error)):
        await put(store_over(memory), "key", b"content")
    assert operations(memory) == ["put"]
    assert now() == 0


async def test_requests_share_a_limited_number_of_slots():
    """Reads and writes together never exceed the limit, and all of them are served."""
    memory = MemoryStore(latency_seconds=1)
    memory.add("key", b"content")
    store = store_over(memory, limits=StoreLimits(max_concurrent_requests=2))
    await asyncio.gather(*(put(store, f"{n}", b"x") for n in range(3)), *(store.get("key") for _ in range(3)))
    assert now() == 3


async def test_wait_for_the_first_slot_does_not_count():
    """An operation's time begins with its first slot: a busy client is not a slow store."""
    memory = MemoryStore(latency_seconds=9)
    store = store_over(memory, limits=StoreLimits(max_concurrent_requests=1))
    await asyncio.gather(*(put(store, f"{n}", b"x") for n in range(4)))
    assert now() == 36


async def test_slot_is_free_during_a_pause():
    """An operation that waits to try again lets others use its slot."""
    memory = MemoryStore()
    memory.add("key", b"content")
    memory.fail_next("head", unavailable(retry_after_seconds=5))
    store = store_over(memory, limits=StoreLimits(max_concurrent_requests=1))
    waiting = asyncio.create_task(store.head("key"))
    await asyncio.sleep(1)
    await store.get("key")
    assert now() == 1
    await waiting


async def test_oldest_put_in_flight_is_known():
    """The start of the oldest PUT under way is known through its retries, and is None without one."""
    memory = MemoryStore(latency_seconds=2)
    memory.fail_next("put", unavailable())
    store = store_over(memory)
    assert store.oldest_put_started is None
    first = asyncio.create_task(put(store, "first", b"x"))
    await asyncio.sleep(1)
    second = asyncio.create_task(put(store, "second", b"x"))
    await second
    assert not first.done()  # Its second attempt is under way.
    assert store.oldest_put_started == 0
    third = asyncio.create_task(put(store, "third", b"x"))
    await first
    assert store.oldest_put_started == 3
    await third
    assert store.oldest_put_started is None


async def test_cancelled_put_is_no_longer_in_flight():
    """A cancelled put frees its slot and leaves the record of puts in flight."""
    store = store_over(MemoryStore(latency_seconds=5), limits=StoreLimits(max_concurrent_requests=1))
    task = asyncio.create_task(put(store, "key", b"x"))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.oldest_put_started is None
    await put(store, "key", b"x")
    assert now() == 6


async def test_every_attempt_is_reported():
    """Metrics hear of each attempt: operation, outcome, seconds, and the bytes that went or came."""
    memory = MemoryStore(latency_seconds=1)
    memory.fail_next("put", unavailable())
    seen = []
    store = store_over(
        memory,
        on_request=lambda name, outcome, seconds, size: seen.append((name, outcome, round(seconds, 6), size)),
    )
    await put(store, "key", b"content")
    await store.get("key")
    await store.get_range("key", position=0, size_bytes=3)
    with pytest.raises(ObjectNotFound):
        await store.head("absent")
    memory.latency_seconds = 100
    with pytest.raises(StorageUnavailable):
        await store.get("key")
    assert seen == [
        ("put", "StorageUnavailable", 1.0, 0),
        ("put", "ok", 1.0, 7),
        ("get", "ok", 1.0, 7),
        ("get_range", "ok", 1.0, 3),
        ("head", "ObjectNotFound", 1.0, 0),
        ("get", "timeout", 10.0, 0),
    ]


async def test_long_delete_is_one_operation_for_each_thousand():
    """Deleting 2500 keys is three requests, and only the one that failed is repeated."""
    memory = MemoryStore()
    keys = [f"{number:04d}" for number in range(2500)]
    for key in keys:
        memory.add(key, b"")
    memory.fail_next("delete_many", unavailable())
    store = store_over(memory)
    await store.delete_many(keys)
    assert operations(memory) == ["delete_many"] * 4
    assert (await memory.list_page("")).objects == ()


async def test_close_closes_what_is_underneath():
    """Closing the wrapper closes the store, once or twice."""
    store = store_over(MemoryStore())
    await store.close()
    await store.close()
