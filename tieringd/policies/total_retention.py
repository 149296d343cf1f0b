"""
Total retention: how much of a partition is kept in all, on the broker and in the archive.

`retention.ms` and `retention.bytes` hold for both tiers together, and each offset counts once, in
whichever tier it is. What goes is a prefix of whole stored segments. The limits work together: a
segment goes when either says so, so the larger removal wins. Size removal goes on until the partition
is at the limit or under it. The walk goes no further than the archive: what is not durable yet is
uploaded first, and goes later.

What a user's DeleteRecords took from the broker's log (`users_start`) goes as well, whatever the
limits say. It may end inside a segment: that one stays, and nobody reads what is before in it.

This is not local retention, which only moves data off the broker, and nothing here deletes an
object. Whoever acts on a plan stores the new start first and deletes objects after, so that a crash
in between leaves objects that nothing refers to, and never references to nothing.

What one look would let go is only noted. The next look, an interval later, has to agree: the start of
a broker's log, its files and its configuration may all be wrong for a moment, and a deletion is for
ever.

`users_start` finds a user's DeleteRecords in the start of the broker's log. A log's start moves on for
three reasons: we trimmed it, the broker's own retention took whole segments, or a user had records deleted.
The archive follows only the last, and the broker does not say which one it was. A start is certainly a
user's where all of this holds:

* it is past our own trims, of which the manifest has a record, and past where the log began when its leader
  claimed the manifest: replicas roll at different offsets, so what an earlier leader's retention cut may lie
  inside a segment of ours;
* it is inside a local segment: retention takes whole ones;
* no stored segment begins there, so that it is no end of a segment of an earlier leader either.

Every other start counts as not a user's: then the archive keeps more than it has to, until total retention.
A log whose offsets are translated (Redpanda's) tells nothing, as its own retention may cut a segment. A
start is acted on only after two observations that agree, because a broker that crashed may show another
start for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.policies.retention_time import retention_time_ms

if TYPE_CHECKING:
    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import LocalSegment
    from tieringd.model.segment_table import SegmentTable


def users_start(log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int) -> int | None:
    """
    Return the offset before which a user deleted the records; None where none did, or it is not certain.

    It is never past what is archived, and always past the archive's start.
    """
    start_offset = min(log_start_offset, manifest.next_offset)
    is_ours = log_start_offset <= manifest.trimmed_offset
    if is_ours or start_offset <= manifest.start_offset or log.is_reframed:
        return None
    is_inside = any(
        segment.base_offset < log_start_offset < (segment.next_offset or log_start_offset + 1)
        for segment in log.segments
    )
    stored = manifest.segments.covering(log_start_offset)
    is_stored_base = stored is not None and stored.base_offset == log_start_offset
    return start_offset if is_inside and not is_stored_base else None


@dataclass(frozen=True, slots=True)
class TotalRetention:
    """How much of a partition is kept in all; None means no limit of that kind."""

    limit_ms: int | None
    limit_bytes: int | None
    deletes: bool = True
    """Whether `cleanup.policy` has delete in it. Without it retention takes nothing."""
    is_read_remotely: bool = True
    """Whether clients can read the archive. If not, all they have is on the broker."""


EDITS_INTERVAL_MAX_MS = 1_800_000
"""What a job has replaced is what an idle partition's readers see for no longer than that."""


@dataclass(frozen=True, slots=True)
class RetentionPace:
    """How often total retention is looked at, and how long objects outlive it."""

    interval_ms: int
    delete_delay_ms: int
    """Longer than the longest reader: one that has an old manifest still finds its objects."""

    @property
    def edits_interval_ms(self) -> int:
        """
        Return how often an archiver that has nothing to commit looks whether a job edited its manifest.

        In time to delete what the job replaced when that is due, and seldom enough for ten thousand of them.
        """
        return max(self.interval_ms, min(self.delete_delay_ms // 2, EDITS_INTERVAL_MAX_MS))


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What an earlier look would have let go, to be confirmed by a later one."""

    start_offset: int
    looked_at_ms: int
    deleted_before: int | None = None
    """Where it saw that a user's DeleteRecords lets the log begin."""


@dataclass(frozen=True, slots=True)
class TotalRetentionPlan:
    """What goes from the head of a partition, and why the next segment stays."""

    start_offset: int
    """The first offset that stays, on the broker and in the archive."""
    segments: int
    """How many stored segments go: the first so many of the manifest."""
    size_bytes: int
    """Of their data objects."""
    kept_because: str
    inside_offset: int | None = None
    """Where in the first segment that stays a user lets the archive begin; None where that is its base."""

    @property
    def first_offset(self) -> int:
        """Return the first offset that can be read from then on."""
        return self.start_offset if self.inside_offset is None else self.inside_offset


def plan_total_retention(
    manifest: PartitionManifest,
    log: LocalLog,
    limits: TotalRetention,
    *,
    log_start_offset: int,
    now_ms: int,
    up_to: int | None = None,
    oldest: SegmentTable | None = None,
    deleted_before: int | None = None,
) -> TotalRetentionPlan:
    """
    Choose the stored segments at the head of *manifest* that total retention lets go.

    Of a manifest that is spilled, *oldest* are the first segments that are still held, from its start on:
    the plan goes no further than these. *deleted_before* is the answer of `users_start`.

    Nothing goes that reaches past *up_to*, which is what an earlier look found. Of a topic that
    clients do not read from the archive nothing goes that the broker still has: its own retention
    comes first.
    """
    table = manifest.segments if oldest is None else oldest
    refusal = _why_nothing_goes(limits)
    if refusal and (deleted_before is None or not limits.deletes):
        return TotalRetentionPlan(manifest.start_offset, 0, 0, refusal)
    deleted_before = deleted_before or 0
    left_bytes = total_bytes(manifest, log, log_start_offset=log_start_offset)
    start_offset, gone_bytes = manifest.start_offset, 0
    for row, segment in enumerate(table):
        reason = refusal or _why_kept(
            limits, left_bytes=left_bytes, time_ms=retention_time_ms(segment), now_ms=now_ms
        )
        if segment.next_offset <= deleted_before:
            reason = ""
        if not reason and not limits.is_read_remotely and segment.next_offset > log_start_offset:
            reason = "remote read is off for the topic, and the broker's own retention has not taken it yet"
        if not reason and up_to is not None and segment.next_offset > up_to:
            reason = "it goes when the next look finds so as well"
        if reason:
            because = f"segment {segment.base_offset} stays: {reason}"
            is_cut = max(manifest.start_offset, segment.base_offset) < deleted_before <= segment.last_offset
            return TotalRetentionPlan(
                start_offset, row, gone_bytes, because, deleted_before if is_cut else None
            )
        left_bytes -= segment.size_bytes
        gone_bytes += segment.size_bytes
        start_offset = segment.next_offset
    rest = f"{left_bytes} bytes are only on the broker" if len(table) else "nothing is in the archive"
    return TotalRetentionPlan(start_offset, len(table), gone_bytes, rest)


def expiry_due_ms(
    manifest: PartitionManifest, limits: TotalRetention, first: FirstLook | None, *, interval_ms: int
) -> float:
    """
    Return from when on a look may find something to go, if nothing but the time changes.

    Infinity when it never does. What an earlier look found is due an interval after it.
    """
    if first is not None:
        return first.looked_at_ms + interval_ms
    if not manifest.segment_count or not limits.deletes or limits.limit_ms is None:
        return math.inf
    if manifest.live_offset > manifest.start_offset:
        return -math.inf  # How old the oldest spilled segment is takes a look.
    return retention_time_ms(manifest.segments[0]) + limits.limit_ms


def plan_local_expiry(log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int) -> int | None:
    """
    Return the offset before which the local log is past total retention; None where nothing is.

    The archive has let go of it already, so no copy is asked for. Only whole closed segments count,
    from the head on. The caller has seen that log and archive are on one lineage: below the archive's
    start both held the same records.
    """
    if manifest.expired_at_ms is None:
        return None
    before_offset: int | None = None
    for segment in log.segments:
        if segment.next_offset is None or segment.next_offset > manifest.start_offset:
            break
        if segment.next_offset > log_start_offset:
            before_offset = segment.next_offset
    return before_offset


def total_bytes(manifest: PartitionManifest, log: LocalLog, *, log_start_offset: int) -> int:
    """
    Return the bytes of a partition in both tiers, each offset counted once.

    What is stored counts as it is stored. Of the local log that leaves what the archive does not
    hold: its tail, and what it has in the place of a recorded gap. Local segments below the log's
    start, and those below the archive's, are on their way out and do not count.
    """
    return manifest.size_bytes + sum(
        _only_local_bytes(segment, manifest)
        for segment in log.segments
        if segment.next_offset is None or segment.next_offset > log_start_offset
    )


def _only_local_bytes(segment: LocalSegment, manifest: PartitionManifest) -> int:
    """
    Return the bytes of a local segment that are not in the archive as well.

    Where a part of it is stored, that part's stored size is taken off. It may be too much, where
    other bytes are stored or they were cut elsewhere, and then less goes than could.
    """
    end = manifest.next_offset if segment.next_offset is None else segment.next_offset
    in_gap = any(gap.base_offset < end and gap.next_offset > segment.base_offset for gap in manifest.gaps)
    if segment.next_offset is not None and segment.next_offset <= manifest.next_offset and not in_gap:
        return 0
    pieces = manifest.segments.overlapping(segment.base_offset, end)
    return max(0, segment.size_bytes - sum(piece.size_bytes for piece in pieces))


def _why_nothing_goes(limits: TotalRetention) -> str:
    if not limits.deletes:
        return "cleanup.policy does not delete"
    if limits.limit_ms is None and limits.limit_bytes is None:
        return "retention.ms and retention.bytes are without limit"
    return ""


def _why_kept(limits: TotalRetention, *, left_bytes: int, time_ms: int, now_ms: int) -> str:
    """Say why the oldest segment stays, with *left_bytes* in the partition; empty when it goes."""
    reasons = []
    if limits.limit_bytes is not None:
        if left_bytes > limits.limit_bytes:
            return ""
        reasons.append(f"the partition has {left_bytes} of at most {limits.limit_bytes} bytes")
    if limits.limit_ms is not None:
        age_ms = now_ms - time_ms
        if age_ms >= limits.limit_ms:
            return ""
        if age_ms < 0:
            reasons.append(f"its newest record is dated {-age_ms} ms in the future")
        else:
            reasons.append(f"its newest record is {age_ms} of at most {limits.limit_ms} ms old")
    return ", and ".join(reasons)
