"""The indexes of stored segments, each from its own object beside the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tieringd.formats.object_keys import index_key
from tieringd.formats.sidecar import decode_sidecar_of

if TYPE_CHECKING:
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment, SegmentIndex
    from tieringd.storage.base import ObjectStore


class Indexes(Protocol):
    """Whoever can tell a stored segment's index."""

    async def index_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """
        Return a stored segment's index: offsets, times, aborted transactions, epochs.

        Raises:
            ObjectNotFound: The bucket has no such segment.
            CorruptDataError: The index is damaged, or describes another object.
        """
        ...


class SegmentIndexes:
    """Read indexes from the bucket, each time anew. Keeps no state."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def index_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """See `Indexes.index_of`."""
        key = index_key(partition, segment)
        data, _ = await self._store.get(key)
        return decode_sidecar_of(data, segment, key=key)
