"""
Where whole logs begin: the older of the archive's first offset and the broker's.

Answers of the broker tell where its own log begins, and clients remember that: librdkafka seeks "to the
beginning" by the last log start that it was told, without asking again. So every answer tells where the whole
log begins. Answers pass while the loop turns, so this says at once what is known, and -1 otherwise, which
clients take for unknown. What is not known is looked up meanwhile, once for all connections.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from tieringd.errors import TieringError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from tieringd.archive.record_reader import RecordReader
    from tieringd.gateway.archive_answers import PartitionKey
    from tieringd.gateway.readable_partitions import ReadablePartition, ReadablePartitions
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.reading.history import History

log = structlog.get_logger(__name__)

UNKNOWN: Final = -1
START_FRESH_SECONDS: Final = 30.0
"""How old a log start may be. Retention moves it on: a client that comes too early is told so then."""
RETRY_SECONDS: Final = 1.0
"""After a look-up that failed."""
_AT_ONCE: Final = 16
"""Look-ups that may be waiting for the store."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What a look-up found of one partition."""

    archive_offset: int | None
    """Where its archive begins; None where there is none."""
    broker_offset: int
    """Where the broker's log began, at least: an archive that begins later begins there, or after it."""
    looked_at: float

    def tells(self, broker_offset: int) -> bool:
        """Say whether it tells where the whole log begins, when the broker's begins at *broker_offset*."""
        return self.archive_offset is not None or broker_offset <= self.broker_offset


_NEVER_SHORTENED: Final = _Known(0, 0, math.inf)


class LogStarts:
    """The starts of the logs of one broker. Of one loop; closed once."""

    def __init__(
        self,
        partitions: ReadablePartitions,
        records: RecordReader,
        history: History,
        *,
        now: Callable[[], float],
    ) -> None:
        """Take the parts; *now* returns seconds that only grow."""
        self._partitions = partitions
        self._records = records
        self._history = history
        self._now = now
        self._known: dict[TopicIdPartition, _Known] = {}
        self._readable: Mapping[TopicIdPartition, None] = {}
        self._tasks: dict[PartitionKey, asyncio.Task[None]] = {}
        self._not_before: dict[PartitionKey, float] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)

    def told(self, topic: str | UUID, number: int, broker_offset: int) -> int:
        """Return what a client is told, when the broker's log begins at *broker_offset*; -1 is unknown."""
        if broker_offset <= 0:
            return broker_offset
        partition = self._partitions.identified(topic, number)
        if partition is None and not self._partitions.may_have(topic, number):
            return broker_offset
        known = None if partition is None else self._known_of(partition)
        is_told = known is not None and known.tells(broker_offset)
        if known is None or not is_told or self._now() - known.looked_at > START_FRESH_SECONDS:
            self._look(topic, number, broker_offset)
        if known is None or partition is None or not is_told:
            return UNKNOWN
        if known.archive_offset is None:
            return broker_offset
        return min(max(known.archive_offset, self._partitions.deleted_before(partition)), broker_offset)

    async def first_offset(self, found: ReadablePartition) -> int | None:
        """
        Return where a partition's archive begins, older archives included; None where nothing is archived.

        Raises:
            ObjectNotFound: An object has gone: look at the manifest again.
            CorruptDataError: A stored object is damaged.
        """
        return await self.first_of(await self.archives(found))

    async def first_of(self, archives: Sequence[PartitionManifest]) -> int | None:
        """Return the first offset of *archives*, which are the oldest first; None where there are none."""
        if not archives:
            return None
        # A leading gap is no part of the log.
        return await self._records.first_offset(archives[0]) or archives[0].start_offset

    async def archives(self, found: ReadablePartition, *, is_fresh: bool = False) -> list[PartitionManifest]:
        """Return the archives that make up a partition's, oldest first, without what a client has deleted."""
        manifest, hidden = found.manifest, found.deleted_before
        parts = await self._history.parts(
            manifest.partition, start_offset=manifest.start_offset, is_fresh=is_fresh
        )
        seen = [one.seen_from(hidden) for one in (*parts, manifest) if one.next_offset > hidden]
        return [one for one in seen if one.segment_count]

    async def close(self) -> None:
        """End every look-up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known_of(self, partition: TopicIdPartition) -> _Known | None:
        manifest = self._partitions.last_manifest(partition)
        if manifest is not None and manifest.start_offset == 0 and manifest.segment_count:
            # Most archives were never shortened: nothing has to be looked up.
            return _NEVER_SHORTENED
        return self._known.get(partition)

    def _forget_unreadable(self) -> None:
        """Forget the partitions that have gone; called before something is remembered."""
        readable = self._partitions.readable
        if readable is not self._readable:
            self._readable = readable
            self._known = {one: known for one, known in self._known.items() if one in readable}
            now = self._now()
            self._not_before = {key: then for key, then in self._not_before.items() if then > now}

    def _look(self, topic: str | UUID, number: int, broker_offset: int) -> None:
        """Look a partition up, unless that is under way, or has just failed."""
        key = (topic, number)
        if key not in self._tasks and self._not_before.get(key, -math.inf) <= self._now():
            task = asyncio.get_running_loop().create_task(self._look_up(key, broker_offset))
            self._tasks[key] = task
            task.add_done_callback(lambda task: self._on_done(key, task))

    def _on_done(self, key: PartitionKey, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            # A fault of ours: the loop's exception handler reports it.
            task.result()

    async def _look_up(self, key: PartitionKey, broker_offset: int) -> None:
        looked_at = self._now()
        try:
            async with self._places:
                found = await self._partitions.find(*key)
                archive_offset = None if found is None else await self.first_offset(found)
        except TieringError as error:
            # Clients are told that the start is unknown, and ask: their question is answered, or logged.
            log.debug(
                "the start of a log cannot be looked up now", partition=f"{key[0]}-{key[1]}", error=str(error)
            )
            self._forget_unreadable()
            self._not_before[key] = self._now() + RETRY_SECONDS
            return
        self._forget_unreadable()
        partition = self._partitions.identified(*key)
        if partition is not None:
            self._known[partition] = _Known(archive_offset, broker_offset, looked_at)
