"""
Spillover: how much of a manifest's oldest part moves into spillover manifests, so that commits stay small.

A manifest that has grown past its target is brought well below it, by parts of about half of the target
each. So one part and one commit write no more than the target together, and the next spill is far away.
What the local log still holds stays in the live manifest, whatever its size: trimming and retention
compare it with local files, segment by segment.
"""

from __future__ import annotations

from typing import Final

from tieringd.model.manifest import SEGMENTS_REMEMBERED, PartitionManifest

PARTS_AT_ONCE_MAX: Final = 64
"""Only the first spill of a long history needs more parts; the rest follows with the next commit."""
ROWS_MIN: Final = 32
"""A part of fewer segments is not worth an object, whatever the target."""


def plan_spillover(
    manifest: PartitionManifest, *, size_bytes: int, target_bytes: int, local_offset: int | None
) -> tuple[int, ...]:
    """
    Return how many segments go into each new spillover manifest, oldest first; empty for none.

    *size_bytes* is the encoded size of the manifest. *local_offset* is the first offset of the local log,
    or None without a local log. Nothing is spilled while all spilled segments have expired and still
    await deletion.
    """
    spillover = manifest.spillover
    if size_bytes <= target_bytes or (spillover is not None and not spillover.segments):
        return ()
    table = manifest.segments
    rows = max(0, len(table) - SEGMENTS_REMEMBERED)
    if local_offset is not None:
        rows = min(rows, table.row_at_or_after(local_offset))
    rows_of_part = max(ROWS_MIN, target_bytes * len(table) // (2 * size_bytes))
    surplus = len(table) - rows_of_part
    parts = min(rows // rows_of_part, surplus // rows_of_part, PARTS_AT_ONCE_MAX)
    return (rows_of_part,) * parts
