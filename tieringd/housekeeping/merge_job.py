"""
Merging as a kind of housekeeping: all partitions that this daemon archives, one after the other.

A partition's turn is one plan of at most a few runs. They are prepared here, beside its archiver, and
committed by the archiver. Only what has left this host is merged: before a trim, local segments are
compared with their stored copies by size and checksum, which goes by the bounds they were uploaded with.

Nothing is kept between turns but how far each partition was gone over, and which runs failed for good.
A turn that is cut off, or a process that is killed, leaves at most objects that nothing names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tieringd.archiving.claim import ended
from tieringd.errors import TieringError
from tieringd.housekeeping.partition_passes import PartitionPasses, Share
from tieringd.housekeeping.segment_merger import MergeChange
from tieringd.policies.segment_merge import merge_limit_offset

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from tieringd.archive.merged_objects import PreparedMerge
    from tieringd.archiving.archiver import Archiver
    from tieringd.archiving.observer import Observation
    from tieringd.housekeeping.job import JobTurn
    from tieringd.housekeeping.segment_merger import SegmentMerger
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import Leadership
    from tieringd.model.segment_table import SegmentTable
    from tieringd.policies.segment_merge import MergeLimits, MergePlan

log = structlog.get_logger(__name__)

_REQUESTS_FOR_A_RUN = 5
"""To join, to look at what was joined, to store its index, and a share of the commit."""


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
