"""
One walk over a local log: `plan_trim`, `plan_trim_to_target`, `trim_due_ms` and `durable_end` as before.

The functions below are the four walks that `walk_log` replaces, word for word; they are the oracle.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.policies import durability, local_retention
from tieringd.policies.durability import DurableEnd, _covered_to, why_not_durable
from tieringd.policies.local_retention import (
    ACTIVE_STAYS,
    NO_ACTIVE_YET,
    LocalRetentionTarget,
    TrimCandidate,
    TrimPlan,
    _newest_ms,
)
from tieringd.policies.trim_target import (
    TrimTarget,
    TrimWishes,
    _wanted,
    choose_trim_target,
    plan_trim_to_target,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import LocalSegment, RemoteSegment


def durable_end(
    log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int, up_to: int | None = None
) -> DurableEnd:
    end = log_start_offset
    for segment in log.segments:
        if up_to is not None and end >= up_to:
            return DurableEnd(end, f"offset {up_to} is as far as anyone asked")
        if segment.next_offset is None:
            pieces = manifest.segments.overlapping(segment.base_offset, manifest.next_offset)
            covered_to = _covered_to(segment, pieces)
            return DurableEnd(max(end, covered_to), f"offset {covered_to} is in the active segment")
        if segment.next_offset > log_start_offset:
            pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
            reason = why_not_durable(segment, pieces, log, manifest)
            if reason:
                is_short = _covered_to(segment, pieces) < segment.next_offset
                return DurableEnd(_covered_to(segment, pieces) if is_short else segment.base_offset, reason)
            end = segment.next_offset
    return DurableEnd(end, "there is no active segment yet")


def plan_trim(
    log: LocalLog,
    manifest: PartitionManifest,
    target: LocalRetentionTarget,
    *,
    log_start_offset: int,
    now_ms: int,
) -> TrimPlan:
    remaining_bytes = log.size_bytes
    start_offset = log_start_offset
    candidates: list[TrimCandidate] = []
    for segment in log.segments:
        if segment.next_offset is not None and segment.next_offset <= log_start_offset:
            remaining_bytes -= segment.size_bytes
            continue
        start_offset = max(start_offset, segment.base_offset)
        if segment.next_offset is None:
            return TrimPlan(tuple(candidates), start_offset, ACTIVE_STAYS)
        pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
        reason = why_not_durable(segment, pieces, log, manifest) or _why_within_target(
            segment, pieces, target, remaining_bytes=remaining_bytes, now_ms=now_ms
        )
        if reason:
            return TrimPlan(tuple(candidates), start_offset, reason)
        candidates.append(TrimCandidate(segment, pieces))
        start_offset = segment.next_offset
        remaining_bytes -= segment.size_bytes
    return TrimPlan(tuple(candidates), start_offset, NO_ACTIVE_YET)


def trim_due_ms(
    log: LocalLog, manifest: PartitionManifest, target: LocalRetentionTarget, *, log_start_offset: int
) -> float:
    remaining_bytes = log.size_bytes
    for segment in log.segments:
        if segment.next_offset is None:
            break
        if segment.next_offset > log_start_offset:
            pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
            if why_not_durable(segment, pieces, log, manifest):
                break
            if _is_past_size(segment, target, remaining_bytes=remaining_bytes):
                return -math.inf
            return math.inf if target.target_ms is None else _newest_ms(pieces) + target.target_ms
        remaining_bytes -= segment.size_bytes
    return math.inf


def _why_within_target(
    segment: LocalSegment,
    pieces: Sequence[RemoteSegment],
    target: LocalRetentionTarget,
    *,
    remaining_bytes: int,
    now_ms: int,
) -> str:
    past_size = _is_past_size(segment, target, remaining_bytes=remaining_bytes)
    past_time = target.target_ms is not None and _newest_ms(pieces) <= now_ms - target.target_ms
    if past_size or past_time:
        return ""
    return f"segment {segment.base_offset} is within the local retention target"


def _is_past_size(segment: LocalSegment, target: LocalRetentionTarget, *, remaining_bytes: int) -> bool:
    return target.target_bytes is not None and remaining_bytes - segment.size_bytes >= target.target_bytes


def _segments_below(
    log: LocalLog, manifest: PartitionManifest, target: TrimTarget, *, log_start_offset: int
) -> TrimPlan:
    start_offset = log_start_offset
    candidates: list[TrimCandidate] = []
    for segment in log.segments:
        if segment.next_offset is not None and segment.next_offset <= log_start_offset:
            continue
        start_offset = max(start_offset, segment.base_offset)
        if segment.next_offset is None:
            return TrimPlan(tuple(candidates), start_offset, ACTIVE_STAYS)
        pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
        reason = why_not_durable(segment, pieces, log, manifest)
        if not reason and segment.next_offset > target.offset:
            reason = f"segment {segment.base_offset} reaches past offset {target.offset}: {target.because}"
        if reason:
            return TrimPlan(tuple(candidates), start_offset, reason)
        candidates.append(TrimCandidate(segment, pieces))
        start_offset = segment.next_offset
    return TrimPlan(tuple(candidates), start_offset, NO_ACTIVE_YET)


bases = st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=7).map(sorted)
cuts = st.lists(st.integers(0, 45), unique=True, max_size=9).map(sorted)
offsets = st.integers(0, 50)


@st.composite
def worlds(draw):
    """Draw a local log and an archive, most of whose segments have the same bytes for each offset."""
    local = draw(bases)
    log = local_log(local, sizes={base: 100 * (end - base) for base, end in pairwise([*local, 50])})
    if draw(st.integers(0, 3)) == 0:
        log = replace(log, segments=log.segments[:-1])
    log = replace(log, is_reframed=draw(st.booleans()))
    # Often the same bounds as the log's: else sizes are rarely compared.
    ends = draw(st.one_of(cuts, st.just(local), st.just(sorted({*local, *draw(cuts)}))))
    manifest = stored([], start_offset=ends[0] if ends else 0)
    for base, end in pairwise(ends):
        kind = draw(st.sampled_from(["same"] * 6 + ["gap", "other", "rewritten"]))
        row = remote(base, end - 1, size_bytes=100 * (end - base), max_timestamp_ms=TIME_MS + base)
        if kind == "gap":
            manifest = manifest.with_gap(Gap(base, end - 1, "", 0))
        elif kind == "other":
            manifest = manifest.appended([replace(row, size_bytes=1)])
        elif kind == "rewritten":
            manifest = manifest.appended([replace(row, size_bytes=1, writer_id="rewritten-0a")])
        else:
            manifest = manifest.appended([row])
    return log, manifest


@given(worlds(), offsets, st.none() | offsets)
def test_durable_end_is_as_before(world, log_start, up_to):
    """The offset always; the reason too, except where the whole log is reached."""
    log, manifest = world
    found = durability.durable_end(log, manifest, log_start_offset=log_start, up_to=up_to)
    expected = durable_end(log, manifest, log_start_offset=log_start, up_to=up_to)
    assert found.offset == expected.offset
    assert found.because in (expected.because, f"offset {up_to} is as far as anyone asked")


@given(
    worlds(),
    offsets,
    st.none() | st.integers(0, 60),
    st.none() | st.integers(0, 5000),
    st.integers(0, 4000),
)
def test_local_retention_is_as_before(world, log_start, target_ms, target_bytes, age_ms):
    """The plan, and when it first names a segment."""
    log, manifest = world
    target = LocalRetentionTarget(target_ms, target_bytes)
    now_ms = TIME_MS + age_ms
    found = local_retention.plan_trim(log, manifest, target, log_start_offset=log_start, now_ms=now_ms)
    assert found == plan_trim(log, manifest, target, log_start_offset=log_start, now_ms=now_ms)
    due_ms = local_retention.trim_due_ms(log, manifest, target, log_start_offset=log_start)
    assert due_ms == trim_due_ms(log, manifest, target, log_start_offset=log_start)


@given(worlds(), offsets, st.none() | offsets, st.none() | offsets)
def test_trim_to_a_target_is_as_before(world, log_start, hint, cloud_gc):
    """The target and the plan."""
    log, manifest = world
    wishes = TrimWishes(hint, cloud_gc_offset=cloud_gc)
    target, found = plan_trim_to_target(log, manifest, wishes, log_start_offset=log_start)
    durable = durable_end(log, manifest, log_start_offset=log_start, up_to=_wanted(wishes)[0])
    assert target == choose_trim_target(wishes, durable_offset=durable.offset, log_start_offset=log_start)
    assert found == _segments_below(log, manifest, target, log_start_offset=log_start)
