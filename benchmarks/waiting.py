"""
How much memory does a daemon take while many segments of 1 GiB wait to be uploaded?

The real `tieringd run` with its defaults in front of a sink that keeps nothing, the controller held at
maximum shares. Idle is the daemon with every partition claimed and nothing to do. Then the segments are
closed, all at once, while the store is away; once the daemon knows of them the store is back, and it uploads
for a while. The highest resident memory since the closing counts. The segments are hard links to a real one,
one in each partition: every batch in them is valid, and is checked.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.backlog import MAXIMUM_SHARES, SEEN_WAITING, link_segment, sink_settings
from benchmarks.daemon_events import DaemonEvents, until
from benchmarks.segments import write_partition
from benchmarks.sink import Sink
from tests.support.daemon import NewDaemon, running_daemon, write_config

if TYPE_CHECKING:
    from benchmarks.certificate import Certificate

SEGMENT_BYTES = 1 << 30
_SEEN_SHARE = 0.9
"""Of the backlog, that the daemon has to know of: meanwhile it uploads the first ones."""
_SETTLING_SECONDS = 5.0


def write_big_segment(directory: Path) -> Path:
    """Write the segment that all partitions have."""
    (log,) = write_partition(directory, segments=1, segment_bytes=SEGMENT_BYTES)
    return log


def measure_waiting(
    root: Path, log: Path, *, segments: int, seconds: float, certificate: Certificate | None = None
) -> dict[str, float]:
    """Let the daemon upload for *seconds* from the whole backlog; return its memory, in MiB."""
    active = max(log.parent.glob("*.log"))
    for number in range(segments):
        directory = root / "log" / f"waiting-{number}"
        directory.mkdir(parents=True)
        (directory / log.name).touch()
    try:
        with Sink(certificate) as sink:
            settings = sink_settings(root, sink.endpoint, shares=MAXIMUM_SHARES)
            with running_daemon(write_config(root / "daemon.yaml", settings), start=NewDaemon) as daemon:
                events = DaemonEvents(daemon)
                until(
                    lambda: len(events.named("archiving")) == segments, daemon, "every partition is claimed"
                )
                time.sleep(_SETTLING_SECONDS)
                pid = daemon.server.pid
                # While the store is away: a daemon without a broker walks all batch headers before it knows
                # the backlog, and uploads would take the interpreter from the walk.
                sink.set_available(available=False)
                _forget_highest(pid)
                idle_mib = _memory_mib(pid, "VmRSS")
                for number in range(segments):
                    directory = root / "log" / f"waiting-{number}"
                    link_segment(log, directory)
                    (directory / active.name).touch()
                durable = "segment durable"
                until(
                    lambda: (daemon.metric(SEEN_WAITING) or 0) >= _SEEN_SHARE * segments * SEGMENT_BYTES,
                    daemon,
                    "the backlog is seen",
                )
                sink.set_available(available=True)
                until(lambda: bool(events.named(durable)), daemon, "the first segment is durable")
                time.sleep(seconds)
                uploaded = len(events.named(durable))
                highest_mib = _memory_mib(pid, "VmHWM")
                assert uploaded < segments, "the backlog ended before the measurement"
            arrived = [one.size_bytes for key, one in sink.received().items() if key.endswith(".log")]
            assert len(arrived) >= uploaded, "some segment was called durable and did not arrive"
            assert set(arrived) == {log.stat().st_size}, "some segment arrived in part"
    finally:
        shutil.rmtree(root)
    return {
        "backlog_rss_mib_above_idle": highest_mib - idle_mib,
        "idle_rss_mib": idle_mib,
        "gib_uploaded": uploaded * log.stat().st_size / (1 << 30),
    }


def _forget_highest(pid: int) -> None:
    """Let the kernel's high-water mark start anew from what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _memory_mib(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
