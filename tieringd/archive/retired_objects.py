"""
Delete the objects of segments that left a manifest: by name, and only names that the manifest does not hold.

A daemon deletes them for the partitions that it archives, after the delay that readers need. A job does
it for archives that no daemon serves any more. Both may run at once: an object that is already gone
counts as deleted, and a manifest forgets retired segments whose objects were deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, takewhile

import structlog

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Retired
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.model.spilling import spillover_deleted
from tieringd.model.spillover import ExpiredSpillover, Spillover, SpilloverName
from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

DELETED_AT_ONCE_MAX = 500
"""How many segments one request deletes, with two objects each: half of the keys that a store accepts."""


def dated_ms(one: Retired | ExpiredSpillover) -> int:
    """Return when the commit that retired segments was dated, in milliseconds since the epoch."""
    return one.retired_at_ms


class GoneSince:
    """
    The times since which no manifest that a reader may use names the retired segments.

    The manifest has the time at which the commit was dated. The commit took effect later, and not later than
    the first manifest that a read or an answered commit showed to have it. That time is only in memory: a
    process that begins anew starts from when the manifest that it reads was stored.
    """

    __slots__ = ("_noted", "_since_ms")

    def __init__(self) -> None:
        self._noted: tuple[tuple[Retired, ...], Spillover | None] = (), None
        self._since_ms: dict[tuple[int, int], int] = {}

    @property
    def times(self) -> int:
        """Return how many times are kept: one for each mark that the last manifest has."""
        return len(self._since_ms)

    def note(self, stored: StoredManifest) -> None:
        """Take in a manifest that is in effect."""
        retired, spillover = stored.existing.retired, stored.existing.spillover
        if self._noted[0] is retired and self._noted[1] is spillover:
            return
        self._noted = retired, spillover
        known, self._since_ms = self._since_ms, {}
        ones: tuple[Retired | ExpiredSpillover, ...] = (*retired, *expired_spilled(stored.existing))
        for one in ones:
            key = _key(one)
            self._since_ms[key] = known.get(key, max(one.retired_at_ms, stored.in_effect_ms))

    def ms(self, one: Retired | ExpiredSpillover) -> int:
        """Return the time in milliseconds since the epoch; when the commit was dated, if not noted yet."""
        return self._since_ms.get(_key(one), one.retired_at_ms)


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
    since_ms: Callable[[Retired | ExpiredSpillover], int] = dated_ms,
) -> tuple[RemoteSegment, ...]:
    """
    Delete the objects of segments that were retired by *retired_until_ms*, oldest first.

    *since_ms* returns when segments were retired; the default is the time at which that commit was dated.

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
        due = takewhile(lambda one: since_ms(one) <= retired_until_ms, free_retired(manifest))
        retired = tuple(chain.from_iterable(one.segments for one in due))
        expired, spilled_end = await _expired_segments(
            manifests, manifest, lambda one: since_ms(one) <= retired_until_ms
        )
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


async def _expired_segments(
    manifests: ManifestStore, manifest: PartitionManifest, is_due: Callable[[ExpiredSpillover], bool]
) -> tuple[list[RemoteSegment], int | None]:
    """Return the spilled segments that are due, and their end offset (None without any)."""
    spillover = manifest.spillover
    marks = list(takewhile(is_due, expired_spilled(manifest)))
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


def free_retired(manifest: PartitionManifest) -> Iterator[Retired]:
    """Yield the retired entries of *manifest* that are not held, in manifest order."""
    return (one for one in manifest.retired if not one.is_held)


def expired_spilled(manifest: PartitionManifest) -> tuple[ExpiredSpillover, ...]:
    """Return the marks of spilled segments that expired, in manifest order."""
    return manifest.spillover.retired if manifest.spillover else ()


def _key(one: Retired | ExpiredSpillover) -> tuple[int, int]:
    """Return a key for *one* that stays the same while the first of its segments are deleted."""
    next_offset = one.next_offset if isinstance(one, ExpiredSpillover) else one.segments[-1].next_offset
    return one.retired_at_ms, next_offset
