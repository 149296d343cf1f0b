"""
An index that was lost, made again: from the local log where that is the same still, else from the data.

From the local log comes the very same index, with the broker's own side files in it. From the data object
comes one without these; a broker builds them when it finds none. It has other bytes then, so it needs
another name, and a commit: that is what an `IndexChange` is for.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog
from crc32c import crc32c

from tieringd.errors import CorruptDataError, LocalFileError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.formats.records import control_type
from tieringd.formats.sidecar import decode_sidecar_of, encode_sidecar
from tieringd.formats.transactions import MarkerSearch
from tieringd.model.reindexing import reindexed
from tieringd.model.segment import NO_CRC, SegmentIndex, SegmentSlice
from tieringd.services.scrub.segment_look import read_object, scan_data
from tieringd.services.segment_copier import local_index
from tieringd.storage.blocking import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.archive.archive_reader import ArchiveReader
    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archive.spillover_manifests import SpilloverManifests
    from tieringd.broker.layout import Layout
    from tieringd.formats.segment_scan import SegmentScan
    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import AbortedTransaction, RemoteSegment
    from tieringd.services.claim import Claim
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class IndexChange:
    """A segment whose data is stored once more, beside an index of other bytes; see `ManifestChange`."""

    old: RemoteSegment
    new: RemoteSegment
    now_ms: Callable[[], int]

    async def commit(self, claim: Claim, stored: StoredManifest) -> StoredManifest:
        """
        Name the new objects in the place of the old ones, where these are still named.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The claim reads it again; then this may be called again.
        """
        manifest = stored.existing
        if manifest.segments.covering(self.old.base_offset) != self.old:
            return stored
        committed = await claim.commit(stored, reindexed(manifest, self.old, self.new, now_ms=self.now_ms()))
        log.info(
            "segment has a new index",
            topic=manifest.partition.topic,
            partition=manifest.partition.partition,
            base_offset=self.old.base_offset,
        )
        return committed


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


class IndexRebuilder:
    """Build indexes of segments again. Reads only, and keeps no state."""

    def __init__(
        self, store: ObjectStore, reader: ArchiveReader, spillovers: SpilloverManifests, *, layout: Layout
    ) -> None:
        self._store = store
        self._reader = reader
        self._spillovers = spillovers
        self._layout = layout

    async def from_log(
        self, partition: TopicIdPartition, segment: RemoteSegment, log: LocalLog
    ) -> bytes | None:
        """Return the segment's index from the local log, if that gives the very same; else None."""
        part = _slice_of(segment, log)
        if part is None:
            return None
        try:
            index = await in_thread(local_index, self._layout, partition, log, part)
        except (LocalFileError, CorruptDataError):
            return None  # The log is not what it was, or not all there: the data object is left.
        sidecar = encode_sidecar(index) if index else b""
        return sidecar if is_index_of(sidecar, segment, partition) else None

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
        sidecar = await read_object(self._store, f"{key}.index", size_bytes=segment.index_size_bytes)
        index = decode_sidecar_of(sidecar, segment, key=key)
        found: list[AbortedTransaction] = []
        async with aclosing(self._reader.batches(key, index, from_offset=segment.base_offset)) as batches:
            async for batch in batches:
                if batch.header.is_control:
                    ended = search.note_marker(batch.header, control_type(batch.data))
                    found += [ended] if ended else []
                elif batch.header.is_transactional:
                    search.note_data(batch.header)
        return found


def _slice_of(segment: RemoteSegment, log: LocalLog) -> SegmentSlice | None:
    """Return the part of a local segment that *segment* was copied from; None where there is none."""
    for local in log.segments:
        ends_after = local.next_offset is None or local.next_offset >= segment.next_offset
        if local.base_offset <= segment.base_offset and ends_after:
            return SegmentSlice(
                local,
                segment.base_offset,
                segment.next_offset,
                is_open=local.next_offset != segment.next_offset,
            )
    return None
