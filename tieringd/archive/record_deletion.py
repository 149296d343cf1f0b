"""
Delete records from a partition's archive because a user deleted them.

The deletion is one edit of the partition's manifest (`ManifestStore.edit`), in the name of its archiver. The
edit records how far the deletion reaches, and moves the archive's start there. From then on no reader of the
manifest gets a deleted record. The record survives restarts and changes of leader, and segments that are
uploaded later follow it (`model.manifest`). The archiver deletes the objects after the usual delay.

The deletion names the leader epoch under which the records were deleted. Records that a leader of a later
epoch wrote at the same offsets are not deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spilling import spillover_expired


async def delete_archived(
    manifests: ManifestStore,
    partition: TopicIdPartition,
    deletion: RecordDeletion,
    *,
    now_ms: Callable[[], int],
) -> StoredManifest:
    """
    Record *deletion* in the bucket and move the archive's start; return the manifest as it is stored now.

    Nothing is stored if the manifest has a deletion that reaches as far. Calling again is safe.

    Raises:
        ObjectNotFound: The bucket has no manifest of this partition.
        FencedError: The archive is closed.
        StorageUnavailable: The deletion is not known to be recorded.
        CorruptDataError: A manifest is damaged, or a spillover manifest that has deleted segments.
    """

    async def change(manifest: PartitionManifest) -> PartitionManifest | None:
        recorded = manifest.with_deletion(deletion)
        followed = await following_deletion(recorded, manifests.spillovers, now_ms=now_ms())
        return None if followed is manifest else followed

    return await manifests.edit(partition, change)


async def following_deletion(
    manifest: PartitionManifest, spillovers: SpilloverManifests, *, now_ms: int
) -> PartitionManifest:
    """
    Return *manifest* with its start moved to where its recorded deletion ends, also over spilled segments.

    Raises:
        ObjectNotFound: A spillover manifest was deleted. Read the manifest again.
        CorruptDataError: A spillover manifest is damaged.
    """
    before_offset = manifest.deleted_before
    if before_offset <= manifest.start_offset:
        return manifest
    if manifest.live_offset > manifest.start_offset:
        gone, first = await _spilled_before(manifest, spillovers, before_offset)
        if gone:
            manifest = spillover_expired(manifest, gone, now_ms=now_ms)
        if first is not None and manifest.hides_part_of(first, before_offset):
            manifest = manifest.starting_inside(first, before_offset, now_ms=now_ms)
    return manifest.following_deletion(now_ms=now_ms)


async def _spilled_before(
    manifest: PartitionManifest, spillovers: SpilloverManifests, before_offset: int
) -> tuple[SegmentTable, RemoteSegment | None]:
    """Return the spilled segments that end before *before_offset*, and the first one after them, if any."""
    gone: list[SegmentTable] = []
    first: RemoteSegment | None = None
    async with aclosing(spillovers.pieces(manifest, from_offset=manifest.start_offset)) as pieces:
        async for piece in pieces:
            if piece.start_offset >= manifest.live_offset:
                break
            rows = piece.segments.row_at_or_after(before_offset)
            gone.append(piece.segments.head(rows))
            if rows < len(piece.segments):
                first = piece.segments[rows]
                break
    return SegmentTable.joined(gone), first
