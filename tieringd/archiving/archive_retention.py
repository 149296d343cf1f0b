"""
Archive retention: deletes one partition's stored segments that are past total retention, in two steps.

Segments whose records a user deleted on the broker go the same way (`policies.total_retention`). First a
commit takes them out of the manifest, and from then on they do not exist for readers. Their objects are
deleted after a delay, for readers that began before. Each step is a commit under the archiver's leader
epoch; a crash between them leaves a manifest that lists what is still to be deleted. A commit is dated
before it is sent, and may take effect much later, so the delay counts from when it is in effect.

Segments that a compaction replaced are held for longer: until no election can cut off the winners of the
records that it dropped.

`policies.total_retention` and `policies.record_removal` decide which segments expire, and why the rest stays.

`UploadTimes` asks the store when segments were uploaded, where a wrong clock may have noted it. A segment
whose records are newer than its upload is dated in the future, or was uploaded while a clock was wrong.
Before retention by age takes such a segment, the store is asked for the time of its data object, and a
wrong time in the manifest is corrected. `policies.retention_time` decides which segments need this proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, takewhile

from tieringd.archive.manifest_store import StoredManifest
from tieringd.archive.record_deletion import following_deletion
from tieringd.archive.retired_objects import GoneSince, expired_spilled, free_retired, unnamed
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.archiving.claim import Claim
from tieringd.archiving.observer import Observation
from tieringd.archiving.partition_logger import PartitionLogger
from tieringd.archiving.remote_log import RemoteLog
from tieringd.archiving.user_deletions import UserDeletions
from tieringd.errors import CorruptDataError, ObjectNotFound, StorageError, StorageUnavailable
from tieringd.metrics import Metrics
from tieringd.model.corrections import with_marks_redated, with_upload_times
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion, Retired
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment, SegmentIdentity
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spilling import spillover_deleted, spillover_expired
from tieringd.model.spillover import ExpiredSpillover
from tieringd.policies.local_retention import plan_trim, trim_due_ms
from tieringd.policies.record_removal import LogObservation, plan_release
from tieringd.policies.retention_time import (
    NOTHING_IS_OLD_MS,
    is_impossible,
    needs_proof,
    proven_upload_ms,
)
from tieringd.policies.total_retention import (
    FirstEvaluation,
    RetentionPace,
    TotalRetentionPlan,
    expiry_due_ms,
    plan_total_retention,
)
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.at_once import at_once

LOOKUPS_AT_ONCE = 16
REMEMBERED_MAX = 1024
"""
Proven times kept for one partition. Only segments about to go, and the one after them, are asked for more
than once.
"""

OBSERVATIONS_TO_RELEASE = 2
"""Observations that must agree: a broker that crashed may come back with a lower log start offset."""


class UploadTimes(PartitionLogger):
    """Keep one partition's upload times true. Owned by its archiver, and used within its step."""

    __slots__ = ("_awaits_proof", "_claim", "_clock", "_partition", "_proven", "_remote_log")

    def __init__(
        self, partition: TopicIdPartition, *, claim: Claim, remote_log: RemoteLog, clock: ArchiveClock
    ) -> None:
        self._partition = partition
        self._claim = claim
        self._remote_log = remote_log
        self._clock = clock
        self._proven: dict[SegmentIdentity, int] = {}
        """Upload times by the store, only of segments that needed proof lately."""
        self._awaits_proof = False

    def ages_ms(self, manifest: PartitionManifest) -> int:
        """Return the time that local ages count to; nothing is old while an upload time awaits proof."""
        return NOTHING_IS_OLD_MS if self._awaits_proof else self._clock.ages_ms(manifest.committed_at_ms)

    async def keep(self, stored: StoredManifest, seen: Observation) -> StoredManifest:
        """
        Correct the upload times that local retention uses, and impossible marks in the manifest.

        Returns the stored manifest after that. While the store is away nothing is corrected, and nothing
        local counts as old.

        Raises:
            FencedError: Another writer owns the manifest now.
        """
        manifest = stored.existing
        ages_ms = self._clock.ages_ms(manifest.committed_at_ms)
        # The clock may become certain before this step ends; what awaits proof now stays for this step all
        # the same.
        self._awaits_proof = ages_ms == NOTHING_IS_OLD_MS
        if self._awaits_proof:
            return stored
        try:
            redated = with_marks_redated(manifest, partial(is_impossible, now_ms=ages_ms), now_ms=ages_ms)
            if redated is not manifest:
                self._log.warning("times in the manifest that cannot be are taken for now")
                stored = await self._claim.commit(stored, redated)
            due = self._locally_due(stored.existing, seen, ages_ms=ages_ms)
            return await self.proven(stored, due, now_ms=ages_ms)
        except (StorageError, StorageUnavailable) as error:
            self._awaits_proof = True
            self._log.warning("upload times cannot be looked up", error=str(error))
            return self._claim.newest(stored)

    async def proven(
        self, stored: StoredManifest, segments: Iterable[RemoteSegment], *, now_ms: int
    ) -> StoredManifest:
        """
        Look up the upload times of those live *segments* that need it; commit the corrected ones.

        *now_ms* is a time that is certain.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageError: An operator must act.
            StorageUnavailable: Nothing is known to have changed.
        """
        wrong = await self.corrections(segments, now_ms=now_ms)
        if not wrong:
            return stored
        manifest = stored.existing
        table = with_upload_times(manifest.segments, wrong)
        return await self._claim.commit(stored, manifest.with_segments(table))

    async def corrections(self, segments: Iterable[RemoteSegment], *, now_ms: int) -> dict[int, int]:
        """
        Return the right upload times of those of *segments* that have wrong ones, by base offset.

        *now_ms* is a time that is certain.

        Raises:
            StorageError: An operator must act.
            StorageUnavailable: The store does not answer.
        """
        doubtful = [one for one in segments if needs_proof(one, now_ms=now_ms)]
        unproven = [one for one in doubtful if SegmentIdentity.of(one) not in self._proven]

        async def prove(segment: RemoteSegment) -> None:
            stored_at_ms = await self._remote_log.stored_at_ms(self._partition, segment)
            # Without its data object a segment keeps its noted time: there is nothing left to protect.
            self._proven[SegmentIdentity.of(segment)] = (
                segment.uploaded_at_ms
                if stored_at_ms is None
                else proven_upload_ms(segment, stored_at_ms=stored_at_ms, now_ms=now_ms)
            )

        await at_once(unproven, prove, count=LOOKUPS_AT_ONCE)
        proven = [(one, self._proven[SegmentIdentity.of(one)]) for one in doubtful]
        wrong = {one.base_offset: time_ms for one, time_ms in proven if time_ms != one.uploaded_at_ms}
        for oldest in list(islice(self._proven, max(0, len(self._proven) - REMEMBERED_MAX))):
            del self._proven[oldest]
        if wrong and unproven:
            self._log.warning(
                "segments were uploaded under a wrong clock; they count from when the store took them",
                segments=len(wrong),
                first_offset=min(wrong),
            )
        return wrong

    def _locally_due(
        self, manifest: PartitionManifest, seen: Observation, *, ages_ms: int
    ) -> Iterable[RemoteSegment]:
        """Yield the stored segments that local retention would trim, and the first one that stays."""
        target, log_start_offset = seen.topic.local_retention_target, seen.bounds.log_start_offset
        if target.target_ms is None or not seen.topic.hint_shape.has_hint:
            return
        start_offset = log_start_offset
        due_ms = trim_due_ms(seen.log, manifest, target, log_start_offset=log_start_offset)
        if due_ms <= ages_ms:
            plan = plan_trim(seen.log, manifest, target, log_start_offset=log_start_offset, now_ms=ages_ms)
            for candidate in plan.candidates:
                yield from candidate.pieces
            start_offset = plan.start_offset
        yield from manifest.segments.overlapping(start_offset, start_offset + 1)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The last evaluation of total retention: its observation and its time."""

    seen: Observation
    steady_ms: int
    """Time on the steady clock: a clock that is set must not make two observations an interval apart."""


class ArchiveRetention(PartitionLogger):
    """
    Keep one partition's archive within its total retention.

    Owned by the partition's archiver and used within its step, after the archive was found to be on the
    leader's lineage.
    """

    __slots__ = (
        "_awaits_scan",
        "_claim",
        "_clock",
        "_first",
        "_gone_since",
        "_last",
        "_log_observations",
        "_log_scan_number",
        "_metrics",
        "_partition",
        "_remote_log",
        "_spillovers",
        "_upload_times",
        "_user_deletions",
    )

    def __init__(
        self,
        partition: TopicIdPartition,
        *,
        claim: Claim,
        remote_log: RemoteLog,
        spillovers: SpilloverManifests,
        upload_times: UploadTimes,
        user_deletions: UserDeletions,
        metrics: Metrics,
        clock: ArchiveClock,
    ) -> None:
        self._user_deletions = user_deletions
        self._spillovers = spillovers
        self._partition = partition
        self._claim = claim
        self._remote_log = remote_log
        self._metrics = metrics
        self._upload_times = upload_times
        self._clock = clock
        self._last: _Evaluation | None = None
        self._first: FirstEvaluation | None = None
        self._log_observations: tuple[LogObservation, ...] = ()
        """The log bounds of the last observations, at most two."""
        self._log_scan_number: int | None = None
        """The number of the observation that `_log_observations` ends with."""
        self._awaits_scan = False
        """Whether the last observation alone would release held segments."""
        self._gone_since = GoneSince()

    async def step(self, stored: StoredManifest, seen: Observation) -> tuple[StoredManifest, int]:
        """
        Delete objects that are due, then expire segments past retention.

        Returns the manifest and the number of segments deleted or expired. Where a spillover manifest is
        missing or damaged nothing is deleted, an error is logged, and the archiver's step goes on.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The next step continues from here.
        """
        try:
            return await self._step(stored, seen)
        except (ObjectNotFound, CorruptDataError) as error:
            self._last = _Evaluation(seen, self._clock.steady_ms())
            self._log.error(
                "nothing is deleted: the archive's older segments cannot be told", error=str(error)
            )
            return self._claim.newest(stored), 0

    async def _step(self, stored: StoredManifest, seen: Observation) -> tuple[StoredManifest, int]:
        pace = seen.topic.retention_pace
        stored = await self._release(stored, seen)
        self._gone_since.note(stored)
        stored, deleted = await self._delete_spilled(stored, pace)
        if not deleted:
            stored, deleted = await self._delete_retired(stored, pace)
        if self._is_due(stored.existing, seen):
            stored, expired = await self._evaluate(stored, seen)
            return stored, deleted + expired
        return stored, deleted

    def due_ms(self, manifest: PartitionManifest, seen: Observation) -> float:
        """Return the time from which a step has work, if nothing but the time changes."""
        pace = seen.topic.retention_pace
        first: list[Retired | ExpiredSpillover] = [
            *islice(free_retired(manifest), 1),
            *expired_spilled(manifest)[:1],
        ]
        gone_since_ms = min(map(self._gone_since.ms, first), default=math.inf)
        if self._awaits_scan:
            return -math.inf
        return min(gone_since_ms + pace.delete_delay_ms, self._evaluation_due_ms(manifest, seen))

    def _evaluation_due_ms(self, manifest: PartitionManifest, seen: Observation) -> float:
        """Return the time from which `_is_due` holds and an evaluation may find something."""
        if not manifest.segment_count:
            # `_is_due` never holds for an empty manifest, and a due time that has passed would end the
            # archiver's rest.
            return math.inf
        if self._last is None:
            return -math.inf
        evaluation_ms = -math.inf
        if seen.shows_same(self._last.seen):
            evaluation_ms = expiry_due_ms(manifest, seen.topic.total, self._first)
        return max(evaluation_ms, self._clock() + self._wait_ms(self._last, seen))

    def _wait_ms(self, last: _Evaluation, seen: Observation) -> int:
        """Return how long the next evaluation waits after *last*; 0 or less when an interval has passed."""
        return last.steady_ms + seen.topic.retention_pace.interval_ms - self._clock.steady_ms()

    async def _release(self, stored: StoredManifest, seen: Observation) -> StoredManifest:
        """
        Release what compactions replaced, where two observations of the log agree that it is settled.

        The release is a commit of its own: objects are deleted only after it, so held segments can be put
        back until then.
        """
        if seen.scan_number == self._log_scan_number:
            return stored
        self._log_scan_number = seen.scan_number
        topic = seen.topic
        observation = LogObservation(
            seen.bounds.log_start_offset,
            keeps_all=topic.is_compact_only and bool(topic.never_trimmed_because),
        )
        self._log_observations = (*self._log_observations[-1:], observation)
        manifest = stored.existing
        self._awaits_scan = bool(plan_release(manifest, (observation,)))
        if len(self._log_observations) < OBSERVATIONS_TO_RELEASE:
            return stored
        release = plan_release(manifest, self._log_observations)
        if not release or not await self._claim.is_current():
            return stored
        self._awaits_scan = False
        left = manifest.released(release.settled).released(release.in_log, is_settled=False)
        if release.is_all_settled:
            left = replace(left, unsettled=None)
        self._log.info(
            "what compactions replaced is not held any more",
            settled=len(release.settled),
            in_log=len(release.in_log),
        )
        return await self._claim.commit(stored, left)

    def _is_due(self, manifest: PartitionManifest, seen: Observation) -> bool:
        """Say whether total retention is due: an interval after its last evaluation."""
        if not manifest.segment_count:
            return False
        if self._last is None:
            return True
        if self._last.seen.scan_number == seen.scan_number:
            return False  # The same observation would confirm itself.
        return self._wait_ms(self._last, seen) <= 0

    async def _evaluate(self, stored: StoredManifest, seen: Observation) -> tuple[StoredManifest, int]:
        """Expire what this evaluation and an earlier one agree on; return how many segments that were."""
        now_ms, steady_ms, first = self._clock(), self._clock.steady_ms(), self._first
        # One clock reading for the whole evaluation: a segment without proof does not become old on the way.
        ages_ms = self._clock.ages_ms(stored.existing.committed_at_ms)
        stored, oldest = await self._with_upload_times(stored, seen, ages_ms=ages_ms)
        manifest = stored.existing
        log_start_offset = seen.bounds.log_start_offset
        deleted_before = await self._user_deletions.start(manifest, seen)
        plan = partial(
            plan_total_retention,
            manifest,
            seen.log,
            seen.topic.total,
            log_start_offset=log_start_offset,
            now_ms=ages_ms,
        )
        found = plan(oldest=oldest, deleted_before=deleted_before)
        agreed_deleted_before = _smaller(deleted_before, first.deleted_before if first else None)
        agreed = plan(
            up_to=first.start_offset if first else manifest.start_offset,
            oldest=oldest,
            deleted_before=agreed_deleted_before,
        )
        if agreed.first_offset > manifest.start_offset:
            left = _without(manifest, agreed, oldest, now_ms=now_ms)
            if agreed_deleted_before is not None:
                # What is uploaded later follows the deletion too, also under another leader.
                deletion = RecordDeletion(agreed_deleted_before, manifest.leader_epoch)
                left = left.with_deletion(deletion)
                left = await following_deletion(left, self._spillovers, now_ms=now_ms)
            stored = await self._claim.commit(stored, left)
            self._metrics.expired.segments.labels(self._partition.topic).inc(agreed.segments)
            self._metrics.expired.size_bytes.labels(self._partition.topic).inc(agreed.size_bytes)
            self._log.info(
                "archived records are past total retention, or a user deleted them",
                start_offset=left.start_offset,
                deleted_before=deleted_before,
                segments=agreed.segments,
                size_bytes=agreed.size_bytes,
                objects_go_in_seconds=seen.topic.retention_pace.delete_delay_ms / 1000,
            )
        self._last = _Evaluation(seen, steady_ms)
        is_more = found.first_offset > agreed.first_offset
        self._first = FirstEvaluation(found.start_offset, deleted_before) if is_more else None
        return stored, agreed.segments

    async def _with_upload_times(
        self, stored: StoredManifest, seen: Observation, *, ages_ms: int
    ) -> tuple[StoredManifest, SegmentTable | None]:
        """
        Return the manifest and the oldest spilled segments, with proven upload times where needed.

        Times are proven for all segments that would go, and for the first one that stays: an impossible
        upload time must not keep that one for ever. Live segments are corrected in the manifest, spilled
        ones for this evaluation only.
        """
        manifest = stored.existing
        log_start_offset = seen.bounds.log_start_offset
        plan = partial(
            plan_total_retention,
            manifest,
            seen.log,
            seen.topic.total,
            log_start_offset=log_start_offset,
            now_ms=ages_ms,
            deleted_before=await self._user_deletions.start(manifest, seen),
        )
        oldest = await self._oldest_spilled(
            manifest, plan, parts_max=seen.topic.retention_pace.spilled_parts_max
        )
        if seen.topic.total.limit_ms is None or ages_ms == NOTHING_IS_OLD_MS:
            return stored, oldest
        table = manifest.segments if oldest is None else oldest
        going = table.head(min(len(table), plan(oldest=oldest).segments + 1))
        if oldest is None:
            return await self._upload_times.proven(stored, going, now_ms=ages_ms), None
        wrong = await self._upload_times.corrections(going, now_ms=ages_ms)
        return stored, with_upload_times(oldest, wrong)

    async def _oldest_spilled(
        self, manifest: PartitionManifest, plan: Callable[..., TotalRetentionPlan], *, parts_max: int
    ) -> SegmentTable | None:
        """
        Return the oldest segments, where they are spilled, from at most *parts_max* spillover manifests.

        No part is loaded that is far behind the first segment that stays by *plan*. None where nothing is
        spilled.
        """
        if manifest.live_offset == manifest.start_offset:
            return None
        oldest = SegmentTable.of()
        async with aclosing(self._spillovers.pieces(manifest, from_offset=manifest.start_offset)) as pieces:
            loaded = 0
            async for piece in pieces:
                if piece.start_offset >= manifest.live_offset or loaded == parts_max:
                    break
                oldest, loaded = SegmentTable.joined([oldest, piece.segments]), loaded + 1
                # A plan reads each row, so it is made only each time the number of parts has doubled.
                if loaded.bit_count() == 1 and plan(oldest=oldest).segments < len(oldest):
                    break
        return oldest

    async def _delete_spilled(
        self, stored: StoredManifest, pace: RetentionPace
    ) -> tuple[StoredManifest, int]:
        """Delete the objects of spilled segments that expired long enough ago; return how many segments."""
        manifest, spillover = stored.existing, stored.existing.spillover
        limit_ms = self._clock.ages_ms(manifest.committed_at_ms) - pace.delete_delay_ms
        marks = list(takewhile(lambda one: self._gone_since.ms(one) <= limit_ms, expired_spilled(manifest)))
        if spillover is None or not marks or not await self._claim.is_current():
            return stored, 0
        due: list[RemoteSegment] = []
        begin, end = spillover.begin_offset, marks[-1].next_offset
        async with aclosing(self._spillovers.parts(manifest, from_offset=begin)) as parts:
            async for part in parts:
                due += part.segments.overlapping(max(begin, part.base_offset), min(end, part.next_offset))
                if len(due) >= pace.deleted_at_once_max or part.next_offset >= end:
                    break
        due = due[: pace.deleted_at_once_max]
        gone = unnamed(manifest, due)
        await self._remote_log.delete_segments(self._partition, gone)
        next_offset = due[-1].next_offset
        # A spillover manifest that ends before this offset has nothing held or still to be deleted,
        # whichever daemon left it. The listing comes before the commit, which proves that no successor had
        # claimed the archive at that time. A successor may begin anew at lower offsets, and its parts must
        # not be deleted by a process that was stopped here and went on.
        ended = await self._spillovers.ending_before(self._partition, next_offset)
        stored = await self._claim.commit(stored, spillover_deleted(manifest, next_offset))
        await self._spillovers.delete(self._partition, ended)
        self._metrics.expired.deleted_segments.labels(self._partition.topic).inc(len(gone))
        self._log.info(
            "objects of spilled segments deleted from the archive",
            segments=len(gone),
            spillover_manifests=len(ended),
            next_offset=next_offset,
        )
        return stored, len(due)

    async def _delete_retired(
        self, stored: StoredManifest, pace: RetentionPace
    ) -> tuple[StoredManifest, int]:
        """Delete the objects of segments retired long enough ago; return how many segments that is."""
        manifest, delay_ms = stored.existing, pace.delete_delay_ms
        ages_ms = self._clock.ages_ms(manifest.committed_at_ms)
        # In manifest order, which may differ from time order after a clock was set back: `forgotten` takes
        # the first ones.
        due = [
            one.segments
            for one in takewhile(
                lambda one: self._gone_since.ms(one) + delay_ms <= ages_ms, free_retired(manifest)
            )
        ]
        # A leader that does not know yet that it was deposed leaves this to its successor. Nothing is lost
        # if this process is stopped right here: an object name holds the epoch and the process that
        # uploaded it, so no successor reuses these names.
        if not due or not await self._claim.is_current():
            return stored, 0
        segments = tuple(islice(chain.from_iterable(due), pace.deleted_at_once_max))
        await self._remote_log.delete_segments(self._partition, unnamed(manifest, segments))
        stored = await self._claim.commit(stored, manifest.forgotten(len(segments)))
        self._metrics.expired.deleted_segments.labels(self._partition.topic).inc(len(segments))
        self._log.info(
            "objects deleted from the archive",
            segments=len(segments),
            size_bytes=sum(segment.size_bytes for segment in segments),
        )
        return stored, len(segments)


def _without(
    manifest: PartitionManifest, plan: TotalRetentionPlan, oldest: SegmentTable | None, *, now_ms: int
) -> PartitionManifest:
    """Return *manifest* without what *plan* expires; *oldest* is the table that the plan was made for."""
    table, left = manifest.segments if oldest is None else oldest, manifest
    if plan.segments and oldest is None:
        left = left.expired(plan.segments, now_ms=now_ms)
    elif plan.segments:
        left = spillover_expired(left, table.head(plan.segments), now_ms=now_ms)
    if plan.inside_offset is None:
        return left
    return left.starting_inside(table[plan.segments], plan.inside_offset, now_ms=now_ms)


def _smaller(one: int | None, other: int | None) -> int | None:
    """Return the smaller of both offsets; None where either is None."""
    return None if one is None or other is None else min(one, other)
