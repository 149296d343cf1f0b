"""
Replacing one partition's archived segments by the compacted ones of the local log.

Preparing copies the local files, as an upload does: every batch is checked, data and index are stored,
and no manifest is touched. Committing is a `ManifestChange` that the partition's archiver makes between
two of its own commits: one commit names the copied segments and retires those that they replace, whose
objects are deleted after the delay that readers with an older manifest need. So the order is data, index,
manifest, and much later the deletion. A crash after any of them leaves at most objects that no manifest
names.

Where a file also covers segments that a job has rewritten, parts of the file replace single segments:
they are copied as slices of it.

Where a cleaner has dropped a tombstone or a transaction's marker that the archive still needs, the
archived segments are rewritten instead, without the other records that the cleaner dropped. Rebuild learns
of that from a record that is stored just before the commit. The replaced segments are held while an
election could lose the winners of the dropped records (`policies.record_removal`).

`policies.compacted_reupload` decides what replaces what. A file that cannot be read is remembered in its
current form, as long as the `CompactedReuploader` lives, and tried again only when it has changed.

`CompactedReuploadJob` goes over all partitions that this daemon archives, one after the other. A
partition's share is a few runs of segments. The job copies them concurrently with the partition's
archiver, and the archiver commits them. The plan follows from the archivers' manifests and observations:
it asks nothing of the store, and is not made again while neither archive nor local log has changed.
Between turns the job keeps only these plans, and which files could not be read. A turn that is cut off,
or a process that is killed, leaves at most objects that no manifest names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import structlog

from tieringd.archive.manifest_store import StoredManifest
from tieringd.archiving.claim import Claim
from tieringd.archiving.observer import Observation
from tieringd.archiving.remote_log import RemoteLog
from tieringd.archiving.segment_copier import CopiedSegment, CopyRequest
from tieringd.errors import (
    CorruptDataError,
    FencedError,
    LocalFileError,
    ObjectNotFound,
    TieringError,
)
from tieringd.housekeeping.partition_sweep import ArchivedPartition, PlannedWork, PlanningJob, ShareResult
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership
from tieringd.model.segment import CrossingTransaction, LocalSegment, RemoteSegment, SegmentSlice
from tieringd.policies.compacted_reupload import (
    Reupload,
    ReuploadPlan,
    RunIdentity,
    Tombstones,
    parts_to_go,
    plan_reuploads,
    reuploaded_segment,
    same_sized_head,
)
from tieringd.policies.record_removal import winners_end_of

log = structlog.get_logger(__name__)

ATTEMPTS_MAX = 5
"""
A file may change while it is read, or lack a marker that comes later. After this many attempts that is no
accident.
"""

RUNS_PER_SHARE_MAX = 4
REQUESTS_PER_SEGMENT = 2
"""One for its data and one for its index."""


class StoredReupload:
    """Compacted segments whose objects are stored, but which no manifest names yet."""

    def __init__(
        self,
        reupload: Reupload,
        segments: tuple[RemoteSegment, ...],
        crossing: tuple[CrossingTransaction, ...],
        seen: Observation,
        *,
        remote_log: RemoteLog,
        metrics: Metrics,
        now_ms: Callable[[], int],
    ) -> None:
        self._replaced = reupload.replaced
        self._segments = segments
        self._crossing = crossing
        self._winners_end = winners_end_of(seen.log)
        topic = seen.topic
        # Where the log is never trimmed, each replica has the replaced records.
        self._is_held = not (topic.is_compact_only and topic.never_trimmed_because)
        self._remote_log = remote_log
        self._metrics = metrics.reuploaded
        self._now_ms = now_ms

    async def commit(self, claim: Claim, stored: StoredManifest) -> StoredManifest:
        """
        Name the compacted segments instead of their originals.

        Where the manifest has changed there meanwhile, the change is given up: the copied bytes may be of
        another log. So it is where the archive begins after the first of the compacted segments by now.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The claim reads the manifest again; then this may be called again.
        """
        manifest, segments = stored.existing, self._segments
        partition = manifest.partition
        said = log.bind(
            topic=partition.topic, partition=partition.partition, base_offset=segments[0].base_offset
        )
        found = manifest.segments.overlapping(segments[0].base_offset, segments[-1].next_offset)
        is_first_gone = segments[0].next_offset <= manifest.start_offset
        if found != self._replaced or is_first_gone or manifest.next_offset < self._winners_end:
            if found != segments:
                said.info("segments to be replaced by compacted ones have changed meanwhile")
            return stored
        changed = manifest.compacted(
            segments,
            now_ms=self._now_ms(),
            crossing=self._crossing,
            winners_end=self._winners_end,
            is_held=self._is_held,
        )
        stored = await self._committed(claim, stored, changed)
        bytes_before = sum(one.size_bytes for one in self._replaced)
        bytes_after = sum(one.size_bytes for one in segments)
        self._metrics.segments.labels(partition.topic).inc(len(self._replaced))
        self._metrics.bytes_before.labels(partition.topic).inc(bytes_before)
        self._metrics.bytes_after.labels(partition.topic).inc(bytes_after)
        said.info(
            "archived segments replaced by compacted ones",
            last_offset=segments[-1].last_offset,
            segments_before=len(self._replaced),
            segments=len(segments),
            bytes_before=bytes_before,
            bytes_after=bytes_after,
        )
        return stored

    async def _committed(
        self, claim: Claim, stored: StoredManifest, changed: PartitionManifest
    ) -> StoredManifest:
        segments = self._segments
        if not any(one.is_rewritten for one in segments):
            return await claim.commit(stored, changed)
        record_key = await self._remote_log.record_compaction(changed.partition, self._replaced, segments)
        try:
            return await claim.commit(stored, changed)
        except FencedError:
            await self._remote_log.forget_compaction(record_key)
            raise


class CompactedReuploader:
    """
    Upload compacted segments of one partition again, under one leader epoch.

    One task at a time uses it. It may be cancelled at any await.
    """

    def __init__(
        self, leadership: Leadership, remote_log: RemoteLog, *, metrics: Metrics, now_ms: Callable[[], int]
    ) -> None:
        self._leadership = leadership
        self._remote_log = remote_log
        self._metrics = metrics
        self._now_ms = now_ms
        self._log = log.bind(topic=leadership.partition.topic, partition=leadership.partition.partition)
        self._failed: set[RunIdentity] = set()
        self._attempts: Counter[Reupload] = Counter()
        self._head: Reupload | None = None
        """The head of the log whose checksum was compared last, with the archive's segments at that time."""
        self._differs = False
        self._settled: dict[RunIdentity, tuple[RemoteSegment, ...]] = {}
        """
        Files that cover rewritten segments and of which no part replaces anything, with the archive's
        segments at that time.
        """

    def plan(self, manifest: PartitionManifest, seen: Observation) -> ReuploadPlan:
        """
        Return what to upload again; see `plan_reuploads`.

        Only the broker's own files count. A pin holds a segment as it was before it was compacted.
        """
        head = same_sized_head(seen.log, manifest, seen.bounds)
        plan = plan_reuploads(
            seen.log,
            manifest,
            seen.bounds,
            is_trimmed=not seen.topic.never_trimmed_because,
            failed=self._failed,
            differing={head.identity} if head and self._differs and head == self._head else (),
        )
        left = tuple(one for one in plan.beside_rewritten if self._settled.get(one.identity) != one.replaced)
        plan = replace(plan, beside_rewritten=left)
        known = {one.identity for one in seen.log.segments}
        self._failed = {one for one in self._failed if known.issuperset(one)}
        self._settled = {one: at for one, at in self._settled.items() if known.issuperset(one)}
        for gone in [one for one in self._attempts if not known.issuperset(one.identity)]:
            del self._attempts[gone]
        return plan

    async def compare_head(self, manifest: PartitionManifest, seen: Observation) -> None:
        """
        Check whether the next segment to be trimmed has the archive's bytes, where sizes agree.

        If it does not, `plan` names it. Each file is read once.

        Raises:
            LocalFileError: It cannot be read, or is not the one that was scanned.
        """
        head = same_sized_head(seen.log, manifest, seen.bounds)
        if head is None or seen.topic.never_trimmed_because or seen.log.is_reframed:
            return
        if head != self._head:
            sizes = [one.size_bytes for one in head.replaced]
            found = await self._remote_log.local_checksums(head.segments[0], sizes)
            self._head, self._differs = head, found != tuple(one.crc32c for one in head.replaced)

    async def parts_to_go(self, found: Reupload) -> tuple[Reupload, ...]:
        """
        Read a file that covers rewritten segments; return which of the others its parts replace.

        Where there are none, `plan` does not name the file again, while the file and the archive do not
        change.

        Raises:
            LocalFileError: It cannot be read, or is not the one that was scanned.
        """
        (file,) = found.segments
        offsets = [found.base_offset, *(one.next_offset for one in found.replaced)]
        try:
            parts = parts_to_go(found, await self._remote_log.local_parts(file, offsets))
        except CorruptDataError as error:
            self._give_up(found, error)
            return ()
        if not parts:
            self._settled[found.identity] = found.replaced
        return parts

    async def prepare(self, seen: Observation, reupload: Reupload) -> StoredReupload | None:
        """
        Store the objects of *reupload*; None when its files cannot be read, or are not smaller after all.

        None as well where it waits for an earlier run of its plan: a later plan names it again.

        Raises:
            RetryableError: The store or the file failed; another attempt may succeed.
            StorageError: An operator must act.
        """
        try:
            if not await self._needs_what_went(reupload):
                return await self._copied(seen, reupload)
            if reupload.tombstones is not Tombstones.WAIT:
                return await self._with_what_stays(seen, reupload)
        except LocalFileError as error:
            self._attempts[reupload] += 1
            if self._attempts[reupload] < ATTEMPTS_MAX:
                raise
            self._give_up(reupload, error)
        except (CorruptDataError, ObjectNotFound) as error:
            self._give_up(reupload, error)
        return None

    async def _copied(self, seen: Observation, reupload: Reupload) -> StoredReupload | None:
        """Store the files as they are; None where they are not smaller after all."""
        copies: list[CopiedSegment] = []
        # Where files have another format than objects, only reading them tells their size as objects.
        room = reupload.archived_bytes if seen.log.is_reframed else None
        for segment in reupload.segments:
            part = _part_of(segment, reupload)
            request = CopyRequest(self._leadership, seen.log, part, bytes_below=room)
            copy = await self._remote_log.copy_segment(request)
            if copy is None:
                self._failed.add(reupload.identity)
                return None
            room = None if room is None else room - copy.remote.size_bytes
            copies.append(copy)
        segments = tuple(reuploaded_segment(copy.remote, reupload.replaced) for copy in copies)
        crossing = tuple(chain.from_iterable(copy.crossing for copy in copies))
        return self._change(seen, reupload, segments, crossing)

    async def _needs_what_went(self, reupload: Reupload) -> bool:
        """
        Say whether the archive still needs a tombstone or a marker that is not in the files any more.

        Raises:
            TieringError: As `RemoteLog.lacks_what_stays`.
        """
        partition = self._leadership.partition
        if reupload.tombstones is Tombstones.GO and not await self._remote_log.goes_on_from_another(
            partition
        ):
            return False
        return await self._remote_log.lacks_what_stays(partition, reupload.segments, reupload.replaced)

    async def _with_what_stays(self, seen: Observation, reupload: Reupload) -> StoredReupload:
        segments = await self._remote_log.rewrite_with_what_stays(
            self._leadership.partition, reupload.segments, reupload.replaced
        )
        self._log.info(
            "a cleaner has dropped tombstones or markers that the archive needs; they stay",
            base_offset=reupload.base_offset,
            next_offset=reupload.next_offset,
        )
        return self._change(seen, reupload, segments, ())

    def _change(
        self,
        seen: Observation,
        reupload: Reupload,
        segments: tuple[RemoteSegment, ...],
        crossing: tuple[CrossingTransaction, ...],
    ) -> StoredReupload:
        return StoredReupload(
            reupload,
            segments,
            crossing,
            seen,
            remote_log=self._remote_log,
            metrics=self._metrics,
            now_ms=self._now_ms,
        )

    def _give_up(self, reupload: Reupload, error: TieringError) -> None:
        self._failed.add(reupload.identity)
        self._metrics.reuploaded.failures.labels(self._leadership.partition.topic, type(error).__name__).inc()
        self._log.error(
            "compacted segments cannot be archived; the archive keeps them as they were",
            base_offset=reupload.base_offset,
            next_offset=reupload.next_offset,
            paths=[one.path for one in reupload.segments],
            error=str(error),
        )


def _part_of(segment: LocalSegment, reupload: Reupload) -> SegmentSlice:
    assert segment.next_offset is not None, "only closed segments are uploaded again"
    begin = max(segment.base_offset, reupload.base_offset)
    return SegmentSlice.between(segment, begin, min(segment.next_offset, reupload.next_offset))


class CompactedReuploadJob(PlanningJob[CompactedReuploader]):
    """Replace archived segments by their compacted forms, in the current *partitions*."""

    name = "compacted_reupload"

    def __init__(
        self,
        partitions: Callable[[], Mapping[Leadership, ArchivedPartition]],
        *,
        remote_log: RemoteLog,
        metrics: Metrics,
        now_ms: Callable[[], int],
        changed: Callable[[], Collection[Leadership]] | None = None,
    ) -> None:
        """Take the collaborators; *changed* is as for `PartitionSweep`."""
        super().__init__(
            partitions,
            make_worker=lambda leadership: CompactedReuploader(
                leadership, remote_log, metrics=metrics, now_ms=now_ms
            ),
            changed=changed,
        )

    async def _share(self, one: ArchivedPartition) -> ShareResult:
        """Plan one partition, and do the first planned runs."""
        manifest, seen = one.archiver.manifest, one.seen
        if manifest is None or not seen.topic.reuploads_compacted:
            return ShareResult(may_rest=True)
        known = self._work_of(one.leadership)
        basis = (manifest.segments, seen.log, seen.bounds)
        if known.is_finished(basis):
            return ShareResult(may_rest=True)
        try:
            await known.worker.compare_head(manifest, seen)
        except LocalFileError as error:
            _note_change(one, error)
        plan = known.worker.plan(manifest, seen)
        if plan.reuploads:
            share = await self._replace(one, known, plan.reuploads)
            # Where a cleaner is busy there are always reuploads: without this, parts would wait for ever.
            is_next = bool(plan.beside_rewritten and share.requests and not share.has_failed)
            return replace(share, has_more=share.has_more or is_next)
        if plan.beside_rewritten:
            return await self._replace_parts(one, known, plan.beside_rewritten)
        known.finished = basis
        return ShareResult(may_rest=True)

    async def _replace_parts(
        self, one: ArchivedPartition, known: PlannedWork[CompactedReuploader], files: Sequence[Reupload]
    ) -> ShareResult:
        """Replace segments by parts of the first of *files* that can be read at present."""
        for number, file in enumerate(files, start=1):
            try:
                parts = await known.worker.parts_to_go(file)
            except LocalFileError as error:
                _note_change(one, error)
                continue
            share = await self._replace(one, known, parts)
            return replace(share, has_more=share.has_more or (number < len(files) and not share.has_failed))
        return ShareResult()

    async def _replace(
        self, one: ArchivedPartition, known: PlannedWork[CompactedReuploader], reuploads: Sequence[Reupload]
    ) -> ShareResult:
        """Replace the first of *reuploads* that can be read at present."""
        requests, has_more = 0, False
        offered: list[asyncio.Future[None]] = []
        for reupload in reuploads:
            if len(offered) == RUNS_PER_SHARE_MAX:
                has_more = True
                break
            try:
                change = await known.worker.prepare(one.seen, reupload)
            except LocalFileError as error:
                _note_change(one, error)
                continue
            requests += REQUESTS_PER_SEGMENT * len(reupload.segments)
            if change is not None:
                offered.append(one.archiver.offer(change))
                # Added at once, in case this task is cancelled before it waits for them.
                offered[-1].add_done_callback(_retrieve)
        if offered:
            await asyncio.wait(offered)
        has_failed = False
        for future in offered:
            # The archiver may have ended and cancelled the future, or its step failed. The other
            # partitions can go on.
            failure = None if future.cancelled() else future.exception()
            if isinstance(failure, TieringError):
                has_failed = True
                log.info(
                    "compacted segments not committed",
                    partition=str(one.leadership.partition),
                    reason=str(failure),
                )
            elif failure is not None:
                raise failure
        # Only this partition's archiver failed. Its segments are not to be copied over and over.
        return ShareResult(
            requests + len(offered), has_more=has_more and not has_failed, has_failed=has_failed
        )


def _retrieve(future: asyncio.Future[None]) -> None:
    """Mark a failure as retrieved: the caller that waits for the future reports it."""
    if not future.cancelled():
        future.exception()


def _note_change(one: ArchivedPartition, error: LocalFileError) -> None:
    """Log that a file changed since its observation: the broker goes on compacting."""
    log.info("a segment changed while it was read", partition=str(one.leadership.partition), error=str(error))
