"""
A follower's index of the remote log: which segments its leader has archived, with the index of each.

It is brought up to date step by step, a few indexes at a time, and asks the store for one version when
nothing has changed. It may be behind the bucket and is never ahead of it, so nothing is trimmed or
deleted because of it. A segment that was merged, compacted away or expired leaves it as it left the manifest.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archiving.remote_log import RemoteLog
from tieringd.errors import ObjectNotFound
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment, SegmentIndex

INDEXES_PER_STEP = 64


class RemoteIndex:
    """
    The index of one partition that another broker leads, from *from_offset* on.

    One task at a time calls `step`; it may be cancelled at any await.
    """

    def __init__(
        self,
        partition: TopicIdPartition,
        *,
        remote_log: RemoteLog,
        manifests: ManifestStore,
        from_offset: int = 0,
    ) -> None:
        self._partition = partition
        self._remote_log = remote_log
        self._manifests = manifests
        self._from_offset = from_offset
        self._known: StoredManifest | None = None
        self._wanted: tuple[RemoteSegment, ...] = ()
        self._indexes: dict[RemoteSegment, SegmentIndex] = {}

    @property
    def segments(self) -> tuple[RemoteSegment, ...]:
        """Return the segments whose index has been fetched, ascending."""
        return tuple(one for one in self._wanted if one in self._indexes)

    @property
    def is_complete(self) -> bool:
        """Say whether the indexes of all segments of the last step's manifest have been fetched."""
        return self._known is not None and len(self._indexes) == len(self._wanted)

    def index_at(self, offset: int) -> tuple[RemoteSegment, SegmentIndex] | None:
        """Return the segment that holds *offset*, and its index; None where it has not been fetched."""
        row = bisect_right(self._wanted, offset, key=attrgetter("base_offset")) - 1
        segment = self._wanted[row] if row >= 0 else None
        if segment is None or offset > segment.last_offset or segment not in self._indexes:
            return None
        return segment, self._indexes[segment]

    async def step(self, *, indexes_max: int = INDEXES_PER_STEP) -> int:
        """
        Refresh the manifest, and fetch up to *indexes_max* indexes, oldest first; return how many.

        Raises:
            CorruptDataError: A manifest or an index is damaged.
            StorageUnavailable: What was known before stays.
        """
        known = self._known
        if known is None:
            found = await self._manifests.load(self._partition)
        else:
            found = await self._manifests.refreshed(self._partition, known)
        if known is None or found.version != known.version:
            wanted = await self._segments_of(found.manifest)
            self._known, self._wanted = found, wanted
            self._indexes = {one: self._indexes[one] for one in wanted if one in self._indexes}
        fetched = 0
        for segment in self._wanted:
            if fetched == indexes_max:
                break
            if segment not in self._indexes:
                try:
                    index = await self._remote_log.index_of(self._partition, segment)
                except ObjectNotFound:
                    # The manifest has changed meanwhile; the next step reads it again.
                    self._known = None
                    continue
                self._indexes[segment] = index
                fetched += 1
        return fetched

    async def _segments_of(self, manifest: PartitionManifest | None) -> tuple[RemoteSegment, ...]:
        if manifest is None:
            return ()
        spillovers = self._manifests.spillovers
        whole = await spillovers.with_history(manifest, from_offset=self._from_offset)
        return tuple(one for one in whole.segments if one.next_offset > self._from_offset)
