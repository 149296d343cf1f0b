"""
Read and commit manifests: every write is a compare-and-swap.

A commit names the version that it was made from. If that version is no longer stored, another writer has
committed. If that writer's leader epoch is older, or a job edited the manifest, this writer reads the
manifest again and goes on; otherwise this writer is fenced and stops. After a commit with an unknown outcome
the manifest is read, and the writer id and commit number inside show whether the commit took effect.

A refusal alone proves nothing: a store may refuse a write although nothing has changed (S3 answers 409
to concurrent writes). So the manifest is read after each refusal, and only its content fences a writer.

`closed` closes a partition's manifest: from then on no archiver commits to it. Closing is a commit like
any other, under an epoch above all leader epochs. A later commit is fenced, and an earlier one is in the
version that `closed` returns. Only a move that brings the archive back opens it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import structlog
from crc32c import crc32c

from tieringd.archive.decision_store import OperatorDecisions
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import (
    CorruptDataError,
    FencedError,
    ManifestEdited,
    ManifestRemoved,
    ObjectNotFound,
    PreconditionFailed,
    RivalWriter,
    StorageUnavailable,
)
from tieringd.formats.manifest_codec import decode_manifest, encode_manifest
from tieringd.formats.object_keys import TopicKey, manifest_key, topic_manifest_key
from tieringd.formats.topic_manifest import TopicManifest, decode_topic_manifest, encode_topic_manifest
from tieringd.model.manifest import CLOSED_EPOCH, PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.storage.base import Condition, IfAbsent, IfVersion, ObjectStore

log = structlog.get_logger(__name__)

EDIT_TRIES = 64
"""An archiver commits at most every few seconds, and an edit takes less time than that."""
EDIT_MARK = "+edit"
"""Suffix of the writer id in a manifest that a job edited and that its archiver has not committed since."""
TOPIC_MANIFEST_TRIES = 16
"""Daemons that see a new topic at once compete for its manifest. In each try one of them succeeds."""

CLOSE_TRIES = 16
"""
An archiver may commit between the read and the close, again and again.

It uploads something before each.
"""


_MODIFIED_WITHIN_MS = 1000
"""Stores that report when an object was stored cut the time off at the second."""


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest as the bucket holds it, and the version that a compare-and-swap names."""

    manifest: PartitionManifest | None
    """None when the bucket holds no manifest."""
    version: str | None
    size_bytes: int = 0
    """Size of the stored document."""
    in_effect_ms: int = field(default=0, compare=False)
    """A time, in milliseconds since the epoch, by which readers could read this manifest."""

    @property
    def existing(self) -> PartitionManifest:
        """Return the manifest, for callers that know that one exists."""
        assert self.manifest is not None, "the bucket holds a manifest by now"
        return self.manifest


NOT_STORED = StoredManifest(None, None)
"""A partition has no manifest in the bucket."""


class ManifestStore:
    """
    The manifests of a bucket, for one writer. Spillover manifests are in `spillovers`.

    A daemon process has one, which its archivers share. Its only state is the last commit number.
    Cancelling a commit is safe: the next load shows whether it took effect.
    """

    def __init__(self, store: ObjectStore, *, writer_id: str, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._writer_id = writer_id
        self._now_ms = now_ms
        self._last_commit_number = 0
        self.spillovers = SpilloverManifests(store)
        self.decisions = OperatorDecisions(store, writer_id=writer_id)

    async def load(self, partition: TopicIdPartition) -> StoredManifest:
        """
        Read a partition's manifest.

        Raises:
            CorruptDataError: The stored bytes are not a manifest, or belong to another partition.
        """
        key = manifest_key(partition)
        try:
            data, info = await self._store.get(key)
        except ObjectNotFound:
            return NOT_STORED
        try:
            manifest = decode_manifest(data)
        except CorruptDataError as error:
            raise error.located(key) from error
        if manifest.partition != partition:
            raise CorruptDataError(
                f"the object of the manifest of {partition} holds a manifest of {manifest.partition}",
                source=key,
            )
        in_effect_ms = min(info.modified_ms + _MODIFIED_WITHIN_MS, self._now_ms())
        return StoredManifest(manifest, info.version, len(data), in_effect_ms)

    async def refreshed(self, partition: TopicIdPartition, known: StoredManifest | None) -> StoredManifest:
        """
        Return the stored manifest. It is read only if its version differs from that of *known*.

        Raises:
            CorruptDataError: The stored bytes are not a manifest, or belong to another partition.
        """
        if known is None or known.manifest is None:
            return await self.load(partition)
        try:
            info = await self._store.head(manifest_key(partition))
        except ObjectNotFound:
            return NOT_STORED
        return known if info.version == known.version else await self.load(partition)

    async def begin(self, manifest: PartitionManifest, *, leader_epoch: int) -> StoredManifest | None:
        """
        Store a partition's first manifest; return None if the bucket may have one by now. Then load it.

        For a partition that is new: reading first would only find that there is nothing to read.

        Raises:
            StorageUnavailable: Nothing was stored.
        """
        try:
            return await self._put(self._signed(manifest, leader_epoch, number_before=0), IfAbsent())
        except PreconditionFailed:
            return None
        except StorageUnavailable as error:
            if not error.outcome_unknown:
                raise
            return None

    def _signed(
        self, manifest: PartitionManifest, leader_epoch: int, *, number_before: int
    ) -> PartitionManifest:
        """Return a manifest as this writer's next commit, which follows one with *number_before*."""
        # A number is never used twice. So an earlier attempt that takes effect late cannot pass for this one.
        self._last_commit_number = 1 + max(self._last_commit_number, number_before)
        return manifest.committed(
            writer_id=self._writer_id,
            leader_epoch=leader_epoch,
            commit_number=self._last_commit_number,
            now_ms=self._now_ms(),
        )

    async def _put(self, signed: PartitionManifest, condition: Condition) -> StoredManifest:
        data = encode_manifest(signed)
        info = await self._store.put(
            manifest_key(signed.partition), data, crc32c=crc32c(data), condition=condition
        )
        return StoredManifest(signed, info.version, len(data), self._now_ms())

    async def commit(
        self,
        stored: StoredManifest,
        manifest: PartitionManifest,
        *,
        leader_epoch: int,
        reopens: bool = False,
    ) -> StoredManifest:
        """
        Replace *stored* by *manifest*, under the leader epoch that this broker holds now.

        With *reopens* a newer epoch in *stored* does not fence: a move opens a closed manifest again.

        Raises:
            FencedError: A newer leader epoch owns the manifest, or the manifest was removed.
            RivalWriter: Another writer has committed under the same leader epoch.
            StorageUnavailable: The commit is not known to have taken effect. Load again and go on from there.
        """
        if stored.manifest is not None and stored.manifest.leader_epoch > leader_epoch and not reopens:
            raise fenced_by(stored.manifest, leader_epoch)
        number_before = stored.manifest.commit_number if stored.manifest else 0
        signed = self._signed(manifest, leader_epoch, number_before=number_before)
        try:
            return await self._put(
                signed, IfAbsent() if stored.version is None else IfVersion(stored.version)
            )
        except PreconditionFailed:
            return await self._after_lost_swap(stored, signed)
        except StorageUnavailable as error:
            if not error.outcome_unknown:
                raise
            return await self._after_unknown_outcome(stored, signed, error)

    async def edit(
        self,
        partition: TopicIdPartition,
        change: Callable[[PartitionManifest], Awaitable[PartitionManifest | None]],
    ) -> StoredManifest:
        """
        Replace a partition's manifest by the result of *change*, under the name and epoch of its archiver.

        An edit fences no archiver: one that meets it reads the manifest again and goes on from there.
        Edits are for jobs that replace stored objects by equivalent ones. *change* is called again when
        another writer committed first. If it returns None, the manifest stays as it is.

        Raises:
            ObjectNotFound: The bucket has no manifest of this partition.
            FencedError: The manifest is closed.
            StorageUnavailable: Other writers kept changing the manifest, or the edit is not known to
                have taken effect. Try again.
        """
        for _ in range(EDIT_TRIES):
            stored = await self.load(partition)
            if stored.manifest is None:
                key = manifest_key(partition)
                raise ObjectNotFound(f"the bucket has no object {key}", key=key)
            if stored.manifest.is_closed:
                raise fenced_by(stored.manifest, stored.manifest.leader_epoch)
            changed = await change(stored.manifest)
            if changed is None:
                return stored
            signed = changed.committed(
                writer_id=stored.manifest.writer_id.removesuffix(EDIT_MARK) + EDIT_MARK,
                leader_epoch=stored.manifest.leader_epoch,
                commit_number=stored.manifest.commit_number + 1,
                now_ms=self._now_ms(),
            )
            assert stored.version is not None, "it was just read"
            try:
                return await self._put(signed, IfVersion(stored.version))
            except PreconditionFailed:
                # The write may have been sent twice: then the first one is the commit that came before
                # this one.
                found = await self.load(partition)
                if found.manifest == signed:
                    return found
                continue
            except StorageUnavailable as error:
                found = await self.load(partition) if error.outcome_unknown else stored
                if found.manifest == signed:
                    return found
                raise
        raise StorageUnavailable(
            f"the manifest of {partition} changes too often: its archiver keeps committing"
        )

    def is_rival(self, manifest: PartitionManifest) -> bool:
        """
        Say whether another archiving process committed *manifest*.

        A job's edit does not count as a commit.
        """
        return manifest.writer_id not in {self._writer_id, ""} and not manifest.writer_id.endswith(EDIT_MARK)

    async def _after_lost_swap(self, stored: StoredManifest, signed: PartitionManifest) -> StoredManifest:
        """Tell apart three outcomes: this commit took effect, another writer's did, or none did."""
        found = await self.load(signed.partition)
        if found.manifest == signed:
            return found
        if found.version == stored.version:
            raise StorageUnavailable(
                f"the store refused a commit of {signed.partition} although the manifest has not changed; "
                "the commit is retried"
            )
        if found.manifest is not None and found.manifest.writer_id == self._writer_id:
            raise StorageUnavailable(
                f"an earlier commit of {signed.partition} took effect late; the manifest is read again"
            )
        if found.manifest is None:
            raise fenced_by_removal(signed.partition)
        is_edited = found.manifest.writer_id.endswith(EDIT_MARK)
        if is_edited and found.manifest.leader_epoch == signed.leader_epoch:
            # If another daemon of this epoch exists as well, its own next commit shows it.
            raise ManifestEdited(
                f"a job edited the manifest of {signed.partition}; the manifest is read again"
            )
        if found.manifest.leader_epoch < signed.leader_epoch:
            # A deposed leader committed in between. After this writer's next commit its epoch loses.
            raise StorageUnavailable(
                f"leader epoch {found.manifest.leader_epoch} committed to the manifest of "
                f"{signed.partition} again; the manifest is read again"
            )
        raise fenced_by(found.manifest, signed.leader_epoch)

    async def _after_unknown_outcome(
        self, stored: StoredManifest, signed: PartitionManifest, error: StorageUnavailable
    ) -> StoredManifest:
        found = await self.load(signed.partition)
        if found.manifest == signed:
            log.info("commit took effect although its answer was lost", partition=str(signed.partition))
            return found
        if found.version == stored.version:
            raise error
        return await self._after_lost_swap(stored, signed)

    async def load_topic(self, key: TopicKey) -> TopicManifest | None:
        """
        Read a topic's manifest; None when the bucket holds none.

        Raises:
            CorruptDataError: The stored bytes are not a topic manifest, or belong to another topic.
        """
        return (await self._load_topic(key))[0]

    async def ensure_topic(self, key: TopicKey, *, partition_count: int) -> TopicManifest:
        """
        Make sure that the topic's manifest exists and counts at least *partition_count* partitions.

        Raises:
            StorageUnavailable: Other daemons kept changing the manifest. Try again in the next round.
        """
        return await self.change_topic(
            key, lambda found: replace(found, partition_count=max(found.partition_count, partition_count))
        )

    async def change_topic(
        self, key: TopicKey, change: Callable[[TopicManifest], TopicManifest]
    ) -> TopicManifest:
        """
        Replace a topic's manifest by the result of *change*, and return the stored manifest.

        A topic without a manifest gets one, with no partitions before the change. *change* is called
        again when another daemon was faster.

        Raises:
            StorageUnavailable: Other daemons kept changing the manifest. Try again in the next round.
        """
        for _ in range(TOPIC_MANIFEST_TRIES):
            found, version = await self._load_topic(key)
            known = found or TopicManifest(key, partition_count=0, created_at_ms=self._now_ms())
            wanted = change(known)
            if found is not None and wanted == found:
                return found
            data = encode_topic_manifest(wanted)
            condition = IfAbsent() if version is None else IfVersion(version)
            try:
                await self._store.put(topic_manifest_key(key), data, crc32c=crc32c(data), condition=condition)
            except PreconditionFailed:
                continue
            return wanted
        raise StorageUnavailable(
            f"the manifest of topic {key.topic} changes too often: other daemons keep changing it"
        )

    async def _load_topic(self, key: TopicKey) -> tuple[TopicManifest | None, str | None]:
        object_key = topic_manifest_key(key)
        try:
            data, info = await self._store.get(object_key)
        except ObjectNotFound:
            return None, None
        try:
            manifest = decode_topic_manifest(data)
        except CorruptDataError as error:
            raise error.located(object_key) from error
        if manifest.key != key:
            raise CorruptDataError(
                f"the object of the manifest of topic {key.topic} ({key.cluster}, {key.topic_id}) holds a "
                f"manifest of {manifest.key.topic} ({manifest.key.cluster}, {manifest.key.topic_id})",
                source=object_key,
                hint="Restore the object from an older version in the bucket, or stop the topic's daemons "
                "and run `tieringd spark rebuild --write`",
            )
        return manifest, info.version


def fenced_by_removal(partition: TopicIdPartition) -> ManifestRemoved:
    """Return the error for a removed manifest."""
    return ManifestRemoved(
        f"the manifest of {partition} was deleted from the bucket while this daemon archived the partition",
        hint="Find out which process deletes objects there before you restart tieringd",
    )


def fenced_by(owner: PartitionManifest, leader_epoch: int) -> FencedError:
    """Return the error of a writer with *leader_epoch* that the manifest *owner* fences."""
    if owner.is_closed:
        return FencedError(
            f"the archive of {owner.partition} in this bucket is closed: it was moved to another bucket, or "
            "its topic is being purged",
            hint="`tieringd archive topics` shows which. After a move, name the new bucket in the "
            "configuration and restart tieringd",
        )
    if owner.leader_epoch > leader_epoch:
        return FencedError(
            f"leader epoch {owner.leader_epoch} owns the manifest of {owner.partition}, but this daemon has "
            f"epoch {leader_epoch}: it no longer archives the partition"
        )
    return rival_writer(owner)


def rival_writer(owner: PartitionManifest) -> RivalWriter:
    """Return the error of a process that found another writer, *owner*'s, under its own leader epoch."""
    return RivalWriter(
        f"another daemon (writer {owner.writer_id}) archives {owner.partition} under the same leader epoch "
        f"{owner.leader_epoch}: this daemon has stopped archiving it",
        writer_id=owner.writer_id,
        commit_number=owner.commit_number,
        hint="Run one tieringd for each broker and log directory, and then restart this one",
    )


async def closed(
    manifests: ManifestStore, partition: TopicIdPartition, *, begin: PartitionManifest | None = None
) -> StoredManifest:
    """
    Close a partition's manifest and return the closed version. A closed manifest stays as it is.

    If the bucket has no manifest, *begin* is closed and stored. Without *begin*, nothing is stored then.

    Raises:
        CorruptDataError: The manifest cannot be read.
        StorageUnavailable: It is unknown whether the manifest is closed, or archivers committed first
            each time.
    """
    for _ in range(CLOSE_TRIES):
        stored = await manifests.load(partition)
        manifest = stored.manifest or begin
        if manifest is None or (stored.manifest is not None and stored.manifest.is_closed):
            return stored
        done = await closed_version(manifests, stored, manifest)
        if done is not None:
            return done
    raise StorageUnavailable(f"the manifest of {partition} was not closed: another process keeps changing it")


async def closed_version(
    manifests: ManifestStore, stored: StoredManifest, manifest: PartitionManifest
) -> StoredManifest | None:
    """
    Replace *stored* by *manifest*, closed; None where the bucket has another version by now.

    Raises:
        StorageUnavailable: It is unknown whether the manifest is closed.
    """
    try:
        return await manifests.commit(stored, manifest, leader_epoch=CLOSED_EPOCH)
    except FencedError:
        return None  # Another writer closed or removed it.
    except StorageUnavailable as error:
        if error.outcome_unknown or not await _has_changed(manifests, stored, manifest.partition):
            raise
        return None


async def _has_changed(manifests: ManifestStore, stored: StoredManifest, partition: TopicIdPartition) -> bool:
    """Say whether a commit failed because another one came first, not because the store is unavailable."""
    return (await manifests.refreshed(partition, stored)).version != stored.version
