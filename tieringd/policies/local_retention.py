"""
Local retention: how far a partition's local log may be trimmed.

A segment may go when it is closed, durable, and past the local target by time or by size.
The walk starts at the head and ends at the first segment that must stay, so a trim is always
a prefix: a hole in the middle of a log is silent in Kafka.

Durable means that a stored manifest covers the segment with an entry of the same bounds and
the same size. Whether the bytes are the same as well is looked at, by CRC32C, just before the
trim: that takes a read of the file, so it is the archiver's work and not this policy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.model.segment import NO_TIMESTAMP

if TYPE_CHECKING:
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
    """A local segment that may go, and the stored copy that stands for it."""

    local: LocalSegment
    remote: RemoteSegment


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
            remote = manifest.segments.covering(segment.base_offset)
            reason = _why_not_durable(segment, remote) or _why_within_target(
                segment, remote, target, remaining_bytes=remaining_bytes, now_ms=now_ms
            )
            if remote is None or reason:
                return TrimPlan(tuple(candidates), reason)
            candidates.append(TrimCandidate(segment, remote))
        remaining_bytes -= segment.size_bytes
    return TrimPlan(tuple(candidates), "there is no active segment yet" if not log.segments else "")


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


def _why_not_durable(segment: LocalSegment, remote: RemoteSegment | None) -> str:
    if remote is None:
        return f"segment {segment.base_offset} is not in the manifest"
    if (remote.base_offset, remote.next_offset) != (segment.base_offset, segment.next_offset):
        return (
            f"segment {segment.base_offset} is stored with other bounds "
            f"({remote.base_offset} to {remote.last_offset}), so its copy cannot be compared"
        )
    if remote.size_bytes != segment.size_bytes:
        return (
            f"segment {segment.base_offset} has {segment.size_bytes} bytes on disk "
            f"and {remote.size_bytes} in the archive"
        )
    return ""


def _why_within_target(
    segment: LocalSegment,
    remote: RemoteSegment | None,
    target: LocalRetentionTarget,
    *,
    remaining_bytes: int,
    now_ms: int,
) -> str:
    past_size = target.target_bytes is not None and (
        remaining_bytes - segment.size_bytes >= target.target_bytes
    )
    past_time = (
        target.target_ms is not None
        and remote is not None
        and retention_time_ms(remote) <= now_ms - target.target_ms
    )
    if past_size or past_time:
        return ""
    return f"segment {segment.base_offset} is within the local retention target"
