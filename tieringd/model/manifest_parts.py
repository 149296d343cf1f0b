"""
What a partition manifest records besides its segments.

These are gaps, segments that were taken out, and the records that a user deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tieringd.model.segment_table import SegmentTable


@dataclass(frozen=True, slots=True)
class Gap:
    """
    Offsets that the archive will never hold, and why.

    Each gap is also counted in a metric and raises an alert.
    """

    base_offset: int
    last_offset: int
    reason: str
    recorded_at_ms: int

    @property
    def next_offset(self) -> int:
        """Return the first offset after the gap."""
        return self.last_offset + 1

    @property
    def offsets(self) -> int:
        """Return how many offsets it has."""
        return self.next_offset - self.base_offset


@dataclass(frozen=True, slots=True)
class Replacement:
    """Offsets that were stored and then replaced by those of another leader's log."""

    base_offset: int
    last_offset: int
    leader_epoch: int
    """The epoch of the leader whose log is archived from here on."""
    replaced_at_ms: int

    @property
    def identity(self) -> tuple[int, int, int]:
        """Return all but the time, which a daemon corrects where a wrong clock has recorded it."""
        return self.base_offset, self.last_offset, self.leader_epoch


@dataclass(frozen=True, slots=True)
class Retired:
    """Segments that were taken out of a manifest, and whose objects are still in the store."""

    segments: SegmentTable
    retired_at_ms: int
    """Time of their removal in ms since the epoch. Earlier readers may still need the objects."""
    winners_end: int = 0
    """
    For segments that a compaction replaced: the exclusive end of the offsets of the winners.

    While it is set the objects are held: the segments take their places again when an election cuts a
    winner off the archive. `policies.record_removal` says when it may be cleared. 0 means: not held.
    """

    @property
    def is_held(self) -> bool:
        """Say whether the segments may have to take their places again."""
        return self.winners_end > 0

    @property
    def base_offset(self) -> int:
        """Return the first offset of the segments; there is at least one."""
        return self.segments[0].base_offset

    @property
    def next_offset(self) -> int:
        """Return the first offset after the segments."""
        return self.segments[len(self.segments) - 1].next_offset


@dataclass(frozen=True, slots=True)
class Unsettled:
    """
    Offsets of which compactions removed records, and whose replaced segments are not held.

    If an election cuts a winner off the archive, only the new leader's log can bring the records back.
    """

    base_offset: int
    """No record below it was removed in this way."""
    winners_end: int
    """Exclusive: all winners lie below it."""

    def joined(self, other: Unsettled | None) -> Unsettled:
        """Return one value that covers both."""
        if other is None:
            return self
        return Unsettled(min(self.base_offset, other.base_offset), max(self.winners_end, other.winners_end))


@dataclass(frozen=True, slots=True)
class RecordDeletion:
    """
    A user's deletion of all records before an offset. The archive follows it as far as it reaches.

    The archive may be behind the deletion. Segments that are uploaded later follow it then.
    """

    before_offset: int
    """The first offset that stays."""
    leader_epoch: int
    """
    The leader epoch under which the records were deleted, or an earlier one.

    Records that a leader of a later epoch wrote at these offsets are other records.
    """


def furthest(deletions: Iterable[RecordDeletion]) -> tuple[RecordDeletion, ...]:
    """Return those of *deletions* that no other one covers, both in offset and in leader epoch."""
    kept: list[RecordDeletion] = []
    for one in sorted(deletions, key=lambda one: (one.before_offset, one.leader_epoch), reverse=True):
        if not kept or one.leader_epoch > kept[-1].leader_epoch:
            kept.append(one)
    return tuple(kept)
