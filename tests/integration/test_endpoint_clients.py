"""Unmodified clients read an archive-only endpoint past offsets of which nothing is left."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as ClientPartition

from tests.fakes.archive import archive_in
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.support.archive_endpoints import archive_topic
from tests.support.foreign_clients import read_go, read_node
from tests.support.group_endpoints import bootstrap_of, group_endpoints, read_on
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import TopicKey

ISOLATIONS = ["read_uncommitted", "read_committed"]


@pytest.fixture
async def holed(tmp_path):
    """
    Give a bucket with a log of which nothing is left between offsets 3 and 9.

    It is at the end of the older of two archives, so nothing follows it in one answer.
    """
    archive = archive_in(MemoryStore())
    old, new = LogWriter(tmp_path / "old", "before"), LogWriter(tmp_path / "new", first_offset=10)
    for writer in (old, new):
        writer.closed_segment()
        await archive_topic(writer, archive)
    topic, history = (
        TopicKey(one.cluster, one.topic, one.topic_id) for one in (new.identified, old.identified)
    )
    await archive.history.link(HistoryLink(topic, history, ((0, 10),)))
    return archive


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_every_client_goes_on_past_a_hole(holed, tmp_path, isolation):
    """Each reads what is before and behind it, and nothing else."""
    wanted = [0, 1, 2, 10, 11, 12]
    async with group_endpoints(holed, tmp_path) as endpoints:
        at = (bootstrap_of(endpoints[0]), "orders", isolation)
        assert [one.offset for one in await read_go(*at, 6)] == wanted
        assert [one.offset for one in await read_node(*at, 6, group="node")] == wanted
        found = await asyncio.to_thread(read_on, at[0], "librdkafka", 6, **{"isolation.level": isolation})
        assert found == wanted
        consumer = AIOKafkaConsumer(bootstrap_servers=at[0], isolation_level=isolation)
        await consumer.start()
        try:
            consumer.assign([ClientPartition("orders", 0)])
            await consumer.seek_to_beginning()
            assert [(await asyncio.wait_for(consumer.getone(), 120)).offset for _ in wanted] == wanted
        finally:
            await consumer.stop()
