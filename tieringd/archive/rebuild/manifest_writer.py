"""
Write rebuilt manifests: each by a compare-and-swap, and never over a manifest that changed meanwhile.

Before a damaged manifest is replaced, a copy of it is stored. Parts that spill are stored before the
manifest that names them. A crash leaves at most objects that no manifest names, and a repeated run finds
what is already done.

`partition_state_of` returns the state of a partition's manifest before a rebuild: whether it exists, and
whether it can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from crc32c import crc32c

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archive.scrub.segment_inspection import read_object
from tieringd.errors import CorruptDataError, PreconditionFailed, StorageUnavailable
from tieringd.formats.manifest_codec import decode_manifest, encode_manifest
from tieringd.formats.object_keys import TopicKey, damaged_copy_key, manifest_key, topic_manifest_key
from tieringd.formats.topic_manifest import TopicManifest, decode_topic_manifest, encode_topic_manifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import JOB_PREFIX
from tieringd.model.spilling import part_to_spill, spilled, with_parts
from tieringd.policies.scrub import FaultKind, Owner, TopicState
from tieringd.policies.spillover import plan_spillover
from tieringd.storage.base import IfVersion, ObjectStore

_OF_TOPICS = frozenset({FaultKind.TOPIC_MANIFEST_DAMAGED, FaultKind.TOPIC_MANIFEST_MISSING})

_AGAIN = "Run the command again: it reads the current state"


class ManifestState(StrEnum):
    """The state of a partition's manifest."""

    ABSENT = "absent"
    DAMAGED = "damaged"
    """It cannot be read."""
    BROKEN = "broken"
    """It can be read, but it breaks a rule, or its spilled part cannot be read."""
    SOUND = "sound"
    CLOSED = "closed"
    """The archive was moved to another bucket, or is being purged. No writer may write the manifest."""
    LEAVING = "leaving"
    """Its topic is being purged, and its objects are being deleted."""

    def may_be_written(self, *, replace: bool) -> bool:
        """Say whether a rebuild may write it. With *replace* the operator allows replacing readable ones."""
        if self in {ManifestState.ABSENT, ManifestState.DAMAGED}:
            return True
        return replace and self in {ManifestState.BROKEN, ManifestState.SOUND}


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition before a rebuild."""

    partition: TopicIdPartition
    state: ManifestState
    detail: str = ""
    """The faults, in words."""
    stored: PartitionManifest | None = None
    """The live manifest as it is stored."""
    known: PartitionManifest | None = None
    """The live manifest with all spilled segments, as far as these can be read."""


def partition_state_of(owner: Owner) -> PartitionState:
    """Return the state of the manifest of *owner*."""
    partition, manifest = owner.partition, owner.manifest
    faults = [one for one in owner.findings if one.kind not in _OF_TOPICS]
    detail = "; ".join(one.detail for one in faults)
    if owner.topic is TopicState.LEAVING:
        return PartitionState(partition, ManifestState.LEAVING)
    if manifest is None:
        state = ManifestState.DAMAGED if faults else ManifestState.ABSENT
        return PartitionState(partition, state, detail)
    if manifest.is_closed:
        return PartitionState(partition, ManifestState.CLOSED, stored=manifest, known=manifest)
    if faults:
        return PartitionState(partition, ManifestState.BROKEN, detail, manifest, manifest)
    known = with_parts(manifest, owner.parts[::-1])
    return PartitionState(partition, ManifestState.SOUND, stored=manifest, known=known)


class ManifestWriter:
    """Write rebuilt manifests of one bucket."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        now_ms: Callable[[], int],
        target_bytes: int,
    ) -> None:
        """Keep the arguments. A manifest of more than *target_bytes* spills."""
        self._store = store
        self._manifests = manifests
        self._now_ms = now_ms
        self._target_bytes = target_bytes

    async def write(self, before: PartitionState, manifest: PartitionManifest, *, leader_epoch: int) -> None:
        """
        Replace the partition's manifest in the state *before* by *manifest*, under *leader_epoch*.

        Raises:
            FencedError: Another writer has stored a manifest meanwhile, or it is closed.
            StorageUnavailable: The manifest changed meanwhile, or the write is not known to have taken
                effect. Run again.
        """
        lean = await self._spilled(manifest)
        if before.state is ManifestState.ABSENT:
            await self._manifests.commit(StoredManifest(None, None), lean, leader_epoch=leader_epoch)
        elif before.state is ManifestState.DAMAGED:
            key = manifest_key(lean.partition)
            signed = lean.committed(
                writer_id=JOB_PREFIX, leader_epoch=leader_epoch, commit_number=1, now_ms=self._now_ms()
            )
            await self._replace_damaged(
                key, encode_manifest(signed), lambda data: decode_manifest(data).partition == lean.partition
            )
        else:
            await self._manifests.edit(lean.partition, lambda found: _swapped(before, found, lean))

    async def _spilled(self, manifest: PartitionManifest) -> PartitionManifest:
        """
        Store the oldest parts of *manifest* as spillover manifests while it is too large.

        Return the rest.
        """
        while plan := plan_spillover(
            manifest,
            size_bytes=len(encode_manifest(manifest)),
            target_bytes=self._target_bytes,
            local_offset=None,
        ):
            for rows in plan:
                part = part_to_spill(manifest, rows)
                manifest = spilled(manifest, part, await self._manifests.spillovers.put(part))
        return manifest

    async def ensure_topic(
        self, key: TopicKey, *, partition_count: int, created_at_ms: int, write: bool
    ) -> bool:
        """
        Make sure that the topic's manifest exists and counts its partitions. Say whether that takes a write.

        A new topic manifest is of a live topic that was created at *created_at_ms*. Without *write*
        nothing is stored.

        Raises:
            StorageUnavailable: Other writers keep changing the manifest. Run again.
        """
        begun = TopicManifest(key, partition_count=partition_count, created_at_ms=created_at_ms)
        try:
            found = await self._manifests.load_topic(key)
        except CorruptDataError:
            if write:
                await self._replace_damaged(
                    topic_manifest_key(key),
                    encode_topic_manifest(begun),
                    lambda data: decode_topic_manifest(data).key == key,
                )
            return True
        if found is not None and found.partition_count >= partition_count:
            return False

        def counted(known: TopicManifest) -> TopicManifest:
            oldest_ms = min(known.created_at_ms, created_at_ms) if found is None else known.created_at_ms
            count = max(known.partition_count, partition_count)
            return replace(known, partition_count=count, created_at_ms=oldest_ms)

        if write:
            await self._manifests.change_topic(key, counted)
        return True

    async def _replace_damaged(self, key: str, data: bytes, is_sound: Callable[[bytes], bool]) -> None:
        """Store a copy of the damaged object, and replace it by *data* if no other writer has replaced it."""
        info = await self._store.head(key)
        damaged = await read_object(self._store, key, size_bytes=info.size_bytes)
        with suppress(CorruptDataError):
            if is_sound(damaged):
                raise StorageUnavailable(f"another process wrote {key} during the rebuild", hint=_AGAIN)
        checksum = crc32c(damaged)
        await self._store.put(damaged_copy_key(key, crc32c=checksum), damaged, crc32c=checksum)
        try:
            await self._store.put(key, data, crc32c=crc32c(data), condition=IfVersion(info.version))
        except PreconditionFailed as error:
            raise StorageUnavailable(
                f"another process wrote {key} during the rebuild", hint=_AGAIN
            ) from error


async def _swapped(
    before: PartitionState, found: PartitionManifest, manifest: PartitionManifest
) -> PartitionManifest:
    """Return *manifest* if *found* is still the manifest that the rebuild read."""
    if found != before.stored:
        raise StorageUnavailable(
            f"another process changed the manifest of {found.partition} during the rebuild", hint=_AGAIN
        )
    return manifest
