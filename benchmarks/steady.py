"""
How far behind a steady producer is the archive?

A real Kafka broker, its own `ProducerPerformance` at a steady rate, and the real `tieringd run` with
its defaults in front of a sink that keeps nothing. A segment is closed when the broker has begun the next
one, and durable when the daemon says so. The figure is the age of the oldest closed segment that is not
durable, at its most; a segment that never became durable counts up to the end.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

from benchmarks.closed_segments import ClosedSegments
from benchmarks.daemon_events import DaemonEvents
from tests.support.daemon import NewDaemon, running_daemon, write_config
from tests.support.kafka import KafkaCluster

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchmarks.sink import Sink
    from tests.support.daemon import Daemon

MIB = 1 << 20
MIB_PER_SECOND = 100
_PARTITIONS = 4
_SEGMENT_BYTES = 64 * MIB
_RECORD_BYTES = 1024
_HEAP_MIB = 1024
_TOPIC = "steady"
_POLL_SECONDS = 0.02
_LAST_SECONDS = 10.0
"""After the last record, for what was closed before it to become durable."""


def measure_steady(
    root: Path, settings: Mapping[str, Any], sink: Sink, *, seconds: float
) -> dict[str, float]:
    """
    Produce for *seconds* beside a daemon with *settings*, to which the broker is added.

    Returns the age of the oldest closed segment in seconds at its most, how many segments were closed, and
    the rate at which the producer really was.
    """
    with asyncio.Runner() as runner:
        cluster = runner.run(KafkaCluster.start(root / "kafka", heap_mib=_HEAP_MIB))
        try:
            configs = {"segment.bytes": str(_SEGMENT_BYTES)}
            runner.run(cluster.create_topic(_TOPIC, partitions=_PARTITIONS, configs=configs))
            sink.begin(verify=False)
            config = write_config(root / "steady.yaml", dict(settings) | _beside(cluster, root))
            with running_daemon(config, start=NewDaemon) as daemon:
                return _watched(cluster, daemon, seconds=seconds)
        finally:
            runner.run(cluster.stop())
            shutil.rmtree(root / "kafka")


def _beside(cluster: KafkaCluster, root: Path) -> dict[str, Any]:
    return {
        "broker": {
            "kind": "kafka",
            "log_dirs": [str(cluster.log_dir())],
            "bootstrap": [cluster.bootstrap],
            "node_id": 1,
        },
        "state_directory": str(root / "steady-state"),
        # The machine may have little space left, and the producer is not to be held back for that.
        "storage_min_free_bytes": 0,
    }


def _watched(cluster: KafkaCluster, daemon: Daemon, *, seconds: float) -> dict[str, float]:
    records = int(seconds * MIB_PER_SECOND * MIB / _RECORD_BYTES)
    rate = MIB_PER_SECOND * MIB // _RECORD_BYTES
    command = cluster.broker.command(
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", _TOPIC, "--num-records", str(records), "--record-size", str(_RECORD_BYTES)),
        *("--throughput", str(rate), "--producer-props", f"bootstrap.servers={cluster.bootstrap}"),
        *("acks=all", "batch.size=131072", "linger.ms=5"),
    )
    events = DaemonEvents(daemon)
    segments = ClosedSegments(cluster.log_dir(), _TOPIC, events.durable_segments)
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as producer:
        while producer.poll() is None:
            segments.sample()
            time.sleep(_POLL_SECONDS)
    assert producer.returncode == 0, "the producer failed"
    took = time.monotonic() - began
    deadline = time.monotonic() + _LAST_SECONDS
    while segments.waiting and time.monotonic() < deadline:
        segments.sample()
        time.sleep(_POLL_SECONDS)
    ages = segments.ages()
    assert ages, "no segment was closed: produce for longer"
    return {
        "oldest_closed_seconds": max(ages),
        "closed_segments": len(ages),
        "steady_mib_per_second": records * _RECORD_BYTES / MIB / took,
    }
