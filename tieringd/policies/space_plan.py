"""
Space plan: what the partitions on one filesystem give up when their logs are over the log area.

This module trims nothing. The archiver raises its trim target to the plan's offset, and checks and limits
the trim like any other.

`plan_space` chooses what the partitions on one filesystem give up. Five phases follow each other, and
planning stops as soon as enough is found:

1. what retention and advised local targets allow, the partition with the largest removal first;
2. what is past strict local targets by now, and not yet in the published hint;
3. topics without local settings of their own, down to two segments;
4. topics with local settings of their own, down to two segments;
5. every topic, down to its active segment.

After the first two phases each partition is at its local target, or its data is not durable. Only then do
phases 3 to 5 override the targets.

Phases 2 to 5 are fair: they go over the partitions in laps, and each partition gives one segment, its
oldest, in a lap. A lap begins after the partition that gave the last segment of the round before, and
goes by partition number and then by topic, so that topics take turns.

In every phase a removal is a prefix of the log, ends at or below the durable offset, and leaves the
active segment. All phases together make one fixed sequence of segments, of which a plan is the shortest
sufficient prefix: more pressure never plans less, and no plan goes more than one segment beyond what is
needed. The broker is already deleting segments below log start: they are neither planned again nor
counted as in use.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter, itemgetter

from tieringd.model.partition import TopicPartition
from tieringd.model.segment import LocalSegment

_DEAD_BANDS_IN_TARGET = 20
"""
The dead band is at most the target divided by this: on a small disk one segment may be all the room there is.
"""

_size_bytes: Callable[[LocalSegment], int] = attrgetter("size_bytes")
_next_offset: Callable[[LocalSegment], int] = attrgetter("next_offset")
"""For closed segments only: no other is searched or taken."""

ENOUGH = "nothing more has to be trimmed"
ONLY_ACTIVE = "the active segment always stays"
EMPTY = "no segment is on disk"


class Phase(IntEnum):
    """The source of a removal. Phases act in this order."""

    RETENTION = 1
    LOCAL_RETENTION = 2
    DEFAULT_TARGETS = 3
    EXPLICIT_TARGETS = 4
    ACTIVE_SEGMENT = 5

    @property
    def title(self) -> str:
        """Return the phase in an operator's words."""
        return _TITLES[self]


_TITLES = {
    Phase.RETENTION: "segments that retention and advisory local targets allow to trim",
    Phase.LOCAL_RETENTION: "segments past strict local targets",
    Phase.DEFAULT_TARGETS: "topics on default local settings, down to two segments",
    Phase.EXPLICIT_TARGETS: "topics with local settings of their own, down to two segments",
    Phase.ACTIVE_SEGMENT: "every topic, down to its active segment",
}


@dataclass(frozen=True, slots=True)
class SpacePartition:
    """A partition on the filesystem, and how far each rule lets its log be trimmed."""

    topic_partition: TopicPartition
    segments: Sequence[LocalSegment]
    """The observation's own sequence, ascending, the active one last; shared and never copied."""
    log_start_offset: int
    """The broker is already deleting closed segments that end at or below it."""
    durable_next_offset: int
    """Everything below it is durable; nothing at or past it is ever planned."""
    retention_next_offset: int
    """
    How far the log may be trimmed in the first phase.

    Where local targets are strict: as far as the published hint. Where they are advice: to the local
    target, because data past it stays on this disk only while there is room.
    """
    local_retention_next_offset: int
    """How far the local target allows a trim by now; a strict target's hint may lag behind it."""
    has_explicit_target: bool
    """Whether the topic has local settings of its own."""
    not_reclaimable: str = ""
    """Why this partition gives nothing at or past `not_reclaimable_from`; empty when it may."""
    not_reclaimable_from: int = 0
    """The first offset that `not_reclaimable` holds for."""

    @property
    def reclaimable_next_offset(self) -> int:
        """Return the first offset that stays, however much room is needed."""
        if not self.not_reclaimable:
            return self.durable_next_offset
        return min(self.durable_next_offset, self.not_reclaimable_from)

    @property
    def closed_count(self) -> int:
        """Return how many of the segments are closed."""
        is_last_active = bool(self.segments) and self.segments[-1].is_active
        return len(self.segments) - is_last_active


@dataclass(frozen=True, slots=True)
class SpaceDemand:
    """How much is in use, and the target."""

    used_bytes: int
    """Used by the logs on the filesystem, including segments that the broker is still deleting."""
    target_bytes: int
    """The log area."""
    segment_bytes: int
    """The size of an ordinary segment: exceeding the target by no more than that is not worth a removal."""
    overage_coefficient: float
    """Factor on the excess to remove, for data written until the next round; 1 removes just the excess."""

    def __post_init__(self) -> None:
        assert self.overage_coefficient >= 1, "less than the excess never reaches the target"

    @property
    def dead_band_bytes(self) -> int:
        """Return by how much usage may exceed the target before anything is removed."""
        return min(self.segment_bytes, self.target_bytes // _DEAD_BANDS_IN_TARGET)

    def wanted_bytes(self, excess_bytes: int) -> int:
        """Return how much to remove when usage is over the target by *excess_bytes*."""
        if excess_bytes <= self.dead_band_bytes:
            return 0
        return math.ceil(excess_bytes * self.overage_coefficient)


@dataclass(frozen=True, slots=True)
class Removal:
    """What one partition gives up in one phase."""

    topic_partition: TopicPartition
    next_offset: int
    """The first offset that stays: the log may be trimmed up to here."""
    segment_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """What one phase removes; nothing when enough was found before it."""

    phase: Phase
    removals: tuple[Removal, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the bytes that this phase removes."""
        return sum(one.size_bytes for one in self.removals)


@dataclass(frozen=True, slots=True)
class KeptPartition:
    """What one partition keeps, and why its oldest segment stays."""

    topic_partition: TopicPartition
    size_bytes: int
    because: str


@dataclass(frozen=True, slots=True)
class SpacePlan:
    """What to remove from one filesystem, phase by phase."""

    excess_bytes: int
    """Bytes over the target, without segments that the broker is already deleting."""
    wanted_bytes: int
    """Bytes to remove: 0 within the dead band."""
    leaving_bytes: int
    """Bytes that the broker is still deleting since an earlier trim."""
    phases: tuple[PhasePlan, ...]
    """Always all five, in order."""
    kept: tuple[KeptPartition, ...]
    """What stays of every partition, in order of topic and number."""
    cursor: TopicPartition | None
    """The partition that gave the last segment in a lap: the next round's laps begin after it."""

    @property
    def removed_bytes(self) -> int:
        """Return the bytes that all phases remove."""
        return sum(one.size_bytes for one in self.phases)

    @property
    def short_by_bytes(self) -> int:
        """Return by how much usage stays over the target because no phase finds more."""
        return max(0, self.excess_bytes - self.removed_bytes) if self.wanted_bytes else 0

    def cloud_gc_offsets(self) -> dict[TopicPartition, int]:
        """Return how far each partition's log may be trimmed, after all phases."""
        # A later phase continues where an earlier one ended, so its offset is the higher one.
        return {
            removal.topic_partition: removal.next_offset
            for phase in self.phases
            for removal in phase.removals
        }


def plan_space(
    partitions: Iterable[SpacePartition], demand: SpaceDemand, *, cursor: TopicPartition | None = None
) -> SpacePlan:
    """
    Choose what the *partitions* of one filesystem give up.

    *cursor* is the cursor of the plan that was carried out last; None begins with the first partition.
    """
    heads = sorted(map(_Head, partitions), key=_turn)
    leaving_bytes = sum(_size(head.partition.segments[: head.first]) for head in heads)
    excess_bytes = max(0, demand.used_bytes - leaving_bytes - demand.target_bytes)
    wanted_bytes = demand.wanted_bytes(excess_bytes)
    first = bisect_right(heads, (cursor.partition, cursor.topic), key=_turn) if cursor else 0
    phases, last = _run_phases(heads[first:] + heads[:first], wanted_bytes)
    heads.sort(key=lambda head: head.partition.topic_partition)
    return SpacePlan(
        excess_bytes=excess_bytes,
        wanted_bytes=wanted_bytes,
        leaving_bytes=leaving_bytes,
        phases=phases,
        kept=tuple(map(_kept, heads)),
        cursor=last or cursor,
    )


class _Head:
    """
    A partition's log while the phases go over it.

    *first* counts the segments that are gone, and *end* how many may go at most: the closed and durable ones.
    """

    __slots__ = ("end", "first", "partition")

    def __init__(self, partition: SpacePartition) -> None:
        self.partition = partition
        self.first, self.end = 0, partition.closed_count
        self.first = self.count_to(partition.log_start_offset)
        self.end = self.count_to(partition.reclaimable_next_offset)

    def count_to(self, next_offset: int) -> int:
        """Return the count of gone segments once at most *closed* closed ones are left, if allowed."""
        return bisect_right(self.partition.segments, next_offset, self.first, self.end, key=_next_offset)

    def count_leaving(self, closed: int) -> int:
        """Return the count of gone segments once at most *closed* closed ones are left, as far as allowed."""
        return max(self.first, min(self.end, self.partition.closed_count - closed))

    def take(self, until: int) -> Removal:
        """Remove the segments before number *until*."""
        gone = self.partition.segments[self.first : until]
        self.first = until
        return Removal(self.partition.topic_partition, _next_offset(gone[-1]), len(gone), _size(gone))


def _past_retention(head: _Head) -> int:
    """Phase 1: return the count of gone segments once all that retention allows are gone."""
    return head.count_to(head.partition.retention_next_offset)


def _past_local_retention(head: _Head) -> int:
    """Phase 2: the same for the current local target."""
    return head.count_to(head.partition.local_retention_next_offset)


def _default_to_two_segments(head: _Head) -> int:
    """Phase 3: leave the active segment and the newest closed one, for topics on default settings."""
    return head.first if head.partition.has_explicit_target else head.count_leaving(closed=1)


def _explicit_to_two_segments(head: _Head) -> int:
    """Phase 4: the same for a topic with settings of its own."""
    return head.count_leaving(closed=1) if head.partition.has_explicit_target else head.first


def _to_active_segment(head: _Head) -> int:
    """Phase 5: leave only the active segment."""
    return head.count_leaving(closed=0)


_REACH: dict[Phase, Callable[[_Head], int]] = {
    Phase.RETENTION: _past_retention,
    Phase.LOCAL_RETENTION: _past_local_retention,
    Phase.DEFAULT_TARGETS: _default_to_two_segments,
    Phase.EXPLICIT_TARGETS: _explicit_to_two_segments,
    Phase.ACTIVE_SEGMENT: _to_active_segment,
}


def _run_phases(
    heads: Sequence[_Head], wanted_bytes: int
) -> tuple[tuple[PhasePlan, ...], TopicPartition | None]:
    """Run the five phases over *heads*, which are in lap order; also return the last giver in a lap."""
    phases: list[PhasePlan] = []
    last: TopicPartition | None = None
    for phase, reach in _REACH.items():
        removals: tuple[Removal, ...] = ()
        if wanted_bytes > 0:
            open_heads = [(head, until) for head in heads if (until := reach(head)) > head.first]
            if phase is Phase.RETENTION:
                removals = _take_largest_first(open_heads, wanted_bytes)
            else:
                removals, last = _take_in_laps(open_heads, wanted_bytes)
        phases.append(PhasePlan(phase, removals))
        wanted_bytes -= phases[-1].size_bytes
    return tuple(phases), last


def _take_largest_first(open_heads: Iterable[tuple[_Head, int]], wanted_bytes: int) -> tuple[Removal, ...]:
    """
    Take all that each head may give, the one with most bytes first, until *wanted_bytes* are found.

    Heads with the same number of bytes stay in lap order.
    """
    by_size = sorted(
        ((_size(head.partition.segments[head.first : until]), head, until) for head, until in open_heads),
        key=itemgetter(0),
        reverse=True,
    )
    removals: list[Removal] = []
    for size_bytes, head, until in by_size:
        if wanted_bytes <= 0:
            break
        stop = until if size_bytes < wanted_bytes else _shortest(head, wanted_bytes)
        removals.append(head.take(stop))
        wanted_bytes -= removals[-1].size_bytes
    return tuple(removals)


def _shortest(head: _Head, wanted_bytes: int) -> int:
    """Return the count of gone segments once just enough are gone for *wanted_bytes*."""
    until = head.first
    while wanted_bytes > 0:
        wanted_bytes -= head.partition.segments[until].size_bytes
        until += 1
    return until


def _take_in_laps(
    open_heads: Sequence[tuple[_Head, int]], wanted_bytes: int
) -> tuple[tuple[Removal, ...], TopicPartition | None]:
    """
    Take one segment of each head in a lap, until *wanted_bytes* are found.

    The bytes of each lap are summed first, so that whole laps are taken in one go: each segment is read
    once, however many laps there are. Also returns the partition that gave last in the lap that ended
    early; None when no lap did.
    """
    laps, missing_bytes = _whole_laps(open_heads, wanted_bytes)
    taken = [min(until, head.first + laps) for head, until in open_heads]
    last: TopicPartition | None = None
    for number, (head, until) in enumerate(open_heads):
        if missing_bytes <= 0:
            break
        if taken[number] < until:
            missing_bytes -= head.partition.segments[taken[number]].size_bytes
            taken[number] += 1
            last = head.partition.topic_partition
    removals = (
        head.take(stop) for (head, _), stop in zip(open_heads, taken, strict=True) if stop > head.first
    )
    return tuple(removals), last


def _whole_laps(open_heads: Iterable[tuple[_Head, int]], wanted_bytes: int) -> tuple[int, int]:
    """Return how many laps fit before the one that finds *wanted_bytes*, and the bytes missing then."""
    lap_bytes: list[int] = []
    for head, until in open_heads:
        lap_bytes.extend([0] * (until - head.first - len(lap_bytes)))
        for lap, segment in enumerate(head.partition.segments[head.first : until]):
            lap_bytes[lap] += segment.size_bytes
    for laps, size_bytes in enumerate(lap_bytes):
        if size_bytes >= wanted_bytes:
            return laps, wanted_bytes
        wanted_bytes -= size_bytes
    return len(lap_bytes), wanted_bytes


def _kept(head: _Head) -> KeptPartition:
    left = head.partition.segments[head.first :]
    return KeptPartition(head.partition.topic_partition, _size(left), _why_kept(head))


def _why_kept(head: _Head) -> str:
    partition = head.partition
    if head.first < head.end:
        return ENOUGH
    if partition.not_reclaimable:
        return partition.not_reclaimable
    if head.first == len(partition.segments):
        return EMPTY
    if head.first == partition.closed_count:
        return ONLY_ACTIVE
    base_offset = partition.segments[head.first].base_offset
    return (
        f"segment {base_offset} is not known to be durable: the archive ends at "
        f"{partition.durable_next_offset}"
    )


def _turn(head: _Head) -> tuple[int, str]:
    """Order a lap: partition 0 of each topic, then partition 1, so that topics take turns."""
    name = head.partition.topic_partition
    return name.partition, name.topic


def _size(segments: Iterable[LocalSegment]) -> int:
    return sum(map(_size_bytes, segments))
