"""
Delete the objects of segments that left a manifest: by name, and only names that the manifest does not hold.

A daemon deletes them for the partitions that it archives, after the delay that readers need. A job does
it for archives that no daemon serves any more. Both may run at once: an object that is already gone
counts as deleted, and a manifest forgets retired segments whose objects were deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, takewhile

import structlog

from tieringd.archive.manifest_store import ManifestStore
from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.model.spilling import spillover_deleted
from tieringd.model.spillover import SpilloverName
from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

DELETED_AT_ONCE_MAX = 500
"""How many segments one request deletes, with two objects each: half of the keys that a store accepts."""


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
