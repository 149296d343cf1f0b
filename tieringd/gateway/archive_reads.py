"""
The reads of one Fetch: many partitions at once, of which none keeps the others waiting.

A Fetch is answered when one partition has records. What is still being downloaded for another goes on into
the cache, for the client's next Fetch. That one waits for what was late before, for a while: where nothing is
cached it would come too late again and again.

A restored log may go on from older archives of other clusters (`reading.history`), whose leader epochs say
nothing to this cluster's clients: what comes from there is under the first epoch.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tieringd.errors import ObjectNotFound, StorageUnavailable, TieringError
from tieringd.policies.history_part import part_holding
from tieringd.reading.partition_reader import HeldRead

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tieringd.gateway.archive_answers import PartitionKey
    from tieringd.gateway.readable_partitions import ReadablePartition, ReadablePartitions
    from tieringd.model.manifest import PartitionManifest
    from tieringd.reading.history import History
    from tieringd.reading.partition_reader import HeldBatches, HeldGap, PartitionReader

_REMEMBERED = 4096
_READS_AT_ONCE = 8
"""Partitions of one Fetch that may be waiting for the store."""
_PATIENCE_SECONDS = 0.003
"""So long all are waited for, when one has records: a file of the cache takes less to open."""
_LATE_SECONDS = 5.0
"""So long what was late before is waited for, when another partition has records."""


@dataclass(eq=False, slots=True)
class ArchiveRead(HeldRead):
    """How the read of one partition stands; nothing is held where the archive has nothing, or is late."""

    found: ReadablePartition | None = None
    """None where the partition has no archive, or is not known yet."""
    error: TieringError | None = None
    has_begun: bool = False
    is_over: bool = False
    """False when it is late."""


class ArchiveReads:
    """Read partitions for the gateway's clients."""

    def __init__(self, partitions: ReadablePartitions, reader: PartitionReader, history: History) -> None:
        self._partitions = partitions
        self._reader = reader
        self._history = history
        self._late: OrderedDict[tuple[PartitionKey, int], None] = OrderedDict()

    async def read(self, offsets: Mapping[PartitionKey, int]) -> Mapping[PartitionKey, ArchiveRead]:
        """
        Begin to read each partition at its offset; return how far it is when the answer is due.

        The caller closes every read.
        """
        reads = {key: ArchiveRead() for key in offsets}
        places = asyncio.Semaphore(_READS_AT_ONCE)
        tasks = {
            key: asyncio.create_task(self._run(read, key, offsets[key], places))
            for key, read in reads.items()
        }
        try:
            await self._until_due(reads, tasks, offsets)
        except BaseException:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            for read in reads.values():
                read.close()
            raise
        for key, task in tasks.items():
            if not task.done():
                task.cancel()
                if reads[key].has_begun:
                    self._remember(key, offsets[key])
        return reads

    async def _until_due(
        self,
        reads: Mapping[PartitionKey, ArchiveRead],
        tasks: Mapping[PartitionKey, asyncio.Task[None]],
        offsets: Mapping[PartitionKey, int],
    ) -> None:
        now, pending = asyncio.get_running_loop().time, set(tasks.values())
        must = {task for key, task in tasks.items() if self._late.pop((key, offsets[key]), self) is not self}
        begun_at = now()
        while pending:
            left_seconds = None
            if any(read.held for read in reads.values()):
                patience = _LATE_SECONDS if pending & must else _PATIENCE_SECONDS
                left_seconds = begun_at + patience - now()
                if left_seconds <= 0:
                    break
            done, pending = await asyncio.wait(
                pending, timeout=left_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                # A fault of ours: what clients can be told of is kept in the read.
                task.result()

    def _remember(self, key: PartitionKey, offset: int) -> None:
        self._late[key, offset] = None
        if len(self._late) > _REMEMBERED:
            self._late.popitem(last=False)

    async def _run(
        self, read: ArchiveRead, key: PartitionKey, offset: int, places: asyncio.Semaphore
    ) -> None:
        async with places:
            read.has_begun = True
            await self._read(read, key, offset)
        read.is_over = True

    async def _read(self, read: ArchiveRead, key: PartitionKey, offset: int) -> None:
        try:
            read.found = await self._partitions.find(*key)
            if read.found is not None and offset < read.found.deleted_before:
                return
            if read.found is not None and offset < read.found.manifest.start_offset:
                read.is_history = True
                read.held = await self._held_of_history(read.found.manifest, offset)
            elif read.found is not None:
                read.held = await self._held(read.found, offset)
            if read.found is not None and read.held is None and read.found.is_pinned(offset):
                raise StorageUnavailable(f"offset {offset} is still on its way into the archive")
        except TieringError as error:
            read.error = error

    async def _held(self, found: ReadablePartition, offset: int) -> HeldBatches | HeldGap | None:
        """
        Return what is archived from the wanted offset on; None when nothing ever was, or is not any more.

        The broker says that it does not have the offset. A manifest that ends before it is an old one, if
        the local log begins behind it: what lies between was trimmed because a newer one holds it.
        """
        manifest, bounds = found.manifest, found.bounds
        if manifest.next_offset <= offset and (bounds is None or offset < bounds.log_start_offset):
            manifest = await self._newest(manifest)
        try:
            return await self._reader.hold(manifest, offset)
        except ObjectNotFound:
            return await self._reader.hold(await self._newest(manifest), offset)

    async def _held_of_history(
        self, manifest: PartitionManifest, offset: int
    ) -> HeldBatches | HeldGap | None:
        parts = partial(self._history.parts, manifest.partition, start_offset=manifest.start_offset)
        try:
            return await self._held_in(await parts(), offset)
        except ObjectNotFound:
            return await self._held_in(await parts(is_fresh=True), offset)

    async def _held_in(self, parts: Sequence[PartitionManifest], offset: int) -> HeldBatches | HeldGap | None:
        part = part_holding(parts, offset)
        return None if part is None else await self._reader.hold(part, offset)

    async def _newest(self, manifest: PartitionManifest) -> PartitionManifest:
        newer = await self._partitions.newest(manifest.partition)
        if newer is None:
            raise StorageUnavailable(f"the manifest of {manifest.partition} has gone")
        return newer
