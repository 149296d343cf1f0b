"""
Merging one partition's neighbouring small segments, in two steps that may lie apart.

Preparing stores the merged data object and its index, and touches no manifest: uploads go on meanwhile.
Committing is for whoever holds the partition's claim. One commit names the merged segment and retires
its parts, whose objects go after the delay that readers with an older manifest need. So the order is data,
index, manifest, and much later the deletion; a crash after any of them leaves at most objects that
nothing names, and a merge that is done again by the same process writes the same objects.

What to merge is decided in `policies.segment_merge`. A run that cannot be merged is remembered for as
long as this object lives, and never tried again.

`MergeJob` merges all partitions that this daemon archives, one after the other. A partition's turn is one
plan of at most a few runs. The job prepares them beside the partition's archiver, and the archiver commits
them. The job merges only what has left this host: before a trim, local segments are compared with their
stored copies by size and checksum, within the bounds of the upload. Between turns the job keeps only how
far it went over each partition, and which runs failed for good. A turn that is cut off, or a process that
is killed, leaves at most objects that no manifest names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tieringd.archive.archive_reader import SegmentIndexes
from tieringd.archive.object_joiner import index_of_parts, store_merged
from tieringd.archiving.claim import ended
from tieringd.errors import (
    BucketNotFound,
    CorruptDataError,
    RetryableError,
    StorageDenied,
    StorageError,
    StoreFull,
    TieringError,
)
from tieringd.housekeeping.job import PartitionPasses, Share
from tieringd.policies.segment_merge import merge_limit_offset, plan_merges

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archive.object_joiner import ObjectJoiner, PreparedMerge
    from tieringd.archiving.archiver import Archiver
    from tieringd.archiving.claim import Claim
    from tieringd.archiving.observer import Observation
    from tieringd.housekeeping.job import JobTurn
    from tieringd.metrics import Metrics
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import Leadership
    from tieringd.model.segment_table import SegmentTable
    from tieringd.policies.segment_merge import MergeLimits, MergePlan, MergeRun
    from tieringd.storage.base import ObjectStore


log = structlog.get_logger(__name__)

ATTEMPTS_MAX = 5
"""
A run that could so often be read and not be stored is given up as well: it may be too much for the time that
a join has, or for the disk. Where the store does not even answer to a read, no attempt is counted.
"""

_FOR_AN_OPERATOR = (StorageDenied, BucketNotFound, StoreFull)
"""The whole store is in the way, and no run. Any other final answer is about this one."""

_REQUESTS_FOR_A_RUN = 5
"""To join, to look at what was joined, to store its index, and a share of the commit."""


@dataclass(frozen=True, slots=True)
class MergeChange:
    """Prepared merges of one partition, for its archiver to commit together."""

    merger: SegmentMerger
    merges: tuple[PreparedMerge, ...]

    async def commit(self, claim: Claim, stored: StoredManifest) -> StoredManifest:
        """Commit them, as `SegmentMerger.commit` does."""
        return await self.merger.commit(claim, stored, *self.merges)


class SegmentMerger:
    """
    Merge runs of one partition, under one leader epoch.

    One task at a time uses it. It may be cancelled at any await.
    """

    def __init__(
        self,
        leadership: Leadership,
        store: ObjectStore,
        *,
        joiner: ObjectJoiner,
        writer_id: str,
        metrics: Metrics,
        now_ms: Callable[[], int],
    ) -> None:
        self._partition = leadership.partition
        self._leader_epoch = leadership.leader_epoch
        self._store = store
        self._indexes = SegmentIndexes(store)
        self._joiner = joiner
        self._writer_id = writer_id
        self._metrics = metrics.merged
        self._now_ms = now_ms
        self._log = log.bind(topic=self._partition.topic, partition=self._partition.partition)
        self._cursor = 0
        self._limits: MergeLimits | None = None
        self._failed: list[MergeRun] = []
        self._attempts: Counter[MergeRun] = Counter()

    def plan(
        self, manifest: PartitionManifest, limits: MergeLimits, *, up_to: int | None = None
    ) -> MergePlan:
        """Return what is to be merged next; see `plan_merges`. Each run is prepared and committed in turn."""
        if limits != self._limits:
            # What was passed over by other sizes is looked at again.
            self._limits, self._cursor = limits, 0
            self._attempts.clear()
        self._failed = [run for run in self._failed if run.next_offset > manifest.start_offset]
        # Some that were tried are not planned again, as when their segments have expired meanwhile.
        behind_offset = max(self._cursor, manifest.start_offset)
        for gone in [run for run in self._attempts if run.next_offset <= behind_offset]:
            del self._attempts[gone]
        return plan_merges(manifest, limits, from_offset=self._cursor, up_to=up_to, failed=self._failed)

    def note_done(self, plan: MergePlan) -> None:
        """Go on after *plan* from now on: what it names is merged, or never will be."""
        self._cursor = plan.resume_offset

    async def prepare(self, manifest: PartitionManifest, run: MergeRun) -> PreparedMerge | None:
        """
        Store the objects of what *run* becomes; None when it cannot be merged, or was tried often enough.

        Raises:
            RetryableError: The store or a disk is in the way; another attempt may do it.
            StorageError: An operator must act.
        """
        parts = manifest.segments.overlapping(run.base_offset, run.next_offset)
        try:
            index = await index_of_parts(self._indexes, self._partition, parts)
            try:
                prepared = await store_merged(
                    self._store,
                    self._joiner,
                    self._partition,
                    parts,
                    index,
                    leader_epoch=self._leader_epoch,
                    writer_id=self._writer_id,
                )
            except RetryableError as error:
                self._attempts[run] += 1
                if self._attempts[run] < ATTEMPTS_MAX:
                    raise
                self._give_up(run, error)
                return None
        except (CorruptDataError, StorageError) as error:
            if isinstance(error, _FOR_AN_OPERATOR):
                raise
            self._give_up(run, error)
            return None
        del self._attempts[run]
        return prepared

    def _give_up(self, run: MergeRun, error: TieringError) -> None:
        self._failed.append(run)
        del self._attempts[run]
        self._metrics.failures.labels(self._partition.topic, type(error).__name__).inc()
        self._log.error(
            "segments cannot be merged; they stay as they are",
            base_offset=run.base_offset,
            next_offset=run.next_offset,
            segments=run.segments,
            error=str(error),
        )

    async def commit(self, claim: Claim, stored: StoredManifest, *merges: PreparedMerge) -> StoredManifest:
        """
        Name each merged segment in the manifest, in the place of its parts, by one commit for all of them.

        Where the manifest has changed meanwhile, that merge is given up. Its objects stay, named by
        nothing: this is not the place to know that for certain.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The claim reads it again; then this may be called again.
        """
        manifest = stored.existing
        done: list[PreparedMerge] = []
        for merge in merges:
            if self._still_fits(manifest, merge):
                manifest = manifest.merged(merge.segment, now_ms=self._now_ms())
                done.append(merge)
        if not done:
            return stored
        stored = await claim.commit(stored, manifest)
        for merge in done:
            self._note_merged(merge)
        return stored

    def _still_fits(self, manifest: PartitionManifest, merge: PreparedMerge) -> bool:
        segment = merge.segment
        found = manifest.segments.overlapping(segment.base_offset, segment.next_offset)
        if found not in {merge.parts, (segment,)}:
            self._log.info("segments to be merged have changed meanwhile", base_offset=segment.base_offset)
        return found == merge.parts

    def _note_merged(self, merge: PreparedMerge) -> None:
        topic, segment = self._partition.topic, merge.segment
        self._metrics.segments.labels(topic).inc(len(merge.parts))
        self._metrics.size_bytes.labels(topic).inc(segment.size_bytes)
        self._metrics.host_bytes.labels(topic).inc(merge.host_bytes)
        self._log.info(
            "segments merged",
            base_offset=segment.base_offset,
            last_offset=segment.last_offset,
            segments=len(merge.parts),
            size_bytes=segment.size_bytes,
            host_bytes=merge.host_bytes,
        )


@dataclass(frozen=True, slots=True)
class MergePartition:
    """A partition that this daemon archives."""

    leadership: Leadership
    archiver: Archiver
    seen: Observation


@dataclass(slots=True)
class _Known:
    """What is kept of a partition."""

    merger: SegmentMerger
    finished: tuple[SegmentTable, MergeLimits, int] | None = None
    """What a plan was made of that left nothing to do."""


class MergeJob:
    """Merge small neighbouring segments of the partitions that *partitions* names at the time."""

    name = "merge"

    def __init__(
        self,
        partitions: Callable[[], Mapping[Leadership, MergePartition]],
        *,
        make_merger: Callable[[Leadership], SegmentMerger],
        changed: Callable[[], Collection[Leadership]] | None = None,
    ) -> None:
        """Take the parts; *changed* is as for `PartitionPasses`."""
        self._make_merger = make_merger
        self._known: dict[Leadership, _Known] = {}
        self._passes = PartitionPasses(
            partitions,
            share=self._share,
            forget=lambda leadership: self._known.pop(leadership, None),
            changed=changed,
        )

    async def turn(self, *, requests_max: int) -> JobTurn:
        """
        Go on with the pass over all partitions, until about *requests_max* requests are spent.

        Raises:
            TieringError: One partition's share failed. The next turn goes on with the others.
        """
        return await self._passes.turn(requests_max=requests_max)

    async def _share(self, one: MergePartition) -> Share:
        """Do what one plan names."""
        # What was known last will do: the commit looks whether it still holds.
        limits, manifest = one.seen.topic.merge_limits, one.archiver.last_manifest
        if limits is None or manifest is None:
            return Share(may_rest=True)
        up_to = merge_limit_offset(one.seen.uploadable, log_start_offset=one.seen.bounds.log_start_offset)
        known = self._known.get(one.leadership)
        if known is None:
            known = self._known[one.leadership] = _Known(self._make_merger(one.leadership))
        basis = (manifest.segments, limits, up_to)
        if known.finished is not None and _is_same(known.finished, basis):
            return Share(may_rest=True)
        plan = known.merger.plan(manifest, limits, up_to=up_to)
        if not plan.runs:
            known.merger.note_done(plan)
            known.finished = basis if plan.is_complete else None
            return Share(has_more=not plan.is_complete, may_rest=plan.is_complete)
        return await self._merge(one, known.merger, manifest, plan)

    async def _merge(
        self, one: MergePartition, merger: SegmentMerger, manifest: PartitionManifest, plan: MergePlan
    ) -> Share:
        """Merge the runs of a plan."""
        requests = sum(run.segments + _REQUESTS_FOR_A_RUN for run in plan.runs)
        merges: list[PreparedMerge] = []
        for run in plan.runs:
            prepared = await merger.prepare(manifest, run)
            if prepared is not None:
                merges.append(prepared)
        try:
            lives = not merges or await ended(one.archiver.offer(MergeChange(merger, tuple(merges))))
        except TieringError as error:
            # It is this partition's archiver that could not go on, and the other partitions' can.
            log.info("merge not committed", partition=str(one.leadership.partition), reason=str(error))
            return Share(requests, has_failed=True)
        if lives:
            merger.note_done(plan)
        return Share(requests, has_more=lives)


def _is_same(
    before: tuple[SegmentTable, MergeLimits, int], now: tuple[SegmentTable, MergeLimits, int]
) -> bool:
    """Compare two plans' bases; tables never change, so another one is another object."""
    return before[0] is now[0] and before[1:] == now[1:]
