"""
What do ten thousand idle partitions cost, or another number? How soon is a closed segment seen among them?

The real `tieringd run` beside log directories without a broker, with a directory as its bucket and
its defaults, so a round every ten seconds. Each partition has one small active segment, its indexes, its
topic id and its leader epochs. CPU and memory are read from /proc while nothing else is asked of the
process. Then segments are closed, one at a time, and the log says when each is durable. One is closed before
the daemon starts.

With `--archived N` the archive has N more partitions, of topics that other brokers have: their manifests are
written when the daemon has claimed its own.

    python -m benchmarks.partitions [--quick] [--partitions N] [--archived N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import tempfile
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.daemon_events import DaemonEvents, until
from benchmarks.harness import machine, process_cpu_seconds, write_json
from tests.support.daemon import NewDaemon, directory_config, running_daemon, write_config
from tieringd.broker.directory_broker import DirectoryBroker
from tieringd.broker.layout import KafkaLayout
from tieringd.formats.manifest_codec import encode_manifest
from tieringd.formats.object_keys import TopicKey, manifest_key, topic_manifest_key
from tieringd.formats.record_batch import NewRecord, encode_batch
from tieringd.formats.topic_manifest import TopicManifest, encode_topic_manifest
from tieringd.model.manifest import PartitionManifest

if TYPE_CHECKING:
    from tests.support.daemon import Daemon

PARTITIONS = 10_000
_PARTITIONS_PER_TOPIC = 100
_IDLE_SECONDS, _QUICK_IDLE_SECONDS = 120, 60
_ROLLS, _QUICK_ROLLS = 7, 3
_PROBES, _SCRAPES = 50, 9
_INTERVAL_SECONDS = 10
"""The default of `cloud_storage_reconciliation_interval_ms`."""
_IDLE_SINCE_SECONDS = 3600
"""Since when nothing is written to the partitions: a filesystem has taken reserved blocks back by then."""
_CLUSTER = "local"
"""The cluster of a daemon without a broker, by default."""
_SETTLING_SECONDS = 2.5 * _INTERVAL_SECONDS
"""After the last claim: two rounds, so that what was new to the first is known to those measured."""
_ROUND_SECONDS = "tieringd_reconcile_last_duration_seconds"
_NO_WATCHES = "directory changes may be noticed only at the next rescan"


def main() -> None:
    """Measure, print the table, and write the JSON file if there is to be one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.partitions", description="Measure ten thousand idle partitions."
    )
    parser.add_argument(
        "--quick", action="store_true", help="half of the idle time, about two minutes in all"
    )
    parser.add_argument(
        "--archived",
        type=int,
        default=0,
        metavar="N",
        help="how many partitions of other brokers the archive has",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument(
        "--partitions", type=int, default=PARTITIONS, metavar="N", help=f"how many (default {PARTITIONS:,})"
    )
    options = parser.parse_args()
    count = options.partitions
    where = machine("asyncinotify", "prometheus-client")
    with tempfile.TemporaryDirectory(prefix="tieringd-partitions-") as directory:
        root = Path(directory)
        write_idle_partitions(root / "log", count=count)
        figures = measure_daemon(
            root,
            count=count,
            archived=options.archived,
            idle_seconds=_QUICK_IDLE_SECONDS if options.quick else _IDLE_SECONDS,
            rolls=_QUICK_ROLLS if options.quick else _ROLLS,
        )
        figures |= measure_scan(root / "log", count=count)
    topics = -(-count // _PARTITIONS_PER_TOPIC)
    print(f"{count:,} idle partitions of {topics} topics, a round every 10 s")
    print(where)
    print()
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")
    if options.json:
        write_json(options.json, name="partitions", machine=where, figures=figures, ratios={})


def write_idle_partitions(log_dir: Path, *, count: int) -> None:
    """Write *count* partitions with one record each, as a broker leaves them an hour after the last write."""
    idle_since_ns = time.time_ns() - _IDLE_SINCE_SECONDS * 1_000_000_000
    record = NewRecord(bytes(100), key=b"key", timestamp_ms=1_700_000_000_000)
    batch = encode_batch(0, [record])
    log_dir.mkdir()
    for number in range(count):
        topic, partition = divmod(number, _PARTITIONS_PER_TOPIC)
        directory = log_dir / f"topic{topic:03d}-{partition}"
        directory.mkdir()
        (directory / "partition.metadata").write_text(f"version: 0\ntopic_id: {_topic_id(topic + 1000)}\n")
        (directory / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
        (directory / f"{0:020d}.log").write_bytes(batch)
        (directory / f"{0:020d}.index").touch()
        (directory / f"{0:020d}.timeindex").touch()
        for each in (*directory.iterdir(), directory):
            os.utime(each, ns=(idle_since_ns, idle_since_ns))


def _topic_id(number: int) -> str:
    return base64.urlsafe_b64encode(uuid.UUID(int=number).bytes).decode().rstrip("=")


def write_archived_partitions(archive: Path, *, count: int) -> None:
    """Write the manifests of *count* partitions and their topics, as other brokers' daemons leave them."""
    for number in range(count // _PARTITIONS_PER_TOPIC):
        key = TopicKey(_CLUSTER, f"elsewhere{number:04d}", _topic_id(number + 100_000))
        topic = TopicManifest(key, partition_count=_PARTITIONS_PER_TOPIC, created_at_ms=1_700_000_000_000)
        objects = {topic_manifest_key(key): encode_topic_manifest(topic)}
        for partition in topic.partitions():
            manifest = PartitionManifest.begin(partition, start_offset=0)
            objects[manifest_key(partition)] = encode_manifest(manifest)
        for name, data in objects.items():
            (archive / name).parent.mkdir(parents=True, exist_ok=True)
            (archive / name).write_bytes(data)


def measure_daemon(
    root: Path, *, count: int, archived: int, idle_seconds: float, rolls: int
) -> dict[str, float]:
    """Run the daemon, let it settle, and measure it idle; then close segments under it."""
    log_dir = root / "log"
    settings = directory_config([log_dir], root / "archive", root / "state")
    # The default, where the tests hurry.
    settings["cloud_storage_reconciliation_interval_ms"] = _INTERVAL_SECONDS * 1000
    config = write_config(root / "daemon.yaml", settings)
    # As if it had been closed while no daemon ran.
    _close_segment(log_dir, *divmod(count - 1, _PARTITIONS_PER_TOPIC))
    started = time.monotonic()
    with running_daemon(config, start=NewDaemon) as daemon:
        events = DaemonEvents(daemon)
        until(lambda: events.named("segment durable"), daemon, "the segment that waits is durable")
        first_durable_seconds = time.monotonic() - started
        until(lambda: len(events.named("archiving")) == count, daemon, "every partition is claimed")
        start_seconds = time.monotonic() - started
        write_archived_partitions(root / "archive", count=archived)
        time.sleep(_SETTLING_SECONDS)
        figures = measure_idle(daemon, seconds=idle_seconds)
        figures["start_seconds"] = start_seconds
        figures["first_durable_seconds"] = first_durable_seconds
        page, figures["metrics_page_seconds"] = _metrics_page(daemon)
        figures["metrics_series"] = sum(not line.startswith("#") for line in page.splitlines())
        figures["metrics_loop_ms"] = loop_stall_ms(daemon, "/metrics")
        figures["partition_metrics_loop_ms"] = loop_stall_ms(daemon, "/metrics/partitions")
        assert _value(page, "tieringd_led_partitions") == count, "some partition is not archived"
        round_seconds = [_value(page, _ROUND_SECONDS)]
        if events.named(_NO_WATCHES):
            print("There are too few inotify watches: closed segments are seen by the rescan only.")
        seen: list[float] = []
        for number in range(rolls):
            # Spread over the interval, and not in step with the rounds.
            time.sleep(_INTERVAL_SECONDS / 3)
            seen.append(seconds_until_durable(daemon, events, log_dir, number=number * 1237 % count))
            round_seconds.append(_value(_metrics_page(daemon)[0], _ROUND_SECONDS))
    return figures | {
        "rescan_seconds": median(round_seconds),
        "rescan_seconds_max": max(round_seconds),
        "seen_after_seconds": max(seen),
        "seen_after_seconds_median": median(seen),
    }


def loop_stall_ms(daemon: Daemon, path: str) -> float:
    """
    Return for how long a scrape of *path* keeps the event loop from other work, in milliseconds.

    `/healthz` is asked again and again during a scrape: the loop answers it at once. The longest answer less
    the usual one is the stall, with what the scrape's thread takes of the interpreter. The median of several
    scrapes is returned, because the machine has other work as well.
    """
    usual = median(_health_seconds(daemon) for _ in range(_PROBES))
    stalls = []
    with ThreadPoolExecutor(1) as other:
        for _ in range(_SCRAPES):
            scrape = other.submit(_scrape, daemon, path)
            longest = _health_seconds(daemon)
            while not scrape.done():
                longest = max(longest, _health_seconds(daemon))
            stalls.append(longest - usual)
    return 1000 * max(0.0, median(stalls))


def _scrape(daemon: Daemon, path: str) -> None:
    """Ask as Prometheus does: for a compressed page, on a thread that leaves the interpreter to the other."""
    request = urllib.request.Request(daemon.url(path), headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request) as answer:
        assert answer.read()


def _health_seconds(daemon: Daemon) -> float:
    before = time.monotonic()
    daemon.get("/healthz")
    return time.monotonic() - before


def measure_idle(daemon: Daemon, *, seconds: float) -> dict[str, float]:
    """Leave the daemon alone for *seconds*; return what it took of a core and of memory."""
    rounds = int(daemon.status()["rounds"])
    # The page above is paid for before the clock starts, and the one below after it has stopped.
    time.sleep(1)
    cpu_before, before = process_cpu_seconds(daemon.server.pid), time.monotonic()
    time.sleep(seconds)
    cpu_seconds, elapsed = process_cpu_seconds(daemon.server.pid) - cpu_before, time.monotonic() - before
    memory = _memory_mib(daemon.server.pid)
    return {
        "idle_cpu_percent_of_core": 100 * cpu_seconds / elapsed,
        "idle_rounds": int(daemon.status()["rounds"]) - rounds,
        "rss_mib": memory["VmRSS"],
        "rss_mib_highest": memory["VmHWM"],
    }


def seconds_until_durable(daemon: Daemon, events: DaemonEvents, log_dir: Path, *, number: int) -> float:
    """Close a partition's segment, as a broker does by opening the next; return when it was durable."""
    topic, partition = divmod(number, _PARTITIONS_PER_TOPIC)
    name = f"topic{topic:03d}"

    def is_durable() -> bool:
        durable = events.named("segment durable")
        return any((one["topic"], one["partition"]) == (name, partition) for one in durable)

    assert not is_durable(), f"{name}-{partition} has been closed before"
    before = time.monotonic()
    _close_segment(log_dir, topic, partition)
    until(is_durable, daemon, "the closed segment is durable")
    return time.monotonic() - before


def _close_segment(log_dir: Path, topic: int, partition: int) -> None:
    (log_dir / f"topic{topic:03d}-{partition}" / f"{1:020d}.log").touch()


def measure_scan(log_dir: Path, *, count: int) -> dict[str, float]:
    """Time the looks at the files by themselves: the first, and one that remembers the last."""
    layout, broker = KafkaLayout(), DirectoryBroker([str(log_dir)])

    async def scan() -> float:
        before = time.monotonic()
        scan = layout.scan([str(log_dir)])
        assert len(scan.partitions) == count, f"{len(scan.partitions)} partitions were found"
        assert not scan.problems, scan.problems[0]
        view = await broker.replicas(scan.partitions)
        bounds = await broker.log_bounds(
            [layout.read_log(one, ()) for one in scan.partitions],
            leader_epochs={name: replica.leader_epoch for name, replica in view.replicas.items()},
        )
        assert len(bounds) == count, "some log has no bounds"
        return time.monotonic() - before

    async def scans() -> list[float]:
        return [await scan() for _ in range(5)]

    first, _, *later = asyncio.run(scans())
    return {"first_look_at_files_seconds": first, "look_at_files_seconds": median(later)}


def _metrics_page(daemon: Daemon) -> tuple[str, float]:
    before = time.monotonic()
    _, page = daemon.get("/metrics")
    return page, time.monotonic() - before


def _value(page: str, name: str) -> float:
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))


def _memory_mib(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.partition(":")[::2] for line in lines)
    return {name: int(value.split()[0]) / 1024 for name, value in pairs if name in {"VmRSS", "VmHWM"}}


if __name__ == "__main__":
    main()
