"""
Disk alerts: is a disk all right, low on space, or so full that writes must be refused?

A state is entered when free space is at or below its threshold, and left only when free space is
more than a tenth above it: a disk that hovers at a threshold does not flap. Degraded wins over
low, also on small disks where its threshold is the higher one.

This module judges one disk from one reading. Who is told, how often a line is written and what
degraded mode does are not its business.
"""

from __future__ import annotations

from dataclasses import dataclass

from tieringd.model.disk_state import DiskState

_MARGINS_IN_THRESHOLD = 10
"""A state is left when free space is above its threshold by this part of it."""
_UNIT_STEP = 1024


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """When a disk is low, and when it is degraded."""

    alert_free_bytes: int
    """`storage_space_alert_free_threshold_bytes`; 0 leaves it to the percentage."""
    alert_free_percent: float
    """`storage_space_alert_free_threshold_percent`, of the whole disk; 0 leaves it to the bytes."""
    min_free_bytes: int
    """`storage_min_free_bytes`: at or below it the disk is degraded."""


@dataclass(frozen=True, slots=True)
class DiskReading:
    """One look at a disk."""

    path: str
    total_bytes: int
    free_bytes: int
    """What the broker can still write: without the part that is kept for the superuser."""


@dataclass(frozen=True, slots=True)
class DiskVerdict:
    """A disk's state, and the threshold that decided it."""

    state: DiskState
    threshold_bytes: int
    """The state ends when free space is above this; 0 for a disk that is all right."""


def judge_disk(
    reading: DiskReading, settings: AlertSettings, *, previous: DiskState = DiskState.OK
) -> DiskVerdict:
    """
    Return the state of a disk that was in the state *previous* at the last look.

    A filesystem that says it has no size cannot be judged, and keeps its state.
    """
    if reading.total_bytes <= 0:
        return DiskVerdict(previous, 0)
    alert_bytes = max(settings.alert_free_bytes, int(reading.total_bytes * settings.alert_free_percent / 100))
    degraded_to = _ends_at(settings.min_free_bytes, is_held=previous >= DiskState.DEGRADED)
    if reading.free_bytes <= degraded_to:
        return DiskVerdict(DiskState.DEGRADED, degraded_to)
    low_to = _ends_at(alert_bytes, is_held=previous >= DiskState.LOW)
    if reading.free_bytes <= low_to:
        return DiskVerdict(DiskState.LOW, low_to)
    return DiskVerdict(DiskState.OK, 0)


def alert_line(reading: DiskReading, verdict: DiskVerdict) -> str:
    """Return the log line for a disk that is low or degraded, with the threshold that decided it."""
    free_percent = 100 * reading.free_bytes / reading.total_bytes if reading.total_bytes > 0 else 0.0
    is_degraded = verdict.state is DiskState.DEGRADED
    return (
        f"storage space alert: free space at {free_percent:.3f}% on {reading.path}: "
        f"{_size(reading.total_bytes)} total, {_size(reading.free_bytes)} free, "
        f"min. free {_size(verdict.threshold_bytes)}. Be sure to adjust retention policies as needed to "
        f"{'allow writing again' if is_degraded else 'avoid running out of space'}."
    )


def _ends_at(threshold_bytes: int, *, is_held: bool) -> int:
    return threshold_bytes + (threshold_bytes // _MARGINS_IN_THRESHOLD if is_held else 0)


def _size(size_bytes: float) -> str:
    """Return a size as the line has always shown it: `24.739GiB`, `0.000bytes`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < _UNIT_STEP:
            return f"{size_bytes:.3f}{unit}"
        size_bytes /= _UNIT_STEP
    return f"{size_bytes:.3f}PiB"
