"""
An index that was lost, made again: from the local log where that is the same still, else from the data.

From the local log comes the very same index, with the broker's own side files in it. From the data object
comes one without these; a broker builds them when it finds none. It has other bytes then, so it needs
another name, and a commit: that is what an `IndexChange` is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tieringd.archive.scrub.data_index import DataIndexer, is_index_of
from tieringd.archiving.segment_copier import local_index
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.sidecar import encode_sidecar
from tieringd.model.reindexing import reindexed
from tieringd.model.segment import SegmentSlice
from tieringd.storage.blocking import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.archive.archive_reader import ArchiveReader
    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archive.spillover_manifests import SpilloverManifests
    from tieringd.archiving.claim import Claim
    from tieringd.broker.layout import Layout
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class IndexChange:
    """A segment whose data is stored once more, beside an index of other bytes; see `ManifestChange`."""

    old: RemoteSegment
    new: RemoteSegment
    now_ms: Callable[[], int]

    async def commit(self, claim: Claim, stored: StoredManifest) -> StoredManifest:
        """
        Name the new objects in the place of the old ones, where these are still named.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The claim reads it again; then this may be called again.
        """
        manifest = stored.existing
        if manifest.segments.covering(self.old.base_offset) != self.old:
            return stored
        committed = await claim.commit(stored, reindexed(manifest, self.old, self.new, now_ms=self.now_ms()))
        log.info(
            "segment has a new index",
            topic=manifest.partition.topic,
            partition=manifest.partition.partition,
            base_offset=self.old.base_offset,
        )
        return committed


class IndexRebuilder(DataIndexer):
    """Build indexes of segments again, from the data or from the local log. Reads only, keeps no state."""

    def __init__(
        self, store: ObjectStore, reader: ArchiveReader, spillovers: SpilloverManifests, *, layout: Layout
    ) -> None:
        super().__init__(store, reader, spillovers)
        self._layout = layout

    async def from_log(
        self, partition: TopicIdPartition, segment: RemoteSegment, log: LocalLog
    ) -> bytes | None:
        """Return the segment's index from the local log, if that gives the very same; else None."""
        part = _slice_of(segment, log)
        if part is None:
            return None
        try:
            index = await in_thread(local_index, self._layout, partition, log, part)
        except (LocalFileError, CorruptDataError):
            return None  # The log is not what it was, or not all there: the data object is left.
        sidecar = encode_sidecar(index) if index else b""
        return sidecar if is_index_of(sidecar, segment, partition) else None


def _slice_of(segment: RemoteSegment, log: LocalLog) -> SegmentSlice | None:
    """Return the part of a local segment that *segment* was copied from; None where there is none."""
    for local in log.segments:
        ends_after = local.next_offset is None or local.next_offset >= segment.next_offset
        if local.base_offset <= segment.base_offset and ends_after:
            return SegmentSlice.between(local, segment.base_offset, segment.next_offset)
    return None
