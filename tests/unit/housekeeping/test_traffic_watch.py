"""What counts as traffic of the object store."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.memory_store import MemoryStore
from tieringd.errors import StorageUnavailable
from tieringd.housekeeping.service import TrafficWatch
from tieringd.storage.background import background
from tieringd.storage.resilient import ResilientStore, StoreLimits

LIMITS = StoreLimits(initial_backoff_seconds=0.001, max_backoff_seconds=0.001)


class Now:
    """A clock that a test sets."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


class Failing(MemoryStore):
    """A store that fails each request once before it answers."""

    def __init__(self, *, is_throttling):
        super().__init__()
        self.is_throttling = is_throttling
        self.asked = 0

    async def get(self, key):
        self.asked += 1
        if self.asked % 2:
            raise StorageUnavailable("get: 503", is_throttling=self.is_throttling)
        return await super().get(key)


@pytest.fixture
def now():
    return Now()


def watched(store, now):
    watch = TrafficWatch(window_seconds=10.0, now=now)
    resilient = ResilientStore(store, LIMITS)
    resilient.listen(watch.note)
    return resilient, watch


async def test_each_attempt_of_a_request_is_traffic(now):
    """A store that has to be asked twice is asked twice."""
    backend = Failing(is_throttling=False)
    await backend.put("a", b"", crc32c=0)
    store, watch = watched(backend, now)
    await store.get("a")
    assert (watch.traffic.requests, watch.traffic.throttled) == (2, 0)


async def test_requests_leave_the_window(now):
    """Requests leave the window after its seconds."""
    store, watch = watched(MemoryStore(), now)
    await store.list_page("")
    now.seconds += 9.9
    assert watch.traffic.requests == 1
    now.seconds += 0.3
    assert watch.traffic.requests == 0
    assert watch.traffic.watched_seconds == pytest.approx(10.2)


async def test_background_requests_are_no_traffic(now):
    """Requests of tasks that background work starts are none either. Other requests beside them are."""
    store, watch = watched(MemoryStore(), now)
    with background():
        await store.list_page("")
        work = asyncio.create_task(store.list_page(""))
    other = asyncio.create_task(store.list_page(""))
    await asyncio.gather(work, other)
    assert watch.traffic.requests == 1


async def test_throttling_counts_the_reader_that_was_told(now):
    """The store says it to housekeeping as well, and means it."""
    backend = Failing(is_throttling=True)
    await backend.put("a", b"", crc32c=0)
    store, watch = watched(backend, now)
    with background():
        await store.get("a")
    assert (watch.traffic.requests, watch.traffic.throttled) == (0, 1)


async def test_other_window_begins_to_count_anew(now):
    """A count over ten seconds says nothing of sixty. The same window changes nothing."""
    store, watch = watched(MemoryStore(), now)
    await store.list_page("")
    now.seconds += 5
    watch.set_window(10.0)
    assert watch.traffic.watched_seconds == pytest.approx(5)
    watch.set_window(60.0)
    assert (watch.traffic.requests, watch.traffic.watched_seconds) == (0, 0.0)
