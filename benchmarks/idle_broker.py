"""
What do ten thousand idle partitions cost beside a real broker and S3, and with one in a hundred active?

The real `tieringd run` with its default intervals beside one Kafka broker, in front of SeaweedFS. Each
partition has one small active segment. CPU and memory are those of the daemon alone, read from /proc while
nothing else is asked of it. At first there is no topic. Then the partitions are created and claimed, and
no client writes anything. At last a producer writes a record a second into each hundredth partition, so that
their offsets differ in each round.

A quick run has fewer partitions. What they take, without what the daemon takes beside an empty broker, is
multiplied to ten thousand. What was measured is printed as well.

    python -m benchmarks.idle_broker [--quick] [--partitions N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from confluent_kafka import Producer

from benchmarks.daemon_events import DaemonEvents, until
from benchmarks.harness import machine, write_json
from benchmarks.partitions import PARTITIONS, measure_idle
from tests.support.daemon import NewDaemon, kafka_config, running_daemon, write_config
from tests.support.kafka import KafkaCluster
from tests.support.kafka_jars import KAFKA_VERSION
from tests.support.seaweedfs import running_seaweedfs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_QUICK_PARTITIONS: Final = 2000
_PARTITIONS_PER_TOPIC: Final = 100
_SECONDS, _QUICK_SECONDS = 90.0, 60.0
_INTERVAL_SECONDS: Final = 10
"""The default of `cloud_storage_reconciliation_interval_ms`."""
_SETTLING_SECONDS: Final = 2.5 * _INTERVAL_SECONDS
"""After the last claim: two rounds, so that what was new to the first is known to those measured."""
_ACTIVE_SHARE: Final = 100
"""One of so many partitions is active."""
_HEAP_MIB: Final = 1536
_PATIENCE_SECONDS: Final = 120.0
_BROKER: Final = {
    # The defaults of Kafka, where the tests hurry.
    "log.retention.check.interval.ms": "300000",
    "log.initial.task.delay.ms": "30000",
    "log.cleaner.backoff.ms": "15000",
    "broker.session.timeout.ms": "18000",
    "broker.heartbeat.interval.ms": "2000",
}


def main() -> None:
    """Measure, print the table, and write the JSON file if there is to be one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.idle_broker",
        description="Measure ten thousand idle partitions beside a broker.",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{_QUICK_PARTITIONS:,} partitions, about four minutes in all"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument(
        "--partitions", type=int, metavar="N", help=f"how many (default {PARTITIONS:,}, multiples of 100)"
    )
    parser.add_argument("--seconds", type=float, help="how long each part is measured")
    options = parser.parse_args()
    count = options.partitions or (_QUICK_PARTITIONS if options.quick else PARTITIONS)
    seconds = options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS)
    where = f"{machine('aiokafka', 'kio', 'uvloop')}, Kafka {KAFKA_VERSION}"
    with tempfile.TemporaryDirectory(prefix="tieringd-idle-broker-") as directory:
        figures = measure(Path(directory), count=count, seconds=seconds)
    print(f"{count:,} partitions beside a broker and SeaweedFS, a round every {_INTERVAL_SECONDS} s")
    if count != PARTITIONS:
        print(f"Measured with {count:,}. What they take of the CPU is multiplied to {PARTITIONS:,}.")
    print(where)
    print()
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")
    if options.json:
        write_json(options.json, name="idle_broker", machine=where, figures=figures, ratios={})


def measure(root: Path, *, count: int, seconds: float) -> dict[str, float]:
    """Run the broker, the store and the daemon; measure the daemon idle, and then with active partitions."""
    topics = [f"topic{number:03d}" for number in range(count // _PARTITIONS_PER_TOPIC)]
    names = [(topic, number) for topic in topics for number in range(_PARTITIONS_PER_TOPIC)]
    with asyncio.Runner() as runner, running_seaweedfs(root / "s3") as store:
        store.create_bucket("idle")
        cluster = runner.run(KafkaCluster.start(root / "kafka", heap_mib=_HEAP_MIB, properties=_BROKER))
        try:
            config = kafka_config(
                cluster,
                store,
                root / "state",
                bucket="idle",
                cloud_storage_enable_remote_write=True,
                # The default, where the tests hurry.
                cloud_storage_reconciliation_interval_ms=_INTERVAL_SECONDS * 1000,
            )
            with running_daemon(write_config(root / "daemon.yaml", config), start=NewDaemon) as daemon:
                time.sleep(_SETTLING_SECONDS)
                empty = measure_idle(daemon, seconds=seconds / 2)
                for topic in topics:
                    runner.run(cluster.create_topic(topic, partitions=_PARTITIONS_PER_TOPIC))
                _write(Producer({"bootstrap.servers": cluster.bootstrap}), names)
                events = DaemonEvents(daemon)
                until(lambda: len(events.named("archiving")) == len(names), daemon, "all is claimed")
                time.sleep(_SETTLING_SECONDS)
                idle = measure_idle(daemon, seconds=seconds)
                with _producing(cluster.bootstrap, names[::_ACTIVE_SHARE]):
                    time.sleep(_SETTLING_SECONDS)
                    active = measure_idle(daemon, seconds=seconds)
                led = int(daemon.metric("tieringd_led_partitions") or 0)
                assert led == len(names), f"{led} partitions are archived"
        finally:
            runner.run(cluster.kill())
    empty_percent, idle_percent, active_percent = (
        one["idle_cpu_percent_of_core"] for one in (empty, idle, active)
    )
    scale = PARTITIONS / len(names)
    return {
        "idle_cpu_with_broker_percent": empty_percent + scale * (idle_percent - empty_percent),
        "active_cpu_with_broker_percent": empty_percent + scale * (active_percent - empty_percent),
        "measured_partitions": len(names),
        "measured_empty_cpu_percent": empty_percent,
        "measured_idle_cpu_percent": idle_percent,
        "measured_active_cpu_percent": active_percent,
        "idle_rounds": idle["idle_rounds"],
        "rss_mib": idle["rss_mib"],
        "rss_mib_highest": active["rss_mib_highest"],
    }


def _write(producer: Producer, names: Sequence[tuple[str, int]]) -> None:
    """Write a record into each of *names*."""
    for topic, number in names:
        producer.produce(topic, bytes(100), key=b"key", partition=number)
        producer.poll(0)
    assert producer.flush(_PATIENCE_SECONDS) == 0, "some records could not be written"


@contextmanager
def _producing(bootstrap: str, names: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Write a record a second into each of *names* for the time of a `with` block."""
    producer, ended = Producer({"bootstrap.servers": bootstrap}), threading.Event()

    def produce() -> None:
        while not ended.wait(1):
            _write(producer, names)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
