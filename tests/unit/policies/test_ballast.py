"""The ballast: when it is let go, and when there is room for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.model.disk_state import DiskState
from tieringd.policies.disk_alert import AlertSettings, BallastAction, DiskReading, judge_disk, plan_ballast

SETTINGS = AlertSettings(alert_free_bytes=0, alert_free_percent=5, min_free_bytes=20)
SIZE = 100
"""On a disk of 1000: low at 50, and not low any more above 55."""


def plan(free, held=0, *, state=DiskState.OK, releases=True, size=SIZE):
    reading = DiskReading("/d", total_bytes=1000, free_bytes=free)
    return plan_ballast(reading, SETTINGS, state=state, held_bytes=held, size_bytes=size, releases=releases)


@pytest.mark.parametrize(
    ("free", "held", "state", "releases", "expected"),
    [
        (1000, 0, DiskState.OK, True, BallastAction.CREATE),
        (156, 0, DiskState.OK, True, BallastAction.CREATE),
        (155, 0, DiskState.OK, True, BallastAction.NOTHING),
        (106, 50, DiskState.OK, True, BallastAction.CREATE),
        (105, 50, DiskState.OK, True, BallastAction.NOTHING),
        (60, 150, DiskState.OK, True, BallastAction.CREATE),
        (900, SIZE, DiskState.OK, True, BallastAction.NOTHING),
        (900, 0, DiskState.LOW, True, BallastAction.NOTHING),
        (40, SIZE, DiskState.LOW, True, BallastAction.NOTHING),
        (10, SIZE, DiskState.DEGRADED, True, BallastAction.RELEASE),
        (10, 1, DiskState.DEGRADED, True, BallastAction.RELEASE),
        (10, 0, DiskState.DEGRADED, True, BallastAction.NOTHING),
        (10, SIZE, DiskState.DEGRADED, False, BallastAction.NOTHING),
    ],
)
def test_ballast_plan(free, held, state, releases, expected):
    """The ballast is made if the disk has room for it, and goes only from a degraded disk, if it may."""
    assert plan(free, held, state=state, releases=releases) is expected


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_ballast_that_is_made_never_makes_its_disk_low(free, size):
    """A disk that has room for the ballast is still all right once the ballast is on it."""
    if plan(free, size=size) is BallastAction.CREATE:
        after = DiskReading("/d", total_bytes=1000, free_bytes=free - size)
        for previous in DiskState:
            assert judge_disk(after, SETTINGS, previous=previous).state is DiskState.OK
