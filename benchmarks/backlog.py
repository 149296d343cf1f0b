"""
How fast does a backlog drain after an outage of the store, and what does draining cost a producer?

The real `tieringd run` with its defaults, in front of a sink that keeps nothing. Each question is asked in
turns, because a machine's speed drifts:

* stream, drain: one partition's segments of 64 MiB closed while the store is up; then one segment in each
  of a thousand partitions, closed while the store was away, from its return until the last is durable.
  They are as large as the stream's, so that only their number of partitions tells the two apart; brokers
  make larger ones by default. The controller is held at maximum shares.
* stream_16m, drain_16m: the same with segments of 16 MiB. They cost more a byte: data, index and manifest
  are three requests for each. `drain_vs_stream_16m` compares the drain with the stream of 64 MiB, so it shows
  what small segments cost as well; `drain_16m_vs_same_size` compares it with the stream of its own size.
* idle: the same drain with the controller held at minimum shares, and nothing else on the machine. Shares
  conserve work where it is as fast as the one at maximum shares: `idle_host_vs_unlimited`.
* alone, beside: producers, one for each core, that check and append batches as fast as they can, with
  nothing else running; then the same while a daemon drains, held at minimum shares.
* steady: a real broker and a steady producer (`benchmarks.steady`): the age of the oldest closed segment
  that is not durable, at its most.

    python -m benchmarks.backlog [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.daemon_events import DaemonEvents, until
from benchmarks.harness import GIB, machine, write_json
from benchmarks.kept_code import kept_machine_code
from benchmarks.producer import Producer
from benchmarks.segments import SEGMENT_BYTES, write_partition
from benchmarks.sink import BUCKET, Sink
from benchmarks.steady import measure_steady
from tests.support.daemon import NewDaemon, running_daemon, write_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.sink import Endpoint
    from tests.support.daemon import Daemon

PARTITIONS = 1000
_DISTINCT_BYTES = 1 << 30
"""
So much is written; the other partitions' files are hard links to it: a backlog larger than memory, read
from the page cache. It is far more than any processor's own cache holds.
"""
_STREAM_SEGMENTS = 64
_SMALL_SEGMENT_BYTES = 16 << 20
_ROUNDS, _QUICK_ROUNDS = 3, 1
_PRODUCER_SECONDS, _QUICK_PRODUCER_SECONDS = 8.0, 4.0
_STEADY_SECONDS, _QUICK_STEADY_SECONDS = 40.0, 15.0
_OUTAGE_SECONDS = 5.0
_MINIMUM_SHARES, MAXIMUM_SHARES = 100, 1000
SEEN_WAITING = "tieringd_upload_backlog_bytes"


def main() -> None:
    """Measure, print the table, and write the JSON file if there is to be one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.backlog", description="Measure how a backlog drains."
    )
    parser.add_argument("--quick", action="store_true", help="one round, about three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--segments", type=int, default=1, help="in each of the thousand partitions")
    parser.add_argument("--segment-bytes", type=int, default=SEGMENT_BYTES, help="of one of those")
    parser.add_argument("--rounds", type=int, help="timed rounds")
    options = parser.parse_args()
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    seconds = _QUICK_PRODUCER_SECONDS if options.quick else _PRODUCER_SECONDS
    where = machine("aiobotocore")
    with tempfile.TemporaryDirectory(prefix="tieringd-backlog-") as directory, Sink() as sink:
        root = Path(directory)
        many = write_many(root / "segments", segments=options.segments, segment_bytes=options.segment_bytes)
        one = {"one-0": write_partition(root / "segments" / "one-0", segments=_STREAM_SEGMENTS)}
        # As many bytes as in the other stream.
        small_one = {
            "one-0": write_partition(
                root / "small" / "one-0",
                segments=_STREAM_SEGMENTS * SEGMENT_BYTES // _SMALL_SEGMENT_BYTES,
                segment_bytes=_SMALL_SEGMENT_BYTES,
            )
        }
        small = write_many(root / "small", segments=1, segment_bytes=_SMALL_SEGMENT_BYTES)
        bench = Bench(root, sink, one=one, many=many, small_one=small_one, small=small)
        speeds = bench.uploads(rounds)
        producers = bench.producers(rounds, seconds=seconds)
        steady = measure_steady(
            root,
            sink_settings(root, sink.endpoint),
            sink,
            seconds=_QUICK_STEADY_SECONDS if options.quick else _STEADY_SECONDS,
        )
    samples = speeds | producers
    figures = {name: median(values) for name, values in samples.items()} | steady
    ratios = {
        "drain_vs_stream": figures["drain_gib_per_second"] / figures["stream_gib_per_second"],
        "drain_vs_stream_16m": figures["drain_16m_gib_per_second"] / figures["stream_gib_per_second"],
        "drain_16m_vs_same_size": (
            figures["drain_16m_gib_per_second"] / figures["stream_16m_gib_per_second"]
        ),
        "idle_host_vs_unlimited": figures["idle_gib_per_second"] / figures["drain_gib_per_second"],
        "producer_vs_alone": figures["beside_gib_per_second"] / figures["alone_gib_per_second"],
    }
    print(
        f"{PARTITIONS} partitions with {options.segments} x {options.segment_bytes / 2**20:g} MiB, "
        f"and one with {_STREAM_SEGMENTS} x {SEGMENT_BYTES / 2**20:g} MiB, {rounds} rounds in turns"
    )
    print(where)
    print()
    print(f"{'':24}    min    med    max")
    for name, values in samples.items():
        print(f"{name:24} {min(values):6.2f} {median(values):6.2f} {max(values):6.2f}")
    print()
    for name, value in (ratios | steady).items():
        print(f"{name:24} {value:6.2f}")
    if options.json:
        write_json(options.json, name="backlog", machine=where, figures=figures | ratios, ratios=ratios)


def write_many(directory: Path, *, segments: int, segment_bytes: int) -> dict[str, list[Path]]:
    """Write the distinct partitions; return every partition's segments, by its name."""
    count = max(1, _DISTINCT_BYTES // (segments * segment_bytes))
    distinct = [
        write_partition(directory / f"many-{number}", segments=segments, segment_bytes=segment_bytes)
        for number in range(count)
    ]
    return {f"many-{number}": distinct[number % count] for number in range(PARTITIONS)}


class Bench:
    """The segments, the sink, and the runs over them."""

    def __init__(
        self,
        root: Path,
        sink: Sink,
        *,
        one: Mapping[str, list[Path]],
        many: Mapping[str, list[Path]],
        small_one: Mapping[str, list[Path]],
        small: Mapping[str, list[Path]],
    ) -> None:
        """Take the segments of one partition and of many by the partition's name; *small* ones likewise."""
        self._root = root
        self._sink = sink
        self._runs = 0
        self._one = one
        self._many = many
        self._small_one = small_one
        self._small = small

    def uploads(self, rounds: int) -> dict[str, list[float]]:
        """Return GiB/s of a stream, and of drains at maximum and at minimum shares, in turns."""
        speeds: dict[str, list[float]] = {
            "stream_gib_per_second": [],
            "drain_gib_per_second": [],
            "idle_gib_per_second": [],
            "stream_16m_gib_per_second": [],
            "drain_16m_gib_per_second": [],
        }
        # Compiles the walk over batches, which the measured runs find.
        self._stream(self._one)
        for _ in range(rounds):
            speeds["stream_gib_per_second"].append(self._stream(self._one))
            speeds["drain_gib_per_second"].append(self._drain(self._many, shares=MAXIMUM_SHARES))
            speeds["idle_gib_per_second"].append(self._drain(self._many, shares=_MINIMUM_SHARES))
            speeds["stream_16m_gib_per_second"].append(self._stream(self._small_one))
            speeds["drain_16m_gib_per_second"].append(self._drain(self._small, shares=MAXIMUM_SHARES))
        return speeds

    def producers(self, rounds: int, *, seconds: float) -> dict[str, list[float]]:
        """Return GiB/s of all producers together, alone and while a backlog drains, in turns."""
        speeds: dict[str, list[float]] = {
            "alone_gib_per_second": [],
            "beside_gib_per_second": [],
            "uploads_beside_gib_per_second": [],
        }
        with ExitStack() as stack:
            producers = [
                stack.enter_context(Producer(self._root / "producer" / str(number)))
                for number in range(os.cpu_count() or 1)
            ]
            for _ in range(rounds):
                speeds["alone_gib_per_second"].append(_produce(producers, seconds=seconds))
                beside, uploads = self._beside(producers, seconds=seconds)
                speeds["beside_gib_per_second"].append(beside)
                speeds["uploads_beside_gib_per_second"].append(uploads)
        return speeds

    def _stream(self, partitions: Mapping[str, list[Path]]) -> float:
        with self._daemon(partitions, shares=MAXIMUM_SHARES) as run:
            run.close_segments()
            run.wait_until_durable()
            ended = time.monotonic()
            self._require_all_delivered(partitions)
            # From the first request on: the time until the daemon sees the segments is not the stream's.
            return _bytes_of(partitions) / GIB / (ended - self._sink.first_put_at())

    def _drain(self, partitions: Mapping[str, list[Path]], *, shares: int) -> float:
        with self._daemon(partitions, shares=shares) as run:
            started = self._outage(run, partitions)
            run.wait_until_durable()
            seconds = time.monotonic() - started
            self._require_all_delivered(partitions)
            return _bytes_of(partitions) / GIB / seconds

    def _beside(self, producers: Sequence[Producer], *, seconds: float) -> tuple[float, float]:
        with self._daemon(self._many, shares=_MINIMUM_SHARES) as run:
            self._outage(run, self._many)
            run.wait_until_durable(1)
            before = run.durable_bytes()
            speed = _produce(producers, seconds=seconds)
            uploaded = run.durable_bytes() - before
            assert run.durable_count() < run.segments, "the backlog ended before the producers"
            assert uploaded, "nothing was uploaded beside the producers"
            return speed, uploaded / GIB / seconds

    def _outage(self, run: _Run, partitions: Mapping[str, list[Path]]) -> float:
        """Close every segment while the store is away; return when it came back."""
        self._sink.set_available(available=False)
        run.close_segments()
        run.wait_until_seen(_bytes_of(partitions))
        time.sleep(_OUTAGE_SECONDS)
        self._sink.set_available(available=True)
        return time.monotonic()

    @contextmanager
    def _daemon(self, partitions: Mapping[str, list[Path]], *, shares: int) -> Iterator[_Run]:
        """Run a daemon that has claimed every partition, each of which has nothing but an active segment."""
        self._runs += 1
        self._sink.begin(verify=False)
        root = self._root / f"run-{self._runs}"
        for name, logs in partitions.items():
            directory = root / "log" / name
            directory.mkdir(parents=True)
            (directory / logs[0].name).touch()
        config = write_config(root / "daemon.yaml", sink_settings(root, self._sink.endpoint, shares=shares))
        try:
            with (
                kept_machine_code(self._root / "machine-code"),
                running_daemon(config, start=NewDaemon) as daemon,
            ):
                run = _Run(daemon, root / "log", partitions)
                run.wait_until_claimed()
                yield run
        finally:
            shutil.rmtree(root)

    def _require_all_delivered(self, partitions: Mapping[str, list[Path]]) -> None:
        received = self._sink.received()
        arrived = sorted(one.size_bytes for key, one in received.items() if key.endswith(".log"))
        assert arrived == sorted(path.stat().st_size for logs in partitions.values() for path in logs), (
            "what arrived is not what there was"
        )


class _Run:
    """A running daemon and the segments that are closed under it."""

    def __init__(self, daemon: Daemon, log_dir: Path, partitions: Mapping[str, list[Path]]) -> None:
        self._daemon = daemon
        self._events = DaemonEvents(daemon)
        self._log_dir = log_dir
        self._partitions = partitions
        self.segments = sum(len(logs) for logs in partitions.values())

    def close_segments(self) -> None:
        """Put every partition's segments in place, and an active one after them."""
        for name, logs in self._partitions.items():
            directory = self._log_dir / name
            for path in logs:
                link_segment(path, directory)
            active = max(logs[0].parent.glob("*.log"))
            (directory / active.name).touch()

    def wait_until_claimed(self) -> None:
        """Return when the daemon archives every partition."""
        self._until(lambda: len(self._events.named("archiving")) == len(self._partitions), "all is claimed")

    def wait_until_seen(self, size_bytes: int) -> None:
        """Return when the daemon knows of a backlog of *size_bytes*."""
        self._until(lambda: self._daemon.metric(SEEN_WAITING) == size_bytes, "the whole backlog is seen")

    def wait_until_durable(self, count: int | None = None) -> None:
        """Return when *count* segments are durable, or all of them."""
        wanted = self.segments if count is None else count
        self._until(lambda: self.durable_count() >= wanted, f"{wanted} segments are durable")

    def durable_count(self) -> int:
        """Return how many segments are durable."""
        return len(self._events.named("segment durable"))

    def durable_bytes(self) -> int:
        """Return the bytes of the segments that are durable."""
        return sum(one["size_bytes"] for one in self._events.named("segment durable"))

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        until(is_so, self._daemon, what)


def _produce(producers: Sequence[Producer], *, seconds: float) -> float:
    for producer in producers:
        producer.begin(seconds=seconds)
    return sum(producer.appended_bytes() for producer in producers) / GIB / seconds


def _bytes_of(partitions: Mapping[str, list[Path]]) -> int:
    return sum(path.stat().st_size for logs in partitions.values() for path in logs)


def link_segment(log: Path, directory: Path) -> None:
    """Put a hard link of a segment and its indexes into *directory*, the data last."""
    for suffix in (".index", ".timeindex", ".log"):
        link = (directory / log.name).with_suffix(f"{suffix}.link")
        link.hardlink_to(log.with_suffix(suffix))
        link.rename(link.with_suffix(""))


def sink_settings(root: Path, endpoint: Endpoint, *, shares: int | None = None) -> dict[str, Any]:
    """Return the daemon's configuration: its defaults but for the sink, held at *shares*."""
    return {
        **(_held_at(shares) if shares is not None else {}),
        "broker": {"kind": "none", "log_dirs": [str(root / "log")]},
        "state_directory": str(root / "state"),
        "cloud_storage_enabled": True,
        "cloud_storage_enable_remote_write": True,
        "log_retention_ms": -1,
        "cloud_storage_bucket": BUCKET,
        "cloud_storage_access_key": "benchmark",
        "cloud_storage_secret_key": "benchmark-secret",
        # What keeps nothing has nothing to compare a condition with.
        "cloud_storage_single_writer": True,
        "cloud_storage_api_endpoint": "127.0.0.1",
        "cloud_storage_api_endpoint_port": endpoint.port,
        **(
            {"cloud_storage_disable_tls": True}
            if endpoint.trust_file is None
            else {"cloud_storage_trust_file": str(endpoint.trust_file)}
        ),
        # The segments' records are of 2023, and trimming them is another question.
        "retention_local_target_ms_default": -1,
        "admin": {"port": 0},
    }


def _held_at(shares: int) -> dict[str, Any]:
    return {
        # Held at these shares: by itself, so large a backlog on so small a disk soon asks for everything.
        "cloud_storage_upload_ctrl_p_coeff": 0,
        "cloud_storage_upload_ctrl_min_shares": shares,
        "cloud_storage_upload_ctrl_max_shares": MAXIMUM_SHARES,
        # By default a minute, which is longer than these runs: then the pace would know of no speed.
        "cloud_storage_upload_ctrl_update_interval_ms": 1000,
    }


if __name__ == "__main__":
    main()
