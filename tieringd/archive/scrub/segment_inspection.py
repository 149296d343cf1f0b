"""
Check a stored segment: its data object and its index, against the manifest.

A shallow check asks the store for sizes and checksums, and reads the index if the store reports no checksum.
A deep check reads every byte instead, and trusts no checksum but its own. Nothing is changed.

`Verifier` verifies an archive against its manifests, by a check of each segment. It takes the given
manifest as it is. For a manifest that may change meanwhile there is `archive.scrub.partition_scrub`.
Faults are returned in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from crc32c import crc32c

from tieringd.archive.archive_reader import CHUNK_BYTES
from tieringd.archive.scrub.data_scan import scan_data
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.segment_scan import SegmentScan
from tieringd.formats.sidecar import decode_sidecar_of
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_CRC, RemoteSegment, SegmentIndex
from tieringd.policies.scrub import Finding, ObjectFacts, segment_findings
from tieringd.storage.base import ObjectStore
from tieringd.storage.threads import in_thread


@dataclass(frozen=True, slots=True)
class SegmentInspection:
    """The result of one check, and its cost."""

    findings: tuple[Finding, ...]
    records: int
    """Records in the data object; 0 after a shallow check, or if anything is wrong."""
    batches: int
    """Batches in the data object; 0 after a shallow check, or if anything is wrong."""
    requests: int
    read_bytes: int


class _Cost:
    """The requests and bytes of a check so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.read_bytes = 0


async def read_object(store: ObjectStore, key: str, *, size_bytes: int, position: int = 0) -> bytes:
    """
    Return at most *size_bytes* of a stored object, from byte *position* on.

    `get` is not used: it takes a wrong checksum for a damaged transfer, and asks again.

    Raises:
        ObjectNotFound: There is no such object.
    """
    pieces: list[bytes] = []
    end = position + size_bytes
    while position < end:
        wanted = min(CHUNK_BYTES, end - position)
        piece = await store.get_range(key, position=position, size_bytes=wanted)
        pieces.append(piece)
        position += len(piece)
        if len(piece) < wanted:
            break
    return b"".join(pieces)


class SegmentInspector:
    """Check segments of one bucket. Keeps no state."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def inspect(
        self, partition: TopicIdPartition, segment: RemoteSegment, *, deep: bool
    ) -> SegmentInspection:
        """
        Return the faults of a segment's objects. A missing object is a finding, not an error.

        Raises:
            StorageUnavailable: The store does not answer; the state is unknown.
        """
        cost = _Cost()
        index_seen, index = await self._inspect_index(partition, segment, cost, deep=deep)
        if deep:
            read = await scan_data(self._store, partition, segment, index=index)
            data_seen, scan = read.seen, read.scan
            cost.requests += read.requests
            cost.read_bytes += read.read_bytes
        else:
            data_seen, scan = await self._head(data_key(partition, segment), cost), None
        if scan is not None and index is not None:
            index_seen = ObjectFacts(index_seen.size_bytes, index_seen.crc32c, _disagreement(scan, index))
        findings = segment_findings(partition, segment, data=data_seen, index=index_seen)
        is_sound = scan is not None and not findings
        return SegmentInspection(
            findings,
            scan.record_count if scan and is_sound else 0,
            scan.batch_count if scan and is_sound else 0,
            cost.requests,
            cost.read_bytes,
        )

    async def _head(self, key: str, cost: _Cost) -> ObjectFacts:
        cost.requests += 1
        try:
            info = await self._store.head(key)
        except ObjectNotFound:
            return ObjectFacts(None)
        return ObjectFacts(info.size_bytes, info.crc32c)

    async def _inspect_index(
        self, partition: TopicIdPartition, segment: RemoteSegment, cost: _Cost, *, deep: bool
    ) -> tuple[ObjectFacts, SegmentIndex | None]:
        """Return what is known of the index, and the index itself if it was read and is sound."""
        key = index_key(partition, segment)
        if not deep:
            seen = await self._head(key, cost)
            has_checksum = seen.crc32c is not None and segment.index_crc32c != NO_CRC
            if has_checksum or seen.size_bytes != segment.index_size_bytes:
                return seen, None
        cost.requests += 1
        try:
            # One byte more than there should be, to detect a longer object.
            data = await read_object(self._store, key, size_bytes=segment.index_size_bytes + 1)
        except ObjectNotFound:
            return ObjectFacts(None), None
        cost.read_bytes += len(data)
        if len(data) != segment.index_size_bytes:
            is_longer = len(data) > segment.index_size_bytes
            return await self._head(key, cost) if is_longer else ObjectFacts(len(data)), None
        checksum = await in_thread(crc32c, data)
        if segment.index_crc32c not in {NO_CRC, checksum}:
            return ObjectFacts(len(data), checksum), None
        try:
            index = await in_thread(decode_sidecar_of, data, segment, key=key)
        except CorruptDataError as error:
            return ObjectFacts(len(data), checksum, error.message), None
        return ObjectFacts(len(data), checksum), index


def _disagreement(scan: SegmentScan, index: SegmentIndex) -> str:
    """Return how an index contradicts its data object; empty if it does not."""
    if (scan.record_count, scan.batch_count, scan.epochs) != (
        index.record_count,
        index.batch_count,
        index.epochs,
    ):
        return "the index counts other records, batches or epochs than the object has"
    if scan.entries != index.entries:
        return "the index has entries that are not in the object"
    return ""


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The result of verifying one partition."""

    partition: TopicIdPartition
    segments: int
    size_bytes: int
    records: int | None
    """None after a shallow check."""
    gap_offsets: int
    faults: tuple[str, ...]


class Verifier:
    """Compare manifests with objects. Reads only; one partition at a time."""

    def __init__(self, store: ObjectStore, spillovers: SpilloverManifests) -> None:
        self._inspector = SegmentInspector(store)
        self._spillovers = spillovers

    async def verify(
        self, manifest: PartitionManifest, *, deep: bool, newest: int | None = None
    ) -> PartitionReport:
        """
        Verify one partition's objects.

        With *newest* only the objects of this many segments at the archive's end are checked.
        """
        faults = list(manifest.faults())
        try:
            wanted = manifest.live_offset if newest is not None and newest <= len(manifest.segments) else None
            manifest = await self._spillovers.with_history(manifest, from_offset=wanted)
        except (ObjectNotFound, CorruptDataError) as error:
            faults.append(f"the partition's older segments cannot be checked: {error}")
        records = 0
        rows = len(manifest.segments)
        first = 0 if newest is None else max(0, rows - newest)
        for segment in (manifest.segments[row] for row in range(first, rows)):
            inspection = await self._inspector.inspect(manifest.partition, segment, deep=deep)
            records += inspection.records
            faults += [str(finding) for finding in inspection.findings]
        return PartitionReport(
            partition=manifest.partition,
            segments=manifest.segment_count,
            size_bytes=manifest.size_bytes,
            records=records if deep else None,
            gap_offsets=manifest.gap_offsets,
            faults=tuple(faults),
        )
