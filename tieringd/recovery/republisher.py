"""
Write a partition's archived records into another cluster, with new offsets.

Records are read in order and written in blocks. Each block is written together with the mark after it,
or not at all. The next attempt begins at the last mark. A block is read before its transaction begins,
so that a slow store holds no transaction open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from tieringd.archive.archive_reader import ArchiveReader
from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.record_reader import RecordReader
from tieringd.archiving.remote_log import RemoteLog
from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.formats.compression import Codec
from tieringd.formats.object_keys import data_key
from tieringd.formats.records import Record
from tieringd.formats.recovery_mark import RecoveryMark
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Replacement
from tieringd.model.partition import TopicIdPartition
from tieringd.reading.history import History, LogReader

_RECORD_OVERHEAD_BYTES = 64
_PEEK_BYTES = 64 << 10
_REPLACED = "\N{REPLACEMENT CHARACTER}"


async def first_codec(remote_log: RemoteLog, reader: ArchiveReader, manifest: PartitionManifest) -> Codec:
    """
    Return the compression of the first batch of a partition's newest segment.

    NONE if there is no batch, or if that segment no longer exists.
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


def require_same_log(manifest: PartitionManifest, mark: RecoveryMark) -> None:
    """
    Check that the archive still has the records below *mark*, which are written.

    A mark of an earlier release does not say what had been replaced before it. It is only compared with the
    archive's end.

    Raises:
        ConfigError: The archive was cut back below the mark, as after an unclean election in the source.
    """
    first = next((one for one in _replaced_since(manifest, mark) if one.base_offset < mark.next_offset), None)
    if first is not None:
        reason = (
            f"records from offset {first.base_offset} on, which the recovery has read, have been replaced by "
            f"those of the leader of epoch {first.leader_epoch}"
        )
    elif mark.next_offset > manifest.next_offset:
        reason = (
            f"the archive ends at offset {manifest.next_offset}, and the recovery has read up to offset "
            f"{mark.next_offset}: the archive was cut back since"
        )
    else:
        return
    raise ConfigError(
        f"the recovery of {manifest.partition} cannot continue: {reason}. The target may hold records that "
        "the archive does not have any more",
        hint="Delete the target's topic and begin again, or choose another name with --rename, --prefix or "
        "--suffix",
    )


def _replaced_since(manifest: PartitionManifest, mark: RecoveryMark) -> tuple[Replacement, ...]:
    if mark.newest_replacement is None:
        return ()
    known = [one.identity for one in manifest.replacements]
    # A manifest that was rebuilt may list none of before: all that it lists then are new.
    first = known.index(mark.newest_replacement) + 1 if mark.newest_replacement in known else 0
    return manifest.replacements[first:]


class RecordWriter(Protocol):
    """The target of the records; see `broker.kafka_target.TargetWriter`."""

    async def write(self, partition: int, records: Sequence[Record], mark: RecoveryMark) -> RecoveryMark:
        """Write *records* and *mark* together. Return the mark with their new offsets."""


@dataclass(frozen=True, slots=True)
class RepublishedPartition:
    """What was written of one partition."""

    partition: TopicIdPartition
    mark: RecoveryMark
    """The mark after all attempts."""
    records: int
    """Written by this attempt."""
    gaps: tuple[Gap, ...]
    """Offsets that are lost, as far as this attempt has met them."""
    changed_names: int
    """
    Header names with U+FFFD that this attempt has written. Bytes that are not UTF-8 become that character
    when records are read, and the target's client takes text only.
    """


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """A block ends at whichever limit is reached first. It is held in memory, and is one transaction."""

    size_bytes: int = 8 << 20
    records: int = 10_000


@dataclass(slots=True)
class _Block:
    limits: BlockLimits
    records: list[Record] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.size_bytes += len(record.key or b"") + len(record.value or b"") + _RECORD_OVERHEAD_BYTES
        self.size_bytes += sum(len(name) + len(value or b"") for name, value in record.headers)

    @property
    def is_full(self) -> bool:
        return self.size_bytes >= self.limits.size_bytes or len(self.records) >= self.limits.records


class Republisher:
    """Write partitions of an archive elsewhere. Keeps no state; several calls may run concurrently."""

    def __init__(
        self,
        manifests: ManifestStore,
        records: RecordReader,
        history: History,
        *,
        block_limits: BlockLimits = BlockLimits(),
    ) -> None:
        self._block_limits = block_limits
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
        Write the archive's records from *mark* on, including the older archives that it continues.

        *on_records* is called after each written block, with the next offset to read. After any error
        all earlier blocks are written.

        Raises:
            ConfigError: The archive was cut back below *mark*, or below the records of this call while they
                were written.
            ObjectNotFound: The archive lacks an object that its manifest names, or has no manifest.
            CorruptDataError: Stored bytes are damaged.
            BrokerUnavailable: The other cluster does not answer.
            BrokerDenied: The other cluster refuses a record.
            FencedError: Another recovery of this partition runs.
        """
        gaps: list[Gap] = []
        changed_names = 0
        begun = mark
        manifest = await self._load(partition)
        require_same_log(manifest, mark)
        newest = manifest.replacements[-1].identity if manifest.replacements else ()
        mark = replace(mark, newest_replacement=newest)
        reader = LogReader(
            partition,
            manifests=self._manifests,
            records=self._records,
            from_offset=mark.next_offset,
            on_gap=gaps.append,
            history=self._history,
        )
        block = _Block(self._block_limits)
        async with aclosing(reader.records(read_committed=read_committed)) as records:
            async for record in records:
                block.add(record)
                changed_names += sum(_REPLACED in header_name for header_name, _ in record.headers)
                if block.is_full:
                    mark = replace(mark, next_offset=record.offset + 1)
                    mark = await writer.write(partition.partition, block.records, mark)
                    on_records(partition, block.records, mark.next_offset)
                    block = _Block(self._block_limits)
        has_to_note = mark.records == begun.records and newest != begun.newest_replacement
        if block.records or reader.next_offset > mark.next_offset or has_to_note:
            mark = replace(mark, next_offset=reader.next_offset)
            mark = await writer.write(partition.partition, block.records, mark)
            on_records(partition, block.records, mark.next_offset)
        require_same_log(await self._load(partition), mark)
        written = mark.records - begun.records
        return RepublishedPartition(partition, mark, written, tuple(gaps), changed_names)

    async def _load(self, partition: TopicIdPartition) -> PartitionManifest:
        manifest = (await self._manifests.load(partition)).manifest
        if manifest is None:
            raise ObjectNotFound(f"the bucket holds nothing of {partition}")
        return manifest
