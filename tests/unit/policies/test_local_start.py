"""The offset at which local retention lets a log begin, as a broker's own housekeeping would have it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.policies.local_retention import LocalRetentionTarget, plan_trim, trim_due_ms

NOTHING_STAYS = LocalRetentionTarget(target_ms=0, target_bytes=0)
LATER_MS = TIME_MS + 10**12


def local_start(bases, target, *, rows=None, sizes=None, log_start_offset=0, now_ms=LATER_MS):
    manifest = stored(
        [remote(base, end - 1, size_bytes=(sizes or {}).get(base, 1024)) for base, end in pairwise(bases)]
        if rows is None
        else rows
    )
    log = local_log(bases, sizes=sizes)
    return plan_trim(log, manifest, target, log_start_offset=log_start_offset, now_ms=now_ms).start_offset


@pytest.mark.parametrize(
    ("bases", "log_start_offset", "rows", "start"),
    [
        pytest.param([0, 10, 20], 0, None, 20, id="the active segment's base"),
        pytest.param([0, 10, 20], 25, None, 25, id="the log start inside the active segment"),
        pytest.param([0, 10, 20], 0, [], 0, id="nothing stored"),
        pytest.param([0, 10, 20], 5, [], 5, id="nothing stored, and the log start inside the first"),
        pytest.param([0, 10, 20], 10, [], 10, id="nothing stored, and the log start past the first"),
        pytest.param([0, 10, 20], 0, [remote(0, 9)], 10, id="the first stored"),
        pytest.param([0, 10, 20], 0, [remote(0, 14)], 10, id="a part of the second stored"),
        pytest.param([5, 10], 0, [], 5, id="no file for the log's first offsets"),
        pytest.param([], 7, [], 7, id="no file at all"),
    ],
)
def test_local_start_is_the_first_offset_that_stays(bases, log_start_offset, rows, start):
    """The start lies on a segment's base, or at the log's start where that is higher."""
    found = local_start(bases, NOTHING_STAYS, rows=rows, log_start_offset=log_start_offset)
    assert found == start


@pytest.mark.parametrize(
    ("target_ms", "target_bytes", "start"),
    [
        pytest.param(None, None, 0, id="no limit"),
        pytest.param(None, 10**9, 0, id="small enough"),
        pytest.param(10**15, 3 * 1024, 20, id="by size"),
        pytest.param(1, 10**9, 40, id="by time"),
        pytest.param(1, 3 * 1024, 40, id="by both, time takes more"),
    ],
)
def test_local_start_follows_the_limit_that_takes_more(target_ms, target_bytes, start):
    """The limit that takes more segments decides where the log may begin."""
    target = LocalRetentionTarget(target_ms, target_bytes)
    assert local_start([0, 10, 20, 30, 40], target) == start


def test_local_start_behind_closed_segments_only_is_their_end():
    """The log may begin behind its last closed segment if there is no active segment yet."""
    log = local_log([0, 10, 20])
    manifest = stored([remote(0, 9), remote(10, 19)])
    found = plan_trim(
        replace(log, segments=log.closed_segments),
        manifest,
        NOTHING_STAYS,
        log_start_offset=0,
        now_ms=LATER_MS,
    )
    assert (found.start_offset, found.kept_because) == (20, "there is no active segment yet")


def test_trim_of_a_log_without_a_segment_is_never_due():
    """Nothing on disk means that no time brings a trim."""
    assert trim_due_ms(local_log([]), stored([]), NOTHING_STAYS, log_start_offset=0) == math.inf


sizes_and_ages = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8)


@given(sizes_and_ages, st.integers(0, 5), st.none() | st.integers(0, 10), st.none() | st.integers(0, 30))
def test_local_start_is_where_rounds_of_housekeeping_end(segments, active_bytes, target_ms, target_bytes):
    """Rounds that each take the larger of a size and a time removal end at the same offset."""
    bases = [10 * number for number in range(len(segments) + 1)]
    sizes = {10 * number: size for number, (size, _) in enumerate(segments)} | {bases[-1]: active_bytes}
    rows = [
        remote(base, base + 9, size_bytes=size, max_timestamp_ms=TIME_MS - age)
        for base, (size, age) in zip(bases, segments, strict=False)
    ]
    left = list(segments)
    while left:
        by_time = by_size = 0
        while target_ms is not None and by_time < len(left) and left[by_time][1] >= target_ms:
            by_time += 1
        budget = sum(size for size, _ in left) + active_bytes - (target_bytes or 0)
        while target_bytes is not None and by_size < len(left) and left[by_size][0] <= budget:
            budget -= left[by_size][0]
            by_size += 1
        if not max(by_time, by_size):
            break
        left = left[max(by_time, by_size) :]
    target = LocalRetentionTarget(target_ms, target_bytes)
    found = local_start(bases, target, rows=rows, sizes=sizes, now_ms=TIME_MS)
    assert found == 10 * (len(segments) - len(left))


@given(sizes_and_ages, st.integers(0, 12), st.integers(0, 40), st.integers(0, 90))
def test_local_start_never_moves_back_with_time_or_a_smaller_target(
    segments, target_ms, target_bytes, log_start
):
    """The start is the same or higher with more time or a smaller target, and never below the log's start."""
    bases = [10 * number for number in range(len(segments) + 1)]
    rows = [
        remote(base, base + 9, size_bytes=size, max_timestamp_ms=TIME_MS - age)
        for base, (size, age) in zip(bases, segments, strict=False)
    ]
    sizes = {base: size for base, (size, _) in zip(bases, segments, strict=False)}

    def start(ms, size, now_ms):
        target = LocalRetentionTarget(ms, size)
        return local_start(bases, target, rows=rows, sizes=sizes, log_start_offset=log_start, now_ms=now_ms)

    first = start(target_ms, target_bytes, TIME_MS)
    assert log_start <= first <= max(log_start, bases[-1])
    assert start(target_ms, target_bytes, TIME_MS + 3) >= first
    assert start(max(0, target_ms - 3), target_bytes, TIME_MS) >= first
    assert start(target_ms, max(0, target_bytes - 3), TIME_MS) >= first
