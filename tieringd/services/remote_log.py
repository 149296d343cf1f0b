"""
The remote log: KIP-405's operations on one bucket, as the public seam of this package.

Copying stores objects and does not touch the manifest: the archiver commits what was copied,
so that the order data, index, manifest holds however many segments go at once. Whatever a
manifest does not name does not exist for readers.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from tieringd.errors import NotYetSupportedError, ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import decode_sidecar_of
from tieringd.services.archive_reader import ArchiveReader
from tieringd.services.segment_copier import CopiedSegment, CopyRequest, SegmentCopier
from tieringd.services.upload_line import NO_URGENCY, Urgency

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tieringd.broker.layout import Layout
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import Leadership, TopicIdPartition
    from tieringd.model.segment import LocalSegment, RemoteSegment, SegmentIndex, SegmentSlice
    from tieringd.services.manifest_store import ManifestStore
    from tieringd.services.upload_gate import UploadGate
    from tieringd.storage.base import ObjectStore

__all__ = ["CopiedSegment", "RemoteLog"]


class RemoteLog:
    """
    Store, list, read and delete a cluster's segments in a bucket.

    One per daemon, shared by its archivers. Operations of one partition may run side by side,
    except that `copy_segment` and a commit of the same partition belong to one archiver.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        writer_id: str,
        now_ms: Callable[[], int],
        gate: UploadGate,
        layout: Layout,
    ) -> None:
        self._store = store
        self._manifests = manifests
        self._reader = ArchiveReader(store)
        self._layout = layout
        self._copier = SegmentCopier(store, writer_id=writer_id, now_ms=now_ms, gate=gate, layout=layout)

    async def copy_segment(
        self,
        leadership: Leadership,
        log: LocalLog,
        part: SegmentSlice,
        *,
        urgency: Urgency = NO_URGENCY,
        before_put: Callable[[], None] = lambda: None,
        final_holes: Collection[int] = (),
    ) -> CopiedSegment | None:
        """
        Check every batch of *part*, and store its data and index objects; None when it has no batch.

        *log* is the scan that *part* is from: transactions that are open at its end are followed
        into what comes later. *urgency* decides whose turn it is at the gate. *before_put* is called
        before each object is stored, and may raise to prevent that. *final_holes* are those of
        `log.bases_after_holes` that another look has confirmed.

        Raises:
            CorruptDataError: A batch is wrong; nothing was stored.
            LocalFileError: The file cannot be read, or changed while it was read; or the marker of a
                transaction with records in *part* is missing.
            StorageUnavailable: The store did not take it; at most unreferenced objects remain.
        """
        request = CopyRequest(leadership, log, part, urgency, before_put, final_holes)
        return await self._copier.copy(request)

    def cancel_copies(self, partition: TopicIdPartition) -> int:
        """
        Cancel the partition's copies that are under way; return how many there were.

        Their callers see `asyncio.CancelledError`. Objects already stored stay unreferenced.
        """
        return self._copier.cancel(partition)

    async def local_checksums(self, segment: LocalSegment, sizes: Sequence[int]) -> tuple[int, ...]:
        """
        Return the CRC32C of each of the consecutive parts of a local segment's file, as it is now.

        *sizes* are the parts' bytes; together they are the whole file.

        Raises:
            LocalFileError: The file cannot be read, or is not the one that was scanned.
        """
        return await self._copier.checksums_of(segment, sizes)

    async def local_difference(
        self, partition: TopicIdPartition, segment: LocalSegment, pieces: Sequence[RemoteSegment]
    ) -> str:
        """
        Compare a local segment's batches with those that *pieces* hold of its offsets, byte by byte.

        Returns where they first differ, in words; empty when they do not.

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
                                f"the batch at offset {batch.header.base_offset}, byte {position}, is not "
                                f"the one that {key} holds at byte {batch.position}"
                            )
                        position += len(batch.data)
            if position != file.segment.size_bytes:
                return f"it has {file.segment.size_bytes - position} bytes that the archive does not hold"
            return ""
        finally:
            file.close()

    async def list_segments(
        self, partition: TopicIdPartition, *, min_base_offset: int = 0
    ) -> tuple[RemoteSegment, ...]:
        """Return the stored segments from *min_base_offset* on, ascending; empty when there are none."""
        manifest = (await self._manifests.load(partition)).manifest
        if manifest is None:
            return ()
        return tuple(one for one in manifest.segments if one.base_offset >= min_base_offset)

    async def earliest_offset(self, partition: TopicIdPartition) -> int:
        """Return the first offset that can be read; -1 when nothing is stored."""
        segments = await self.list_segments(partition)
        return segments[0].base_offset if segments else -1

    async def index_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """
        Return a stored segment's index: offsets, times, aborted transactions, epochs.

        Raises:
            ObjectNotFound: The bucket has no such segment.
            CorruptDataError: The index is damaged, or describes another object.
        """
        key = index_key(partition, segment)
        data, _ = await self._store.get(key)
        return decode_sidecar_of(data, segment, key=key)

    async def read(
        self,
        partition: TopicIdPartition,
        *,
        offset: int,
        size_bytes_max: int,
        at_least_one_batch: bool = True,
    ) -> bytes:
        """
        Return whole record batches from the one that holds *offset* on, within one segment.

        The first batch is returned even when it is larger than *size_bytes_max*, unless
        *at_least_one_batch* is false.

        Raises:
            ObjectNotFound: No stored segment holds *offset*.
            CorruptDataError: A batch's checksum is wrong.
        """
        manifest = (await self._manifests.load(partition)).manifest
        segment = manifest.segments.covering(offset) if manifest else None
        if segment is None:
            raise ObjectNotFound(f"offset {offset} of {partition} is not in the archive")
        index = await self.index_of(partition, segment)
        size_bytes = 0
        parts: list[bytes] = []
        async for batch in self._reader.batches(
            data_key(partition, segment), index, from_offset=offset, chunk_bytes=max(size_bytes_max, 1)
        ):
            size_bytes += len(batch.data)
            if size_bytes > size_bytes_max and (parts or not at_least_one_batch):
                break
            parts.append(bytes(batch.data))
        return b"".join(parts)

    async def delete_segments(self, partition: TopicIdPartition, segments: Iterable[RemoteSegment]) -> None:
        """
        Delete the objects of *segments*; what is gone already counts as deleted.

        The caller has taken them out of the manifest, and readers had time to notice.

        Raises:
            StorageUnavailable: Some may be left. Calling again deletes them.
        """
        keys = [name(partition, segment) for segment in segments for name in (index_key, data_key)]
        if keys:
            await self._store.delete_many(keys)

    async def delete_partition(self, partition: TopicIdPartition) -> None:
        """Delete all that is stored of a partition."""
        raise NotYetSupportedError(
            f"{partition} cannot be deleted from the archive yet: topic deletion comes with a later release"
        )

    async def cleanup_until(self, partition: TopicIdPartition, *, timestamp_ms: int) -> int:
        """Delete the partition's segments that are older than *timestamp_ms*."""
        raise NotYetSupportedError(
            f"{partition} cannot be cleaned up to {timestamp_ms} yet: archive retention comes with "
            f"a later release"
        )

    async def close(self) -> None:
        """Cancel what is under way and release the store."""
        self._copier.cancel_all()
        await self._store.close()
