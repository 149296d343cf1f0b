"""
The quarantine of the bucket: where objects that no manifest names wait before they are deleted.

An object keeps its key there, after a prefix, so putting it back needs no other knowledge. A move copies
the object, verifies the copy, judges the object once more, and only then deletes it at its old key. After
that its partition's manifests are read once again: should a writer have named the object meanwhile, it is
put back at once. A crash at any point leaves the object in one of the two places or in both, and each
step can be repeated. A move that is given up leaves its copy: another process may be about to delete the
object.

For the same reason other processes leave the copy of an object that is still at its place, unless the copy
is past its time, or older than the object. A move looks for its copies directly before it deletes, and
whatever deletes copies looks at their age directly before. Stores cannot delete on a condition, so a time of
some requests remains in which a copy that was past its time can go while a move relies on it.

This is not the quarantine of partitions with corrupt local data (`archiving.uploader`).

`QuarantineExpiry` deletes objects that have been in quarantine long enough, and puts back those that a
manifest names after all. A move that was given up leaves a copy of an object that still exists: the copy
is dropped where both are the same. A named object should never be in quarantine alone. If it is, its copy
stays until the manifests of its partition can be read, and named objects are put back and never deleted.

The report of what a scrub puts into quarantine is JSON in the bucket, for people. It is written before
anything is moved. The objects in quarantine and their keys are the authority; nothing depends on a report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from crc32c import crc32c as crc32c_of

from tieringd.archive.object_joiner import PIECE_BYTES, ObjectJoiner
from tieringd.archive.scrub.orphan_search import OwnerLookup
from tieringd.errors import ChecksumRejected, CorruptDataError, ObjectNotFound
from tieringd.formats.json_document import encode_document
from tieringd.formats.object_keys import (
    QUARANTINE_REPORTS_PREFIX,
    QUARANTINED_PREFIX,
    owner_of,
    parse_quarantined_key,
    quarantine_report_key,
    quarantined_key,
)
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.scrub import Orphan, Owner, StoredObject, is_named
from tieringd.storage.base import JoinSource, ObjectInfo, ObjectStore
from tieringd.storage.listing import list_objects
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)

VERSION = 1


def encode_quarantine_report(orphans: Iterable[Orphan], *, now_ms: int, writer_id: str) -> bytes:
    """Return the report of a move that is about to begin."""
    document = {
        "version": VERSION,
        "reported_at_ms": now_ms,
        "writer_id": writer_id,
        "objects": [
            {
                "key": one.stored.key,
                "size_bytes": one.stored.size_bytes,
                "modified_ms": one.stored.modified_ms,
                "topic": one.partition.topic,
                "topic_id": one.partition.topic_id,
                "partition": one.partition.partition,
                "reason": one.detail,
            }
            for one in orphans
        ],
    }
    return encode_document(document)


@dataclass(frozen=True, slots=True)
class QuarantinedObject:
    """An object in quarantine."""

    key: str
    """Its key before the move."""
    size_bytes: int
    quarantined_at_ms: int
    """Time of the move in ms since the epoch, by the store's clock."""


@dataclass(frozen=True, slots=True)
class QuarantinedOrphans:
    """The result of moving orphans."""

    moved: tuple[Orphan, ...]
    left: tuple[tuple[str, str], ...]
    """Keys of the orphans that stayed, or were put back, and why."""


class ObjectQuarantine:
    """
    Move objects of one bucket into quarantine and back.

    Several processes may do so at once: all copies of a key have the same bytes. Stateless.
    """

    def __init__(
        self, store: ObjectStore, *, work_directory: Path, writer_id: str, now_ms: Callable[[], int]
    ) -> None:
        """Take the collaborators; *work_directory* holds bytes that the store cannot copy itself."""
        self._store = store
        self._joiner = ObjectJoiner(store, work_directory=work_directory)
        self._writer_id = writer_id
        self._now_ms = now_ms

    async def move(
        self,
        orphans: Sequence[Orphan],
        *,
        still_orphans: Callable[[Iterable[StoredObject]], Awaitable[Mapping[str, Orphan]]],
    ) -> QuarantinedOrphans:
        """
        Put *orphans* of one partition into quarantine.

        *still_orphans* judges them by manifests that are read when it is called. An object that cannot be
        copied, or put back, is left with the reason, and the others go on. The copy of an object that
        stays is left to the expiry.

        Raises:
            StorageUnavailable: Some may be in both places. Calling again continues.
        """
        if not orphans:
            return QuarantinedOrphans((), ())
        await self._report(orphans)
        copied, left = await self._copied(orphans)
        now = [await self._stored(one.stored.key) for one in copied]
        wanted = await still_orphans([one for one in now if one is not None])
        leaving: list[Orphan] = []
        for one in copied:
            if one.stored.key not in wanted:
                left.append((one.stored.key, "the object is no longer an orphan"))
            elif await self._stored(quarantined_key(one.stored.key)) is None:
                left.append((one.stored.key, "its copy has left the quarantine meanwhile"))
            else:
                leaving.append(one)
        await self._store.delete_many([one.stored.key for one in leaving])
        # Judged with their ages from before the deletion: objects that are now named, or in doubt, are
        # missing from the result.
        confirmed = await still_orphans([wanted[one.stored.key].stored for one in leaving])
        for key in (one.stored.key for one in leaving):
            if key not in confirmed:
                left.append((key, await self._returned(key)))
        moved = tuple(one for one in leaving if one.stored.key in confirmed)
        for one in moved:
            log.info(
                "orphan put into quarantine",
                key=one.stored.key,
                size_bytes=one.stored.size_bytes,
                reason=one.detail,
            )
        return QuarantinedOrphans(moved, tuple(left))

    async def restore(self, key: str, *, before_ms: int | None = None) -> bool:
        """
        Put an object back where it was; say whether it was missing there.

        Its copy goes then. If the object was there, a copy that is younger stays, because a scrub may be
        moving the object; it goes all the same if it was put into quarantine before *before_ms*.

        Raises:
            ObjectNotFound: It is not in quarantine.
            CorruptDataError: Another object has the key now.
            ChecksumRejected: Its bytes are not the stored ones any more; it stays in quarantine.
        """
        there = quarantined_key(key)
        info = await self._store.head(there)
        source = JoinSource(there, info.size_bytes, await self._checksum(info))
        if await self._is_same_at(key, source):
            if not await self.why_kept(key, before_ms=before_ms):
                await self._store.delete_many([there])
            return False
        await self._joiner.join(key, [source], crc32c=source.crc32c)
        await self._store.delete_many([there])
        log.info("object put back from quarantine", key=key, size_bytes=info.size_bytes)
        return True

    async def why_kept(self, key: str, *, before_ms: int | None) -> str:
        """
        Return why the copy of an object may not go now; empty where it may. To be asked directly before.

        Without *before_ms* a copy of any age may go, but not one that a scrub may be making.
        """
        copy = await self._stored(quarantined_key(key))
        if copy is None or (before_ms is not None and copy.modified_ms < before_ms):
            return ""
        if before_ms is not None:
            return "it was put into quarantine again meanwhile"
        there = await self._stored(key)
        if there is not None and there.modified_ms < copy.modified_ms:
            return "the object is at its place as well: a scrub may be moving it"
        return ""

    async def copy_back(self, key: str, *, size_bytes: int | None, crc32c: int) -> bool:
        """
        Store an object again from its copy in quarantine, if that has the wanted bytes; say so.

        The copy stays. *size_bytes* is None where only the checksum is known.

        Raises:
            StorageUnavailable: It may be stored or not. Calling again is safe.
        """
        try:
            info = await self._store.head(quarantined_key(key))
        except ObjectNotFound:
            return False
        if size_bytes not in {None, info.size_bytes} or await self._checksum(info) != crc32c:
            return False
        await self._joiner.join(key, [JoinSource(info.key, info.size_bytes, crc32c)], crc32c=crc32c)
        return True

    async def objects(self) -> AsyncIterator[QuarantinedObject]:
        """Yield the objects in quarantine, by key."""
        async for info in list_objects(self._store, QUARANTINED_PREFIX):
            key = parse_quarantined_key(info.key)
            assert key is not None, "it was listed under that prefix"
            yield QuarantinedObject(key, info.size_bytes, info.modified_ms)

    async def delete(self, keys: Sequence[str]) -> None:
        """
        Delete objects from quarantine for good.

        Raises:
            StorageUnavailable: Some may be left.
        """
        if keys:
            await self._store.delete_many([quarantined_key(key) for key in keys])

    async def delete_reports(self, *, before_ms: int) -> None:
        """Delete the reports that were written before *before_ms*, by the store's clock."""
        old = [
            info.key
            async for info in list_objects(self._store, QUARANTINE_REPORTS_PREFIX)
            if info.modified_ms < before_ms
        ]
        if old:
            await self._store.delete_many(old)

    async def _report(self, orphans: Sequence[Orphan]) -> None:
        now_ms = self._now_ms()
        data = encode_quarantine_report(orphans, now_ms=now_ms, writer_id=self._writer_id)
        checksum = crc32c_of(data)
        await self._store.put(quarantine_report_key(now_ms=now_ms, crc32c=checksum), data, crc32c=checksum)

    async def _copied(self, orphans: Sequence[Orphan]) -> tuple[list[Orphan], list[tuple[str, str]]]:
        """Copy orphans into quarantine and verify them; return those, and the others' keys with reasons."""
        copied: list[Orphan] = []
        left: list[tuple[str, str]] = []
        for one in orphans:
            key = one.stored.key
            try:
                info = await self._store.head(key)
                source = JoinSource(key, info.size_bytes, await self._checksum(info))
                await self._joiner.join(quarantined_key(key), [source], crc32c=source.crc32c)
            except ObjectNotFound:
                left.append((key, "it had gone"))
            except (ChecksumRejected, CorruptDataError) as error:
                log.warning("an orphan cannot be copied, and stays", key=key, error=str(error))
                left.append((key, f"the object cannot be copied: {error}"))
            else:
                copied.append(one)
        return copied, left

    async def _returned(self, key: str) -> str:
        """Put back an object that was named while it was moved; return the outcome in words."""
        try:
            await self.restore(key)
        except (ChecksumRejected, CorruptDataError, ObjectNotFound) as error:
            log.warning(
                "an object was named while it was moved, and cannot go back", key=key, error=str(error)
            )
            return f"a manifest named the object while it was moved, and it cannot be put back: {error}"
        return "a manifest named the object while it was moved; it was put back"

    async def _stored(self, key: str) -> StoredObject | None:
        try:
            info = await self._store.head(key)
        except ObjectNotFound:
            return None
        return StoredObject(key, info.size_bytes, info.modified_ms)

    async def _is_same_at(self, key: str, source: JoinSource) -> bool:
        try:
            info = await self._store.head(key)
        except ObjectNotFound:
            return False
        if (info.size_bytes, await self._checksum(info)) != (source.size_bytes, source.crc32c):
            raise CorruptDataError(
                "another object has this key now; the object in quarantine stays there",
                source=key,
                hint="Compare the two objects, and delete the wrong one",
            )
        return True

    async def _checksum(self, info: ObjectInfo) -> int:
        """Return an object's checksum, from the store or by reading the object."""
        if info.crc32c is not None:
            return info.crc32c
        checksum = position = 0
        while position < info.size_bytes:
            piece = await self._store.get_range(info.key, position=position, size_bytes=PIECE_BYTES)
            if not piece:
                raise CorruptDataError(f"the object ends after {position} bytes", source=info.key)
            checksum = await in_thread(crc32c_of, piece, checksum)
            position += len(piece)
        return checksum


@dataclass(frozen=True, slots=True)
class Expired:
    """The result of emptying the quarantine."""

    deleted: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    """Keys of named objects that are now where they were."""
    left: tuple[tuple[str, str], ...] = ()
    """Keys that stay in quarantine, and why."""

    def joined(self, other: Expired) -> Expired:
        """Return both results together."""
        return Expired(self.deleted + other.deleted, self.put_back + other.put_back, self.left + other.left)


class QuarantineExpiry:
    """Delete objects that have been in one bucket's quarantine for long enough. Stateless."""

    def __init__(self, quarantine: ObjectQuarantine, owners: OwnerLookup) -> None:
        self._quarantine = quarantine
        self._owners = owners

    async def expire(
        self, *, before_ms: int, is_ours: Callable[[TopicIdPartition], bool] = lambda _: True
    ) -> Expired:
        """
        Delete objects that were put into quarantine before *before_ms*, of the wanted partitions.

        *is_ours* selects the partitions.

        Raises:
            StorageUnavailable: Some may be left. Calling again continues.
        """
        due: defaultdict[TopicIdPartition, list[str]] = defaultdict(list)
        async for one in self._quarantine.objects():
            partition = owner_of(one.key)
            if one.quarantined_at_ms < before_ms and partition is not None and is_ours(partition):
                due[partition].append(one.key)
        expired = Expired()
        for partition, keys in due.items():
            found = await self.delete(partition, keys, before_ms=before_ms)
            expired = expired.joined(found)
        await self._quarantine.delete_reports(before_ms=before_ms)
        return expired

    async def delete(
        self, partition: TopicIdPartition, keys: Iterable[str], *, before_ms: int | None = None
    ) -> Expired:
        """
        Delete objects of one partition from quarantine; put back those that its manifests name.

        An object that was put there at *before_ms* or later is left there. Without *before_ms* one is left
        that is at its place as well, because a scrub may be moving it. An object that cannot be put back is
        left too. Each has its reason, and the others go on.

        Raises:
            StorageUnavailable: Some may be left. Calling again continues.
        """
        owner = await self._owners.owner(partition)
        leaving: list[str] = []
        deleted: list[str] = []
        put_back: list[str] = []
        left: list[tuple[str, str]] = []
        for key in keys:
            doubt = _doubt(owner)
            if is_named(owner, key):
                try:
                    if await self._quarantine.restore(key, before_ms=before_ms):
                        log.error("a named object was in quarantine, and is back", key=key)
                    put_back.append(key)
                except (ChecksumRejected, CorruptDataError, ObjectNotFound) as error:
                    log.warning("a named object in quarantine cannot go back", key=key, error=str(error))
                    left.append((key, str(error)))
            elif doubt:
                left.append((key, doubt))
            else:
                leaving.append(key)
        for key in leaving:
            because = await self._quarantine.why_kept(key, before_ms=before_ms)
            if because:
                left.append((key, because))
            else:
                deleted.append(key)
        await self._quarantine.delete(deleted)
        for key in deleted:
            log.info("orphan deleted from quarantine", key=key)
        return Expired(tuple(deleted), tuple(put_back), tuple(left))


def _doubt(owner: Owner) -> str:
    """Return why nothing of this owner may be deleted; empty where deleting is allowed."""
    if owner.uncertain:
        return f"the objects that manifests name are not known for certain: {owner.uncertain}"
    if owner.is_manifest_missing:
        return "the partition's manifest is missing"
    return ""
