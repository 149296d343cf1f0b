"""
The remote log: KIP-405's operations on one bucket, as the public seam of this package.

Copying stores objects and does not touch the manifest: the archiver commits what was copied, so that the
order data, index, manifest holds however many segments are copied at once. An object that no manifest
names does not exist for readers.

`SideFiles` reproduces the broker's files beside a `.log`: leader epochs, producer state, indexes. The
sidecar holds them byte for byte. A file that was not archived is built from the segment's own index: it
is coarser than the broker's, and never points past the wanted position.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from enum import Enum
from functools import partial
from itertools import count, pairwise
from pathlib import Path

from tieringd.archive.archive_reader import ArchiveReader, SegmentIndexes
from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.retired_objects import delete_segments
from tieringd.archive.segment_part import PartRequest, SegmentParts
from tieringd.archive.segment_rewriter import SegmentRewriter
from tieringd.archive.segment_swap import store_rewriting
from tieringd.archiving.segment_copier import CopiedSegment, CopyRequest, SegmentCopier
from tieringd.archiving.tombstone_keeper import LocalBatches, TombstoneCut
from tieringd.archiving.upload_gate import UploadGate
from tieringd.broker.layout import Layout
from tieringd.broker.segment_file import OpenSegment, position_of
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.checkpoints import encode_epoch_checkpoint
from tieringd.formats.index_files import whole_indexes
from tieringd.formats.object_keys import data_key, history_link_key, index_key, topic_key
from tieringd.model.manifest import SEGMENTS_REMEMBERED, PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import (
    AbortedTransaction,
    FilePart,
    LocalSegment,
    RemoteSegment,
    Rewriting,
    RewritingKind,
    SegmentIndex,
    rewriter_of,
)
from tieringd.policies.epoch_history import epoch_at, with_records, without_from
from tieringd.storage.base import ObjectStore
from tieringd.storage.threads import in_thread, in_thread_or

__all__ = ["CopiedSegment", "CopyRequest", "RemoteLog", "SideFileKind"]


class SideFileKind(Enum):
    """The kinds of broker files; the value is the suffix after the base offset, or the whole file name."""

    OFFSET_INDEX = ".index"
    TIME_INDEX = ".timeindex"
    TRANSACTION_INDEX = ".txnindex"
    PRODUCER_SNAPSHOT = ".snapshot"
    LEADER_EPOCHS = "leader-epoch-checkpoint"


class SideFiles:
    """Read a segment's side files. Stateless."""

    def __init__(
        self,
        manifests: ManifestStore,
        index_of: Callable[[TopicIdPartition, RemoteSegment], Awaitable[SegmentIndex]],
    ) -> None:
        self._manifests = manifests
        self._index_of = index_of

    async def read(self, partition: TopicIdPartition, segment: RemoteSegment, kind: SideFileKind) -> bytes:
        """See `RemoteLog.side_file`."""
        if kind is SideFileKind.LEADER_EPOCHS:
            manifest = await self._manifest_of(partition, segment)
            return encode_epoch_checkpoint(with_records(without_from(manifest.epochs, segment.next_offset)))
        index = await self._index_of(partition, segment)
        found: bytes | None
        if kind is SideFileKind.PRODUCER_SNAPSHOT:
            found = index.broker.producer_snapshot
        elif kind is SideFileKind.TRANSACTION_INDEX:
            found = await self._transaction_index(partition, segment, index)
        else:
            made = whole_indexes(segment, index, ())
            found = made.offset_index if kind is SideFileKind.OFFSET_INDEX else made.time_index
        if found is None:
            key = index_key(partition, segment)
            raise ObjectNotFound(f"segment {segment.base_offset} of {partition} has no {kind.value}", key=key)
        return found

    async def _transaction_index(
        self, partition: TopicIdPartition, segment: RemoteSegment, index: SegmentIndex
    ) -> bytes | None:
        """Return the transactions aborted by markers in *segment*, encoded; None when there are none."""
        if index.broker.offset_index is not None:
            # The broker's files were archived together, so a missing transaction index means that it had
            # none.
            return index.broker.transaction_index
        # A marker may end a transaction whose data is in an earlier segment: the index there lists it.
        manifest = await self._manifest_of(partition, segment)
        spillovers = self._manifests.spillovers
        wider = await spillovers.with_history(manifest, from_offset=segment.base_offset)
        row = wider.segments.row_at_or_after(segment.base_offset)
        while row < SEGMENTS_REMEMBERED and wider.live_offset > wider.start_offset:
            wider = await spillovers.with_history(manifest, from_offset=wider.live_offset - 1)
            row = wider.segments.row_at_or_after(segment.base_offset)
        aborted: dict[tuple[int, int], AbortedTransaction] = {}
        for earlier in range(max(row - SEGMENTS_REMEMBERED, 0), row):
            before = await self._index_of(partition, wider.segments[earlier])
            for one in before.aborted:
                aborted.setdefault((one.producer_id, one.last_offset), one)
        for one in index.aborted:
            aborted.setdefault((one.producer_id, one.last_offset), one)
        return whole_indexes(segment, index, aborted.values()).transaction_index

    async def _manifest_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> PartitionManifest:
        manifest = (await self._manifests.load(partition)).manifest
        if manifest is None:
            raise ObjectNotFound(f"segment {segment.base_offset} of {partition} is not in the archive")
        return manifest


class RemoteLog:
    """
    Store, list, read and delete a cluster's segments in a bucket.

    One per daemon, shared by its archivers. Operations of one partition may run concurrently, except that
    `copy_segment` and a commit of the same partition belong to one archiver. The reading operations are a
    public interface, which docs/python.md describes.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        writer_id: str,
        now_ms: Callable[[], int],
        wall_ms: Callable[[], int],
        gate: UploadGate,
        layout: Layout,
    ) -> None:
        self._store = store
        self._writer_id = writer_id
        self._rewritings = count()
        self._manifests = manifests
        self._reader = ArchiveReader(store)
        self._indexes = SegmentIndexes(store)
        self._layout = layout
        self._side_files = SideFiles(manifests, self.index_of)
        self._copier = SegmentCopier(
            store, writer_id=writer_id, now_ms=now_ms, wall_ms=wall_ms, gate=gate, layout=layout
        )

    @property
    def stored_segments(self) -> int:
        """Return how many segments of all partitions the store has taken since this process began."""
        return self._copier.stored_segments

    async def copy_segment(self, request: CopyRequest) -> CopiedSegment | None:
        """
        Check every batch of a slice, and store its data and index objects.

        Returns None when the slice has no batch, or when `bytes_below` is given and the slice does not have
        fewer bytes: nothing is stored then.

        Raises:
            CorruptDataError: A batch is wrong; nothing was stored.
            LeadershipChanged: A batch is newer than the leadership's epoch; nothing was stored.
            LocalFileError: The file cannot be read, or changed while it was read; or the marker of a
                transaction with records in the slice is missing.
            StorageUnavailable: The store did not take it; at most unreferenced objects remain.
        """
        return await self._copier.copy(request)

    async def stored_at_ms(self, partition: TopicIdPartition, segment: RemoteSegment) -> int | None:
        """
        Return when the store took a segment's data object, in ms since the epoch by the store's clock.

        None where there is no such object. This is a listing of one key, because a file store would read
        a whole object to answer `head`.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        key = data_key(partition, segment)
        page = await self._store.list_page(key, limit=1)
        return next((info.modified_ms for info in page.objects if info.key == key), None)

    async def local_checksums(self, segment: LocalSegment, sizes: Sequence[int]) -> tuple[int, ...]:
        """
        Return the CRC32C of each of the consecutive parts of a local segment's file, as it is now.

        *sizes* are the parts' bytes; together they are the whole file.

        Raises:
            LocalFileError: The file cannot be read, or is not the one that was scanned.
        """
        return await self._copier.checksums_of(segment, sizes)

    async def local_parts(self, segment: LocalSegment, offsets: Sequence[int]) -> tuple[FilePart, ...]:
        """
        Return size and CRC32C of each part of a local segment's file between neighbouring *offsets*.

        *offsets* ascend. The file is read as it is now.

        Raises:
            CorruptDataError: One of *offsets* is inside a batch, or a header is impossible.
            LocalFileError: The file cannot be read, or is not the one that was scanned.
        """
        return await self._copier.parts_of(segment, offsets)

    async def local_difference(
        self, partition: TopicIdPartition, segment: LocalSegment, pieces: Sequence[RemoteSegment]
    ) -> str:
        """
        Compare a local segment's batches byte by byte with those that *pieces* hold of its offsets.

        A piece that a job has rewritten is skipped: the job made it from the bytes that the log has there.

        Returns a description of the first difference; empty when there is none.

        Raises:
            LocalFileError: The file cannot be read, or is not the one that was scanned.
            ObjectNotFound: A piece has gone from the bucket.
            CorruptDataError: A stored batch is wrong.
        """
        assert segment.next_offset is not None, "only closed segments are compared"
        file = await asyncio.to_thread(self._layout.open, segment)
        position = 0
        try:
            for piece in pieces:
                if piece.is_rewritten:
                    try:
                        position = await asyncio.to_thread(_position_after, file, piece)
                    except CorruptDataError as error:
                        return str(error)
                    continue
                index = await self.index_of(partition, piece)
                key = data_key(partition, piece)
                async with aclosing(
                    self._reader.batches(key, index, from_offset=segment.base_offset)
                ) as batches:
                    async for batch in batches:
                        if batch.header.base_offset >= segment.next_offset:
                            break
                        local = await asyncio.to_thread(file.read_at, position, len(batch.data))
                        if local != batch.data:
                            return (
                                f"the batch at offset {batch.header.base_offset}, byte {position}, differs "
                                f"from the batch in {key} at byte {batch.position}"
                            )
                        position += len(batch.data)
            if position != file.segment.size_bytes:
                return (
                    f"the local segment has {file.segment.size_bytes - position} bytes that the archive "
                    "does not have"
                )
            return ""
        finally:
            file.close()

    async def lacks_what_stays(
        self,
        partition: TopicIdPartition,
        segments: Sequence[LocalSegment],
        pieces: Sequence[RemoteSegment],
    ) -> bool:
        """
        Say whether compacted local *segments* lack a tombstone or a marker of archived *pieces*.

        A marker counts only if its transaction may have begun before *pieces*.

        Raises:
            CorruptDataError: A batch is wrong, or the archive does not have it.
            LocalFileError: A file cannot be read, or is not the one that was scanned.
            ObjectNotFound: A piece has gone from the bucket.
            StorageUnavailable: The store does not answer.
        """
        async with self._batches_of(segments, pieces) as local:
            cut = TombstoneCut(local)
            for piece in pieces:
                index = await self.index_of(partition, piece)
                batches = self._reader.batches(data_key(partition, piece), index, from_offset=0)
                async with aclosing(batches):
                    async for batch in batches:
                        await in_thread(cut.left_of, batch)
                        if cut.kept_tombstones or cut.kept_markers:
                            return True
            await in_thread(local.require_end)
        return False

    async def rewrite_with_what_stays(
        self,
        partition: TopicIdPartition,
        segments: Sequence[LocalSegment],
        pieces: Sequence[RemoteSegment],
    ) -> tuple[RemoteSegment, ...]:
        """
        Store each of *pieces* reduced to the records of compacted local *segments*, tombstones and markers.

        All tombstones and markers of *pieces* stay. Each piece becomes one segment, marked as rewritten. No
        manifest is touched.

        Raises:
            CorruptDataError: A batch is wrong, or the archive does not have it.
            LocalFileError: A file cannot be read, or is not the one that was scanned.
            ObjectNotFound: A piece has gone from the bucket.
            StorageUnavailable: The store did not take it; at most unreferenced objects remain.
        """
        rewriter = SegmentRewriter(
            self._store,
            self._reader,
            # A counter in the writer's id: the same bytes get another name when they are rewritten after
            # an election.
            writer_id=f"{rewriter_of(self._writer_id)}{next(self._rewritings):04x}",
            work_directory=Path(tempfile.gettempdir()),
        )
        async with self._batches_of(segments, pieces) as local:
            cut = TombstoneCut(local)
            done = [await rewriter.rewrite(partition, (piece,), cut) for piece in pieces]
            await in_thread(local.require_end)
        return tuple(one.segment for one in done)

    async def store_part(self, request: PartRequest) -> RemoteSegment:
        """
        Store the valid part of a segment after an election; see `SegmentParts.store`.

        Raises:
            ObjectNotFound: The data or the index was deleted.
            CorruptDataError: The data or the index is damaged, or the part's end is inside a batch.
            RetryableError: The store or the work directory is temporarily unavailable.
        """
        parts = SegmentParts(
            self._store,
            self._reader,
            writer_id=self._writer_id,
            work_directory=Path(tempfile.gettempdir()),
        )
        return await parts.store(request)

    async def record_compaction(
        self,
        partition: TopicIdPartition,
        replaced: tuple[RemoteSegment, ...],
        segments: tuple[RemoteSegment, ...],
    ) -> str:
        """
        Store the record that rebuild uses, before rewritten *segments* replace others; return its key.

        Raises:
            StorageUnavailable: It may be stored or not. Doing it again is safe.
        """
        rewriting = Rewriting.of(RewritingKind.COMPACTED, replaced, segments)
        return await store_rewriting(self._store, partition, rewriting)

    async def forget_compaction(self, record_key: str) -> None:
        """Delete the record of a compaction that was given up."""
        await self._store.delete_many([record_key])

    async def goes_on_from_another(self, partition: TopicIdPartition) -> bool:
        """
        Say whether the partition's topic was restored from an older archive, which is read before this one.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        try:
            await self._store.head(history_link_key(topic_key(partition)))
        except ObjectNotFound:
            return False
        return True

    @asynccontextmanager
    async def _batches_of(
        self, segments: Sequence[LocalSegment], pieces: Sequence[RemoteSegment]
    ) -> AsyncIterator[LocalBatches]:
        opening = partial(
            LocalBatches.opened,
            self._layout,
            segments,
            base_offset=pieces[0].base_offset,
            next_offset=pieces[-1].next_offset,
        )
        batches = await in_thread_or(LocalBatches.close, opening)
        try:
            yield batches
        finally:
            batches.close()

    async def list_segments(
        self, partition: TopicIdPartition, *, min_base_offset: int = 0
    ) -> tuple[RemoteSegment, ...]:
        """Return the stored segments from *min_base_offset* on, ascending; empty when there are none."""
        manifest = (await self._manifests.load(partition)).manifest
        if manifest is None:
            return ()
        manifest = await self._manifests.spillovers.with_history(manifest, from_offset=min_base_offset)
        return tuple(one for one in manifest.segments if one.base_offset >= min_base_offset)

    async def earliest_offset(self, partition: TopicIdPartition) -> int:
        """Return the first offset that can be read; -1 when nothing is stored."""
        manifest = (await self._manifests.load(partition)).manifest
        if manifest is None:
            return -1
        async with aclosing(self._manifests.spillovers.pieces(manifest)) as pieces:
            async for piece in pieces:
                if piece.segments:
                    return max(piece.start_offset, piece.segments[0].base_offset)
        return -1

    async def highest_offset(self, partition: TopicIdPartition, *, leader_epoch: int) -> int:
        """Return the last offset of *leader_epoch* that the archive holds, or held; -1 without any."""
        manifest = (await self._manifests.load(partition)).manifest
        if manifest is None:
            return -1
        bounds = [*manifest.epochs, (-1, manifest.next_offset)]
        for (epoch, start_offset), (_, end_offset) in pairwise(bounds):
            if epoch == leader_epoch and start_offset < min(end_offset, manifest.next_offset):
                return min(end_offset, manifest.next_offset) - 1
        return -1

    async def segment_of(
        self, partition: TopicIdPartition, offset: int, *, leader_epoch: int
    ) -> RemoteSegment | None:
        """Return the segment that holds *offset* as written under *leader_epoch*; None without one."""
        manifest = (await self._manifests.load(partition)).manifest
        if manifest is None or not manifest.start_offset <= offset < manifest.next_offset:
            return None
        if epoch_at(manifest.epochs, offset) != leader_epoch:
            return None
        piece = await self._manifests.spillovers.piece_at(manifest, offset)
        return piece.segments.covering(offset)

    async def index_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """
        Return a stored segment's index: offsets, times, aborted transactions, epochs.

        Raises:
            ObjectNotFound: The bucket has no such segment.
            CorruptDataError: The index is damaged, or describes another object.
        """
        return await self._indexes.index_of(partition, segment)

    async def side_file(
        self, partition: TopicIdPartition, segment: RemoteSegment, kind: SideFileKind
    ) -> bytes:
        """
        Return one of the broker's files beside a segment, for a follower that continues after it.

        It is the broker's own file where the archive has it, or built from the segment's index otherwise.
        The leader epochs are those up to the segment's end.

        Raises:
            ObjectNotFound: The bucket has no such segment, or there is no such file: no transaction was
                aborted in it, or it has no producer snapshot.
            CorruptDataError: The index is damaged, or describes another object.
        """
        return await self._side_files.read(partition, segment, kind)

    async def read(
        self,
        partition: TopicIdPartition,
        *,
        offset: int,
        size_bytes_max: int,
        at_least_one_batch: bool = True,
    ) -> bytes:
        """
        Return whole record batches of one segment, starting with the one that holds *offset*.

        Where compaction has removed that batch, the result starts with the next one, in a later segment
        if need be. The first batch is returned even when it is larger than *size_bytes_max*, unless
        *at_least_one_batch* is false. The result is also empty where the archive has no batch from
        *offset* on.

        Raises:
            ObjectNotFound: No stored segment holds *offset*.
            CorruptDataError: A batch's checksum is wrong.
        """
        manifest = (await self._manifests.load(partition)).manifest
        expected = offset
        if manifest is not None and manifest.start_offset <= offset < manifest.next_offset:
            async with aclosing(self._manifests.spillovers.pieces(manifest, from_offset=offset)) as pieces:
                async for piece in pieces:
                    for row in range(piece.segments.row_at_or_after(expected), len(piece.segments)):
                        segment = piece.segments[row]
                        if segment.base_offset > expected:
                            break
                        found = await self._batches_in(
                            partition, segment, offset, size_bytes_max, at_least_one=at_least_one_batch
                        )
                        if found is not None:
                            return found
                        expected = segment.next_offset
                    if expected < piece.next_offset:
                        break
        if expected == offset:
            raise ObjectNotFound(f"offset {offset} of {partition} is not in the archive")
        return b""

    async def _batches_in(
        self,
        partition: TopicIdPartition,
        segment: RemoteSegment,
        offset: int,
        size_bytes_max: int,
        *,
        at_least_one: bool,
    ) -> bytes | None:
        """Return batches of one segment; None if the segment ends before *offset*."""
        index = await self.index_of(partition, segment)
        size_bytes = 0
        parts: list[bytes] | None = None
        key = data_key(partition, segment)
        batches = self._reader.batches(key, index, from_offset=offset, chunk_bytes=max(size_bytes_max, 1))
        async with aclosing(batches):
            async for batch in batches:
                size_bytes += len(batch.data)
                is_wanted = size_bytes <= size_bytes_max or (parts is None and at_least_one)
                parts = parts or []
                if not is_wanted:
                    break
                parts.append(bytes(batch.data))
        return None if parts is None else b"".join(parts)

    async def delete_segments(self, partition: TopicIdPartition, segments: Iterable[RemoteSegment]) -> None:
        """
        Delete the objects of *segments*; an object that is already gone counts as deleted.

        The caller must have taken them out of the manifest, long enough ago for readers to notice.

        Raises:
            StorageUnavailable: Some may be left. Calling again deletes them.
        """
        await delete_segments(self._store, partition, segments)

    async def close(self) -> None:
        """Cancel the copies that are under way, and close the store."""
        self._copier.cancel_all()
        await self._store.close()


def _position_after(file: OpenSegment, piece: RemoteSegment) -> int:
    """Return where the first batch after *piece* begins in the open file, or the file's end. Blocks."""
    return position_of(file.fd, file.segment, piece.next_offset)
