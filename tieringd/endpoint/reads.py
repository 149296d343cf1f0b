"""
The reads of one Fetch from the archive alone: some partitions at once, and none keeps the others waiting.

What is late goes on into the cache, for the client's next Fetch. A restored log may go on from older
archives (`reading.history`): what comes from there is under the first leader epoch, as through a gateway.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieringd.errors import ObjectNotFound, TieringError
from tieringd.policies.history_part import part_holding
from tieringd.reading.partition_reader import HeldRead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.endpoint.partitions import ServedPartitions
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.reading.history import History
    from tieringd.reading.partition_reader import PartitionReader


_HISTORY_SECONDS: Final = 0.2
"""How long a read waits to learn where the history before its archive begins."""


@dataclass(eq=False, slots=True)
class PartitionRead(HeldRead):
    """How the read of one partition stands."""

    partition: TopicIdPartition
    offset: int
    bounds: PartitionManifest | None = None
    """The manifest; None while it is not known."""
    start_offset: int = -1
    """Where the log begins, its history included; -1 while it is not known, which clients take for that."""
    is_outside: bool = False
    """The archive does not have the offset, nor ends there."""
    error: TieringError | None = None


class PartitionReads:
    """Read partitions for the endpoint's clients."""

    def __init__(self, partitions: ServedPartitions, reader: PartitionReader, history: History) -> None:
        self._partitions = partitions
        self._reader = reader
        self._history = history

    async def read(
        self,
        wanted: Sequence[tuple[TopicIdPartition, int]],
        *,
        with_records: bool,
        due_at: float,
        deadline: float,
    ) -> Sequence[PartitionRead]:
        """
        Read each partition at its offset; return how far it is when the answer is due.

        That is at *due_at* where one has records, and at *deadline* anyway. Without *with_records* only
        the bounds are looked at. The caller closes every read.
        """
        reads = [PartitionRead(partition, offset) for partition, offset in wanted]
        tasks = [asyncio.create_task(self._run(read, with_records=with_records)) for read in reads]
        pending = set(tasks)
        loop = asyncio.get_running_loop()
        try:
            while pending:
                until = due_at if any(read.held for read in reads) else deadline
                done, pending = await asyncio.wait(
                    pending, timeout=max(0, until - loop.time()), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    # A fault of ours: what clients can be told of is kept in the read.
                    task.result()
                if not done:
                    break
        except BaseException:
            await _ended(tasks)
            for read in reads:
                read.close()
            raise
        await _ended(pending)
        return reads

    async def _run(self, read: PartitionRead, *, with_records: bool) -> None:
        try:
            manifest = await self._partitions.reaching(read.partition, read.offset)
            source = await self._source(read, manifest, is_fresh=False)
            if source is None or not with_records:
                return
            try:
                read.held = await self._reader.hold(source, read.offset)
            except ObjectNotFound:
                newest = await self._partitions.newest(read.partition)
                source = await self._source(read, newest, is_fresh=True)
                if source is not None:
                    read.held = await self._reader.hold(source, read.offset)
        except TieringError as error:
            read.error = error

    async def _source(
        self, read: PartitionRead, manifest: PartitionManifest, *, is_fresh: bool
    ) -> PartitionManifest | None:
        """Note the bounds, and return the archive that has the offset; None where nothing is to be read."""
        read.bounds, read.is_history, read.is_outside = manifest, False, False
        if read.offset >= manifest.start_offset:
            read.start_offset = await self._start_of(manifest)
            if read.offset < manifest.next_offset:
                return manifest
        else:
            parts = await self._history.parts(
                manifest.partition, start_offset=manifest.start_offset, is_fresh=is_fresh
            )
            read.is_history = True
            read.start_offset = parts[0].start_offset if parts else manifest.start_offset
            part = part_holding(parts, read.offset)
            if part is not None:
                return part
        read.is_outside = read.offset != manifest.next_offset
        return None

    async def _start_of(self, manifest: PartitionManifest) -> int:
        """Return where a log begins; -1 where its history, which the read does without, cannot say soon."""
        if manifest.start_offset == 0:
            return 0
        try:
            async with asyncio.timeout(_HISTORY_SECONDS):
                parts = await self._history.parts(manifest.partition, start_offset=manifest.start_offset)
        except (TieringError, TimeoutError):
            return -1
        return parts[0].start_offset if parts else manifest.start_offset


async def _ended(tasks: Sequence[asyncio.Task[None]] | set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
