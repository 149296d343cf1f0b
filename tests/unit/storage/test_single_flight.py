"""Single flight: which callers share a call, and when a call is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from tieringd.errors import CorruptDataError, StorageUnavailable
from tieringd.storage.single_flight import SingleFlight


class Work:
    """Work that ends on demand, and counts how often it was begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return number


@pytest.fixture
async def work():
    return Work()


@pytest.fixture
async def flights():
    flights: SingleFlight[str, int] = SingleFlight(lambda key: f"{key}: closed")
    yield flights
    await flights.close()


@pytest.fixture
async def reported():
    """Collect the reports to the loop's exception handler."""
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    yield told
    asyncio.get_running_loop().set_exception_handler(None)


def asking(flights, work, key="key"):
    return asyncio.create_task(flights.arrived(flights.join(key, work)))


async def test_callers_share_one_flight_and_its_result(flights, work):
    """A caller that comes after its end begins another one."""
    askers = [asking(flights, work) for _ in range(3)]
    work.may_end.set()
    assert await asyncio.gather(*askers) == [1, 1, 1]
    assert await asking(flights, work) == 2
    assert "key" not in flights


async def test_keys_do_not_share(flights, work):
    """Each key has a flight of its own."""
    askers = [asking(flights, work, key) for key in ("one", "two")]
    work.may_end.set()
    assert await asyncio.gather(*askers) == [1, 2]


async def test_cancelled_caller_leaves_the_flight_to_others_and_to_later_callers(flights, work):
    """No caller owns the flight."""
    leaves = asking(flights, work)
    await asyncio.sleep(0)
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    later = asking(flights, work)
    work.may_end.set()
    assert await later == 1


async def test_error_is_every_callers_and_nothing_of_it_is_kept(flights, work, reported):
    """The next caller begins anew."""
    work.error = CorruptDataError("wrong", source="key", position=0)
    askers = [asking(flights, work) for _ in range(2)]
    work.may_end.set()
    for asker in askers:
        with pytest.raises(CorruptDataError):
            await asker
    work.error = None
    assert await asking(flights, work) == 2
    assert not reported


@pytest.mark.parametrize(
    ("error", "is_reported"),
    [
        pytest.param(StorageUnavailable("away"), False, id="an error of the tree"),
        pytest.param(KeyError("a fault of the program"), True, id="a fault of the program"),
    ],
)
async def test_error_without_a_caller(flights, work, reported, error, is_reported):
    """An error of our tree is met again by the next caller; a fault of the program is reported."""
    work.error = error
    flight = flights.join("key", work)
    work.may_end.set()
    await asyncio.wait({flight.task})
    assert reported == ([error] if is_reported else [])


async def test_new_flight_takes_the_place_of_a_running_one(flights, work):
    """Later callers share the newer flight. The older one ends for its own callers."""
    older = asking(flights, work)
    await asyncio.sleep(0)
    newer = asyncio.create_task(flights.arrived(flights.begin("key", work)))
    later = asking(flights, work)
    work.may_end.set()
    assert await asyncio.gather(older, newer, later) == [1, 2, 2]


async def test_close_ends_every_flight_also_a_replaced_one(flights, work):
    """Callers get an error that names the owner, not a cancellation of their own."""
    askers = [asking(flights, work)]
    await asyncio.sleep(0)
    askers.append(asyncio.create_task(flights.arrived(flights.begin("key", work))))
    await asyncio.sleep(0)
    await flights.close()
    for asker in askers:
        with pytest.raises(StorageUnavailable, match="key: closed"):
            await asker
    with pytest.raises(StorageUnavailable, match="key: closed"):
        flights.join("key", work)


async def test_flights_beyond_the_limit_end_with_their_last_caller(work):
    """Calls up to the limit are finished for the next caller, also when their last caller is cancelled."""
    flights: SingleFlight[str, int] = SingleFlight(lambda key: key, unwaited_above=1)
    askers = [asking(flights, work, key) for key in ("one", "two", "two")]
    await asyncio.sleep(0)
    askers[1].cancel()
    await asyncio.wait({askers[1]})
    assert "two" in flights, "another caller waits for it"
    askers[2].cancel()
    await asyncio.wait({askers[2]})
    assert "two" not in flights
    askers[0].cancel()
    await asyncio.wait({askers[0]})
    assert "one" in flights
    await flights.close()
