"""
How many processors this process may use.

A container or a systemd unit often has fewer than the host: by an affinity mask, or by a quota of CPU time
that a control group sets. What is sized for each processor goes by the smaller number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_processors(*, root: Path = _ROOT, own: Path = _OWN) -> int:
    """
    Return the number of processors that this process may use, at least 1.

    It is the smallest of the affinity mask and the CPU quotas of the process's control group and of those
    above it; a part of a processor counts as a whole one. *root* is where control groups are mounted, and
    *own* the file that names the process's own. What cannot be read sets no limit.
    """
    return max(1, min([_affinity(), *_quotas(root, own)]))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path, own: Path) -> Iterator[int]:
    """Yield the limit of each control group that has one, in processors."""
    for line in _read(own).splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        # Version 2 has one hierarchy without a name; version 1 has one for each controller.
        if not controllers:
            yield from _quotas_above(root, path, _quota_of_version_2)
        elif "cpu" in controllers.split(","):
            yield from _quotas_above(root / "cpu", path, _quota_of_version_1)


def _quotas_above(top: Path, path: str, quota_of: Callable[[Path], int | None]) -> Iterator[int]:
    """Yield the limits from the group *path* up to *top*. In a container *top* may be the group itself."""
    names = [name for name in path.split("/") if name and name != ".."]
    for count in range(len(names), -1, -1):
        limit = quota_of(top.joinpath(*names[:count]))
        if limit is not None:
            yield limit


def _quota_of_version_2(group: Path) -> int | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return _processors(quota, period)


def _quota_of_version_1(group: Path) -> int | None:
    return _processors(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _processors(quota: str, period: str) -> int | None:
    """Return how many processors *quota* of each *period* is; None for no limit: `max`, -1, or nothing."""
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:
        return None
    return math.ceil(quota_us / period_us) if quota_us > 0 and period_us > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
