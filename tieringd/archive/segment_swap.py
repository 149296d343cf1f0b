"""
Naming what a job has stored in the place of what was there: all of a partition's in one commit.

The commit is an edit in the name of whoever archives the partition (`ManifestStore.edit`), so uploads go on.
Where what was to be replaced is no longer there, someone else was faster: the new objects stay named by
nothing. What expired meanwhile is simply left out.

Directly before what was rewritten takes its place a record says that all of it is stored. A rebuild goes by
these records where the manifest is lost. One of a swap that did not come about is deleted again; where the
job dies before that, the new segments still hold what the old ones do, but for what was to go.

What is spilled is taken back for the change, and spilled again with it: the live manifest tells of no more
than before.

A compaction keeps the rule of `policies.record_removal`: it takes place only while the archive has all that
its winners came from, and what it replaces is held until no winner can be lost. An erasure ends the holding
of all that compactions replaced in that partition, as the erased records may be there too.

`store_rewriting` and `load_rewriting` write and read the records of rewritings. A record needs no index and
no manifest: it lies beside the partition's manifest, and scrub keeps it for as long as the manifest names
anything that was rewritten.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import structlog
from crc32c import crc32c

from tieringd.archive.scrub.segment_look import read_object
from tieringd.errors import CorruptDataError, StorageUnavailable
from tieringd.formats.job_records import decode_rewriting, encode_rewriting
from tieringd.formats.manifest_codec import encode_manifest
from tieringd.formats.object_keys import data_key, index_key, rewriting_key
from tieringd.model.segment import Rewriting, RewritingKind
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.policies.record_removal import why_winners_may_be_gone
from tieringd.policies.spillover import plan_spillover
from tieringd.storage.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.archive.spillover_manifests import SpilloverManifests
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.manifest_parts import Retired
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.policies.record_removal import CompactionBasis
    from tieringd.storage.base import ObjectStore


log = structlog.get_logger(__name__)

LOOKS_AT_ONCE = 32
"""Objects that the store is asked for at a time."""


async def store_rewriting(store: ObjectStore, partition: TopicIdPartition, rewriting: Rewriting) -> str:
    """
    Store the record of a rewriting, whose segments are stored, and return its key. Doing it again is safe.

    Raises:
        StorageUnavailable: It may be stored or not.
    """
    data = encode_rewriting(partition, rewriting)
    checksum = crc32c(data)
    key = rewriting_key(partition, rewriting.writer_id, crc32c=checksum)
    await store.put(key, data, crc32c=checksum)
    return key


async def load_rewriting(
    store: ObjectStore, partition: TopicIdPartition, key: str, *, size_bytes: int
) -> Rewriting:
    """
    Return what the record under *key* says.

    Raises:
        ObjectNotFound: It has gone.
        CorruptDataError: It is damaged, or another partition's.
    """
    data = await read_object(store, key, size_bytes=size_bytes)
    owner, rewriting = decode_rewriting(data, source=key)
    if rewriting_key(owner, rewriting.writer_id, crc32c=crc32c(data)) != key or owner != partition:
        raise CorruptDataError("this record of a rewriting has other bytes than its name says", source=key)
    return rewriting


@dataclass(frozen=True, slots=True)
class Successor:
    """A segment whose objects are stored, and those whose place it is to take."""

    parts: tuple[RemoteSegment, ...]
    """Neighbours, of the same offsets together."""
    segment: RemoteSegment
    removed_records: int = 0
    """How many they have that it has not."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """What became of a swap."""

    manifest: PartitionManifest
    """As it is stored now."""
    done: tuple[Successor, ...]
    """Those that are named now."""
    left: int
    """How many are not, as someone else has changed what they were to replace, or what they rest on."""
    retired_at_ms: int
    left_because: str = ""
    """Why a compaction was left as a whole, where its own parts are all there."""


class SegmentSwap:
    """Swap segments of partitions of one bucket. Keeps no state; one partition is swapped by one task."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        now_ms: Callable[[], int],
        target_manifest_bytes: int,
    ) -> None:
        """Take the parts; a manifest that is larger than *target_manifest_bytes* spills."""
        self._store = store
        self._manifests = manifests
        self._spillovers: SpilloverManifests = manifests.spillovers
        self._now_ms = now_ms
        self._target_bytes = target_manifest_bytes

    async def merge(self, partition: TopicIdPartition, successors: Sequence[Successor]) -> Swapped:
        """
        Put each merged segment in the place of its parts, where these are still there.

        Raises:
            ObjectNotFound: The manifest is gone, or a new object: scrub has taken it for an orphan.
            FencedError: The archive is closed.
            StorageUnavailable: Nothing is known to have changed; calling again is safe.
        """

        def merged(
            manifest: PartitionManifest, fitting: Sequence[Successor], now_ms: int
        ) -> PartitionManifest:
            for one in fitting:
                manifest = manifest.merged(one.segment, now_ms=now_ms)
            return manifest

        return await self._swap(partition, successors, merged, kind=RewritingKind.MERGED)

    async def rewrite(
        self,
        partition: TopicIdPartition,
        successors: Sequence[Successor],
        *,
        is_whole: bool,
        basis: CompactionBasis | None = None,
    ) -> Swapped:
        """
        Put each rewritten segment in the place of what it was made of.

        With *is_whole* this is a compaction: they go together, all of them or none, as what one of them no
        longer has may be what made records of another one go. *basis* is what was read for it; without one
        the winners may lie anywhere in the archive. Otherwise it is an erasure.

        Raises:
            ObjectNotFound: The manifest is gone, or a new object: scrub has taken it for an orphan.
            FencedError: The archive is closed.
            StorageUnavailable: Nothing is known to have changed; calling again is safe.
        """

        def rewritten(
            manifest: PartitionManifest, fitting: Sequence[Successor], now_ms: int
        ) -> PartitionManifest:
            winners_end = 0
            if is_whole:
                winners_end = manifest.next_offset if basis is None else basis.winners_end
            else:
                manifest = manifest.released(held_in(manifest), is_settled=False)
            for neighbours in _neighbours(fitting):
                manifest = manifest.compacted(
                    [one.segment for one in neighbours], now_ms=now_ms, winners_end=winners_end
                )
            return manifest

        kind = RewritingKind.COMPACTED if is_whole else RewritingKind.REWRITTEN
        return await self._swap(partition, successors, rewritten, kind=kind, basis=basis)

    async def release(self, partition: TopicIdPartition) -> None:
        """
        End the holding of what compactions replaced in a partition that an erasure has gone over.

        Its objects are deleted as of everything that is replaced, and never take their places again.

        Raises:
            ObjectNotFound: The manifest is gone.
            FencedError: The archive is closed.
            StorageUnavailable: Nothing is known to have changed; calling again is safe.
        """

        async def change(manifest: PartitionManifest) -> PartitionManifest | None:
            held = held_in(manifest)
            return manifest.released(held, is_settled=False) if held else None

        await self._manifests.edit(partition, change)

    async def _swap(
        self,
        partition: TopicIdPartition,
        successors: Sequence[Successor],
        replaced: Callable[[PartitionManifest, Sequence[Successor], int], PartitionManifest],
        *,
        kind: RewritingKind,
        basis: CompactionBasis | None = None,
    ) -> Swapped:
        await self._require_stored(partition, successors)
        done: list[Successor] = []
        left, left_because, now_ms = 0, "", self._now_ms()
        records: set[str] = set()
        record: str | None = None

        async def change(manifest: PartitionManifest) -> PartitionManifest | None:
            nonlocal done, left, left_because, record
            held = [one for one in successors if one.segment.next_offset > manifest.start_offset]
            begin = held[0].segment.base_offset if held else manifest.next_offset
            whole = await self._spillovers.with_history(manifest, from_offset=begin)
            found = {
                one: whole.segments.overlapping(one.segment.base_offset, one.segment.next_offset)
                for one in held
            }
            fitting = [one for one in held if found[one] == one.parts]
            # An earlier try may have been taken for lost, and someone has committed after it.
            done = [one for one in held if found[one] in {one.parts, (one.segment,)}]
            left = len(held) - len(done)
            left_because = why_winners_may_be_gone(basis, whole, base_offset=begin) if basis and held else ""
            if kind is RewritingKind.COMPACTED and (left or (left_because and fitting)):
                done, left = [], len(held)
            # A merge of segments that hold all that they ever held needs none.
            told = [one for one in done if one.segment.is_rewritten or kind is not RewritingKind.MERGED]
            record = await self._recorded(partition, kind, told) if told else None
            if record is not None:
                records.add(record)
            return (
                await self._spilled_again(manifest, replaced(whole, fitting, now_ms))
                if fitting and done
                else None
            )

        stored = await self._manifests.edit(partition, change)
        await self._forget(sorted(one for one in records if one != record))
        return Swapped(stored.existing, tuple(done), left, now_ms, left_because if left else "")

    async def _recorded(
        self, partition: TopicIdPartition, kind: RewritingKind, told: Sequence[Successor]
    ) -> str:
        parts = tuple(chain.from_iterable(one.parts for one in told))
        rewriting = Rewriting.of(kind, parts, tuple(one.segment for one in told))
        return await store_rewriting(self._store, partition, rewriting)

    async def _forget(self, records: Sequence[str]) -> None:
        """Delete records of tries that were overtaken: what they name is not what took its place."""
        if not records:
            return
        try:
            await self._store.delete_many(records)
        except StorageUnavailable as error:
            # The swap is over, and a later one of the same segments counts for more.
            log.warning("records of a swap that was overtaken are left", keys=records, error=str(error))

    async def _require_stored(self, partition: TopicIdPartition, successors: Sequence[Successor]) -> None:
        """See that the new objects are there still: until they are named, a scrub may take them away."""
        for begin in range(0, len(successors), LOOKS_AT_ONCE):
            group = successors[begin : begin + LOOKS_AT_ONCE]
            keys = [name(partition, one.segment) for one in group for name in (data_key, index_key)]
            await asyncio.gather(*map(self._store.head, keys))

    async def _spilled_again(
        self, before: PartitionManifest, manifest: PartitionManifest
    ) -> PartitionManifest:
        """Return *manifest* without what was spilled in *before* and was taken back for the change."""
        if manifest.live_offset == before.live_offset:
            return manifest
        size_bytes = len(await in_thread(encode_manifest, manifest))
        rows_of_parts = plan_spillover(
            manifest,
            size_bytes=size_bytes,
            target_bytes=self._target_bytes,
            # What was live is what the local log may hold.
            local_offset=before.live_offset,
        )
        for rows in rows_of_parts:
            part = part_to_spill(manifest, rows)
            manifest = spilled(manifest, part, await self._spillovers.put(part))
        return manifest


def held_in(manifest: PartitionManifest) -> list[Retired]:
    """Return what of a manifest is held for a compaction that may have to be undone."""
    return [one for one in manifest.retired if one.is_held]


def _neighbours(successors: Sequence[Successor]) -> list[list[Successor]]:
    """Return *successors*, which ascend, in groups of those that follow each other."""
    groups: list[list[Successor]] = []
    for one in successors:
        if groups and groups[-1][-1].segment.next_offset == one.segment.base_offset:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups
