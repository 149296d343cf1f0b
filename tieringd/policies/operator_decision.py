"""
What an operator's decision means for the good part of an archive's tail, and whether it fits.

An operator may give up offsets. At the end of the good part they become a gap, and the leader's log follows
it. Inside the good part they become a gap between two segments. Nothing that the leader's log has is given
up.

Where no history of epochs tells where the logs part, a gap at the end says it: the records before the gap are
those of the leader's log.

A policy: it returns a frozen plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.operator_decision import OperatorDecision
from tieringd.policies.upload_plan import MissingRange


@dataclass(frozen=True, slots=True)
class DecidedPart:
    """What is kept of an archive's tail, and what becomes a gap."""

    divergence_offset: int
    """The offset where the leader's log parts from the archive, by its history or by the operator."""
    cut_offset: int
    """Exclusive end of what is kept. The gap at the end, if there is one, begins here."""
    is_settled: bool = False
    """Whether the operator says that all before the cut is right."""
    last_gap: Gap | None = None
    """The gap at the end; None without one."""
    inner_gap: Gap | None = None
    """The gap between two segments; None without one."""

    @property
    def gap(self) -> Gap | None:
        """Return the gap, wherever it is."""
        return self.last_gap or self.inner_gap

    @property
    def base_offset(self) -> int:
        """Return the first offset of which the segment is needed to carry this out."""
        if self.inner_gap is not None:
            return self.inner_gap.base_offset
        # A transaction may be open at the end of the segment before the gap.
        return max(self.cut_offset - 1, 0) if self.last_gap is not None else self.cut_offset


def decided_part(
    decision: OperatorDecision | None,
    good: MissingRange,
    *,
    divergence_offset: int,
    cut_offset: int,
    is_known: bool,
    now_ms: int,
) -> DecidedPart:
    """
    Return what *decision* makes of the *good* offsets, which are only in the archive.

    Without a decision nothing is settled, and nothing becomes a gap. *cut_offset* is the cut without a gap,
    and *is_known* says whether the histories of epochs tell where the logs part.
    """
    if decision is None:
        return DecidedPart(divergence_offset, cut_offset)
    if decision.give_up is None:
        return DecidedPart(divergence_offset, cut_offset, decision.keep)
    base_offset, last_offset = decision.give_up
    reason = f"given up by {decision.decided_by} (decision {decision.decision_id})"
    gap = Gap(base_offset, last_offset, reason, now_ms)
    if last_offset != good.last_offset:
        return DecidedPart(divergence_offset, cut_offset, decision.keep, inner_gap=gap)
    return DecidedPart(
        divergence_offset if is_known else base_offset,
        min(cut_offset, base_offset),
        is_settled=True,
        last_gap=gap,
    )


def why_unfit(part: DecidedPart, manifest: PartitionManifest, good: MissingRange, *, is_known: bool) -> str:
    """
    Return why the gap of *part* cannot be made in *manifest*; empty where it can, or where there is none.

    *manifest* holds the segments of the gap itself.
    """
    gap = part.gap
    if gap is None:
        return ""
    table, base_offset, last_offset = manifest.segments, gap.base_offset, gap.last_offset
    if last_offset > good.last_offset:
        return f"offsets after {good.last_offset} come from the leader's log, and cannot be given up"
    first, last = table.covering(base_offset), table.covering(last_offset)
    if first is None or last is None or not manifest.start_offset <= base_offset <= last_offset:
        return f"offsets {base_offset} to {last_offset} are not all in stored segments"
    if first.base_offset != base_offset and (is_known or part.last_gap is None):
        return (
            f"the segment of offset {base_offset} begins at {first.base_offset}: only whole segments can be "
            f"given up, from offset {first.base_offset} or {first.next_offset} on"
        )
    if part.inner_gap is not None and last.last_offset != last_offset:
        return (
            f"the segment of offset {last_offset} ends at {last.last_offset}: only whole segments can be "
            f"given up, or all up to offset {good.last_offset}"
        )
    return ""
