"""
An index that was lost, made again from the data that it is of, and from what follows that.

It has none of the broker's own side files in it: a broker builds them when it finds none. So it has
other bytes than the one that was lost, and with them the data gets another name.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.archive.scrub.data_scan import scan_data
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.formats.records import control_type
from tieringd.formats.sidecar import decode_sidecar_of, encode_sidecar
from tieringd.formats.transactions import MarkerSearch
from tieringd.model.segment import NO_CRC, SegmentIndex

if TYPE_CHECKING:
    from tieringd.archive.archive_reader import ArchiveReader
    from tieringd.archive.spillover_manifests import SpilloverManifests
    from tieringd.formats.segment_scan import SegmentScan
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import AbortedTransaction, RemoteSegment
    from tieringd.storage.base import ObjectStore


def is_index_of(data: bytes, segment: RemoteSegment, partition: TopicIdPartition) -> bool:
    """Say whether *data* is just the index that the manifest names."""
    if len(data) != segment.index_size_bytes or segment.index_crc32c not in {NO_CRC, crc32c(data)}:
        return False
    try:
        decode_sidecar_of(data, segment, key=data_key(partition, segment))
    except CorruptDataError:
        return False
    return True


def renamed_by(segment: RemoteSegment, sidecar: bytes) -> RemoteSegment:
    """Return *segment* as it is named with *sidecar* for an index."""
    return replace(segment, index_size_bytes=len(sidecar), index_crc32c=crc32c(sidecar))


class DataIndexer:
    """Build indexes of data objects again. Reads only, and keeps no state."""

    def __init__(self, store: ObjectStore, reader: ArchiveReader, spillovers: SpilloverManifests) -> None:
        self._store = store
        self._reader = reader
        self._spillovers = spillovers

    async def from_data(self, manifest: PartitionManifest, segment: RemoteSegment) -> bytes | None:
        """
        Return an index of the segment's data object; None where that or a transaction's end is missing.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        found = await scan_data(self._store, manifest.partition, segment, index=None)
        if found.scan is None:
            return None
        aborted = await self._aborted(manifest, segment, found.scan)
        if aborted is None:
            return None
        return encode_sidecar(
            SegmentIndex(
                base_offset=segment.base_offset,
                last_offset=segment.last_offset,
                size_bytes=segment.size_bytes,
                crc32c=segment.crc32c,
                record_count=found.scan.record_count,
                batch_count=found.scan.batch_count,
                epochs=found.scan.epochs,
                aborted=aborted,
                entries=found.scan.entries,
            )
        )

    async def _aborted(
        self, manifest: PartitionManifest, segment: RemoteSegment, scan: SegmentScan
    ) -> tuple[AbortedTransaction, ...] | None:
        """Return every aborted transaction with data in the segment; None where the archive does not tell."""
        aborted = list(scan.aborted)
        first_offsets = dict(scan.tracker.open_transactions)
        if not first_offsets:
            return tuple(aborted)
        search = MarkerSearch(scan.tracker)
        expected = segment.next_offset
        try:
            pieces = self._spillovers.pieces(manifest, from_offset=expected)
            async with aclosing(pieces):
                async for piece in pieces:
                    for later in piece.segments:
                        if later.base_offset < expected:
                            continue
                        if later.base_offset > expected:
                            return None  # A marker may have been lost in the gap.
                        expected = later.next_offset
                        ended = await self._ended_in(manifest.partition, later, search)
                        aborted += [
                            one for one in ended if first_offsets.get(one.producer_id) == one.first_offset
                        ]
                        if not search.awaited:
                            return tuple(aborted)
        except (ObjectNotFound, CorruptDataError):
            return None
        return None

    async def _ended_in(
        self, partition: TopicIdPartition, segment: RemoteSegment, search: MarkerSearch
    ) -> list[AbortedTransaction]:
        """Take a later segment's transactions into *search*; return those that are aborted there."""
        key = data_key(partition, segment)
        found: list[AbortedTransaction] = []
        # Its index may be lost as well.
        async with aclosing(self._reader.batches_between(key, 0, segment.size_bytes)) as batches:
            async for batch in batches:
                if batch.header.is_control:
                    ended = search.note_marker(batch.header, control_type(batch.data))
                    found += [ended] if ended else []
                elif batch.header.is_transactional:
                    search.note_data(batch.header)
        return found
