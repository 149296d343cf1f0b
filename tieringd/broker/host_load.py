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


def growth_between(earlier: HostCounters, later: HostCounters) -> HostCounters:
    """Return by how much each counter has grown; `at` holds the seconds between the two readings."""
    return HostCounters(
        max(0.0, later.at - earlier.at),
        _difference(earlier.cpu_seconds, later.cpu_seconds),
        _difference(earlier.cpu_idle_seconds, later.cpu_idle_seconds),
        _difference(earlier.cpu_waited, later.cpu_waited),
        _difference(earlier.io_waited, later.io_waited),
        _difference(earlier.memory_waited, later.memory_waited),
        max(0.0, later.own_cpu_seconds - earlier.own_cpu_seconds),
    )


def sum_of(growths: Sequence[HostCounters]) -> HostCounters:
    """
    Return the growth of the counters in several intervals together.

    A counter unknown in one of them is unknown. The kernel counts processors' time in ticks of 10 ms, so an
    interval may have none: it says nothing by itself, and adds its part to the others.
    """

    def together(counter: Callable[[HostCounters], float | None]) -> float | None:
        known = [value for one in growths if (value := counter(one)) is not None]
        return sum(known) if known and len(known) == len(growths) else None

    return HostCounters(
        sum(one.at for one in growths),
        together(lambda one: one.cpu_seconds),
        together(lambda one: one.cpu_idle_seconds),
        together(lambda one: one.cpu_waited),
        together(lambda one: one.io_waited),
        together(lambda one: one.memory_waited),
        sum(one.own_cpu_seconds for one in growths),
    )


def load_of(growth: HostCounters) -> HostLoad:
    """Return the load of the machine in the intervals in which its counters have grown by *growth*."""
    seconds, total, idle = growth.at, growth.cpu_seconds, growth.cpu_idle_seconds
    if seconds <= 0:
        return HostLoad(0.0)
    busy = of_others = None
    if total and idle is not None:
        busy = max(0.0, 1 - idle / total)
        of_others = max(0.0, busy - growth.own_cpu_seconds / total)
    return HostLoad(
        seconds,
        busy,
        _part(growth.cpu_waited, seconds),
        _part(growth.io_waited, seconds),
        _part(growth.memory_waited, seconds),
        of_others,
    )


def load_between(earlier: HostCounters, later: HostCounters) -> HostLoad:
    """Return the load of the machine between two readings."""
    return load_of(growth_between(earlier, later))


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
