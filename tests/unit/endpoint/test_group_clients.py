"""Consumer groups of clients that are not ours, over endpoints that share a bucket."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as ClientPartition

from tests.support.archive_endpoints import archive_topic
from tests.support.group_endpoints import bootstrap_of, group_endpoints, read_on


async def test_offsets_of_a_simple_consumer_are_kept_over_endpoints(archive, writer, tmp_path):
    """Assigned partitions, without membership: what one endpoint acknowledged the other gives."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    partition = ClientPartition("orders", 0)
    async with group_endpoints(archive, tmp_path) as endpoints:
        for number, endpoint in enumerate(endpoints):
            consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap_of(endpoint), group_id="simple", enable_auto_commit=False
            )
            await consumer.start()
            try:
                consumer.assign([partition])
                assert await consumer.committed(partition) == (None if number == 0 else 2)
                await consumer.commit({partition: 2})
            finally:
                await consumer.stop()


async def test_groups_of_two_libraries_read_everything_once(archive, writer, tmp_path):
    """A member of each library at each endpoint: a member that follows reads on where the other ended."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with group_endpoints(archive, tmp_path) as endpoints:
        consumer = AIOKafkaConsumer(
            "orders",
            bootstrap_servers=bootstrap_of(*endpoints),
            group_id="readers",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        await consumer.start()
        try:
            first = await asyncio.wait_for(consumer.getone(), 120)
            assert first.offset == 0
            await consumer.commit()
        finally:
            await consumer.stop()
        assert await asyncio.to_thread(read_on, bootstrap_of(endpoints[1]), "readers", 2) == [1, 2]


async def test_newer_protocol_with_librdkafka(archive, writer, tmp_path):
    """A member that lets the endpoint assign partitions, and one that follows it at the other endpoint."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with group_endpoints(archive, tmp_path) as endpoints:
        newer = {"group.protocol": "consumer"}
        first, second = (bootstrap_of(one) for one in endpoints)
        assert await asyncio.to_thread(read_on, first, "newer", 2, **newer) == [0, 1]
        assert await asyncio.to_thread(read_on, second, "newer", 1, **newer) == [2]
