"""
Write the golden files again, with a real Kafka broker: `python -m tests.golden.make_golden`.

README.md says what each file is. Bytes differ from run to run (times, topic and producer
ids), and the tests depend on none of that.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from tests.support.kafka import KafkaCluster

HERE = Path(__file__).parent
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SMALL_SEGMENTS = {"segment.ms": "300", "index.interval.bytes": "0"}


async def write_codecs(cluster: KafkaCluster) -> None:
    """Let the broker itself compress (`compression.type`), so the bytes are Java's."""
    for codec in CODECS:
        name = f"codec-{codec}"
        configs = {
            "compression.type": "uncompressed" if codec == "none" else codec,
            "index.interval.bytes": "0",
            # The records are dated 2023.
            "retention.ms": "-1",
        }
        await cluster.create_topic(name, configs=configs)
        async with cluster.producer(linger_ms=50) as producer:
            for batch in range(3):
                builder = producer.create_batch()
                for number in range(8):
                    builder.append(
                        key=None if number == 1 else b"key-%d" % number,
                        value=None if number == 2 else b"value %d of batch %d; " % (number, batch) * 6,
                        timestamp=1_700_000_000_000 + 1000 * batch + number,
                        headers=[("trace", b"\x00\x01"), ("empty", None)] if number == 3 else [],
                    )
                builder.close()
                await (await producer.send_batch(builder, name, partition=0))


async def write_transactions(cluster: KafkaCluster) -> None:
    """Interleave two producers: A aborts, B commits, A commits, and both end with an abort; B's is empty."""
    await cluster.create_topic("transactions", configs={"index.interval.bytes": "0"})

    async def send(producer, value: bytes) -> None:
        await producer.send_and_wait("transactions", value, partition=0)

    async with cluster.producer(transactional_id="a") as a, cluster.producer(transactional_id="b") as b:
        await a.begin_transaction()
        await b.begin_transaction()
        await send(a, b"a1 aborted")
        await send(b, b"b1 committed")
        await send(a, b"a2 aborted")
        await a.abort_transaction()
        await send(b, b"b2 committed")
        await b.commit_transaction()
        await a.begin_transaction()
        await send(a, b"a3 committed")
        await a.commit_transaction()
        await b.begin_transaction()
        await b.abort_transaction()
        await a.begin_transaction()
        await send(a, b"a4 aborted")
        await a.abort_transaction()


async def write_rolled(cluster: KafkaCluster) -> None:
    """Write three segments, with another leader epoch in the last two."""
    await cluster.create_topic("rolled", configs=SMALL_SEGMENTS)
    for _ in range(3):
        async with cluster.producer() as producer:
            for number in range(5):
                await producer.send_and_wait("rolled", b"value %d" % number, partition=0)
        await asyncio.sleep(0.6)
        await cluster.restart()


async def write_compacted(cluster: KafkaCluster) -> None:
    """Write the same keys again and again, with tombstones, until the cleaner has passed."""
    configs = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "segment.ms": "300",
        "message.timestamp.type": "LogAppendTime",
    }
    await cluster.create_topic("compacted", configs=configs)
    checkpoint = cluster.log_dir() / "cleaner-offset-checkpoint"
    for turn in range(60):
        async with cluster.producer(enable_idempotence=True) as producer:
            for key in range(4):
                value = None if key == 3 else b"turn %d" % turn
                await producer.send_and_wait("compacted", value, key=b"key-%d" % key, partition=0)
        await asyncio.sleep(0.4)
        if checkpoint.exists() and any(
            line.startswith("compacted 0 ") and int(line.split()[2]) > 16
            for line in checkpoint.read_text().splitlines()
        ):
            return
    raise AssertionError("the cleaner did not compact the topic")


def keep(cluster: KafkaCluster, topic: str) -> None:
    """Copy one partition directory of the stopped broker."""
    target = HERE / topic
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(cluster.log_dir() / f"{topic}-0", target, ignore=shutil.ignore_patterns("*.deleted"))


async def main() -> None:
    """Start a broker, write every topic, stop the broker in good order, and copy its files."""
    with tempfile.TemporaryDirectory() as directory:
        properties = {"log.cleaner.backoff.ms": "200", "log.cleaner.dedupe.buffer.size": "4194304"}
        cluster = await KafkaCluster.start(Path(directory), properties=properties)
        try:
            await write_codecs(cluster)
            await write_transactions(cluster)
            await write_rolled(cluster)
            await write_compacted(cluster)
        finally:
            await cluster.stop()
        for topic in (*(f"codec-{codec}" for codec in CODECS), "transactions", "rolled", "compacted"):
            keep(cluster, topic)
        log_dir = cluster.log_dir()
        for name in ("meta.properties", "recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
            shutil.copy(log_dir / name, HERE / name)


if __name__ == "__main__":
    asyncio.run(main())
