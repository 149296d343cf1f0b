"""
How does tieringd compare with Kafka's own tiered storage?

The same work for both, in turns, each time in front of a new broker: a steady producer (`acks=all`) writes
records of 1 KiB into four partitions; each closed segment is tiered and then trimmed; then everything is read
back, first with nothing cached and then once more. A broker without tiering does the producer's part as well,
with the closing of the last segments: what the other two cost more than that is the price of tiering. Each
broker has taken records of another topic before, at the same rate: the first seconds of a broker are those of
its compiler, and differ by more CPU seconds than tiering takes.

Everything is read twice by a client that takes next to nothing of the machine, and then twice by librdkafka,
which makes records of it and takes more than the server does.

A segment's lag ends where it is durable. Both keep their defaults, so Kafka's copy task runs every 30 s.
Both stores are directories on one disk, and both answer at once: Kafka's `LocalTieredStorage` copies files
and syncs nothing, tieringd's file store checks each batch, syncs, and commits a manifest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from benchmarks.fetching_client import FetchingClient
from benchmarks.gateway_clients import AnyPartitionReader
from benchmarks.harness import GIB, Worker, machine, write_json
from benchmarks.paced_producer import RECORD_BYTES
from benchmarks.tiering_sides import KAFKA, PARTITIONS, PLAIN, TIERINGD, TOPIC, WARM_TOPIC, running_side
from tests.support.kafka_jars import KAFKA_VERSION
from tests.support.topic_config import set_topic_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.tiering_sides import Side

MIB = 1 << 20
_WARM_SECONDS = 15.0
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 300


LIBRDKAFKA = " by librdkafka"
CLIENTS: dict[str, type[FetchingClient | AnyPartitionReader]] = {
    "": FetchingClient,
    LIBRDKAFKA: AnyPartitionReader,
}
"""The clients that read, and what is added to the names of their figures."""


@dataclass
class Result:
    """One turn of one side."""

    produce_p99_ms: float
    broker_cpu_seconds: float
    """CPU seconds of the broker, from the first record until the last trim."""
    daemon_cpu_seconds: float
    """The daemon's likewise."""
    lag_seconds: float = 0.0
    """Time from the last record until every closed segment was durable."""
    mean_age_seconds: float = 0.0
    """Mean time from the close of a segment until it was durable."""
    waiting_mean_mib: float = 0.0
    """Closed segments that were not durable, while the producer ran."""
    waiting_most_mib: float = 0.0
    trimmed_seconds: float = 0.0
    """Time from the last record until the log directory had only active segments."""
    read_gib_per_s: dict[str, float] = field(default_factory=dict)
    read_cpu_per_gib: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the broker and the daemon per GiB read, without the client."""
    digests: dict[str, bytes] = field(default_factory=dict)

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU seconds of both."""
        return self.broker_cpu_seconds + self.daemon_cpu_seconds


def measure(name: str, directory: Path, *, seconds: float, rate_mib: float, segment_mib: int) -> Result:
    """Do the work once on one side."""
    records = int(seconds * rate_mib * MIB / RECORD_BYTES)
    with running_side(name, directory, segment_bytes=segment_mib * MIB) as side:
        waiting: list[int] = []
        cpu_before, p99 = _produce(side, records, rate_mib, waiting)
        ended = time.monotonic()
        _close_all(side)
        if name == PLAIN:
            return Result(p99, *_since(cpu_before, side))
        _until(side, lambda: not side.segments.waiting, "every closed segment is durable")
        lag = side.segments.last_durable_at - ended
        _until(side, lambda: side.local_bytes() < MIB, "everything durable is trimmed")
        result = Result(
            p99,
            *_since(cpu_before, side),
            lag_seconds=lag,
            mean_age_seconds=fmean(side.segments.ages()),
            waiting_mean_mib=fmean(waiting) / MIB,
            waiting_most_mib=max(waiting) / MIB,
            trimmed_seconds=time.monotonic() - ended,
        )
        for client, reader in CLIENTS.items():
            side.start_cold()
            _read(side, client, reader, records + PARTITIONS, result)
        return result


def _since(before: tuple[float, float], side: Side) -> tuple[float, float]:
    """Return the CPU seconds of broker and daemon since they were *before*."""
    broker, daemon = side.cpu_seconds()
    return broker - before[0], daemon - before[1]


def _produce(
    side: Side, records: int, rate_mib: float, waiting: list[int]
) -> tuple[tuple[float, float], float]:
    """
    Write the records at a steady rate, and sample what waits.

    Returns what `cpu_seconds` was when the first record was written, and the 99th percentile in ms.
    """
    command = [sys.executable, "-m", "benchmarks.paced_producer", side.bootstrap]
    command += [WARM_TOPIC, str(_WARM_SECONDS), TOPIC, str(records), str(rate_mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        assert producer.stdin is not None
        assert producer.stdout is not None
        assert producer.stdout.readline() == "warm\n", "the producer failed"
        cpu_before = side.cpu_seconds()
        producer.stdin.write("begin\n")
        producer.stdin.flush()
        while producer.poll() is None:
            side.segments.sample()
            waiting.append(side.segments.waiting_bytes)
            time.sleep(_POLL_SECONDS)
        assert producer.returncode == 0, "the producer failed"
        return cpu_before, float(producer.stdout.read())


def _close_all(side: Side) -> None:
    """Close the active segment of each partition, by one more record."""
    set_topic_config(side.bootstrap, TOPIC, "segment.ms", "1")
    time.sleep(_POLL_SECONDS)
    producer = Producer({"bootstrap.servers": side.bootstrap})
    for partition in range(PARTITIONS):
        producer.produce(TOPIC, b"last of %d" % partition, partition=partition)
    assert producer.flush(_PATIENCE_SECONDS) == 0, "the last records could not be written"
    side.segments.sample()


def _until(side: Side, is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        side.segments.sample()
        if is_so():
            return
        assert time.monotonic() < deadline, f"in {_PATIENCE_SECONDS} s it did not come that {what}"
        time.sleep(_POLL_SECONDS)


def _read(
    side: Side, client: str, reader: type[FetchingClient | AnyPartitionReader], records: int, result: Result
) -> None:
    """Read everything twice, timed; and once more for its digests, if the client reads records."""
    gibibytes = records * RECORD_BYTES / GIB
    with Worker(reader, side.read_port, TOPIC, PARTITIONS, records, gibibytes=gibibytes) as worker:
        for which in ("cold", "warm"):
            before = side.cpu_seconds()
            result.read_gib_per_s[which + client] = worker.upload().throughput
            result.read_cpu_per_gib[which + client] = sum(_since(before, side)) / gibibytes
        if reader is AnyPartitionReader:
            result.digests = {key: bytes(value) for key, value in worker.sent_files().items()}


def ratios_of(results: dict[str, list[Result]]) -> dict[str, float]:
    """Return tieringd's medians beside those of Kafka's own tiering, under the names of the ledger."""

    def middle(name: str, figure: Callable[[Result], float]) -> float:
        return median(figure(one) for one in results[name])

    def ratio(figure: Callable[[Result], float]) -> float:
        return middle(TIERINGD, figure) / middle(KAFKA, figure)

    def tiering_cpu(name: str) -> float:
        return middle(name, lambda one: one.cpu_seconds) - middle(PLAIN, lambda one: one.cpu_seconds)

    return {
        "lag_vs_kafka": ratio(lambda one: one.lag_seconds),
        "tiering_cpu_vs_kafka": tiering_cpu(TIERINGD) / tiering_cpu(KAFKA),
        "cold_vs_kafka": ratio(lambda one: one.read_gib_per_s["cold"]),
        "warm_vs_kafka": ratio(lambda one: one.read_gib_per_s["warm"]),
        "cold_cpu_vs_kafka": ratio(lambda one: one.read_cpu_per_gib["cold"]),
        "warm_cpu_vs_kafka": ratio(lambda one: one.read_cpu_per_gib["warm"]),
        "produce_p99_vs_kafka": ratio(lambda one: one.produce_p99_ms),
        "waiting_vs_kafka": ratio(lambda one: one.waiting_mean_mib),
        "cold_by_librdkafka_vs_kafka": ratio(lambda one: one.read_gib_per_s["cold" + LIBRDKAFKA]),
        "warm_by_librdkafka_vs_kafka": ratio(lambda one: one.read_gib_per_s["warm" + LIBRDKAFKA]),
    }


def main() -> None:
    """Measure, print, and write the JSON file if one is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less data and one round")
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    seconds, rounds, segment_mib = (15.0, 1, 16) if options.quick else (40.0, 3, 64)
    rate_mib = 50.0
    results: dict[str, list[Result]] = {PLAIN: [], KAFKA: [], TIERINGD: []}
    with tempfile.TemporaryDirectory() as root:
        for turn in range(options.rounds or rounds):
            for number, (name, done) in enumerate(results.items()):
                directory = Path(root) / f"{turn}-{number}"
                done.append(
                    measure(name, directory, seconds=seconds, rate_mib=rate_mib, segment_mib=segment_mib)
                )
            digests = {repr(results[name][-1].digests) for name in (KAFKA, TIERINGD)}
            assert len(digests) == 1, "the records that were read differ"
    print(
        f"{seconds * rate_mib:.0f} MiB of 1 KiB records at {rate_mib:.0f} MiB/s, {PARTITIONS} partitions, "
        f"segments of {segment_mib} MiB, {options.rounds or rounds} rounds; medians"
    )
    figures = _printed(results)
    ratios = ratios_of(results)
    for name, value in ratios.items():
        print(f"{name} {value:.2f}")
    if options.json is not None:
        write_json(
            options.json,
            name="kafka_tiering",
            machine=f"{machine('confluent-kafka', 'uvloop')}, Kafka {KAFKA_VERSION}",
            figures=figures,
            ratios=ratios,
        )


def _printed(results: dict[str, list[Result]]) -> dict[str, float]:
    """Print a line for each figure with a column for each side; return all of them by name."""
    rows: dict[str, Callable[[Result], float]] = {
        "produce p99, ms": lambda one: one.produce_p99_ms,
        "CPU of the broker, s": lambda one: one.broker_cpu_seconds,
        "CPU of the daemon, s": lambda one: one.daemon_cpu_seconds,
        "last record to all durable, s": lambda one: one.lag_seconds,
        "closed to durable, mean s": lambda one: one.mean_age_seconds,
        "last record to all trimmed, s": lambda one: one.trimmed_seconds,
        "closed and waiting, mean MiB": lambda one: one.waiting_mean_mib,
        "closed and waiting, most MiB": lambda one: one.waiting_most_mib,
    }
    for which in (which + client for client in CLIENTS for which in ("cold", "warm")):
        rows[f"{which}, GiB/s"] = lambda one, which=which: one.read_gib_per_s.get(which, 0.0)
        rows[f"{which}, CPU s/GiB"] = lambda one, which=which: one.read_cpu_per_gib.get(which, 0.0)
    width = max(map(len, rows))
    print(f"{'':{width}}" + "".join(f" {name:>12}" for name in results))
    figures = {}
    for label, figure in rows.items():
        values = {name: median(map(figure, done)) for name, done in results.items()}
        print(f"{label:{width}}" + "".join(f" {value:12.2f}" for value in values.values()))
        figures |= {f"{name}: {label}": value for name, value in values.items()}
    return figures


if __name__ == "__main__":
    main()
