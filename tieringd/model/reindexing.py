"""
A manifest in which one segment has another index: the same bytes of data, under another name.

An index is part of the name of what it belongs to, since other bytes have other names. So one that was
lost, and cannot be made again byte for byte, comes with a new name for the data as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tieringd.model.manifest_parts import Retired
from tieringd.model.segment_table import SegmentTable

if TYPE_CHECKING:
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import RemoteSegment


def reindexed(
    manifest: PartitionManifest, old: RemoteSegment, new: RemoteSegment, *, now_ms: int
) -> PartitionManifest:
    """
    Return *manifest* with *new* in the place of *old*, whose objects are to be deleted later.

    Raises:
        ValueError: *old* is not live in it, or *new* has other data, or the same index.
    """
    table = manifest.segments
    row = table.row_at_or_after(old.base_offset)
    is_same_data = (
        replace(new, index_size_bytes=old.index_size_bytes, index_crc32c=old.index_crc32c) == old
        and new != old
    )
    if row == len(table) or table[row] != old or not is_same_data:
        raise ValueError(
            f"offsets {new.base_offset} to {new.last_offset} of {manifest.partition} cannot get another index"
        )
    return replace(
        manifest,
        segments=table.replaced(row, row + 1, new),
        retired=(*manifest.retired, Retired(SegmentTable.of([old]), now_ms)),
    )
