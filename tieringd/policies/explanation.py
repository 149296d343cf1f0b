"""
Explanation: why each segment of a partition is where it is, and what would move it.

It decides nothing. It asks the policies that do, those of uploads, of local and of total retention, and
applies their answers to each segment. The reason for the first segment that stays holds for the later
ones too: uploads, trims and deletions proceed from one end, so a segment also waits for those before it.

This module does not know what the daemon did, or failed to do. The daemon's faults are on its status page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from tieringd.model.human_units import span
from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import LogBounds
from tieringd.model.segment import LocalSegment, RemoteSegment
from tieringd.policies.compacted_reupload import ReuploadPlan, plan_reuploads
from tieringd.policies.durability import why_not_durable
from tieringd.policies.limit_wording import KeptReason, kept_in_total, kept_locally
from tieringd.policies.local_hint import HintShape
from tieringd.policies.local_retention import LocalTarget, TrimPlan, plan_trim
from tieringd.policies.retention_time import retention_time_ms
from tieringd.policies.total_retention import TotalRetention, plan_total_retention, total_bytes
from tieringd.policies.trim_target import ShareGroupHold, TrimTarget, TrimWishes, plan_trim_to_target
from tieringd.policies.upload_plan import MissingRange, UploadLimits, UploadPlan, plan_uploads, upload_due_ms


class Place(StrEnum):
    """The tier that has a segment's bytes."""

    LOCAL = "local"
    PARTLY = "partly"
    """The broker has the segment, and the archive its head."""
    BOTH = "both"
    ARCHIVE = "archive"
    NOWHERE = "nowhere"


class State(StrEnum):
    """The next step for a segment."""

    ACTIVE = "active"
    WAITING = "waiting"
    """The upload comes later."""
    DUE = "due"
    """The upload is due now."""
    UNPROVED = "unproved"
    """The archive continues after it, and does not hold what is on disk."""
    KEPT = "kept"
    TRIMMABLE = "trimmable"
    LEAVING = "leaving"
    """Trimmed, but the broker still has the files."""
    ARCHIVED = "archived"
    EXPIRED = "expired"
    """Past total retention, in whichever tier it is."""
    RETIRED = "retired"
    """Removed from the archive by total retention; its objects are still in the store."""
    GAP = "gap"
    MISSING = "missing"
    """Gone from disk before it was uploaded, and not recorded as a gap yet."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """The topic's settings that its segments depend on."""

    local_target: LocalTarget
    hint_shape: HintShape
    """Also says whether the local log is never trimmed."""
    total: TotalRetention
    delete_delay_ms: int = 0
    """How long objects stay after their segment has left the archive."""
    is_compact_only: bool = False
    reuploads_compacted: bool = False
    """Whether a compacted segment replaces its archived form."""
    idle_because: str = ""
    """Why this daemon uploads and trims nothing of the partition, as `why_idle` returns it."""
    share_group_hold: ShareGroupHold | None = None
    """The records that share groups still need; None where they need none."""
    upload_interval_ms: int | None = None
    """Age after which the stable part of the active segment is uploaded; None never uploads it early."""


@dataclass(frozen=True, slots=True)
class SegmentExplanation:
    """One segment: a local file with what the archive has of it, or a stored segment without a file."""

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
    """Time of the next step in ms since the epoch; None where it depends on more than time."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A partition's segments, and what holds for all of them."""

    segments: tuple[SegmentExplanation, ...]
    """Ascending by base offset."""
    trim_offset: int
    """How far the local log may be trimmed now."""
    trim_because: str
    never_trimmed_because: str
    """Why tieringd never trims the local log; empty when it may."""
    expired_offset: int
    """The first offset that total retention keeps."""
    expired_because: str


def why_idle(*, is_written: bool, is_paused: bool, is_held: bool, is_led: bool) -> str:
    """Say why this broker's daemon neither uploads nor trims a partition; empty when it may."""
    if not is_written:
        return "remote write is off for the topic"
    if is_paused:
        return "the topic is paused; `tieringd topic resume` resumes it"
    if not is_held:
        return "this broker has no replica of the partition"
    if not is_led:
        return "another broker leads the partition, and the daemon there archives it"
    return ""


def explain(
    log: LocalLog, manifest: PartitionManifest, bounds: LogBounds | None, facts: TopicFacts, *, now_ms: int
) -> Explanation:
    """
    Explain each segment of *log* and *manifest*.

    *bounds* may be None only where this broker does not lead the partition; *facts* then has
    `idle_because`.
    """
    assert bounds is not None or facts.idle_because, "the leader knows the bounds of its log"
    known = _PolicyAnswers(log, manifest, bounds, facts, now_ms)
    found = [*known.local(), *known.archived(), *known.retired(), *known.gaps(), *known.missing()]
    return Explanation(
        segments=tuple(sorted(found, key=attrgetter("base_offset"))),
        trim_offset=known.log_start if facts.idle_because else known.target.offset,
        trim_because=facts.idle_because or known.target.because,
        never_trimmed_because=known.never_trimmed,
        expired_offset=known.expiry.start_offset,
        expired_because=known.expiry.kept_because,
    )


class _PolicyAnswers:
    """The policies' answers for one partition, and what follows for each segment."""

    def __init__(
        self,
        log: LocalLog,
        manifest: PartitionManifest,
        bounds: LogBounds | None,
        facts: TopicFacts,
        now_ms: int,
    ) -> None:
        self.log, self.manifest, self.facts, self.now_ms = log, manifest, facts, now_ms
        self.log_start = bounds.log_start_offset if bounds else log.first_offset or 0
        self.upload_due_ms = upload_due_ms(manifest, interval_ms=facts.upload_interval_ms, now_ms=now_ms)
        self.upload: UploadPlan | None = None
        if bounds is not None and not facts.idle_because:
            self.upload = plan_uploads(
                log,
                bounds,
                next_offset=manifest.next_offset,
                limits=UploadLimits(segments_per_step=len(log.segments)),
                is_overdue=now_ms >= self.upload_due_ms,
            )
        self.reuploads: ReuploadPlan | None = None
        if bounds is not None and facts.reuploads_compacted and not facts.idle_because:
            is_trimmed = not facts.hint_shape.never_trimmed_because
            self.reuploads = plan_reuploads(log, manifest, bounds, is_trimmed=is_trimmed)
        self.never_trimmed = facts.hint_shape.never_trimmed_because
        self.target, self.trim = self._plan_trim()
        self.expiry = plan_total_retention(
            manifest, log, facts.total, log_start_offset=self.log_start, now_ms=now_ms
        )

    def _plan_trim(self) -> tuple[TrimTarget, TrimPlan]:
        shape = self.facts.hint_shape
        hint: int | None = None
        if shape.has_hint:
            allowed = plan_trim(
                self.log, self.manifest, shape.target, log_start_offset=self.log_start, now_ms=self.now_ms
            )
            hint = allowed.start_offset
        wishes = TrimWishes(
            hint=hint,
            awaits_hint=shape.has_hint,
            never_because=self.never_trimmed,
            share_group_hold=self.facts.share_group_hold,
        )
        return plan_trim_to_target(self.log, self.manifest, wishes, log_start_offset=self.log_start)

    def local(self) -> Iterator[SegmentExplanation]:
        """Explain the segments on disk."""
        following_bytes = self.log.size_bytes
        for segment in self.log.segments:
            following_bytes -= segment.size_bytes
            end = self.manifest.next_offset if segment.next_offset is None else segment.next_offset
            pieces = self.manifest.segments.overlapping(segment.base_offset, end)
            yield self._explain_local(segment, pieces, following_bytes=following_bytes)

    def _explain_local(
        self, segment: LocalSegment, pieces: Sequence[RemoteSegment], *, following_bytes: int
    ) -> SegmentExplanation:
        unproved, last_offset = "", None
        if segment.next_offset is not None:
            unproved = why_not_durable(segment, pieces, self.log, self.manifest)
            last_offset = segment.next_offset - 1
        if segment.next_offset is not None and segment.next_offset <= self.log_start:
            because = f"the log begins after the segment, at offset {self.log_start}"
            state, kept = (
                State.LEAVING,
                KeptReason(because, "the broker deletes the segment's files by itself"),
            )
        elif segment.next_offset is None or segment.next_offset > self.manifest.next_offset:
            state, kept = self._upload_of(segment)
        elif self.manifest.expired_at_ms is not None and segment.next_offset <= self.manifest.start_offset:
            because = f"total retention keeps only offset {self.manifest.start_offset} and later"
            state, kept = State.EXPIRED, KeptReason(because, self._local_expiry_next())
        elif unproved:
            state, kept = State.UNPROVED, KeptReason(unproved, self._mending(segment))
        elif self._is_expired(pieces[-1]):
            state, kept = State.EXPIRED, self._expired()
        else:
            state, kept = self._trim_of(segment, pieces, following_bytes)
        return SegmentExplanation(
            base_offset=segment.base_offset,
            last_offset=last_offset,
            local_bytes=segment.size_bytes,
            archived_bytes=sum(piece.size_bytes for piece in pieces) if pieces else None,
            place=_place(segment, pieces, is_durable=not unproved),
            state=state,
            reason=kept.reason,
            next_step=kept.next_step,
            due_ms=kept.due_ms,
        )

    def _upload_of(self, segment: LocalSegment) -> tuple[State, KeptReason]:
        """Explain a segment whose end the archive has not reached."""
        state = State.ACTIVE if segment.is_active else State.WAITING
        if self.upload is None:
            return state, KeptReason(self.facts.idle_because, "the segment is uploaded once that has changed")
        for number, one in enumerate(self.upload.slices):
            if one.segment is segment:
                reason = "its stable part has waited long enough" if one.is_open else "closed and stable"
                ahead = f", after {number} earlier segments" if number else ""
                next_step = f"the daemon's next rounds upload the segment{ahead}"
                return State.DUE, KeptReason(f"{reason}, and not uploaded yet", next_step)
        if segment.is_active:
            return state, KeptReason("the broker still appends to the segment", *self._active_next())
        first = self._first_waiting()
        if segment.base_offset == first:
            return state, KeptReason(self.upload.waits_because, "the segment is uploaded once that has ended")
        return state, KeptReason(
            f"segments are uploaded in order, and {self.upload.waits_because}",
            f"the segment is uploaded after segment {first}",
        )

    def _first_waiting(self) -> int:
        """Return the base offset of the segment that holds up those after it."""
        assert self.upload is not None, "asked of what is not uploaded now"
        taken = {one.segment.base_offset for one in self.upload.slices if not one.is_open}
        return next(
            one.base_offset
            for one in self.log.segments
            if one.base_offset not in taken
            and (one.next_offset is None or one.next_offset > self.manifest.next_offset)
        )

    def _active_next(self) -> tuple[str, int | None]:
        closed = "the segment is uploaded once the broker has closed it"
        if self.facts.upload_interval_ms is None:
            return closed, None
        due_ms = int(self.upload_due_ms)
        if due_ms <= self.now_ms:
            return f"{closed}, or with the next stable record", None
        return f"{closed}; its stable part in {span(due_ms - self.now_ms)}", due_ms

    def _mending(self, segment: LocalSegment) -> str:
        """Say what can be done about a segment that the archive has passed without holding its bytes."""
        assert segment.next_offset is not None, "the archive goes on after it"
        for gap in self.manifest.gaps:
            if gap.base_offset < segment.next_offset and gap.next_offset > segment.base_offset:
                return f"the segment is never uploaded: a gap is recorded for its offsets ({gap.reason})"
        if self.facts.hint_shape.is_compacted:
            return self._reupload_of(segment)
        return (
            "the segment is never trimmed automatically; compare it with the archive by `tieringd archive "
            "verify --deep`"
        )

    def _reupload_of(self, segment: LocalSegment) -> str:
        """Say whether the compacted form of a segment goes into the archive."""
        if self.reuploads is None:
            because = self.facts.idle_because or "cloud_storage_enable_compacted_topic_reupload is off"
            return f"compaction rewrote the segment, but it is not uploaded again: {because}"
        if any(segment in one.segments for one in self.reuploads.reuploads):
            return "compaction rewrote the segment: housekeeping replaces the archived one"
        reasons = {one.base_offset: one.reason for one in self.reuploads.passed}
        return f"housekeeping keeps the archived segment: {reasons[segment.base_offset]}"

    def _trim_of(
        self, segment: LocalSegment, pieces: Sequence[RemoteSegment], following_bytes: int
    ) -> tuple[State, KeptReason]:
        """Explain a segment that is in both tiers."""
        facts = self.facts
        has_hint = facts.hint_shape.has_hint
        if facts.idle_because:
            return State.KEPT, KeptReason(facts.idle_because, "the segment is trimmed once that has changed")
        if self.never_trimmed:
            return State.KEPT, KeptReason(self.never_trimmed, self._never_next())
        if any(one.local is segment for one in self.trim.candidates):
            because = "local retention does not keep it" if has_hint else self.target.because
            next_step = "the daemon's next rounds compare the segment's bytes with the archive's, and trim it"
            return State.TRIMMABLE, KeptReason(f"the segment is in the archive, and {because}", next_step)
        newest_ms = max(retention_time_ms(piece) for piece in pieces)
        kept = kept_locally(
            facts.local_target, following_bytes=following_bytes, newest_ms=newest_ms, now_ms=self.now_ms
        )
        if kept is not None and has_hint:
            return State.KEPT, kept
        reason = f"segments are trimmed in order, and {self.trim.kept_because}"
        return State.KEPT, KeptReason(reason, "the segment is trimmed after the segments before it")

    def _never_next(self) -> str:
        if not self.facts.total.is_read_remotely:
            return (
                "the broker's own retention deletes the segment; with remote read on, local retention "
                "would trim it"
            )
        if self.facts.is_compact_only:
            return (
                "the segment stays on the broker, where compaction may shrink it; it is trimmed only if "
                "cleanup.policy includes delete"
            )
        if not self.facts.total.deletes:
            return "the segment stays on the broker; it is trimmed only if cleanup.policy includes delete"
        return "the segment stays on the broker until the broker itself deletes it"

    def archived(self) -> Iterator[SegmentExplanation]:
        """Explain the stored segments that are not, or not completely, on disk."""
        left_bytes = total_bytes(self.manifest, self.log, log_start_offset=self.log_start)
        for piece in self.manifest.segments:
            if not self._is_on_disk(piece):
                is_expired = self._is_expired(piece)
                kept = self._expired() if is_expired else self._deletion_of(piece, left_bytes)
                yield SegmentExplanation(
                    base_offset=piece.base_offset,
                    last_offset=piece.last_offset,
                    local_bytes=None,
                    archived_bytes=piece.size_bytes,
                    place=Place.ARCHIVE,
                    state=State.EXPIRED if is_expired else State.ARCHIVED,
                    reason=kept.reason,
                    next_step=kept.next_step,
                    due_ms=kept.due_ms,
                )
            left_bytes -= piece.size_bytes

    def retired(self) -> Iterator[SegmentExplanation]:
        """
        Explain the segments that total retention removed, and whose objects still exist.

        A segment that a merge or compaction replaced is not explained here, but with the segment in its
        place.
        """
        for one in self.manifest.retired:
            due_ms = one.retired_at_ms + self.facts.delete_delay_ms
            left = f"in {span(due_ms - self.now_ms)}" if due_ms > self.now_ms else "in the next rounds"
            for piece in one.segments:
                if self._is_on_disk(piece) or self.manifest.segments.covering(piece.base_offset):
                    continue
                yield SegmentExplanation(
                    base_offset=piece.base_offset,
                    last_offset=piece.last_offset,
                    local_bytes=None,
                    archived_bytes=piece.size_bytes,
                    place=Place.ARCHIVE,
                    state=State.RETIRED,
                    reason="total retention removed the segment, but readers that began earlier may still "
                    "need it",
                    next_step=f"its objects are deleted {left}",
                    due_ms=due_ms,
                )

    def _why_not_on_disk(self, piece: RemoteSegment) -> str:
        first = self.log.first_offset
        if first is None:
            return "this broker has no file of the partition on disk"
        if piece.base_offset < first:
            return f"the local log begins at offset {first}"
        return "the local log has no file with all offsets of the segment"

    def _deletion_of(self, piece: RemoteSegment, left_bytes: int) -> KeptReason:
        """Explain a stored segment that total retention keeps, with *left_bytes* from it on."""
        limits, reason = self.facts.total, self._why_not_on_disk(piece)
        if not limits.deletes or (limits.limit_ms is None and limits.limit_bytes is None):
            return KeptReason(reason, f"the segment stays: {self.expiry.kept_because}")
        kept = kept_in_total(
            limits, left_bytes=left_bytes, time_ms=retention_time_ms(piece), now_ms=self.now_ms
        )
        return replace(kept, reason=reason)

    def _is_expired(self, piece: RemoteSegment) -> bool:
        return piece.next_offset <= self.expiry.start_offset

    def _expired(self) -> KeptReason:
        start = self.expiry.start_offset
        return KeptReason(
            f"total retention keeps only offset {start} and later", "the segment is deleted permanently"
        )

    def _local_expiry_next(self) -> str:
        blocked = self.facts.idle_because or self.never_trimmed
        return (
            f"the broker deletes the segment by its own retention: {blocked}"
            if blocked
            else "the segment is trimmed next"
        )

    def gaps(self) -> Iterator[SegmentExplanation]:
        """Explain the offsets that are in neither tier for good."""
        for gap in self.manifest.gaps:
            if not self._is_on_disk(gap):
                yield _nowhere(gap, State.GAP, KeptReason(gap.reason, "these offsets are lost"))

    def missing(self) -> Iterator[SegmentExplanation]:
        """Explain the offsets that left the disk, and that the archive has not passed yet."""
        missing = self.upload.missing if self.upload else None
        if missing is not None:
            kept = KeptReason(
                "the offsets left the log directory before they were uploaded",
                "the offsets are uploaded if a pin holds them; otherwise they are recorded as a gap",
            )
            yield _nowhere(missing, State.MISSING, kept)

    def _is_on_disk(self, one: RemoteSegment | Gap) -> bool:
        """Say whether the local log has files for all offsets of *one*."""
        expected = one.base_offset
        for segment in self.log.segments:
            if segment.base_offset > expected:
                return False
            if segment.next_offset is None or segment.next_offset >= one.next_offset:
                return True
            expected = max(expected, segment.next_offset)
        return False


def _place(segment: LocalSegment, pieces: Sequence[RemoteSegment], *, is_durable: bool) -> Place:
    if segment.next_offset is not None and is_durable:
        return Place.BOTH
    return Place.PARTLY if pieces else Place.LOCAL


def _nowhere(one: Gap | MissingRange, state: State, kept: KeptReason) -> SegmentExplanation:
    return SegmentExplanation(
        base_offset=one.base_offset,
        last_offset=one.last_offset,
        local_bytes=None,
        archived_bytes=None,
        place=Place.NOWHERE,
        state=state,
        reason=kept.reason,
        next_step=kept.next_step,
    )
