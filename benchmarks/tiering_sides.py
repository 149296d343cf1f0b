"""
The sides of `benchmarks.kafka_tiering`: a broker alone, with Kafka's own tiering, and with tieringd.

Each is a new broker with the JVM options of Kafka's start scripts, one topic to tier, and one that is
written to before. Both stores are
directories on the same disk: Kafka's own `LocalTieredStorage`, from the test jar that Kafka publishes, and
tieringd's file store.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from benchmarks.closed_segments import ClosedSegments
from benchmarks.daemon_events import DaemonEvents
from benchmarks.harness import process_cpu_seconds
from benchmarks.kept_code import kept_machine_code
from tests.support.daemon import NewDaemon, running_daemon, write_config
from tests.support.gateways import BrokerBehind
from tests.support.kafka_jars import KAFKA_VERSION, cache_directory, run_maven

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from benchmarks.closed_segments import SegmentName
    from tests.support.daemon import Daemon

PLAIN, KAFKA, TIERINGD = "no tiering", "Kafka's own", "tieringd"
TOPIC: Final = "orders"
WARM_TOPIC: Final = "warming"
"""It is never tiered."""
PARTITIONS: Final = 4
_HEAP_MIB = 1024
_PRODUCTION: Final = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
)
"""As in Kafka's `kafka-run-class.sh`."""
_TIERED_NAME = re.compile(rf"^{TOPIC}-(\d+)-")
_LAST_FILE = ".leader_epoch_checkpoint"
"""`LocalTieredStorage` copies a segment's files one after the other, and this one last."""
_NO_SEGMENTS: Final[tuple[SegmentName, ...]] = ()


@dataclass
class Side:
    """A running broker, what tiers its topic, and where its clients read."""

    behind: BrokerBehind
    read_port: int
    segments: ClosedSegments
    _daemons: list[Daemon] = field(default_factory=list)
    _start_anew: Callable[[], None] | None = None

    @property
    def bootstrap(self) -> str:
        """Return the broker's own address, for producers."""
        return self.behind.cluster.bootstrap

    @property
    def log_dir(self) -> Path:
        """Return the broker's log directory."""
        return self.behind.cluster.log_dir()

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the user and system time of the broker, and of the daemon that runs now, if there is one."""
        daemon = sum(process_cpu_seconds(one.server.pid) for one in self._daemons[-1:])
        return process_cpu_seconds(self.behind.cluster.broker.pid), daemon

    def start_cold(self) -> None:
        """Start what tiers anew, with nothing cached on this host but the pages of files."""
        if self._start_anew is not None:
            self._start_anew()

    def local_bytes(self) -> int:
        """Return the size of the topic's segments in the log directory."""
        return sum(path.stat().st_size for path in self.log_dir.glob(f"{TOPIC}-*/*.log") if path.exists())


@contextmanager
def running_side(name: str, directory: Path, *, segment_bytes: int) -> Iterator[Side]:
    """Run one side, with an empty topic, and remove what it wrote when it ends."""
    directory.mkdir()
    kept = directory.parent / "machine-code"
    store = directory / "store"
    store.mkdir()
    behind = asyncio.run(
        BrokerBehind.start(
            directory / "broker",
            heap_mib=_HEAP_MIB,
            properties=_properties(store) if name == KAFKA else {},
            virtual_machine=_PRODUCTION,
        )
    )
    try:
        configs = {"segment.bytes": str(segment_bytes), "file.delete.delay.ms": "100"}
        if name == KAFKA:
            configs |= {"remote.storage.enable": "true", "local.retention.bytes": "1"}
        asyncio.run(behind.cluster.create_topic(TOPIC, partitions=PARTITIONS, configs=configs))
        asyncio.run(behind.cluster.create_topic(WARM_TOPIC, partitions=PARTITIONS))
        log_dir, port = behind.cluster.log_dir(), behind.cluster.broker.port
        if name == PLAIN:
            yield Side(behind, port, ClosedSegments(log_dir, TOPIC, lambda: _NO_SEGMENTS))
        elif name == KAFKA:
            yield Side(behind, port, ClosedSegments(log_dir, TOPIC, lambda: _copied(store)))
        else:
            with kept_machine_code(kept), _Daemon(behind, directory, store) as daemon:
                segments = ClosedSegments(log_dir, TOPIC, daemon.durable_segments)
                yield Side(behind, behind.port, segments, daemon.running, daemon.start)
    finally:
        asyncio.run(behind.cluster.kill())
        shutil.rmtree(directory)


class _Daemon:
    """tieringd beside a broker, with its defaults, in front of a directory. It can be started anew."""

    def __init__(self, behind: BrokerBehind, directory: Path, store: Path) -> None:
        self.running: list[Daemon] = []
        self._directory = directory
        self._stack: Any = None
        self._events: list[DaemonEvents] = []
        self._config: dict[str, Any] = {
            "broker": {
                "kind": "kafka",
                "log_dirs": [str(behind.cluster.log_dir())],
                "bootstrap": [behind.cluster.bootstrap],
                "node_id": 1,
            },
            "state_directory": str(directory / "state"),
            "cloud_storage_enabled": True,
            "cloud_storage_enable_remote_read": True,
            "cloud_storage_backend": "file",
            "cloud_storage_file_root": str(store),
            "cloud_storage_bucket": "benchmark",
            "cloud_storage_cache_directory": str(directory / "cache"),
            "retention_local_strict": True,
            # The machine may have little space left, and the producer is not to be held back for that.
            "storage_min_free_bytes": 0,
            "topics": {TOPIC: {"remote.storage.enable": True, "local.retention.bytes": 1}},
            "gateway": behind.gateway_config,
            "admin": {"port": 0},
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop()

    def start(self) -> None:
        """Start the daemon, after ending the one that runs; its cache is empty."""
        self._stop()
        shutil.rmtree(self._directory / "cache", ignore_errors=True)
        config = write_config(self._directory / "tieringd.yaml", self._config)
        log = self._directory / f"tieringd.{len(self._events)}.log"
        self._stack = running_daemon(config, log, start=NewDaemon)
        daemon = self._stack.__enter__()
        self.running.append(daemon)
        self._events.append(DaemonEvents(daemon))
        daemon.until(lambda: daemon.status()["rounds"], "the first round is over")

    def _stop(self) -> None:
        if self._stack is not None:
            self._stack.__exit__(None, None, None)
            self._stack = None

    def durable_segments(self) -> list[SegmentName]:
        """Return the partition and base offset of each durable segment, by the log of each daemon."""
        return [one for events in self._events for one in events.durable_segments()]


def _copied(store: Path) -> list[SegmentName]:
    """Return the partition and base offset of each segment that `LocalTieredStorage` has whole."""
    found = []
    for path in store.glob(f"*/{TOPIC}-*/*{_LAST_FILE}"):
        matched = _TIERED_NAME.match(path.parent.name)
        if matched:
            found.append((int(matched[1]), int(path.name.partition("-")[0])))
    return found


def _properties(store: Path) -> Mapping[str, str]:
    """Return the broker's properties for its own tiering, with defaults where there are any."""
    return {
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.manager.class.name": (
            "org.apache.kafka.server.log.remote.storage.LocalTieredStorage"
        ),
        "remote.log.storage.manager.class.path": str(_test_jar()),
        "rsm.config.dir": str(store),
        "remote.log.metadata.manager.listener.name": "PLAINTEXT",
        "rlmm.config.remote.log.metadata.topic.replication.factor": "1",
    }


def _test_jar() -> Path:
    """
    Return Kafka's test jar with `LocalTieredStorage`, and fetch it through Maven where it is not there yet.

    Raises:
        MissingPartError: Java or Maven is not installed, or Maven failed.
    """
    jar = cache_directory() / f"kafka-{KAFKA_VERSION}-tests" / f"kafka-storage-{KAFKA_VERSION}-test.jar"
    if jar.exists():
        return jar
    jar.parent.mkdir(parents=True, exist_ok=True)
    artifact = f"org.apache.kafka:kafka-storage:{KAFKA_VERSION}:jar:test"
    # The rename is the last step, so that an existing file is always complete.
    with tempfile.TemporaryDirectory(dir=jar.parent.parent, prefix="fetching-") as temporary:
        run_maven("dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={temporary}")
        (Path(temporary) / jar.name).rename(jar)
    return jar
