"""Which clock counts: each combination of what the host and the store show, and each time that cannot be."""

from __future__ import annotations

import pytest

from tests.unit.model.values import TIME_MS, remote
from tieringd.model.segment import NO_TIMESTAMP
from tieringd.policies.retention_time import (
    CLOCK_ERROR_MAX_MS,
    NOTHING_IS_OLD_MS,
    ClockHistory,
    HostTime,
    StoreTime,
    clock_status,
    needs_proof,
    proven_upload_ms,
)

BEGUN = HostTime(TIME_MS, 100.0)
LATER = HostTime(TIME_MS + 60_000, 160.0)
DAY_MS = 86_400_000


def told(error_ms: int = 0, *, is_own: bool = True) -> StoreTime:
    """Return what a store said at the beginning, whose clock the host's is ahead of."""
    return StoreTime(BEGUN.wall_ms - error_ms, BEGUN, is_own)


def known(told_: StoreTime | None = None, **others) -> ClockHistory:
    """Return what a process knows that began with `BEGUN`, and heard *told_* last."""
    return ClockHistory(BEGUN, BEGUN, told_, **others)


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("error_ms", [CLOCK_ERROR_MAX_MS, -CLOCK_ERROR_MAX_MS, 0])
def test_clocks_that_agree_within_the_bound_are_certain(error_ms, is_own):
    """The host's own clock counts then: it has milliseconds."""
    found = clock_status(LATER, known(told(error_ms, is_own=is_own)))
    assert (found.doubt, found.now_ms, found.ages_ms()) == ("", LATER.wall_ms, LATER.wall_ms)
    assert found.is_confirmed is is_own


@pytest.mark.parametrize("error_ms", [CLOCK_ERROR_MAX_MS + 1, -CLOCK_ERROR_MAX_MS - 1])
def test_clocks_that_differ_by_more_leave_no_age_certain(error_ms):
    """The later of the two dates what is written: a date that is too early would delete fresh data."""
    found = clock_status(LATER, known(told(error_ms)))
    assert (found.error_ms, found.now_ms) == (error_ms, LATER.wall_ms - min(error_ms, 0))
    assert found.ages_ms() == NOTHING_IS_OLD_MS
    assert f"{'ahead of' if error_ms > 0 else 'behind'} the object store" in found.doubt


@pytest.mark.parametrize("step_ms", [DAY_MS, -DAY_MS])
@pytest.mark.parametrize("reading", [None, "own", "of this host"])
def test_clock_that_is_set_while_the_process_runs(step_ms, reading):
    """Another machine's clock decides; without one, nothing shows which of the two times was right."""
    now = HostTime(LATER.wall_ms + step_ms, LATER.steady_seconds)
    after = None if reading is None else StoreTime(now.wall_ms, now, reading == "own")
    found = clock_status(now, known(after))
    assert bool(found.doubt) is (reading != "own")


@pytest.mark.parametrize(("reading", "is_certain"), [(None, False), ("of this host", False), ("own", True)])
def test_host_without_a_clock_makes_no_age_certain(reading, is_certain):
    """No age is certain with a host's clock in 1970, unless a store's own clock agrees with it."""
    begun = HostTime(1_000_000, 10.0)
    after = None if reading is None else StoreTime(begun.wall_ms, begun, reading == "own")
    found = clock_status(begun, ClockHistory(begun, begun, after))
    assert (found.doubt == "") is is_certain
    assert (found.ages_ms() == NOTHING_IS_OLD_MS) is not is_certain


def test_host_that_slept_was_not_set():
    """The steady clock goes on while a host sleeps."""
    found = clock_status(HostTime(TIME_MS + 30 * DAY_MS, 100 + 30 * 86_400), known())
    assert found.doubt == ""


def test_last_commit_shows_a_clock_that_is_behind_where_nothing_else_does():
    """A commit that is later than now counts only where no other machine's clock agrees with the host's."""
    ahead_ms = LATER.wall_ms + CLOCK_ERROR_MAX_MS + 1
    alone, confirmed = (clock_status(LATER, known(one)) for one in (None, told()))
    assert alone.ages_ms(ahead_ms) == NOTHING_IS_OLD_MS
    assert alone.ages_ms(ahead_ms - 1) == confirmed.ages_ms(ahead_ms) == LATER.wall_ms


@pytest.mark.parametrize(
    ("record_ms", "uploaded_ms", "is_doubtful"),
    [
        (TIME_MS, TIME_MS, False),
        (TIME_MS + CLOCK_ERROR_MAX_MS, TIME_MS, False),
        (TIME_MS + CLOCK_ERROR_MAX_MS + 1, TIME_MS, True),
        (NO_TIMESTAMP, TIME_MS, True),
        (TIME_MS, TIME_MS + 2 * DAY_MS, True),
        (5, 1_000_000_000, True),
    ],
)
def test_segments_whose_age_rests_on_the_upload_need_proof(record_ms, uploaded_ms, is_doubtful):
    """Records newer than their upload, or without a time, or an upload in 1970 or later than now."""
    segment = remote(0, 9, max_timestamp_ms=record_ms, uploaded_at_ms=uploaded_ms)
    assert needs_proof(segment, now_ms=TIME_MS + DAY_MS) is is_doubtful


@pytest.mark.parametrize(
    ("stored_at_ms", "expected_ms"),
    [
        (TIME_MS + CLOCK_ERROR_MAX_MS, TIME_MS),
        (TIME_MS + DAY_MS, TIME_MS + DAY_MS),
        (1_000_000_000, TIME_MS + 2 * DAY_MS),
        (TIME_MS + 9 * DAY_MS, TIME_MS + 2 * DAY_MS),
    ],
)
def test_the_stores_date_of_an_object_corrects_its_upload_time(stored_at_ms, expected_ms):
    """
    The store's date confirms the noted time or replaces it.

    If neither can be, the segment counts from now.
    """
    segment = remote(0, 9, uploaded_at_ms=TIME_MS)
    found = proven_upload_ms(segment, stored_at_ms=stored_at_ms, now_ms=TIME_MS + 2 * DAY_MS)
    assert found == expected_ms
