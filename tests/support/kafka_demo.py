"""
`make demo BROKER=kafka`: the demo beside a real Kafka broker, with SeaweedFS for a bucket.

The daemon, the table and the comparison are those of `tieringd demo`. This module adds only the parts that
a user has: a broker, a store, a producer and a configuration.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console

from tests.support.kafka import KafkaCluster
from tests.support.seaweedfs import running_seaweedfs
from tieringd.cli.demo.demo_session import DemoSetup, run_session, summary
from tieringd.cli.demo.journal import Journal
from tieringd.cli.logging import configure_logging
from tieringd.config.model import LogConfig
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from tests.support.seaweedfs import SeaweedFS
    from tieringd.cli.demo.comparison import Comparison

BUCKET = "demo"
PARTITIONS = (TopicPartition("orders", 0), TopicPartition("orders", 1), TopicPartition("page.views", 0))
WRITING_SECONDS = 15.0
_RECORDS_PER_ROUND = 100
_TOPIC_CONFIGS = {
    "segment.bytes": str(1 << 20),
    "file.delete.delay.ms": "200",
}


class KafkaWriter:
    """Produces to a broker by the Kafka protocol, and notes the offset of each record."""

    def __init__(self, cluster: KafkaCluster, journal: Journal, *, seconds: float) -> None:
        self._cluster = cluster
        self._journal = journal
        self._seconds = seconds
        self._random = random.Random(7)

    async def write(self) -> None:
        """Produce for the given seconds."""
        end = time.monotonic() + self._seconds
        async with self._cluster.producer(compression_type="lz4") as producer:
            while time.monotonic() < end:
                for partition in self._journal.partitions:
                    await self._write_some(producer, partition)
                await asyncio.sleep(0.02)

    async def _write_some(self, producer, partition: TopicPartition) -> None:
        sent = []
        for _ in range(_RECORDS_PER_ROUND):
            key = b"customer-%d" % self._random.randrange(1000)
            value = self._random.randbytes(256) + b"order placed; " * 16
            timestamp_ms = time.time_ns() // 1_000_000
            future = await producer.send(
                partition.topic, value, key=key, partition=partition.partition, timestamp_ms=timestamp_ms
            )
            sent.append((key, value, timestamp_ms, future))
        for key, value, timestamp_ms, future in sent:
            offset = (await future).offset
            self._journal.note(partition, offset, timestamp_ms=timestamp_ms, key=key, value=value)


def configuration(cluster: KafkaCluster, store: SeaweedFS, directory: Path) -> Path:
    """Write the configuration of a daemon beside the cluster's broker, and return its path."""
    document = {
        "broker": {
            "kind": "kafka",
            "log_dirs": [str(cluster.broker.log_dir)],
            "bootstrap": [cluster.bootstrap],
            "node_id": cluster.broker.node_id,
        },
        "state_directory": str(directory / "state"),
        "cloud_storage_enabled": True,
        "cloud_storage_enable_remote_write": True,
        "cloud_storage_enable_remote_read": True,
        "cloud_storage_backend": "aws",
        "cloud_storage_bucket": BUCKET,
        "cloud_storage_region": store.region,
        "cloud_storage_access_key": store.access_key,
        "cloud_storage_secret_key": store.secret_key,
        "cloud_storage_api_endpoint": "127.0.0.1",
        "cloud_storage_api_endpoint_port": int(store.endpoint_url.rpartition(":")[2]),
        "cloud_storage_disable_tls": True,
        "cloud_storage_reconciliation_interval_ms": "1s",
        "retention_local_strict": True,
        "retention_local_target_bytes_default": "2MiB",
        "retention_local_target_ms_default": "1s",
        # A laptop with less than 5 GiB of free space has room for a demo. Its producer must not be throttled.
        "storage_min_free_bytes": 0,
        "admin": {"port": 0},
        "log": {"format": "console"},
    }
    path = directory / "tieringd.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


async def demo(directory: Path, store: SeaweedFS, console: Console) -> Comparison:
    """Run the demo against *store* and a broker of its own."""
    cluster = await KafkaCluster.start(directory / "kafka")
    try:
        for topic, count in Counter(one.topic for one in PARTITIONS).items():
            await cluster.create_topic(topic, partitions=count, configs=_TOPIC_CONFIGS)
        journal = Journal(PARTITIONS)
        setup = DemoSetup(
            title="tieringd beside Kafka, with SeaweedFS",
            config_file=configuration(cluster, store, directory),
            environ={},
            daemon_log=directory / "daemon.log",
        )
        writer = KafkaWriter(cluster, journal, seconds=WRITING_SECONDS)
        return await run_session(setup, journal, writer, console)
    finally:
        await cluster.stop()


def main() -> int:
    """Run the demo and print what was verified; return 1 if something differs."""
    configure_logging(LogConfig(format="console", level="warning"))
    console, started = Console(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tieringd-demo-") as path:
        directory = Path(path)
        console.print("starting SeaweedFS and Kafka")
        with running_seaweedfs(directory / "weed") as store:
            store.create_bucket(BUCKET)
            total = asyncio.run(demo(directory, store, console))
    print(f"\n{summary(total, seconds=time.monotonic() - started)}")  # noqa: T201 the demo's result
    return 1 if total.differences else 0


if __name__ == "__main__":
    sys.exit(main())
