"""
Fetch from the archive alone: batches as they were stored, and a wait at the archive's end.

There are no sessions: every request names its partitions. If one partition cannot be read now, that
partition gets a retriable error. Records lie in the cache's files and are not copied. Records that the
cache did not take count against the budget of all connections.

`PartitionReads` reads several partitions of one Fetch concurrently, and no partition keeps the others
waiting. A late read goes on into the cache, for the client's next Fetch. A restored log may continue
older archives (`reading.history`): their records are under the first leader epoch, as through a gateway.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

import structlog
from kio.schema.errors import ErrorCode

from tieringd.endpoint.access import Access, Operation
from tieringd.endpoint.endpoint_settings import EndpointSettings
from tieringd.endpoint.served_manifests import ServedPartitions, ServedTopics
from tieringd.errors import ObjectNotFound, TieringError
from tieringd.formats.kafka_wire.fetch import (
    AskedFetch,
    AskedPartition,
    PartitionData,
    RebuiltResponse,
    asked_of,
    composed,
    session_of,
)
from tieringd.formats.kafka_wire.request_header import RequestHead
from tieringd.gateway.archive_answers import TRY_AGAIN, PartitionKey
from tieringd.gateway.client_log import ClientLog
from tieringd.gateway.read_rates import HOST
from tieringd.gateway.wire import MemoryBudget
from tieringd.metrics.readers import Source
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.chunk_layout import part_holding
from tieringd.reading.history import History
from tieringd.reading.partition_reader import (
    NO_BATCH,
    ArchivedBatches,
    HeldRead,
    PartitionReader,
    release_nothing,
    unfinished_reads,
)
from tieringd.storage.single_flight import SingleFlight
from tieringd.storage.threads import STEP, in_steps, in_thread_if_large

log = structlog.get_logger(__name__)

_HISTORY_SECONDS: Final = 0.2
"""How long a read waits to learn where the history before its archive begins."""
_ENDING_SECONDS: Final = 0.1
"""How long a Fetch waits for the end of reads that it has cancelled."""

_SLOW_SECONDS: Final = 1.0
"""After this time the records read so far go to the client, and the rest in its next Fetch."""
PARTITIONS_AT_ONCE: Final = 16
"""How many partitions are read concurrently. Each may hold a chunk."""


@dataclass(eq=False, slots=True)
class PartitionRead(HeldRead):
    """The state of the read of one partition."""

    partition: TopicIdPartition
    offset: int
    bounds: PartitionManifest | None = None
    """The manifest; None while it is not known."""
    start_offset: int = -1
    """First offset of the log, including its history; -1 while that is unknown, as clients expect."""
    is_outside: bool = False
    """Whether the offset is neither in the archive nor at its end."""
    error: TieringError | None = None


class PartitionReads:
    """Read partitions for the endpoint's clients."""

    def __init__(self, partitions: ServedPartitions, reader: PartitionReader, history: History) -> None:
        self._partitions = partitions
        self._reader = reader
        self._history = history
        self._log_starts: SingleFlight[tuple[TopicIdPartition, int, int], int] = SingleFlight(
            lambda key: f"looking where {key[0]} begins was cancelled"
        )
        self._ending: set[asyncio.Task[None]] = set()
        """Reads that were cancelled, and wait for a thread of the store."""

    async def read(
        self,
        wanted: Sequence[tuple[TopicIdPartition, int]],
        *,
        with_records: bool,
        due_at: float,
        deadline: float,
    ) -> Sequence[PartitionRead]:
        """
        Read each partition at its offset, and return the reads' states when the response is due.

        The response is due at *due_at* if a partition has records, and at *deadline* otherwise. Without
        *with_records* only the bounds are read. The caller closes every read.
        """
        reads = [PartitionRead(partition, offset) for partition, offset in wanted]
        tasks = [asyncio.create_task(self._run(read, with_records=with_records)) for read in reads]
        now = asyncio.get_running_loop().time

        def left_seconds(_: set[asyncio.Task[None]]) -> float:
            return (due_at if any(read.held for read in reads) else deadline) - now()

        late = await unfinished_reads(tasks, reads, left_seconds)
        for task in late:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        if late:
            try:
                # A call of a file store ends only when its thread does, and no client waits for a hung disk.
                await asyncio.wait(late, timeout=_ENDING_SECONDS)
            except BaseException:
                for read in reads:
                    read.close()
                raise
            finally:
                for task, read in zip(tasks, reads, strict=True):
                    if not task.done():
                        # No response takes what it may still get.
                        task.add_done_callback(partial(_close, read))
        return reads

    async def _run(self, read: PartitionRead, *, with_records: bool) -> None:
        read.note_waits()
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
        """Record the bounds, and return the archive that has the offset, or None if no archive has it."""
        read.bounds, read.is_history, read.is_outside = manifest, False, False
        if read.offset >= manifest.start_offset:
            read.start_offset = await self._start_of(manifest)
            if read.offset < manifest.next_offset:
                return manifest
        else:
            parts = await self._history.parts(
                manifest.partition,
                start_offset=manifest.start_offset,
                deleted_before=manifest.deleted_before,
                is_fresh=is_fresh,
            )
            read.is_history = True
            read.start_offset = parts[0].start_offset if parts else manifest.start_offset
            part = part_holding(parts, read.offset)
            if part is not None:
                return part
        read.is_outside = read.offset != manifest.next_offset
        return None

    async def _start_of(self, manifest: PartitionManifest) -> int:
        """Return where a log begins; -1 if its history, which the read does not need, is not known soon."""
        if manifest.start_offset == 0:
            return 0
        place = (manifest.partition, manifest.start_offset, manifest.deleted_before)
        # A cancelled call of a file store would wait for its thread. So the look goes on without this read.
        look = self._log_starts.join(place, lambda: self._log_start(manifest)).task
        await asyncio.wait({look}, timeout=_HISTORY_SECONDS)
        return look.result() if look.done() else -1

    async def _log_start(self, manifest: PartitionManifest) -> int:
        """Return where a log begins; -1 if its history cannot be read now."""
        try:
            parts = await self._history.parts(
                manifest.partition,
                start_offset=manifest.start_offset,
                deleted_before=manifest.deleted_before,
            )
        except TieringError:
            return -1
        return parts[0].start_offset if parts else manifest.start_offset


def _close(read: PartitionRead, _: asyncio.Task[None]) -> None:
    read.close()


@dataclass(slots=True)
class _Reading:
    """The result of reading for one request so far."""

    left_bytes: int
    answers: dict[PartitionKey, PartitionData] = field(default_factory=dict)
    held: list[ArchivedBatches] = field(default_factory=list)
    size_bytes: int = 0
    in_memory_bytes: int = 0
    is_refused: bool = False
    """Whether a partition has an error that the client has to act on."""
    has_failed: bool = False
    """Whether a partition has the error to try again."""
    has_more: bool = False
    """Whether more is archived behind the records of a partition."""
    waited_for: list[str] = field(default_factory=list)
    topics: list[tuple[str, Source, int]] = field(default_factory=list)
    """Topic, source and bytes of the records of each partition."""

    def release(self) -> None:
        """Release all held batches."""
        for one in self.held:
            one.close()
        self.held.clear()


class FetchAnswers:
    """Answers to Fetch. Keeps no state between requests."""

    def __init__(
        self,
        topics: ServedTopics,
        partitions: ServedPartitions,
        reader: PartitionReader,
        settings: EndpointSettings,
        *,
        budget: MemoryBudget,
        history: History,
        bytes_max: Callable[[], float] = lambda: math.inf,
        on_topic: Callable[[str, Source, int], None],
    ) -> None:
        """
        Keep the arguments.

        A response has at most *bytes_max* bytes of records; only a first batch may be larger. *on_topic* gets
        the topic, the source and the bytes of the records of each partition in a response.
        """
        self._topics = topics
        self._partitions = partitions
        self._reads = PartitionReads(partitions, reader, history)
        self._settings = settings
        self._budget = budget
        self._bytes_max = bytes_max
        self._on_topic = on_topic
        self._client_log = ClientLog()

    async def fetch(
        self, head: RequestHead, frame: memoryview, access: Access
    ) -> tuple[RebuiltResponse, Callable[[], None], tuple[str, ...]]:
        """
        Return the whole response, the function to call after sending or on failure, and awaited chunks.

        Raises:
            ProtocolViolation: It is not a Fetch request of its version.
        """
        if session_of(frame, head):
            # The session is one of a broker that had this address before.
            code = ErrorCode.fetch_session_id_not_found.value
            return composed(head.correlation_id, head.version, {}, error_code=code), release_nothing, ()
        asked = await in_thread_if_large(len(frame), asked_of, frame, head)
        reading = await self._read_or_wait(asked, access)
        for one in reading.topics:
            self._on_topic(*one)
        topics: dict[str | UUID, dict[int, PartitionData]] = {}
        try:
            async for (topic, number), answer in in_steps(reading.answers.items()):
                topics.setdefault(topic, {})[number] = answer
            response = await in_thread_if_large(
                len(frame), composed, head.correlation_id, head.version, topics
            )
        except BaseException:
            reading.release()
            raise
        return response, reading.release, tuple(reading.waited_for)

    async def _read_or_wait(self, asked: AskedFetch, access: Access) -> _Reading:
        """Return the records when there are enough, or when the client has waited long enough."""
        loop = asyncio.get_running_loop()
        wait_seconds = min(max(asked.max_wait_ms, 0) / 1000, self._settings.longest_wait_seconds)
        deadline = loop.time() + wait_seconds
        enough = min(asked.min_bytes, self._bytes_max())
        served = [
            found
            async for topic, number in in_steps(asked.partitions)
            if (found := self._partition(topic, number, access))
        ]
        with self._partitions.watching(served) as changed:
            while True:
                # Cleared before the read, so that no change is missed.
                changed.clear()
                reading = await self._read(asked, served, access)
                left_seconds = 0 if self._partitions.is_ending else deadline - loop.time()
                # Waiting brings nothing where a segment or a chunk ends. A broker does not wait there either.
                ends_early = reading.has_more or reading.has_failed
                is_enough = reading.size_bytes >= enough or (ends_early and reading.size_bytes)
                if is_enough or reading.is_refused or left_seconds <= 0:
                    return reading
                reading.release()
                # Also before an answer of errors alone: most clients ask again at once.
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_seconds, self._settings.sync_interval_seconds)):
                        await changed.wait()
                if reading.has_failed and not changed.is_set():
                    return reading

    def _partition(self, topic: str | UUID, number: int, access: Access) -> TopicIdPartition | None:
        """Return a partition; None if there is none, or the client may not read it."""
        found = self._topics.find(topic)
        if found is None or not access.may(Operation.READ, found.name):
            return None
        return found.partition(number)

    async def _read(
        self, asked: AskedFetch, partitions: Sequence[TopicIdPartition], access: Access
    ) -> _Reading:
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        deadline = begun_at + self._settings.answer_timeout_seconds
        reading = _Reading(int(min(asked.max_bytes, self._bytes_max())))
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._partitions.ensure_fresh(partitions)
        due_at = begun_at + _SLOW_SECONDS
        try:
            items = list(asked.partitions.items())
            begins = range(0, len(items), PARTITIONS_AT_ONCE)
            async for begin in in_steps(begins, step=STEP // PARTITIONS_AT_ONCE):
                known: list[tuple[PartitionKey, AskedPartition, TopicIdPartition]] = []
                for key, wanted in items[begin : begin + PARTITIONS_AT_ONCE]:
                    served = self._partition(*key, access)
                    if served is None:
                        reading.answers[key] = _failed(reading, self._unknown(key, access))
                    else:
                        known.append((key, wanted, served))
                is_late = bool(reading.size_bytes) and loop.time() > due_at
                is_over = is_late or (reading.left_bytes <= 0 and bool(reading.size_bytes))
                reads = await self._reads.read(
                    [(served, wanted.fetch_offset) for _, wanted, served in known],
                    with_records=not is_over,
                    due_at=due_at,
                    # Records that are ready do not wait longer for the other partitions.
                    deadline=min(deadline, due_at) if reading.size_bytes else deadline,
                )
                try:
                    has_records = bool(reading.size_bytes) or any(read.held for read in reads)
                    for (key, wanted, _), read in zip(known, reads, strict=True):
                        reading.answers[key] = self._answer(
                            reading,
                            read,
                            wanted,
                            has_records=has_records,
                            read_committed=asked.read_committed,
                        )
                finally:
                    for read in reads:
                        read.close()
        except BaseException:
            reading.release()
            raise
        # In the order of the request, as brokers answer.
        reading.answers = {key: reading.answers[key] for key in asked.partitions}
        return reading

    def _unknown(self, key: PartitionKey, access: Access) -> ErrorCode:
        found = self._topics.find(key[0])
        name = key[0] if found is None else found.name
        if isinstance(name, str) and not access.may(Operation.READ, name):
            return ErrorCode.topic_authorization_failed
        if found is None and isinstance(key[0], UUID):
            return ErrorCode.unknown_topic_id
        return ErrorCode.unknown_topic_or_partition

    def _answer(
        self,
        reading: _Reading,
        read: PartitionRead,
        wanted: AskedPartition,
        *,
        has_records: bool,
        read_committed: bool,
    ) -> PartitionData:
        bounds = read.bounds or self._partitions.known(read.partition)
        is_late = bounds is None or (
            read.held is None and not has_records and read.offset != bounds.next_offset
        )
        if read.is_outside:
            return _failed(reading, ErrorCode.offset_out_of_range, bounds, read.start_offset)
        if bounds is None or is_late or read.error is not None:
            return self._not_now(reading, read, read.error)
        if read.held is None or (reading.left_bytes <= 0 and reading.size_bytes):
            return _found(bounds, NO_BATCH, read.start_offset, read_committed=read_committed)
        try:
            batches = read.take(
                size_bytes_max=min(reading.left_bytes, wanted.max_bytes),
                needs_a_batch=not reading.size_bytes,
            )
        except TieringError as error:
            return self._not_now(reading, read, error)
        reading.waited_for += read.waited_for
        if self._has_room(reading, batches):
            reading.held.append(batches)
            if batches.size_bytes:
                source = Source.STORE if read.waited_for else Source.CACHE
                reading.topics.append((read.partition.topic, source, batches.size_bytes))
                reading.has_more = reading.has_more or batches.next_offset < bounds.next_offset
            reading.size_bytes += batches.size_bytes
            reading.left_bytes -= batches.size_bytes
        else:
            batches.close()
            batches = NO_BATCH
        return _found(bounds, batches, read.start_offset, read_committed=read_committed)

    def _has_room(self, reading: _Reading, batches: ArchivedBatches) -> bool:
        """Say whether records in memory may stay there. Records in files take no memory."""
        if batches.data is None:
            return True
        held_bytes = self._budget.used + reading.in_memory_bytes
        # The first ones may exceed the limit. Otherwise a batch above it could never be sent.
        if held_bytes and held_bytes + batches.size_bytes > self._budget.limit:
            return False
        reading.in_memory_bytes += batches.size_bytes
        return True

    def _not_now(self, reading: _Reading, read: PartitionRead, error: TieringError | None) -> PartitionData:
        if self._client_log.admits(HOST.get()):
            log.warning(
                "archived records cannot be read now",
                partition=str(read.partition),
                offset=read.offset,
                error="they did not arrive in time" if error is None else str(error),
            )
        return _failed(reading, TRY_AGAIN)


def _failed(
    reading: _Reading,
    error: ErrorCode,
    manifest: PartitionManifest | None = None,
    log_start_offset: int = -1,
) -> PartitionData:
    if error is TRY_AGAIN:
        reading.has_failed = True
    else:
        reading.is_refused = True
    if manifest is None:
        return PartitionData(-1, -1, -1, error_code=error.value)
    return PartitionData(manifest.next_offset, manifest.next_offset, log_start_offset, error_code=error.value)


def _found(
    manifest: PartitionManifest,
    batches: ArchivedBatches,
    log_start_offset: int,
    *,
    read_committed: bool,
) -> PartitionData:
    return PartitionData(
        high_watermark=manifest.next_offset,
        last_stable_offset=manifest.next_offset,
        log_start_offset=log_start_offset,
        records=batches.pieces,
        aborted=batches.aborted_pairs(read_committed=read_committed),
    )
