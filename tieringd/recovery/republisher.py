"""
Writing a partition's archived records into another cluster, with offsets of its own.

Records are read in order and written in blocks; each block is written together with the mark after it,
or not at all. What an attempt ends with is where the next one begins. A block is read before its
transaction begins, so that a store that is slow holds no transaction open.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from tieringd.errors import ObjectNotFound
from tieringd.formats.compression import Codec
from tieringd.formats.object_keys import data_key
from tieringd.reading.history import LogReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieringd.archive.archive_reader import ArchiveReader
    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.archive.record_reader import RecordReader
    from tieringd.archiving.remote_log import RemoteLog
    from tieringd.formats.records import Record
    from tieringd.formats.recovery_mark import RecoveryMark
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.manifest_parts import Gap
    from tieringd.model.partition import TopicIdPartition
    from tieringd.reading.history import History

BLOCK_BYTES = 8 << 20
BLOCK_RECORDS = 10_000
"""Of a block, whichever is reached first: it is held in memory, and is one transaction."""
_RECORD_OVERHEAD_BYTES = 64
_PEEK_BYTES = 64 << 10


async def first_codec(remote_log: RemoteLog, reader: ArchiveReader, manifest: PartitionManifest) -> Codec:
    """
    Return how the first batch of a partition's newest segment is compressed.

    NONE without a batch, or where that segment is not there any more.
    """
    with suppress(ObjectNotFound):
        return await _first_codec(remote_log, reader, manifest)
    return Codec.NONE


async def _first_codec(remote_log: RemoteLog, reader: ArchiveReader, manifest: PartitionManifest) -> Codec:
    if manifest.segments:
        segment = manifest.segments[len(manifest.segments) - 1]
        index = await remote_log.index_of(manifest.partition, segment)
        batches = reader.batches(
            data_key(manifest.partition, segment),
            index,
            from_offset=segment.base_offset,
            chunk_bytes=_PEEK_BYTES,
        )
        async with aclosing(batches):
            async for batch in batches:
                if not batch.header.is_control:
                    return Codec(batch.header.codec)
    return Codec.NONE


class RecordWriter(Protocol):
    """What records are written to; see `broker.kafka_target.TargetWriter`."""

    async def write(self, partition: int, records: Sequence[Record], mark: RecoveryMark) -> RecoveryMark:
        """Write *records* and *mark* together; return the mark with where they are now."""


@dataclass(frozen=True, slots=True)
class RepublishedPartition:
    """What was written of one partition."""

    partition: TopicIdPartition
    mark: RecoveryMark
    """Of all attempts together."""
    records: int
    """Of this attempt."""
    gaps: tuple[Gap, ...]
    """Offsets that nobody has any more, as far as this attempt has met them."""


@dataclass(slots=True)
class _Block:
    records: list[Record] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.size_bytes += len(record.key or b"") + len(record.value or b"") + _RECORD_OVERHEAD_BYTES
        self.size_bytes += sum(len(name) + len(value or b"") for name, value in record.headers)

    @property
    def is_full(self) -> bool:
        return self.size_bytes >= BLOCK_BYTES or len(self.records) >= BLOCK_RECORDS


class Republisher:
    """Write partitions of an archive elsewhere. Keeps no state; several may go at once."""

    def __init__(self, manifests: ManifestStore, records: RecordReader, history: History) -> None:
        self._manifests = manifests
        self._records = records
        self._history = history

    async def republish(
        self,
        partition: TopicIdPartition,
        mark: RecoveryMark,
        writer: RecordWriter,
        *,
        read_committed: bool,
        on_records: Callable[[TopicIdPartition, Sequence[Record], int], None] = lambda *_: None,
    ) -> RepublishedPartition:
        """
        Write what the archive has from *mark* on, and the archives that it goes on from.

        *on_records* is told of each block that has been written, and where reading goes on.

        Raises:
            ObjectNotFound: The archive lacks an object that it should have; all before it is written.
            CorruptDataError: Stored bytes are wrong; likewise.
            BrokerUnavailable: The other cluster does not answer; likewise.
            BrokerDenied: It refuses a record; likewise.
            FencedError: Another recovery of this partition runs.
        """
        gaps: list[Gap] = []
        begun_with = mark.records
        reader = LogReader(
            partition,
            manifests=self._manifests,
            records=self._records,
            from_offset=mark.next_offset,
            on_gap=gaps.append,
            history=self._history,
        )
        block = _Block()
        async with aclosing(reader.records(read_committed=read_committed)) as records:
            async for record in records:
                block.add(record)
                if block.is_full:
                    mark = replace(mark, next_offset=record.offset + 1)
                    mark = await writer.write(partition.partition, block.records, mark)
                    on_records(partition, block.records, mark.next_offset)
                    block = _Block()
        if block.records or reader.next_offset > mark.next_offset:
            mark = replace(mark, next_offset=reader.next_offset)
            mark = await writer.write(partition.partition, block.records, mark)
            on_records(partition, block.records, mark.next_offset)
        return RepublishedPartition(partition, mark, mark.records - begun_with, tuple(gaps))
