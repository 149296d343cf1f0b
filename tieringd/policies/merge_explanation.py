"""
Why a stored segment is not merged with its neighbours, or that it is going to be.

It decides nothing: it asks the policy that does. What an earlier attempt could not merge only the daemon
knows, which said so in its log.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tieringd.policies.segment_merge import RUN_SEGMENTS_MAX, merge_limit_offset, plan_merges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.policies.segment_merge import MergeLimits, MergeRun

STILL_LOCAL = "its offsets are still on the broker's disk, and a trim compares them with it"


@dataclass(frozen=True, slots=True)
class MergingTerms:
    """What holds for a topic."""

    is_enabled: bool
    is_compacted: bool
    limits: MergeLimits | None
    """None where its segments are not merged at all."""
    idle_because: str = ""
    """Why the daemon beside this broker does nothing to the partition."""


def why_never_merged(terms: MergingTerms) -> str:
    """Say why no segment of a topic is merged; empty when they may be."""
    if not terms.is_enabled:
        return "cloud_storage_enable_segment_merging is off"
    if terms.is_compacted:
        return "the topic is compacted, and its segments are replaced one by one"
    if terms.idle_because:
        return terms.idle_because
    return "" if terms.limits is not None else "the topic is not archived"


def explain_merging(
    manifest: PartitionManifest, log: LocalLog, terms: MergingTerms, *, log_start_offset: int
) -> Mapping[int, str]:
    """Return what there is to say of each live segment of *manifest*, by its base offset."""
    bases = list(manifest.segments.column("base_offset"))
    never = why_never_merged(terms)
    if never or terms.limits is None:
        return dict.fromkeys(bases, never)
    rows = len(bases)
    limits = replace(terms.limits, runs_max=rows + 1, rows_max=rows + RUN_SEGMENTS_MAX + 1)
    up_to = merge_limit_offset(log, log_start_offset=log_start_offset)
    plan = plan_merges(manifest, limits, up_to=up_to)
    found = dict.fromkeys(bases, STILL_LOCAL)
    told = [(run.base_offset, run.segments, _becomes_one(run)) for run in plan.runs]
    told += [(one.base_offset, one.segments, one.reason) for one in plan.passed]
    for base_offset, segments, text in told:
        row = bisect_left(bases, base_offset)
        found |= dict.fromkeys(bases[row : row + segments], text)
    return found


def _becomes_one(run: MergeRun) -> str:
    return (
        f"it becomes part of offsets {run.base_offset} to {run.next_offset - 1}, {run.segments} segments of "
        f"{run.size_bytes} bytes together, once the object store is idle"
    )
