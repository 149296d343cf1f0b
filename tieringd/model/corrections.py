"""
Manifests in which a detail is corrected. Records stay as they are, but for those that an operator gives up.

`with_upload_times` and `with_marks_redated` correct times that a wrong clock recorded.

`reindexed` gives one segment another index. An index's checksum is part of the name of its data object,
because other bytes have other names. So where a lost index cannot be rebuilt byte for byte, the same
data gets a new name with the new index.

`with_gap_inside` takes segments out for good and records a gap in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Retired
from tieringd.model.segment import RemoteSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spillover import span_faults


def reindexed(
    manifest: PartitionManifest, old: RemoteSegment, new: RemoteSegment, *, now_ms: int
) -> PartitionManifest:
    """
    Return *manifest* with *new* in the place of *old*, whose objects are to be deleted later.

    *new* may have another writer and leader epoch.

    Raises:
        ValueError: *old* is not live in the manifest, or *new* has other data, or the same index.
    """
    table = manifest.segments
    row = table.row_at_or_after(old.base_offset)
    is_same_data = (
        replace(
            new,
            index_size_bytes=old.index_size_bytes,
            index_crc32c=old.index_crc32c,
            leader_epoch=old.leader_epoch,
            writer_id=old.writer_id,
        )
        == old
        and new.index_crc32c != old.index_crc32c
    )
    if row == len(table) or table[row] != old or not is_same_data:
        raise ValueError(
            f"the index of offsets {new.base_offset} to {new.last_offset} of {manifest.partition} cannot be "
            "replaced"
        )
    return replace(
        manifest,
        segments=table.replaced(row, row + 1, new),
        retired=(*manifest.retired, Retired(SegmentTable.of([old]), now_ms)),
    )


def with_gap_inside(manifest: PartitionManifest, gap: Gap) -> PartitionManifest:
    """
    Return *manifest* with *gap* in the place of the live segments that it covers exactly.

    No manifest names the objects of these segments any more. So a scrub takes them to quarantine, where they
    can still be had for a while. A compaction that has replaced some of the offsets is not undone any more,
    and no log decides a transaction whose marker is in the gap.

    Raises:
        ValueError: The gap does not begin and end where live segments do, or covers the newest one.
    """
    table = manifest.segments
    first, last = table.row_at_or_after(gap.base_offset), table.row_at_or_after(gap.next_offset)
    parts = table.head(last).without_head(first)
    if (
        last == len(table)
        or span_faults(parts, (), begin=gap.base_offset, end=gap.next_offset)
        or not parts
        or gap.base_offset < manifest.start_offset
    ):
        raise ValueError(
            f"offsets {gap.base_offset} to {gap.last_offset} of {manifest.partition} are not whole segments"
        )
    return replace(
        manifest,
        segments=table.replaced(first, last),
        gaps=tuple(sorted((*manifest.gaps, gap), key=lambda one: one.base_offset)),
        retired=tuple(
            replace(one, winners_end=0)
            if one.base_offset < gap.next_offset and gap.base_offset < one.next_offset
            else one
            for one in manifest.retired
        ),
        crossing=tuple(
            one for one in manifest.crossing if not gap.base_offset <= one.marker_offset < gap.next_offset
        ),
    )


def with_upload_times(table: SegmentTable, uploaded_ms: Mapping[int, int]) -> SegmentTable:
    """Return *table* with other upload times, by base offset. Times of segments that it lacks are ignored."""
    for base_offset, time_ms in uploaded_ms.items():
        row = table.row_at_or_after(base_offset)
        if row < len(table) and table[row].base_offset == base_offset:
            table = table.replaced(row, row + 1, replace(table[row], uploaded_at_ms=time_ms))
    return table


def with_marks_redated(
    manifest: PartitionManifest, is_impossible: Callable[[int], bool], *, now_ms: int
) -> PartitionManifest:
    """
    Return *manifest* with impossible retirement and replacement times set to *now_ms*.

    If all times are possible, the manifest itself is returned.
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
