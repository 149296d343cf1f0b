"""Turns of housekeeping: the time of the next one, and the job that gets it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.policies.housekeeping_turns import (
    HousekeepingLimits,
    HousekeepingState,
    JobStatus,
    SlidingCount,
    Traffic,
    pause_after_failures,
    plan_turn,
    why_busy,
)

LIMITS = HousekeepingLimits(window_seconds=10.0, threshold_rps=1, interval_seconds=300.0)
QUIET = Traffic(requests=0, throttled=0, watched_seconds=1000.0)
BUSY = Traffic(requests=11, throttled=0, watched_seconds=1000.0)
THROTTLED = Traffic(requests=0, throttled=2, watched_seconds=1000.0)
NOW = 1000.0


def job(name="merge", *, is_done=False, served_at=NOW - 20, covered_at=NOW - 20, not_before=0.0):
    return JobStatus(name, is_done, served_at, covered_at, not_before)


def planned(*jobs, traffic=QUIET, round_at=0.0, now=NOW, limits=LIMITS):
    return plan_turn(jobs, traffic, limits, round_at=round_at, now=now)


@pytest.mark.parametrize(
    ("traffic", "because"),
    [
        pytest.param(QUIET, "", id="nothing"),
        pytest.param(Traffic(10, 0, 10.0), "", id="at-the-threshold-after-one-window"),
        pytest.param(Traffic(11, 0, 10.0), "there were 11 requests to the object store in 10 s", id="over"),
        pytest.param(Traffic(0, 1, 10.0), "asked to slow down 1 times in 10 s", id="throttled"),
        pytest.param(Traffic(0, 0, 9.9), "has not been watched for 10 s yet", id="not-watched"),
    ],
)
def test_store_is_idle_at_or_below_the_threshold_for_a_whole_window(traffic, because):
    """A store is idle up to the threshold's requests per second times the seconds of the window."""
    found = why_busy(traffic, LIMITS)
    assert because in found
    assert bool(found) == bool(because)


def test_threshold_grows_with_the_window():
    """The count of a window is compared with rps times its seconds, not with rps."""
    limits = HousekeepingLimits(window_seconds=60.0, threshold_rps=5, interval_seconds=300.0)
    assert not why_busy(Traffic(300, 0, 60.0), limits)
    assert why_busy(Traffic(301, 0, 60.0), limits)


def test_idle_store_gives_a_turn():
    """Work that waits is given its turn, and it is not forced."""
    plan = planned(job())
    assert (plan.state, plan.job, plan.is_forced, plan.wait_seconds) == (
        HousekeepingState.ACTIVE,
        "merge",
        False,
        0.0,
    )


@pytest.mark.parametrize(
    ("traffic", "because"), [(BUSY, "there were 11 requests"), (THROTTLED, "asked to slow down 2 times")]
)
def test_busy_store_pauses_what_waits(traffic, because):
    """The plan gives the reason, and the next attempt comes well within the window."""
    plan = planned(job(), traffic=traffic)
    assert (plan.state, plan.job) == (HousekeepingState.PAUSED, None)
    assert because in plan.reason
    assert plan.wait_seconds == 1.0


@pytest.mark.parametrize("traffic", [BUSY, THROTTLED])
def test_turn_is_forced_once_the_interval_is_over(traffic):
    """
    A turn is forced when the interval is over and not before, even if the store is busy.

    The reason says so.
    """
    assert planned(job(covered_at=NOW - 299.9), traffic=traffic).job is None
    plan = planned(job(covered_at=NOW - 300), traffic=traffic)
    assert (plan.state, plan.job, plan.is_forced) == (HousekeepingState.ACTIVE, "merge", True)
    assert plan.reason == why_busy(traffic, LIMITS)


def test_pause_ends_when_a_forced_turn_is_due():
    """The next turn is no later than that."""
    assert planned(job(covered_at=NOW - 299.5), traffic=BUSY).wait_seconds == pytest.approx(0.5)


@pytest.mark.parametrize("traffic", [QUIET, BUSY])
def test_turn_goes_to_the_job_whose_last_one_is_longest_ago(traffic):
    """The longest-waiting job gets the turn, among those that wait and among those that are overdue."""
    overdue = NOW - 400
    jobs = [
        job("a", served_at=NOW - 1, covered_at=overdue),
        job("b", served_at=NOW - 3, covered_at=overdue),
        job("c", served_at=NOW - 2, covered_at=overdue),
    ]
    assert planned(*jobs, traffic=traffic).job == "b"


def test_only_what_is_overdue_is_forced():
    """A busy store is not burdened with what can still wait."""
    plan = planned(job("a", served_at=0), job("b", covered_at=NOW - 300), traffic=BUSY)
    assert plan.job == "b"


def test_job_that_is_done_waits_for_the_next_round():
    """There is nothing to do before that, however idle the store is."""
    plan = planned(job(is_done=True, covered_at=NOW - 100))
    assert (plan.state, plan.job, plan.wait_seconds) == (HousekeepingState.IDLE, None, 200.0)


def test_round_does_not_begin_before_its_time():
    """No job gets a turn before the time of the next round."""
    plan = planned(job(), round_at=NOW + 7)
    assert (plan.state, plan.job, plan.wait_seconds) == (HousekeepingState.IDLE, None, 7.0)


def test_job_that_failed_is_left_alone_even_when_overdue():
    """A failed job comes again when its pause is over, and others go on meanwhile."""
    failed = job("a", covered_at=NOW - 900, not_before=NOW + 40)
    assert planned(failed).wait_seconds == 40.0
    assert planned(failed, job("b")).job == "b"
    assert planned(job("a", covered_at=NOW - 900, not_before=NOW)).job == "a"


def test_without_jobs_nothing_is_planned():
    """A daemon without housekeeping sleeps."""
    plan = planned()
    assert (plan.state, plan.job) == (HousekeepingState.IDLE, None)
    assert plan.wait_seconds > 0


def test_pause_doubles_with_each_failure_up_to_the_interval():
    """The pause begins with the seconds of a window."""
    assert [pause_after_failures(count, LIMITS) for count in range(1, 8)] == [10, 20, 40, 80, 160, 300, 300]
    assert pause_after_failures(10**6, LIMITS) == 300


standings = st.builds(
    JobStatus,
    name=st.uuids().map(str),
    is_done=st.booleans(),
    served_at=st.floats(0, NOW),
    covered_at=st.floats(0, NOW),
    not_before=st.floats(0, 2 * NOW),
)
traffics = st.builds(
    Traffic, requests=st.integers(0, 30), throttled=st.integers(0, 2), watched_seconds=st.floats(0, 30)
)


@given(st.lists(standings, max_size=6), traffics, st.floats(0, 2 * NOW))
def test_turn_is_planned_or_a_time_to_plan_again(jobs, traffic, round_at):
    """
    A plan has a turn or a time, never both.

    No job is served that has to be left alone, or unforced beside traffic.
    """
    plan = planned(*jobs, traffic=traffic, round_at=round_at)
    by_name = {one.name: one for one in jobs}
    assert (plan.job is None) == (plan.wait_seconds > 0)
    assert (plan.job is not None) == (plan.state is HousekeepingState.ACTIVE)
    if plan.job is None:
        assert not any(one.not_before <= NOW and one.covered_at + 300 <= NOW for one in jobs)
        return
    chosen = by_name[plan.job]
    assert chosen.not_before <= NOW
    if plan.is_forced:
        assert chosen.covered_at + 300 <= NOW
    else:
        assert not why_busy(traffic, LIMITS)
        assert not chosen.is_done


@given(
    st.lists(st.floats(0, 5, allow_nan=False), max_size=60),
    st.floats(0.5, 60, allow_nan=False),
    st.floats(0, 20),
)
def test_sliding_count_counts_the_window_and_at_most_a_hundredth_more(pauses, window_seconds, rest):
    """A count includes every event of the window, and forgets each within a hundredth of the window."""
    count, now, events = SlidingCount(window_seconds), 0.0, []
    for pause in pauses:
        now += pause
        events.append(now)
        count.note(now)
    now += rest
    found = count.count(now)
    slack = 1e-6
    least = sum(1 for at in events if at > now - window_seconds + slack)
    most = sum(1 for at in events if at >= now - window_seconds * 1.01 - slack)
    assert least <= found <= most


def test_sliding_count_takes_no_more_memory_with_more_traffic():
    """A million requests are as many slots as a window has."""
    count = SlidingCount(10.0)
    for number in range(100_000):
        count.note(number / 5_000)
    assert count.count(20.0) == pytest.approx(50_000, rel=0.02)
    assert len(count._slots) <= 102
