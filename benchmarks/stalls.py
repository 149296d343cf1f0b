"""
How long does the daemon's event loop stand still while cold files are uploaded?

The files' pages are dropped from the page cache before each round, so that reading them waits for the
disk. A ticker on the loop of the daemon's own assembly notes the longest time by which a wake-up came
late. The same ticker on an idle loop tells how much of that is the machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import Tieringd
from benchmarks.sink import Sink
from tieringd.daemon.garbage_collection import long_lived_objects_spared

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.certificate import Certificate
    from benchmarks.turns import Work

_TICK_SECONDS = 0.002
_IDLE_SECONDS = 1.0


class WatchedTieringd(Tieringd):
    """The daemon's upload path, with a ticker beside it."""

    longest_ms = 0.0

    async def _copy(self) -> None:
        ticking = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        try:
            await super()._copy()
        finally:
            ticking.cancel()

    def idle(self) -> None:
        """Tick for a while with nothing else to do."""

        async def tick() -> None:
            ticking = asyncio.create_task(self._tick())
            await asyncio.sleep(_IDLE_SECONDS)
            ticking.cancel()

        self._runner.run(tick())

    async def _tick(self) -> None:
        clock = time.perf_counter  # uvloop's own clock counts whole milliseconds.
        before = clock()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = clock()
            self.longest_ms = max(self.longest_ms, (now - before - _TICK_SECONDS) * 1000)
            before = now


def measure_stalls(work: Work, *, certificate: Certificate | None = None) -> dict[str, float]:
    """Return the longest stall in the rounds, that of an idle loop, and how much was read from the disk."""
    with Sink(certificate) as sink:
        daemon = WatchedTieringd(work.log_dir, sink.endpoint)
        try:
            daemon.upload()  # Connections, and what is only loaded with the first use.
            daemon.longest_ms = 0.0
            daemon.idle()
            idle_ms = daemon.longest_ms
            read_before = _read_from_disk()
            stalls_ms = []
            with long_lived_objects_spared():  # As the daemon does, once it has reached the store.
                for _ in range(work.rounds):
                    make_cold(work.logs)
                    daemon.longest_ms = 0.0
                    daemon.upload()
                    stalls_ms.append(daemon.longest_ms)
            was_cold = (_read_from_disk() - read_before) / sum(path.stat().st_size for path in work.logs)
        finally:
            daemon.close()
    return {
        "loop_stall_ms": max(stalls_ms),
        "loop_stall_ms_least_of_rounds": min(stalls_ms),
        "idle_loop_stall_ms": idle_ms,
        "share_read_from_disk": was_cold / work.rounds,
    }


def make_cold(paths: Iterable[Path]) -> None:
    """Drop the files' pages from the page cache; those not yet on the disk are written first."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _read_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
