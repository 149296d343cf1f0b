"""What a partition manifest notes besides the segments that it holds: gaps, and what was taken out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.model.segment_table import SegmentTable


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets that the archive will never hold, and why. Never silent: also a metric and an alert."""

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
        """Return how many offsets are in it."""
        return self.next_offset - self.base_offset


@dataclass(frozen=True, slots=True)
class Replacement:
    """Offsets that were stored, and replaced: another leader's log took their place."""

    base_offset: int
    last_offset: int
    leader_epoch: int
    """Of the leader whose log is archived from here on."""
    replaced_at_ms: int


@dataclass(frozen=True, slots=True)
class Retired:
    """Segments that were taken out of a manifest, and whose objects are still in the store."""

    segments: SegmentTable
    retired_at_ms: int
    """Readers that began before may still have the old manifest, and need the objects."""
