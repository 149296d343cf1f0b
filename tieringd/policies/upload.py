"""
Upload planning: which closed segments of one partition to upload next, and why not the others.

Planning goes on from the manifest's `next_offset`, oldest first, and stops at the first
segment that must wait, so the remote log never has a hole that is not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import LogBounds
    from tieringd.model.segment import LocalSegment, RemoteSegment


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """How much one step of an archiver takes on."""

    segments_per_step: int = 4
    """Uploaded side by side, then committed together: one commit pays for all of them."""


@dataclass(frozen=True, slots=True)
class MissingRange:
    """Offsets between the remote log's end and the oldest local segment: gone from disk."""

    base_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """What to upload now, what waits, and what is missing."""

    segments: tuple[LocalSegment, ...]
    """Closed, stable, contiguous from `next_offset` (or from the end of *missing*)."""
    pending_bytes: int
    """Bytes of every segment that is eligible now, those of this plan included."""
    pending_segments: int
    waits_because: str
    """Why the first segment that is not eligible waits; empty when nothing waits."""
    missing: MissingRange | None = None


def plan_uploads(
    log: LocalLog, bounds: LogBounds, *, next_offset: int | None, limits: UploadLimits
) -> UploadPlan:
    """
    Choose the segments of *log* to upload, given that the archive goes on at *next_offset*.

    None as *next_offset* means that nothing was ever stored: the oldest local segment is the
    first. A segment is eligible when it is closed and ends at or below the last stable offset.
    """
    expected = next_offset
    missing: MissingRange | None = None
    eligible: list[LocalSegment] = []
    waits_because = ""
    for segment in log.segments:
        if expected is not None and segment.next_offset is not None and segment.next_offset <= expected:
            continue
        if expected is not None and segment.base_offset > expected:
            missing = MissingRange(expected, segment.base_offset - 1)
        waits_because = _why_not_eligible(segment, bounds, expected)
        if waits_because:
            break
        eligible.append(segment)
        expected = segment.next_offset
    return UploadPlan(
        segments=tuple(eligible[: limits.segments_per_step]),
        pending_bytes=sum(segment.size_bytes for segment in eligible),
        pending_segments=len(eligible),
        waits_because=waits_because,
        missing=missing,
    )


def admissible_prefix(uploaded: Sequence[RemoteSegment | None], *, next_offset: int) -> int:
    """
    Return how many of *uploaded* may be committed: the longest prefix without failure or gap.

    None stands for an upload that failed. What comes after the prefix stays unreferenced.
    """
    expected = next_offset
    for count, segment in enumerate(uploaded):
        if segment is None or segment.base_offset != expected or segment.last_offset < segment.base_offset:
            return count
        expected = segment.next_offset
    return len(uploaded)


def _why_not_eligible(segment: LocalSegment, bounds: LogBounds, expected: int | None) -> str:
    if segment.next_offset is None:
        return f"segment {segment.base_offset} is active"
    if expected is not None and segment.base_offset < expected:
        return (
            f"segment {segment.base_offset} begins before offset {expected}, where the archive goes on: "
            f"this log was cut into other segments than the one archived before"
        )
    if segment.next_offset > bounds.last_stable_offset:
        return (
            f"segment {segment.base_offset} ends past the last stable offset {bounds.last_stable_offset}: "
            f"a transaction is open, or the data is not replicated yet"
        )
    return ""
