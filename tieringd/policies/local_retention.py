"""
Local retention: how far a partition's local log may be trimmed.

A segment may go when it is closed, durable, and past the local target by time or by size.
The walk starts at the head and ends at the first segment that must stay, so a trim is always
a prefix: a hole in the middle of a log is silent in Kafka.

Durable means that a stored manifest covers the segment without a hole: mostly with one entry of
the same bounds and size, else with several, or with entries that another leader cut elsewhere.
Whether the bytes are the same is looked at just before the trim: that takes a read of the file,
so it is the trimmer's work and not this policy's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.model.segment import NO_TIMESTAMP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import LocalSegment, RemoteSegment


@dataclass(frozen=True, slots=True)
class LocalRetentionTarget:
    """How much of a partition stays on the broker; None means no limit of that kind."""

    target_ms: int | None
    target_bytes: int | None


@dataclass(frozen=True, slots=True)
class TrimCandidate:
    """A local segment that may go, and the stored ones that stand for it."""

    local: LocalSegment
    pieces: tuple[RemoteSegment, ...]
    """Ascending and contiguous; together they cover the segment."""

    @property
    def next_offset(self) -> int:
        """Return the first offset after the segment."""
        assert self.local.next_offset is not None, "only closed segments are trimmed"
        return self.local.next_offset

    @property
    def is_aligned(self) -> bool:
        """Say whether the pieces begin and end where the segment does."""
        return (self.pieces[0].base_offset, self.pieces[-1].next_offset) == (
            self.local.base_offset,
            self.local.next_offset,
        )


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """The segments that may go, oldest first, and why the next one stays."""

    candidates: tuple[TrimCandidate, ...]
    kept_because: str


def plan_trim(
    log: LocalLog,
    manifest: PartitionManifest,
    target: LocalRetentionTarget,
    *,
    log_start_offset: int,
    now_ms: int,
) -> TrimPlan:
    """
    Choose the closed segments at the head of *log* that may be let go.

    Segments below *log_start_offset* are on their way out already: they count as gone and are
    not named again. By size, a segment goes only while at least `target_bytes` remain, as
    Kafka's own local retention does.
    """
    remaining_bytes = log.size_bytes
    candidates: list[TrimCandidate] = []
    for segment in log.segments:
        if segment.next_offset is None:
            return TrimPlan(tuple(candidates), "the active segment always stays")
        if segment.next_offset > log_start_offset:
            pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
            reason = _why_not_durable(segment, pieces, is_reframed=log.is_reframed) or _why_within_target(
                segment, pieces, target, remaining_bytes=remaining_bytes, now_ms=now_ms
            )
            if reason:
                return TrimPlan(tuple(candidates), reason)
            candidates.append(TrimCandidate(segment, pieces))
        remaining_bytes -= segment.size_bytes
    return TrimPlan(tuple(candidates), "there is no active segment yet" if not log.segments else "")


def trim_due_ms(
    log: LocalLog, manifest: PartitionManifest, target: LocalRetentionTarget, *, log_start_offset: int
) -> float:
    """
    Return from when on `plan_trim` names a segment, if nothing but the time changes.

    Infinity when it never does.
    """
    remaining_bytes = log.size_bytes
    for segment in log.segments:
        if segment.next_offset is None:
            break
        if segment.next_offset > log_start_offset:
            pieces = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
            if _why_not_durable(segment, pieces, is_reframed=log.is_reframed):
                break
            if _is_past_size(segment, target, remaining_bytes=remaining_bytes):
                return -math.inf
            return math.inf if target.target_ms is None else _newest_ms(pieces) + target.target_ms
        remaining_bytes -= segment.size_bytes
    return math.inf


def retention_time_ms(segment: RemoteSegment) -> int:
    """
    Return the time from which a segment's age counts.

    It is the newest record's timestamp, but never later than the upload: one record dated in
    the future must not keep its segment, and all that follow, for ever. Records without a
    timestamp count from the upload.
    """
    if segment.max_timestamp_ms == NO_TIMESTAMP:
        return segment.uploaded_at_ms
    return min(segment.max_timestamp_ms, segment.uploaded_at_ms)


def _why_not_durable(segment: LocalSegment, pieces: Sequence[RemoteSegment], *, is_reframed: bool) -> str:
    assert segment.next_offset is not None, "only closed segments are looked at"
    expected = segment.base_offset
    for piece in pieces:
        if piece.base_offset > expected:
            break
        expected = piece.next_offset
    if not pieces or expected < segment.next_offset:
        return f"offset {expected} of segment {segment.base_offset} is not in the archive"
    stored_bytes = sum(piece.size_bytes for piece in pieces)
    candidate = TrimCandidate(segment, tuple(pieces))
    if candidate.is_aligned and not is_reframed and stored_bytes != segment.size_bytes:
        return (
            f"segment {segment.base_offset} has {segment.size_bytes} bytes on disk "
            f"and {stored_bytes} in the archive"
        )
    return ""


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


def _newest_ms(pieces: Sequence[RemoteSegment]) -> int:
    return max(retention_time_ms(piece) for piece in pieces)
