"""
Local retention: how far a partition's local log may be trimmed by time and by size.

A segment may go when it is closed, durable, and past the local target by time or by size.
The walk starts at the head and ends at the first segment that must stay, so a trim is always
a prefix: a hole in the middle of a log is silent in Kafka.

A broker's housekeeping goes by size first and by time from there, or by each alone, and takes what
reaches further; a round later it goes on from what is left. This walk ends where those rounds end.
How the target comes about is `policies.local_target`; the offset that is trimmed to, which may be
another than this one, `policies.trim_target`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.policies.durability import is_comparable, why_not_durable
from tieringd.policies.retention_time import retention_time_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import LocalSegment, RemoteSegment

ACTIVE_STAYS = "the active segment always stays"
NO_ACTIVE_YET = "there is no active segment yet"


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
    def has_checksums(self) -> bool:
        """Say whether the pieces' checksums are of just the segment's bytes."""
        return is_comparable(self.local, self.pieces)


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """The segments that may go, oldest first, and why the next one stays."""

    candidates: tuple[TrimCandidate, ...]
    start_offset: int
    """The first offset that stays: where the local log is allowed to begin."""
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


def _newest_ms(pieces: Sequence[RemoteSegment]) -> int:
    return max(retention_time_ms(piece) for piece in pieces)
