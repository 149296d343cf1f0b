"""Partitions of a full disk, for the tests of the space plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.model.values import local
from tieringd.model.partition import TopicPartition
from tieringd.policies.space_plan import SpaceDemand, SpacePartition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.segment import LocalSegment
    from tieringd.policies.space_plan import SpacePlan

STEP = 10
"""Offsets in a segment: segment number n begins at n * STEP."""
EVERYTHING = 10**9


def topic_partition(text: str) -> TopicPartition:
    """Return the partition that is written `topic-number`."""
    topic, _, number = text.rpartition("-")
    return TopicPartition(topic, int(number))


def segments_of(closed: Sequence[int], *, active: int | None = 0, first: int = 0) -> tuple[LocalSegment, ...]:
    """Return closed segments of these sizes, the oldest with number *first*, and an active one."""
    rows = [
        local(number * STEP, (number + 1) * STEP, size_bytes=size)
        for number, size in enumerate(closed, first)
    ]
    if active is not None:
        rows.append(local((first + len(closed)) * STEP, None, size_bytes=active))
    return tuple(rows)


def space_partition(
    name: str,
    closed: Sequence[int],
    *,
    active: int | None = 0,
    gone: int = 0,
    durable: int | None = None,
    retention: int = 0,
    local_retention: int = 0,
    **facts: object,
) -> SpacePartition:
    """
    Return a partition with closed segments of these sizes.

    Each limit is a number of segments: the first *durable* are durable (all by default), the first
    *retention* may go by retention, and so on. *facts* are further fields.
    """
    fields = {"has_explicit_target": False} | facts
    return SpacePartition(
        topic_partition(name),
        segments_of(closed, active=active),
        log_start_offset=gone * STEP,
        durable_next_offset=(len(closed) if durable is None else durable) * STEP,
        retention_next_offset=retention * STEP,
        local_retention_next_offset=local_retention * STEP,
        **fields,
    )


def demand_for(wanted_bytes: int, partitions: Sequence[SpacePartition]) -> SpaceDemand:
    """Return a demand that is *wanted_bytes* over its target, without dead band and overage."""
    used = sum(segment.size_bytes for one in partitions for segment in one.segments)
    leaving = sum(
        segment.size_bytes
        for one in partitions
        for segment in one.segments
        if segment.next_offset is not None and segment.next_offset <= one.log_start_offset
    )
    return SpaceDemand(used, used - leaving - wanted_bytes, segment_bytes=0, overage_coefficient=1)


def taken(plan: SpacePlan) -> dict[str, dict[int, int]]:
    """Return by partition, and then by phase, how many segments go."""
    found: dict[str, dict[int, int]] = {}
    for phase in plan.phases:
        for removal in phase.removals:
            found.setdefault(str(removal.topic_partition), {})[int(phase.phase)] = removal.segment_count
    return found
