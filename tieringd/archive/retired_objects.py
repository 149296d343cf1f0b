"""
Deleting the objects of segments that left a manifest: by name, and only names that it does not hold.

A daemon does so for the partitions that it archives, after the delay that readers need. Where there is no
daemon any more a job does. Both may do it at once: an object that is gone counts as deleted, and a
manifest forgets what someone has seen to.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from itertools import chain, takewhile
from typing import TYPE_CHECKING

import structlog

from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.spilling import spillover_deleted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.model.spillover import SpilloverName
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

DELETED_AT_ONCE_MAX = 500
"""Segments whose objects one request names: half of what a store takes."""


def unnamed(manifest: PartitionManifest, segments: Iterable[RemoteSegment]) -> list[RemoteSegment]:
    """
    Return those of *segments* whose objects the manifest does not name for what it holds.

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
    Delete the objects of *segments*; what is gone already counts as deleted.

    Raises:
        StorageUnavailable: Some may be left. Calling again deletes them.
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
    Delete what left an archive by *retired_until_ms*, oldest first; return what that was.

    That is what the live manifest says so of, and what expired of the spilled segments. What is held for a
    compaction that may have to be undone stays (`policies.record_removal`). With *keeps_held* false there is
    no log any more that could have an election, and it goes too.

    Raises:
        ObjectNotFound: The bucket has no manifest of this partition, or none of what is spilled.
        CorruptDataError: A manifest is damaged.
        FencedError: It is closed.
        StorageUnavailable: Some may be left. Calling again deletes them.
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
        # Listed before the edit takes effect: what a daemon stores there later is not to go.
        ended = await manifests.spillovers.ending_before(partition, spilled_end)
        return spillover_deleted(left, spilled_end)

    await manifests.edit(partition, change)
    await manifests.spillovers.delete(partition, ended)
    return deleted


async def _expired_spilled(
    manifests: ManifestStore, manifest: PartitionManifest, until_ms: int
) -> tuple[list[RemoteSegment], int | None]:
    """Return the spilled segments that expired by *until_ms*, and where they end; None where none did."""
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
