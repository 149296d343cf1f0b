"""The budget of slots and bytes: never more than there is, in order, and no download is forgotten."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.fakes.virtual_loop import virtually
from tieringd.reading.chunk_download import DownloadBudget


async def hold(budget, size_bytes, seconds=1.0):
    async with budget.take(size_bytes):
        await asyncio.sleep(seconds)


@virtually
async def test_as_many_hold_as_there_are_slots_and_bytes():
    """The budget is used up by slots or by bytes, whichever runs out first."""
    budget = DownloadBudget(3, 100)
    tasks = [asyncio.create_task(hold(budget, 40)) for _ in range(4)]
    await asyncio.sleep(0.5)
    assert (budget.holders, budget.held_bytes) == (2, 80)
    await asyncio.gather(*tasks)
    tasks = [asyncio.create_task(hold(budget, 1)) for _ in range(4)]
    await asyncio.sleep(0.5)
    assert (budget.holders, budget.held_bytes) == (3, 3)
    await asyncio.gather(*tasks)
    assert (budget.holders, budget.held_bytes) == (0, 0)


@virtually
async def test_large_request_is_not_overtaken_and_gets_its_turn():
    """Small ones that come later wait behind it; one above the budget waits until it is alone."""
    budget, order = DownloadBudget(9, 100), []

    async def note(name, size_bytes):
        async with budget.take(size_bytes):
            order.append((name, budget.held_bytes))
            await asyncio.sleep(1)

    await asyncio.gather(*(note(name, size) for name, size in [("a", 60), ("large", 500), ("b", 10)]))
    assert order == [("a", 60), ("large", 100), ("b", 10)]


@virtually
async def test_one_that_leaves_the_line_lets_the_next_one_come():
    """The next download may have been waiting only behind the one that left."""
    budget = DownloadBudget(9, 100)
    first = asyncio.create_task(hold(budget, 60, 100))
    await asyncio.sleep(0)
    large = asyncio.create_task(hold(budget, 100))
    small = asyncio.create_task(hold(budget, 10))
    await asyncio.sleep(1)
    assert budget.holders == 1
    large.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert budget.holders == 2
    first.cancel()
    await asyncio.gather(first, large, small, return_exceptions=True)
    assert (budget.holders, budget.held_bytes) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
@virtually
async def test_any_order_of_cancellations_leaves_the_budget_whole(seed):
    """The budget stays whole, even if a turn comes in the same moment as a cancellation."""
    random, budget = Random(seed), DownloadBudget(3, 100)
    tasks = []
    for _ in range(60):
        tasks.append(asyncio.create_task(hold(budget, random.randrange(1, 120), random.random())))
        for _ in range(random.randrange(3)):
            await asyncio.sleep(random.choice((0, 0, 0.2)))
        if random.random() < 0.5:
            random.choice(tasks).cancel()
        assert budget.holders <= 3
        assert budget.held_bytes <= 100
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (budget.holders, budget.held_bytes) == (0, 0)
    async with asyncio.timeout(1):
        await hold(budget, 100, 0)
