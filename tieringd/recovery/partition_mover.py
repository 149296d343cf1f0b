"""
Copy one partition's archive into another bucket: its objects, and then a manifest that names them there.

The order is data and index objects, the spillover manifest that names them, records of rewritten
segments, and the live manifest last, by compare-and-swap. So all objects that the target's manifests
name exist at any moment, and a repeated copy goes on from what they name. Segments that are retired in
the source are not copied: readers of the target have never seen them.

An archive that was moved away and is moved back finds its old manifest closed in the target. The manifest
stays closed until the source is closed, and is opened with the source's content then: at any moment
archivers can commit to one of the two at most.

`ObjectCopier` copies one object from one bucket into another, byte for byte, and verifies its checksum
on the way. Objects never change, and their names are unique: an existing object with the same size and
checksum is the same. Memory is bounded by one piece for each copy. A larger object waits in an unnamed
temporary file, so a killed process leaves nothing of it behind.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from crc32c import crc32c as crc32c_of

from tieringd.archive.manifest_store import EDIT_MARK, ManifestStore, StoredManifest, closed
from tieringd.errors import (
    ConfigError,
    CorruptDataError,
    ObjectNotFound,
    StorageError,
    StorageUnavailable,
    TieringError,
)
from tieringd.formats.object_keys import data_key, index_key, rewriting_prefix, spillover_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_CRC, RemoteSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.policies.recovery import fault_of_takeover
from tieringd.storage.base import ObjectInfo, ObjectStore
from tieringd.storage.listing import list_objects
from tieringd.storage.work_file import work_file

PIECE_BYTES = 8 << 20
"""How much is read at once. An object that is no larger does not touch the disk."""
COPIES_MAX = 8
"""How many objects are copied at a time. Each copy holds one piece in memory."""

COPY_WRITER = "copy-"
"""Prefix of the writer ids of copiers; no daemon's id has it. Manifests under it may be overwritten."""
_SEGMENTS_AT_ONCE = 64
_TRIES = 8
"""How often a copy is repeated when retention in the source deletes an object that it needs."""


@dataclass(frozen=True, slots=True)
class CopySource:
    """An object of the source, and the known facts about its bytes."""

    key: str
    size_bytes: int
    crc32c: int | None = None
    """None if no manifest has the checksum."""


class ObjectCopier:
    """Copy objects. Cancelling a copy is safe, and so is repeating it."""

    def __init__(
        self, source: ObjectStore, target: ObjectStore, *, work_directory: Path | None = None
    ) -> None:
        """
        Keep the arguments.

        Without *work_directory* large objects go through the system's temporary directory.
        """
        self._source = source
        self._target = target
        self._directory = work_directory
        self._slots = asyncio.Semaphore(COPIES_MAX)

    async def copy(self, source: CopySource) -> int:
        """
        Make sure that the target has the object. Return the bytes written, 0 if it was there already.

        Raises:
            ObjectNotFound: The source no longer has the object.
            CorruptDataError: The source has other bytes than its manifest says.
            StorageError: The target has another object of this name, or an operator must act.
            LocalFileError: The work directory cannot take the bytes.
        """
        async with self._slots:
            if await self.has(source):
                return 0
            if source.size_bytes <= PIECE_BYTES:
                data, _ = await self._source.get(source.key)
                checksum = _proved(source, len(data), crc32c_of(data))
                await self._target.put(source.key, data, crc32c=checksum)
            else:
                await self._stream(source)
            return source.size_bytes

    async def has(self, source: CopySource) -> bool:
        """
        Say whether the target has the object.

        Raises:
            StorageError: The target has another object of this name.
        """
        try:
            info = await self._target.head(source.key)
        except ObjectNotFound:
            return False
        if not _is_same_object(source, info):
            raise StorageError(
                f"{source.key} is already in the target, but it is another object: {info.size_bytes} bytes "
                f"instead of {source.size_bytes}, or another checksum",
                key=source.key,
                hint="Find out which process wrote it; delete the object, and run this again",
            )
        return True

    async def _stream(self, source: CopySource) -> None:
        """Copy the object into a temporary file, and upload the file."""
        async with work_file(
            self._directory,
            f"objects cannot be copied through {self._directory or tempfile.gettempdir()}",
            hint="Free space there for eight of the largest segments",
        ) as file:
            while piece := await self._source.get_range(
                source.key, position=file.size_bytes, size_bytes=PIECE_BYTES
            ):
                await file.append(piece)
            checksum = _proved(source, file.size_bytes, file.crc32c)
            await self._target.put(source.key, await file.body(), crc32c=checksum)


def _is_same_object(source: CopySource, info: ObjectInfo) -> bool:
    known = source.crc32c is not None and info.crc32c is not None
    return info.size_bytes == source.size_bytes and (not known or info.crc32c == source.crc32c)


def _proved(source: CopySource, size_bytes: int, checksum: int) -> int:
    """Return *checksum* if the bytes that were read have the expected size and checksum."""
    if size_bytes != source.size_bytes or source.crc32c not in {None, checksum}:
        raise CorruptDataError(
            f"the object has {size_bytes} bytes with checksum {checksum:08x}, but should have "
            f"{source.size_bytes}" + (f" with {source.crc32c:08x}" if source.crc32c is not None else ""),
            source=source.key,
            hint="`tieringd archive verify --deep` on the source has details",
        )
    return checksum


@dataclass(frozen=True, slots=True)
class PartitionCopy:
    """The result of one pass over a partition, and what the target names afterwards."""

    partition: TopicIdPartition
    segments: int = 0
    size_bytes: int = 0
    next_offset: int = 0
    copied_objects: int = 0
    copied_bytes: int = 0
    has_gone_on: bool = False
    """Whether a daemon archives into the target already. Then nothing was written there."""


class PartitionMover:
    """Copy partitions from one bucket into another, and close them in the first."""

    def __init__(
        self,
        source: ManifestStore,
        target: ManifestStore,
        *,
        source_store: ObjectStore,
        copier: ObjectCopier,
    ) -> None:
        """Keep the arguments. Both manifest stores write under a writer id that begins with `COPY_WRITER`."""
        self._source = source
        self._target = target
        self._source_store = source_store
        self._copier = copier

    async def copy(self, partition: TopicIdPartition, *, reopens: bool = False) -> PartitionCopy:
        """
        Bring the target up to the source's current manifest.

        *reopens* says that a move into the target closed the source. A target that an earlier move closed
        is opened again then.

        Raises:
            ConfigError: A daemon archives the partition into the target, and another one into the source. Or
                a daemon archived into the target before all was copied, and offsets are missing there. Or
                both are closed, and not by a move into the target.
            TieringError: The copy is incomplete. Another call goes on from here.
        """
        for tries in range(_TRIES):
            stored = await self._source.load(partition)
            if stored.manifest is None:
                return PartitionCopy(partition)
            try:
                return await self._copy(stored.manifest, reopens=reopens)
            except ObjectNotFound:
                # Retention and merging go on in the source until it is closed.
                found = await self._source.refreshed(partition, stored)
                if found.version == stored.version or tries == _TRIES - 1:
                    raise
        raise StorageUnavailable(f"{partition} changes faster in the source than it can be copied")

    async def switch(self, partition: TopicIdPartition) -> PartitionCopy:
        """
        Close the partition in the source, and bring the target to exactly the closed version.

        From then on no archiver commits to the source. Segments that an archiver has uploaded there and
        not committed are still in the broker's log, and are uploaded to the target.

        Raises:
            ConfigError: A daemon archives the partition into the target, and another one into the source.
            TieringError: The switch is incomplete. Another call goes on from here.
        """
        found = await self._source.load(partition)
        if found.manifest is not None and not found.manifest.is_closed:
            self._require_ours(await self._target.load(partition))
        placeholder = PartitionManifest.begin(partition, start_offset=0)
        await closed(self._source, partition, begin=placeholder)
        return await self.copy(partition, reopens=True)

    async def takeover_fault(self, there: PartitionManifest, source: PartitionManifest) -> str:
        """
        Return what the target lacks of the source if a daemon has written the target; empty if nothing.

        Raises:
            ObjectNotFound: A spilled part was deleted. Read the manifests again.
            CorruptDataError: A spilled part is damaged.
        """
        if is_copy(there) or _is_placeholder(source):
            return ""
        return fault_of_takeover(
            await self._target.spillovers.with_history(there),
            await self._source.spillovers.with_history(source),
        )

    def _require_ours(self, there: StoredManifest) -> None:
        if there.manifest is not None and not is_copy(there.manifest):
            raise ConfigError(
                f"the target has an archive of {there.manifest.partition} that a daemon or a job has written",
                hint="Stop that daemon, or choose another bucket or prefix: nothing is overwritten",
            )

    async def _copy(self, manifest: PartitionManifest, *, reopens: bool) -> PartitionCopy:
        there = await self._target.load(manifest.partition)
        is_closed_there = there.manifest is not None and there.manifest.is_closed
        if _is_placeholder(manifest) and not is_closed_there:
            return PartitionCopy(manifest.partition)
        if manifest.is_closed and there.manifest is not None and _has_gone_on(there.manifest, manifest):
            fault = await self.takeover_fault(there.manifest, manifest)
            if fault:
                raise ConfigError(
                    f"{manifest.partition}: {fault}",
                    hint="A daemon archived into the target before the move was finished. Keep the source: "
                    "nothing is copied into an archive that another process writes",
                )
            return _report(there.manifest, has_gone_on=True)
        self._require_ours(there)
        reopens = reopens and manifest.is_closed and is_closed_there
        if manifest.is_closed and is_closed_there and not reopens:
            raise ConfigError(
                f"the archive of {manifest.partition} is closed in the source and in the target: the last "
                "move did not lead from the source to the target",
                hint="`tieringd archive topics` shows for each bucket where it went. Repeat the last move",
            )
        # A closed archive may have lost objects since: its source may be deleted after a move.
        known = there.manifest.segments if there.manifest is not None and not is_closed_there else None
        objects, size_bytes, begin_offset = await self._copy_spilled(
            manifest, is_closed_there=is_closed_there
        )
        more = await self._copy_segments(manifest.partition, manifest.segments, known)
        records = await self._copy_records(manifest.partition)
        objects, size_bytes = objects + more[0] + records[0], size_bytes + more[1] + records[1]
        wanted = _for_target(manifest, begin_offset)
        if there.manifest is None or reopens or not _is_same(there.manifest, wanted):
            epoch = manifest.epochs[-1][0] if manifest.epochs else -1
            if not manifest.is_closed:
                epoch = max(epoch, manifest.leader_epoch)
            if there.manifest is not None and not reopens:
                epoch = max(epoch, there.manifest.leader_epoch)
            await self._target.commit(there, wanted, leader_epoch=epoch, reopens=reopens)
        return replace(_report(wanted), copied_objects=objects, copied_bytes=size_bytes)

    async def _copy_spilled(
        self, manifest: PartitionManifest, *, is_closed_there: bool
    ) -> tuple[int, int, int]:
        """
        Copy the spilled segments that are still held.

        In a target that is closed, as *is_closed_there* says, a spillover manifest does not prove that its
        objects exist.

        Returns the number of objects, their bytes, and the offset where the spilled part begins in the
        target.
        """
        partition, objects, size_bytes = manifest.partition, 0, 0
        if manifest.spillover is None or manifest.start_offset >= manifest.live_offset:
            return 0, 0, manifest.live_offset
        spillovers = self._source.spillovers
        names = await spillovers.names(manifest, from_offset=manifest.start_offset)
        for name in names:
            key = spillover_key(partition, name)
            info = await self._source_store.head(key)
            document = CopySource(key, info.size_bytes, name.crc32c)
            if not is_closed_there and await self._copier.has(document):
                continue  # A spillover manifest is stored after the objects that it names.
            part = await spillovers.load(partition, name)
            held = (one for one in part.segments if one.next_offset > manifest.start_offset)
            copied = await self._copy_segments(partition, held, None)
            written = await self._copier.copy(document)
            objects, size_bytes = objects + copied[0] + (written > 0), size_bytes + copied[1] + written
        return objects, size_bytes, max(names[0].base_offset, manifest.spillover.begin_offset)

    async def _copy_records(self, partition: TopicIdPartition) -> tuple[int, int]:
        """Copy the records that jobs wrote of rewritten segments. Return the objects and their bytes."""
        objects = size_bytes = 0
        async for info in list_objects(self._source_store, rewriting_prefix(partition)):
            try:
                written = await self._copier.copy(CopySource(info.key, info.size_bytes))
            except ObjectNotFound:
                # The record belonged to a swap that failed, or scrub deleted it as unneeded.
                continue
            objects, size_bytes = objects + (written > 0), size_bytes + written
        return objects, size_bytes

    async def _copy_segments(
        self, partition: TopicIdPartition, segments: Iterable[RemoteSegment], known: SegmentTable | None
    ) -> tuple[int, int]:
        """Copy segments that the target's table *known* lacks. Return the objects and their bytes."""
        objects = size_bytes = 0
        batch: list[RemoteSegment] = []
        for segment in segments:
            there = known.overlapping(segment.base_offset, segment.next_offset) if known is not None else ()
            if there == (segment,):
                continue
            batch.append(segment)
            if len(batch) == _SEGMENTS_AT_ONCE:
                copied = await self._copy_batch(partition, batch)
                objects, size_bytes, batch = objects + copied[0], size_bytes + copied[1], []
        copied = await self._copy_batch(partition, batch)
        return objects + copied[0], size_bytes + copied[1]

    async def _copy_batch(
        self, partition: TopicIdPartition, segments: Iterable[RemoteSegment]
    ) -> tuple[int, int]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._copy_segment(partition, one)) for one in segments]
        outcomes = [task.result() for task in tasks]
        for outcome in outcomes:
            if isinstance(outcome, TieringError):
                raise outcome
        written = [size for outcome in outcomes if not isinstance(outcome, TieringError) for size in outcome]
        return sum(size > 0 for size in written), sum(written)

    async def _copy_segment(
        self, partition: TopicIdPartition, segment: RemoteSegment
    ) -> tuple[int, int] | TieringError:
        """Copy data, then index. A failure is returned, so that the other copies can end."""
        index_crc32c = None if segment.index_crc32c == NO_CRC else segment.index_crc32c
        data = CopySource(data_key(partition, segment), segment.size_bytes, segment.crc32c)
        index = CopySource(index_key(partition, segment), segment.index_size_bytes, index_crc32c)
        try:
            return await self._copier.copy(data), await self._copier.copy(index)
        except TieringError as error:
            return error


def is_copy(manifest: PartitionManifest) -> bool:
    """
    Say whether a manifest in the target is still the copied one, and may be overwritten.

    A manifest that a job has edited since may not be: records that the job removed, as an erasure does,
    would come back.
    """
    return manifest.writer_id.startswith(COPY_WRITER) and not manifest.writer_id.endswith(EDIT_MARK)


def _is_placeholder(manifest: PartitionManifest) -> bool:
    """Say whether a manifest was written only to be closed, for a partition without any archive."""
    return not manifest.segment_count and manifest.next_offset == 0 and manifest.began_at_ms == 0


def _has_gone_on(there: PartitionManifest, source: PartitionManifest) -> bool:
    """Say whether a daemon has taken the archive over in the target, or a job has edited it there."""
    return not is_copy(there) and there.next_offset >= source.next_offset


def _for_target(manifest: PartitionManifest, begin_offset: int) -> PartitionManifest:
    """Return the target's manifest: without the segments that only the source still has to delete."""
    spillover = manifest.spillover
    if spillover is not None:
        spillover = replace(spillover, begin_offset=begin_offset, retired=()) if spillover.segments else None
    # Replaced segments stay in the source. So only a log can bring back what a compaction removed.
    manifest = manifest.released([one for one in manifest.retired if one.is_held], is_settled=False)
    return replace(manifest, retired=(), spillover=spillover)


def _is_same(there: PartitionManifest, wanted: PartitionManifest) -> bool:
    """Say whether the manifests differ at most in their writer and in the time of the commit."""
    return there == replace(
        wanted,
        leader_epoch=there.leader_epoch,
        writer_id=there.writer_id,
        commit_number=there.commit_number,
        committed_at_ms=there.committed_at_ms,
    )


def _report(manifest: PartitionManifest, *, has_gone_on: bool = False) -> PartitionCopy:
    return PartitionCopy(
        manifest.partition,
        segments=manifest.segment_count,
        size_bytes=manifest.size_bytes,
        next_offset=manifest.next_offset,
        has_gone_on=has_gone_on,
    )
