"""
Reading a partition from its archive, whatever happens to the archive meanwhile.

Retention, merges and new leaders change a manifest under a reader that goes by an older one. An object
that has gone means: look at the manifest again, and go on from where the reader is. Only an object that
the newest manifest names as well is missing.

A restored log that goes on from older archives (`reading.history`) is read from the oldest of them on.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from tieringd.errors import ObjectNotFound
from tieringd.model.manifest_parts import Gap

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.archive.record_reader import RecordReader
    from tieringd.formats.records import Record
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.reading.history import History

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
        history: History | None = None,
    ) -> None:
        self._partition = partition
        self._manifests = manifests
        self._records = records
        self._on_gap = on_gap
        self._history = history
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
        for number in range(len(await self._parts(is_fresh=False))):
            async with aclosing(self._read(partial(self._part, number), read_committed)) as records:
                async for record in records:
                    yield record
        async with aclosing(self._read(self._own, read_committed)) as records:
            async for record in records:
                yield record

    async def _read(
        self,
        load: Callable[[bool], Awaitable[PartitionManifest]],
        read_committed: bool,  # noqa: FBT001 passed on, and named everywhere else
    ) -> AsyncGenerator[Record]:
        """Yield the records of one archive from `next_offset` to its end; *load* is told to look again."""
        manifest = await load(False)
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
                newer = await load(True)
                if newer == manifest:
                    raise
                manifest = newer
            else:
                self.next_offset = max(self.next_offset, manifest.next_offset)
                return

    async def _parts(self, *, is_fresh: bool) -> tuple[PartitionManifest, ...]:
        if self._history is None:
            return ()
        own = await self._load()
        return await self._history.parts(self._partition, start_offset=own.start_offset, is_fresh=is_fresh)

    async def _part(self, number: int, is_fresh: bool) -> PartitionManifest:  # noqa: FBT001 as `_own` has it
        parts = await self._parts(is_fresh=is_fresh)
        if number >= len(parts):
            raise ObjectNotFound(f"the history of {self._partition} has gone")
        return self._begun(parts[number])

    async def _own(self, is_fresh: bool) -> PartitionManifest:  # noqa: ARG002, FBT001 it is never kept
        return self._begun(await self._load())

    async def _load(self) -> PartitionManifest:
        manifest = (await self._manifests.load(self._partition)).manifest
        if manifest is None:
            raise ObjectNotFound(f"the bucket holds nothing of {self._partition}")
        return manifest

    def _begun(self, manifest: PartitionManifest) -> PartitionManifest:
        """Take note of what *manifest* does not hold any more."""
        if self.next_offset < manifest.start_offset and manifest.expired_at_ms is not None:
            self._note_gap(Gap(self.next_offset, manifest.start_offset - 1, EXPIRED, manifest.expired_at_ms))
        self.next_offset = max(self.next_offset, manifest.start_offset)
        return manifest

    def _note_gap(self, gap: Gap) -> None:
        if gap.base_offset >= self._told_to:
            self._told_to = gap.next_offset
            self._on_gap(gap)
