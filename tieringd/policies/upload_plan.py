"""
Upload planning: what of one partition's log to upload next, and why not the rest.

Planning starts at the manifest's `next_offset`, oldest first, and stops at the first segment that must
wait, so the remote log never has a hole that is not recorded.

`seconds_to_loss` estimates how long until the broker's own retention would delete what is not durable
yet. Kafka deletes a closed segment when its newest record is older than `retention.ms`, and from the head
while more than `retention.bytes` would remain. The newest record's time is not known before a segment is
read, so the file's modification time is used instead: for data that arrives as it is produced they are
the same. When `retention.bytes` comes to a segment depends on what is written until then, so the log is
taken to grow at its pace of the last hour. The active segment is not safe either. When its newest record
has expired, Kafka closes and deletes it in one go, so no observation shows it as closed. Its stable part is
therefore uploaded in time.

`plan_assignment` decides which archivers should run, given what this broker leads and what runs now. An
archiver belongs to one partition under one leader epoch. A new epoch means a new archiver: the old one
learned the manifest under a claim that has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, LogBounds
from tieringd.model.segment import LocalSegment, RemoteSegment, SegmentSlice
from tieringd.policies.retention_time import CLOCK_ERROR_MAX_MS

_PACE_SECONDS: Final = 3600
"""The log's pace is measured over this time, or since its oldest segment if the log is younger."""
_PACE_SECONDS_MIN: Final = 60
"""A shorter time is taken for as long as this: a burst after the first segment is no pace."""


def seconds_to_loss(
    log: LocalLog,
    *,
    next_offset: int,
    log_end_offset: int,
    retention_ms: int | None,
    retention_bytes: int | None,
    now_ms: int,
) -> float:
    """
    Return the time left for the oldest segment that reaches past *next_offset*, in seconds.

    None as *retention_ms* or *retention_bytes* means no limit. Infinity when nothing waits, nothing limits,
    or a log that only its size limits does not grow; 0 when the broker may delete it at its next check. By
    size the active segment is never deleted.
    """
    remaining_bytes = log.size_bytes
    for segment in log.segments:
        end_offset = log_end_offset if segment.next_offset is None else segment.next_offset
        remaining_bytes -= segment.size_bytes
        if end_offset <= next_offset:
            continue
        by_size = by_time = math.inf
        if retention_bytes is not None and not segment.is_active:
            by_size = _seconds_to_grow(log, max(0, retention_bytes - remaining_bytes), now_ms=now_ms)
        if retention_ms is not None:
            by_time = max(0.0, (segment.modified_ns / 1e6 + retention_ms - now_ms) / 1000)
        return min(by_size, by_time)
    return math.inf


def _seconds_to_grow(log: LocalLog, size_bytes: int, *, now_ms: int) -> float:
    """
    Return the seconds until *log* has grown by *size_bytes* at its pace; infinity if it does not grow.

    The pace is that of the bytes after the newest segment whose last write is an hour old, or after the
    oldest segment. A file with a time in the future, as after a wrong clock, tells of no pace.
    """
    if size_bytes == 0:
        return 0.0
    later_bytes, seconds_per_byte = 0, math.inf
    for segment in reversed(log.segments):
        seconds = (now_ms - segment.modified_ns / 1e6) / 1000
        if later_bytes and seconds > 0:
            seconds_per_byte = max(_PACE_SECONDS_MIN, seconds) / later_bytes
            if seconds >= _PACE_SECONDS:
                break
        later_bytes += segment.size_bytes
    return size_bytes * seconds_per_byte


def rescue_due_ms(log: LocalLog, *, retention_ms: int | None) -> float:
    """
    Return the time from which the stable part of the active segment must not wait until it is closed.

    This is halfway from its last record to its deletion, which leaves the other half for a store that is
    away. Infinity when the broker deletes nothing by time. A segment that is appended to now and then
    never reaches that time, and one that was uploaded has nothing left to upload.
    """
    if retention_ms is None or not log.segments or not log.segments[-1].is_active:
        return math.inf
    return log.segments[-1].modified_ns / 1e6 + retention_ms / 2


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """Archivers to stop and to start, each in partition order."""

    stop: tuple[Leadership, ...]
    start: tuple[Leadership, ...]


def plan_assignment(
    wanted: AbstractSet[Leadership], running: AbstractSet[Leadership], fenced: AbstractSet[Leadership]
) -> AssignmentPlan:
    """
    Compare *wanted* with *running*.

    A leadership in *fenced* was lost to another writer and is not started again: the two would take the
    manifest from each other for ever. The partition may come back under a higher epoch.
    """
    return AssignmentPlan(
        stop=tuple(sorted(running - wanted, key=_order)),
        start=tuple(sorted(wanted - running - fenced, key=_order)),
    )


def _order(leadership: Leadership) -> tuple[str, int, int]:
    return (leadership.partition.topic, leadership.partition.partition, leadership.leader_epoch)


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """How much one step of an archiver uploads."""

    segments_per_step: int = 4
    """Segments that are uploaded concurrently and then committed together, which saves commits."""
    max_interval_ms: int | None = None
    """Maximum time that a stable record waits for its segment to close; None means no limit."""
    cuts_segments: bool = True
    """Whether a part of a segment can be uploaded; if not, each segment waits until it is closed."""


@dataclass(frozen=True, slots=True)
class MissingRange:
    """Offsets between the remote log's end and the oldest local segment: gone from disk."""

    base_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """What to upload now, what waits, and what is missing."""

    slices: tuple[SegmentSlice, ...]
    """Stable and contiguous from `next_offset` (or from the end of *missing*)."""
    pending_bytes: int
    """Bytes of every segment that is eligible now, those of this plan included."""
    pending_segments: int
    waits_because: str
    """Why the first segment that is not eligible waits; empty when nothing waits."""
    missing: MissingRange | None = None
    held_by_transaction: bool = False
    """Whether a closed segment waits only because an open transaction begins inside or below it."""
    held_bytes: int = 0
    """Bytes of the closed segments that wait for that. What is not replicated yet waits for its replicas."""


def plan_uploads(
    log: LocalLog,
    bounds: LogBounds,
    *,
    next_offset: int | None,
    limits: UploadLimits,
    is_overdue: bool = False,
) -> UploadPlan:
    """
    Choose what of *log* to upload, given that the archive continues at *next_offset*.

    None as *next_offset* means that nothing was ever stored: the oldest local segment is the first. A
    segment is eligible when it is closed and ends at or below the last stable offset. When an upload
    *is_overdue*, the stable part of the first segment that is not eligible is uploaded as well, so that
    its records do not wait for the segment to close.
    """
    expected = next_offset
    missing: MissingRange | None = None
    eligible: list[SegmentSlice] = []
    pending_segments = 0
    waits_because = ""
    held: list[LocalSegment] = []
    for segment in log.segments:
        if expected is not None and segment.next_offset is not None and segment.next_offset <= expected:
            continue
        if expected is not None and segment.base_offset > expected:
            if eligible:
                # This happens where a pin is missing. The offsets before the hole are uploaded first; the
                # hole becomes a gap later.
                waits_because = f"offsets {expected} to {segment.base_offset - 1} are missing on disk"
                break
            missing = MissingRange(expected, segment.base_offset - 1)
        first = segment.base_offset if expected is None else max(expected, segment.base_offset)
        waits_because = _why_not_eligible(segment, bounds)
        if waits_because or segment.next_offset is None:
            held = [
                one
                for one in log.segments
                if one.base_offset >= segment.base_offset
                and one.next_offset is not None
                and one.next_offset <= bounds.log_end_offset
            ]
            if is_overdue and first < bounds.last_stable_offset:
                eligible.append(SegmentSlice(segment, first, bounds.last_stable_offset, is_open=True))
            break
        eligible.append(SegmentSlice(segment, first, segment.next_offset))
        pending_segments += 1
        expected = segment.next_offset
    return UploadPlan(
        slices=tuple(eligible[: limits.segments_per_step]),
        pending_bytes=sum(one.segment.size_bytes for one in eligible[:pending_segments]),
        pending_segments=pending_segments,
        waits_because=waits_because,
        missing=missing,
        held_by_transaction=bool(held),
        held_bytes=sum(one.size_bytes for one in held),
    )


def upload_due_ms(manifest: PartitionManifest, *, interval_ms: int | None, now_ms: int) -> float:
    """
    Return the time from which an upload is overdue: *interval_ms* after the last upload.

    Infinity without an interval. The interval counts from the upload of the newest segment in the
    manifest, so it survives restarts and changes of leadership. While nothing is stored it counts from
    the manifest's beginning. A time in the future was noted by a wrong clock: then an upload is overdue now.
    """
    if interval_ms is None:
        return math.inf
    stored = manifest.segments
    last_ms = stored[len(stored) - 1].uploaded_at_ms if len(stored) else manifest.began_at_ms
    return 0 if last_ms > now_ms + CLOCK_ERROR_MAX_MS else last_ms + interval_ms


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


def _why_not_eligible(segment: LocalSegment, bounds: LogBounds) -> str:
    if segment.next_offset is None:
        return f"segment {segment.base_offset} is active"
    if segment.next_offset > bounds.log_end_offset:
        return (
            f"segment {segment.base_offset} ends past the high watermark {bounds.log_end_offset}: its end is "
            "not replicated yet"
        )
    if segment.next_offset > bounds.last_stable_offset:
        return (
            f"segment {segment.base_offset} ends past the last stable offset {bounds.last_stable_offset}: a "
            "transaction is open"
        )
    return ""
