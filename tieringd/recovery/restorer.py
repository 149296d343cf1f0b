"""
Restore partitions from the archive into the log directory of a stopped broker.

Offsets, timestamps and transactions stay the same. Leader epochs belong to the leaders of the old
cluster, and begin anew. Producers get ids that the new cluster never assigns
(`formats.restored_batches`). Every batch's CRC and every object's checksum is checked on the way. Files
that an interrupted attempt left, also in their place, are checked too, and are not fetched again if they are
right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from tieringd.archive.archive_reader import ArchiveReader
from tieringd.archiving.remote_log import RemoteLog
from tieringd.broker.restored_log import RestoredLog
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.record_batch import ABORT_MARKER, COMMIT_MARKER, encode_marker
from tieringd.formats.restored_batches import FIRST_LEADER_EPOCH, restored_index
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import AbortedTransaction, RemoteSegment, SegmentIndex
from tieringd.policies.recovery import RestorePlan


@dataclass(frozen=True, slots=True)
class RestoredPartition:
    """The result of restoring one partition."""

    partition: TopicIdPartition
    start_offset: int | None
    """The first offset that the broker serves; None if the archive holds no segment of it."""
    next_offset: int
    segments: int
    size_bytes: int
    records: int
    found_segments: int
    """How many of the segments an earlier attempt had left in place."""
    ended_transactions: int
    """Transactions over the archive's end. They got the outcome that the archive knows of."""
    gap_offsets: int
    """Lost offsets inside the log."""
    left_segments: int
    """Older segments that stay in the archive, because the plan leaves them out."""


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

        *on_bytes* is called with the size of each segment when it is in place. Nothing is put in place
        after an error.

        Raises:
            ConfigError: The place is not free.
            CorruptDataError: A stored batch, object or index is damaged.
            ObjectNotFound: An object was deleted.
            LocalFileError: The disk refuses the files.
        """
        if plan.segments or manifest.next_offset:
            await asyncio.to_thread(target.begin, plan.segments)
        else:
            # The partition never had a record: its empty log stays, and no directory is begun.
            await asyncio.to_thread(target.leave_empty)
        records = found = 0
        aborted: tuple[AbortedTransaction, ...] = ()
        for segment in plan.segments:
            index = await self._index_of(manifest.partition, segment)
            if await asyncio.to_thread(target.has, segment, index.epochs):
                found += 1
            else:
                await self._fetch(manifest.partition, segment, index, target)
            aborted = _joined(aborted, index.aborted, from_offset=segment.base_offset)
            await asyncio.to_thread(target.write_indexes, segment, index, aborted)
            records += index.record_count
            on_bytes(segment.size_bytes)
        ended, next_offset = 0, manifest.next_offset
        if plan.segments:
            end_offset = plan.segments[-1].next_offset
            ended = await self._end_transactions(
                plan, target, {one.producer_id for one in aborted if one.last_offset >= end_offset}
            )
            # A gap may follow the last segment. Its offsets were assigned once and must not be reused.
            next_offset = max(next_offset, end_offset + ended)
            start_offset = plan.start_offset
            assert start_offset is not None, "the plan has segments"
            await asyncio.to_thread(
                partial(target.finish, plan.segments, start_offset=start_offset, next_offset=next_offset)
            )
        elif next_offset:
            await asyncio.to_thread(target.finish_empty, next_offset)
        return RestoredPartition(
            partition=manifest.partition,
            start_offset=plan.start_offset,
            next_offset=next_offset,
            segments=len(plan.segments),
            size_bytes=plan.size_bytes,
            records=records,
            found_segments=found,
            gap_offsets=sum(gap.next_offset - gap.base_offset for gap in plan.gaps),
            ended_transactions=ended,
            left_segments=plan.left_segments,
        )

    async def restore_shallow(self, manifest: PartitionManifest, target: RestoredLog) -> RestoredPartition:
        """
        Put an empty log in its place, which begins where the archive ends.

        The archive becomes its history (`reading.history`). The link to it is already stored.

        Raises:
            ConfigError: The place is not free.
            LocalFileError: The disk refuses the files.
        """
        await asyncio.to_thread(target.begin)
        await asyncio.to_thread(target.finish_empty, manifest.next_offset)
        return RestoredPartition(
            partition=manifest.partition,
            start_offset=manifest.next_offset,
            next_offset=manifest.next_offset,
            segments=0,
            size_bytes=0,
            records=0,
            found_segments=0,
            gap_offsets=0,
            ended_transactions=0,
            left_segments=len(manifest.segments),
        )

    async def _end_transactions(
        self,
        plan: RestorePlan,
        target: RestoredLog,
        aborted: set[int],
    ) -> int:
        """
        End the transactions whose markers were not archived, with the outcome that the archive knows.

        Otherwise they would stay open for ever, and read_committed clients could not read past them.
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
                leader_epoch=FIRST_LEADER_EPOCH,
            )
            for number, one in enumerate(still_open)
        ]
        if markers:
            ended_so = [
                AbortedTransaction(one.producer_id, one.first_offset, last.next_offset + number)
                for number, one in enumerate(still_open)
                if one.producer_id in aborted
            ]
            await asyncio.to_thread(target.write_markers, last.next_offset, markers, ended_so)
        return len(markers)

    async def _index_of(self, partition: TopicIdPartition, segment: RemoteSegment) -> SegmentIndex:
        """Return a segment's index with the producer ids of the restored log."""
        index = await self._remote_log.index_of(partition, segment)
        try:
            return restored_index(index)
        except CorruptDataError as error:
            raise error.located(index_key(partition, segment)) from error

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
                    # The page cache takes it at once. A thread for each batch would cost more than it saves.
                    writer.write(batch.data)
            await asyncio.to_thread(writer.finish, segment, source=key)
        finally:
            await asyncio.to_thread(writer.close)


def _joined(
    before: Iterable[AbortedTransaction], found: Iterable[AbortedTransaction], *, from_offset: int
) -> tuple[AbortedTransaction, ...]:
    """Return transactions that end at *from_offset* or later. Each segment knows its own part of one."""
    joined: dict[tuple[int, int], AbortedTransaction] = {}
    for one in (*before, *found):
        if one.last_offset >= from_offset:
            joined.setdefault((one.producer_id, one.last_offset), one)
    return tuple(joined.values())
