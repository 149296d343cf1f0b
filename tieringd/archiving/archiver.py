"""
The archiver: copies one partition's closed segments into the bucket, and trims its local log.

A step is observe, decide, act, record. The order of effects is data, index, manifest, trim: a crash after
any of them loses nothing, and leaves at most objects that no manifest names.

`StepResult` tells the reconciler what a step did and left. `missing_offsets` finds gaps and holes of the log;
`partition_status` sets the partition's gauges after each step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import structlog

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archiving.archive_retention import ArchiveRetention, UploadTimes
from tieringd.archiving.claim import ChangeQueue, Claim, ManifestChange, is_old
from tieringd.archiving.first_claims import FirstClaims, closed_at_ns
from tieringd.archiving.lineage_keeper import LineageKeeper, Spiller
from tieringd.archiving.missing_offsets import GapRecorder, HoleWatch
from tieringd.archiving.observer import Observation
from tieringd.archiving.operator_case import OperatorWait
from tieringd.archiving.partition_logger import LeadershipLogger
from tieringd.archiving.partition_status import PartitionGauges
from tieringd.archiving.remote_log import RemoteLog
from tieringd.archiving.segment_copier import CopiedSegment
from tieringd.archiving.share_groups import ShareGroups
from tieringd.archiving.trimmer import PUT_OFF_MS, HintPublisher, Trimmer
from tieringd.archiving.upload_queue import Urgency
from tieringd.archiving.uploader import LeadershipConfirmation, Quarantine, Uploader, UploadOutcome
from tieringd.archiving.user_deletions import UserDeletions
from tieringd.broker.base import Broker
from tieringd.broker.layout import Layout
from tieringd.errors import (
    CorruptDataError,
    FencedError,
    RetryableError,
    StorageError,
    StorageUnavailable,
    TieringError,
)
from tieringd.formats.record_batch import OldMagicError
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.segment import SegmentSlice
from tieringd.policies.epoch_history import clipped, completed
from tieringd.policies.trim_target import TrimObstacle
from tieringd.policies.upload_plan import (
    MissingRange,
    UploadLimits,
    UploadPlan,
    plan_uploads,
    rescue_due_ms,
    seconds_to_loss,
    upload_due_ms,
)
from tieringd.storage.archive_clock import ArchiveClock

log = structlog.get_logger(__name__)

_STORE_ERRORS = (StorageError, StorageUnavailable)


def _first_of(seen: Observation) -> int:
    """Return the first offset that the log has, by its files or by what the broker says of them."""
    first_offset, log_start_offset = seen.uploadable.first_offset, seen.bounds.log_start_offset
    return log_start_offset if first_offset is None else min(first_offset, log_start_offset)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did and what it left."""

    uploaded: int = 0
    trimmed: int = 0
    expired: int = 0
    """Segments that total retention took out of the manifest, plus segments whose objects were deleted."""
    gaps: int = 0
    pending_segments: int = 0
    """Eligible segments that are still to be uploaded."""
    fault: str = ""
    """Why the partition is held back until an operator acts; empty when it is not."""
    waits_because: str = field(default="", compare=False)
    """Why the first segment that is not eligible waits."""
    waits_for_lineage: bool = field(default=False, compare=False)
    """The step did nothing, because the archive's tail is not known to be on the leader's lineage."""
    needs_another_scan: bool = False
    """The next observation decides: whether missing offsets are a gap, or how a tail is replaced."""

    @property
    def made_progress(self) -> bool:
        """
        Say whether another step on the same observation may find more to do.

        A trim makes the observation obsolete, because some of its files are deleted.
        """
        return (self.uploaded > 0 or self.expired > 0 or self.gaps > 0) and not self.trimmed


class Archiver(LeadershipLogger):
    """
    Keep one partition's remote log up to date with its local log, under one leader epoch.

    Owned by the reconciler. One task at a time calls `step`, which may be cancelled at any await: the
    archiver's view of the bucket changes only after the bucket did. After a `FencedError` the archiver must
    not be used again.
    """

    # Ten thousand idle partitions have an archiver each, with some fifteen parts. Without a dictionary for
    # each of these objects they take a tenth less.
    __slots__ = (
        "_changes",
        "_claim",
        "_clock",
        "_first_claims",
        "_gaps",
        "_gauges",
        "_has_reported",
        "_hint",
        "_holes",
        "_layout",
        "_leadership",
        "_limits",
        "_lineage",
        "_lineage_wait",
        "_log_start_offset",
        "_metrics",
        "_partition",
        "_quarantine",
        "_remote_log",
        "_rests_on",
        "_rests_since_ms",
        "_rests_until_ms",
        "_retention",
        "_spiller",
        "_stored_at_failure",
        "_trimmer",
        "_upload_times",
        "_uploader",
        "_user_deletions",
        "backlog_bytes",
        "on_offer",
    )

    def __init__(
        self,
        leadership: Leadership,
        *,
        broker: Broker,
        remote_log: RemoteLog,
        manifests: ManifestStore,
        metrics: Metrics,
        limits: UploadLimits,
        clock: ArchiveClock,
        layout: Layout,
        share_groups: ShareGroups,
        first_claims: FirstClaims,
        known: StoredManifest | None = None,
        is_new: Callable[[TopicIdPartition], Awaitable[bool]] = is_old,
    ) -> None:
        """
        Build the parts.

        *first_claims* is shared by the archivers of a daemon. *known* is the last manifest that this daemon
        read as a follower, if any. *is_new* says whether the bucket most likely has nothing of a partition.
        """
        self._leadership = leadership
        self._layout = layout
        self._partition = leadership.partition
        self._metrics = metrics
        self._remote_log = remote_log
        self._stored_at_failure = 0.0
        """
        `RemoteLog.stored_segments` when the last step failed; infinity after a refusal, which may be of this
        partition alone.
        """
        self._limits = limits
        self._clock = clock
        self._claim = Claim(leadership, manifests, metrics=metrics, known=known, is_new=is_new)
        self._first_claims = first_claims
        self._changes = ChangeQueue(self._claim)
        self._lineage = LineageKeeper(
            leadership,
            self._claim,
            remote_log=remote_log,
            layout=layout,
            manifests=manifests,
            metrics=metrics,
            now_ms=clock,
        )
        self._lineage_wait = ""
        """Why the last step that got so far did nothing, if it waited for the archive's lineage."""
        self._holes = HoleWatch()
        self._uploader = Uploader(leadership, remote_log)
        self._quarantine = Quarantine(leadership.partition, metrics=metrics)
        self._gauges = PartitionGauges(leadership.partition, metrics=metrics)
        self._gaps = GapRecorder(leadership.partition, claim=self._claim, now_ms=clock)
        self._has_reported = False
        self._log_start_offset = 0
        """First offset of the log, by the observation of the last step."""
        self._rests_on: Observation | None = None
        """The observation of the last step, when that step left nothing to do."""
        self._rests_since_ms = 0
        self._rests_until_ms = 0.0
        self._upload_times = UploadTimes(
            leadership.partition, claim=self._claim, remote_log=remote_log, clock=clock
        )
        ages_ms = self._upload_times.ages_ms
        self._hint = HintPublisher(leadership.partition, claim=self._claim, ages_ms=ages_ms)
        self._user_deletions = UserDeletions(leadership.partition)
        self._retention = ArchiveRetention(
            leadership.partition,
            claim=self._claim,
            user_deletions=self._user_deletions,
            remote_log=remote_log,
            spillovers=manifests.spillovers,
            upload_times=self._upload_times,
            metrics=metrics,
            clock=clock,
        )
        self._spiller = Spiller(leadership.partition, claim=self._claim, spillovers=manifests.spillovers)
        self.on_offer: Callable[[], None] = lambda: None
        """Called for each new offer, so that the reconciler steps this archiver soon."""
        self.backlog_bytes = 0
        """Bytes of closed, stable segments that were not durable at the last step."""
        self._trimmer = Trimmer(
            leadership,
            broker=broker,
            remote_log=remote_log,
            metrics=metrics,
            share_groups=share_groups,
            steady_ms=clock.steady_ms,
            ages_ms=ages_ms,
            is_current=self._claim.is_current,
            record=self._claim.record_trim,
        )

    @property
    def quarantine_fault(self) -> str:
        """Return why the partition is quarantined; empty when it is not."""
        return self._quarantine.fault

    @property
    def waits_for_a_store_that_takes(self) -> bool:
        """
        Say whether the step under way waits in the upload queue, as for hours, while the store is well.

        It has taken a segment since the last step failed by an outage. A store that refuses segments may
        answer all else.
        """
        return self._uploader.is_waiting and self._remote_log.stored_segments > self._stored_at_failure

    @property
    def trim_obstacle(self) -> TrimObstacle | None:
        """Return why the local log, or the end of it, is not trimmed at present; None if it may be."""
        because = self._quarantine.fault or self._lineage_wait
        return TrimObstacle(because) if because else self._trimmer.obstacle

    @property
    def operator_wait(self) -> OperatorWait | None:
        """Return the case that only an operator can decide; None without one."""
        return self._lineage.operator_wait

    @property
    def manifest(self) -> PartitionManifest | None:
        """Return the manifest as last read or written; None while the bucket's content is not certain."""
        return self._claim.manifest

    @property
    def last_manifest(self) -> PartitionManifest | None:
        """Return the manifest that was last known for certain, also while the store does not answer."""
        return self._claim.last_manifest

    @property
    def last_stored(self) -> StoredManifest | None:
        """Return what the bucket was last known to hold of the partition; None when it was never asked."""
        return self._claim.last_stored

    @property
    def held_manifest(self) -> PartitionManifest | None:
        """Return the last manifest that was certain under this leader epoch; None before the first one."""
        return self._claim.held_manifest

    @property
    def lost_offsets(self) -> MissingRange | None:
        """
        Return the offsets after the archive's end that neither the log nor a pin has; None without them.

        Two observations have shown it. It is no gap yet while no segment follows that can be stored.
        """
        return self._gaps.lost

    def confirm_leadership(self, confirmation: LeadershipConfirmation) -> None:
        """Note that the cluster names this broker the leader, as long as *confirmation* says so."""
        self._uploader.confirm_leadership(confirmation)

    def set_limits(self, limits: UploadLimits) -> None:
        """Use *limits* from the next step on."""
        self._limits = limits
        self._rests_on = None

    def request_space(self, next_offset: int, *, age_ms: int = 0) -> None:
        """
        Let the next step trim durable segments before *next_offset*, because the disk needs room.

        *age_ms* is how long ago the disk was measured. A step that waits in the upload queue goes on to its
        trim.
        """
        self._trimmer.request_space(next_offset, age_ms=age_ms)
        if not self._trimmer.is_paused:
            self._uploader.withdraw_waiting()
        self._rests_on = None

    def offer(self, change: ManifestChange) -> asyncio.Future[None]:
        """
        Queue *change*; the next step commits it, between its uploads and retention.

        The returned future ends when the change was committed or given up. It carries the step's error when
        the step fails before that, and a `RetryableError` when no step comes to the change within
        `claim.OFFER_SECONDS`. It is cancelled when the archiver ends. `claim.ended` waits for it. A step that
        waits in the upload queue goes on to the change.
        """
        future = self._changes.offer(change)
        self._uploader.withdraw_waiting()
        self.on_offer()
        return future

    def close(self) -> None:
        """Cancel all queued changes, because no further step comes."""
        self._changes.close()

    def rest_due_ms(self, seen: Observation) -> float:
        """Return until when a step on *seen* has nothing to do; minus infinity where it may have work."""
        is_done = seen.shows_same(self._rests_on) and not self._changes
        return self._rests_until_ms if is_done else -math.inf

    def is_at_rest(self, seen: Observation) -> bool:
        """Say whether a step on *seen* has nothing to do: one was done, and nothing is due yet."""
        # Setting the clock back does not prolong the rest.
        return self._rests_since_ms <= self._clock() < self.rest_due_ms(seen)

    async def step(
        self, seen: Observation, *, newest: Callable[[], Observation | None] = lambda: None
    ) -> StepResult:
        """
        Upload and commit one batch of eligible segments, then trim, commit queued changes, and expire.

        A trim takes only durable segments. Where the disk needs room it comes before the uploads, which may
        wait for hours. Queued changes and expiry wait for a step without a failed upload. A first claim waits
        for its turn, and the step goes on with what *newest* returns then, if that is not None.

        Raises:
            FencedError: Another writer owns the partition now.
            RetryableError: The data is not at fault. What could be committed has been.
            CorruptDataError: The stored manifest is damaged.
        """
        try:
            result = await self._step(seen, newest)
        except TieringError as error:
            is_outage = isinstance(error, StorageUnavailable)
            self._stored_at_failure = self._remote_log.stored_segments if is_outage else math.inf
            self._changes.fail(error)
            if self.last_manifest is not None and not isinstance(error, FencedError):
                # The backlog grows in an outage, and alerts rest on its figures. A step may fail as early as
                # the reading of the manifest.
                self._publish(self.last_manifest, newest() or seen)
            raise
        if result.waits_for_lineage:
            self._changes.fail(RetryableError(f"{self._partition} waits: {result.waits_because}"))
        return result

    async def _step(self, seen: Observation, newest: Callable[[], Observation | None]) -> StepResult:
        self._rests_on = None
        self._note(seen)
        await self._claim.check_for_edits(seen.topic.retention_pace, now_ms=self._clock())
        if self._claim.held_manifest is None:
            async with self._first_claims.turn(closed_at_ns(seen.uploadable)):
                # At a start the second round has seen more before most partitions have had their turn. On the
                # older observation the step would leave work for another one.
                if (later := newest()) is not None and later is not seen:
                    seen = later
                    self._note(seen)
                stored = await self._current(seen)
        else:
            stored = await self._current(seen)
        stored = await self._begin_lower(stored, seen)
        self._report_coverage(stored.existing, seen)
        stored, waits_because = await self._lineage.keep(stored, seen, new_holes=self._holes.new)
        # Noted here, because the rest of the step may fail for as long as the store is away.
        self._lineage_wait = waits_because
        if waits_because:
            left = self._publish(stored.existing, seen)
            return StepResult(
                pending_segments=left.pending_segments,
                waits_because=waits_because,
                waits_for_lineage=True,
                needs_another_scan=bool(self._holes.new) or self._lineage.needs_another_scan,
            )
        stored = await self._spiller.take_back(stored, seen)
        stored = await self._upload_times.keep(stored, seen)
        plan = self._plan(stored.existing, seen)
        self._quarantine.lift(seen.uploadable)
        slices = self._quarantine.passes(plan.slices)

        gap, plan_holds = self._gaps.missing(plan, seen)
        uploaded, gaps, expired = 0, 0, 0
        needs_room = self._trimmer.cloud_gc_offset is not None
        stored, trimmed, failure = await self._trim_for_room(stored, seen)
        if plan_holds and not trimmed:
            # A trim makes the observation obsolete, so the uploads wait for the next one.
            stored, uploaded, gaps, upload_failure = await self._upload(stored, gap, slices, seen)
            failure = upload_failure or failure
        if not needs_room and (failure is None or isinstance(failure, _STORE_ERRORS)):
            # Durable segments may be trimmed even when the upload failed at the store: a full or
            # unreachable store makes local room more urgent.
            stored, trimmed = await self._trim(stored, seen)
        version_before = stored.version
        if failure is None:
            stored = await self._changes.commit_all(stored)
            if self._uploader.is_confirmed:
                # Without a confirmed leadership this observation is old, and would only confirm itself.
                stored, expired = await self._retention.step(stored, seen)
            trimmed += await self._trimmer.trim_expired(stored.existing, seen)
            stored = await self._spiller.step(stored, seen)
        if isinstance(failure, TieringError):
            raise failure
        left = self._publish(stored.existing, seen)
        # A commit after the trim was planned may allow more of it: a replaced segment now matches its file.
        is_changed = stored.version != version_before
        has_acted = bool(plan.slices or trimmed or expired or is_changed)
        # A disk may have asked for room after the trim: the reconciler steps only an archiver without a rest.
        lacks_room = not needs_room and self._trimmer.cloud_gc_offset is not None
        is_held = left.held_by_transaction or self._trimmer.held_bytes or lacks_room
        if not (has_acted or self.quarantine_fault or is_held or self._gaps.is_unsure):
            self._rests_on, self._rests_since_ms = seen, self._clock()
            self._rests_until_ms = self._due_ms(stored.existing, seen)
        return StepResult(
            uploaded=uploaded,
            trimmed=trimmed,
            expired=expired,
            gaps=gaps,
            pending_segments=left.pending_segments,
            waits_because=left.waits_because,
            fault=self.quarantine_fault,
            needs_another_scan=bool(plan.slices) and not plan_holds,
        )

    def _note(self, seen: Observation) -> None:
        """Note what an observation shows by itself, before the step asks the store for anything."""
        self._holes.note(seen)
        last = self.last_manifest
        self.backlog_bytes = plan_uploads(
            seen.uploadable,
            seen.bounds,
            next_offset=last.next_offset if last else None,
            limits=self._limits,
        ).pending_bytes
        self._expect_deletion(seen)

    async def _trim_for_room(
        self, stored: StoredManifest, seen: Observation
    ) -> tuple[StoredManifest, int, TieringError | None]:
        """
        Trim before the uploads, if the disk needs room.

        Returns the stored manifest, the number of segments, and an error to raise after the uploads: requests
        for room come again and again, and it is uploads that make room in the end.
        """
        if self._trimmer.cloud_gc_offset is None:
            return stored, 0, None
        try:
            return *await self._trim(stored, seen), None
        except FencedError:
            raise
        except TieringError as error:
            return self._claim.newest(stored), 0, error

    async def _trim(self, stored: StoredManifest, seen: Observation) -> tuple[StoredManifest, int]:
        """Trim what is durable; return the stored manifest after that, and the number of segments."""
        if self._quarantine.fault:
            return stored, 0
        stored, trimmed_by = await self._hint.step(stored, seen)
        if await self._awaits_users_start(stored.existing, seen):
            return stored, 0
        trimmed = await self._trimmer.trim(trimmed_by, seen)
        return self._claim.newest(stored), trimmed

    async def _current(self, seen: Observation) -> StoredManifest:
        return await self._claim.current(
            lambda: self._begin(seen), log_start_offset=seen.bounds.log_start_offset
        )

    def _expect_deletion(self, seen: Observation) -> None:
        """
        Check for an edit soon after the log's start has moved past every trim by this daemon.

        `tieringd topic delete-records` moves the log's start first, and then edits the manifest.
        """
        log_start_offset, last = seen.bounds.log_start_offset, self.last_manifest
        if last is not None and max(self._log_start_offset, last.trimmed_offset) < log_start_offset:
            self._claim.expect_edit(seen.topic.retention_pace, now_ms=self._clock())
        self._log_start_offset = log_start_offset

    async def _awaits_users_start(self, manifest: PartitionManifest, seen: Observation) -> bool:
        """
        Say whether a trim waits until the archive has followed a user's DeleteRecords.

        A trim by this daemon would move the log start offset past the user's. A disk that needs room goes
        first.
        """
        start_offset = await self._user_deletions.start(manifest, seen)
        return start_offset is not None and self._trimmer.cloud_gc_offset is None

    def _due_ms(self, manifest: PartitionManifest, seen: Observation) -> float:
        """Return the time from which a step has work, if nothing but the time changes."""
        due_ms = min(
            self._hint.due_ms(manifest, seen),
            self._retention.due_ms(manifest, seen),
            self._claim.edits_due_ms(seen.topic.retention_pace),
            self._rests_since_ms + PUT_OFF_MS if self._trimmer.is_put_off else math.inf,
        )
        if seen.bounds.last_stable_offset <= manifest.next_offset:
            return due_ms
        return min(due_ms, self._open_upload_due_ms(manifest, seen))

    def _open_upload_due_ms(self, manifest: PartitionManifest, seen: Observation) -> float:
        """Return the time from which stable records of the open segment are uploaded."""
        if not self._limits.cuts_segments:
            return math.inf
        # The local broker deletes by this host's clock, whether that is right or wrong.
        now_ms = self._clock()
        behind_ms = now_ms - self._clock.wall_ms()
        return min(
            upload_due_ms(manifest, interval_ms=self._limits.max_interval_ms, now_ms=now_ms),
            rescue_due_ms(seen.log, retention_ms=seen.topic.broker_retention_ms) + behind_ms,
        )

    def _begin(self, seen: Observation) -> PartitionManifest:
        # Files that only this observation lacks are found by the next one; files that are gone become a gap.
        start_offset = _first_of(seen)
        return PartitionManifest.begin(self._partition, start_offset=start_offset, now_ms=self._clock())

    async def _begin_lower(self, stored: StoredManifest, seen: Observation) -> StoredManifest:
        """
        Let an archive that never held anything begin where the log does now, if that is lower.

        It began by another leader's log, and where that one began there may be no batch boundary in this one.
        """
        start_offset, manifest = _first_of(seen), stored.existing
        if start_offset >= manifest.start_offset or not manifest.is_unused or not seen.log.segments:
            return stored
        self._log.info(
            "the archive holds nothing yet, and begins lower now",
            start_offset=start_offset,
            start_offset_before=manifest.start_offset,
        )
        return await self._claim.commit(
            stored,
            replace(
                manifest,
                start_offset=start_offset,
                next_offset=start_offset,
                trimmed_offset=max(start_offset, seen.bounds.log_start_offset),
            ),
        )

    def _report_coverage(self, manifest: PartitionManifest, seen: Observation) -> None:
        """Log once how archive and local log relate, as after a pause or a change of leader."""
        if self._has_reported:
            return
        self._has_reported = True
        plan = self._plan(manifest, seen)
        self._log.info(
            "archiving",
            archive_start_offset=manifest.start_offset,
            archive_next_offset=manifest.next_offset,
            local_first_offset=seen.uploadable.first_offset,
            last_stable_offset=seen.bounds.last_stable_offset,
            missing_offsets=plan.missing.last_offset - plan.missing.base_offset + 1 if plan.missing else 0,
        )

    def _plan(self, manifest: PartitionManifest, seen: Observation) -> UploadPlan:
        return plan_uploads(
            seen.uploadable,
            seen.bounds,
            next_offset=manifest.next_offset,
            limits=self._limits,
            is_overdue=self._clock() >= self._open_upload_due_ms(manifest, seen),
        )

    async def _upload(
        self, stored: StoredManifest, gap: Gap | None, slices: Sequence[SegmentSlice], seen: Observation
    ) -> tuple[StoredManifest, int, int, TieringError | None]:
        """
        Copy *slices* concurrently and commit the longest prefix that succeeded, with *gap* before it.

        Returns the stored manifest, the number of slices committed, the number of gaps recorded, including
        those for segments that can never be copied, and the failure that ended the prefix.
        """
        begin = stored.existing if gap is None else stored.existing.with_gap(gap)
        gaps = 0
        outcome = await self._uploader.upload(
            seen.uploadable,
            slices,
            next_offset=begin.next_offset,
            urgency=self._urgency(stored.existing, seen),
            final_holes=self._holes.confirmed,
            waits=not self._changes,
        )
        if outcome.admitted:
            appended = self._appended(begin, outcome.admitted, seen)
            uploaded_bytes = sum(copy.remote.size_bytes for copy in outcome.admitted)
            hint = self._hint.after_upload(appended, seen, uploaded_bytes=uploaded_bytes)
            stored = await self._claim.commit(stored, hint.applied_to(appended))
            self._hint.note_committed(hint)
            now_seconds = self._clock.wall_ms() / 1000
            for copy in outcome.admitted:
                if not copy.part.is_open:
                    waited = now_seconds - copy.part.segment.modified_ns / 1e9
                    self._metrics.durations.durable.observe(max(0.0, waited))
                if copy.part.is_whole:
                    self._trimmer.note_proved(copy.remote.base_offset, copy.part.segment.identity)
            gap, gaps = None, int(gap is not None)
        stored, skipped, failure = await self._after_failure(stored, gap, outcome, seen)
        return stored, len(outcome.admitted), gaps + skipped, failure

    async def _after_failure(
        self, stored: StoredManifest, gap: Gap | None, outcome: UploadOutcome, seen: Observation
    ) -> tuple[StoredManifest, int, TieringError | None]:
        """
        Record a gap for, or quarantine, a segment that can never be copied; return any other failure.

        *gap* is one that is not committed yet, and comes before that segment.
        """
        failed, failure = outcome.failed, outcome.failure
        if failed is None:
            return stored, 0, None
        if isinstance(failure, OldMagicError) and failure.source == failed.segment.path:
            # In a later file, in which a transaction ends, old messages are no reason to lose this segment.
            reason = "message format v0/v1 is not archived"
            stored = await self._gaps.record(
                stored, failed.base_offset, failed.next_offset - 1, reason, after=gap
            )
            return stored, 1 if gap is None else 2, None
        if isinstance(failure, CorruptDataError):
            self._quarantine.enter(failed.segment, failure, seen.uploadable)
            return stored, 0, None
        return stored, 0, failure

    def _appended(
        self, manifest: PartitionManifest, admitted: Sequence[CopiedSegment], seen: Observation
    ) -> PartitionManifest:
        """
        Return *manifest* with the copied segments and the leader epochs of their offsets.

        The epochs come from the broker's own history as far back as it reaches, because batches do not show
        an epoch whose records compaction removed. Segments that only pins hold are mostly older than that
        history; their epochs come from the copied batches.

        Raises:
            CorruptDataError: The local epochs go back behind the archived ones.
        """
        first, last = admitted[0].remote, admitted[-1].remote
        known = clipped(seen.log.epochs, base_offset=first.base_offset, next_offset=last.next_offset)
        epochs = completed(known, [epoch for copy in admitted for epoch in copy.index.epochs])
        try:
            crossing = chain.from_iterable(copy.crossing for copy in admitted)
            appended = manifest.appended([copy.remote for copy in admitted], epochs, crossing)
        except ValueError as error:
            raise CorruptDataError(
                f"the leader epochs of the local log do not follow those of the archive: {error}",
                source=seen.log.partition.path,
                offset=first.base_offset,
            ) from error
        # Translates a Redpanda log's offsets once its head was trimmed and this process has ended.
        translation = self._layout.translation_at(seen.log, appended.next_offset)
        appended = replace(appended, translation=translation or appended.translation)
        return appended.following_deletion(now_ms=self._clock())

    def _urgency(self, manifest: PartitionManifest, seen: Observation) -> Urgency:
        return Urgency(
            seconds_to_loss=self._seconds_to_loss(manifest, seen),
            backlog_bytes=sum(segment.size_bytes for segment in seen.log.closed_segments),
        )

    def _seconds_to_loss(self, manifest: PartitionManifest, seen: Observation) -> float:
        return seconds_to_loss(
            seen.log,
            next_offset=manifest.next_offset,
            log_end_offset=seen.bounds.log_end_offset,
            retention_ms=seen.topic.broker_retention_ms,
            retention_bytes=seen.topic.broker_retention_bytes,
            now_ms=self._clock.wall_ms(),
        )

    def show(self, seen: Observation) -> None:
        """Show the partition's figures by *seen*, also while a step waits in the upload queue."""
        if self.last_manifest is not None:
            self._publish(self.last_manifest, seen)

    def _publish(self, manifest: PartitionManifest, seen: Observation) -> UploadPlan:
        """Set the partition's gauges to the state after the step; return what is left to upload."""
        plan = self._plan(manifest, seen)
        self.backlog_bytes = plan.pending_bytes
        self._gauges.publish(
            manifest,
            seen,
            plan,
            trim_held_bytes=self._trimmer.held_bytes,
            seconds_to_loss=self._seconds_to_loss(manifest, seen),
            now_ms=self._clock.wall_ms(),
            steady_ms=self._clock.steady_ms(),
        )
        return plan
