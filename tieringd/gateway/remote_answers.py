"""
The answers of the archive of the broker behind a gateway: records, offsets, epochs and sizes.

Every answer rests on a manifest as the broker's own daemon knows it. If an object is gone, which
retention and merging may cause, the manifest is read once more.

Older archives of other clusters, which a restored log continues, are part of it; they have no epochs.

`ArchiveReads` reads the partitions of a Fetch. Bytes of an older archive (`reading.history`) are under the
first leader epoch, because that archive's leader epochs mean nothing to this cluster's clients.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from uuid import UUID

import structlog

from tieringd.archive.record_reader import RecordReader
from tieringd.errors import ObjectNotFound, StorageUnavailable, TieringError
from tieringd.formats.kafka_wire.fetch import PartitionData
from tieringd.gateway.archive_answers import (
    EARLIEST,
    EARLIEST_PENDING_UPLOAD,
    LATEST_TIERED,
    MAX_TIMESTAMP,
    NOT_READ_YET,
    TRY_AGAIN,
    ArchivedFetch,
    EpochEnd,
    FetchQuestion,
    ListedOffset,
    NextFetch,
    PartitionKey,
    RemoteLogDir,
    listed_at,
    listed_in,
)
from tieringd.gateway.archive_reads import ArchiveRead, ArchiveReads
from tieringd.gateway.client_log import OTHERS, ClientLog
from tieringd.gateway.known_partitions import KnownPartitions, ReadablePartition
from tieringd.gateway.read_rates import HOST
from tieringd.gateway.readable_partitions import UNKNOWN, LogStarts
from tieringd.gateway.wire import MemoryBudget
from tieringd.metrics.readers import Source
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.policies.epoch_history import end_offset_for
from tieringd.reading.history import History
from tieringd.reading.partition_reader import (
    ArchivedBatches,
    PartitionReader,
)
from tieringd.storage.at_once import at_once

log = structlog.get_logger(__name__)

T = TypeVar("T")
A = TypeVar("A")
_AT_ONCE = 16
"""How many partitions of one ListOffsets or epoch request may wait for the store at once."""
_EACH_SECONDS = 20.0
"""
Timeout for each partition of such a request.

It is shorter than the gateway's timeout for the request, so that one slow partition does not fail the others.
"""


def _ignore(seconds: float) -> None:
    """Take a duration, and do nothing with it."""


def _ignore_topic(topic: str, source: Source, size_bytes: int) -> None:
    """Take the records of a partition, and do nothing with them."""


ERROR_PAUSE_SECONDS = 1.0
"""
The longest that an answer of errors alone is held back. A client that waits less has it sooner.

Each such answer may mean a download, as of a damaged object, and a line of the log.
"""


@dataclass(slots=True)
class _Answer:
    """The answer to one Fetch so far."""

    left_bytes: int
    """How many bytes the client's limit leaves."""
    needs_a_batch: bool
    """Whether the next batch is sent whatever its size."""
    partitions: dict[PartitionKey, PartitionData] = field(default_factory=dict)
    next_fetches: dict[PartitionKey, NextFetch] = field(default_factory=dict)
    taken: list[ArchivedBatches] = field(default_factory=list)
    in_memory_bytes: int = 0
    """How many bytes of the batches are in memory, and not in files."""
    counts: list[tuple[str, Source, int]] = field(default_factory=list)
    """The topic, the source and the bytes of each partition with records."""
    is_short: bool = False
    """Whether a partition has no records because there was no room for them in memory."""

    def add(self, batches: ArchivedBatches, *, is_in_memory: bool) -> None:
        """Add the batches of one more partition. The few bytes of a passage do not count as in memory."""
        self.taken.append(batches)
        self.left_bytes = max(0, self.left_bytes - batches.size_bytes)
        self.needs_a_batch = self.needs_a_batch and not batches.size_bytes
        if is_in_memory:
            self.in_memory_bytes += batches.size_bytes

    def close(self) -> None:
        """Give all batches back."""
        for one in self.taken:
            one.close()


def _pause_seconds(answer: _Answer, question: FetchQuestion) -> float:
    """Return how long after the question an answer may go to the client; 0 where nothing holds it up."""
    if not answer.needs_a_batch or question.due is not None:
        # It has records, or others wait for it.
        return 0.0
    if answer.is_short:
        return question.wait_seconds
    # Also where the read went well, and the broker's log ends before its records.
    has_failed = any(one.error_code == TRY_AGAIN.value for one in answer.partitions.values())
    return min(question.wait_seconds, ERROR_PAUSE_SECONDS) if has_failed else 0.0


class RemoteAnswers:
    """The archive's side of a gateway; see `ArchiveAnswers`."""

    def __init__(
        self,
        partitions: KnownPartitions,
        reader: PartitionReader,
        *,
        records: RecordReader,
        history: History,
        bucket: str | None,
        may_produce: Callable[[], bool],
        budget: MemoryBudget,
        now: Callable[[], float],
        on_answer: Callable[[float], None] = _ignore,
        on_topic: Callable[[str, Source, int], None] = _ignore_topic,
    ) -> None:
        """
        Keep the arguments. *may_produce* says whether the disks have room for clients' writes.

        *budget* counts what all connections of the gateway hold in memory; its `GatewayServer` has it too.

        *on_answer* gets the seconds of each Fetch that the archive answered. *on_topic* gets the topic, the
        source and the bytes of each partition's archived records, when they go to the client.

        *now* is a monotonic clock in seconds. Without *bucket* the archive is not shown as a log directory.
        """
        self._partitions = partitions
        self._reads = ArchiveReads(partitions, reader, history, now=now)
        self._records = records
        self._log_starts = LogStarts(partitions, records, history, now=now)
        self._bucket = bucket
        self._may_produce = may_produce
        self._budget = budget
        self._in_memory_bytes = 0
        """Bytes of the records in memory of all answers that are not sent yet."""
        self._now = now
        self._client_log = ClientLog()
        self._on_answer = on_answer
        self._on_topic = on_topic

    def may_produce(self) -> bool:
        """See `ArchiveAnswers`."""
        return self._may_produce()

    def may_have(self, topic: str | UUID, partition: int) -> bool:
        """See `ArchiveAnswers`."""
        return self._partitions.may_have(topic, partition)

    def log_start(self, topic: str | UUID, partition: int, broker_offset: int) -> int:
        """See `ArchiveAnswers`."""
        return self._log_starts.known_log_start(topic, partition, broker_offset)

    def deleted_before(self, topic: str | UUID, partition: int) -> int:
        """See `ArchiveAnswers`."""
        found = self._partitions.identified(topic, partition)
        return 0 if found is None else self._partitions.may_be_deleted_before(found)

    async def close(self) -> None:
        """Cancel the look-ups and reads in the background."""
        await self._log_starts.close()
        await self._reads.close()
        await self._partitions.close()
        self._client_log.close()

    async def fetch(self, question: FetchQuestion) -> ArchivedFetch:
        """See `ArchiveAnswers`. Partitions are served in their order, and share the client's limit."""
        began = self._now()
        reads = await self._reads.read(
            {key: asked.fetch_offset for key, asked in question.partitions.items()},
            wait_seconds=question.wait_seconds,
            due=question.due,
        )
        answer = _Answer(question.max_bytes, question.needs_a_batch)
        try:
            self._fill(answer, question, reads)
            if answer.taken:
                self._on_answer(self._now() - began)
            has_unread = any(not read.is_over for read in reads.values())
            pause_seconds = began + _pause_seconds(answer, question) - self._now()
            if pause_seconds > 0:
                for read in reads.values():
                    read.close()
                # An answer without records at once would only make the client ask again at once.
                await asyncio.sleep(pause_seconds)
            return ArchivedFetch(
                answer.partitions,
                self._release_of(answer),
                answer.next_fetches,
                on_sent=partial(self._count, answer),
                has_unread=has_unread,
                waited_for=tuple(name for read in reads.values() for name in read.waited_for),
            )
        except BaseException:
            answer.close()
            raise
        finally:
            for read in reads.values():
                read.close()

    def _count(self, answer: _Answer) -> None:
        for topic, source, size_bytes in answer.counts:
            self._on_topic(topic, source, size_bytes)

    def _release_of(self, answer: _Answer) -> Callable[[], None]:
        """Count what *answer* has in memory, and return what gives all of it back."""
        self._in_memory_bytes += answer.in_memory_bytes

        def release() -> None:
            self._in_memory_bytes -= answer.in_memory_bytes
            answer.close()

        return release

    def _fill(
        self, answer: _Answer, question: FetchQuestion, reads: Mapping[PartitionKey, ArchiveRead]
    ) -> None:
        """Add the partitions to *answer*, with the batches that are taken from *reads*."""
        for key, asked in question.partitions.items():
            read = reads[key]
            if read.error is not None:
                answer.partitions[key] = self._try_again(key, read.error)
            elif read.found is None and not read.is_over:
                answer.partitions[key] = NOT_READ_YET
            if read.error is not None or read.found is None or (read.held is None and read.is_over):
                # Without an error, the archive does not exist or lacks the offset: the broker's answer
                # is right.
                continue
            log_end_offset = read.found.bounds.log_end_offset if read.found.bounds else math.inf
            if read.is_over and asked.fetch_offset >= log_end_offset:
                # The broker's answer is right: its log ends there, whatever an archive of before has.
                continue
            size_bytes_max = asked.max_bytes
            if read.found.manifest.next_offset > log_end_offset:
                # An election has cut the log off, and the archive is not cut back yet. At most one batch is
                # taken, which has to end before the log does.
                size_bytes_max = 0
            # Offsets from there on are the broker's: after an unclean election its log may have other
            # records.
            log_start = read.found.bounds.log_start_offset if read.found.bounds else 0
            before_offset = log_start if asked.fetch_offset < log_start else math.inf
            is_in_memory = read.takes_memory
            batches, has_room = self._take(answer, read, size_bytes_max, before_offset)
            if batches.size_bytes and batches.next_offset > log_end_offset:
                batches.close()
                answer.partitions[key] = self._try_again(
                    key,
                    StorageUnavailable("the broker's log ends before the archive, which is not cut back yet"),
                )
                continue
            if batches.size_bytes:
                source = Source.STORE if read.waited_for else Source.CACHE
                answer.counts.append((read.found.manifest.partition.topic, source, batches.size_bytes))
            answer.add(batches, is_in_memory=is_in_memory)
            # The broker found the offset out of range, so its own log begins after it.
            log_start_offset = self._log_starts.known_log_start(*key, asked.fetch_offset + 1)
            answer.partitions[key] = _replacement(
                read.found,
                batches,
                # A start after the fetched offset is outdated: it was looked up before this archive existed.
                log_start_offset=log_start_offset if log_start_offset <= asked.fetch_offset else UNKNOWN,
                read_committed=question.read_committed,
            )
            goes_on = _next_fetch(read.found, batches, asked.fetch_offset) if has_room else None
            if goes_on is not None:
                answer.next_fetches[key] = goes_on

    def _try_again(self, key: PartitionKey, error: TieringError) -> PartitionData:
        # A Fetch that is prepared ahead has no client's address.
        if self._client_log.admits(HOST.get() or OTHERS):
            log.warning(
                "the archive of a partition cannot be read now; the client is told to try again",
                partition=f"{key[0]}-{key[1]}",
                reason=str(error),
            )
        return PartitionData(-1, -1, -1, error_code=TRY_AGAIN.value)

    def _take(
        self, answer: _Answer, read: ArchiveRead, size_bytes_max: int, before_offset: float
    ) -> tuple[ArchivedBatches, bool]:
        """Take what *answer* has room for. Returns whether there was room in memory as well."""
        size_bytes_max = min(size_bytes_max, answer.left_bytes)
        if not read.takes_memory:
            batches = read.take(
                size_bytes_max=size_bytes_max,
                needs_a_batch=answer.needs_a_batch,
                before_offset=before_offset,
            )
            return batches, True
        left_bytes = max(self._budget.left - answer.in_memory_bytes, 0)
        batches = read.take(
            size_bytes_max=min(size_bytes_max, left_bytes),
            # One answer at a time may exceed the budget. Otherwise a larger batch could never be sent.
            needs_a_batch=answer.needs_a_batch and not self._in_memory_bytes,
            before_offset=before_offset,
        )
        answer.is_short = answer.is_short or not batches.size_bytes
        return batches, bool(batches.size_bytes)

    async def list_offsets(
        self,
        asked: Mapping[PartitionKey, int],
        *,
        read_committed: bool,  # noqa: ARG002 all that is archived is below the last stable offset
    ) -> Mapping[PartitionKey, ListedOffset | TieringError]:
        """See `ArchiveAnswers`."""
        return await _side_by_side(asked, self._look_up)

    async def _look_up(self, key: PartitionKey, timestamp: int) -> ListedOffset | None:
        found = await self._found_now(key)
        listed = None if found is None else await self._listed(found, timestamp)
        if found is not None and found.awaits_pins and _may_be_pinned(timestamp, listed):
            raise StorageUnavailable(
                f"the offset for {timestamp} of {found.manifest.partition} may be one that only a pin has yet"
            )
        if found is None or listed is None or found.bounds is None:
            return listed
        # An election may have cut the log off, and the archive is not cut back yet. The first offset that is
        # not archived may be where the log ends.
        end = found.bounds.log_end_offset + (timestamp == EARLIEST_PENDING_UPLOAD)
        return listed if listed.offset < end else None

    async def _found_now(self, key: PartitionKey) -> ReadablePartition | None:
        """
        Return a partition as it is since the broker has answered.

        The broker's answer is of its own log. What was archived and trimmed before that answer must be seen
        here: an older manifest would let the client skip it.
        """
        return await self._partitions.find(*key, since=self._now())

    async def _listed(self, found: ReadablePartition, timestamp: int) -> ListedOffset | None:
        try:
            return await self._listed_by(found, timestamp)
        except ObjectNotFound:
            newer = await self._partitions.newest(found.manifest.partition)
            if newer is None:
                return None
            return await self._listed_by(replace(found, manifest=newer), timestamp, is_fresh=True)

    async def _listed_by(
        self, found: ReadablePartition, timestamp: int, *, is_fresh: bool = False
    ) -> ListedOffset | None:
        archives = await self._log_starts.archives(found, is_fresh=is_fresh)
        if not archives:
            return None
        if timestamp == MAX_TIMESTAMP or timestamp >= 0:
            return await listed_at(self._records, archives, timestamp)
        first_offset, last_offset = archives[0].start_offset, archives[-1].next_offset - 1
        if timestamp == EARLIEST:
            first_offset = await self._log_starts.first_of(archives) or first_offset
        # The first offset that is not archived may be the broker's next one, whose epoch is unknown here.
        special = {
            EARLIEST: listed_in(archives[0], first_offset),
            LATEST_TIERED: listed_in(archives[-1], last_offset),
            EARLIEST_PENDING_UPLOAD: ListedOffset(found.manifest.next_offset),
        }
        return special.get(timestamp)

    async def offset_for_leader_epoch(
        self, asked: Mapping[PartitionKey, int]
    ) -> Mapping[PartitionKey, EpochEnd | TieringError]:
        """See `ArchiveAnswers`."""
        return await _side_by_side(asked, self._end_of)

    async def _end_of(self, key: PartitionKey, leader_epoch: int) -> EpochEnd | None:
        found = await self._found_now(key)
        epochs = found.manifest.epochs if found else ()
        # The broker knows the end of the newest archived epoch, and of every later one.
        if found is None or not epochs or leader_epoch >= epochs[-1][0]:
            return None
        end = end_offset_for(epochs, leader_epoch, log_end_offset=found.manifest.next_offset)
        return None if end is None else EpochEnd(*end)

    async def leader_epochs(
        self, asked: Collection[PartitionKey]
    ) -> Mapping[PartitionKey, int | TieringError]:
        """See `ArchiveAnswers`."""
        return await _side_by_side(
            dict.fromkeys(asked, 0), lambda key, _: self._partitions.leader_epoch(*key)
        )

    async def delete_records(
        self, before: Mapping[PartitionKey, int], leader_epochs: Mapping[PartitionKey, int | TieringError]
    ) -> Mapping[PartitionKey, int | TieringError]:
        """See `ArchiveAnswers`."""
        deletions: dict[PartitionKey, RecordDeletion | TieringError | None] = {}
        for key, before_offset in before.items():
            epoch = leader_epochs.get(key)
            deletions[key] = RecordDeletion(before_offset, epoch) if isinstance(epoch, int) else epoch
            partition, deletion = self._partitions.identified(*key), deletions[key]
            if partition is not None and isinstance(deletion, RecordDeletion):
                try:
                    await self._partitions.note_deletion(partition, deletion)
                except TieringError as error:
                    deletions[key] = error
        return await _side_by_side(deletions, self._start_after)

    async def _start_after(
        self, key: PartitionKey, deletion: RecordDeletion | TieringError | None
    ) -> int | None:
        found = await self._found_now(key)
        if found is None:
            return None
        if isinstance(deletion, TieringError):
            raise deletion
        if deletion is None:
            raise StorageUnavailable(
                f"{found.manifest.partition} had no archive yet when its records were deleted"
            )
        # The partition may have been unknown before `find`.
        await self._partitions.note_deletion(found.manifest.partition, deletion)
        return await self._log_starts.first_offset(await self._partitions.record_deletion(found, deletion))

    async def describe_log_dirs(self) -> Sequence[RemoteLogDir]:
        """See `ArchiveAnswers`."""
        if self._bucket is None:
            return ()
        return (RemoteLogDir(f"remote://{self._bucket}", await self._partitions.archived_bytes()),)


async def _side_by_side(
    asked: Mapping[PartitionKey, A], work: Callable[[PartitionKey, A], Awaitable[T | None]]
) -> dict[PartitionKey, T | TieringError]:
    """Return the result of *work*, or its error, for each partition; no entry for a result of None."""

    async def one(asked_of: tuple[PartitionKey, A]) -> T | TieringError | None:
        key, value = asked_of
        try:
            async with asyncio.timeout(_EACH_SECONDS):
                return await work(key, value)
        except TieringError as error:
            return error
        except TimeoutError:
            return StorageUnavailable(f"the archive of {key[0]}-{key[1]} did not respond in time")

    answers = await at_once(list(asked.items()), one, count=_AT_ONCE)
    return {key: answer for key, answer in zip(asked, answers, strict=True) if answer is not None}


def _may_be_pinned(timestamp: int, listed: ListedOffset | None) -> bool:
    """
    Say whether what *timestamp* asks for may be after the archive, of which *listed* is the answer.

    The broker's answer would then lie behind records that the archive has later.
    """
    return timestamp == MAX_TIMESTAMP or (listed is None and (timestamp == EARLIEST or timestamp >= 0))


def _next_fetch(found: ReadablePartition, batches: ArchivedBatches, fetch_offset: int) -> NextFetch | None:
    """
    Return where the next Fetch continues; None unless the archive has that offset and the broker has not.

    Batches in memory have no continuation either: a prepared answer would hold memory for a client that
    may not come back.
    """
    next_offset = batches.next_offset if batches.size_bytes else fetch_offset
    log_start_offset = found.bounds.log_start_offset if found.bounds else -1
    last_offset = min(log_start_offset, found.manifest.next_offset) - 1
    if batches.data is not None or not 0 <= next_offset <= last_offset:
        return None
    return NextFetch(next_offset, last_offset)


def _replacement(
    found: ReadablePartition,
    batches: ArchivedBatches,
    *,
    log_start_offset: int,
    read_committed: bool,
) -> PartitionData:
    bounds = found.bounds
    return PartitionData(
        # The broker's error response has neither, so the broker was asked. -1 is unknown to clients.
        high_watermark=bounds.log_end_offset if bounds else UNKNOWN,
        last_stable_offset=bounds.last_stable_offset if bounds else UNKNOWN,
        log_start_offset=log_start_offset,
        records=batches.pieces,
        aborted=batches.aborted_pairs(read_committed=read_committed),
    )
