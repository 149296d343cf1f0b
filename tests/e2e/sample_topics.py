"""
Topics on a real broker with everything that a log can hold, and what Kafka's own clients read.

Each topic's last record is an ordinary one, so that a consumer knows when it has seen all.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as ClientPartition

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

    from tests.support.kafka import KafkaCluster

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
TRANSACTIONS = "tx.aborted_and-committed"
APPEND_TIME = "append.time_of-broker"
ISOLATIONS = ("read_uncommitted", "read_committed")
FIRST_TIME_MS = 1_700_000_000_000
STEP_MS = 1_000

SEGMENTS = {"segment.bytes": str(1 << 20), "retention.ms": "-1", "file.delete.delay.ms": "100"}
_VALUE_BYTES = 20_000
_RECORDS = 130  # 2.6 MB: two closed segments and an active one.


class SeenRecord(NamedTuple):
    """A record as a reader sees it."""

    offset: int
    timestamp_ms: int
    timestamp_type: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def codec_topic(codec: str) -> str:
    """Return the name of a codec's topic."""
    return f"codec.of_records-{codec}"


SAMPLE_TOPICS = (*map(codec_topic, CODECS), APPEND_TIME, TRANSACTIONS)


async def write_sample_topics(kafka: KafkaCluster) -> None:
    """Create and fill every sample topic."""
    for codec in CODECS:
        await kafka.create_topic(codec_topic(codec), configs=SEGMENTS)
        settings = {} if codec == "none" else {"compression_type": codec}
        await _fill(kafka, codec_topic(codec), **settings)
    await kafka.create_topic(APPEND_TIME, configs=SEGMENTS | {"message.timestamp.type": "LogAppendTime"})
    await _fill(kafka, APPEND_TIME)
    await write_transactions(kafka, TRANSACTIONS)


async def consumed(kafka: KafkaCluster, topic: str, isolation: str, number: int = 0) -> list[SeenRecord]:
    """Return every record of a partition, as Kafka's consumer gives it."""
    partition = ClientPartition(topic, number)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap,
        isolation_level=isolation,
        enable_auto_commit=False,
        # A trim may pass the beginning before the first fetch. By default the consumer waits at the end then.
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        last_offset = (await consumer.end_offsets([partition]))[partition] - 1
        found: list[SeenRecord] = []
        # The last offset may be a transaction's marker, which no client is given.
        while await consumer.position(partition) <= last_offset:
            answered = await consumer.getmany(partition, timeout_ms=1_000)
            found += [
                SeenRecord(
                    record.offset,
                    record.timestamp,
                    ("CreateTime", "LogAppendTime")[record.timestamp_type],
                    record.key,
                    record.value,
                    tuple(record.headers),
                )
                for record in answered.get(partition, ())
                if record.offset <= last_offset
            ]
        return found
    finally:
        await consumer.stop()


async def offset_for_time(kafka: KafkaCluster, topic: str, timestamp_ms: int) -> int:
    """Return what the broker answers for a time."""
    partition = ClientPartition(topic, 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap)
    await consumer.start()
    try:
        return (await consumer.offsets_for_times({partition: timestamp_ms}))[partition].offset
    finally:
        await consumer.stop()


async def _fill(kafka: KafkaCluster, topic: str, **settings: Any) -> None:
    """Append records with and without keys, values and headers, some batches with many records."""
    async with kafka.producer(linger_ms=5, max_batch_size=100_000, **settings) as producer:
        sent = [await _send(producer, topic, number) for number in range(_RECORDS)]
        for each in sent:
            await each
    await kafka.produce(topic, [b"end"], timestamp_ms=FIRST_TIME_MS + _RECORDS * STEP_MS)


async def _send(producer: AIOKafkaProducer, topic: str, number: int) -> Any:
    random = Random(number)  # the same each time
    return await producer.send(
        topic,
        None if number % 7 == 3 else random.randbytes(_VALUE_BYTES),
        key=None if number % 7 == 0 else b"key-%d" % number,
        partition=0,
        timestamp_ms=FIRST_TIME_MS + number * STEP_MS,
        headers=[("trace", b"\x00\xff"), ("no value", None), ("trace", b"")] if number % 5 == 0 else [],
    )


async def write_transactions(kafka: KafkaCluster, topic: str) -> None:
    """
    Create *topic*, and interleave two transactional producers and an ordinary one in it.

    Producer a's transactions are long: each begins in one segment and ends in another.
    """
    await kafka.create_topic(topic, configs=SEGMENTS)
    async with (
        kafka.producer(transactional_id="e2e-a") as a,
        kafka.producer(transactional_id="e2e-b") as b,
        kafka.producer() as plain,
    ):
        for turn in range(4):
            await a.begin_transaction()
            for step in range(32):
                number = turn * 32 + step
                await (await _send(a, topic, number))
                if step % 8 == 0:
                    await b.begin_transaction()
                    await (await _send(b, topic, 1000 + number))
                    await (b.abort_transaction() if step % 16 else b.commit_transaction())
                    await (await _send(plain, topic, 2000 + number))
            await (a.commit_transaction() if turn % 2 else a.abort_transaction())
    await kafka.until_stable(topic)
    await kafka.produce(topic, [b"end"])
