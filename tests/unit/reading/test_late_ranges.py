"""A range that begins late is asked for once more, and read from the request whose body begins first."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.memory_store import MemoryStore
from tests.fakes.virtual_loop import virtually
from tieringd.errors import ObjectNotFound, StorageUnavailable
from tieringd.metrics import Metrics
from tieringd.reading.late_ranges import KNOWN_MIN, SECOND_SHARE, LateRanges

DATA = bytes(range(100))
USUAL_SECONDS = 0.05


class SlowRanges(MemoryStore):
    """Begins each answer after the time that a test gives for it, and sends it in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.add("key", DATA)
        self.waits: list[float | Exception] = []
        """Seconds until the next answers begin, or errors; the usual time where there are none."""
        self.error_after = USUAL_SECONDS
        self.asked = self.cancelled = 0

    async def read_range(self, key, *, position, size_bytes, begin) -> int:
        self.asked += 1
        wait = self.waits.pop(0) if self.waits else USUAL_SECONDS
        try:
            await asyncio.sleep(self.error_after if isinstance(wait, Exception) else wait)
            if isinstance(wait, Exception):
                raise wait
            data, take = self.objects[key][0][position : position + size_bytes], begin()
            take(memoryview(data[:7]))
            await asyncio.sleep(0.01)
            take(memoryview(data[7:]))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return len(data)


class Reader:
    """Reads ranges of a store, and keeps what the last reading brought."""

    def __init__(self) -> None:
        self.store = SlowRanges()
        self.metrics = Metrics()
        self.ranges = LateRanges(self.store, self.metrics.cache)
        self.brought = bytearray()

    async def read(self, *waits: float | Exception) -> float:
        """Read a range whose requests begin after *waits*, check its bytes, and return the seconds."""
        self.store.waits = list(waits)
        self.store.asked = self.store.cancelled = 0
        before = asyncio.get_running_loop().time()
        found = await self.ranges.read_range("key", position=10, size_bytes=60, begin=self._begin)
        assert (found, bytes(self.brought)) == (60, DATA[10:70])
        return round(asyncio.get_running_loop().time() - before, 3)

    async def know(self, count: int = KNOWN_MIN) -> None:
        """Read as often as it takes to know what is late."""
        for _ in range(count):
            await self.read()
            assert self.store.asked == 1

    def _begin(self):
        self.brought.clear()
        return self.brought.extend

    def outcomes(self) -> dict[str, float]:
        samples = self.metrics.cache.second_requests.collect()[0].samples
        return {one.labels["outcome"]: one.value for one in samples if one.name.endswith("_total")}


@virtually
async def test_late_range_is_read_from_the_request_that_begins_first():
    """The second request is sent when one of a hundred would be late, and the first one is cancelled."""
    reader = Reader()
    await reader.know()
    assert await reader.read(30.0, 0.02) == USUAL_SECONDS + 0.02 + 0.01
    assert (reader.store.asked, reader.store.cancelled) == (2, 1)
    assert reader.outcomes() == {"faster": 1}


@virtually
async def test_first_request_that_begins_after_all_is_read():
    """The second one is cancelled then, and counts as slower."""
    reader = Reader()
    await reader.know()
    assert await reader.read(0.1, 5.0) == 0.1 + 0.01
    assert (reader.store.asked, reader.store.cancelled) == (2, 1)
    assert reader.outcomes() == {"slower": 1}


@virtually
async def test_request_that_begins_second_brings_nothing():
    """Both bodies begin at the same time: the bytes of one are read."""
    reader = Reader()
    await reader.know()
    assert await reader.read(2 * USUAL_SECONDS, USUAL_SECONDS) == 2 * USUAL_SECONDS + 0.01
    assert reader.store.asked == 2


@virtually
async def test_nothing_is_late_before_enough_is_known():
    """A young process waits, however long it takes."""
    reader = Reader()
    await reader.know(KNOWN_MIN - 1)
    assert await reader.read(30.0) == 30.01
    assert reader.outcomes() == {}


@virtually
async def test_few_ranges_are_asked_for_twice():
    """Two in a hundred are, where the whole store becomes slow, and what is late is learned anew."""
    reader = Reader()
    await reader.know()
    twice = 0
    for _ in range(50):
        await reader.read(1.0, 1.0)
        twice += reader.store.asked == 2
    assert 1 <= twice <= 2 + 50 * SECOND_SHARE
    assert reader.ranges.lateness.late_seconds >= 1.0


@virtually
async def test_second_request_makes_up_for_an_error_of_the_first():
    """An error is raised when both requests have one."""
    reader = Reader()
    await reader.know()
    reader.store.error_after = 0.2
    assert await reader.read(StorageUnavailable("away"), 0.3) == USUAL_SECONDS + 0.3 + 0.01
    with pytest.raises(StorageUnavailable, match="both"):
        await reader.read(StorageUnavailable("one of both"), StorageUnavailable("both"))
    reader.store.error_after = USUAL_SECONDS / 2
    with pytest.raises(ObjectNotFound):
        await reader.read(ObjectNotFound("none"))
    assert reader.store.asked == 1


@virtually
async def test_reader_that_leaves_cancels_both_requests():
    """Nothing goes on for a reader that was cancelled."""
    reader = Reader()
    await reader.know()
    reading = asyncio.create_task(reader.read(30.0, 30.0))
    await asyncio.sleep(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (reader.store.asked, reader.store.cancelled) == (2, 2)
    assert reader.ranges._at_once == 0
