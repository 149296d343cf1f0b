"""A read that outlasts its Fetch serves a later one by what is true then, not by what was true before."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from structlog.testing import capture_logs

from tests.fakes.daemons import Daemon
from tests.fakes.virtual_loop import virtually
from tests.unit.gateway.test_remote_answers import serving
from tieringd.formats.kafka_wire.fetch import AskedPartition
from tieringd.gateway.archive_answers import FetchQuestion

SLOW_SECONDS = 2
EMPTY = {0: []}


@virtually
@pytest.mark.parametrize("has_ended", [False, True])
async def test_records_that_are_deleted_during_a_read_are_not_served(tmp_path, store, daemon, has_ended):
    """A read that ended before the deletion and waits for the next Fetch does not serve them either."""
    async with serving(tmp_path, store, daemon) as behind:
        store.latency_seconds = SLOW_SECONDS
        assert await behind.fetch_once(0, wait_seconds=0.5) == EMPTY
        await asyncio.sleep(5 * SLOW_SECONDS if has_ended else 0)
        assert (await behind.deleted({("orders", 0): 2})) == {("orders", 0): 2}
        assert await behind.fetch_once(0, wait_seconds=20) == {}
        await behind.answers.close()


@virtually
async def test_topic_that_is_created_again_during_a_read_gets_nothing_of_the_old_one(tmp_path, store, daemon):
    """The topic is read by its name, and its client waits for the old topic's records."""
    async with serving(tmp_path, store, daemon) as behind:
        store.latency_seconds = SLOW_SECONDS
        assert await behind.fetch_once(0, wait_seconds=0.5) == EMPTY
        await asyncio.sleep(5 * SLOW_SECONDS)
        daemon.broker.created_again.add("orders")
        assert await behind.fetch_once(0, wait_seconds=20) == {0: "try again"}
        await behind.answers.close()


@virtually
async def test_log_that_is_cut_off_during_a_read_is_not_served_past_its_end(tmp_path, store, writers):
    """The bounds of an answer are as fresh as its records."""
    writer = writers[0]
    writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        store.latency_seconds = SLOW_SECONDS
        assert await behind.fetch_once(0, wait_seconds=0.5) == EMPTY
        await asyncio.sleep(5 * SLOW_SECONDS)
        writer.high_watermark = 1
        assert await behind.fetch_once(0, wait_seconds=20) == {0: "try again"}
        await behind.answers.close()


@virtually
async def test_records_that_came_and_were_trimmed_within_a_second_are_served(tmp_path, store, writers):
    """The remembered bounds end before them. The broker's "out of range" would make the client skip them."""
    writer = writers[0]
    for _ in range(2):
        writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        writer.high_watermark = 6
        await asyncio.sleep(2)
        assert (await behind.partitions.find("orders", 0)).bounds.log_end_offset == 6
        writer.high_watermark = 9
        await asyncio.sleep(0.1)
        assert await behind.fetch_once(6, wait_seconds=5) == {0: [6]}


@virtually
async def test_read_that_is_late_time_after_time_is_logged_once(tmp_path, store, daemon):
    """A client with records of the broker in its answers asks many times a second."""
    async with serving(tmp_path, store, daemon) as behind:
        store.latency_seconds = SLOW_SECONDS
        with capture_logs() as logs:
            for _ in range(50):
                assert await behind.fetch_once(0, wait_seconds=0.01) == EMPTY
        assert (
            Counter(one["event"] for one in logs)[
                "a read of the archive takes longer than its client waits; it goes on"
            ]
            == 1
        )
        await behind.answers.close()


@virtually
async def test_answer_that_is_due_sooner_than_it_was_said_has_what_is_read(tmp_path, store, daemon):
    """The other reads go on, and nothing is downloaded twice."""
    async with serving(tmp_path, store, daemon) as behind:
        await behind.fetch_once(0)
        store.latency_seconds = SLOW_SECONDS
        # It is late, so the next Fetch waits for it.
        assert await behind.fetch_once(0, 0) == {0: [0], 1: []}
        loop = asyncio.get_running_loop()
        due = loop.create_future()
        loop.call_later(0.5, due.set_result, None)
        began = loop.time()
        asked = {("orders", number): AskedPartition(0, 1 << 20) for number in range(2)}
        found = await behind.answers.fetch(
            FetchQuestion(asked, 1 << 20, needs_a_batch=True, read_committed=False, wait_seconds=25, due=due)
        )
        assert loop.time() - began == pytest.approx(0.5)
        assert found.has_unread
        assert bool(found.partitions["orders", 0].records)
        found.release()
        assert await behind.fetch_once(0, 0, wait_seconds=20) == {0: [0], 1: [0]}
        reads = [request for request in store.requests if request[0] == "get_range"]
        assert len(reads) == len(set(reads))
        await behind.answers.close()
