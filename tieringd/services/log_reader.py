"""
Reading a partition from its archive, whatever happens to the archive meanwhile.

Retention, merges and new leaders change a manifest under a reader that goes by an older one. An object
that has gone means: look at the manifest again, and go on from where the reader is. Only an object that
the newest manifest names as well is missing.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from tieringd.errors import ObjectNotFound
from tieringd.model.manifest import Gap

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tieringd.formats.records import Record
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.services.manifest_store import ManifestStore
    from tieringd.services.record_reader import RecordReader

EXPIRED = "total retention has let go of them"


class LogReader:
    """
    Read one partition's records in order, once. Owned by one reader.

    Offsets that are asked for and are not archived, or not any more, are handed to *on_gap*; each
    range once.
    """

    def __init__(
        self,
        partition: TopicIdPartition,
        *,
        manifests: ManifestStore,
        records: RecordReader,
        from_offset: int,
        on_gap: Callable[[Gap], None],
    ) -> None:
        self._partition = partition
        self._manifests = manifests
        self._records = records
        self._on_gap = on_gap
        self.next_offset = from_offset
        """Where reading goes on."""
        self._told_to = from_offset
        """All gaps before it have been handed on."""

    async def records(self, *, read_committed: bool) -> AsyncGenerator[Record]:
        """
        Yield the records from `next_offset` to the end that the archive has when that is reached.

        It may be called again, to go on with what was archived since.

        Raises:
            ObjectNotFound: The newest manifest names an object that the bucket does not have, or there
                is no manifest.
            CorruptDataError: Stored bytes are wrong.
        """
        manifest = await self._manifest()
        while True:
            try:
                reading = self._records.records(
                    manifest,
                    from_offset=self.next_offset,
                    read_committed=read_committed,
                    on_gap=self._note_gap,
                )
                async with aclosing(reading) as records:
                    async for record in records:
                        self.next_offset = record.offset + 1
                        yield record
            except ObjectNotFound:
                newer = await self._manifest()
                if newer == manifest:
                    raise
                manifest = newer
            else:
                self.next_offset = max(self.next_offset, manifest.next_offset)
                return

    async def _manifest(self) -> PartitionManifest:
        manifest = (await self._manifests.load(self._partition)).manifest
        if manifest is None:
            raise ObjectNotFound(f"the bucket holds nothing of {self._partition}")
        if self.next_offset < manifest.start_offset and manifest.expired_at_ms is not None:
            self._note_gap(Gap(self.next_offset, manifest.start_offset - 1, EXPIRED, manifest.expired_at_ms))
        self.next_offset = max(self.next_offset, manifest.start_offset)
        return manifest

    def _note_gap(self, gap: Gap) -> None:
        if gap.base_offset >= self._told_to:
            self._told_to = gap.next_offset
            self._on_gap(gap)
