"""
One look at a stored segment: its data object and its index, against what the manifest says of them.

A shallow look asks the store for sizes and checksums, and reads the index where the store tells no
checksum. A deep look reads every byte and believes no checksum but its own. Nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.archive.archive_reader import CHUNK_BYTES
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.formats.sidecar import decode_sidecar_of
from tieringd.model.segment import NO_CRC
from tieringd.policies.scrub import Seen, segment_findings
from tieringd.storage.blocking import in_thread

if TYPE_CHECKING:
    from tieringd.formats.segment_scan import SegmentScan
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment, SegmentIndex
    from tieringd.policies.scrub import Finding
    from tieringd.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class SegmentLook:
    """What one look found, and what it cost."""

    findings: tuple[Finding, ...]
    records: int
    """In the data object; 0 after a shallow look, or where anything is wrong."""
    requests: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class DataScan:
    """What reading a data object whole found."""

    seen: Seen
    scan: SegmentScan | None
    """Of its batches; None unless the object is just what the manifest says."""
    requests: int
    read_bytes: int


class _Cost:
    """What a look has asked of the store so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.read_bytes = 0


async def read_object(store: ObjectStore, key: str, *, size_bytes: int) -> bytes:
    """
    Return an object as it is stored, at most *size_bytes* of it.

    `get` would take a wrong checksum for an answer that was damaged on its way, and ask again.

    Raises:
        ObjectNotFound: There is no such object.
    """
    pieces: list[bytes] = []
    position = 0
    while position < size_bytes:
        wanted = min(CHUNK_BYTES, size_bytes - position)
        piece = await store.get_range(key, position=position, size_bytes=wanted)
        if not piece:
            break
        pieces.append(piece)
        position += len(piece)
    return b"".join(pieces)


class SegmentLooker:
    """Look at segments of one bucket. Keeps no state."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def look(self, partition: TopicIdPartition, segment: RemoteSegment, *, deep: bool) -> SegmentLook:
        """
        Return what is wrong with a segment's objects; what is missing is a finding, and no error.

        Raises:
            StorageUnavailable: The store does not answer; nothing is known.
        """
        cost = _Cost()
        index_seen, index = await self._look_at_index(partition, segment, cost, deep=deep)
        data_seen = await self._head(data_key(partition, segment), cost)
        scan: SegmentScan | None = None
        if deep and data_seen.size_bytes == segment.size_bytes:
            read = await scan_data(self._store, partition, segment, index=index)
            data_seen, scan = read.seen, read.scan
            cost.requests += read.requests
            cost.read_bytes += read.read_bytes
        if scan is not None and index is not None and not index_seen.content_fault:
            index_seen = Seen(index_seen.size_bytes, index_seen.crc32c, _disagreement(scan, index))
        findings = segment_findings(partition, segment, data=data_seen, index=index_seen)
        records = scan.record_count if scan is not None and not findings else 0
        return SegmentLook(findings, records, cost.requests, cost.read_bytes)

    async def _head(self, key: str, cost: _Cost) -> Seen:
        cost.requests += 1
        try:
            info = await self._store.head(key)
        except ObjectNotFound:
            return Seen(None)
        return Seen(info.size_bytes, info.crc32c)

    async def _look_at_index(
        self, partition: TopicIdPartition, segment: RemoteSegment, cost: _Cost, *, deep: bool
    ) -> tuple[Seen, SegmentIndex | None]:
        """Return what is known of the index; and the index, where it was read and is a sound one."""
        key = index_key(partition, segment)
        seen = await self._head(key, cost)
        is_told = seen.crc32c is not None and segment.index_crc32c != NO_CRC
        if seen.size_bytes != segment.index_size_bytes or (is_told and not deep):
            return seen, None
        try:
            data = await read_object(self._store, key, size_bytes=segment.index_size_bytes)
        except ObjectNotFound:
            return Seen(None), None
        cost.requests += 1
        cost.read_bytes += len(data)
        checksum = await in_thread(crc32c, data)
        if segment.index_crc32c not in {NO_CRC, checksum}:
            return Seen(len(data), checksum), None
        try:
            index = await in_thread(decode_sidecar_of, data, segment, key=key)
        except CorruptDataError as error:
            return Seen(len(data), checksum, error.message), None
        return Seen(len(data), checksum), index


async def scan_data(
    store: ObjectStore, partition: TopicIdPartition, segment: RemoteSegment, *, index: SegmentIndex | None
) -> DataScan:
    """
    Read a data object whole.

    *index* is its index, where there is one: a merged segment's entries are its parts', and are looked for.
    """
    key = data_key(partition, segment)
    scanner = SegmentScanner(
        segment.base_offset,
        segment.next_offset,
        index_positions=[entry.position for entry in index.entries] if index else (),
        source=key,
    )
    checksum = position = requests = 0
    held, fault = b"", ""
    while position < segment.size_bytes:
        wanted = min(CHUNK_BYTES, segment.size_bytes - position)
        requests += 1
        try:
            chunk = await store.get_range(key, position=position, size_bytes=wanted)
        except ObjectNotFound:
            return DataScan(Seen(None), None, requests, position)
        if not chunk:
            return DataScan(Seen(position), None, requests, position)
        position += len(chunk)
        checksum = await in_thread(crc32c, chunk, checksum)
        if fault:
            continue
        held += chunk
        try:
            held = held[await in_thread(scanner.feed, memoryview(held)) :]
        except CorruptDataError as error:
            fault = _in_words(error)
    scan = None
    if not fault:
        try:
            scan = scanner.finish(len(held))
        except CorruptDataError as error:
            fault = _in_words(error)
    is_right = checksum == segment.crc32c
    return DataScan(Seen(position, checksum, fault), scan if is_right else None, requests, position)


def _in_words(error: CorruptDataError) -> str:
    places = [
        f"{name} {value}"
        for name, value in (("byte", error.position), ("offset", error.offset))
        if value is not None
    ]
    return f"{error.message}, at {', '.join(places)}" if places else error.message


def _disagreement(scan: SegmentScan, index: SegmentIndex) -> str:
    """Return what an index tells otherwise than its data object; empty where nothing."""
    if (scan.record_count, scan.batch_count, scan.epochs) != (
        index.record_count,
        index.batch_count,
        index.epochs,
    ):
        return "the index counts other records, batches or epochs than the object holds"
    if scan.entries != index.entries:
        return "the index has entries that are not in the object"
    return ""
