"""
The remote log: KIP-405's operations on one bucket, as the public seam of this package.

Copying stores objects and does not touch the manifest: the archiver commits what was copied,
so that the order data, index, manifest holds however many segments go at once. Whatever a
manifest does not name does not exist for readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.errors import CorruptDataError, NotYetSupportedError, ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import decode_sidecar
from tieringd.services.archive_reader import ArchiveReader
from tieringd.services.segment_copier import CopiedSegment, SegmentCopier

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import Leadership, TopicIdPartition
    from tieringd.model.segment import LocalSegment, RemoteSegment, SegmentIndex
    from tieringd.services.manifest_store import ManifestStore
    from tieringd.storage.base import ObjectStore

__all__ = ["CopiedSegment", "RemoteLog"]


class RemoteLog:
    """
    Store, list, read and (in a later release) delete a cluster's segments in a bucket.

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
        concurrent_copies: int,
    ) -> None:
        self._store = store
        self._manifests = manifests
        self._reader = ArchiveReader(store)
        self._copier = SegmentCopier(
            store, writer_id=writer_id, now_ms=now_ms, concurrent_copies=concurrent_copies
        )

    async def copy_segment(
        self, leadership: Leadership, log: LocalLog, segment: LocalSegment
    ) -> CopiedSegment:
        """
        Check every batch of a closed segment, and store its data and index objects.

        *log* is the scan that *segment* is from: transactions that are open at the segment's end
        are followed into the later ones.

        Raises:
            CorruptDataError: A batch is wrong; nothing was stored.
            LocalFileError: The file cannot be read, or changed while it was read.
            StorageUnavailable: The store did not take it; at most unreferenced objects remain.
        """
        return await self._copier.copy(leadership, log, segment)

    def cancel_copies(self, partition: TopicIdPartition) -> int:
        """
        Cancel the partition's copies that are under way; return how many there were.

        Their callers see `asyncio.CancelledError`. Objects already stored stay unreferenced.
        """
        return self._copier.cancel(partition)

    async def local_crc32c(self, segment: LocalSegment) -> int:
        """
        Return the checksum of a local segment's file as it is now.

        Raises:
            LocalFileError: The file cannot be read, or is not the one that was scanned.
        """
        return await self._copier.crc32c_of(segment)

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
        try:
            index = decode_sidecar(data)
        except CorruptDataError as error:
            raise error.located(key) from error
        if (index.base_offset, index.size_bytes, index.crc32c) != (
            segment.base_offset,
            segment.size_bytes,
            segment.crc32c,
        ):
            raise CorruptDataError("the index describes another data object", source=key)
        return index

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

    async def delete_segment(self, partition: TopicIdPartition, segment: RemoteSegment) -> None:
        """Delete a stored segment."""
        raise NotYetSupportedError(
            f"segment {segment.base_offset} of {partition} cannot be deleted yet: archive retention "
            f"comes with a later release"
        )

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
