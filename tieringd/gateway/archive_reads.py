"""
The reads of the archive that a gateway's clients wait for.

`ArchiveReads` reads the partitions of one Fetch concurrently, and no partition keeps the others waiting. A
Fetch is answered when one partition has records, or when the client has waited as long as it wants to. The
reads of the other partitions go on, for the client's next Fetch. That Fetch waits a while for partitions that
were late before: without the wait, a partition without cached chunks would be late every time.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from tieringd.errors import ObjectNotFound, StorageUnavailable, TieringError
from tieringd.gateway.archive_answers import PartitionKey
from tieringd.gateway.known_partitions import KnownPartitions, ReadablePartition
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.chunk_layout import part_holding
from tieringd.reading.history import History
from tieringd.reading.partition_reader import (
    HeldBatches,
    HeldRead,
    PartitionReader,
    PassageBatch,
    passage,
    unfinished_reads,
)
from tieringd.storage.at_once import cancelled

log = structlog.get_logger(__name__)

_GOING_ON_MAX = 32
"""How many reads may go on without a Fetch that waits for them. Each may hold a chunk."""
_GOES_ON_SECONDS = 30.0
"""How long they may go on."""
_READS_AT_ONCE = 8
"""How many partitions of one Fetch may wait for the store at once."""
_PATIENCE_SECONDS = 0.003
"""How long to wait for all partitions once one has records. Opening a cached file takes less."""
_LATE_SECONDS = 5.0
"""How long to wait for partitions that were late before, once another partition has records."""


@dataclass(eq=False, slots=True)
class ArchiveRead(HeldRead):
    """The state of the read of one partition. Nothing is held if the archive has nothing, or is late."""

    found: ReadablePartition | None = None
    """
    None if the partition has no archive, or is not found yet.

    Once the read is over, it is what was known when it ended, so that an answer never rests on old bounds.
    """
    error: TieringError | None = None
    has_begun: bool = False
    is_over: bool = False
    """False if the read is late."""
    is_lost: bool = False
    """Whether what is held moves the client past offsets that are lost, by what was known at the read."""


@dataclass(eq=False, frozen=True, slots=True)
class _GoingOn:
    """A read that took longer than its Fetch waited, and the timer that ends it if no Fetch takes it over."""

    read: ArchiveRead
    task: asyncio.Task[None]
    timer: asyncio.TimerHandle

    def close(self) -> None:
        self.timer.cancel()
        # The task may hold a chunk at the moment it is cancelled, or have failed by a defect.
        self.task.add_done_callback(self._on_end)
        self.task.cancel()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self.read.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a read of the archive failed by a defect", exc_info=error)


class ArchiveReads:
    """
    Read partitions for the gateway's clients. Closed once.

    A read that takes longer than its Fetch waits goes on. The next Fetch of the same partition at the same
    offset, of any client, takes it over. Meanwhile the topic may have been created again, an election may
    have cut the log off, and a client may have deleted the records. So the partition is looked up once more.
    """

    def __init__(
        self,
        partitions: KnownPartitions,
        reader: PartitionReader,
        history: History,
        *,
        now: Callable[[], float],
    ) -> None:
        """Keep the arguments. *now* is the clock of *partitions*."""
        self._partitions = partitions
        self._reader = reader
        self._history = history
        self._now = now
        self._going_on: OrderedDict[tuple[PartitionKey, int], _GoingOn] = OrderedDict()

    async def read(
        self,
        offsets: Mapping[PartitionKey, int],
        *,
        wait_seconds: float,
        due: asyncio.Future[None] | None = None,
    ) -> Mapping[PartitionKey, ArchiveRead]:
        """
        Begin to read each partition at its offset, and return the reads' states when the answer is due.

        That is after *wait_seconds*, or sooner if there are records or *due* is done. The caller closes every
        read.
        """
        places = asyncio.Semaphore(_READS_AT_ONCE)
        reads: dict[PartitionKey, ArchiveRead] = {}
        tasks: dict[PartitionKey, asyncio.Task[None]] = {}
        must: set[asyncio.Task[None]] = set()
        for key, offset in offsets.items():
            before = self._taken_over(key, offset)
            if before is not None:
                reads[key], tasks[key] = before.read, before.task
                if before.task.done() and before.read.held is not None:
                    before.read.is_over = False
                    tasks[key] = asyncio.create_task(self._look_again(before.read, key, offset))
                must.add(tasks[key])
            else:
                reads[key] = ArchiveRead()
                tasks[key] = asyncio.create_task(self._run(reads[key], key, offset, places))
        now = asyncio.get_running_loop().time
        begun_at = now()

        def left_seconds(pending: set[asyncio.Task[None]]) -> float:
            limit = wait_seconds
            if any(read.held for read in reads.values()):
                limit = min(limit, _LATE_SECONDS if pending & must else _PATIENCE_SECONDS)
            return begun_at + limit - now()

        late = await unfinished_reads(tasks.values(), reads.values(), left_seconds, due=due)
        for key, task in tasks.items():
            if task in late and reads[key].has_begun:
                self._let_go_on(key, offsets[key], reads[key], task, is_known=task in must)
                reads[key] = ArchiveRead(found=reads[key].found, has_begun=True)
            elif task in late:
                task.cancel()
        return reads

    async def close(self) -> None:
        """End the reads that go on."""
        going_on, self._going_on = self._going_on, OrderedDict()
        await cancelled([one.task for one in going_on.values()])
        for one in going_on.values():
            one.close()

    def _let_go_on(
        self,
        key: PartitionKey,
        offset: int,
        read: ArchiveRead,
        task: asyncio.Task[None],
        *,
        is_known: bool,
    ) -> None:
        place = (key, offset)
        if not is_known:
            log.info(
                "a read of the archive takes longer than its client waits; it goes on",
                partition=f"{key[0]}-{key[1]}",
                offset=offset,
                waits_for="the manifest" if read.found is None else "the store",
            )
        timer = asyncio.get_running_loop().call_later(_GOES_ON_SECONDS, self._give_up, place)
        # Another client may ask the same at the same time.
        self._end(place)
        self._going_on[place] = _GoingOn(read, task, timer)
        if len(self._going_on) > _GOING_ON_MAX:
            self._end(next(iter(self._going_on)))

    def _taken_over(self, key: PartitionKey, offset: int) -> _GoingOn | None:
        before = self._going_on.pop((key, offset), None)
        if before is None:
            return None
        before.timer.cancel()
        read = before.read
        # A read that has found nothing is read anew: the archive may have the offset by now.
        has_found = read.held is not None and not read.is_lost
        return None if read.is_over and not has_found and read.error is None else before

    def _give_up(self, place: tuple[PartitionKey, int]) -> None:
        """End a read that no Fetch took over. One that still waits is a fault of the store."""
        one = self._going_on.get(place)
        if one is not None and not one.task.done():
            log.warning(
                "a read of the archive does not end; it is given up",
                partition=f"{place[0][0]}-{place[0][1]}",
                offset=place[1],
                waits_for="the manifest" if one.read.found is None else "the store",
            )
        self._end(place)

    def _end(self, place: tuple[PartitionKey, int]) -> None:
        one = self._going_on.pop(place, None)
        if one is not None:
            one.close()

    async def _run(
        self, read: ArchiveRead, key: PartitionKey, offset: int, places: asyncio.Semaphore
    ) -> None:
        async with places:
            read.has_begun = True
            read.note_waits()
            await self._read(read, key, offset)
        read.is_over = True

    async def _look_again(self, read: ArchiveRead, key: PartitionKey, offset: int) -> None:
        """Look up what may have changed since *read* ended."""
        try:
            await self._confirm(read, key, offset)
        except TieringError as error:
            read.close()
            read.error = error
        read.is_over = True

    async def _read(self, read: ArchiveRead, key: PartitionKey, offset: int) -> None:
        begun_at = self._now()
        try:
            await self._find_and_hold(read, key, offset)
            found = read.found
            if found is None or read.held is None or _is_cut_off(found):
                # Since the broker was asked for its bounds, more may have been written, archived and trimmed,
                # also for the first time. Without a second look, a client would be told that the offset does
                # not exist.
                read.close()
                await self._find_and_hold(read, key, offset, since=begun_at)
            await self._confirm(read, key, offset)
            if read.found is not None and read.held is None:
                if read.found.is_pinned(offset):
                    raise StorageUnavailable(f"offset {offset} is not in the archive yet")
                await self._pass_lost(read, key, offset)
        except TieringError as error:
            read.close()
            read.error = error

    async def _find_and_hold(
        self, read: ArchiveRead, key: PartitionKey, offset: int, *, since: float = -math.inf
    ) -> None:
        read.found = found = await self._partitions.find(*key, since=since)
        if found is None or offset < found.deleted_before:
            return
        read.is_history = offset < found.manifest.start_offset
        if read.is_history:
            read.held = await self._held_of_history(found.manifest, offset)
        else:
            read.held = await self._held(found, offset)

    async def _confirm(self, read: ArchiveRead, key: PartitionKey, offset: int) -> None:
        """
        Look a partition up after its read, which may have taken long. This asks nothing if it did not.

        Raises:
            StorageUnavailable: The topic is another one now, or it is not known which one it is.
        """
        before = read.found
        if before is None or read.held is None:
            return
        found = await self._partitions.find(*key)
        if found is None or found.manifest.partition != before.manifest.partition:
            raise StorageUnavailable(f"the topic of {key[0]}-{key[1]} is another one than before")
        read.found = found
        if offset < found.deleted_before:
            read.close()

    async def _pass_lost(self, read: ArchiveRead, key: PartitionKey, offset: int) -> None:
        """
        Hold a passage over offsets that left the broker before they were archived, and are not a gap yet.

        The broker's answer would have a client that resets to the earliest offset read the whole archive
        again, and then again.

        Raises:
            StorageUnavailable: The archive may still get the offset, or the log has changed.
        """
        if read.found is None or not read.found.is_before_log(offset):
            return
        # The bounds and the scan are as old as the read, which may have taken long.
        read.found = found = await self._partitions.find(*key)
        if found is None or not found.is_before_log(offset) or found.is_pinned(offset):
            raise StorageUnavailable(f"what has offset {offset} has changed while it was looked up")
        unarchived, bounds = found.unarchived, found.bounds
        if unarchived is None or bounds is None:
            # Nothing says whether the offset is lost.
            return
        next_offset = min(unarchived.lost_before, bounds.log_start_offset)
        if offset < next_offset:
            read.held, read.is_lost = passage(found.manifest, offset, next_offset=next_offset), True
        elif unarchived.is_undecided(offset):
            raise StorageUnavailable(
                f"offset {offset} is neither in the archive nor in the broker's log; the next rounds tell "
                "whether it is lost"
            )

    async def _held(self, found: ReadablePartition, offset: int) -> HeldBatches | PassageBatch | None:
        """
        Hold the archived batches from the wanted offset on; None if the archive does not have it.

        The broker has reported that it does not have the offset. If the manifest ends before the offset
        and the local log begins after it, the manifest is outdated: the offsets in between were trimmed
        because a newer manifest holds them.
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
    ) -> HeldBatches | PassageBatch | None:
        parts = partial(
            self._history.parts, manifest.partition, start_offset=manifest.start_offset, from_offset=offset
        )
        try:
            return await self._held_in(await parts(), offset)
        except ObjectNotFound:
            return await self._held_in(await parts(is_fresh=True), offset)

    async def _held_in(
        self, parts: Sequence[PartitionManifest], offset: int
    ) -> HeldBatches | PassageBatch | None:
        part = part_holding(parts, offset)
        return None if part is None else await self._reader.hold(part, offset)

    async def _newest(self, manifest: PartitionManifest) -> PartitionManifest:
        newer = await self._partitions.newest(manifest.partition)
        if newer is None:
            raise StorageUnavailable(f"the manifest of {manifest.partition} no longer exists")
        return newer


def _is_cut_off(found: ReadablePartition) -> bool:
    """Say whether the broker's log ends before the archive."""
    return found.bounds is not None and found.manifest.next_offset > found.bounds.log_end_offset
