"""
One stored segment, derived from its objects: the row that a manifest would have for it.

Its name, its size and its index give almost everything. The times of its first and last batches are read
from the data, a few kilobytes. A deep scan reads all of the data. If the index is missing or damaged,
all of the data is read anyway.

`LostIndexes` rebuilds missing indexes for a manifest that is being rebuilt. Data and index are stored
under the name that the new index gives them, because other bytes have other names. The old objects stay.
Storing the same again writes the same object.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from crc32c import crc32c

from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archive.rebuild.object_listing import ListedSegment, require_data_key
from tieringd.archive.scrub.data_scan import DataIndexer, renamed_by, scan_object
from tieringd.archive.scrub.segment_inspection import read_object
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import DataKey, data_key, index_key
from tieringd.formats.record_batch import HEADER_BYTES, LOG_APPEND_TIME, BatchHeader, parse_header
from tieringd.formats.segment_scan import SegmentScan, SegmentScanner
from tieringd.formats.sidecar import decode_sidecar
from tieringd.model.manifest import PartitionManifest
from tieringd.model.segment import NO_CRC, NO_TIMESTAMP, RemoteSegment, SegmentIndex
from tieringd.policies.manifest_rebuild import StoredSegment
from tieringd.storage.base import JoinSource, ObjectStore


class LostIndexes:
    """Rebuild indexes of one bucket's segments."""

    def __init__(self, store: ObjectStore, indexer: DataIndexer, joiner: ObjectJoiner) -> None:
        self._store = store
        self._indexer = indexer
        self._joiner = joiner

    async def remade(
        self, manifest: PartitionManifest, segment: RemoteSegment, *, write: bool
    ) -> RemoteSegment | None:
        """
        Return *segment* as it is named with its new index. With *write*, store its data and index too.

        None if the archive does not tell how a transaction in the segment ended: its marker is not in
        *manifest*, which must be the whole archive.

        Raises:
            StorageUnavailable: The store does not answer. Trying again is safe.
        """
        sidecar = await self._indexer.from_data(manifest, segment)
        if sidecar is None:
            return None
        named = renamed_by(segment, sidecar)
        if segment.index_crc32c == NO_CRC:
            # Its name does not depend on its index, and stays.
            named = replace(named, index_crc32c=NO_CRC)
        if write:
            partition = manifest.partition
            old, new = data_key(partition, segment), data_key(partition, named)
            if new != old:
                source = JoinSource(old, segment.size_bytes, segment.crc32c)
                await self._joiner.join(new, [source], crc32c=segment.crc32c)
            await self._store.put(index_key(partition, named), sidecar, crc32c=crc32c(sidecar))
        return named


@dataclass(frozen=True, slots=True)
class Unusable:
    """A data object that no manifest may name, and the reason."""

    key: str
    base_offset: int
    last_offset: int
    reason: str


async def stored_segment(
    store: ObjectStore, listed: ListedSegment, *, deep: bool
) -> StoredSegment | Unusable:
    """
    Return the stored segment. With *deep* all of its bytes are read and checked.

    Raises:
        StorageUnavailable: The store does not answer; the segment's state is unknown.
    """
    name = require_data_key(listed.key)
    if listed.size_bytes != name.size_bytes:
        return _unusable(
            listed, name, f"the object has {listed.size_bytes} bytes, but its name has another size"
        )
    try:
        index = await _index(store, listed, name)
        if index is None or deep:
            return await _scanned(store, listed, name, index)
        times = await _times(store, listed.key, index)
    except ObjectNotFound:
        return _unusable(listed, name, "the object was deleted after it was listed")
    except CorruptDataError as error:
        return _unusable(listed, name, f"the object is damaged: {error.message}")
    return _segment(listed, name, index, crc32c=index.crc32c, times=times, has_index=True)


async def _index(store: ObjectStore, listed: ListedSegment, name: DataKey) -> SegmentIndex | None:
    """Return the index, if it exists and matches everything that is known of the data object."""
    if listed.index_size_bytes is None:
        return None
    try:
        data = await read_object(store, f"{listed.key}.index", size_bytes=listed.index_size_bytes)
        index = decode_sidecar(data)
    except (ObjectNotFound, CorruptDataError):
        return None
    is_its_own = (index.base_offset, index.last_offset, index.size_bytes) == (
        name.base_offset,
        name.last_offset,
        name.size_bytes,
    )
    return index if is_its_own and name.index_crc32c in {NO_CRC, crc32c(data)} else None


async def _scanned(
    store: ObjectStore, listed: ListedSegment, name: DataKey, index: SegmentIndex | None
) -> StoredSegment | Unusable:
    found = await scan_object(
        store,
        listed.key,
        base_offset=name.base_offset,
        next_offset=name.last_offset + 1,
        size_bytes=name.size_bytes,
        index=index,
    )
    scan = found.scan
    if scan is None:
        fault = found.seen.content_fault or "the object is shorter than it should be"
        return _unusable(listed, name, f"the object is damaged: {fault}")
    if index is not None and index.crc32c != scan.crc32c:
        return _unusable(listed, name, "the object is damaged: its checksum is not the one in its index")
    times = (scan.base_timestamp_ms, scan.max_timestamp_ms)
    has_index = index is not None
    return _segment(listed, name, index or scan, crc32c=scan.crc32c, times=times, has_index=has_index)


async def _times(store: ObjectStore, key: str, index: SegmentIndex) -> tuple[int, int]:
    """
    Return the first batch's smallest timestamp and the segment's largest, read from its two ends.

    Raises:
        CorruptDataError: A batch there is damaged.
        ObjectNotFound: The object was deleted.
    """
    if not index.entries:
        return NO_TIMESTAMP, NO_TIMESTAMP
    last = index.entries[-1]
    size_bytes = index.size_bytes - last.position
    tail = await read_object(store, key, size_bytes=size_bytes, position=last.position)
    scanner = SegmentScanner(last.offset, index.last_offset + 1, source=key)
    left_bytes = len(tail) - scanner.feed(memoryview(tail))
    scan = scanner.finish(left_bytes)
    max_timestamp_ms = max(last.max_timestamp_ms, scan.max_timestamp_ms)
    first = tail if not last.position else await store.get_range(key, position=0, size_bytes=HEADER_BYTES)
    base_timestamp_ms = _base_timestamp_ms(parse_header(first))
    return scan.base_timestamp_ms if base_timestamp_ms is None else base_timestamp_ms, max_timestamp_ms


def _base_timestamp_ms(header: BatchHeader) -> int | None:
    """Return the smallest time of a batch, or None if it has none, in the way of `SegmentScanner`."""
    time_ms = header.base_timestamp_ms
    if header.timestamp_type == LOG_APPEND_TIME:
        time_ms = header.max_timestamp_ms
    elif header.has_delete_horizon:
        time_ms = min(time_ms, header.max_timestamp_ms)
    return time_ms if header.record_count and time_ms > NO_TIMESTAMP else None


def _segment(
    listed: ListedSegment,
    name: DataKey,
    told: SegmentIndex | SegmentScan,
    *,
    crc32c: int,
    times: tuple[int, int],
    has_index: bool,
) -> StoredSegment:
    return StoredSegment(
        RemoteSegment(
            base_offset=name.base_offset,
            last_offset=name.last_offset,
            size_bytes=name.size_bytes,
            crc32c=crc32c,
            base_timestamp_ms=times[0],
            max_timestamp_ms=times[1],
            leader_epoch=name.leader_epoch,
            writer_id=name.writer_id,
            uploaded_at_ms=listed.modified_ms,
            index_size_bytes=(listed.index_size_bytes or 0) if has_index else 0,
            index_crc32c=name.index_crc32c,
        ),
        epochs=told.epochs,
        aborted=told.aborted,
        has_index=has_index,
    )


def _unusable(listed: ListedSegment, name: DataKey, reason: str) -> Unusable:
    return Unusable(listed.key, name.base_offset, name.last_offset, reason)
