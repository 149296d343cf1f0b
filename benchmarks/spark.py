"""
How fast does Spark read an archive, beside its own Kafka source and beside Parquet?

The same records lie in a broker's log, in an archive on this machine, and in Parquet files that Spark wrote
of them. One session reads all three in turns. A full scan takes every column of every record and keeps
nothing; a fingerprint is a full scan with a result, by which the three are compared in every round. The
broker shares the machine and its page cache, as the archive does: on a cluster it is elsewhere.

Beside the seconds by the clock, which other work on the machine lengthens, stand the CPU seconds of Spark's
Python workers, of its JVM and of the broker. `--limit` adds a source that only hands over record batches
which exist already (`benchmarks.held_batches`): no Python data source can be faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer
from pyspark import SparkContext
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from benchmarks.harness import machine, write_json
from benchmarks.held_batches import HeldBatches
from benchmarks.kafka_connector import connector_jars
from tests.support.daemon import run_json, run_well, write_config
from tests.support.kafka import KafkaCluster
from tests.support.spark_session import running_spark
from tieringd.spark import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
_TICKS = os.sysconf("SC_CLK_TCK")
_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


@dataclass(frozen=True, slots=True)
class Records:
    """What one topic holds."""

    topic: str
    codec: str
    value_bytes: int
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


KINDS = (Records("r100", "none", 88, small_value), Records("j1k", "zstd", 1024, document))


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
        self._value_bytes = kind.value_bytes
        self._directory = config.parent
        self._bootstrap = bootstrap
        rows = run_json("archive", "describe", kind.topic, "--config", str(config))
        # The newest segment is not closed, and so in the broker alone.
        ends = {str(row["partition"]): row["next_offset"] for row in rows}
        self._ends = json.dumps({kind.topic: ends})
        self._records = sum(ends.values())

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
        if way == "limit":
            return self._held()
        reader = self._spark.read.option("subscribe", self._topic).option("endingOffsets", self._ends)
        if way == "archive":
            return reader.format("tieringd").load(f"file://{self._directory / 'bucket'}")
        reader = reader.format("kafka").option("kafka.bootstrap.servers", self._bootstrap)
        for name, value in _CONSUMER.items():
            reader = reader.option(name, value)
        return reader.load()

    def _held(self) -> DataFrame:
        options = {
            "topic": self._topic,
            "records": str(self._records),
            "tasks": str(self.frame("archive").rdd.getNumPartitions()),
            "valueBytes": str(self._value_bytes),
        }
        return self._spark.read.format("held").options(**options).load()


@dataclass(frozen=True, slots=True)
class Taken:
    """What one query took, or what a set of processes had taken at some moment; all in seconds."""

    wall: float
    python: float
    """CPU of Spark's Python workers, user and system."""
    jvm: float
    broker: float

    @property
    def spark_cpu(self) -> float:
        """Return the CPU seconds of Spark, which leave out the broker."""
        return self.python + self.jvm

    def since(self, earlier: Taken) -> Taken:
        """Return what was taken between *earlier* and this moment."""
        return Taken(
            self.wall - earlier.wall,
            self.python - earlier.python,
            self.jvm - earlier.jvm,
            self.broker - earlier.broker,
        )


class Meter:
    """Tells what the JVM of the session, its workers and the broker have taken so far."""

    def __init__(self, broker_pid: int) -> None:
        """Watch the broker, and the JVM that PySpark has started."""
        gateway = SparkContext._gateway  # noqa: SLF001 - PySpark tells nowhere else which process its JVM is
        assert gateway is not None, "a session runs"
        self._jvm_pid: int = gateway.proc.pid
        self._broker_pid = broker_pid

    def read(self) -> Taken:
        """Return the seconds up to now. The Python workers are the JVM's descendants."""
        own: dict[int, float] = {}
        ended: dict[int, float] = {}
        children = defaultdict(list)
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                # After the command's name, which may hold anything, come the state and the parent.
                fields = path.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            pid = int(path.parent.name)
            children[int(fields[1])].append(pid)
            own[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
            ended[pid] = (int(fields[13]) + int(fields[14])) / _TICKS
        python, waiting = ended[self._jvm_pid], list(children[self._jvm_pid])
        while waiting:
            pid = waiting.pop()
            python += own[pid] + ended[pid]
            waiting += children[pid]
        return Taken(time.perf_counter(), python, own[self._jvm_pid], own[self._broker_pid])


def scan(frame: DataFrame) -> None:
    """Take every column of every record, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


def fingerprint(frame: DataFrame) -> tuple[Any, ...]:
    """Return what tells whether two frames have the same records."""
    columns = [F.col(name) for name in _COLUMNS]
    (row,) = frame.agg(F.count("*"), F.bit_xor(F.xxhash64(*columns)), F.max("offset")).collect()
    return tuple(row)


def measure(ways: Ways, meter: Meter, rounds: int, *, with_limit: bool) -> Iterator[tuple[str, str, Taken]]:
    """Yield what each way and query takes, in turns, after one round that counts for nothing."""
    for number in range(rounds + 1):
        found = {}
        for way in (*_WAYS, *(["limit"] if with_limit else [])):
            begun = meter.read()
            scan(ways.frame(way))
            scanned = meter.read()
            found[way] = fingerprint(ways.frame(way))
            ended = meter.read()
            if number:
                yield way, "scan", scanned.since(begun)
                yield way, "fingerprint", ended.since(scanned)
        counted = {row[0] for row in found.values()}
        assert len(counted) == 1, f"the ways give different numbers of records: {found}"
        found.pop("limit", None)
        assert len(set(found.values())) == 1, f"the ways give different records: {found}"
        assert found["archive"][0], "there are records"


async def run(
    directory: Path, counts: dict[str, int], rounds: int, *, with_limit: bool
) -> dict[str, dict[str, list[Taken]]]:
    """Set everything up, and return what all rounds took by topic and query, and way."""
    kafka = await KafkaCluster.start(directory / "kafka", heap_mib=1024)
    try:
        await write_topics(kafka, counts)
        config = archive_topics(kafka, directory)
        return await asyncio.to_thread(_read, directory, config, kafka, rounds, with_limit=with_limit)
    finally:
        await kafka.stop()


def _read(
    directory: Path, config: Path, kafka: KafkaCluster, rounds: int, *, with_limit: bool
) -> dict[str, dict[str, list[Taken]]]:
    all_taken: dict[str, dict[str, list[Taken]]] = {}
    options = {**_SESSION, "spark.jars": connector_jars()}
    with running_spark(directory / "spark", memory="4g", options=options) as spark:
        register(spark)
        spark.dataSource.register(HeldBatches)
        meter = Meter(kafka.broker.pid)
        for kind in KINDS:
            ways = Ways(spark, kind, config, kafka.bootstrap)
            ways.write_parquet()
            for way, query, taken in measure(ways, meter, rounds, with_limit=with_limit):
                all_taken.setdefault(f"{kind.topic} {query}", {}).setdefault(way, []).append(taken)
    return all_taken


def print_seconds(all_taken: dict[str, dict[str, list[Taken]]]) -> None:
    """Print a line for each query and way: seconds, CPU seconds, and how much more the others take."""
    print(
        f"{'':24} {'min':>7} {'median':>7} {'max':>7}  seconds | {'python':>7} {'jvm':>7} {'broker':>7}  "
        "CPU seconds | against the archive: seconds, CPU of Spark"
    )
    for query, ways in all_taken.items():
        for way, taken in ways.items():
            walls = [one.wall for one in taken]
            python, jvm, broker = (
                median(getattr(one, name) for one in taken) for name in ("python", "jvm", "broker")
            )
            print(
                f"{query:16} {way:7} {min(walls):7.2f} {median(walls):7.2f} {max(walls):7.2f}          | "
                f"{python:7.2f} {jvm:7.2f} {broker:7.2f}              | "
                f"{ratio_to_archive(ways, way, 'wall'):.2f}x {ratio_to_archive(ways, way, 'spark_cpu'):.2f}x"
            )


def ratio_to_archive(ways: dict[str, list[Taken]], way: str, name: str) -> float:
    """Return how much more of the seconds *name* the median of *way* takes than that of the archive."""
    middle, archive = (median(getattr(one, name) for one in ways[each]) for each in (way, "archive"))
    return float(middle / archive)


def slowest(all_taken: dict[str, dict[str, list[Taken]]], way: str, query: str, name: str = "wall") -> float:
    """Return `ratio_to_archive` of the topic in which the archive does worst."""
    return min(ratio_to_archive(ways, way, name) for each, ways in all_taken.items() if each.endswith(query))


def main() -> None:
    """Measure, print, and write the JSON file if one is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less data and fewer rounds")
    parser.add_argument("--limit", action="store_true", help="also scan record batches that exist already")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    counts, rounds = _QUICK if options.quick else _WHOLE
    with tempfile.TemporaryDirectory() as directory:
        taken = asyncio.run(run(Path(directory), counts, rounds, with_limit=options.limit))
    print(f"{counts['r100']} records of 100 bytes, {counts['j1k']} of 1 KiB with zstd, {rounds} rounds")
    print_seconds(taken)
    # The slower topic counts.
    ratios = {
        "source_vs_kafka": slowest(taken, "kafka", "scan"),
        "source_vs_parquet": slowest(taken, "parquet", "scan"),
        "source_vs_kafka_fingerprint": slowest(taken, "kafka", "fingerprint"),
        "source_vs_parquet_fingerprint": slowest(taken, "parquet", "fingerprint"),
        "source_vs_kafka_cpu": slowest(taken, "kafka", "scan", "spark_cpu"),
        "source_vs_parquet_cpu": slowest(taken, "parquet", "scan", "spark_cpu"),
    }
    if options.limit:
        ratios["limit_vs_archive"] = slowest(taken, "limit", "scan")
        ratios["limit_vs_archive_cpu"] = slowest(taken, "limit", "scan", "spark_cpu")
    for name, value in ratios.items():
        print(f"{name} {value:.3f}")
    if options.json:
        figures = {
            f"{query} {way} {label}": median(getattr(one, name) for one in rounds_taken)
            for query, ways in taken.items()
            for way, rounds_taken in ways.items()
            for name, label in (("wall", "seconds"), ("python", "python CPU"), ("jvm", "jvm CPU"))
        }
        versions = machine("pyspark", "pyarrow", "numba")
        write_json(options.json, name="spark", machine=versions, figures=figures, ratios=ratios)


if __name__ == "__main__":
    main()
