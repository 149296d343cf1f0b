"""Loss: how long until the broker's own retention deletes what is not durable."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log
from tieringd.policies.upload_plan import rescue_due_ms, seconds_to_loss

WEEK_MS = 7 * 86_400_000


def log_of(bases, *, sizes=None, age_ms=0):
    """Return a log whose segments were all written *age_ms* before TIME_MS."""
    log = local_log(bases, sizes=sizes)
    modified_ns = (TIME_MS - age_ms) * 1_000_000
    return replace(log, segments=tuple(replace(each, modified_ns=modified_ns) for each in log.segments))


def left(
    log, *, next_offset=0, retention_ms=None, retention_bytes=None, now_ms=TIME_MS, log_end_offset=None
) -> float:
    """Return the seconds left, with nothing in the active segment unless *log_end_offset* says so."""
    active = log.segments[-1].base_offset if log.segments else 0
    return seconds_to_loss(
        log,
        next_offset=next_offset,
        log_end_offset=active if log_end_offset is None else log_end_offset,
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        now_ms=now_ms,
    )


@pytest.mark.parametrize(
    ("age_ms", "expected"),
    [
        pytest.param(0, 604_800.0, id="new"),
        pytest.param(1, 604_799.999, id="a millisecond old"),
        pytest.param(WEEK_MS - 1, 0.001, id="the last millisecond"),
        pytest.param(WEEK_MS, 0.0, id="due"),
        pytest.param(2 * WEEK_MS, 0.0, id="overdue"),
    ],
)
def test_loss_by_time_comes_when_the_file_is_as_old_as_retention(age_ms, expected):
    """The time left is retention less the file's age, and never negative."""
    assert left(log_of([0, 10], age_ms=age_ms), retention_ms=WEEK_MS) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("next_offset", "ages_ms", "expected"),
    [
        pytest.param(0, [900, 800, 700], 0.1, id="the first"),
        pytest.param(9, [900, 800, 700], 0.1, id="the first, but for one offset durable"),
        pytest.param(10, [900, 800, 700], 0.2, id="the second"),
        pytest.param(15, [900, 800, 700], 0.2, id="the second, in part durable"),
        pytest.param(20, [900, 800, 700], math.inf, id="none that is closed"),
        pytest.param(25, [900, 800, 700], math.inf, id="none at all"),
    ],
)
def test_loss_is_that_of_the_oldest_closed_segment_that_is_not_durable(next_offset, ages_ms, expected):
    """Durable segments may go, and an active one without records has nothing to lose."""
    log = local_log([0, 10, 20])
    segments = tuple(
        replace(each, modified_ns=(TIME_MS - age_ms) * 1_000_000)
        for each, age_ms in zip(log.segments, ages_ms, strict=True)
    )
    found = left(replace(log, segments=segments), next_offset=next_offset, retention_ms=1000)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("retention_bytes", "next_offset", "expected"),
    [
        pytest.param(700, 0, math.inf, id="as much as there is"),
        pytest.param(601, 0, math.inf, id="one byte less would be left"),
        pytest.param(600, 0, 0.0, id="exactly as much is left without the first"),
        pytest.param(600, 10, math.inf, id="the first is durable"),
        pytest.param(400, 10, 0.0, id="without the first two"),
        pytest.param(401, 10, math.inf, id="one byte less would be left without two"),
        pytest.param(0, 20, 0.0, id="nothing stays"),
        pytest.param(0, 30, math.inf, id="but the active one does"),
    ],
)
def test_loss_by_size_comes_when_enough_would_be_left(retention_bytes, next_offset, expected):
    """A segment goes from the head while at least `retention.bytes` remain, as in Kafka."""
    log = log_of([0, 10, 20, 30], sizes={0: 100, 10: 200, 20: 300, 30: 100})
    assert left(log, next_offset=next_offset, retention_bytes=retention_bytes) == expected


def test_loss_comes_by_whichever_limit_is_first():
    """A size that is passed goes before time that is left; one that is far away leaves it to time."""
    log = log_of([0, 10], age_ms=400)
    assert left(log, retention_ms=1000, retention_bytes=1024) == 0.0
    assert left(log, retention_ms=1000, retention_bytes=10**6) == pytest.approx(0.6)


def grown(*segments, active_bytes=0):
    """Return a log of closed segments, each with its size and the minutes since it was closed."""
    bases = [10 * number for number in range(len(segments) + 1)]
    sizes = dict(zip(bases, [*(size for size, _ in segments), active_bytes], strict=True))
    log = local_log(bases, sizes=sizes)
    minutes = [*(age for _, age in segments), 0]
    closed = tuple(
        replace(each, modified_ns=(TIME_MS - age * 60_000) * 1_000_000)
        for each, age in zip(log.segments, minutes, strict=True)
    )
    return replace(log, segments=closed)


@pytest.mark.parametrize(
    ("log", "retention_bytes", "expected"),
    [
        # 600 bytes are left without the first segment, and another 400 come at 10 bytes a minute.
        pytest.param(grown((100, 60), (300, 30), active_bytes=300), 1000, 40 * 60, id="the pace of an hour"),
        pytest.param(grown((100, 60), (300, 30), active_bytes=300), 601, 6, id="a byte is left"),
        pytest.param(grown((100, 60), (300, 30), active_bytes=300), 600, 0, id="none is left"),
        pytest.param(
            grown((100, 500), (100, 60), (100, 30), active_bytes=500), 1000, 30 * 60, id="no longer than that"
        ),
        pytest.param(grown((100, 10), active_bytes=100), 1000, 90 * 60, id="a log that is younger"),
        pytest.param(grown((100, 0.05), active_bytes=100), 1000, 9 * 60, id="a burst counts as a minute"),
        pytest.param(grown((100, 500)), 1000, math.inf, id="nothing was written since"),
        pytest.param(grown((100, -5), active_bytes=100), 1000, math.inf, id="a time in the future"),
    ],
)
def test_loss_by_size_comes_at_the_pace_of_the_log(log, retention_bytes, expected):
    """The bytes of the last hour tell how long it takes until enough has come to let the first segment go."""
    found = left(log, retention_bytes=retention_bytes, log_end_offset=1000)
    assert found == pytest.approx(expected)


def test_loss_by_size_is_an_estimate_that_may_come_before_that_by_time():
    """The nearer of both counts."""
    log = grown((100, 60), (300, 30), active_bytes=300)
    assert left(log, retention_bytes=1000, retention_ms=2 * 3_600_000) == pytest.approx(2400)
    assert left(log, retention_bytes=1000, retention_ms=3_600_000 + 5000) == pytest.approx(5)


@pytest.mark.parametrize("log", [log_of([]), log_of([20]), log_of([0, 10], age_ms=10**12)])
def test_loss_never_comes_without_a_limit(log):
    """Retention without limit deletes nothing, however old."""
    assert left(log) == math.inf


@pytest.mark.parametrize("bases", [[], [20]])
def test_loss_never_comes_where_there_is_no_record(bases):
    """An empty log, or an empty active segment, has nothing to lose, whatever the limits say."""
    log = log_of(bases, age_ms=10**9)
    assert left(log, next_offset=20, retention_ms=0, retention_bytes=0) == math.inf


@pytest.mark.parametrize(
    ("next_offset", "expected"),
    [
        pytest.param(20, 0.6, id="all of it"),
        pytest.param(24, 0.6, id="the rest of it"),
        pytest.param(25, math.inf, id="nothing"),
    ],
)
def test_loss_by_time_takes_the_active_segment_as_well(next_offset, expected):
    """Kafka closes and deletes the active segment in one go when its newest record expires."""
    log = log_of([0, 20], age_ms=400)
    found = left(log, next_offset=next_offset, log_end_offset=25, retention_ms=1000)
    assert found == pytest.approx(expected)


def test_loss_by_size_never_takes_the_active_segment():
    """The active segment stays, however small the limit is."""
    assert left(log_of([20], age_ms=10**9), log_end_offset=25, retention_bytes=0) == math.inf


def test_rescue_is_due_halfway_from_the_last_record_to_its_deletion():
    """Half of the retention is left at that time for a store that is away."""
    log = log_of([0, 20], age_ms=400)
    assert rescue_due_ms(log, retention_ms=1000) == TIME_MS - 400 + 500


@pytest.mark.parametrize(
    ("log", "retention_ms"),
    [
        pytest.param(log_of([0, 20]), None, id="retention without limit"),
        pytest.param(log_of([]), 1000, id="no segment"),
        pytest.param(replace(log_of([0, 20]), segments=log_of([0, 20]).segments[:1]), 1000, id="none active"),
    ],
)
def test_rescue_is_never_due_where_nothing_active_expires(log, retention_ms):
    """No rescue is due without a limit in time, and none without an active segment."""
    assert rescue_due_ms(log, retention_ms=retention_ms) == math.inf


@given(
    next_offset=st.integers(0, 40),
    retention_ms=st.none() | st.integers(0, 2000),
    retention_bytes=st.none() | st.integers(0, 5000),
    age_ms=st.integers(0, 2000),
)
def test_loss_comes_nearer_with_time_and_goes_away_with_what_is_stored(
    next_offset, retention_ms, retention_bytes, age_ms
):
    """
    Time brings it nearer, and what becomes durable pushes it away.

    A log that only its size limits, and that nothing is written to, has a pace that falls.
    """
    log = log_of([0, 10, 20, 30], age_ms=age_ms)
    limits = {"retention_ms": retention_ms, "retention_bytes": retention_bytes}
    now = left(log, next_offset=next_offset, **limits)
    assert now >= 0
    by_time = {"retention_ms": retention_ms}
    assert left(log, next_offset=next_offset, now_ms=TIME_MS + 100, **by_time) <= left(
        log, next_offset=next_offset, **by_time
    )
    assert left(log, next_offset=next_offset + 1, **limits) >= now
