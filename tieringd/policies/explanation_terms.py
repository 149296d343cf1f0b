"""
The terms of an explanation: where a segment is, what is next for it, and why.

Values only. How they come about is in `policies.explanation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.policies.local_hint import HintShape
    from tieringd.policies.local_target import LocalTarget
    from tieringd.policies.total_retention import TotalRetention


class Place(StrEnum):
    """Where a segment's bytes are."""

    LOCAL = "local"
    PARTLY = "partly"
    """On the broker, and the head of it in the archive."""
    BOTH = "both"
    ARCHIVE = "archive"
    NOWHERE = "nowhere"


class State(StrEnum):
    """What is next for a segment."""

    ACTIVE = "active"
    WAITING = "waiting"
    """To be uploaded, but not yet."""
    DUE = "due"
    """To be uploaded now."""
    UNPROVED = "unproved"
    """The archive goes on after it, and does not hold what is on disk."""
    KEPT = "kept"
    TRIMMABLE = "trimmable"
    LEAVING = "leaving"
    """Trimmed; the broker has the files still."""
    ARCHIVED = "archived"
    EXPIRED = "expired"
    """Past total retention, in whichever tier it is."""
    RETIRED = "retired"
    """Out of the archive by total retention; its objects are still in the store."""
    GAP = "gap"
    MISSING = "missing"
    """Gone from disk before it was uploaded, and not recorded as a gap yet."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What holds for the topic, as far as its segments depend on it."""

    local_target: LocalTarget
    hint_shape: HintShape
    """It says as well whether the local log is never trimmed."""
    total: TotalRetention
    delete_delay_ms: int = 0
    """For so long objects stay after their segment has left the archive."""
    is_compact_only: bool = False
    reuploads_compacted: bool = False
    """Whether what compaction leaves of a segment takes the place of what was archived of it."""
    idle_because: str = ""
    """Why nothing is uploaded or trimmed from here at all, as `why_idle` says."""
    upload_interval_ms: int | None = None
    """After which the stable part of the active segment is uploaded; None lets it wait."""


@dataclass(frozen=True, slots=True)
class SegmentExplanation:
    """One segment: a file on the broker with what the archive has of it, or a stored one without a file."""

    base_offset: int
    last_offset: int | None
    """None for the active segment."""
    local_bytes: int | None
    archived_bytes: int | None
    place: Place
    state: State
    reason: str
    next_step: str
    due_ms: int | None = None
    """When time alone brings the next step; None where it takes more, or other things."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A partition's segments, and what holds for all of them."""

    segments: tuple[SegmentExplanation, ...]
    """Ascending by base offset."""
    trim_offset: int
    """How far the local log may be trimmed now."""
    trim_because: str
    never_trimmed_because: str
    """Why the local log is never trimmed by us; empty when it may be."""
    expired_offset: int
    """The first offset that total retention keeps."""
    expired_because: str
