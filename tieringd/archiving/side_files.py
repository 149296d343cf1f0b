"""
What a broker has beside a segment's `.log`, brought back from the archive.

A follower that goes on from an archived offset needs more than batches: the leader epochs, the state of
the producers, and indexes. The broker's own files are in a segment's sidecar, byte for byte; where one was
not archived it is made from our index, coarser than the broker's, and never leading past what is looked for.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tieringd.errors import ObjectNotFound
from tieringd.formats.checkpoints import encode_epoch_checkpoint
from tieringd.formats.missing_indexes import whole_indexes
from tieringd.formats.object_keys import index_key
from tieringd.model.manifest import SEGMENTS_REMEMBERED
from tieringd.policies.epoch_history import with_records, without_from

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import AbortedTransaction, RemoteSegment, SegmentIndex


class SideFileKind(Enum):
    """One of a broker's files; the value is its name after the segment's base offset, or by itself."""

    OFFSET_INDEX = ".index"
    TIME_INDEX = ".timeindex"
    TRANSACTION_INDEX = ".txnindex"
    PRODUCER_SNAPSHOT = ".snapshot"
    LEADER_EPOCHS = "leader-epoch-checkpoint"


class SideFiles:
    """Read a segment's side files. Keeps no state."""

    def __init__(
        self,
        manifests: ManifestStore,
        index_of: Callable[[TopicIdPartition, RemoteSegment], Awaitable[SegmentIndex]],
    ) -> None:
        self._manifests = manifests
        self._index_of = index_of

    async def read(self, partition: TopicIdPartition, segment: RemoteSegment, kind: SideFileKind) -> bytes:
        """See `RemoteLog.side_file`."""
        if kind is SideFileKind.LEADER_EPOCHS:
            manifest = await self._manifest_of(partition, segment)
            return encode_epoch_checkpoint(with_records(without_from(manifest.epochs, segment.next_offset)))
        index = await self._index_of(partition, segment)
        found: bytes | None
        if kind is SideFileKind.PRODUCER_SNAPSHOT:
            found = index.broker.producer_snapshot
        elif kind is SideFileKind.TRANSACTION_INDEX:
            found = await self._transaction_index(partition, segment, index)
        else:
            made = whole_indexes(segment, index, ())
            found = made.offset_index if kind is SideFileKind.OFFSET_INDEX else made.time_index
        if found is None:
            key = index_key(partition, segment)
            raise ObjectNotFound(f"segment {segment.base_offset} of {partition} has no {kind.value}", key=key)
        return found

    async def _transaction_index(
        self, partition: TopicIdPartition, segment: RemoteSegment, index: SegmentIndex
    ) -> bytes | None:
        """Return the transactions that were aborted by markers in *segment*; None when there is none."""
        if index.broker.offset_index is not None:
            # The broker's files were archived together: it had none of this kind, or this one.
            return index.broker.transaction_index
        # A marker may end a transaction whose data is further back: the index there tells of it.
        manifest = await self._manifest_of(partition, segment)
        spillovers = self._manifests.spillovers
        wider = await spillovers.with_history(manifest, from_offset=segment.base_offset)
        row = wider.segments.row_at_or_after(segment.base_offset)
        while row < SEGMENTS_REMEMBERED and wider.live_offset > wider.start_offset:
            wider = await spillovers.with_history(manifest, from_offset=wider.live_offset - 1)
            row = wider.segments.row_at_or_after(segment.base_offset)
        aborted: dict[tuple[int, int], AbortedTransaction] = {}
        for earlier in range(max(row - SEGMENTS_REMEMBERED, 0), row):
            before = await self._index_of(partition, wider.segments[earlier])
            for one in before.aborted:
                aborted.setdefault((one.producer_id, one.last_offset), one)
        for one in index.aborted:
            aborted.setdefault((one.producer_id, one.last_offset), one)
        return whole_indexes(segment, index, aborted.values()).transaction_index

    async def _manifest_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> PartitionManifest:
        manifest = (await self._manifests.load(partition)).manifest
        if manifest is None:
            raise ObjectNotFound(f"segment {segment.base_offset} of {partition} is not in the archive")
        return manifest
