"""
Compacted re-upload as a kind of housekeeping: all partitions that this daemon archives, one after the other.

A partition's share is a few runs of segments. They are copied here, beside its archiver, and committed by
the archiver. What there is to do follows from what the archivers know and saw last: a look asks nothing of
the store, and nothing is planned anew while neither archive nor local log has changed.

Nothing is kept between turns but that, and which files could not be read. A turn that is cut off, or a
process that is killed, leaves at most objects that nothing names.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import LocalFileError, TieringError
from tieringd.housekeeping.compacted_reuploader import CompactedReuploader
from tieringd.housekeeping.partition_passes import PartitionPasses, Share

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tieringd.archiving.claim import ManifestChange
    from tieringd.archiving.observer import Observation
    from tieringd.archiving.remote_log import RemoteLog
    from tieringd.housekeeping.job import JobTurn
    from tieringd.metrics import Metrics
    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import Leadership, LogBounds
    from tieringd.model.segment_table import SegmentTable
    from tieringd.policies.compacted_reupload import Reupload

log = structlog.get_logger(__name__)

RUNS_PER_SHARE_MAX = 4
REQUESTS_PER_SEGMENT = 2
"""Its data and its index."""


@dataclass(frozen=True, slots=True)
class ArchivedPartition:
    """A partition that this daemon archives, as this work needs it."""

    leadership: Leadership
    manifest: PartitionManifest | None
    """As its archiver holds it; None while that is not known for certain."""
    seen: Observation
    """The newest look at its local log."""
    offer: Callable[[ManifestChange], asyncio.Future[None]]
    """The archiver's: it commits the change with its next step."""


@dataclass(slots=True)
class _Known:
    """What is kept of a partition."""

    reuploader: CompactedReuploader
    finished: tuple[SegmentTable, LocalLog, LogBounds] | None = None
    """What a plan was made of that left nothing to do."""


class CompactedReuploadJob:
    """Put compacted segments in the place of their originals, in the partitions named at the time."""

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
        """Take the parts; *changed* is as for `PartitionPasses`."""
        self._remote_log = remote_log
        self._metrics = metrics
        self._now_ms = now_ms
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
            RetryableError: The store is in the way. The next turn goes on with the others.
            StorageError: An operator must act.
        """
        return await self._passes.turn(requests_max=requests_max)

    async def _share(self, one: ArchivedPartition) -> Share:
        """Do the first runs of what one plan names."""
        manifest, seen = one.manifest, one.seen
        if manifest is None or not seen.topic.reuploads_compacted:
            return Share(may_rest=True)
        known = self._known.get(one.leadership)
        if known is None:
            known = self._known[one.leadership] = _Known(
                CompactedReuploader(
                    one.leadership, self._remote_log, metrics=self._metrics, now_ms=self._now_ms
                )
            )
        basis = (manifest.segments, seen.log, seen.bounds)
        if known.finished is not None and _is_same(known.finished, basis):
            return Share(may_rest=True)
        try:
            await known.reuploader.compare_head(manifest, seen)
        except LocalFileError as error:
            _note_change(one, error)
        plan = known.reuploader.plan(manifest, seen)
        if plan.reuploads:
            share = await self._replace(one, known, plan.reuploads)
            # Where a cleaner is busy there is always something: parts would wait for ever.
            is_next = bool(plan.beside_rewritten and share.requests and not share.has_failed)
            return replace(share, has_more=share.has_more or is_next)
        if plan.beside_rewritten:
            return await self._replace_parts(one, known, plan.beside_rewritten)
        known.finished = basis
        return Share(may_rest=True)

    async def _replace_parts(self, one: ArchivedPartition, known: _Known, files: Sequence[Reupload]) -> Share:
        """Replace what parts of the first of *files* that can be read just now take the place of."""
        for number, file in enumerate(files, start=1):
            try:
                parts = await known.reuploader.parts_to_go(file)
            except LocalFileError as error:
                _note_change(one, error)
                continue
            share = await self._replace(one, known, parts)
            return replace(share, has_more=share.has_more or (number < len(files) and not share.has_failed))
        return Share()

    async def _replace(self, one: ArchivedPartition, known: _Known, reuploads: Sequence[Reupload]) -> Share:
        """Replace the first of *reuploads* that can be read just now."""
        requests, has_more = 0, False
        offered: list[asyncio.Future[None]] = []
        for reupload in reuploads:
            if len(offered) == RUNS_PER_SHARE_MAX:
                has_more = True
                break
            try:
                change = await known.reuploader.prepare(one.seen, reupload)
            except LocalFileError as error:
                _note_change(one, error)
                continue
            requests += REQUESTS_PER_SEGMENT * len(reupload.segments)
            if change is not None:
                offered.append(one.offer(change))
                # Also where this is cut off before it waits for them.
                offered[-1].add_done_callback(_retrieve)
        if offered:
            await asyncio.wait(offered)
        has_failed = False
        for future in offered:
            # Its archiver may have ended and cancelled it, or its step failed. The others can go on.
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
        # It is this partition's archiver that could not go on: it is not to be copied for over and over.
        return Share(requests + len(offered), has_more=has_more and not has_failed, has_failed=has_failed)


def _retrieve(future: asyncio.Future[None]) -> None:
    """See that a failure counts as seen: whoever waits for it tells of it."""
    if not future.cancelled():
        future.exception()


def _note_change(one: ArchivedPartition, error: LocalFileError) -> None:
    """Say that a file is not the one that was seen: the broker compacts on, and the next look shows it."""
    log.info("a segment changed while it was read", partition=str(one.leadership.partition), error=str(error))


def _is_same(
    before: tuple[SegmentTable, LocalLog, LogBounds], now: tuple[SegmentTable, LocalLog, LogBounds]
) -> bool:
    """Compare two plans' bases; tables never change, so another one is another object."""
    return before[0] is now[0] and before[1:] == now[1:]
