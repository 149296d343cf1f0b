"""The controller's shares, the pace they stand for, and the order of those that wait."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.uploads import upload_order
from tieringd.model.partition import NO_TOPIC_ID, TopicIdPartition
from tieringd.policies.upload_control import (
    CPU,
    ContentionState,
    ControllerLimits,
    ControllerState,
    OrderLimits,
    PaceLimits,
    UploadPace,
    WaitingPartition,
    backlog_per_mille,
    is_new,
    last_moment_of,
    pace_for,
    update,
)

MIB = 1024 * 1024
DEFAULTS = ControllerLimits()
ORDER = OrderLimits(near_loss_seconds=100, last_moment_seconds=10, fair_turn_every=4)

CONTENDED = ContentionState(CPU)

backlogs = st.integers(0, 2**63 - 1)
coefficients = st.floats(0, 1e6)
control_limits = st.builds(
    lambda p, d, low, span: ControllerLimits(-p, d, low, low + span),
    coefficients,
    coefficients,
    st.integers(1, 5000),
    st.integers(0, 5000),
)


def shares_of(
    backlog_bytes: int, *, free_bytes: int = 1000, limits: ControllerLimits = DEFAULTS, error: float = 0.0
) -> int:
    state = ControllerState(error)
    return update(limits, state, backlog_bytes=backlog_bytes, free_bytes_at_start=free_bytes)[1]


def braked(uploads: int, bytes_per_second: int) -> UploadPace:
    """Return a pace under a brake because others want the processors, where 20 uploads may run at most."""
    return UploadPace(uploads, bytes_per_second, held_by=CPU, new_uploads=20)


def waiting(
    number: int, *, loss_at: float = math.inf, backlog_bytes: int = 0, served: int = 0
) -> WaitingPartition:
    partition = TopicIdPartition("cluster", "orders", NO_TOPIC_ID, number)
    return WaitingPartition(partition, loss_at, backlog_bytes, served)


def numbers(order: tuple[WaitingPartition, ...]) -> list[int]:
    return [one.partition.partition for one in order]


@pytest.mark.parametrize(
    ("backlog_bytes", "shares"),
    [
        pytest.param(0, 100, id="nothing to upload"),
        pytest.param(1, 100, id="hardly anything"),
        pytest.param(50, 100, id="a twentieth of the free space"),
        pytest.param(51, 102, id="just over a twentieth"),
        pytest.param(250, 500, id="a quarter"),
        pytest.param(499, 998, id="just under half"),
        pytest.param(500, 1000, id="half of the free space"),
        pytest.param(1000, 1000, id="all of it"),
        pytest.param(50_000, 1000, id="many times what was free"),
    ],
)
def test_shares_are_twice_the_backlog_per_mille(backlog_bytes, shares):
    """Shares run from 100 at 5 % of the free space to 1000 at 50 %, with the default properties."""
    assert shares_of(backlog_bytes) == shares


@pytest.mark.parametrize(
    ("p_coeff", "d_coeff", "previous_error", "backlog_bytes", "shares"),
    [
        # -2 * (-200 + 0.5 * (-200 - -100)) = -2 * (-200 - 50)
        pytest.param(-2.0, 0.5, -100.0, 200, 500, id="growing backlog"),
        # -2 * (-200 + 0.5 * (-200 - -300)) = -2 * (-200 + 50)
        pytest.param(-2.0, 0.5, -300.0, 200, 300, id="shrinking backlog"),
        # Without a change, -2 * -200.
        pytest.param(-2.0, 0.5, -200.0, 200, 400, id="steady backlog"),
        # All of it is change: -2 * (-200 + 0.5 * -200).
        pytest.param(-2.0, 0.5, 0.0, 200, 600, id="first update"),
        # -0.25 * (-500 + 1 * (-500 - -900)) = 25, and 100 is the least
        pytest.param(-0.25, 1.0, -900.0, 500, 100, id="below the least"),
        # -1.5 * (-333) = 499.5, and a share is whole
        pytest.param(-1.5, 0.0, 0.0, 333, 499, id="fractions are dropped"),
        pytest.param(2.0, 0.0, 0.0, 900, 100, id="a positive coefficient never raises shares"),
    ],
)
def test_coefficients_weigh_the_error_and_its_change(p_coeff, d_coeff, previous_error, backlog_bytes, shares):
    """The outcome is p * (err + d * (err - prev_err)), the setpoint being 0."""
    limits = ControllerLimits(p_coeff, d_coeff)
    assert shares_of(backlog_bytes, limits=limits, error=previous_error) == shares


def test_an_update_hands_its_error_to_the_next():
    """The change is counted against the last update, so a jump raises shares once only."""
    limits = ControllerLimits(p_coeff=-1.0, d_coeff=1.0)
    state, seen = ControllerState(), []
    for backlog_bytes in (200, 200, 300):
        state, shares = update(limits, state, backlog_bytes=backlog_bytes, free_bytes_at_start=1000)
        seen.append((state.error, shares))
    assert seen == [(-200.0, 400), (-200.0, 200), (-300.0, 400)]


@pytest.mark.parametrize(("backlog_bytes", "shares"), [(0, 100), (1, 1000)])
def test_a_full_disk_makes_any_backlog_urgent(backlog_bytes, shares):
    """An empty backlog gets 100 shares if no byte was free at the start, and a backlog of one byte 1000."""
    assert shares_of(backlog_bytes, free_bytes=0) == shares


def test_backlog_is_given_per_mille_of_what_was_free():
    """Three quarters of the free space are 750, and three times the space is 3000."""
    assert backlog_per_mille(backlog_bytes=750, free_bytes_at_start=1000) == 750
    assert backlog_per_mille(backlog_bytes=3000, free_bytes_at_start=1000) == 3000


@given(control_limits, st.floats(-1e21, 0), backlogs, backlogs)
def test_shares_stay_between_their_bounds(limits, error, backlog_bytes, free_bytes):
    """Shares are a whole number within the bounds, whatever the disk, the backlog and the coefficients."""
    shares = shares_of(backlog_bytes, free_bytes=free_bytes, limits=limits, error=error)
    assert isinstance(shares, int)
    assert limits.min_shares <= shares <= limits.max_shares


@given(control_limits, st.floats(-1e21, 0), backlogs, backlogs, backlogs)
def test_a_larger_backlog_never_gets_fewer_shares(limits, error, one, other, free_bytes):
    """The larger of two backlogs gets at least the shares of the smaller, after the same past."""
    less, more = sorted((one, other))
    given_less = shares_of(less, free_bytes=free_bytes, limits=limits, error=error)
    given_more = shares_of(more, free_bytes=free_bytes, limits=limits, error=error)
    assert given_less <= given_more


def test_limits_that_cannot_be_kept_are_refused():
    """Bounds the wrong way round, shares of nothing and coefficients that are no numbers are mistakes."""
    for arguments in (
        {"min_shares": 200, "max_shares": 100},
        {"min_shares": 0},
        {"p_coeff": math.nan},
        {"d_coeff": math.inf},
    ):
        with pytest.raises(AssertionError):
            ControllerLimits(**arguments)


@pytest.mark.parametrize(
    ("shares", "measured", "pace"),
    [
        pytest.param(100, None, braked(2, 16 * MIB), id="least, nothing measured"),
        pytest.param(100, 1.0, braked(2, 16 * MIB), id="least, slow store"),
        pytest.param(100, 500.0 * MIB, braked(2, 50 * MIB), id="least, a tenth of what was measured"),
        pytest.param(1, 500.0 * MIB, braked(2, 50 * MIB), id="less than the least"),
        pytest.param(550, None, braked(11, 88 * MIB), id="half-way, nothing measured"),
        pytest.param(550, 500.0 * MIB, braked(11, 275 * MIB), id="half-way"),
        pytest.param(999, 500.0 * MIB, braked(19, math.ceil(499.5 * MIB)), id="one from all"),
        pytest.param(1000, 500.0 * MIB, UploadPace(20, None), id="all"),
        pytest.param(2000, None, UploadPace(20, None), id="more than all"),
    ],
)
def test_pace_beside_others_runs_from_polite_to_everything(shares, measured, pace):
    """A tenth of the machine and two uploads at minimum shares; every slot and no limit at maximum."""
    limits = PaceLimits(max_uploads=20)
    found = pace_for(shares, DEFAULTS, limits, contention=CONTENDED, measured_bytes_per_second=measured)
    assert found == pace


@pytest.mark.parametrize(
    ("backlog_bytes", "bytes_per_second"),
    [
        pytest.param(0, 16 * MIB, id="nothing to upload"),
        pytest.param(9600 * MIB, 16 * MIB, id="polite is enough"),
        pytest.param(60_000 * MIB, 100 * MIB, id="polite would be too slow"),
    ],
)
def test_pace_carries_the_backlog_within_the_upload_interval(backlog_bytes, bytes_per_second):
    """The rate is at least a six-hundredth of the backlog with an upload interval of ten minutes."""
    limits = PaceLimits(max_uploads=20, upload_interval_seconds=600)
    pace = pace_for(100, DEFAULTS, limits, contention=CONTENDED, backlog_bytes=backlog_bytes)
    assert pace == braked(2, bytes_per_second)


def test_pace_without_an_interval_ignores_the_backlog():
    """The backlog already speaks through the shares: by itself it does not raise the rate."""
    pace = pace_for(100, DEFAULTS, PaceLimits(max_uploads=20), contention=CONTENDED, backlog_bytes=2**50)
    assert pace == braked(2, 16 * MIB)


def test_politeness_keeps_to_what_there_is():
    """Minimum shares never allow more uploads at once than the hard limit does."""
    pace = pace_for(100, DEFAULTS, PaceLimits(max_uploads=1), contention=CONTENDED)
    assert pace.concurrent_uploads == 1


def test_equal_bounds_leave_nothing_to_limit():
    """Uploads have everything if the least shares are also the most."""
    control = ControllerLimits(min_shares=300, max_shares=300)
    found = pace_for(300, control, PaceLimits(max_uploads=5), contention=CONTENDED)
    assert found == UploadPace(5, None)


@given(control_limits, st.none() | st.integers(1, 2**40), st.integers(0, 12_000), st.booleans())
def test_shares_brake_nothing_on_an_idle_machine(control, limit, shares, is_listening):
    """The hard limit alone holds without contention, at any shares. Listening is a pause, not a brake."""
    contention = ContentionState(listening_since=1.0 if is_listening else None)
    pace = pace_for(
        shares, control, PaceLimits(max_uploads=20, bytes_per_second=limit), contention=contention
    )
    assert (pace.concurrent_uploads, pace.bytes_per_second, pace.held_by) == (20, None, "")
    assert pace.limit_bytes_per_second == limit
    has_everything = max(shares, control.min_shares) >= control.max_shares
    assert pace.is_listening == (is_listening and not has_everything)


@pytest.mark.parametrize("shares", [100, 1000])
def test_the_hard_limit_holds_at_any_shares(shares):
    """The cost of a link has nothing to do with other load of the machine."""
    limits = PaceLimits(max_uploads=20, bytes_per_second=5 * MIB)
    assert pace_for(shares, DEFAULTS, limits, contention=CONTENDED).limit_bytes_per_second == 5 * MIB


@pytest.mark.parametrize(
    ("closed_seconds_ago", "expected"), [(-1, False), (0, True), (10, True), (11, False), (1e9, False)]
)
def test_a_segment_is_new_for_a_moment(closed_seconds_ago, expected):
    """A file from the future is not new: its time says nothing."""
    assert is_new(closed_seconds_ago=closed_seconds_ago) is expected


def test_limits_of_the_pace_that_cannot_be_kept_are_refused():
    """A pace that lets nothing through would never end, so it is a mistake."""
    with pytest.raises(AssertionError):
        UploadPace(0, None)
    with pytest.raises(AssertionError):
        UploadPace(1, 0)
    for arguments in (
        {"max_uploads": 0},
        {"max_uploads": 1, "polite_uploads": 0},
        {"max_uploads": 1, "polite_bytes_per_second": 0},
        {"max_uploads": 1, "upload_interval_seconds": 0},
    ):
        with pytest.raises(AssertionError):
            PaceLimits(**arguments)
    with pytest.raises(AssertionError):
        OrderLimits(fair_turn_every=0)


@given(
    control_limits,
    st.builds(PaceLimits, max_uploads=st.integers(1, 64), polite_uploads=st.integers(1, 8)),
    st.none() | st.floats(0, 1e12),
    st.lists(st.integers(0, 12_000), min_size=2, max_size=8),
)
def test_more_shares_never_slow_uploads_down(control, limits, measured, shares):
    """Concurrency and rate both rise with shares, stay within the limits, and are never below polite."""
    paces = [
        pace_for(each, control, limits, contention=CONTENDED, measured_bytes_per_second=measured)
        for each in sorted(shares)
    ]
    rates = [math.inf if pace.bytes_per_second is None else pace.bytes_per_second for pace in paces]
    for (less, low_rate), (more, high_rate) in pairwise(zip(paces, rates, strict=True)):
        assert less.concurrent_uploads <= more.concurrent_uploads
        assert low_rate <= high_rate
    assert all(1 <= pace.concurrent_uploads <= limits.max_uploads for pace in paces)
    assert all(rate >= limits.polite_bytes_per_second for rate in rates)


def test_partition_nearest_to_loss_goes_first():
    """Partitions in danger go by the time they have left, and before those that are in none."""
    found = upload_order(
        [waiting(1), waiting(2, loss_at=1090), waiting(3, loss_at=1050), waiting(4, loss_at=990)],
        ORDER,
        turn=1,
        now=1000,
    )
    # The fourth turn is a fair one, and the only one left is partition 1.
    assert numbers(found) == [4, 3, 2, 1]


def test_danger_that_is_far_off_gives_no_precedence():
    """100 seconds ahead counts as near, 101 do not: those partitions go by turn like all others."""
    found = upload_order(
        [waiting(1, loss_at=1101, served=5), waiting(2, served=3), waiting(3, loss_at=1100, served=9)],
        ORDER,
        turn=1,
        now=1000,
    )
    assert numbers(found) == [3, 2, 1]


def test_the_last_moment_comes_a_little_before_the_loss():
    """Data lost at 1000 has its last moment ten seconds earlier; data in no danger never has one."""
    assert last_moment_of(waiting(1, loss_at=1000), ORDER) == 990
    assert last_moment_of(waiting(1), ORDER) == math.inf


def test_the_least_recently_served_goes_first():
    """Partitions without danger take turns: the one that was served last is served again last."""
    found = upload_order(
        [waiting(1, served=9), waiting(2, served=7), waiting(3, served=8)], ORDER, turn=10, now=0
    )
    assert numbers(found) == [2, 3, 1]


def test_a_large_backlog_buys_no_second_turn():
    """The backlog decides only between partitions that were served equally long ago."""
    huge = waiting(1, served=9, backlog_bytes=2**50)
    found = upload_order(
        [huge, waiting(2, served=8), waiting(3, served=8, backlog_bytes=10)], ORDER, turn=10, now=0
    )
    assert numbers(found) == [3, 2, 1]


@pytest.mark.parametrize(
    ("turn", "order"),
    [(1, [1, 2, 3, 9, 4]), (2, [1, 2, 9, 3, 4]), (3, [1, 9, 2, 3, 4]), (4, [9, 1, 2, 3, 4])],
)
def test_every_few_turns_the_longest_waiter_goes_first(turn, order):
    """One turn of four goes by waiting time alone: danger elsewhere does not starve a safe partition."""
    in_danger = [waiting(number, loss_at=1000 + number, served=20 + number) for number in (1, 2, 3, 4)]
    found = upload_order([*in_danger, waiting(9, served=3)], ORDER, turn=turn, now=1000)
    assert numbers(found) == order


def test_everyone_in_danger_all_the_time_still_leaves_the_others_a_turn():
    """Each of twenty partitions is served within eighty turns, because one turn of four is fair."""
    facts = {number: waiting(number, loss_at=1000 if number < 10 else math.inf) for number in range(20)}
    served: list[int] = []
    for turn in range(1, 81):
        number = upload_order(facts.values(), ORDER, turn=turn, now=1000)[0].partition.partition
        served.append(number)
        facts[number] = waiting(number, loss_at=facts[number].loss_at, served=turn)
    assert set(served) == set(range(20))
    assert sum(number < 10 for number in served) >= 60


@given(
    st.lists(
        st.tuples(st.floats(0, 3000) | st.just(math.inf), st.integers(0, 5), st.integers(0, 5)),
        max_size=30,
    ),
    st.integers(1, 20),
)
def test_the_order_leaves_no_partition_out(facts, turn):
    """Every partition that waits has one place in the order, whatever it waits for."""
    lines = [
        waiting(number, loss_at=loss_at, backlog_bytes=backlog, served=served)
        for number, (loss_at, backlog, served) in enumerate(facts)
    ]
    found = upload_order(lines, ORDER, turn=turn, now=1000)
    assert sorted(numbers(found)) == list(range(len(facts)))
    assert upload_order(reversed(lines), ORDER, turn=turn, now=1000) == found
