"""
Verifying an archive against its manifests: every object there, whole, and saying what it should.

A shallow look asks the store for each object's size and checksum. A deep look reads every
byte: each batch's CRC, each offset, the whole object's checksum, and the index's positions.
Nothing is changed; what is wrong is returned in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.model.segment import NO_CRC
from tieringd.services.archive_reader import CHUNK_BYTES

if TYPE_CHECKING:
    from tieringd.formats.segment_scan import SegmentScan
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment, SegmentIndex
    from tieringd.services.remote_log import RemoteLog
    from tieringd.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What was found of one partition."""

    partition: TopicIdPartition
    segments: int
    size_bytes: int
    records: int | None
    """None after a shallow look."""
    gap_offsets: int
    faults: tuple[str, ...]


class Verifier:
    """Compare manifests with objects. Reads only; one partition at a time."""

    def __init__(self, store: ObjectStore, remote_log: RemoteLog) -> None:
        self._store = store
        self._remote_log = remote_log

    async def verify(
        self, manifest: PartitionManifest, *, deep: bool, newest: int | None = None
    ) -> PartitionReport:
        """
        Return what is right and wrong with one partition's objects.

        *newest* looks only at the objects of so many segments at the archive's end.
        """
        faults = list(manifest.faults())
        records = 0
        rows = len(manifest.segments)
        first = 0 if newest is None else max(0, rows - newest)
        for segment in (manifest.segments[row] for row in range(first, rows)):
            try:
                await self._look(manifest.partition, segment)
                index = await self._remote_log.index_of(manifest.partition, segment)
                if deep:
                    records += (await self._read(manifest.partition, segment, index)).record_count
            except (ObjectNotFound, CorruptDataError) as error:
                faults.append(str(error))
        return PartitionReport(
            partition=manifest.partition,
            segments=rows,
            size_bytes=manifest.segments.total_bytes,
            records=records if deep else None,
            gap_offsets=sum(gap.next_offset - gap.base_offset for gap in manifest.gaps),
            faults=tuple(faults),
        )

    async def _look(self, partition: TopicIdPartition, segment: RemoteSegment) -> None:
        key = data_key(partition, segment)
        info = await self._store.head(key)
        if info.size_bytes != segment.size_bytes:
            raise CorruptDataError(
                f"the object has {info.size_bytes} bytes and the manifest says {segment.size_bytes}",
                source=key,
            )
        if info.crc32c is not None and info.crc32c != segment.crc32c:
            raise CorruptDataError(
                f"the object's checksum is {info.crc32c:08x} and the manifest says {segment.crc32c:08x}",
                source=key,
            )
        sidecar = await self._store.head(index_key(partition, segment))
        if sidecar.size_bytes != segment.index_size_bytes:
            raise CorruptDataError(
                f"the index has {sidecar.size_bytes} bytes and the manifest says {segment.index_size_bytes}",
                source=sidecar.key,
            )
        if sidecar.crc32c is not None and segment.index_crc32c not in {NO_CRC, sidecar.crc32c}:
            raise CorruptDataError(
                f"the index's checksum is {sidecar.crc32c:08x} and the manifest says "
                f"{segment.index_crc32c:08x}",
                source=sidecar.key,
            )

    async def _read(
        self, partition: TopicIdPartition, segment: RemoteSegment, index: SegmentIndex
    ) -> SegmentScan:
        """Read a data object whole, and compare all that is known of it."""
        key = data_key(partition, segment)
        scanner = SegmentScanner(segment.base_offset, segment.next_offset, source=key)
        checksum, position, held = 0, 0, b""
        while position < segment.size_bytes:
            chunk = await self._store.get_range(key, position=position, size_bytes=CHUNK_BYTES)
            if not chunk:
                raise CorruptDataError(
                    f"the object ends after {position} bytes", source=key, position=position
                )
            position += len(chunk)
            checksum = crc32c(chunk, checksum)
            held += chunk
            consumed = scanner.feed(memoryview(held))
            held = held[consumed:]
        scan = scanner.finish(len(held))
        if checksum != segment.crc32c:
            raise CorruptDataError(
                f"the bytes have checksum {checksum:08x} and the manifest says {segment.crc32c:08x}",
                source=key,
            )
        if (scan.record_count, scan.batch_count, scan.epochs) != (
            index.record_count,
            index.batch_count,
            index.epochs,
        ):
            raise CorruptDataError(
                "the index counts other records, batches or epochs than the object holds",
                source=index_key(partition, segment),
            )
        if scan.entries != index.entries:
            raise CorruptDataError(
                "the index has entries that are not in the object", source=index_key(partition, segment)
            )
        return scan
