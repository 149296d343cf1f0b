"""
Space plan: what the partitions on one filesystem give up when their logs are over the log area.

Values only: what a plan is made from, and what it says. `policies.space_planner` makes it. Nothing
is trimmed here. The archiver raises its trim target to the plan's offset, and proves and clamps as
for any other trim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.partition import TopicPartition
    from tieringd.model.segment import LocalSegment

_DEAD_BANDS_IN_TARGET = 20
"""At least so many: on a small disk one segment can be all the room there is."""


class Phase(IntEnum):
    """Where a removal comes from. They act in this order."""

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
    Phase.RETENTION: "what retention and advised local targets allow",
    Phase.LOCAL_RETENTION: "what is past strict local targets by now",
    Phase.DEFAULT_TARGETS: "topics on default local settings, down to two segments",
    Phase.EXPLICIT_TARGETS: "topics with local settings of their own, down to two segments",
    Phase.ACTIVE_SEGMENT: "every topic, down to its active segment",
}


@dataclass(frozen=True, slots=True)
class SpacePartition:
    """A partition on the filesystem, and how far each rule lets its log be trimmed."""

    topic_partition: TopicPartition
    segments: Sequence[LocalSegment]
    """The scan's own, ascending, the active one last; shared and never copied."""
    log_start_offset: int
    """Closed segments that end at or below it are on their way out."""
    durable_next_offset: int
    """Everything below it is proved durable; nothing at or past it is ever planned."""
    retention_next_offset: int
    """
    How far the log may go before anything else does.

    Where local targets are strict: as far as the published hint. Where they are advice: to the local target,
    since the data past it is on this disk only for as long as there is room.
    """
    local_retention_next_offset: int
    """How far the local target lets the log go by now; a strict target's hint may lag behind it."""
    has_explicit_target: bool
    """Whether the topic has local settings of its own."""
    not_reclaimable: str = ""
    """Why this partition gives nothing at all; empty when it may."""

    @property
    def closed_count(self) -> int:
        """Return how many of the segments the broker no longer appends to."""
        is_last_active = bool(self.segments) and self.segments[-1].is_active
        return len(self.segments) - is_last_active


@dataclass(frozen=True, slots=True)
class SpaceDemand:
    """How much is in use, and how much is to be."""

    used_bytes: int
    """By the logs on the filesystem, with what is still on its way out."""
    target_bytes: int
    """The log area."""
    segment_bytes: int
    """The size of an ordinary segment: to be over the target by no more than that is not worth a removal."""
    overage_coefficient: float
    """By how much more than the excess to remove, for what is written until the next round; 1 is no more."""

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
    """The log may go up to here, exclusive."""
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
class Kept:
    """What one partition keeps, and why the oldest segment of it stays."""

    topic_partition: TopicPartition
    size_bytes: int
    because: str


@dataclass(frozen=True, slots=True)
class SpacePlan:
    """What to remove from one filesystem, phase by phase."""

    excess_bytes: int
    """Over the target, without what is on its way out."""
    wanted_bytes: int
    """What to remove: 0 within the dead band."""
    leaving_bytes: int
    """On its way out since an earlier trim."""
    phases: tuple[PhasePlan, ...]
    """Always all five, in order."""
    kept: tuple[Kept, ...]
    """For every partition, in order of topic and number."""
    cursor: TopicPartition | None
    """Who gave the last segment in a lap: the next round's laps begin after it."""

    @property
    def removed_bytes(self) -> int:
        """Return the bytes that all phases remove."""
        return sum(one.size_bytes for one in self.phases)

    @property
    def short_by_bytes(self) -> int:
        """Return by how much usage stays over the target because no phase finds more."""
        return max(0, self.excess_bytes - self.removed_bytes) if self.wanted_bytes else 0

    def cloud_gc_offsets(self) -> dict[TopicPartition, int]:
        """Return how far each partition's log may go, after all phases."""
        # A later phase goes on where an earlier one ended, so its offset is the higher one.
        return {
            removal.topic_partition: removal.next_offset
            for phase in self.phases
            for removal in phase.removals
        }
