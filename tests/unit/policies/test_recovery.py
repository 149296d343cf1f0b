"""What is brought back of a partition: whole segments, from the newest backwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, manifests, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.policies.recovery import RestoreLimits, plan_restore

FIVE = stored(
    remote(base, base + 9, max_timestamp_ms=TIME_MS + base * 1000, uploaded_at_ms=TIME_MS + 10**6)
    for base in (0, 10, 20, 30, 40)
)
"""Five segments of 1024 bytes, ten seconds apart."""


@pytest.mark.parametrize(
    ("limits", "bases"),
    [
        pytest.param(RestoreLimits(), [0, 10, 20, 30, 40], id="all"),
        pytest.param(RestoreLimits(last_bytes=5120), [0, 10, 20, 30, 40], id="all fits"),
        pytest.param(RestoreLimits(last_bytes=5119), [10, 20, 30, 40], id="a byte less"),
        pytest.param(RestoreLimits(last_bytes=2048), [30, 40], id="two"),
        pytest.param(RestoreLimits(last_bytes=1), [40], id="the newest always comes"),
        pytest.param(RestoreLimits(last_ms=20_000), [20, 30, 40], id="by time, inclusive"),
        pytest.param(RestoreLimits(last_ms=19_999), [30, 40], id="a millisecond less"),
        pytest.param(RestoreLimits(last_ms=0), [40], id="no time at all"),
        pytest.param(RestoreLimits(last_bytes=4096, last_ms=10_000), [30, 40], id="both, time is less"),
        pytest.param(RestoreLimits(last_bytes=1024, last_ms=10_000), [40], id="both, size is less"),
    ],
)
def test_restore_takes_the_newest_part(limits, bases):
    """The limit that is reached first ends it, and what is left is counted."""
    plan = plan_restore(FIVE, limits)
    assert [one.base_offset for one in plan.segments] == bases
    assert (plan.start_offset, plan.left_segments) == (bases[0], 5 - len(bases))
    assert plan.size_bytes == 1024 * len(bases)


@pytest.mark.parametrize(
    ("limits", "bases"),
    [
        (RestoreLimits(), [0, 10, 20, 30, 40, 50]),
        (RestoreLimits(last_bytes=3 * 1024), [30, 40, 50]),
        (RestoreLimits(last_bytes=1024), [50]),
        (RestoreLimits(last_ms=30_000), [20, 30, 40, 50]),
    ],
)
def test_limits_count_on_into_older_archives(limits, bases):
    """The newest record is that of the whole log."""
    own = stored(
        [remote(50, 59, max_timestamp_ms=TIME_MS + 50_000, uploaded_at_ms=TIME_MS + 10**6)], start_offset=50
    )
    plan = plan_restore(own, limits, older=(FIVE,))
    assert [one.base_offset for one in plan.segments] == bases
    assert (plan.start_offset, plan.left_segments) == (bases[0], 6 - len(bases))


def test_restore_of_older_archives_begins_where_a_user_deleted_what_is_before():
    """The start is that of the archive that has the first segment."""
    own = replace(stored([remote(50, 59)], start_offset=50), start_offset=52)
    empty = stored([], start_offset=50)
    assert plan_restore(own, RestoreLimits(), older=(replace(FIVE, start_offset=7),)).start_offset == 7
    assert plan_restore(own, RestoreLimits(last_bytes=1024), older=(FIVE,)).start_offset == 52
    assert plan_restore(empty, RestoreLimits(last_ms=0), older=(FIVE,)).start_offset == 40


def test_restore_of_an_empty_archive_is_nothing():
    """There is no segment to come."""
    plan = plan_restore(stored([], start_offset=70), RestoreLimits())
    assert (plan.segments, plan.start_offset, plan.size_bytes) == ((), None, 0)


def test_restore_begins_where_a_user_deleted_what_is_before():
    """The first segment is restored whole, and its deleted records are not readable."""
    manifest = replace(FIVE, start_offset=7)
    assert plan_restore(manifest, RestoreLimits()).segments[0].base_offset == 0
    assert plan_restore(manifest, RestoreLimits()).start_offset == 7
    assert plan_restore(manifest, RestoreLimits(last_bytes=2048)).start_offset == 30


def test_restore_names_the_gaps_inside_of_it():
    """One before what is brought back does not matter."""
    manifest = stored([remote(0, 9)])
    for base in (10, 30):
        manifest = manifest.with_gap(Gap(base, base + 9, "lost", 0)).appended([remote(base + 10, base + 19)])
    assert [gap.base_offset for gap in plan_restore(manifest, RestoreLimits()).gaps] == [10, 30]
    assert [gap.base_offset for gap in plan_restore(manifest, RestoreLimits(last_bytes=2048)).gaps] == [30]


@given(manifests(), st.none() | st.integers(0, 2**62), st.none() | st.integers(0, 2**62))
def test_restore_is_always_a_suffix(manifest, last_bytes, last_ms):
    """No segment is left out in between, and none comes that a smaller limit does not bring."""
    plan = plan_restore(manifest, RestoreLimits(last_bytes, last_ms))
    assert list(plan.segments) == list(manifest.segments)[plan.left_segments :]
    assert bool(plan.segments) == bool(len(manifest.segments))
    if last_bytes is not None and len(plan.segments) > 1:
        assert plan.size_bytes <= last_bytes
