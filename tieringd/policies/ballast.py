"""
The ballast file: when it is let go, and when there is room for it again.

It is made only where the disk would be all right with it, so that it never is what fills the
disk, and what was let go does not come back at once.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from tieringd.model.disk_state import DiskState
from tieringd.policies.disk_alert import judge_disk

if TYPE_CHECKING:
    from tieringd.policies.disk_alert import AlertSettings, DiskReading


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

    *releases* lets the ballast go by itself when the disk is degraded.
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
    """Say whether a disk would be all right with *more_bytes* on it, and not low at the next breath."""
    after = replace(reading, free_bytes=reading.free_bytes - more_bytes)
    return judge_disk(after, settings, previous=DiskState.DEGRADED).state is DiskState.OK
