"""
The load of the machine: how busy its processors are, and how long tasks wait for resources.

The sources are the kernel's: the first line of `/proc/stat`, and pressure stall information (PSI) from
`/proc/pressure`. If the machine's own PSI cannot be read, the PSI of our control group is used. A kernel
without PSI leaves only the processors' time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tieringd.policies.upload_control import CPU, IO, MEMORY, HostLoad

_READ_BYTES = 4096
"""More than the size of a pressure file, and of the first line of `/proc/stat`."""
_MICROSECONDS = 1e6
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
"""Indexes of fields in the `cpu` line. The fields after `_STEAL` are contained in those before."""


@dataclass(frozen=True, slots=True)
class HostCounters:
    """The kernel's counters at one moment. Times are in seconds; None means unknown."""

    at: float
    cpu_seconds: float | None = None
    """The time of all processors, busy or idle."""
    cpu_idle_seconds: float | None = None
    cpu_waited: float | None = None
    io_waited: float | None = None
    memory_waited: float | None = None
    own_cpu_seconds: float = 0.0
    """Used by this process."""


class HostLoadReader:
    """Reads the kernel's counters. It opens its files once; `close` closes them."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._stat = _opened(proc / "stat")
        self._pressure = {name: _pressure_file(name, proc, cgroups) for name in (CPU, IO, MEMORY)}

    @property
    def has_pressure(self) -> bool:
        """Return whether the kernel reports how long tasks wait."""
        return any(file is not None for file in self._pressure.values())

    def counters(self, now: float) -> HostCounters:
        """Return the current counters. *now* is in seconds of a monotonic clock."""
        total, idle = self._processors()
        waited = (self._waited(CPU), self._waited(IO), self._waited(MEMORY))
        return HostCounters(now, total, idle, *waited, own_cpu_seconds=time.process_time())

    def close(self) -> None:
        """Close the files."""
        for file in (self._stat, *self._pressure.values()):
            if file is not None:
                os.close(file)

    def _processors(self) -> tuple[float | None, float | None]:
        text = _read(self._stat)
        fields = text.split("\n", 1)[0].split()
        if len(fields) < _STEAL + 2 or fields[0] != "cpu":
            return None, None
        seconds = [int(one) / _TICKS_PER_SECOND for one in fields[1 : _STEAL + 2]]
        return sum(seconds), seconds[_IDLE] + seconds[_IOWAIT]

    def _waited(self, name: str) -> float | None:
        """Return the "total" of the line "some", in seconds."""
        for line in _read(self._pressure[name]).splitlines():
            if line.startswith("some "):
                return float(line.rpartition("total=")[2]) / _MICROSECONDS
        return None


def load_between(earlier: HostCounters, later: HostCounters) -> HostLoad:
    """Return the load of the machine between two readings."""
    seconds = later.at - earlier.at
    if seconds <= 0:
        return HostLoad(0.0)
    total = _difference(earlier.cpu_seconds, later.cpu_seconds)
    idle = _difference(earlier.cpu_idle_seconds, later.cpu_idle_seconds)
    busy = of_others = None
    if total and idle is not None:
        busy = max(0.0, 1 - idle / total)
        of_others = max(0.0, busy - (later.own_cpu_seconds - earlier.own_cpu_seconds) / total)
    return HostLoad(
        seconds,
        busy,
        _part(_difference(earlier.cpu_waited, later.cpu_waited), seconds),
        _part(_difference(earlier.io_waited, later.io_waited), seconds),
        _part(_difference(earlier.memory_waited, later.memory_waited), seconds),
        of_others,
    )


def sum_of(loads: Sequence[HostLoad]) -> HostLoad:
    """
    Return the mean load over all of *loads*, weighted by time.

    A part unknown in one of them is unknown.
    """
    seconds = sum(one.seconds for one in loads)
    if not seconds:
        return HostLoad(0.0)

    def mean(part: Callable[[HostLoad], float | None]) -> float | None:
        weighted = [(value, one.seconds) for one in loads if (value := part(one)) is not None]
        if len(weighted) < len(loads):
            return None
        return sum(value * weight for value, weight in weighted) / seconds

    return HostLoad(
        seconds,
        mean(lambda one: one.cpu_busy),
        mean(lambda one: one.cpu_waiting),
        mean(lambda one: one.io_waiting),
        mean(lambda one: one.memory_waiting),
        mean(lambda one: one.cpu_of_others),
    )


def _difference(earlier: float | None, later: float | None) -> float | None:
    # Idle time can seem to go back a little when a processor wakes up.
    return None if earlier is None or later is None else max(0.0, later - earlier)


def _part(waited: float | None, seconds: float) -> float | None:
    return None if waited is None else min(1.0, waited / seconds)


def _opened(path: Path) -> int | None:
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _pressure_file(name: str, proc: Path, cgroups: Path) -> int | None:
    """Return an open file of the machine's pressure, or else of our control group's; None without both."""
    own = _read_path(proc / "self" / "cgroup").partition("0::/")[2].split("\n", 1)[0]
    for path in (proc / "pressure" / name, cgroups / own / f"{name}.pressure"):
        file = _opened(path)
        if file is not None:
            if _read(file):
                return file
            os.close(file)  # With PSI disabled, the kernel has the file, and refuses to read it.
    return None


def _read_path(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _read(file: int | None) -> str:
    if file is None:
        return ""
    with suppress(OSError):
        return os.pread(file, _READ_BYTES, 0).decode()
    return ""
