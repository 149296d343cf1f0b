"""Clients that read a partition: aiokafka, librdkafka, Kafka's own console tools, and one connection."""

from __future__ import annotations

import asyncio

import confluent_kafka
from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.support.kafka_messages import fetch_request

_PATIENCE_SECONDS = 180


async def read_aiokafka(bootstrap, topic, count, **settings):
    """Read a whole partition, and return offsets and values."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", **settings)
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        await consumer.seek_to_beginning()
        read = []
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while len(read) < count:
                batches = await consumer.getmany(timeout_ms=1000)
                read += [(each.offset, each.value) for batch in batches.values() for each in batch]
        return read
    finally:
        await consumer.stop()


def read_librdkafka(bootstrap, topic, count, **settings):
    """Read a whole partition, and return offsets and values."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": False, **settings}
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, confluent_kafka.OFFSET_BEGINNING)])
        read = []
        for _ in range(1800):
            read += [
                (each.offset(), each.value()) for each in consumer.consume(1000, 0.1) if not each.error()
            ]
            if len(read) >= count:
                break
        return read
    finally:
        consumer.close()


async def fetched(client, topic, offset, *, version=12):
    """
    Fetch the batch at an offset of partition 0, and return the partition's part of the answer.

    An answer without records and without an error tells a client to ask again, and it does: the archive
    takes longer than the client waits.
    """
    # The first batch comes whole, and nothing besides.
    request = fetch_request(version, {topic: {0: {"fetch_offset": offset}}}, max_bytes=1000)
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            (partition,) = (await client.ask(request)).responses[0].partitions
            if partition.records or partition.error_code.value:
                return partition


async def run_tool(behind, main_class, *arguments):
    """Run one of Kafka's own tools, and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *behind.cluster.broker.command(main_class, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, errors.decode()
    return output.decode()


def records_in(output):
    """Return the records among the lines of the console consumer, which also prints its log."""
    return [line for line in output.encode().splitlines() if line.endswith(b"vvv")]
