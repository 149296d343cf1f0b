"""Archived records in memory: of older archives, and of chunks that the cache does not take."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in, archived
from tests.fakes.daemons import Daemon
from tests.fakes.gateway_peers import fetched
from tests.fakes.gateway_peers import running as gateway
from tests.fakes.hydration import Host, running
from tests.fakes.log_writer import CLUSTER, TOPIC_ID, LogWriter
from tests.fakes.virtual_loop import virtually
from tests.support.archive_endpoints import until
from tests.support.kafka_messages import fetch_request, milliseconds
from tests.support.raw_kafka import connected
from tests.unit.gateway.test_remote_answers import Behind
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.kafka_wire.fetch import AskedPartition
from tieringd.formats.kafka_wire.pieces import size_of
from tieringd.formats.object_keys import TopicKey
from tieringd.gateway.archive_answers import FetchQuestion
from tieringd.gateway.wire import MemoryBudget
from tieringd.policies.cache_trim import TrimLimits
from tieringd.reading.hydrator import HydrationLimits

BATCHES = 8
WAIT_SECONDS = 2.0


@asynccontextmanager
async def read_from_memory(tmp_path, store, kind, *, batch_bytes, limit):
    """Serve a partition whose first records are sent from memory, with a budget of *limit* bytes."""
    old = LogWriter(tmp_path / "old", "orders", 0, topic_id="BAAAAAAAAAAAAAAAAAAAAA")
    old.identified = replace(old.identified, cluster="old")
    new = LogWriter(tmp_path / "new", "orders", 0, first_offset=BATCHES if kind == "history" else 0)
    for _ in range(BATCHES):
        (old if kind == "history" else new).append(bytes(batch_bytes))
    limits = TrimLimits(size_bytes=1 << 30 if kind == "history" else 0, objects=10)
    host = Host(tmp_path / "cache", store, limits=limits)
    daemon = Daemon(tmp_path / "new", store, [new])
    if kind == "history":
        old.roll()
        await archived(old, archive_in(store))
        key = TopicKey(CLUSTER, "orders", TOPIC_ID)
        history_key = TopicKey("old", "orders", old.identified.topic_id)
        await daemon.archive.history.link(HistoryLink(key, history_key, ((0, BATCHES),)))
    else:
        new.roll()
    async with running(host), daemon.running():
        host.hydrator.set_limits(HydrationLimits())
        behind = Behind(daemon, host)
        behind.budget = MemoryBudget(limit)
        behind.answers = behind.made()
        await behind.fetch(0)
        yield behind


def question(**changes):
    asked = {("orders", 0): AskedPartition(0, 1 << 30)}
    fields = {"needs_a_batch": True, "read_committed": False, "wait_seconds": WAIT_SECONDS} | changes
    return FetchQuestion(asked, 1 << 30, **fields)


async def fetched_bytes(behind, **changes):
    """Return the size of the records that one Fetch gets, and where its answer goes on."""
    found = await behind.answers.fetch(question(**changes))
    found.release()
    (answer,) = found.partitions.values()
    assert not answer.error_code
    return size_of(answer.records), dict(found.next_fetches)


@pytest.mark.parametrize("kind", ["history", "uncached"])
@virtually
async def test_records_in_memory_take_what_the_budget_has_left(tmp_path, store, kind):
    """An answer has no more than fits; an empty one comes when the client has waited as long as it wants."""
    async with read_from_memory(tmp_path, store, kind, batch_bytes=100_000, limit=250_000) as behind:
        loop = asyncio.get_running_loop()
        size, goes_on = await fetched_bytes(behind)
        assert 200_000 < size <= 250_000
        assert goes_on == {}
        # The answer to another client, which does not read it.
        other = await behind.answers.fetch(question())
        behind.budget.add(size)
        began = loop.time()
        assert await fetched_bytes(behind) == (0, {})
        assert loop.time() - began == pytest.approx(WAIT_SECONDS)
        # Neither the broker's records nor a prepared answer wait for room.
        assert await fetched_bytes(behind, needs_a_batch=False) == (0, {})
        assert await fetched_bytes(behind, due=loop.create_future()) == (0, {})
        assert loop.time() - began < WAIT_SECONDS + 1
        other.release()
        behind.budget.give(size)
        assert await fetched_bytes(behind) == (size, {})


@pytest.mark.parametrize("kind", ["history", "uncached"])
@virtually
async def test_batch_above_the_whole_budget_is_sent_alone(tmp_path, store, kind):
    """It could never be sent otherwise."""
    async with read_from_memory(tmp_path, store, kind, batch_bytes=100_000, limit=10_000) as behind:
        # The broker's response to the Fetch is held meanwhile, and counts.
        behind.budget.add(70)
        first = await behind.answers.fetch(question())
        assert 100_000 < size_of(first.partitions["orders", 0].records) < 110_000
        assert await fetched_bytes(behind) == (0, {})
        first.release()
        assert (await fetched_bytes(behind))[0] > 100_000


@pytest.mark.parametrize("kind", ["history", "uncached"])
async def test_clients_that_do_not_read_share_one_budget(tmp_path, store, broker, kind):
    """All connections together hold what `gateway.buffer_bytes` allows, and each client has its records."""
    size, limit, count = 1 << 20, 4 << 20, 12
    partitions = {"orders": {0: {"fetch_offset": 0, "partition_max_bytes": 1 << 30}}}
    request = fetch_request(12, partitions, max_bytes=1 << 30, isolation_level=0, max_wait=milliseconds(200))
    async with (
        read_from_memory(tmp_path, store, kind, batch_bytes=size, limit=limit) as behind,
        gateway(broker, behind.answers, budget=behind.budget) as server,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(connected(server.port)) for _ in range(count)]
        for client in clients:
            client.send(request)
            head, _, answers = await broker.next()
            answers.write(fetched(head, {"orders": {0: {"error_code": 1}}}))
        most = 0
        while server.counters.archived_answers < count:
            most = max(most, server.buffered_bytes)
            await asyncio.sleep(0.01)
        assert size < most <= limit
        for client in clients:
            assert await client.frame()
        await until(lambda: not server.buffered_bytes)
