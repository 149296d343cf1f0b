"""
How a manifest moves its oldest part to a spillover manifest, and takes it back.

    part = part_to_spill(manifest, rows)        encode and store it, and then
    manifest = spilled(manifest, part, name)    commit this

`with_parts` is the inverse: the manifest as if these parts had never been spilled. It returns an ordinary
manifest. Readers use it, and a writer may commit it, which is necessary before spilled segments are replaced.
`formats` has the bytes and names, and `policies.spillover` decides what is spilled and when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import pairwise
from operator import attrgetter

from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Retired
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spillover import ExpiredSpillover, Spillover, SpilloverManifest, SpilloverName


def part_to_spill(manifest: PartitionManifest, rows: int) -> SpilloverManifest:
    """
    Return the first *rows* segments of a live manifest, with the gaps among them.

    Raises:
        ValueError: The manifest has not more segments than *rows*, or has an expired part that is still
            to be deleted.
    """
    spillover = manifest.spillover
    if not 0 < rows < len(manifest.segments):
        raise ValueError(f"{rows} of {len(manifest.segments)} segments of {manifest.partition} cannot spill")
    if spillover is not None and not spillover.segments:
        raise ValueError(f"the spilled part of {manifest.partition} has expired and is still to be deleted")
    next_offset = manifest.segments.column("last_offset")[rows - 1] + 1
    return SpilloverManifest(
        manifest.partition,
        base_offset=manifest.live_base,
        next_offset=next_offset,
        segments=manifest.segments.head(rows),
        gaps=tuple(gap for gap in manifest.gaps if gap.base_offset < next_offset),
        previous=spillover.newest if spillover else None,
    )


def spilled(manifest: PartitionManifest, part: SpilloverManifest, name: SpilloverName) -> PartitionManifest:
    """Return *manifest* without *part*, which `part_to_spill` made of it and is stored under *name*."""
    known = manifest.spillover or Spillover(part.base_offset, name, 0, 0)
    return replace(
        manifest,
        segments=manifest.segments.without_head(len(part.segments)),
        gaps=manifest.gaps[len(part.gaps) :],
        spillover=replace(
            known,
            newest=name,
            segments=known.segments + len(part.segments),
            size_bytes=known.size_bytes + part.segments.total_bytes,
            gap_offsets=known.gap_offsets + sum(gap.offsets for gap in part.gaps),
        ),
    )


def with_parts(manifest: PartitionManifest, parts: Sequence[SpilloverManifest]) -> PartitionManifest:
    """
    Return *manifest* with *parts* back in it: the newest spilled ones, ascending and without a hole.

    Expired segments in them become retired segments, as without spilling: their objects are to be deleted.

    Raises:
        ValueError: These are not the newest parts of this manifest.
    """
    spillover = manifest.spillover
    if not parts:
        return manifest
    if (
        spillover is None
        or parts[-1].next_offset != spillover.next_offset
        or any(later.base_offset != part.next_offset for part, later in pairwise(parts))
    ):
        raise ValueError(f"these are not the newest spilled parts of {manifest.partition}")
    start_offset = manifest.start_offset if spillover.segments else spillover.next_offset
    whole = SegmentTable.joined(part.segments for part in parts)
    held = whole.without_head(whole.row_at_or_after(start_offset))
    gaps = [gap for part in parts for gap in part.gaps if gap.base_offset >= start_offset]
    return replace(
        manifest,
        segments=SegmentTable.joined([held, manifest.segments]) if held else manifest.segments,
        gaps=(*gaps, *manifest.gaps),
        # Merged, not sorted: compactions are undone in the order in which they are recorded, whatever
        # the clock.
        retired=tuple(merge(_retired(whole, spillover), manifest.retired, key=attrgetter("retired_at_ms"))),
        spillover=_left(spillover, held, gaps, parts[0].previous),
    )


def piece_of(manifest: PartitionManifest, part: SpilloverManifest) -> PartitionManifest:
    """Return the content of *part* as a manifest for readers. It is never committed."""
    start_offset = max(part.base_offset, manifest.start_offset)
    return replace(
        live_piece(manifest),
        start_offset=start_offset,
        next_offset=part.next_offset,
        segments=part.segments.without_head(part.segments.row_at_or_after(start_offset)),
        gaps=tuple(gap for gap in part.gaps if gap.base_offset >= start_offset),
        crossing=(),
    )


def live_piece(manifest: PartitionManifest) -> PartitionManifest:
    """Return the live part of an archive as a manifest for readers."""
    if manifest.spillover is None:
        return manifest
    return replace(manifest, start_offset=manifest.live_offset, spillover=None, retired=(), unsettled=None)


def spillover_expired(manifest: PartitionManifest, gone: SegmentTable, *, now_ms: int) -> PartitionManifest:
    """
    Return a manifest that begins after *gone*, which are its first, spilled segments.

    Their objects are to be deleted later.

    Raises:
        ValueError: The spilled part has fewer segments, or does not reach that far.
    """
    spillover = manifest.spillover
    next_offset = gone[-1].next_offset if gone else manifest.start_offset
    if (
        spillover is None
        or not manifest.start_offset < next_offset <= spillover.next_offset
        or len(gone) > spillover.segments
        or (len(gone) == spillover.segments) != (next_offset == spillover.next_offset)
    ):
        raise ValueError(f"the spilled part of {manifest.partition} cannot expire up to {next_offset}")
    kept_offsets = sum(one.next_offset - max(manifest.start_offset, one.base_offset) for one in gone)
    gap_offsets = next_offset - manifest.start_offset - kept_offsets
    mark = ExpiredSpillover(next_offset, now_ms)
    return replace(
        manifest,
        start_offset=next_offset,
        expired_at_ms=now_ms,
        spillover=spillover.expired(gone, mark, gap_offsets=gap_offsets),
    )


def spillover_deleted(manifest: PartitionManifest, next_offset: int) -> PartitionManifest:
    """
    Return a manifest that records that the spilled objects before *next_offset* are deleted.

    Raises:
        ValueError: Not all of them have expired.
    """
    spillover = manifest.spillover
    if (
        spillover is None
        or not spillover.retired
        or not spillover.begin_offset < next_offset <= spillover.retired[-1].next_offset
    ):
        raise ValueError(f"the spilled part of {manifest.partition} is held from before {next_offset}")
    marks = tuple(mark for mark in spillover.retired if mark.next_offset > next_offset)
    is_gone = not marks and not spillover.segments
    left = None if is_gone else replace(spillover, begin_offset=next_offset, retired=marks)
    return replace(manifest, spillover=left)


def _retired(segments: SegmentTable, spillover: Spillover) -> Iterator[Retired]:
    """Yield the restored *segments* that have expired and are not deleted, by their marks."""
    left = segments.without_head(segments.row_at_or_after(spillover.begin_offset))
    for mark in spillover.retired:
        rows = left.row_at_or_after(mark.next_offset)
        if rows:
            yield Retired(left.head(rows), mark.retired_at_ms)
        left = left.without_head(rows)


def _left(
    spillover: Spillover, restored: SegmentTable, gaps: Sequence[Gap], newest: SpilloverName | None
) -> Spillover | None:
    """Return what is still spilled without the *restored* segments and *gaps*; None if nothing is."""
    if newest is None or newest.next_offset <= spillover.begin_offset:
        return None
    marks: list[ExpiredSpillover] = []
    for mark in spillover.retired:
        # Several marks may reach or pass the end of what is left. The first of them applies.
        if not marks or marks[-1].next_offset < newest.next_offset:
            marks.append(replace(mark, next_offset=min(mark.next_offset, newest.next_offset)))
    return Spillover(
        spillover.begin_offset,
        newest,
        spillover.segments - len(restored),
        spillover.size_bytes - restored.total_bytes,
        spillover.gap_offsets - sum(gap.offsets for gap in gaps),
        tuple(marks),
    )
