"""
Merging one partition's neighbouring small segments, in two steps that may be far apart.

Preparing stores the merged data object and its index, and touches no manifest: uploads go on meanwhile.
The holder of the partition's claim commits. One commit names the merged segment and retires its parts,
whose objects are deleted after the delay that readers with an older manifest need. So the order is data,
index, manifest, and much later the deletion. A crash after any of them leaves at most objects that no
manifest names, and a merge that is repeated by the same process writes the same objects.

`policies.segment_merge` decides what to merge. A run that cannot be merged is remembered as long as the
`SegmentMerger` lives, and never tried again.

`MergeJob` merges all partitions that this daemon archives, one after the other. A partition's turn is one
plan of at most a few runs. The job prepares them concurrently with the partition's archiver, and the
archiver commits them. The job merges only offsets that have left this host: before a trim, local segments
are compared with their stored copies by size and checksum, within the bounds of the upload. Between turns
the job keeps only how far it went over each partition, and which runs failed for good. A turn that is cut
off, or a process that is killed, leaves at most objects that no manifest names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tieringd.archive.archive_reader import SegmentIndexes
from tieringd.archive.manifest_store import StoredManifest
from tieringd.archive.object_joiner import ObjectJoiner, PreparedMerge, index_of_parts, store_merged
from tieringd.archiving.claim import Claim, ended
from tieringd.errors import (
    BucketNotFound,
    CorruptDataError,
    RetryableError,
    StorageDenied,
    StorageError,
    StoreFull,
    TieringError,
)
from tieringd.housekeeping.partition_sweep import ArchivedPartition, PlanningJob, ShareResult
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership
from tieringd.policies.segment_merge import MergeLimits, MergePlan, MergeRun, merge_limit_offset, plan_merges
from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

ATTEMPTS_MAX = 5
"""
A run that could be read this often, and not stored, is given up: it may be too large for the time of a join,
or for the disk. Attempts during which the store does not even answer a read do not count.
"""

DENIED_MS = 3_600_000
"""
How long a run that the store denied is left alone. The store may deny one key, as under a policy for it or in
a class of storage that has to be restored first, and the runs behind it must not wait for that.
"""

_FOR_AN_OPERATOR = (StorageDenied, BucketNotFound, StoreFull)
"""Errors that may concern the whole store and not one run. Any other final error concerns the run."""

_REQUESTS_FOR_A_RUN = 5
"""The join, a check of the joined object, its index, and a share of the commit."""


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
        self._denied: dict[MergeRun, int] = {}
        """Runs that the store denied, each with the time until which it is left alone."""
        self._attempts: Counter[MergeRun] = Counter()

    @property
    def has_denied(self) -> bool:
        """Say whether runs are left alone for a time, so that a later plan may name them again."""
        return bool(self._denied)

    def plan(
        self, manifest: PartitionManifest, limits: MergeLimits, *, up_to: int | None = None
    ) -> MergePlan:
        """Return what to merge next; see `plan_merges`. Each run is prepared and committed in turn."""
        if limits != self._limits:
            # Segments that were skipped under other limits are planned again.
            self._limits, self._cursor = limits, 0
            self._attempts.clear()
        self._failed = [run for run in self._failed if run.next_offset > manifest.start_offset]
        # Tried runs that are not planned again, for example because their segments have expired.
        behind_offset = max(self._cursor, manifest.start_offset)
        for gone in [run for run in self._attempts if run.next_offset <= behind_offset]:
            del self._attempts[gone]
        now_ms = self._now_ms()
        for run, until_ms in list(self._denied.items()):
            # A clock that is set back does not prolong it.
            if not 0 < until_ms - now_ms <= DENIED_MS:
                del self._denied[run]
                self._cursor = min(self._cursor, run.base_offset)
        left_alone = [*self._failed, *self._denied]
        return plan_merges(manifest, limits, from_offset=self._cursor, up_to=up_to, failed=left_alone)

    def note_done(self, plan: MergePlan) -> None:
        """Continue after *plan* from now on: its runs are merged, or never will be."""
        self._cursor = plan.resume_offset

    async def prepare(self, manifest: PartitionManifest, run: MergeRun) -> PreparedMerge | None:
        """
        Store the objects of the merged *run*; None when it cannot be merged, or was tried often enough.

        Raises:
            RetryableError: The store or a disk failed; another attempt may succeed.
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
            if isinstance(error, StorageDenied) and not error.may_pass:
                self._denied[run] = self._now_ms() + DENIED_MS
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
        Name each merged segment in the manifest instead of its parts, by one commit for all of them.

        Where the manifest has changed meanwhile, that merge is given up. Its objects stay, unnamed: only
        a search for orphans can tell that for certain.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The claim reads the manifest again; then this may be called again.
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


class MergeJob(PlanningJob[SegmentMerger]):
    """Merge small neighbouring segments of the current *partitions*."""

    name = "merge"

    async def _share(self, one: ArchivedPartition) -> ShareResult:
        """Plan one partition, and merge the planned runs."""
        # The last known manifest is enough: the commit checks whether it still holds.
        limits, manifest = one.seen.topic.merge_limits, one.archiver.last_manifest
        if limits is None or manifest is None:
            return ShareResult(may_rest=True)
        up_to = merge_limit_offset(one.seen.uploadable, log_start_offset=one.seen.bounds.log_start_offset)
        known = self._work_of(one.leadership)
        basis = (manifest.segments, limits, up_to)
        if known.is_finished(basis):
            return ShareResult(may_rest=True)
        plan = known.worker.plan(manifest, limits, up_to=up_to)
        if not plan.runs:
            known.worker.note_done(plan)
            is_over = plan.is_complete and not known.worker.has_denied
            known.finished = basis if is_over else None
            return ShareResult(has_more=not plan.is_complete, may_rest=is_over)
        return await self._merge(one, known.worker, manifest, plan)

    async def _merge(
        self, one: ArchivedPartition, merger: SegmentMerger, manifest: PartitionManifest, plan: MergePlan
    ) -> ShareResult:
        """
        Merge the runs of a plan.

        Raises:
            StorageDenied: The store denied a run, and the others are merged.
            TieringError: Nothing is merged.
        """
        requests = sum(run.segments + _REQUESTS_FOR_A_RUN for run in plan.runs)
        merges: list[PreparedMerge] = []
        denied: StorageDenied | None = None
        for run in plan.runs:
            try:
                prepared = await merger.prepare(manifest, run)
            except StorageDenied as error:
                if error.may_pass:
                    raise
                denied = error
                continue
            if prepared is not None:
                merges.append(prepared)
        try:
            lives = not merges or await ended(one.archiver.offer(MergeChange(merger, tuple(merges))))
        except TieringError as error:
            # Only this partition's archiver failed; the other partitions can go on.
            log.info("merge not committed", partition=str(one.leadership.partition), reason=str(error))
            return ShareResult(requests, has_failed=True)
        if lives:
            merger.note_done(plan)
        if denied is not None:
            raise denied
        return ShareResult(requests, has_more=lives)
