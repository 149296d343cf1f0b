"""
How fast does Spark read an archive, beside its own Kafka source and beside Parquet?

The same records lie in a broker's log, in an archive on this machine, and in Parquet files that Spark wrote
of them. One session reads all three in turns. A full scan takes every column of every record and keeps
nothing; a fingerprint is a full scan with a result, by which the three are compared in every round. The
broker shares the machine and its page cache, as the archive does: on a cluster it is elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from benchmarks.harness import machine, write_json
from benchmarks.kafka_connector import connector_jars
from tests.support.daemon import run_json, run_well, write_config
from tests.support.kafka import KafkaCluster
from tests.support.spark_session import running_spark
from tieringd.spark import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 2
_SEGMENT_BYTES = 16 << 20
_QUICK = ({"r100": 1_500_000, "j1k": 200_000}, 3)
_WHOLE = ({"r100": 5_000_000, "j1k": 600_000}, 7)
_WAYS = ("archive", "kafka", "parquet")
_CONSUMER = {"kafka.max.partition.fetch.bytes": str(32 << 20), "kafka.fetch.max.bytes": str(64 << 20)}
"""Else the connector waits for many small answers."""
_SESSION = {"spark.python.unix.domain.socket.enabled": "true"}
"""As docs/spark.md has it; the others have nothing to do with Python."""
_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


@dataclass(frozen=True, slots=True)
class Records:
    """What one topic holds."""

    topic: str
    codec: str
    value: Callable[[random.Random, int], bytes]


def small_value(source: random.Random, _number: int) -> bytes:
    """Return 88 bytes that no other record has."""
    return source.randbytes(44).hex().encode()


def document(source: random.Random, number: int) -> bytes:
    """Return a kibibyte of JSON, like an event of a shop: about a third of it is left by zstd."""
    items = [
        {"sku": source.randbytes(6).hex(), "cents": source.randrange(99_999), "count": number % 9}
        for _ in range(18)
    ]
    body = {"id": number, "customer": source.randbytes(8).hex(), "currency": "EUR", "items": items}
    text = json.dumps(body)
    return (text + " " * max(0, 1024 - len(text)))[:1024].encode()


KINDS = (Records("r100", "none", small_value), Records("j1k", "zstd", document))


async def write_topics(kafka: KafkaCluster, counts: dict[str, int]) -> None:
    """Write every topic, with one record more in each partition after a roll."""
    for kind in KINDS:
        configs = {"segment.bytes": str(_SEGMENT_BYTES), "retention.ms": "-1"}
        await kafka.create_topic(kind.topic, partitions=PARTITIONS, configs=configs)
        await asyncio.to_thread(_produce, kafka.bootstrap, kind, counts[kind.topic])


def _produce(bootstrap: str, kind: Records, count: int) -> None:
    source = random.Random(kind.topic)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "compression.type": kind.codec,
            "linger.ms": 50,
            "batch.size": 1 << 18,
            "queue.buffering.max.messages": 500_000,
        }
    )
    # Making each value takes longer than sending it: what repeats does so far apart.
    values = [kind.value(source, number) for number in range(min(count, 200_000))]
    for number in range(count):
        value = values[number % len(values)]
        while True:
            try:
                producer.produce(
                    kind.topic, value, f"key-{number:08}".encode(), partition=number % PARTITIONS
                )
                break
            except BufferError:
                producer.poll(1)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()


def archive_topics(kafka: KafkaCluster, directory: Path) -> Path:
    """Archive the closed segments of all topics into a directory; return the configuration."""
    (directory / "bucket").mkdir()
    config = {
        "broker": {
            "kind": "kafka",
            "log_dirs": [str(kafka.log_dir())],
            "bootstrap": [kafka.broker.bootstrap],
            "node_id": 1,
        },
        "state_directory": str(directory / "state"),
        "cloud_storage_enabled": True,
        "cloud_storage_enable_remote_read": True,
        "cloud_storage_backend": "file",
        "cloud_storage_file_root": str(directory / "bucket"),
        "storage_min_free_bytes": 0,
        "topics": {kind.topic: {"redpanda.remote.write": True} for kind in KINDS},
    }
    path = write_config(directory / "tieringd.yaml", config)
    run_well("run", "--once", "--config", str(path))
    return path


class Ways:
    """One topic, as each of the ways reads it. Every frame plans anew."""

    def __init__(self, spark: SparkSession, kind: Records, config: Path, bootstrap: str) -> None:
        self._spark = spark
        self._topic = kind.topic
        self._directory = config.parent
        self._bootstrap = bootstrap
        rows = run_json("archive", "describe", kind.topic, "--config", str(config))
        # The newest segment is not closed, and so in the broker alone.
        self._ends = json.dumps({kind.topic: {str(row["partition"]): row["next_offset"] for row in rows}})

    def write_parquet(self) -> None:
        """Write the Parquet files, from what the archive gives."""
        self.frame("archive").write.parquet(self._parquet, compression="zstd")

    @property
    def _parquet(self) -> str:
        return str(self._directory / "parquet" / self._topic)

    def frame(self, way: str) -> DataFrame:
        """Return the records, read in one of the ways."""
        if way == "parquet":
            return self._spark.read.parquet(self._parquet)
        reader = self._spark.read.option("subscribe", self._topic).option("endingOffsets", self._ends)
        if way == "archive":
            return reader.format("tieringd").load(f"file://{self._directory / 'bucket'}")
        reader = reader.format("kafka").option("kafka.bootstrap.servers", self._bootstrap)
        for name, value in _CONSUMER.items():
            reader = reader.option(name, value)
        return reader.load()


def scan(frame: DataFrame) -> None:
    """Take every column of every record, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


def fingerprint(frame: DataFrame) -> tuple[Any, ...]:
    """Return what tells whether two frames have the same records."""
    columns = [F.col(name) for name in _COLUMNS]
    (row,) = frame.agg(F.count("*"), F.bit_xor(F.xxhash64(*columns)), F.max("offset")).collect()
    return tuple(row)


def measure(ways: Ways, rounds: int) -> Iterator[tuple[str, str, float]]:
    """Yield the seconds of each way and query, in turns, after one round that counts for nothing."""
    for number in range(rounds + 1):
        found = {}
        for way in _WAYS:
            begun = time.perf_counter()
            scan(ways.frame(way))
            scanned = time.perf_counter()
            found[way] = fingerprint(ways.frame(way))
            ended = time.perf_counter()
            if number:
                yield way, "scan", scanned - begun
                yield way, "fingerprint", ended - scanned
        assert len(set(found.values())) == 1, f"the ways give different records: {found}"
        assert found["archive"][0], "there are records"


async def run(directory: Path, counts: dict[str, int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Set everything up, and return the seconds of all rounds by topic and query, and way."""
    kafka = await KafkaCluster.start(directory / "kafka", heap_mib=1024)
    try:
        await write_topics(kafka, counts)
        config = archive_topics(kafka, directory)
        return await asyncio.to_thread(_read, directory, config, kafka.bootstrap, rounds)
    finally:
        await kafka.stop()


def _read(directory: Path, config: Path, bootstrap: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {}
    options = {**_SESSION, "spark.jars": connector_jars()}
    with running_spark(directory / "spark", memory="4g", options=options) as spark:
        register(spark)
        for kind in KINDS:
            ways = Ways(spark, kind, config, bootstrap)
            ways.write_parquet()
            for way, query, taken in measure(ways, rounds):
                seconds.setdefault(f"{kind.topic} {query}", {}).setdefault(way, []).append(taken)
    return seconds


def print_seconds(seconds: dict[str, dict[str, list[float]]]) -> None:
    """Print a line for each query and way: seconds, and how much longer the others take."""
    print(f"{'':24} {'min':>7} {'median':>7} {'max':>7}  seconds | against the archive")
    for query, ways in seconds.items():
        for way, taken in ways.items():
            low, middle, high = min(taken), median(taken), max(taken)
            ratio = middle / median(ways["archive"])
            print(f"{query:16} {way:7} {low:7.2f} {middle:7.2f} {high:7.2f}          | {ratio:.2f}x")


def ratio_of(seconds: dict[str, dict[str, list[float]]], way: str, query: str) -> Sequence[float]:
    """Return how often as long *way* takes as the archive, by topic."""
    return [
        median(ways[way]) / median(ways["archive"]) for name, ways in seconds.items() if name.endswith(query)
    ]


def main() -> None:
    """Measure, print, and write the JSON file if one is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less data and fewer rounds")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    counts, rounds = _QUICK if options.quick else _WHOLE
    with tempfile.TemporaryDirectory() as directory:
        seconds = asyncio.run(run(Path(directory), counts, rounds))
    print(f"{counts['r100']} records of 100 bytes, {counts['j1k']} of 1 KiB with zstd, {rounds} rounds")
    print_seconds(seconds)
    # The slower topic counts.
    ratios = {
        "source_vs_kafka": min(ratio_of(seconds, "kafka", "scan")),
        "source_vs_parquet": min(ratio_of(seconds, "parquet", "scan")),
        "source_vs_kafka_fingerprint": min(ratio_of(seconds, "kafka", "fingerprint")),
        "source_vs_parquet_fingerprint": min(ratio_of(seconds, "parquet", "fingerprint")),
    }
    for name, value in ratios.items():
        print(f"{name} {value:.3f}")
    if options.json:
        figures = {
            f"{query} {way} seconds": median(taken)
            for query, ways in seconds.items()
            for way, taken in ways.items()
        }
        versions = machine("pyspark", "pyarrow", "numba")
        write_json(options.json, name="spark", machine=versions, figures=figures, ratios=ratios)


if __name__ == "__main__":
    main()
