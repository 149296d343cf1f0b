"""
Indexes that are missing, made again for a manifest that is being rebuilt.

Data and index are stored under the name that the new index gives them, as other bytes have other names;
what was there before stays. Storing the same again is the same object.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.archive.scrub.data_index import renamed_by
from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.segment import NO_CRC
from tieringd.storage.base import JoinSource

if TYPE_CHECKING:
    from tieringd.archive.object_joiner import ObjectJoiner
    from tieringd.archive.scrub.data_index import DataIndexer
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.segment import RemoteSegment
    from tieringd.storage.base import ObjectStore


class LostIndexes:
    """Make indexes of one bucket's segments again."""

    def __init__(self, store: ObjectStore, indexer: DataIndexer, joiner: ObjectJoiner) -> None:
        self._store = store
        self._indexer = indexer
        self._joiner = joiner

    async def remade(
        self, manifest: PartitionManifest, segment: RemoteSegment, *, write: bool
    ) -> RemoteSegment | None:
        """
        Return *segment* as it is named with its new index, and store both where *write* says so.

        None where the archive does not tell how a transaction in it ended: its marker is not in *manifest*,
        which is all of the archive.

        Raises:
            StorageUnavailable: The store does not answer; trying again is safe.
        """
        sidecar = await self._indexer.from_data(manifest, segment)
        if sidecar is None:
            return None
        named = renamed_by(segment, sidecar)
        if segment.index_crc32c == NO_CRC:
            # Its name does not tell of its index, and stays.
            named = replace(named, index_crc32c=NO_CRC)
        if write:
            partition = manifest.partition
            old, new = data_key(partition, segment), data_key(partition, named)
            if new != old:
                source = JoinSource(old, segment.size_bytes, segment.crc32c)
                await self._joiner.join(new, [source], crc32c=segment.crc32c)
            await self._store.put(index_key(partition, named), sidecar, crc32c=crc32c(sidecar))
        return named
