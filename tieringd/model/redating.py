"""A manifest in which times that a wrong clock noted are corrected; offsets and objects stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment_table import SegmentTable


def with_upload_times(table: SegmentTable, uploaded_ms: Mapping[int, int]) -> SegmentTable:
    """Return *table* with other upload times, by base offset; those that it lacks count for nothing."""
    for base_offset, time_ms in uploaded_ms.items():
        row = table.row_at_or_after(base_offset)
        if row < len(table) and table[row].base_offset == base_offset:
            table = table.replaced(row, row + 1, replace(table[row], uploaded_at_ms=time_ms))
    return table


def with_marks_redated(
    manifest: PartitionManifest, is_impossible: Callable[[int], bool], *, now_ms: int
) -> PartitionManifest:
    """
    Return *manifest* with the times of what was retired or replaced set to *now_ms* where they cannot be.

    The same manifest where all of them can be.
    """

    def possible(time_ms: int) -> int:
        return now_ms if is_impossible(time_ms) else time_ms

    spillover = manifest.spillover
    redated = replace(
        manifest,
        retired=tuple(replace(one, retired_at_ms=possible(one.retired_at_ms)) for one in manifest.retired),
        replacements=tuple(
            replace(one, replaced_at_ms=possible(one.replaced_at_ms)) for one in manifest.replacements
        ),
        spillover=spillover
        and replace(
            spillover,
            retired=tuple(
                replace(one, retired_at_ms=possible(one.retired_at_ms)) for one in spillover.retired
            ),
        ),
    )
    marks = (manifest.retired, manifest.replacements, spillover and spillover.retired)
    new_marks = (redated.retired, redated.replacements, redated.spillover and redated.spillover.retired)
    return manifest if marks == new_marks else redated
