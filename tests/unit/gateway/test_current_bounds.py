"""The broker is asked for bounds as seldom as it can be, and what it said before is never taken for newer."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.virtual_loop import virtually
from tieringd.errors import BrokerUnavailable, StorageUnavailable
from tieringd.gateway.current_bounds import CurrentBounds

PARTITIONS = 1000
SLOW_SECONDS = 0.02


class SlowBroker(FakeBroker):
    """Takes its time for bounds, and counts the questions that are under way."""

    seconds = SLOW_SECONDS
    at_once = most_at_once = 0

    async def log_bounds(self, logs, *, leader_epochs):
        """Return the bounds later."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.seconds)
        self.at_once -= 1
        return await super().log_bounds(logs, leader_epochs=leader_epochs)


class Asked:
    """Bounds of some partitions, by number."""

    def __init__(self, tmp_path, count):
        self.writers = [LogWriter(tmp_path, "orders", number) for number in range(count)]
        for writer in self.writers:
            writer.append(b"one")
        self.broker = SlowBroker(*self.writers)
        self.bounds = CurrentBounds(
            self.broker, now=lambda: asyncio.get_running_loop().time(), on_other_topic=pytest.fail
        )
        self._logs = [writer.local_log() for writer in self.writers]

    async def of(self, number, **fields):
        return await self.bounds.of(self.writers[number].identified, self._logs[number], **fields)


@virtually
async def test_many_partitions_that_are_read_on_cost_the_broker_a_few_questions_a_second(tmp_path):
    """Each is read by a client of its own, in a rhythm of its own; after the first no client waits."""
    asked = Asked(tmp_path, PARTITIONS)
    loop = asyncio.get_running_loop()
    longest = 0.0

    async def reader(number):
        nonlocal longest
        await asyncio.sleep(0.3 * number / PARTITIONS)
        await asked.of(number)
        for _ in range(20):
            await asyncio.sleep(0.25)
            began = loop.time()
            await asked.of(number)
            longest = max(longest, loop.time() - began)

    await asyncio.gather(*map(reader, range(PARTITIONS)))
    assert asked.broker.most_at_once == 1
    assert longest == 0
    assert asked.broker.calls["log_bounds"] < 60
    await asked.bounds.close()


@virtually
async def test_clients_that_come_while_the_broker_is_asked_share_its_answer(tmp_path):
    """The broker was asked late enough for these clients."""
    asked = Asked(tmp_path, 1)
    first = asyncio.create_task(asked.of(0))
    await asyncio.sleep(SLOW_SECONDS / 2)
    assert await asked.of(0) == await first
    assert asked.broker.calls["log_bounds"] == 1


@virtually
async def test_answer_to_an_earlier_question_is_not_taken_for_a_later_one(tmp_path):
    """This holds for a remembered answer, and for one that is under way."""
    asked = Asked(tmp_path, 1)
    loop = asyncio.get_running_loop()
    await asked.of(0)
    asked.writers[0].append(b"two")
    assert (await asked.of(0)).log_end_offset == 1
    assert (await asked.of(0, since=loop.time())).log_end_offset == 2
    early = asyncio.create_task(asked.of(0, since=loop.time()))
    await asyncio.sleep(SLOW_SECONDS / 2)
    asked.broker.seconds = 0
    before = asked.broker.calls["log_bounds"]
    await asked.of(0, since=loop.time())
    assert asked.broker.calls["log_bounds"] == before + 2
    await early


@virtually
async def test_broker_that_takes_longer_than_its_answer_is_used_is_still_heard(tmp_path):
    """Every caller has an answer after one question that began when it came."""
    asked = Asked(tmp_path, 1)
    asked.broker.seconds = 5
    for _ in range(2):
        assert (await asked.of(0)).log_end_offset == 1
    assert asked.broker.calls["log_bounds"] == 2


@virtually
async def test_old_bounds_are_not_used_after_a_defect(tmp_path):
    """The caller meets the defect, and the next caller has an answer."""
    asked = Asked(tmp_path, 1)
    await asked.of(0)
    await asyncio.sleep(5)
    asked.broker.fail_next("log_bounds", KeyError("a defect"))
    with pytest.raises(KeyError):
        await asked.of(0)
    assert (await asked.of(0)).log_end_offset == 1


@virtually
async def test_broker_that_is_away_and_back_is_asked_again(tmp_path):
    """A broker's absence counts for as long as any answer of it, and no longer."""
    asked = Asked(tmp_path, 1)
    asked.broker.fail_next("replicas", BrokerUnavailable("it restarts"))
    with pytest.raises(StorageUnavailable, match="it restarts"):
        await asked.of(0)
    await asyncio.sleep(1.1)
    assert (await asked.of(0)).log_end_offset == 1


@virtually
async def test_nothing_is_asked_after_the_end(tmp_path):
    """A waiting caller gets an error, and no task is left."""
    asked = Asked(tmp_path, 2)
    waiting = [asyncio.create_task(asked.of(0))]
    await asyncio.sleep(SLOW_SECONDS / 2)
    waiting.append(asyncio.create_task(asked.of(1)))
    await asyncio.sleep(0)
    await asked.bounds.close()
    for one in waiting:
        with pytest.raises(StorageUnavailable, match="closed"):
            await one
    with pytest.raises(StorageUnavailable, match="closed"):
        await asked.of(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
