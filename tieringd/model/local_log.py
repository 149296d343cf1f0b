"""
What one scan of the log directories saw of a partition.

`LogDirSizes` is what one log directory of a cluster's broker holds, as the broker itself reports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from tieringd.model.partition import TopicPartition
from tieringd.model.segment import EpochStart, LocalSegment

NO_BROKER = -1
"""Stands for a broker's id if there is no broker, or if it is unknown."""

Hole: TypeAlias = tuple[int, int]
"""Offsets between two segments of a log that no segment has: the first one, and the one after the last."""


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    """The `.log` bytes of one partition in one log directory."""

    topic_partition: TopicPartition
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LogDirSizes:
    """One log directory of one broker."""

    broker: int
    path: str
    """Empty if the broker reported none of its log directories."""
    replicas: tuple[ReplicaSize, ...] = ()
    error: str = ""
    """Why the content is unknown; empty if it is known."""


@dataclass(frozen=True, slots=True)
class LocalPartition:
    """A partition's directory inside a log directory."""

    topic_partition: TopicPartition
    topic_id: str
    """The topic's id from `partition.metadata`; NO_TOPIC_ID when the file is absent."""
    path: str
    log_dir: str


@dataclass(frozen=True, slots=True)
class LocalLog:
    """The segments of one partition's directory, ascending by base offset."""

    partition: LocalPartition
    segments: tuple[LocalSegment, ...]
    epochs: tuple[EpochStart, ...]
    """`leader-epoch-checkpoint`; empty when the file is absent."""
    is_reframed: bool = False
    """Whether the files have other bytes than the stored Kafka batches. Their sizes then differ."""

    @property
    def closed_segments(self) -> tuple[LocalSegment, ...]:
        """Return the segments that the broker no longer appends to, oldest first."""
        return tuple(segment for segment in self.segments if not segment.is_active)

    @property
    def first_offset(self) -> int | None:
        """Return the base offset of the oldest segment on disk, or None if there is no segment."""
        return self.segments[0].base_offset if self.segments else None

    @property
    def holes(self) -> frozenset[Hole]:
        """Return the holes: places where a segment does not begin at the end of the one before it."""
        return frozenset(
            (before.next_offset, segment.base_offset)
            for before, segment in pairwise(self.segments)
            if before.next_offset is not None and before.next_offset != segment.base_offset
        )

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all `.log` files. The active file's size is the one from stat."""
        return sum(segment.size_bytes for segment in self.segments)
