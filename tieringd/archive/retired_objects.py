"""
Delete the objects of segments that left a manifest: by name, and only names that the manifest does not hold.

A daemon deletes them for the partitions that it archives, after the delay that readers need. A job does
it for archives that no daemon serves any more. Both may run at once: an object that is already gone
counts as deleted, and a manifest forgets retired segments whose objects were deleted.

`ArchiveCleanup` deletes a partition's archive on an operator's request: all of it, or what is older than
a time. It is not retention, which follows a topic's configuration and takes two observations
(`archiving.archive_retention`). A cleanup by time works like retention: first the manifest drops the
segments, and later the partition's archiver deletes their objects after a delay. A whole partition has
no readers left, so its objects are deleted at once. Its manifests are deleted last, so that an
interrupted attempt can find the rest by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, takewhile

import structlog

from tieringd.archive.manifest_store import ManifestStore
from tieringd.errors import ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key, manifest_key, rewriting_prefix
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.model.spilling import spillover_deleted, spillover_expired
from tieringd.model.spillover import SpilloverManifest, SpilloverName
from tieringd.policies.retention_time import retention_time_ms
from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

DELETED_AT_ONCE_MAX = 500
"""How many segments one request deletes, with two objects each: half of the keys that a store accepts."""

_PAST_EVERY_OFFSET = 2**63


def unnamed(manifest: PartitionManifest, segments: Iterable[RemoteSegment]) -> list[RemoteSegment]:
    """
    Return those of *segments* whose objects the manifest does not also name for segments it holds.

    An archive that began anew at lower offsets may hold the same bytes under the same name again.
    """
    partition, found = manifest.partition, []
    for one in segments:
        held = manifest.segments.covering(one.base_offset)
        if held is not None and data_key(partition, held) == data_key(partition, one):
            log.error(
                "what is to be deleted is held again; its objects stay",
                topic=partition.topic,
                partition=partition.partition,
                segment=one,
            )
        else:
            found.append(one)
    return found


async def delete_segments(
    store: ObjectStore, partition: TopicIdPartition, segments: Iterable[RemoteSegment]
) -> None:
    """
    Delete the objects of *segments*. An object that is already gone counts as deleted.

    Raises:
        StorageUnavailable: Some objects may be left. Calling again deletes them.
    """
    keys = [name(partition, segment) for segment in segments for name in (index_key, data_key)]
    for begin in range(0, len(keys), 2 * DELETED_AT_ONCE_MAX):
        await store.delete_many(keys[begin : begin + 2 * DELETED_AT_ONCE_MAX])


async def delete_retired(
    store: ObjectStore,
    manifests: ManifestStore,
    partition: TopicIdPartition,
    *,
    retired_until_ms: int,
    keeps_held: bool = True,
) -> tuple[RemoteSegment, ...]:
    """
    Delete the objects of segments that were retired by *retired_until_ms*, oldest first.

    These are the retired segments of the live manifest, and the spilled segments that expired. Segments held
    for a compaction that may have to be undone stay (`policies.record_removal`). With *keeps_held* false they
    are deleted as well: the partition has no log any more, so no election can undo a compaction.

    Returns:
        The segments whose objects were deleted.

    Raises:
        ObjectNotFound: The bucket has no manifest of this partition, or a spillover manifest is missing.
        CorruptDataError: A manifest is damaged.
        FencedError: The manifest is closed.
        StorageUnavailable: Some objects may be left. Calling again deletes them.
    """
    deleted: tuple[RemoteSegment, ...] = ()
    ended: tuple[SpilloverName, ...] = ()

    async def change(manifest: PartitionManifest) -> PartitionManifest | None:
        nonlocal deleted, ended
        if not keeps_held:
            held = [one for one in manifest.retired if one.is_held]
            manifest = replace(manifest.released(held), unsettled=None)
        free = (one for one in manifest.retired if not one.is_held)
        due = takewhile(lambda one: one.retired_at_ms <= retired_until_ms, free)
        retired = tuple(chain.from_iterable(one.segments for one in due))
        expired, spilled_end = await _expired_spilled(manifests, manifest, retired_until_ms)
        deleted, ended = (*expired, *retired), ()
        if not deleted:
            return None
        await delete_segments(store, partition, unnamed(manifest, deleted))
        left = manifest.forgotten(len(retired))
        if spilled_end is None:
            return left
        # Listed before the edit takes effect: a part that a daemon stores later must not be deleted.
        ended = await manifests.spillovers.ending_before(partition, spilled_end)
        return spillover_deleted(left, spilled_end)

    await manifests.edit(partition, change)
    await manifests.spillovers.delete(partition, ended)
    return deleted


async def _expired_spilled(
    manifests: ManifestStore, manifest: PartitionManifest, until_ms: int
) -> tuple[list[RemoteSegment], int | None]:
    """Return the spilled segments that expired by *until_ms*, and their end offset (None without any)."""
    spillover = manifest.spillover
    marks = list(takewhile(lambda one: one.retired_at_ms <= until_ms, spillover.retired if spillover else ()))
    if spillover is None or not marks:
        return [], None
    begin, end = spillover.begin_offset, marks[-1].next_offset
    found: list[RemoteSegment] = []
    async with aclosing(manifests.spillovers.parts(manifest, from_offset=begin)) as parts:
        async for part in parts:
            found += part.segments.overlapping(max(begin, part.base_offset), min(end, part.next_offset))
            if part.next_offset >= end:
                break
    return found, end


class ArchiveCleanup:
    """
    Delete stored objects of partitions.

    Keeps no state; several partitions may be cleaned up concurrently.
    """

    def __init__(self, store: ObjectStore, manifests: ManifestStore, *, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._manifests = manifests
        self._spillovers = manifests.spillovers
        self._now_ms = now_ms

    async def delete_segments(self, partition: TopicIdPartition, segments: Iterable[RemoteSegment]) -> None:
        """See `RemoteLog.delete_segments`."""
        await delete_segments(self._store, partition, segments)

    async def delete_partition(self, partition: TopicIdPartition) -> int:
        """See `RemoteLog.delete_partition`."""
        manifest = (await self._manifests.load(partition)).manifest
        deleted = 0
        if manifest is not None:
            # Oldest first: a part that a repeated attempt does not find was deleted by an earlier attempt.
            for name, part in reversed(await self._chain(manifest)):
                await self.delete_segments(partition, part.segments)
                await self._spillovers.delete(partition, [name])
                deleted += len(part.segments)
            held = (manifest.segments, *(one.segments for one in manifest.retired))
            await self.delete_segments(partition, chain.from_iterable(held))
            deleted += sum(len(one) for one in held)
        # Also delete parts that a deposed leader or a crash left behind.
        strays = await self._spillovers.ending_before(partition, _PAST_EVERY_OFFSET)
        await self._spillovers.delete(partition, strays)
        await self._delete_records(partition)
        await self._store.delete_many([manifest_key(partition)])
        log.info("partition deleted from the archive", partition=str(partition), segments=deleted)
        return deleted

    async def _delete_records(self, partition: TopicIdPartition) -> None:
        """Delete the records that jobs wrote of the segments they rewrote."""
        start_after: str | None = None
        while True:
            page = await self._store.list_page(rewriting_prefix(partition), start_after=start_after)
            if page.objects:
                await self._store.delete_many([info.key for info in page.objects])
            start_after = page.next_start_after
            if start_after is None:
                return

    async def cleanup_until(self, leadership: Leadership, *, timestamp_ms: int) -> int:
        """See `RemoteLog.cleanup_until`."""
        stored = await self._manifests.load(leadership.partition)
        while stored.manifest is not None:
            manifest = stored.manifest
            left = await self._without_oldest(manifest, timestamp_ms)
            if left is manifest:
                return await self.first_offset(manifest)
            log.info(
                "archived segments are let go of: a cleanup asked for it",
                partition=str(leadership.partition),
                start_offset=left.start_offset,
                segments=manifest.segment_count - left.segment_count,
            )
            stored = await self._manifests.commit(stored, left, leader_epoch=leadership.leader_epoch)
        return -1

    async def _without_oldest(self, manifest: PartitionManifest, timestamp_ms: int) -> PartitionManifest:
        """Return *manifest* without its oldest segments up to a time: at most those of one piece."""
        if not manifest.segment_count:
            return manifest
        piece = manifest
        if manifest.live_offset > manifest.start_offset:
            piece = await self._spillovers.piece_at(manifest, manifest.start_offset)
        rows = _rows_until(piece.segments, timestamp_ms)
        if not rows:
            return manifest
        now_ms = self._now_ms()
        if piece is manifest:
            return manifest.expired(rows, now_ms=now_ms)
        return spillover_expired(manifest, piece.segments.head(rows), now_ms=now_ms)

    async def first_offset(self, manifest: PartitionManifest) -> int:
        """Return the first readable offset of the archive, spilled or live, or -1 if it has no segment."""
        async with aclosing(self._spillovers.pieces(manifest)) as pieces:
            async for piece in pieces:
                if piece.segments:
                    return max(piece.start_offset, piece.segments[0].base_offset)
        return -1

    async def _chain(self, manifest: PartitionManifest) -> Sequence[tuple[SpilloverName, SpilloverManifest]]:
        """Return the spilled parts from the newest back to the first that is missing from the bucket."""
        found: list[tuple[SpilloverName, SpilloverManifest]] = []
        name = manifest.spillover.newest if manifest.spillover else None
        while name is not None:
            try:
                part = await self._spillovers.load(manifest.partition, name)
            except ObjectNotFound:
                break
            found.append((name, part))
            name = part.previous
        return found


def _rows_until(segments: Iterable[RemoteSegment], timestamp_ms: int) -> int:
    """Return how many of the first *segments* hold nothing newer than *timestamp_ms*."""
    rows = 0
    for segment in segments:
        if retention_time_ms(segment) > timestamp_ms:
            break
        rows += 1
    return rows
