"""
The lineage keeper: ensures that an archive's tail matches the leader's log before the archive grows.

`policies.lineage` judges. This module reads the logs that the judgement needs, and cuts the manifest
back. It uploads nothing and deletes no object: after a cut, no manifest names the objects that were cut off.
Where the first segment to go also holds good records that are only in the archive, `archiving.good_part`
keeps these. Where the log has nothing in common with the archive, it replaces segments only if an operator
says so (`archiving.operator_case`).

A cut may also remove winners of compactions: records that the compaction dropped are then again the
latest of their keys. The same commit puts the held segments back. Records that are not held come back
from the leader's log: the cut goes back as far as such compactions reached (`policies.record_removal`).

`Spiller` keeps the live manifest near its target size. It stores the spilled parts first, and then
commits the manifest without them. A crash in between leaves objects that no manifest names.
`policies.spillover` decides what spills.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.archiving.claim import Claim
from tieringd.archiving.good_part import GoodPart, KeptPart, UnfitDecisionError
from tieringd.archiving.observer import Observation
from tieringd.archiving.operator_case import NewLogCase, OperatorWait
from tieringd.archiving.operator_desk import OperatorDesk
from tieringd.archiving.partition_logger import LeadershipLogger, PartitionLogger
from tieringd.archiving.remote_log import RemoteLog
from tieringd.broker.layout import Layout, batch_start, open_transactions_at
from tieringd.errors import (
    CorruptDataError,
    ObjectNotFound,
    StorageError,
    StorageUnavailable,
    TieringError,
)
from tieringd.metrics import Metrics
from tieringd.model.local_log import Hole, LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.operator_decision import OperatorDecision
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.model.spillover import SpilloverManifest, SpilloverName
from tieringd.model.tail_cut import cut_back, undone, undone_from
from tieringd.policies.lineage import (
    ArchiveTruncation,
    Lineage,
    LineagePlan,
    knows_divergence,
    plan_replacement,
    why_too_early,
)
from tieringd.policies.record_removal import cut_for_unsettled
from tieringd.policies.spillover import plan_spillover

_LOOK_BACK_MS = 24 * 3_600_000
"""For how long after a cut a new process looks whether an operator's decision led to it."""


class Spiller(PartitionLogger):
    """Spill the oldest part of one partition's manifest. Owned by its archiver, used within its step."""

    __slots__ = ("_claim", "_partition", "_reported", "_spillovers")

    def __init__(self, partition: TopicIdPartition, *, claim: Claim, spillovers: SpilloverManifests) -> None:
        self._claim = claim
        self._spillovers = spillovers
        self._partition = partition
        self._reported = ""

    async def take_back(self, stored: StoredManifest, seen: Observation) -> StoredManifest:
        """
        Ensure that the live manifest lists all that the local log holds, because trimming relies on it.

        An earlier leader may have held less locally, and spilled more. Where a spilled part cannot be read
        nothing changes: less is trimmed than could be, and uploads go on.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The commit failed.
        """
        manifest, local_offset = stored.existing, _local_offset(seen)
        if local_offset is None or local_offset >= manifest.live_offset:
            return stored
        try:
            wider = await self._spillovers.with_history(manifest, from_offset=local_offset)
        except (StorageError, StorageUnavailable, CorruptDataError) as error:
            self._report(error)
            return stored
        self._reported = ""
        if wider is manifest:
            return stored
        self._log.info(
            "spilled segments taken back into the manifest: the local log holds them",
            local_offset=local_offset,
            live_offset_before=manifest.live_offset,
            live_offset=wider.live_offset,
        )
        return await self._claim.commit(stored, wider)

    def _report(self, error: TieringError) -> None:
        """Log once per error that a spilled part cannot be read."""
        if str(error) != self._reported:
            self._reported = str(error)
            self._log.error(
                "spilled segments that the local log holds cannot be looked at: they are not trimmed",
                error=str(error),
            )

    async def step(self, stored: StoredManifest, seen: Observation) -> StoredManifest:
        """
        Spill the oldest segments of a manifest above its target size; return the stored manifest after it.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The store failed. At most superfluous objects were stored.
        """
        manifest = stored.existing
        plan = plan_spillover(
            manifest,
            size_bytes=stored.size_bytes,
            target_bytes=seen.topic.target_manifest_bytes,
            local_offset=_local_offset(seen),
        )
        parts: list[tuple[SpilloverManifest, SpilloverName]] = []
        for rows in plan:
            part = part_to_spill(manifest, rows)
            name = await self._spillovers.put(part)
            parts.append((part, name))
            manifest = spilled(manifest, part, name)
        if not plan:
            return stored
        committed = await self._claim.commit(stored, manifest)
        for part, name in parts:
            if await self._spillovers.keep(part, name):
                self._log.warning(
                    "a spilled part was put into quarantine before the manifest named it; it is stored again",
                    base_offset=name.base_offset,
                )
        self._log.info(
            "old segments spilled out of the manifest",
            segments=sum(plan),
            parts=len(plan),
            live_offset=manifest.live_offset,
            manifest_bytes_before=stored.size_bytes,
            manifest_bytes=committed.size_bytes,
        )
        return committed


def _keeps_good_part(replacement: ArchiveTruncation, seen: Observation) -> bool:
    """
    Say whether the good part of what is replaced stays as it is stored.

    A transaction that is open at the divergence has no outcome yet. Where the leader's log has the whole
    part, the log replaces it at once, so that the archive does not tell the old outcome until the transaction
    ends.
    """
    if replacement.good is None or replacement.only_archived is not None:
        return replacement.good is not None
    bounds = seen.bounds
    has_open_transaction = bounds.last_stable_offset < bounds.log_end_offset
    return not has_open_transaction or bounds.last_stable_offset >= replacement.divergence_offset


def _local_offset(seen: Observation) -> int | None:
    """Return the first offset on this host, in the log or pinned; None where there is none."""
    offsets = (seen.log.first_offset, seen.uploadable.first_offset)
    return min((one for one in offsets if one is not None), default=None)


class LineageKeeper(LeadershipLogger):
    """Keep the archive of one partition on its leader's lineage. One task at a time uses it."""

    __slots__ = (
        "_claim",
        "_desk",
        "_good_part",
        "_has_looked_back",
        "_is_epoch_awaited",
        "_layout",
        "_leadership",
        "_manifests",
        "_metrics",
        "_new_log",
        "_now_ms",
        "_remote_log",
        "_spillovers",
        "_unwritten",
    )

    def __init__(
        self,
        leadership: Leadership,
        claim: Claim,
        *,
        remote_log: RemoteLog,
        layout: Layout,
        manifests: ManifestStore,
        metrics: Metrics,
        now_ms: Callable[[], int],
    ) -> None:
        self._good_part: GoodPart | None = None
        """Made where there is a good part to keep, which is rare."""
        self._new_log: NewLogCase | None = None
        """Made where the leader's log has nothing in common with the archive."""
        self._desk: OperatorDesk | None = None
        """Made where an operator has to decide, and kept until the records of the decision are complete."""
        self._has_looked_back = False
        """Whether it is known that no earlier process has left a decision to be ended."""
        self._unwritten: Observation | None = None
        """The first of the consecutive observations that show the same history without the leader's epoch."""
        self._is_epoch_awaited = False
        """Whether the last observation is the first of these."""
        self._remote_log = remote_log
        self._leadership = leadership
        self._claim = claim
        self._layout = layout
        self._manifests = manifests
        self._spillovers = manifests.spillovers
        self._metrics = metrics
        self._now_ms = now_ms

    @property
    def operator_wait(self) -> OperatorWait | None:
        """Return the case that only an operator can decide; None without one."""
        case = self._new_log or self._good_part
        return case.operator_wait if case else None

    @property
    def needs_another_scan(self) -> bool:
        """Say whether the next observation may confirm what the last one showed."""
        case = self._new_log or self._good_part
        return self._is_epoch_awaited or (case is not None and case.needs_another_scan)

    async def keep(
        self, stored: StoredManifest, seen: Observation, *, new_holes: Collection[Hole] = ()
    ) -> tuple[StoredManifest, str]:
        """
        Cut off the part of the archive that is not on the leader's lineage; its log replaces that part.

        Nothing is cut off while the log has *new_holes*, which only the newest observation shows: the
        start of a transaction that is open at the divergence may be in one of them.

        Returns the manifest, and why nothing may be appended to it yet; empty when it may.

        Raises:
            FencedError: Another writer owns the manifest now.
            RetryableError: The log cannot be read now, or the store does not answer.
            CorruptDataError: A header in the log is impossible.
        """
        manifest = stored.existing
        if await self._holds_before_its_epoch(manifest, seen):
            self._good_part = self._new_log = None
            await self._end_decisions(manifest)
            return stored, ""
        if seen.uploadable.first_offset != seen.log.first_offset and seen.log.epochs:
            # Pins were judged by this epoch history. A leader's history is complete, while a follower's may
            # belong to a log that is being replaced.
            too_early = why_too_early(seen.log, self._leadership.leader_epoch)
            if too_early:
                return stored, too_early
        plan, manifest = await self._plan_with_history(manifest, seen)
        replacement = plan.replacement
        if replacement is None or replacement.good is None:
            self._good_part = None
        if not plan.is_log_anew:
            self._new_log = None
        is_only_archived = replacement is not None and replacement.only_archived is not None
        if not is_only_archived and not plan.is_log_anew and plan.lineage is not Lineage.UNDECIDED:
            await self._end_decisions(stored.existing)
        if replacement is None:
            return stored, "" if plan.lineage.may_append else plan.reason
        if new_holes:
            base_offset, next_offset = min(new_holes)
            return stored, (
                f"{plan.reason}; offsets {base_offset} to {next_offset - 1} are missing on disk; nothing is "
                "replaced until the next scan finds them missing as well"
            )
        return await self._replace(stored, manifest, plan, seen)

    async def _plan_with_history(
        self, manifest: PartitionManifest, seen: Observation
    ) -> tuple[LineagePlan, PartitionManifest]:
        """Return the plan, and *manifest* with all segments that the plan replaces without an operator."""
        plan = await self._plan(manifest, seen)
        replacement = plan.replacement
        if replacement is None:
            return plan, manifest
        if plan.is_log_anew and replacement.divergence_offset <= manifest.start_offset:
            # No spilled segment can be kept. The partition may wait for weeks, and each look would load all.
            return plan, manifest
        if replacement.base_offset <= manifest.live_offset:
            # The part to replace may be spilled: the plan needs its segments, and the cut needs them back
            # in the live manifest.
            plan = await self._plan(await self._spillovers.with_history(manifest), seen)
            manifest = await self._spillovers.with_history(manifest, from_offset=plan.resume_offset - 1)
        return plan, manifest

    async def _replace(
        self, stored: StoredManifest, manifest: PartitionManifest, plan: LineagePlan, seen: Observation
    ) -> tuple[StoredManifest, str]:
        """Replace what *plan* says, keep what is good of it, or ask an operator."""
        assert plan.replacement is not None, "the plan replaces something"
        if plan.is_log_anew:
            return await self._ask_about_new_log(stored, manifest, plan, seen)
        if _keeps_good_part(plan.replacement, seen):
            # A cut of whole segments would lose offsets that were promised to be durable.
            return await self._keep_good_part(stored, manifest, plan, seen)
        return await self._replace_whole(stored, manifest, plan, seen, now_ms=self._now_ms()), ""

    async def _ask_about_new_log(
        self, stored: StoredManifest, manifest: PartitionManifest, plan: LineagePlan, seen: Observation
    ) -> tuple[StoredManifest, str]:
        """Replace what the new log contradicts if an operator has decided so; until then nothing changes."""
        case = self._new_log = self._new_log or NewLogCase(self._leadership, now_ms=self._now_ms)
        waits_because = case.ask(manifest, plan, scan_number=seen.scan_number)
        if case.operator_wait is None:
            return stored, waits_because
        desk = self._desk = self._desk or self._new_desk()
        decision = await desk.pending(stored.existing)
        if decision is None:
            case.note_refusal(desk.refused)
            return stored, waits_because
        unfit = case.why_unfit(decision)
        if not unfit:
            try:
                manifest = await self._spillovers.with_history(manifest, from_offset=plan.resume_offset - 1)
            except (ObjectNotFound, CorruptDataError) as error:
                unfit = f"{error}; `tieringd archive scrub --fix` may mend it"
        if unfit:
            await desk.refuse(decision, unfit)
            case.note_refusal(desk.refused)
            return stored, f"{plan.reason}; {desk.refused}"
        now_ms = self._now_ms()
        await desk.begin(decision, at_ms=now_ms)
        committed = await self._replace_whole(stored, manifest, plan, seen, now_ms=now_ms)
        self._new_log = None
        await desk.finish(decision, committed.existing, at_ms=now_ms)
        return committed, ""

    async def _replace_whole(
        self,
        stored: StoredManifest,
        manifest: PartitionManifest,
        plan: LineagePlan,
        seen: Observation,
        *,
        now_ms: int,
    ) -> StoredManifest:
        """Cut the archive back to the base of a segment; the leader's log has all that follows."""
        replacement = plan.replacement
        assert replacement is not None, "the plan replaces something"
        self._log.warning(
            "archive's tail is off the leader's lineage; replacing it",
            base_offset=replacement.base_offset,
            divergence_offset=replacement.divergence_offset,
            segments=replacement.segment_count,
            # The log of a leader that was trimmed past this place no longer tells what it had before.
            is_compared_below=knows_divergence(manifest, seen.log),
            reason=plan.reason,
        )
        manifest, cut_offset = await self._winners_lost(manifest, plan.resume_offset, seen)
        if not manifest.segments.row_at_or_after(cut_offset):
            # No live segment is left, as where the live part begins with a gap. A live part has a segment.
            manifest = await self._spillovers.with_history(manifest, from_offset=manifest.live_offset - 1)
        manifest = cut_back(
            manifest,
            cut_offset,
            leader_epoch=self._leadership.leader_epoch,
            now_ms=now_ms,
            same_to=replacement.divergence_offset,
        )
        return await self._claim.commit(stored, manifest)

    async def _keep_good_part(
        self, stored: StoredManifest, manifest: PartitionManifest, plan: LineagePlan, seen: Observation
    ) -> tuple[StoredManifest, str]:
        """Cut the archive back at the divergence, and keep what is good of the segment there."""
        replacement = plan.replacement
        assert replacement is not None, "the plan replaces something"
        good_part = self._good_part = self._good_part or GoodPart(
            self._leadership,
            remote_log=self._remote_log,
            layout=self._layout,
            spillovers=self._spillovers,
            now_ms=self._now_ms,
        )
        waits_because = good_part.why_not_yet(plan, seen)
        if waits_because:
            return stored, waits_because
        decision = None
        if good_part.operator_wait is not None:
            desk = self._desk = self._desk or self._new_desk()
            decision = await desk.pending(stored.existing)
            good_part.note_refusal(desk.refused)
        if decision is not None:
            return await self._carry_out(decision, stored, manifest, plan, seen)
        if good_part.rests_because:
            return stored, good_part.rests_because
        whole, cut_offset = manifest, replacement.divergence_offset
        if plan.lineage is Lineage.DIVERGES:
            manifest, cut_offset = await self._winners_lost(manifest, cut_offset, seen)
        kept, waits_because = await good_part.keep(manifest, plan, seen, cut_offset=cut_offset)
        if kept is None and replacement.only_archived is None:
            self._log.warning(
                "the good part of the archive's tail cannot be kept; the leader's log replaces it",
                base_offset=replacement.base_offset,
                divergence_offset=replacement.divergence_offset,
                error=waits_because,
            )
            return await self._replace_whole(stored, whole, plan, seen, now_ms=self._now_ms()), ""
        if kept is None:
            return stored, waits_because
        return await self._commit_part(stored, kept, plan), ""

    async def _carry_out(
        self,
        decision: OperatorDecision,
        stored: StoredManifest,
        manifest: PartitionManifest,
        plan: LineagePlan,
        seen: Observation,
    ) -> tuple[StoredManifest, str]:
        """Keep what *decision* says, or refuse it."""
        replacement, good_part, desk = plan.replacement, self._good_part, self._desk
        assert replacement is not None, "there is a part to keep"
        assert good_part is not None, "there is a part to keep"
        assert desk is not None, "a decision was found"
        cut_offset = replacement.divergence_offset
        if decision.give_up is not None and replacement.only_archived is not None:
            base_offset, last_offset = decision.give_up
            if last_offset == replacement.only_archived.last_offset:
                cut_offset = min(cut_offset, base_offset)
        if plan.lineage is Lineage.DIVERGES or cut_offset < replacement.divergence_offset:
            manifest = await self._spillovers.with_history(manifest, from_offset=cut_offset)
            manifest, cut_offset = await self._winners_lost(manifest, cut_offset, seen)
        try:
            kept = await good_part.keep_as_decided(manifest, plan, seen, decision, cut_offset=cut_offset)
        except UnfitDecisionError as error:
            await desk.refuse(decision, str(error))
            good_part.note_refusal(desk.refused)
            return stored, f"{plan.reason}; {desk.refused}"
        await desk.begin(decision, at_ms=kept.at_ms, voided=kept.voided)
        committed = await self._commit_part(stored, kept, plan)
        await desk.finish(decision, committed.existing, at_ms=kept.at_ms)
        return committed, ""

    async def _commit_part(self, stored: StoredManifest, kept: KeptPart, plan: LineagePlan) -> StoredManifest:
        replacement = plan.replacement
        assert replacement is not None, "there is a part to keep"
        self._log.warning(
            "archive's tail is off the leader's lineage; its good part stays",
            base_offset=replacement.base_offset,
            divergence_offset=replacement.divergence_offset,
            next_offset=kept.manifest.next_offset,
            reason=plan.reason,
        )
        committed = await self._claim.commit(stored, kept.manifest)
        self._good_part = None
        return committed

    def _new_desk(self) -> OperatorDesk:
        return OperatorDesk(
            self._leadership,
            self._manifests.decisions,
            is_current=self._claim.is_surely_current,
            metrics=self._metrics,
            now_ms=self._now_ms,
        )

    async def _end_decisions(self, manifest: PartitionManifest) -> None:
        """End decisions whose records are not complete, where no case waits for an operator any more."""
        if self._desk is None and not self._has_looked_back:
            # The process before this one may have ended after the commit, and before the records of it.
            newest = manifest.replacements[-1].replaced_at_ms if manifest.replacements else -math.inf
            if self._now_ms() - newest < _LOOK_BACK_MS:
                self._desk = self._new_desk()
        if self._desk is not None:
            decision = await self._desk.pending(manifest)
            if decision is not None:
                await self._desk.refuse(decision, "the partition does not wait for an operator any more")
            self._desk = None
        self._has_looked_back = True

    async def _winners_lost(
        self, manifest: PartitionManifest, cut_offset: int, seen: Observation
    ) -> tuple[PartitionManifest, int]:
        """
        Prepare to bring back what compaction dropped because of records at *cut_offset* or after it.

        Returns the manifest with all that its cut puts back, and the offset at which to cut it.
        """
        manifest, cut_offset = await self._cut_for_unsettled(manifest, cut_offset, seen)
        while (first_undone := undone_from(manifest, cut_offset)) is not None:
            manifest = await self._spillovers.with_history(manifest, from_offset=first_undone)
            self._log.warning(
                "compactions are undone: an election has cut off records that made others go",
                base_offset=first_undone,
                next_offset=cut_offset,
            )
            without = undone(manifest, cut_offset, now_ms=self._now_ms())
            if without.unsettled == manifest.unsettled:
                break
            self._log.error(
                "segments that a compaction replaced do not fit into their places any more; the leader's log "
                "replaces what it has of them",
                base_offset=first_undone,
                next_offset=cut_offset,
            )
            # A cut further back may lose winners of other compactions.
            manifest, cut_offset = await self._cut_for_unsettled(without, cut_offset, seen)
        return manifest, cut_offset

    async def _cut_for_unsettled(
        self, manifest: PartitionManifest, cut_offset: int, seen: Observation
    ) -> tuple[PartitionManifest, int]:
        """Return what `_winners_lost` does, as far as held segments have no part in it."""
        unsettled = manifest.unsettled
        if unsettled is None or not unsettled.base_offset < cut_offset < unsettled.winners_end:
            return manifest, cut_offset
        manifest = await self._spillovers.with_history(manifest, from_offset=unsettled.base_offset)
        log_start_offset = max(seen.bounds.log_start_offset, seen.log.segments[0].base_offset)
        cut_offset, missing = cut_for_unsettled(manifest, cut_offset, log_start_offset=log_start_offset)
        if missing:
            self._log.error("archived records cannot be brought back after an election", reason=missing)
        return manifest, cut_offset

    async def _holds_before_its_epoch(self, manifest: PartitionManifest, seen: Observation) -> bool:
        """Say whether the archive's tail matches a log in which no record of the leader's epoch is yet."""
        of_leader = self._with_unwritten_epoch(seen)
        return of_leader is not None and (await self._plan(manifest, of_leader)).lineage is Lineage.HOLDS

    def _with_unwritten_epoch(self, seen: Observation) -> Observation | None:
        """
        Return *seen* with the leader's epoch at the end of its history; None where that may be wrong.

        A broker that moves a partition to another of its log directories makes the history of the copy from
        the batches. The epoch under which it leads is missing then until the next record, for months where
        none comes. An earlier scan got the end of the log from the broker as the leader of this epoch. The
        history in *seen* was read after that, and an epoch is in it before its first record. So without the
        epoch there, nothing was written under it, and all below that end is of the history's epochs. Redpanda
        may write its files later than that.

        The end is the high watermark, and older records may follow it. So nothing is cut off because of it.
        """
        log, end_offset, first = seen.log, seen.bounds.log_end_offset, self._unwritten
        is_lacking = bool(log.segments and log.epochs) and not log.is_reframed
        if not (is_lacking and log.epochs[-1][0] < self._leadership.leader_epoch):
            self._unwritten, self._is_epoch_awaited = None, False
            return None
        if first is None or (first.log.epochs, first.bounds.log_end_offset) != (log.epochs, end_offset):
            first = self._unwritten = seen
        self._is_epoch_awaited = first.scan_number == seen.scan_number
        if self._is_epoch_awaited or end_offset < log.epochs[-1][1]:
            return None
        epochs = (*log.epochs, (self._leadership.leader_epoch, end_offset))
        return replace(seen, log=replace(log, epochs=epochs))

    async def _plan(self, manifest: PartitionManifest, seen: Observation) -> LineagePlan:
        bounds, leader_epoch = seen.bounds, self._leadership.leader_epoch
        plan = plan_replacement(manifest, seen.log, bounds, leader_epoch=leader_epoch)
        if plan.replacement is None or plan.lineage is not Lineage.DIVERGES:
            return plan
        log = await self._with_whole_epoch(seen)
        judge = partial(plan_replacement, manifest, log, bounds, leader_epoch=leader_epoch)
        plan = judge()
        if plan.replacement is None:
            return plan
        still_open = await asyncio.to_thread(
            open_transactions_at, self._layout, seen.uploadable, plan.replacement.divergence_offset
        )
        return judge(undecided_from=min(still_open.values(), default=None))

    async def _with_whole_epoch(self, seen: Observation) -> LocalLog:
        """
        Return the log with its first epoch from the beginning of a batch on.

        A user's DeleteRecords may end inside a batch. The broker's history of epochs begins there then, and
        the whole batch is of its first epoch.
        """
        log = seen.log
        if not log.epochs:
            return log
        (epoch, start_offset), *later = log.epochs
        first_offset = await asyncio.to_thread(batch_start, self._layout, seen.uploadable, start_offset)
        return replace(log, epochs=((epoch, first_offset), *later))
