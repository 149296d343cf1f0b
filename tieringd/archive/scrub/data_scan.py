"""
A full scan of a data object: every batch is checked, and the content of its index is computed.

The next bytes are fetched while the last ones are checked. Only the one batch that crosses the end of a
fetch is copied. The scan asks for one byte more than the object should have, so that a longer object is
detected without a request of its own.

`DataIndexer` rebuilds a lost index from its data object. The new index contains none of the broker's own
side files: a broker builds them if they are missing. So it has other bytes than the lost one, and the
data object gets another name with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from crc32c import crc32c

from tieringd.archive.archive_reader import ArchiveReader
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.formats.records import control_type
from tieringd.formats.segment_scan import SegmentScan, SegmentScanner
from tieringd.formats.sidecar import decode_sidecar_of, encode_sidecar
from tieringd.formats.transactions import MarkerSearch
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_CRC, AbortedTransaction, RemoteSegment, SegmentIndex
from tieringd.policies.scrub import ObjectFacts
from tieringd.storage.base import ObjectStore
from tieringd.storage.threads import in_thread

SCAN_BYTES = 4 << 20
"""How much is fetched at once: large enough for a distant store, small enough for the processor's cache."""


@dataclass(frozen=True, slots=True)
class DataScan:
    """The result of scanning a data object."""

    seen: ObjectFacts
    scan: SegmentScan | None
    """The scan of its batches; None unless the object is exactly as expected."""
    requests: int
    read_bytes: int


async def scan_data(
    store: ObjectStore, partition: TopicIdPartition, segment: RemoteSegment, *, index: SegmentIndex | None
) -> DataScan:
    """
    Scan the whole data object of *segment*.

    *index* is its index, if there is one. A merged segment's index has the entries of its parts, so the
    scan searches for entries at the positions in *index*.

    Raises:
        StorageUnavailable: The store does not answer; the object's state is unknown.
    """
    found = await scan_object(
        store,
        data_key(partition, segment),
        base_offset=segment.base_offset,
        next_offset=segment.next_offset,
        size_bytes=segment.size_bytes,
        index=index,
    )
    is_right = found.scan is not None and found.scan.crc32c == segment.crc32c
    return found if is_right else DataScan(found.seen, None, found.requests, found.read_bytes)


async def scan_object(
    store: ObjectStore,
    key: str,
    *,
    base_offset: int,
    next_offset: int,
    size_bytes: int,
    index: SegmentIndex | None = None,
) -> DataScan:
    """
    Scan an object that should have *size_bytes* bytes of batches, with offsets up to *next_offset*.

    Raises:
        StorageUnavailable: The store does not answer; the object's state is unknown.
    """
    scanner = SegmentScanner(
        base_offset,
        next_offset,
        index_positions=[entry.position for entry in index.entries] if index else (),
        source=key,
    )
    held, fault, requests, read_bytes = b"", "", 0, 0
    try:
        async with aclosing(_chunks(store, key, size_bytes + 1)) as chunks:
            async for chunk in chunks:
                requests += 1
                read_bytes += len(chunk)
                held = await in_thread(_fed, scanner, held, chunk)
        if read_bytes == size_bytes:
            scan = scanner.finish(len(held))
            return DataScan(ObjectFacts(read_bytes, scan.crc32c), scan, requests, read_bytes)
        actual_bytes = read_bytes
    except ObjectNotFound:
        return DataScan(ObjectFacts(None), None, requests + 1, read_bytes)
    except CorruptDataError as error:
        fault = _in_words(error)
        actual_bytes = size_bytes + 1
    if actual_bytes > size_bytes:
        # The object's actual size is not known yet.
        requests += 1
        try:
            actual_bytes = (await store.head(key)).size_bytes
        except ObjectNotFound:
            return DataScan(ObjectFacts(None), None, requests, read_bytes)
    return DataScan(ObjectFacts(actual_bytes, content_fault=fault), None, requests, read_bytes)


async def _chunks(store: ObjectStore, key: str, end: int) -> AsyncGenerator[bytes]:
    """Yield an object's bytes up to *end*, or to its own end. One fetch is ahead of the caller."""

    def fetch(position: int) -> asyncio.Task[bytes]:
        size_bytes = min(SCAN_BYTES, end - position)
        return asyncio.get_running_loop().create_task(
            store.get_range(key, position=position, size_bytes=size_bytes)
        )

    position = 0
    ahead: asyncio.Task[bytes] | None = fetch(0)
    try:
        while ahead is not None:
            chunk = await ahead
            is_last = len(chunk) < min(SCAN_BYTES, end - position)
            position += len(chunk)
            ahead = None if is_last or position >= end else fetch(position)
            yield chunk
    finally:
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)


def _fed(scanner: SegmentScanner, held: bytes, chunk: bytes) -> bytes:
    """Feed *held* and then *chunk* to the scanner. Return the bytes to hold for the next call. Blocks."""
    view = memoryview(chunk)
    while held and view:
        missing = max(1, scanner.wanted_bytes - len(held))
        held += view[:missing]
        view = view[missing:]
        held = held[scanner.feed(memoryview(held)) :]
    if held:
        return held
    return bytes(view[scanner.feed(view) :])


def _in_words(error: CorruptDataError) -> str:
    places = [
        f"{name} {value}"
        for name, value in (("byte", error.position), ("offset", error.offset))
        if value is not None
    ]
    return f"{error.message}, at {', '.join(places)}" if places else error.message


def is_index_of(data: bytes, segment: RemoteSegment, partition: TopicIdPartition) -> bool:
    """Say whether *data* is exactly the index that the manifest names."""
    if len(data) != segment.index_size_bytes or segment.index_crc32c not in {NO_CRC, crc32c(data)}:
        return False
    try:
        decode_sidecar_of(data, segment, key=data_key(partition, segment))
    except CorruptDataError:
        return False
    return True


def renamed_by(segment: RemoteSegment, sidecar: bytes) -> RemoteSegment:
    """Return *segment* with the name that it has with *sidecar* as its index."""
    return replace(segment, index_size_bytes=len(sidecar), index_crc32c=crc32c(sidecar))


class DataIndexer:
    """Rebuild indexes of data objects. Reads only, and keeps no state."""

    def __init__(self, store: ObjectStore, reader: ArchiveReader, spillovers: SpilloverManifests) -> None:
        self._store = store
        self._reader = reader
        self._spillovers = spillovers

    async def from_data(self, manifest: PartitionManifest, segment: RemoteSegment) -> bytes | None:
        """
        Return an index of the segment's data object, or None if the data or a transaction's end is missing.

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
        """Return every aborted transaction with data in the segment; None if the archive does not tell."""
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
                            return None  # A marker may be lost in the gap.
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
        """Feed a later segment's transactions to *search*. Return those that are aborted there."""
        key = data_key(partition, segment)
        found: list[AbortedTransaction] = []
        # Reads without an index, because that may be lost as well.
        async with aclosing(self._reader.batches_between(key, 0, segment.size_bytes)) as batches:
            async for batch in batches:
                if batch.header.is_control:
                    ended = search.note_marker(batch.header, control_type(batch.data))
                    found += [ended] if ended else []
                elif batch.header.is_transactional:
                    search.note_data(batch.header)
        return found
