"""
ListOffsets and OffsetForLeaderEpoch, from manifests and, for a timestamp, from records.

All archived records were below the last stable offset, so both isolation levels see the same end: the
end of the archive. No record is local, so the earliest local offset is the end as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import structlog
from kio.schema.errors import ErrorCode

from tieringd.archive.record_reader import RecordReader
from tieringd.endpoint.access import Access, Operation
from tieringd.endpoint.cluster_answers import NO_DELAY
from tieringd.endpoint.endpoint_settings import ApiKey, EndpointSettings
from tieringd.endpoint.served_manifests import ServedPartitions, ServedTopics
from tieringd.errors import ObjectNotFound, TieringError
from tieringd.formats.kafka_wire.messages import made, response_module
from tieringd.gateway.archive_answers import (
    EARLIEST,
    EARLIEST_PENDING_UPLOAD,
    LATEST,
    LATEST_TIERED,
    MAX_TIMESTAMP,
    TRY_AGAIN,
    ListedOffset,
    listed_at,
    listed_in,
)
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.epoch_history import end_offset_for
from tieringd.reading.history import History
from tieringd.storage.at_once import at_once
from tieringd.storage.threads import in_steps

log = structlog.get_logger(__name__)

EARLIEST_LOCAL: Final = -4
_AT_ONCE: Final = 16
"""How many partitions of one request may wait for the store at once."""
_Wanted: TypeAlias = tuple[str, int, int]
"""A topic's name, a partition number, and a timestamp or one of Kafka's special ones."""
_NOTHING: Final = ListedOffset(-1)


class OffsetAnswers:
    """The first and the end offsets of archived logs, and the offsets of timestamps and leader epochs."""

    def __init__(
        self,
        topics: ServedTopics,
        partitions: ServedPartitions,
        records: RecordReader,
        settings: EndpointSettings,
        *,
        history: History,
    ) -> None:
        self._topics = topics
        self._partitions = partitions
        self._records = records
        self._settings = settings
        self._history = history

    async def list_offsets(self, version: int, request: Any, access: Access) -> Any:
        """Return an offset for each partition's timestamp."""
        module: Any = response_module(ApiKey.LIST_OFFSETS, version)
        allowed = {one.name async for one in in_steps(request.topics) if _is_allowed(access, one.name)}
        every = [(at, topic.name, one) for at, topic in enumerate(request.topics) for one in topic.partitions]
        deadline = await self._ensure_fresh(
            (name, one.partition_index) for _, name, one in every if name in allowed
        )
        looked_up = await self._looked_up(
            ((name, one.partition_index, int(one.timestamp)) for _, name, one in every if name in allowed),
            deadline=deadline,
        )
        answers: list[list[Any]] = [[] for _ in request.topics]
        async for at, name, asked in in_steps(every):
            error, found = ErrorCode.topic_authorization_failed, _NOTHING
            wanted = (name, asked.partition_index, int(asked.timestamp))
            if wanted in looked_up:
                error, found = looked_up[wanted]
            elif name in allowed:
                error, found = await self._listed(wanted, deadline=deadline)
            answers[at].append(
                made(
                    module.ListOffsetsPartitionResponse,
                    partition_index=asked.partition_index,
                    error_code=error,
                    timestamp=found.timestamp_ms,
                    offset=found.offset,
                    leader_epoch=found.leader_epoch,
                )
            )
        topics = [
            module.ListOffsetsTopicResponse(name=topic.name, partitions=tuple(found))
            async for topic, found in in_steps(zip(request.topics, answers, strict=True))
        ]
        return made(module.ListOffsetsResponse, throttle_time=NO_DELAY, topics=tuple(topics))

    async def _looked_up(
        self, asked_for: Iterable[_Wanted], *, deadline: float
    ) -> Mapping[_Wanted, tuple[ErrorCode, ListedOffset]]:
        """Return the offsets of times, several of which are looked up in the store at once."""
        wanted = {one: None async for one in in_steps(asked_for) if one[2] >= 0 or one[2] == MAX_TIMESTAMP}
        asked = [one async for one in in_steps(wanted) if self._partition(*one[:2]) is not None]
        found = await at_once(asked, partial(self._listed, deadline=deadline), count=_AT_ONCE)
        return dict(zip(asked, found, strict=True))

    async def offset_for_leader_epoch(self, version: int, request: Any, access: Access) -> Any:
        """Return where each leader epoch ends."""
        module: Any = response_module(ApiKey.OFFSET_FOR_LEADER_EPOCH, version)
        wanted: dict[TopicIdPartition, int] = {}
        allowed = {one.topic async for one in in_steps(request.topics) if _is_allowed(access, one.topic)}
        every = [
            (at, topic.topic, one) for at, topic in enumerate(request.topics) for one in topic.partitions
        ]
        async for _, name, one in in_steps(every):
            if name in allowed and (found := self._partition(name, one.partition)) is not None:
                wanted[found] = max(one.leader_epoch, wanted.get(found, one.leader_epoch))
        manifests = await self._past_epochs(wanted)
        answers: list[list[Any]] = [[] for _ in request.topics]
        async for at, name, asked in in_steps(every):
            error, end = ErrorCode.topic_authorization_failed, None
            if name in allowed:
                error, end = _epoch_end(self._partition(name, asked.partition), asked.leader_epoch, manifests)
            leader_epoch, end_offset = end or (-1, -1)
            answers[at].append(
                module.EpochEndOffset(
                    partition=asked.partition,
                    error_code=error,
                    leader_epoch=leader_epoch,
                    end_offset=end_offset,
                )
            )
        topics = [
            module.OffsetForLeaderTopicResult(topic=topic.topic, partitions=tuple(ends))
            async for topic, ends in in_steps(zip(request.topics, answers, strict=True))
        ]
        return module.OffsetForLeaderEpochResponse(throttle_time=NO_DELAY, topics=tuple(topics))

    async def _past_epochs(
        self, wanted: Mapping[TopicIdPartition, int]
    ) -> Mapping[TopicIdPartition, PartitionManifest]:
        """Return the manifests in which the *wanted* epochs end; none where it cannot be read in time."""
        deadline = asyncio.get_running_loop().time() + self._settings.answer_timeout_seconds

        async def read(asked: tuple[TopicIdPartition, int]) -> PartitionManifest | None:
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._partitions.past_epoch(*asked)
            except (TieringError, TimeoutError) as error:
                _warn(asked[0], error)
                return None

        found = await at_once(list(wanted.items()), read, count=_AT_ONCE)
        return {partition: one for partition, one in zip(wanted, found, strict=True) if one is not None}

    async def _ensure_fresh(self, asked: Iterable[tuple[str, int]]) -> float:
        """Read all manifests that are due, concurrently. Return the time at which the response is due."""
        deadline = asyncio.get_running_loop().time() + self._settings.answer_timeout_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._partitions.ensure_fresh(
                    [found async for one in in_steps(asked) if (found := self._partition(*one))]
                )
        return deadline

    def _partition(self, topic: str, number: int) -> TopicIdPartition | None:
        served = self._topics.by_name(topic)
        return None if served is None else served.partition(number)

    async def _listed(self, wanted: _Wanted, *, deadline: float) -> tuple[ErrorCode, ListedOffset]:
        topic, number, timestamp = wanted
        partition = self._partition(topic, number)
        if partition is None:
            return ErrorCode.unknown_topic_or_partition, _NOTHING
        try:
            async with asyncio.timeout_at(deadline):
                manifest = await self._partitions.manifest(partition)
                try:
                    return ErrorCode.none, await self._offset(manifest, timestamp)
                except ObjectNotFound:
                    return ErrorCode.none, await self._offset(
                        await self._partitions.newest(partition), timestamp, is_fresh=True
                    )
        except (TieringError, TimeoutError) as error:
            _warn(partition, error)
            return TRY_AGAIN, _NOTHING

    async def _offset(
        self, manifest: PartitionManifest, timestamp: int, *, is_fresh: bool = False
    ) -> ListedOffset:
        match timestamp:
            case n if n in {LATEST, EARLIEST_LOCAL, EARLIEST_PENDING_UPLOAD}:
                return listed_in(manifest, manifest.next_offset)
            case n if n == LATEST_TIERED:
                last_offset = manifest.last_offset
                return _NOTHING if last_offset is None else listed_in(manifest, last_offset)
        parts = await self._history.parts(
            manifest.partition,
            start_offset=manifest.start_offset,
            deleted_before=manifest.deleted_before,
            is_fresh=is_fresh,
        )
        archives = (*parts, manifest)
        if timestamp == EARLIEST:
            return listed_in(archives[0], archives[0].start_offset)
        return await listed_at(self._records, archives, timestamp) or _NOTHING


def _is_allowed(access: Access, topic: str) -> bool:
    return access.may(Operation.DESCRIBE, topic)


def _epoch_end(
    partition: TopicIdPartition | None,
    leader_epoch: int,
    manifests: Mapping[TopicIdPartition, PartitionManifest],
) -> tuple[ErrorCode, tuple[int, int] | None]:
    if partition is None:
        return ErrorCode.unknown_topic_or_partition, None
    manifest = manifests.get(partition)
    if manifest is None:
        return TRY_AGAIN, None
    history, end_offset = manifest.epochs, manifest.next_offset
    if manifest.leader_epoch > (history[-1][0] if history else -1):
        # As in a broker's log, the leader's epoch begins at the end, also before it has written anything.
        history = (*history, (manifest.leader_epoch, end_offset))
    return ErrorCode.none, end_offset_for(history, leader_epoch, log_end_offset=end_offset)


def _warn(partition: TopicIdPartition, error: Exception) -> None:
    log.warning(
        "an offset cannot be looked up now",
        partition=str(partition),
        error=str(error) or type(error).__name__,
    )
