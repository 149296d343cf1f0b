"""
Restoring partitions from the archive into the log directory of a broker that is stopped.

Offsets, timestamps, transactions and leader epochs are what they were, because the bytes are. Every
batch's CRC and every object's checksum is looked at on the way. What a crash has left is looked at
too, and not fetched again where it is right.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.formats.object_keys import data_key
from tieringd.formats.record_batch import ABORT_MARKER, COMMIT_MARKER, encode_marker
from tieringd.policies.epoch_history import clipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.broker.restored_log import RestoredLog
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment, SegmentIndex
    from tieringd.policies.restore import RestorePlan
    from tieringd.services.archive_reader import ArchiveReader
    from tieringd.services.remote_log import RemoteLog


@dataclass(frozen=True, slots=True)
class RestoredPartition:
    """What was brought back of one partition."""

    partition: TopicIdPartition
    start_offset: int | None
    """None when the archive holds no segment of it."""
    next_offset: int
    segments: int
    size_bytes: int
    records: int
    found_segments: int
    """Of these, how many an earlier attempt had left."""
    ended_transactions: int
    """Transactions over the archive's end, which got the end that the archive knows of."""
    gap_offsets: int
    """Offsets inside that nobody has any more."""
    left_segments: int
    """Older ones that stay in the archive, as they were not asked for."""


class Restorer:
    """Restore one partition at a time."""

    def __init__(self, remote_log: RemoteLog, reader: ArchiveReader) -> None:
        self._remote_log = remote_log
        self._reader = reader

    async def restore(
        self,
        manifest: PartitionManifest,
        plan: RestorePlan,
        target: RestoredLog,
        *,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> RestoredPartition:
        """
        Build the log that *plan* names, and put it in its place.

        *on_bytes* is told of bytes as they come.

        Raises:
            ConfigError: The place is not free.
            CorruptDataError: A stored batch, object or index is wrong; nothing was put in place.
            ObjectNotFound: An object has gone; likewise.
            LocalFileError: The disk refuses; likewise.
        """
        await asyncio.to_thread(target.begin)
        records = found = 0
        aborted: set[int] = set()
        for segment in plan.segments:
            index = await self._remote_log.index_of(manifest.partition, segment)
            if await asyncio.to_thread(target.has, segment):
                found += 1
            else:
                await self._fetch(manifest.partition, segment, index, target)
            await asyncio.to_thread(target.write_indexes, segment, index.broker)
            records += index.record_count
            aborted |= {
                one.producer_id for one in index.aborted if one.last_offset >= plan.segments[-1].next_offset
            }
            on_bytes(segment.size_bytes)
        ended = 0
        if plan.segments:
            ended = await self._end_transactions(manifest, plan, target, aborted)
            epochs = clipped(
                manifest.epochs,
                base_offset=plan.segments[0].base_offset,
                next_offset=plan.segments[-1].next_offset,
            )
            await asyncio.to_thread(target.finish, plan.segments, epochs)
        return RestoredPartition(
            partition=manifest.partition,
            start_offset=plan.start_offset,
            next_offset=plan.segments[-1].next_offset if plan.segments else manifest.next_offset,
            segments=len(plan.segments),
            size_bytes=plan.size_bytes,
            records=records,
            found_segments=found,
            gap_offsets=sum(gap.next_offset - gap.base_offset for gap in plan.gaps),
            ended_transactions=ended,
            left_segments=plan.left_segments,
        )

    async def _end_transactions(
        self,
        manifest: PartitionManifest,
        plan: RestorePlan,
        target: RestoredLog,
        aborted: set[int],
    ) -> int:
        """
        End the transactions whose markers were not archived, as the archive knows that they ended.

        Else they would be open for ever, and nobody could read past them.
        """
        still_open = await asyncio.to_thread(target.open_transactions, plan.segments)
        last = plan.segments[-1]
        markers = [
            encode_marker(
                last.next_offset + number,
                producer_id=one.producer_id,
                producer_epoch=one.producer_epoch,
                marker=ABORT_MARKER if one.producer_id in aborted else COMMIT_MARKER,
                timestamp_ms=max(last.max_timestamp_ms, 0),
                leader_epoch=manifest.epochs[-1][0] if manifest.epochs else 0,
            )
            for number, one in enumerate(still_open)
        ]
        if markers:
            await asyncio.to_thread(target.write_markers, last.next_offset, markers)
        return len(markers)

    async def _fetch(
        self,
        partition: TopicIdPartition,
        segment: RemoteSegment,
        index: SegmentIndex,
        target: RestoredLog,
    ) -> None:
        key = data_key(partition, segment)
        writer = await asyncio.to_thread(target.open_segment, segment.base_offset)
        try:
            async with aclosing(self._reader.batches(key, index, from_offset=segment.base_offset)) as batches:
                async for batch in batches:
                    # A page cache takes it at once; a thread for each batch would cost more than it saves.
                    writer.write(batch.data)
            await asyncio.to_thread(writer.finish, segment, source=key)
        finally:
            await asyncio.to_thread(writer.close)
