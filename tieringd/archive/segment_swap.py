"""
Put segments that a job stored in the place of older ones: all segments of a partition in one commit.

The commit is an edit in the name of the partition's archiver (`ManifestStore.edit`), so uploads go on.
If the segments to replace are no longer in the manifest, another writer was faster, and nothing names
the new objects. Segments that expired meanwhile are left out.

Directly before rewritten segments are committed, a record is stored which says that all of them are
stored. A rebuild goes by these records if the manifest is lost. The record of a swap that failed is
deleted again. If the job dies before that, the new segments still hold all records of the old ones
except those that were to be removed.

Spilled segments are taken back for the change and spilled again with it, so the live manifest does not grow.

A compaction keeps the rule of `policies.record_removal`: it is committed only while the archive has all
segments that its winners came from, and the replaced segments are held until no winner can be lost. An
erasure ends the holding of all segments that compactions replaced in that partition, as the erased
records may be in them too.

`store_rewriting` and `load_rewriting` write and read the records of rewritings. A record needs no index
and no manifest: it lies beside the partition's manifest, and scrub keeps it while the manifest names any
rewritten segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import structlog
from crc32c import crc32c

from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.scrub.segment_inspection import read_object
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import CorruptDataError, StorageUnavailable
from tieringd.formats.job_records import decode_rewriting, encode_rewriting
from tieringd.formats.manifest_codec import encode_manifest
from tieringd.formats.object_keys import data_key, index_key, rewriting_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Retired
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment, Rewriting, RewritingKind
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.policies.record_removal import CompactionBasis, why_winners_may_be_gone
from tieringd.policies.spillover import plan_spillover
from tieringd.storage.at_once import at_once
from tieringd.storage.base import ObjectStore
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)

HEADS_AT_ONCE = 32
"""How many successors are checked at a time; each costs two HEAD requests."""


async def store_rewriting(store: ObjectStore, partition: TopicIdPartition, rewriting: Rewriting) -> str:
    """
    Store the record of a rewriting and return its key. The segments are already stored. Repeating is safe.

    Raises:
        StorageUnavailable: The record may be stored or not.
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
    Return the record stored under *key*.

    Raises:
        ObjectNotFound: The record was deleted.
        CorruptDataError: The record is damaged, or belongs to another partition.
    """
    data = await read_object(store, key, size_bytes=size_bytes)
    owner, rewriting = decode_rewriting(data, source=key)
    if rewriting_key(owner, rewriting.writer_id, crc32c=crc32c(data)) != key or owner != partition:
        raise CorruptDataError("the bytes of this rewriting record do not match its name", source=key)
    return rewriting


@dataclass(frozen=True, slots=True)
class Successor:
    """A segment whose objects are stored, and the segments that it is to replace."""

    parts: tuple[RemoteSegment, ...]
    """Neighbours that together have the same offsets as the segment."""
    segment: RemoteSegment
    removed_records: int = 0
    """How many records the parts have that the segment lacks."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """The outcome of a swap."""

    manifest: PartitionManifest
    """The manifest as it is stored now."""
    done: tuple[Successor, ...]
    """The successors that the manifest names now."""
    left: int
    """How many successors were not committed, because another writer changed their parts or the basis."""
    retired_at_ms: int
    left_because: str = ""
    """Why a compaction was not committed although all its parts are there."""


class SegmentSwap:
    """Swap segments of partitions of one bucket. Keeps no state; only one task may swap a given partition."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        now_ms: Callable[[], int],
        target_manifest_bytes: int,
    ) -> None:
        """Keep the arguments. A manifest that is larger than *target_manifest_bytes* spills."""
        self._store = store
        self._manifests = manifests
        self._spillovers: SpilloverManifests = manifests.spillovers
        self._now_ms = now_ms
        self._target_bytes = target_manifest_bytes

    async def merge(self, partition: TopicIdPartition, successors: Sequence[Successor]) -> Swapped:
        """
        Replace the parts of each merged segment by it, if all of them are still in the manifest.

        Raises:
            ObjectNotFound: The manifest was deleted, or scrub deleted a new object as an orphan.
            FencedError: The archive is closed.
            StorageUnavailable: The swap is not known to have taken effect. Calling again is safe.
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
        Replace the parts of each rewritten segment by it.

        With *is_whole* this is a compaction: all segments are swapped or none, because the winner of a
        record that one segment lost may be in another one. *basis* is what the compaction read; without
        it, the winners may lie anywhere in the archive. Without *is_whole* this is an erasure.

        Raises:
            ObjectNotFound: The manifest was deleted, or scrub deleted a new object as an orphan.
            FencedError: The archive is closed.
            StorageUnavailable: The swap is not known to have taken effect. Calling again is safe.
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
        Stop holding the segments that compactions replaced in a partition, after an erasure went over it.

        Their objects are deleted like those of any replaced segment, and the segments never come back.

        Raises:
            ObjectNotFound: The manifest was deleted.
            FencedError: The archive is closed.
            StorageUnavailable: The change is not known to have taken effect. Calling again is safe.
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
            # An earlier try may have taken effect without a reply, and another writer has committed after it.
            done = [one for one in held if found[one] in {one.parts, (one.segment,)}]
            left = len(held) - len(done)
            left_because = why_winners_may_be_gone(basis, whole, base_offset=begin) if basis and held else ""
            if kind is RewritingKind.COMPACTED and (left or (left_because and fitting)):
                done, left = [], len(held)
            # A merge needs no record if none of its segments ever lost a record.
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
        """Delete the records of overtaken tries: they do not name the segments that were committed."""
        if not records:
            return
        try:
            await self._store.delete_many(records)
        except StorageUnavailable as error:
            # The swap is done, and a later record of the same segments takes precedence.
            log.warning("records of a swap that was overtaken are left", keys=records, error=str(error))

    async def _require_stored(self, partition: TopicIdPartition, successors: Sequence[Successor]) -> None:
        """Check that the new objects still exist: until a manifest names them, a scrub may delete them."""
        keys = [name(partition, one.segment) for one in successors for name in (data_key, index_key)]
        await at_once(keys, self._store.head, count=2 * HEADS_AT_ONCE)

    async def _spilled_again(
        self, before: PartitionManifest, manifest: PartitionManifest
    ) -> PartitionManifest:
        """Return *manifest* with the segments spilled again that were spilled in *before*."""
        if manifest.live_offset == before.live_offset:
            return manifest
        size_bytes = len(await in_thread(encode_manifest, manifest))
        rows_of_parts = plan_spillover(
            manifest,
            size_bytes=size_bytes,
            target_bytes=self._target_bytes,
            # Segments that were live in *before* are those that the local log may still hold.
            local_offset=before.live_offset,
        )
        for rows in rows_of_parts:
            part = part_to_spill(manifest, rows)
            manifest = spilled(manifest, part, await self._spillovers.put(part))
        return manifest


def held_in(manifest: PartitionManifest) -> list[Retired]:
    """Return the retired segments of a manifest that are held for a compaction that may have to be undone."""
    return [one for one in manifest.retired if one.is_held]


def _neighbours(successors: Sequence[Successor]) -> list[list[Successor]]:
    """Return *successors*, which ascend, in groups without a hole between neighbours."""
    groups: list[list[Successor]] = []
    for one in successors:
        if groups and groups[-1][-1].segment.next_offset == one.segment.base_offset:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups
