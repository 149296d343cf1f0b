"""What a topic that is created with tiering on gets of retention."""

import pytest

from tieringd.policies.local_retention import (
    InitialRetention,
    LocalRetentionTarget,
    RequestedRetention,
    initial_retention,
)

DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS
UNLIMITED = -1


def test_nothing_set_is_one_day_local_and_seven_days_in_all():
    """Of bytes there is no limit."""
    assert initial_retention(RequestedRetention()) == InitialRetention(
        total_ms=WEEK_MS, total_bytes=None, local_target=LocalRetentionTarget(DAY_MS, None)
    )


@pytest.mark.parametrize(
    ("total", "local", "expected"),
    [
        pytest.param(None, None, (None, None), id="nothing"),
        pytest.param(500, None, (500, 500), id="total alone"),
        pytest.param(0, None, (0, 0), id="total of nothing"),
        pytest.param(None, 300, (None, 300), id="local alone"),
        pytest.param(500, 300, (500, 300), id="local is smaller"),
        pytest.param(300, 500, (300, 300), id="total is smaller"),
        pytest.param(300, 300, (300, 300), id="equal"),
        pytest.param(UNLIMITED, None, (None, None), id="total without limit"),
        pytest.param(UNLIMITED, 300, (None, 300), id="only local has a limit"),
        pytest.param(300, UNLIMITED, (300, 300), id="only total has a limit"),
        pytest.param(UNLIMITED, UNLIMITED, (None, None), id="neither has a limit"),
        pytest.param(None, UNLIMITED, (None, None), id="local without limit"),
        pytest.param(2**63 - 1, 2**63 - 2, (2**63 - 1, 2**63 - 2), id="the largest numbers stay exact"),
    ],
)
def test_local_bytes_are_the_smaller_of_the_two(total, local, expected):
    """The total where there is no local target; no limit is more than any limit."""
    found = initial_retention(RequestedRetention(retention_bytes=total, local_target_bytes=local))
    assert (found.total_bytes, found.local_target.target_bytes) == expected
    assert (found.total_ms, found.local_target.target_ms) == (WEEK_MS, DAY_MS)


@pytest.mark.parametrize(
    ("total", "local", "expected"),
    [
        pytest.param(None, None, (WEEK_MS, DAY_MS), id="nothing"),
        pytest.param(500, None, (500, 500), id="total alone"),
        pytest.param(None, 300, (WEEK_MS, 300), id="local alone"),
        pytest.param(500, 300, (500, 500), id="total is longer"),
        pytest.param(300, 500, (300, 500), id="local is longer"),
        pytest.param(UNLIMITED, None, (None, None), id="total without limit"),
        pytest.param(UNLIMITED, 300, (None, None), id="only local has a limit"),
        pytest.param(300, UNLIMITED, (300, None), id="only total has a limit"),
        pytest.param(None, UNLIMITED, (WEEK_MS, None), id="local without limit"),
        pytest.param(2**63 - 2, 2**63 - 1, (2**63 - 2, 2**63 - 1), id="the largest numbers stay exact"),
    ],
)
def test_local_time_is_the_longer_of_the_two(total, local, expected):
    """The total where there is no local target; bytes are no part of it."""
    found = initial_retention(RequestedRetention(retention_ms=total, local_target_ms=local))
    assert (found.total_ms, found.local_target.target_ms) == expected
    assert (found.total_bytes, found.local_target.target_bytes) == (None, None)
