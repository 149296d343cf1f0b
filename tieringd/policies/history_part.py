"""
The part of an older archive that a restored log goes on from.

Another cluster's archive may go on after the restore, or lose its tail or head. Of it only the offsets up
to a fixed end count, and those that are not there any more are a gap, so that a reader comes across.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tieringd.model.manifest_parts import Gap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tieringd.model.manifest import PartitionManifest

GONE = "neither the old archive nor the new log has these offsets any more"


def history_part(manifest: PartitionManifest, *, end_offset: int, next_start: int) -> PartitionManifest:
    """
    Return what counts of an older archive: its offsets before *end_offset*, then a gap up to *next_start*.

    *next_start* is where the newer archive begins now. The leader epochs are left out: they say nothing in
    another cluster. A segment that lies over the end (the old cluster has merged segments, or gone back) does
    not count, as its records past the end are none of this log: the gap begins with it.

    What is spilled stays so. *end_offset* is not in it: the caller has taken back what reaches so far.
    """
    rows = manifest.segments.row_at_or_after(end_offset)
    if rows < len(manifest.segments):
        end_offset = min(end_offset, manifest.segments[rows].base_offset)
    gaps = tuple(
        replace(gap, last_offset=min(gap.last_offset, end_offset - 1))
        for gap in manifest.gaps
        if gap.base_offset < end_offset
    )
    part = replace(
        manifest,
        start_offset=min(manifest.start_offset, end_offset),
        next_offset=min(manifest.next_offset, end_offset),
        segments=manifest.segments.head(rows),
        gaps=gaps,
        epochs=(),
        retired=(),
        unsettled=None,
        crossing=(),
        spillover=manifest.spillover if manifest.start_offset < end_offset else None,
    )
    if part.next_offset < next_start:
        part = part.with_gap(Gap(part.next_offset, next_start - 1, GONE, 0))
    return part


def part_holding(parts: Iterable[PartitionManifest], offset: int) -> PartitionManifest | None:
    """Return the one of some archives that has *offset*, be it a gap; None where none has."""
    return next((part for part in parts if part.start_offset <= offset < part.next_offset), None)
