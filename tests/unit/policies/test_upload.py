"""Upload planning: what goes next, what waits and why, and what is missing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import local_log, remote
from tieringd.model.partition import LogBounds
from tieringd.policies.upload import (
    MissingRange,
    UploadLimits,
    UploadPlan,
    admissible_prefix,
    plan_uploads,
)

ALL = UploadLimits(segments_per_step=1000)


def plan(bases, *, next_offset, last_stable_offset=10**9, limits=ALL, sizes=None) -> UploadPlan:
    log = local_log(bases, sizes=sizes)
    bounds = LogBounds(log.first_offset or 0, last_stable_offset, max(last_stable_offset, 10**9))
    return plan_uploads(log, bounds, next_offset=next_offset, limits=limits)


def chosen(found: UploadPlan) -> list[tuple[int, int]]:
    """Return the first and last offset of each segment in a plan."""
    return [(segment.base_offset, segment.next_offset - 1) for segment in found.segments]


@pytest.mark.parametrize(
    ("bases", "next_offset", "last_stable_offset", "expected"),
    [
        pytest.param([5, 10, 15], 5, 20, [(5, 9), (10, 14)], id="the active segment never"),
        pytest.param([5, 10, 15, 20], 5, 15, [(5, 9), (10, 14)], id="up to the last stable offset"),
        pytest.param([0, 150], 0, 250, [(0, 149)], id="one long segment"),
    ],
)
def test_upload_plan_takes_the_candidates_that_kafka_takes(bases, next_offset, last_stable_offset, expected):
    """In the cases of Kafka's own copy task, the same segments with the same ends are chosen."""
    found = plan(bases, next_offset=next_offset, last_stable_offset=last_stable_offset)
    assert chosen(found) == expected


@pytest.mark.parametrize(
    ("bases", "next_offset", "last_stable_offset", "expected", "words"),
    [
        pytest.param([0, 10, 20], None, 99, [(0, 9), (10, 19)], "segment 20 is active", id="nothing stored"),
        pytest.param([7, 10, 20], None, 99, [(7, 9), (10, 19)], "segment 20 is active", id="not from zero"),
        pytest.param([0, 10, 20], 0, 99, [(0, 9), (10, 19)], "segment 20 is active", id="nothing yet"),
        pytest.param([0, 10, 20], 10, 99, [(10, 19)], "segment 20 is active", id="goes on"),
        pytest.param([0, 10, 20], 20, 99, [], "segment 20 is active", id="nothing left"),
        pytest.param([0, 10, 20], 25, 99, [], "segment 20 is active", id="ahead of the closed ones"),
        pytest.param([20], None, 99, [], "segment 20 is active", id="only the active one"),
        pytest.param([], None, 0, [], "", id="empty log"),
        pytest.param([], 7, 0, [], "", id="empty log of which something is stored"),
        pytest.param(
            [0, 10, 20, 30],
            0,
            19,
            [(0, 9)],
            "segment 10 ends past the last stable offset 19: a transaction is open, "
            "or the data is not replicated yet",
            id="unstable",
        ),
        pytest.param([0, 10, 20, 30], 0, 20, [(0, 9), (10, 19)], "segment 20 ends past", id="just stable"),
        pytest.param([0, 10], 0, 9, [], "segment 0 ends past the last stable offset 9", id="nothing stable"),
        pytest.param(
            [0, 10, 20],
            5,
            99,
            [],
            "segment 0 begins before offset 5, where the archive goes on: "
            "this log was cut into other segments than the one archived before",
            id="other segments",
        ),
        pytest.param([0, 10, 20], 11, 99, [], "segment 10 begins before offset 11", id="one offset into it"),
    ],
)
def test_upload_plan_stops_at_the_first_segment_that_waits(
    bases, next_offset, last_stable_offset, expected, words
):
    """The plan ends before the first segment that must wait, and says why it waits."""
    found = plan(bases, next_offset=next_offset, last_stable_offset=last_stable_offset)
    assert chosen(found) == expected
    assert found.waits_because.startswith(words)
    assert bool(found.waits_because) == bool(words)
    assert found.missing is None


@pytest.mark.parametrize(
    ("bases", "next_offset", "missing", "expected"),
    [
        pytest.param([10, 20, 30], 9, MissingRange(9, 9), [(10, 19), (20, 29)], id="one offset"),
        pytest.param([10, 20, 30], 0, MissingRange(0, 9), [(10, 19), (20, 29)], id="several"),
        pytest.param([10, 20, 30], 10, None, [(10, 19), (20, 29)], id="none"),
        pytest.param([10, 20, 30], None, None, [(10, 19), (20, 29)], id="nothing was ever stored"),
        pytest.param([30], 5, MissingRange(5, 29), [], id="all but the active segment"),
    ],
)
def test_upload_plan_reports_what_is_missing(bases, next_offset, missing, expected):
    """The missing range begins where the archive goes on and ends before the oldest local offset."""
    found = plan(bases, next_offset=next_offset)
    assert found.missing == missing
    assert chosen(found) == expected


def test_upload_plan_reports_what_is_missing_before_an_unstable_segment():
    """A missing range is known at once, though what follows it must wait."""
    found = plan([10, 20, 30], next_offset=4, last_stable_offset=15)
    assert (found.missing, found.segments) == (MissingRange(4, 9), ())
    assert found.waits_because.startswith("segment 10 ends past")


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 4)])
def test_upload_plan_counts_all_that_is_eligible(limit, expected):
    """The limit cuts what is chosen; pending counts every eligible segment, and no other."""
    sizes = {0: 1, 10: 20, 20: 300, 30: 4000, 40: 50_000, 50: 600_000, 60: 7_000_000}
    limits = UploadLimits(segments_per_step=limit)
    found = plan(list(sizes), next_offset=10, last_stable_offset=59, limits=limits, sizes=sizes)
    assert (found.pending_segments, found.pending_bytes) == (4, 54_320)
    assert [segment.base_offset for segment in found.segments] == [10, 20, 30, 40][:expected]


def test_upload_plan_takes_four_segments_unless_told_otherwise():
    """One step pays one commit for up to four segments."""
    found = plan([0, 1, 2, 3, 4, 5], next_offset=0, limits=UploadLimits())
    assert [segment.base_offset for segment in found.segments] == [0, 1, 2, 3]


@given(
    bases=st.lists(st.integers(0, 60), unique=True, max_size=10).map(sorted),
    next_offset=st.none() | st.integers(0, 70),
    last_stable_offset=st.integers(0, 70),
    limit=st.integers(0, 5),
)
def test_upload_plan_is_contiguous_stable_and_closed(bases, next_offset, last_stable_offset, limit):
    """For any log, bounds and archive, a plan leaves no hole and touches nothing that may still change."""
    limits = UploadLimits(segments_per_step=limit)
    found = plan(bases, next_offset=next_offset, last_stable_offset=last_stable_offset, limits=limits)
    ends = dict(pairwise(bases))

    assert len(found.segments) == min(limit, found.pending_segments)
    assert all(ends.get(segment.base_offset) == segment.next_offset for segment in found.segments)
    assert all(segment.next_offset <= last_stable_offset for segment in found.segments)

    # The expected first segment, found another way: by where it must begin.
    first = next((base for base in bases if ends.get(base, 10**9) > (next_offset or 0)), None)
    if next_offset is not None and first is not None and first > next_offset:
        assert found.missing == MissingRange(next_offset, first - 1)
    else:
        assert found.missing is None
    at = first if next_offset is None or (first is not None and first >= next_offset) else None
    count = 0
    while at in ends and ends[at] <= last_stable_offset:
        if count < limit:
            assert found.segments[count].base_offset == at
        at, count = ends[at], count + 1
    assert found.pending_segments == count


SOLID = (remote(10, 19), remote(20, 29), remote(30, 39))


@pytest.mark.parametrize(
    ("uploaded", "next_offset", "expected"),
    [
        pytest.param((), 10, 0, id="nothing"),
        pytest.param(SOLID, 10, 3, id="all"),
        pytest.param((None, *SOLID[1:]), 10, 0, id="the first failed"),
        pytest.param((SOLID[0], None, SOLID[2]), 10, 1, id="the second failed"),
        pytest.param((*SOLID, None), 10, 3, id="the last failed"),
        pytest.param(SOLID, 9, 0, id="gap before"),
        pytest.param(SOLID, 11, 0, id="overlap before"),
        pytest.param((SOLID[0], SOLID[2]), 10, 1, id="gap inside"),
        pytest.param((SOLID[0], remote(19, 29)), 10, 1, id="overlap inside"),
        pytest.param((SOLID[0], SOLID[0]), 10, 1, id="twice"),
        pytest.param((SOLID[0], remote(20, 19), remote(20, 29)), 10, 1, id="empty"),
        pytest.param((remote(10, 10),), 10, 1, id="one offset"),
    ],
)
def test_admissible_prefix_ends_at_the_first_failure_or_hole(uploaded, next_offset, expected):
    """What may be committed is contiguous from the archive's end; what follows a failure is not."""
    assert admissible_prefix(uploaded, next_offset=next_offset) == expected
