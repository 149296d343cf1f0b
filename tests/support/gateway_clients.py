"""Unmodified clients that read a partition: aiokafka, librdkafka and Kafka's own console tools."""

from __future__ import annotations

import asyncio

import confluent_kafka
from aiokafka import AIOKafkaConsumer, TopicPartition


async def read_aiokafka(bootstrap, topic, count, **settings):
    """Read a whole partition, and return offsets and values."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", **settings)
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        await consumer.seek_to_beginning()
        read = []
        async with asyncio.timeout(180):
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
