"""Disk alerts: the state of a disk, how it is left again, and the line that says so."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.model.disk_state import DiskState
from tieringd.policies.disk_alert import (
    AlertSettings,
    DiskReading,
    DiskVerdict,
    alert_line,
    cache_min_free_bytes,
    judge_disk,
)

OK, LOW, DEGRADED = DiskState
GIB = 1 << 30


def judge(free, *, previous=OK, total=1000, alert_bytes=0, percent=10.0, min_free=50) -> tuple[int, int]:
    settings = AlertSettings(alert_bytes, percent, min_free)
    found = judge_disk(DiskReading("/data", total, free), settings, previous=previous)
    return found.state, found.threshold_bytes


@pytest.mark.parametrize(
    ("free", "settings", "expected"),
    [
        pytest.param(101, {}, (OK, 0), id="above the percentage"),
        pytest.param(100, {}, (LOW, 100), id="at the percentage"),
        pytest.param(51, {}, (LOW, 100), id="above degraded"),
        pytest.param(50, {}, (DEGRADED, 50), id="at degraded"),
        pytest.param(0, {}, (DEGRADED, 50), id="full"),
        pytest.param(120, {"alert_bytes": 120}, (LOW, 120), id="bytes are the larger"),
        pytest.param(121, {"alert_bytes": 120}, (OK, 0), id="above the larger"),
        pytest.param(100, {"alert_bytes": 90}, (LOW, 100), id="the percentage is the larger"),
        pytest.param(101, {"alert_bytes": 90}, (OK, 0), id="above that"),
        pytest.param(80, {"alert_bytes": 80, "percent": 0}, (LOW, 80), id="no percentage"),
        pytest.param(81, {"alert_bytes": 80, "percent": 0}, (OK, 0), id="no percentage, above"),
        pytest.param(51, {"percent": 0}, (OK, 0), id="neither: never low"),
        pytest.param(50, {"percent": 0}, (DEGRADED, 50), id="neither: degraded all the same"),
        pytest.param(150, {"min_free": 150}, (DEGRADED, 150), id="small disk: degraded before low"),
        pytest.param(151, {"min_free": 150}, (OK, 0), id="small disk: above both"),
        pytest.param(2000, {"min_free": 5000}, (DEGRADED, 5000), id="disk smaller than the threshold"),
        pytest.param(0, {"percent": 0, "min_free": 0}, (DEGRADED, 0), id="all off, and full"),
        pytest.param(1, {"percent": 0, "min_free": 0}, (OK, 0), id="all off"),
    ],
)
def test_state_is_that_of_the_documented_thresholds(free, settings, expected):
    """Low is at the larger of bytes and percent, degraded at its own threshold, and degraded wins."""
    assert judge(free, **settings) == expected


@pytest.mark.parametrize(
    ("previous", "free", "expected"),
    [
        pytest.param(LOW, 110, (LOW, 110), id="low is kept a tenth above"),
        pytest.param(LOW, 111, (OK, 0), id="low is left"),
        pytest.param(LOW, 51, (LOW, 110), id="degraded is not entered early"),
        pytest.param(LOW, 50, (DEGRADED, 50), id="low gets worse at once"),
        pytest.param(DEGRADED, 55, (DEGRADED, 55), id="degraded is kept a tenth above"),
        pytest.param(DEGRADED, 56, (LOW, 110), id="degraded becomes low"),
        pytest.param(DEGRADED, 110, (LOW, 110), id="and is low as long as one that was"),
        pytest.param(DEGRADED, 111, (OK, 0), id="and is left"),
        pytest.param(OK, 101, (OK, 0), id="nothing is entered early"),
    ],
)
def test_state_is_left_only_with_a_margin(previous, free, expected):
    """A state ends when free space is more than a tenth above its threshold."""
    assert judge(free, previous=previous) == expected


def test_disk_that_hovers_at_a_threshold_does_not_flap():
    """Free space that goes up and down by a few bytes changes the state once."""
    states, previous = [], OK
    for free in [104, 99, 103, 98, 106, 97, 105, 100]:
        previous = DiskState(judge(free, previous=previous)[0])
        states.append(previous)
    assert states == [OK] + [LOW] * 7


@pytest.mark.parametrize("previous", DiskState)
def test_filesystem_without_a_size_keeps_its_state(previous):
    """Zero bytes in all say nothing of how full a disk is."""
    assert judge(0, total=0, previous=previous) == (previous, 0)


@given(
    total=st.integers(1, 2**45),
    free=st.integers(0, 2**45),
    more=st.integers(0, 2**45),
    alert_bytes=st.integers(0, 2**45),
    percent=st.floats(0, 50, allow_subnormal=False),
    min_free=st.integers(0, 2**45),
    previous=st.sampled_from(DiskState),
)
def test_state_is_never_worse_with_more_free_space(
    *, total, free, more, alert_bytes, percent, min_free, previous
):
    """More free space, or a better state before, never makes a state worse. A repetition changes nothing."""
    facts = {"total": total, "alert_bytes": alert_bytes, "percent": percent, "min_free": min_free}
    state, threshold = judge(free, previous=previous, **facts)
    assert judge(free + more, previous=previous, **facts)[0] <= state
    assert judge(free, previous=OK, **facts)[0] <= state <= max(previous, judge(free, **facts)[0])
    assert judge(free, previous=DiskState(state), **facts)[0] == state
    assert (free <= threshold) == (state is not OK)


def line(free, verdict, *, total) -> str:
    return alert_line(DiskReading("/var/lib/kafka", total, free), verdict)


def test_alert_line_is_the_documented_one():
    """Every figure of the documents' own line comes out as there."""
    found = line(round(24.739 * GIB), DiskVerdict(LOW, 0), total=round(96.732 * GIB))
    assert found == (
        "storage space alert: free space at 25.575% on /var/lib/kafka: 96.732GiB total, 24.739GiB free, "
        "min. free 0.000bytes. Be sure to adjust retention policies as needed to avoid running out of space."
    )


def test_alert_line_of_a_degraded_disk_says_how_writes_come_back():
    """A degraded disk's line names the degraded threshold, and what the operator gets for it."""
    found = line(4 * GIB, DiskVerdict(DEGRADED, 5 * GIB), total=2048 * GIB)
    assert found == (
        "storage space alert: free space at 0.195% on /var/lib/kafka: 2.000TiB total, 4.000GiB free, "
        "min. free 5.000GiB. Be sure to adjust retention policies as needed to allow writing again."
    )


@pytest.mark.parametrize(
    ("free", "settings", "threshold"),
    [
        pytest.param(100, {}, "100.000bytes", id="the percentage"),
        pytest.param(100, {"alert_bytes": 120}, "120.000bytes", id="the bytes"),
        pytest.param(50, {"alert_bytes": 120}, "50.000bytes", id="degraded"),
        pytest.param(105, {"previous": LOW}, "110.000bytes", id="kept by the margin"),
    ],
)
def test_alert_line_has_the_threshold_of_the_decision(free, settings, threshold):
    """The threshold in the line is the one that made the state, not another one."""
    state, decided_by = judge(free, **settings)
    found = line(free, DiskVerdict(DiskState(state), decided_by), total=1000)
    assert re.search(r"min\. free (\S+)\. Be", found)[1] == threshold


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0.000bytes"),
        (1023, "1023.000bytes"),
        (1024, "1.000KiB"),
        (5 << 20, "5.000MiB"),
        (GIB - 1, "1024.000MiB"),
        (1536 << 30, "1.500TiB"),
        (3 << 50, "3.000PiB"),
        (3 << 60, "3072.000PiB"),
    ],
)
def test_alert_line_shows_sizes_with_a_unit(size_bytes, text):
    """Sizes have three digits after the point and the largest unit that fits."""
    assert f": {text} total," in line(0, DiskVerdict(LOW, 1), total=size_bytes)


def test_alert_line_of_a_filesystem_without_a_size_is_a_line():
    """Zero bytes in all are shown as no free space."""
    assert line(0, DiskVerdict(LOW, 0), total=0).startswith("storage space alert: free space at 0.000% on")


@given(st.integers(10, 1 << 62))
def test_cache_leaves_more_free_than_ends_the_degraded_state(min_free):
    """A disk that was degraded is so no longer, some bytes before the cache stops to give way."""
    free = cache_min_free_bytes(min_free)
    assert judge(free, previous=DEGRADED, percent=0, min_free=min_free)[0] == OK
    assert judge(min_free + min_free // 10, previous=DEGRADED, percent=0, min_free=min_free)[0] == DEGRADED
