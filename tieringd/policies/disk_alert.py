"""
Disk alerts: is a disk all right, low on space, or so full that writes must be refused?

A state is entered when free space is at or below its threshold, and left only when free space is more
than a tenth above it: a disk that hovers at a threshold does not flap. Degraded wins over low, also on
small disks where its threshold is the higher one.

This module judges one disk from one reading. It does not decide who is notified, how often a line is
logged, or what degraded mode does.

Two decisions follow from a verdict. `plan_ballast` decides when the ballast file is deleted, and when
there is room for it again: it is created only where the disk would be all right with it, so it never
fills the disk, and does not come back at once.

`degraded_nodes`, `plan_lowering` and `plan_additions` decide which broker of the cluster acts, and which
producers' quotas are lowered and restored. A quota limits clients' writes and leaves replication alone. Kafka
takes the most specific quota that matches a client, so lowering the default is not enough: each quota that
takes precedence over it, and allows more, is lowered as well. A quota that is lower already stays as it is. A
quota that an operator sets meanwhile stays too: a quota is restored only while it still has the value that
tieringd set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from tieringd.model.disk_state import EVERY_PRODUCER, DiskState, QuotaChange, QuotaEntity

_MARGINS_IN_THRESHOLD = 10
"""A state is left when free space is above its threshold by one such part of it."""
_UNIT_STEP = 1024


def degraded_nodes(states: Mapping[int, DiskState]) -> tuple[int, ...]:
    """Return the brokers that are known to be degraded, ascending: in this order their daemons may act."""
    return tuple(sorted(node for node, state in states.items() if state is DiskState.DEGRADED))


def plan_lowering(current: Mapping[QuotaEntity, float], rate: int) -> tuple[QuotaChange, ...]:
    """Return the quotas to lower so that no producer may write more than *rate*."""
    found = {entity: value for entity, value in current.items() if _goes_first(entity) and value > rate}
    changes = [QuotaChange(entity, value) for entity, value in sorted(found.items(), key=_by_name)]
    if EVERY_PRODUCER not in current:
        changes.append(QuotaChange(EVERY_PRODUCER, None))
    return tuple(changes)


def plan_additions(
    changes: Iterable[QuotaChange], current: Mapping[QuotaEntity, float], rate: int
) -> tuple[QuotaChange, ...]:
    """Return the quotas that were added since *changes* were recorded, and must be lowered as well."""
    known = {change.entity for change in changes}
    return tuple(one for one in plan_lowering(current, rate) if one.entity not in known)


def still_to_lower(
    changes: Iterable[QuotaChange], current: Mapping[QuotaEntity, float], rate: int
) -> dict[QuotaEntity, float | None]:
    """Return the quotas to set to *rate*: those that still have their previous value."""
    return {one.entity: rate for one in changes if current.get(one.entity) == one.previous}


def still_to_restore(
    changes: Iterable[QuotaChange], current: Mapping[QuotaEntity, float], rate: int
) -> dict[QuotaEntity, float | None]:
    """Return the quotas to restore: those still at *rate*. None removes a quota."""
    return {one.entity: one.previous for one in changes if current.get(one.entity) == rate}


def _goes_first(entity: QuotaEntity) -> bool:
    """Say whether Kafka prefers an entity's quota to that of every producer, or it is that quota."""
    kinds = dict(entity.parts)
    return "user" in kinds and (kinds["user"] is not None or "client-id" in kinds)


def _by_name(item: tuple[QuotaEntity, float]) -> str:
    return str(item[0])


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """The thresholds of free space at which a disk is low, or degraded."""

    alert_free_bytes: int
    """`storage_space_alert_free_threshold_bytes`; 0 leaves it to the percentage."""
    alert_free_percent: float
    """`storage_space_alert_free_threshold_percent`, of the whole disk; 0 leaves it to the bytes."""
    min_free_bytes: int
    """`storage_min_free_bytes`: at or below it the disk is degraded."""


@dataclass(frozen=True, slots=True)
class DiskReading:
    """One measurement of a disk."""

    path: str
    total_bytes: int
    free_bytes: int
    """Free bytes for the broker, without the part reserved for the superuser."""


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
    Return the state of a disk that was in the state *previous* at the last reading.

    A filesystem that reports no size cannot be judged, and keeps its state.
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


def cache_min_free_bytes(min_free_bytes: int) -> int:
    """
    Return how many bytes of its disk the chunk cache leaves free.

    That is one margin more than ends the degraded state. So the cache gives way before producers are held
    back, and no disk stays degraded because of files that may go. *min_free_bytes* is
    `storage_min_free_bytes`.
    """
    return min_free_bytes + 2 * (min_free_bytes // _MARGINS_IN_THRESHOLD)


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
    """Return a size in the line's established format: `24.739GiB`, `0.000bytes`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < _UNIT_STEP:
            return f"{size_bytes:.3f}{unit}"
        size_bytes /= _UNIT_STEP
    return f"{size_bytes:.3f}PiB"


class BallastAction(Enum):
    """What to do with the ballast file."""

    NOTHING = "nothing"
    CREATE = "create"
    RELEASE = "release"


def plan_ballast(
    reading: DiskReading,
    settings: AlertSettings,
    *,
    state: DiskState,
    held_bytes: int,
    size_bytes: int,
    releases: bool,
) -> BallastAction:
    """
    Return what to do on a disk in this *state*, with *held_bytes* of the ballast on it.

    *releases* lets the ballast file be deleted automatically when the disk is degraded.
    """
    if state is DiskState.DEGRADED and held_bytes and releases:
        return BallastAction.RELEASE
    if held_bytes == size_bytes or state is not DiskState.OK:
        return BallastAction.NOTHING
    return (
        BallastAction.CREATE
        if has_room(reading, settings, size_bytes - held_bytes)
        else BallastAction.NOTHING
    )


def has_room(reading: DiskReading, settings: AlertSettings, more_bytes: int) -> bool:
    """Say whether a disk would be all right with *more_bytes* on it, with the margin against flapping."""
    after = replace(reading, free_bytes=reading.free_bytes - more_bytes)
    return judge_disk(after, settings, previous=DiskState.DEGRADED).state is DiskState.OK
