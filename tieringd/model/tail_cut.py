"""
The manifest of an archive whose tail is cut off, because another leader's log has other records there.

Compactions whose winners are cut off are undone: the segments that they replaced take their places again.
"""

from __future__ import annotations

from dataclasses import replace

from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion, Replacement, Retired, Unsettled, furthest
from tieringd.model.segment import RemoteSegment
from tieringd.model.spillover import span_faults


def cut_back(
    manifest: PartitionManifest,
    next_offset: int,
    *,
    leader_epoch: int,
    now_ms: int,
    same_to: int = 0,
    head: RemoteSegment | None = None,
) -> PartitionManifest:
    """
    Return a manifest that ends at *next_offset*, and records the offsets that were replaced.

    Epochs and transactions that began at or past the cut are removed: those of another leader
    follow. Compactions whose winners are cut off are undone (`undone`). An archive of which nothing
    is left may begin anew before its start: what was there has expired, or was never archived, and
    another leader wrote other records at these offsets.

    The leader's records before *same_to* are those of the archive, though some are cut off and archived
    anew. A user's deletion still reaches that far.

    If *next_offset* is inside a segment, *head* is the part of it that stays.

    Raises:
        ValueError: *next_offset* is inside a segment or gap, or outside the manifest. Or all that
            would be left is spilled, and has to be taken back first.
    """
    manifest = undone(manifest, next_offset, now_ms=now_ms)
    is_spilled = manifest.spillover is not None and manifest.spillover.segments > 0
    ends = {manifest.live_offset, *(one.next_offset for one in manifest.gaps)}
    table = manifest.segments
    kept = table.row_at_or_after(next_offset)
    is_end = next_offset in ends or (kept > 0 and table.column("last_offset")[kept - 1] == next_offset - 1)
    if head is not None:
        split = table.covering(next_offset)
        is_end = split is not None and (split.base_offset, next_offset) == (
            head.base_offset,
            head.next_offset,
        )
    if (
        not 0 <= next_offset < manifest.next_offset
        or (next_offset > manifest.live_offset and not is_end)
        or (is_spilled and not kept and head is None)
    ):
        raise ValueError(f"the manifest of {manifest.partition} cannot be cut back to offset {next_offset}")
    replacement = Replacement(next_offset, manifest.next_offset - 1, leader_epoch, now_ms)
    return replace(
        manifest,
        start_offset=min(manifest.start_offset, next_offset),
        # Below the old start it is unknown which trims were the daemon's.
        trimmed_offset=(
            max(manifest.trimmed_offset, manifest.start_offset)
            if next_offset < manifest.start_offset
            else manifest.trimmed_offset
        ),
        next_offset=next_offset,
        segments=table.head(kept).appended([head]) if head else table.head(kept),
        gaps=tuple(gap for gap in manifest.gaps if gap.base_offset < next_offset),
        epochs=tuple((epoch, start) for epoch, start in manifest.epochs if start < next_offset),
        replacements=(*manifest.replacements, replacement),
        # Without a segment, and before the archive's start, no record of a transaction is left.
        crossing=tuple(
            one
            for one in manifest.crossing
            if (kept or head) and max(one.first_offset, manifest.start_offset) < next_offset
        ),
        unsettled=_cut(manifest.unsettled, next_offset),
        deletions=furthest(
            _without_replaced(one, max(next_offset, same_to), leader_epoch) for one in manifest.deletions
        ),
    )


def undone_from(manifest: PartitionManifest, next_offset: int) -> int | None:
    """Return where the oldest segment begins that `undone` puts back; None if it changes nothing."""
    return min((one.base_offset for one in _to_undo(manifest, next_offset)), default=None)


def undone(manifest: PartitionManifest, next_offset: int, *, now_ms: int) -> PartitionManifest:
    """
    Return a manifest without the compactions that rest on records at *next_offset* or after it.

    The segments that they replaced take their places again, and the objects of the compacted ones
    are to be deleted later. A later compaction may rest on an earlier one: it may have dropped a
    tombstone, because the earlier one had dropped all records that the tombstone hid. So all
    compactions after the oldest one that has to be undone are undone as well, the newest first.
    """
    for one in reversed(_to_undo(manifest, next_offset)):
        manifest = _with_original(manifest, one, now_ms=now_ms)
    return manifest


def _to_undo(manifest: PartitionManifest, next_offset: int) -> tuple[Retired, ...]:
    held = [one for one in manifest.retired if one.is_held]
    oldest = next((row for row, one in enumerate(held) if one.winners_end > next_offset), len(held))
    return tuple(held[oldest:])


def _with_original(manifest: PartitionManifest, held: Retired, *, now_ms: int) -> PartitionManifest:
    """
    Return a manifest with the segments of *held* back in their places, as far as they exist.

    Those that end at or before the archive's start have expired, or a user deleted them. The first one
    that comes back may begin before that start. Where they do not fit, `unsettled` covers them.
    """
    start_offset, table = manifest.start_offset, manifest.segments
    if held.next_offset <= start_offset:
        return manifest.released([held])
    first, last = table.row_at_or_after(held.base_offset), table.row_at_or_after(held.next_offset)
    compacted = table.head(last).without_head(first)
    gone = held.segments.row_at_or_after(start_offset)
    expired, originals = held.segments.head(gone), held.segments.without_head(gone)
    taken_out = (Retired(expired, held.retired_at_ms), Retired(compacted, now_ms))
    changed = replace(
        manifest,
        segments=table.replaced(first, last, *originals),
        retired=(
            *(one for one in manifest.retired if one is not held),
            *(one for one in taken_out if one.segments),
        ),
    )
    begin, end = changed.live_base, changed.next_offset
    if span_faults(changed.segments, changed.gaps, begin=begin, end=end):
        return manifest.released([held], is_settled=False)
    return changed


def _without_replaced(deletion: RecordDeletion, next_offset: int, leader_epoch: int) -> RecordDeletion:
    """Return what is left of a deletion where *leader_epoch* replaces the records from *next_offset* on."""
    if deletion.leader_epoch >= leader_epoch or deletion.before_offset <= next_offset:
        return deletion
    return replace(deletion, before_offset=next_offset)


def _cut(unsettled: Unsettled | None, next_offset: int) -> Unsettled | None:
    """Return what is still unsettled in an archive that was cut back to *next_offset*."""
    if unsettled is None or unsettled.base_offset >= next_offset:
        return None
    return replace(unsettled, winners_end=min(unsettled.winners_end, next_offset))
