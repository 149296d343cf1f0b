"""
Read records of the archive: by offset or by time, in either isolation level.

Records come in offset order, from one segment after another. Each recorded gap in the range is reported
to the caller, never passed over silently.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Final

from tieringd.archive.archive_reader import ArchiveReader, Batch, Indexes, offset_at_or_after_time
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import CorruptDataError, UnpackedTooLarge
from tieringd.formats.compression import MAX_DECOMPRESSED_BYTES
from tieringd.formats.object_keys import data_key
from tieringd.formats.record_batch import LOG_APPEND_TIME, BatchHeader
from tieringd.formats.records import Record, iter_records
from tieringd.formats.transactions import ReadCommittedFilter
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import RemoteSegment, SegmentIndex
from tieringd.storage.threads import in_thread

_LOOKUP_BYTES_MAX: Final = 64 << 20
"""How many bytes a batch may unpack to when a timestamp is looked up."""


class RecordReader:
    """Read the records that a manifest names. Keeps no state; readers may run side by side."""

    def __init__(self, indexes: Indexes, reader: ArchiveReader, spillovers: SpilloverManifests) -> None:
        self._indexes = indexes
        self._reader = reader
        self._spillovers = spillovers

    async def records(
        self,
        manifest: PartitionManifest,
        *,
        from_offset: int,
        read_committed: bool,
        on_gap: Callable[[Gap], None],
    ) -> AsyncGenerator[Record]:
        """
        Yield the records from *from_offset*, or the archive's start if that is later, to the archive's end.

        With *read_committed*, records of aborted transactions are left out. Undecided records are never
        in the archive. Control records are not yielded.

        *on_gap* is called with each recorded gap, in offset order between the records.

        Raises:
            ObjectNotFound: A segment was deleted. Read the manifest again and go on.
            CorruptDataError: Stored bytes are damaged. The error names the object and position.
        """
        from_offset = max(from_offset, manifest.start_offset)
        async with aclosing(self._spillovers.pieces(manifest, from_offset=from_offset)) as pieces:
            async for piece in pieces:
                gaps = [gap for gap in piece.gaps if gap.last_offset >= from_offset]
                for row in range(piece.segments.row_at_or_after(from_offset), len(piece.segments)):
                    segment = piece.segments[row]
                    while gaps and gaps[0].base_offset < segment.base_offset:
                        on_gap(gaps.pop(0))
                    async for record in self._segment_records(
                        piece, segment, from_offset=from_offset, read_committed=read_committed
                    ):
                        yield record
                for gap in gaps:
                    on_gap(gap)

    async def first_offset(self, manifest: PartitionManifest) -> int | None:
        """Return the first offset of the first segment that can be read, or None if there is no segment."""
        async with aclosing(self._spillovers.pieces(manifest)) as pieces:
            async for piece in pieces:
                if piece.segments:
                    return max(piece.start_offset, piece.segments[0].base_offset)
        return None

    async def latest_record(self, manifest: PartitionManifest) -> Record | None:
        """
        Return the first record with the largest timestamp, or None if no record has one.

        The marker that ends a transaction counts as a record, as in Kafka's answer for MAX_TIMESTAMP. It is
        usually later than the records of its transaction.
        """
        latest_ms = await self._latest_timestamp_ms(manifest)
        found = await self._record_at(manifest, latest_ms)
        if found is None and latest_ms is not None:
            # The record is one that a user has deleted, in a segment of which a part is left.
            found = await self._record_at(manifest, await self._latest_left_ms(manifest))
        return found

    async def _record_at(self, manifest: PartitionManifest, timestamp_ms: int | None) -> Record | None:
        """Return the first record or marker with *timestamp_ms* or later; None without a time in it."""
        if timestamp_ms is None or timestamp_ms < 0:
            return None
        found = await self._first_at(manifest, timestamp_ms, reads_record=True, has_markers=True)
        assert not isinstance(found, int), "the record was asked for"
        return found

    async def _latest_left_ms(self, manifest: PartitionManifest) -> int | None:
        """Return the largest timestamp from the start of the archive on, which may be inside a segment."""
        times: list[int] = []
        async with aclosing(self._spillovers.pieces(manifest)) as pieces:
            async for piece in pieces:
                for segment in piece.segments:
                    if segment.base_offset < manifest.start_offset:
                        times += await self._times_after_start(manifest, segment)
                    elif segment.next_offset > manifest.records_end:
                        times += await self._times_before_end(manifest, segment)
                    else:
                        times.append(segment.max_timestamp_ms)
        return max(times, default=None)

    async def _times_after_start(self, manifest: PartitionManifest, segment: RemoteSegment) -> list[int]:
        """Return timestamps of *segment* from the start of the archive on, which is inside it."""
        index, start_offset = await self._indexes.index_of(manifest.partition, segment), manifest.start_offset
        key, times = data_key(manifest.partition, segment), list[int]()
        async with aclosing(self._reader.headers(key, index, from_offset=start_offset)) as headers:
            async for one in headers:
                header = one.header
                if header.base_offset >= start_offset:
                    times.append(header.max_timestamp_ms)
                elif header.next_offset > start_offset:
                    batch = one.batch or await self._batch(key, one.position, header.size_bytes)
                    times += await in_thread(_latest_time_in, batch, key, start_offset)
        return times

    async def _latest_timestamp_ms(self, manifest: PartitionManifest) -> int | None:
        """Return the largest timestamp of any record, or None if there is no segment."""
        names = await self._spillovers.names(manifest, from_offset=manifest.start_offset)
        times = [name.max_timestamp_ms for name in names]
        segments = manifest.segments
        if segments and segments[-1].next_offset > manifest.records_end:
            times += await self._times_before_end(manifest, segments[-1])
            segments = segments.head(len(segments) - 1)
        live = segments.latest_timestamp_ms
        return max(times if live is None else [*times, live], default=None)

    async def _times_before_end(self, manifest: PartitionManifest, segment: RemoteSegment) -> list[int]:
        """Return largest timestamps of *segment* before the end of the archive, which is inside it."""
        index, end_offset = await self._indexes.index_of(manifest.partition, segment), manifest.records_end
        # The entry of the batch at which the scan begins counts that batch too, which may cross the end.
        times = [entry.max_timestamp_ms for entry in index.entries if entry.offset < end_offset][:-1]
        headers = self._reader.headers(
            data_key(manifest.partition, segment), index, from_offset=end_offset - 1
        )
        async with aclosing(headers):
            async for one in headers:
                if one.header.next_offset > end_offset:
                    break
                times.append(one.header.max_timestamp_ms)
        return times

    async def offset_for_time(self, manifest: PartitionManifest, timestamp_ms: int) -> int:
        """
        Return the offset of the first record with *timestamp_ms* or later.

        If no archived record is as late, this is the archive's next offset.
        """
        found = await self.first_record_at(manifest, timestamp_ms)
        return manifest.next_offset if found is None else found.offset

    async def first_record_at(self, manifest: PartitionManifest, timestamp_ms: int) -> Record | None:
        """Return the first record with *timestamp_ms* or later, or None if no archived record is as late."""
        found = await self._first_at(manifest, timestamp_ms, reads_record=True)
        assert not isinstance(found, int), "the record was asked for"
        return found

    async def first_offset_at(self, manifest: PartitionManifest, timestamp_ms: int) -> int | None:
        """
        Return the offset of the first record with *timestamp_ms* or later, or None if no record is as late.

        A large batch is not read if its header tells the offset.
        """
        found = await self._first_at(manifest, timestamp_ms, reads_record=False)
        return found.offset if isinstance(found, Record) else found

    async def _first_at(
        self,
        manifest: PartitionManifest,
        timestamp_ms: int,
        *,
        reads_record: bool,
        has_markers: bool = False,
    ) -> Record | int | None:
        """
        Return the first record as late as the time; without *reads_record*, its offset alone may do.

        With *has_markers* the marker that ends a transaction counts as a record.
        """
        async with aclosing(self._spillovers.pieces(manifest, reaching_ms=timestamp_ms)) as pieces:
            async for piece in pieces:
                for row in piece.segments.rows_reaching(timestamp_ms):
                    segment = piece.segments[row]
                    found = await self._first_in(
                        piece, segment, timestamp_ms, reads_record=reads_record, has_markers=has_markers
                    )
                    if found is not None:
                        return found
        return None

    async def _first_in(
        self,
        manifest: PartitionManifest,
        segment: RemoteSegment,
        timestamp_ms: int,
        *,
        reads_record: bool,
        has_markers: bool,
    ) -> Record | int | None:
        index = await self._indexes.index_of(manifest.partition, segment)
        key = data_key(manifest.partition, segment)
        from_offset = max(offset_at_or_after_time(index, timestamp_ms), manifest.start_offset)
        latest_ms = {entry.position: entry.max_timestamp_ms for entry in index.entries}
        end_offset = manifest.records_end
        async with aclosing(self._reader.headers(key, index, from_offset=from_offset)) as headers:
            async for one in headers:
                header, batch = one.header, one.batch
                if header.base_offset >= end_offset:
                    break
                if (header.is_control and not has_markers) or header.last_offset < from_offset:
                    continue
                # A header alone has no checksum. The index has one, and says whether the batch may be late.
                is_late = header.max_timestamp_ms >= timestamp_ms
                is_certain = batch is not None or latest_ms.get(one.position, timestamp_ms) < timestamp_ms
                if not is_late and is_certain:
                    continue
                is_known = is_late and from_offset <= header.base_offset and _begins_at(header, timestamp_ms)
                if is_known and not reads_record:
                    return header.base_offset
                batch = batch or await self._batch(key, one.position, header.size_bytes)
                found = await in_thread(_first_record_in, batch, key, from_offset, timestamp_ms)
                if found is not None and found.offset < end_offset:
                    return found
        return None

    async def _batch(self, key: str, position: int, size_bytes: int) -> Batch:
        batches = self._reader.batches_between(key, position, position + size_bytes)
        async with aclosing(batches):
            return await anext(batches)

    async def _segment_records(
        self, manifest: PartitionManifest, segment: RemoteSegment, *, from_offset: int, read_committed: bool
    ) -> AsyncGenerator[Record]:
        index = await self._indexes.index_of(manifest.partition, segment)
        async for record in self._records_of(
            manifest, segment, index, from_offset=from_offset, read_committed=read_committed
        ):
            yield record

    async def _records_of(
        self,
        manifest: PartitionManifest,
        segment: RemoteSegment,
        index: SegmentIndex,
        *,
        from_offset: int,
        read_committed: bool,
    ) -> AsyncGenerator[Record]:
        key = data_key(manifest.partition, segment)
        wanted = ReadCommittedFilter(index.aborted) if read_committed else None
        end_offset = manifest.records_end
        async with aclosing(self._reader.batches(key, index, from_offset=from_offset)) as batches:
            async for batch in batches:
                if batch.header.base_offset >= end_offset:
                    return
                if batch.header.is_control or (wanted is not None and not wanted.accepts(batch.header)):
                    continue
                for record in _records_in(batch, key):
                    if from_offset <= record.offset < end_offset:
                        yield record


def _begins_at(header: BatchHeader, timestamp_ms: int) -> bool:
    """Say whether the first record of a batch has the base offset, and a time of *timestamp_ms* or later."""
    if header.record_count != header.last_offset_delta + 1:
        # Compaction may have removed the first record.
        return False
    if header.timestamp_type == LOG_APPEND_TIME:
        return header.max_timestamp_ms >= timestamp_ms
    return not header.has_delete_horizon and header.base_timestamp_ms >= timestamp_ms


def _first_record_in(batch: Batch, key: str, from_offset: int, timestamp_ms: int) -> Record | None:
    """
    Return the first record of a batch from *from_offset* on with *timestamp_ms* or later.

    A batch that unpacks to more than `_LOOKUP_BYTES_MAX` is not unpacked: its first offset is returned, so
    that a reader begins a little earlier. A batch of a few kilobytes may unpack to gigabytes.
    """
    try:
        for record in _records_in(batch, key, limit_bytes=_LOOKUP_BYTES_MAX):
            if record.offset >= from_offset and record.timestamp_ms >= timestamp_ms:
                return record
    except UnpackedTooLarge:
        header = batch.header
        offset = max(from_offset, header.base_offset)
        return Record(offset, max(timestamp_ms, header.base_timestamp_ms), 0, None, None, ())
    return None


def _latest_time_in(batch: Batch, key: str, from_offset: int) -> list[int]:
    """Return the largest timestamp of the records from *from_offset* on, in a list; an empty one without."""
    try:
        left = [
            record.timestamp_ms
            for record in _records_in(batch, key, limit_bytes=_LOOKUP_BYTES_MAX)
            if record.offset >= from_offset
        ]
    except UnpackedTooLarge:
        return [batch.header.max_timestamp_ms]
    return [max(left)] if left else []


def _records_in(batch: Batch, key: str, *, limit_bytes: int = MAX_DECOMPRESSED_BYTES) -> Iterator[Record]:
    try:
        yield from iter_records(batch.data, limit_bytes=limit_bytes)
    except UnpackedTooLarge:
        raise
    except CorruptDataError as error:
        raise CorruptDataError(
            error.message, source=key, position=batch.position, offset=batch.header.base_offset
        ) from error
