"""
Total retention: how much of a partition is kept in all, on the broker and in the archive.

`retention.ms` and `retention.bytes` hold for both tiers together, and each offset counts once, in
whichever tier it is. A prefix of whole stored segments expires. The limits work together: a segment
expires when either limit is exceeded, so the larger removal wins. Removal by size continues until the
partition is at the limit or under it. The walk goes no further than the archive: what is not durable yet
is uploaded first, and expires later.

Records that a user's DeleteRecords removed from the broker's log (`users_start`) expire as well, whatever
the limits say. The deletion may end inside a segment: that segment stays, but its earlier records are not
read.

This is not local retention, which only moves data off the broker, and this module deletes no object. The
caller stores the new start first and deletes objects after, so that a crash in between leaves
unreferenced objects, and never references to missing ones.

The first evaluation only notes what would expire. The next one, an interval later, has to agree: the
start of a broker's log, its files and its configuration may all be wrong for a moment, and a deletion is
for ever.

A deletion through the gateway, or by `tieringd topic delete-records`, is recorded in the manifest
(`PartitionManifest.deletions`) and needs no evidence.

`users_start` finds every other DeleteRecords of a user in the start of the broker's log. A log's start moves
for three reasons: tieringd trimmed it, the broker's own retention deleted whole segments, or a user had
records deleted. The archive follows only the last, and the broker does not report the reason.

A start inside a record batch is a user's. Segments of every replica begin with a batch, and retention and
trims end where a segment does. This evidence is in the log itself, so a change of leader does not remove it.
There is one exception: a trim that arrives late, after an unclean election, meets other records at its
offset, and may end inside one of their batches. So the start proves nothing where the manifest has a trim
that went as far, and another leader's log has replaced what was archived there.

A start between two batches is certainly a user's where all of this holds:

* it is past tieringd's own trims, which the manifest records, and past where the log began when its
  leader claimed the manifest: replicas roll at different offsets, so an earlier leader's retention may
  have cut inside a segment of this one;
* it is inside a local segment: retention deletes whole ones;
* no stored segment begins there, so that it is not the end of an earlier leader's segment either.

Every other start counts as not a user's: then the archive keeps more than it has to, until total
retention. A log whose offsets are translated (Redpanda's) gives no evidence, because its own retention
may cut a segment. A start is acted on only after two observations that agree, because a broker that
crashed may show another start for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tieringd.model.human_units import span
from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import LocalSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.policies.retention_time import retention_time_ms


def users_start(
    log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int, is_inside_batch: bool = False
) -> int | None:
    """
    Return the offset before which a user deleted the records; None where none did, or it is uncertain.

    *is_inside_batch* says whether a batch of the log begins before *log_start_offset* and ends after it.
    It is always past the archive's start, and may be past the archive's end.
    """
    is_ours = log_start_offset <= manifest.trimmed_offset
    is_followed = min(log_start_offset, manifest.next_offset) <= manifest.start_offset
    if is_followed or log.is_reframed:
        return None
    if is_inside_batch:
        return None if is_ours and _is_replaced(manifest, log_start_offset) else log_start_offset
    if is_ours:
        return None
    is_inside = any(
        segment.base_offset < log_start_offset < (segment.next_offset or log_start_offset + 1)
        for segment in log.segments
    )
    stored = manifest.segments.covering(log_start_offset)
    is_stored_base = stored is not None and stored.base_offset == log_start_offset
    return log_start_offset if is_inside and not is_stored_base else None


def _is_replaced(manifest: PartitionManifest, end_offset: int) -> bool:
    """Say whether what was once archived just below *end_offset* was replaced by another leader's log."""
    return any(one.base_offset < end_offset <= one.last_offset + 1 for one in manifest.replacements)


@dataclass(frozen=True, slots=True)
class TotalRetention:
    """How much of a partition is kept in all; None means no limit of that kind."""

    limit_ms: int | None
    limit_bytes: int | None
    deletes: bool = True
    """Whether `cleanup.policy` includes delete. Without it retention deletes nothing."""
    is_read_remotely: bool = True
    """Whether clients can read the archive. If not, they can read only what is on the broker."""


EDITS_INTERVAL_MAX_MS = 1_800_000
"""Maximum time for which an idle partition's readers see segments that a job has replaced."""


@dataclass(frozen=True, slots=True)
class RetentionPace:
    """How often total retention is evaluated, how long expired objects stay, and how many go at once."""

    interval_ms: int
    delete_delay_ms: int
    """Longer than the longest reader: one that has an old manifest still finds its objects."""
    spilled_parts_max: int = 16
    """Spillover manifests that one evaluation reads: segments that expire later wait for later ones."""
    deleted_at_once_max: int = 500
    """Segments whose objects one step deletes, so that uploads do not wait long behind a large deletion."""

    @property
    def edits_interval_ms(self) -> int:
        """
        Return how often an archiver with nothing to commit checks for edits by a job.

        Often enough to delete what the job replaced when that is due, and seldom enough for ten thousand
        archivers.
        """
        return max(self.interval_ms, min(self.delete_delay_ms // 2, EDITS_INTERVAL_MAX_MS))


@dataclass(frozen=True, slots=True)
class FirstEvaluation:
    """What the first evaluation would have expired, for the next one to confirm."""

    start_offset: int
    deleted_before: int | None = None
    """The log start that it took for a user's DeleteRecords, if any."""


@dataclass(frozen=True, slots=True)
class TotalRetentionPlan:
    """What expires at the head of a partition, and why the next segment stays."""

    start_offset: int
    """The first offset that stays, on the broker and in the archive."""
    segments: int
    """How many of the manifest's first stored segments expire."""
    size_bytes: int
    """The size of their data objects."""
    kept_because: str
    inside_offset: int | None = None
    """
    The offset inside the first segment that stays at which a user lets the archive begin; None for its base.
    """

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
    Choose the stored segments at the head of *manifest* that expire.

    For a manifest with spilled segments, *oldest* are the first segments that are still held, from its
    start on: the plan goes no further than these. *deleted_before* is the result of `users_start`.

    No segment that reaches past *up_to*, the result of an earlier evaluation, expires. For a topic whose
    archive clients do not read, no segment expires that the broker still has: its own retention comes first.
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
            reason = (
                "remote read is off for the topic, and the broker's own retention has not deleted the "
                "segment yet"
            )
        if not reason and up_to is not None and segment.next_offset > up_to:
            reason = "the segment is deleted if the next evaluation gives the same result"
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
    manifest: PartitionManifest, limits: TotalRetention, first: FirstEvaluation | None
) -> float:
    """
    Return the time from which an evaluation may expire something, if nothing but the time changes.

    Infinity when it never does. Where an earlier one waits to be confirmed, the next one always may.
    """
    if first is not None:
        return -math.inf
    if not manifest.segment_count or not limits.deletes or limits.limit_ms is None:
        return math.inf
    if manifest.live_offset > manifest.start_offset:
        return -math.inf  # Only an evaluation can tell the age of the oldest spilled segment.
    return retention_time_ms(manifest.segments[0]) + limits.limit_ms


def plan_local_expiry(log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int) -> int | None:
    """
    Return the offset before which the local log is past total retention; None where nothing is.

    The archive has expired these offsets already, so no stored copy is required. Only whole closed
    segments count, from the head on. The caller has checked that log and archive are on one lineage:
    below the archive's start both held the same records, unless `is_local_expiry_unproved`.
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


def is_local_expiry_unproved(log: LocalLog, manifest: PartitionManifest, *, log_start_offset: int) -> bool:
    """
    Say whether nothing shows that the log's records below the archive's start are those that expired.

    This is so where the archive has a leader-epoch history, and that of the log does not reach back to the
    log's first record: the log may have begun anew, with other records.
    """
    first_offset = log_start_offset if log.first_offset is None else max(log.first_offset, log_start_offset)
    is_whole = bool(log.epochs) and log.epochs[0][1] <= first_offset
    return bool(manifest.epochs) and not is_whole


def total_bytes(manifest: PartitionManifest, log: LocalLog, *, log_start_offset: int) -> int:
    """
    Return the bytes of a partition in both tiers, each offset counted once.

    Stored segments count with their stored size. Of the local log only what the archive does not hold
    counts: its tail, and its records in a recorded gap. Local segments below the log's start, and those
    below the archive's, are being deleted and do not count.
    """
    return manifest.size_bytes + sum(
        _only_local_bytes(segment, manifest)
        for segment in log.segments
        if segment.next_offset is None or segment.next_offset > log_start_offset
    )


def _only_local_bytes(segment: LocalSegment, manifest: PartitionManifest) -> int:
    """
    Return the bytes of a local segment that are not in the archive as well.

    Where a part of it is stored, that part's stored size is subtracted. That may be too much, where other
    bytes are stored or segments were cut elsewhere; then less expires than could.
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
        return "retention.ms and retention.bytes are unlimited"
    return ""


def _why_kept(limits: TotalRetention, *, left_bytes: int, time_ms: int, now_ms: int) -> str:
    """Say why the oldest segment stays, with *left_bytes* in the partition; empty when it expires."""
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
            reasons.append(f"its newest record is dated {span(-age_ms)} in the future")
        else:
            reasons.append(f"its newest record is {span(age_ms)} of at most {span(limits.limit_ms)} old")
    return ", and ".join(reasons)
