"""
Combine answers of the broker and of the archive into one.

These are functions of bytes and of the archive; they know no connection. If the archive has nothing to
add, the result is the broker's bytes. If the archive cannot answer now, the client gets a retriable
error: the broker's own answer would make it skip archived records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar
from uuid import UUID

import structlog
from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_protocol import CLIENT_ID
from tieringd.errors import TieringError
from tieringd.formats.kafka_wire.fetch import AskedFetch, PartitionData, asked_of, composed, rebuilt
from tieringd.formats.kafka_wire.messages import (
    decode_request,
    decode_response,
    encode_response,
    response_module,
)
from tieringd.formats.kafka_wire.request_header import InspectedApi, RequestHead, client_id_of
from tieringd.gateway.archive_answers import (
    EARLIEST,
    EARLIEST_PENDING_UPLOAD,
    LATEST,
    LATEST_TIERED,
    LONGEST_WAIT_SECONDS,
    MAX_TIMESTAMP,
    NOT_READ_YET,
    TRY_AGAIN,
    ArchiveAnswers,
    ArchivedFetch,
    FetchQuestion,
    ListedOffset,
    NextFetch,
    PartitionKey,
    RemoteLogDir,
)
from tieringd.gateway.frames import ClientResponse
from tieringd.gateway.responses import ArchivableResponse
from tieringd.reading.partition_reader import release_nothing
from tieringd.storage.threads import in_steps, in_thread_if_large

log = structlog.get_logger(__name__)

T = TypeVar("T")

_ONLY_ARCHIVED: Final = frozenset({LATEST_TIERED, EARLIEST_PENDING_UPLOAD})
_SPECIAL: Final = _ONLY_ARCHIVED | {EARLIEST, MAX_TIMESTAMP}
_UNKNOWN: Final = -1
_LIVE_WAIT_SECONDS: Final = 0.01
"""
How long the broker's own records in a response wait for archived ones, and the shortest wait for the archive.

Opening cached files takes less.
"""
_GRACE_SECONDS: Final = 0.05
"""How much later than asked the archive may return. Its own wait ends first, so that its reads go on."""
_READ_COMMITTED: Final = 1


def _own(question: ArchivableResponse) -> ClientResponse:
    return ClientResponse((question.response,), release_nothing, archived=False)


def is_of_a_daemon(request: memoryview) -> bool:
    """
    Say whether a whole request is a daemon's own, such as a trim.

    Such a request arrives at a gateway if the `broker` settings of a daemon lead there.

    Raises:
        IncompleteMessage: The request ends in its header.
    """
    return client_id_of(request) == CLIENT_ID.encode()


async def answer(
    question: ArchivableResponse, archive: ArchiveAnswers, *, timeout_seconds: float, bytes_max: float
) -> ClientResponse:
    """
    Ask the archive, and return what the client is told.

    A timeout counts as an archive that cannot answer now. A Fetch has a timeout of its own, the client's
    maximum wait, and records of the broker do not wait for the archive. A Fetch is answered with at most
    *bytes_max* of archived records. Only a first batch may be larger.

    Raises:
        ProtocolViolation: The request or the broker's response cannot be read.
    """
    if is_of_a_daemon(memoryview(question.pending.request or b"")):
        # A daemon needs to know what the broker has, without the archive.
        return _own(question)
    match question.pending.head.api_key:
        case InspectedApi.FETCH:
            return await _fetch(question, archive, bytes_max)
        case InspectedApi.LIST_OFFSETS:
            return await _list_offsets(question, archive, timeout_seconds)
        case InspectedApi.DELETE_RECORDS:
            return await _delete_records(question, archive, timeout_seconds)
        case InspectedApi.OFFSET_FOR_LEADER_EPOCH:
            return await _offset_for_leader_epoch(question, archive, timeout_seconds)
        case _:
            return await _describe_log_dirs(question, archive, timeout_seconds)


def longest_wait_seconds(asked: AskedFetch) -> float:
    """Return how long a Fetch may wait for the archive: as long as the client wants to, but not very long."""
    return min(max(asked.max_wait_ms / 1000, _LIVE_WAIT_SECONDS), LONGEST_WAIT_SECONDS)


async def _fetch(question: ArchivableResponse, archive: ArchiveAnswers, bytes_max: float) -> ClientResponse:
    pending = question.pending
    frame = memoryview(pending.request or b"")
    asked = await in_thread_if_large(len(frame), asked_of, frame, pending.head)
    wanted = {
        (partition.topic, partition.index): asked.partitions[partition.topic, partition.index]
        for partition in question.out_of_range
        if (partition.topic, partition.index) in asked.partitions
    }
    fetch = FetchQuestion(
        partitions=wanted,
        max_bytes=int(min(max(asked.max_bytes - question.records_bytes, 0), bytes_max)),
        needs_a_batch=not question.records_bytes,
        read_committed=asked.read_committed,
        wait_seconds=_LIVE_WAIT_SECONDS
        if question.records_bytes or question.hidden
        else longest_wait_seconds(asked),
    )
    try:
        async with asyncio.timeout(fetch.wait_seconds + _GRACE_SECONDS):
            archived = await archive.fetch(fetch) if wanted else ArchivedFetch()
    except TimeoutError:
        archived = ArchivedFetch(dict.fromkeys(wanted, NOT_READ_YET), has_unread=True)
    except TieringError as error:
        _warn(question, error)
        archived = ArchivedFetch(dict.fromkeys(wanted, PartitionData(-1, -1, -1, error_code=TRY_AGAIN.value)))
    replacements = {
        **{(partition.topic, partition.index): NOT_READ_YET for partition in question.hidden},
        **archived.partitions,
    }
    found = sorted((*question.out_of_range, *question.hidden), key=lambda partition: partition.begin)
    replaced = [
        (partition, replacements[partition.topic, partition.index])
        for partition in found
        if (partition.topic, partition.index) in replacements
    ]
    if not replaced:
        archived.release()
        return _own(question)
    try:
        response = rebuilt(memoryview(question.response), pending.head.version, replaced)
    except BaseException:
        archived.release()
        raise
    return ClientResponse(
        response.pieces,
        archived.release,
        archived=True,
        has_unread=archived.has_unread,
        waited_for=archived.waited_for,
        next_fetches=_next_fetches(archived, asked),
        on_sent=archived.on_sent,
        starved=_starved(archived) if question.records_bytes else frozenset(),
    )


def _starved(archived: ArchivedFetch) -> frozenset[PartitionKey]:
    """Return the partitions that are read and have no records, if no partition has any."""
    said = archived.partitions
    if archived.has_unread or any(one.records for one in said.values()):
        return frozenset()
    return frozenset(key for key, one in said.items() if not one.error_code)


def _next_fetches(archived: ArchivedFetch, asked: AskedFetch) -> Mapping[PartitionKey, NextFetch]:
    return archived.next_fetches if archived.next_fetches.keys() == asked.partitions.keys() else {}


async def fetched_ahead(
    asked: AskedFetch,
    head: RequestHead,
    archive: ArchiveAnswers,
    *,
    timeout_seconds: float,
    bytes_max: float,
    due: asyncio.Future[None] | None = None,
) -> ClientResponse | None:
    """
    Return the answer to a Fetch that is not sent yet, for a broker that has none of its offsets.

    When *due* is done, the answer is returned with what is read by then.

    None if the archive cannot answer now for every partition: the client learns the reason when it asks.
    """
    fetch = FetchQuestion(
        partitions=asked.partitions,
        max_bytes=int(min(asked.max_bytes, bytes_max)),
        needs_a_batch=True,
        read_committed=asked.read_committed,
        wait_seconds=timeout_seconds,
        due=due,
    )
    try:
        async with asyncio.timeout(timeout_seconds):
            archived = await archive.fetch(fetch)
    except (TieringError, TimeoutError) as error:
        log.debug("the archive cannot be read ahead now", error=str(error))
        return None
    next_fetches = _next_fetches(archived, asked)
    if not next_fetches:
        archived.release()
        return None
    topics: dict[str | UUID, dict[int, PartitionData]] = {}
    for topic, number in asked.partitions:
        topics.setdefault(topic, {})[number] = archived.partitions[topic, number]
    try:
        response = composed(head.correlation_id, head.version, topics)
    except BaseException:
        archived.release()
        raise
    return ClientResponse(
        response.pieces,
        archived.release,
        archived=True,
        has_unread=archived.has_unread,
        waited_for=archived.waited_for,
        next_fetches=next_fetches,
        on_sent=archived.on_sent,
    )


async def _decoded(question: ArchivableResponse) -> tuple[Any, Any]:
    """Return the client's request and the broker's response."""
    head, request = question.pending.head, question.pending.request or b""
    return (
        await in_thread_if_large(len(request), decode_request, memoryview(request), head),
        await in_thread_if_large(
            len(question.response), decode_response, memoryview(question.response), head.api_key, head.version
        ),
    )


async def _list_offsets(
    question: ArchivableResponse, archive: ArchiveAnswers, timeout_seconds: float
) -> ClientResponse:
    request, response = await _decoded(question)
    timestamps = {
        (topic.name, partition.partition_index): int(partition.timestamp)
        for topic in request.topics
        for partition in topic.partitions
    }
    asked = {
        key: timestamps[key]
        async for key, said in in_steps(_listed(response))
        if said.error_code == ErrorCode.none
        and _concerns_the_archive(timestamps.get(key, LATEST))
        and not _is_certain(timestamps[key], said)
        and archive.may_have(*key)
    }
    if not asked:
        return _own(question)
    read_committed = getattr(request, "isolation_level", 0) == _READ_COMMITTED
    found = await _in_time(
        question, asked, archive.list_offsets(asked, read_committed=read_committed), timeout_seconds
    )
    changes: dict[PartitionKey, dict[str, Any]] = {}
    async for key, said in in_steps(_listed(response)):
        archived = found.get(key) if key in asked else None
        if isinstance(archived, Exception):
            changes[key] = {"error_code": TRY_AGAIN}
        elif archived is not None and _is_better(asked[key], archived, said):
            changes[key] = {
                "offset": archived.offset,
                "timestamp": archived.timestamp_ms,
                "leader_epoch": archived.leader_epoch,
            }
    return await _changed(question, response, "name", "partition_index", changes)


async def _in_time(
    question: ArchivableResponse,
    asked: Collection[PartitionKey],
    answers: Awaitable[Mapping[PartitionKey, T | TieringError]],
    timeout_seconds: float,
) -> Mapping[PartitionKey, T | Exception]:
    """Return the archive's finding for each partition, or an error if it fails or is late."""
    found: Mapping[PartitionKey, T | Exception]
    try:
        async with asyncio.timeout(timeout_seconds):
            found = await answers
    except (TieringError, TimeoutError) as error:
        found = dict.fromkeys(asked, error)
    errors = [each for each in found.values() if isinstance(each, Exception)]
    if errors:
        _warn(question, errors[0], partitions=len(errors))
    return found


def _is_certain(timestamp: int, said: Any) -> bool:
    """Say whether the broker's answer is right whatever is archived: nothing lies before offset 0."""
    return int(said.offset) == 0 and (timestamp >= 0 or timestamp == EARLIEST)


def _concerns_the_archive(timestamp: int) -> bool:
    return timestamp >= 0 or timestamp in _SPECIAL


def _listed(response: Any) -> Iterator[tuple[PartitionKey, Any]]:
    for topic in response.topics:
        for partition in topic.partitions:
            yield (topic.name, partition.partition_index), partition


def _is_better(timestamp: int, archived: ListedOffset, said: Any) -> bool:
    """Say whether the archive's offset, rather than the broker's, is the answer for the whole log."""
    offset, timestamp_ms = int(said.offset), int(said.timestamp)
    if offset == _UNKNOWN:
        return True
    if timestamp in _ONLY_ARCHIVED:
        return archived.offset > offset
    if timestamp == MAX_TIMESTAMP:
        return archived.timestamp_ms > timestamp_ms
    return archived.offset < offset


async def _offset_for_leader_epoch(
    question: ArchivableResponse, archive: ArchiveAnswers, timeout_seconds: float
) -> ClientResponse:
    request, response = await _decoded(question)
    epochs = {
        (topic.topic, partition.partition): int(partition.leader_epoch)
        for topic in request.topics
        for partition in topic.partitions
    }
    answered = {
        (topic.topic, partition.partition): partition
        for topic in response.topics
        for partition in topic.partitions
        if partition.error_code == ErrorCode.none
    }
    asked = {
        key: epochs[key]
        for key, said in answered.items()
        # No epoch ends before offset 0, so that answer of the broker is right.
        if key in epochs and said.end_offset != 0 and archive.may_have(*key)
    }
    # A replica compares its own log with the leader's. The archive is not part of either.
    if not asked or getattr(request, "replica_id", _UNKNOWN) >= 0:
        return _own(question)
    found = await _in_time(question, asked, archive.offset_for_leader_epoch(asked), timeout_seconds)
    changes: dict[PartitionKey, dict[str, Any]] = {}
    for key, end in found.items():
        if isinstance(end, Exception):
            changes[key] = {"error_code": TRY_AGAIN}
        # The broker counts forgotten epochs as part of its oldest epoch, and moves that epoch's start up
        # with its log. So the smaller end is the true one.
        elif answered[key].end_offset == _UNKNOWN or end.end_offset < answered[key].end_offset:
            changes[key] = {"leader_epoch": end.leader_epoch, "end_offset": end.end_offset}
    return await _changed(question, response, "topic", "partition", changes)


async def _delete_records(
    question: ArchivableResponse, archive: ArchiveAnswers, timeout_seconds: float
) -> ClientResponse:
    """
    Make the archive follow a deletion of the broker. Tell the client where the whole log begins now.

    A client whose deletion is not known to be recorded in the bucket is told to try again: the broker
    accepts the same deletion again, and the archive may still serve the records until then.
    """
    request, response = await _decoded(question)
    wanted = {
        (topic.name, partition.partition_index): int(partition.offset)
        for topic in request.topics
        for partition in topic.partitions
    }
    said = {
        (topic.name, partition.partition_index): int(partition.low_watermark)
        for topic in response.topics
        for partition in topic.partitions
        if partition.error_code == ErrorCode.none
    }
    # -1 deletes all records. The log then begins at its end, which is the broker's low watermark.
    before = {
        key: wanted[key] if wanted[key] >= 0 else low_watermark
        for key, low_watermark in said.items()
        if key in wanted and archive.may_have(*key)
    }
    if not before:
        return _own(question)
    deleting = archive.delete_records(before, question.pending.leader_epochs)
    found = await _in_time(question, before, deleting, timeout_seconds)
    changes = {
        key: {"error_code": TRY_AGAIN, "low_watermark": _UNKNOWN}
        if isinstance(start, Exception)
        else {"low_watermark": min(start, said[key])}
        for key, start in found.items()
    }
    return await _changed(question, response, "name", "partition_index", changes)


async def _describe_log_dirs(
    question: ArchivableResponse, archive: ArchiveAnswers, timeout_seconds: float
) -> ClientResponse:
    head = question.pending.head
    request, response = await _decoded(question)
    # A client without permission to see the directories gets an error, or in old versions no directory.
    if getattr(response, "error_code", ErrorCode.none) != ErrorCode.none or not response.results:
        return _own(question)
    try:
        async with asyncio.timeout(timeout_seconds):
            directories = await archive.describe_log_dirs()
    except (TieringError, TimeoutError) as error:
        # The sizes on the broker's own disks are still right, and no client acts on the archive's sizes.
        _warn(question, error)
        return _own(question)
    if not directories:
        return _own(question)
    wanted = None
    if request.topics is not None:
        wanted = {(topic.topic, number) for topic in request.topics for number in topic.partitions}
    rows = tuple(_log_dir(response_module(head.api_key, head.version), each, wanted) for each in directories)
    encoded = encode_response(head.correlation_id, replace(response, results=(*response.results, *rows)))
    return ClientResponse((encoded,), release_nothing, archived=True)


def _log_dir(module: Any, directory: RemoteLogDir, wanted: set[tuple[str, int]] | None) -> Any:
    topics: dict[str, list[Any]] = {}
    for (topic, number), size in directory.partition_bytes.items():
        if wanted is None or (topic, number) in wanted:
            partition = module.DescribeLogDirsPartition(
                partition_index=number, partition_size=size, offset_lag=0, is_future_key=False
            )
            topics.setdefault(topic, []).append(partition)
    return module.DescribeLogDirsResult(
        error_code=ErrorCode.none,
        log_dir=directory.name,
        topics=tuple(
            module.DescribeLogDirsTopic(name=topic, partitions=tuple(partitions))
            for topic, partitions in topics.items()
        ),
    )


async def _changed(
    question: ArchivableResponse,
    response: Any,
    topic: str,
    number: str,
    changes: dict[PartitionKey, dict[str, Any]],
) -> ClientResponse:
    """Return *response* with changed fields of some partitions; without changes, the broker's bytes."""
    if not changes:
        return _own(question)
    encoded = await in_thread_if_large(
        len(question.response), _encoded_with, question, response, topic, number, changes
    )
    return ClientResponse((encoded,), release_nothing, archived=True)


def _encoded_with(
    question: ArchivableResponse,
    response: Any,
    topic: str,
    number: str,
    changes: dict[PartitionKey, dict[str, Any]],
) -> bytes:
    topics = tuple(
        replace(
            each,
            partitions=tuple(
                _with(partition, changes.get((getattr(each, topic), getattr(partition, number)), {}))
                for partition in each.partitions
            ),
        )
        for each in response.topics
    )
    return encode_response(question.pending.head.correlation_id, replace(response, topics=topics))


def _with(partition: Any, fields: dict[str, Any]) -> Any:
    known = partition.__dataclass_fields__
    return replace(partition, **{name: value for name, value in fields.items() if name in known})


def _warn(question: ArchivableResponse, error: Exception, *, partitions: int | None = None) -> None:
    log.warning(
        "the archive cannot answer now; the client is told to try again",
        api=InspectedApi(question.pending.head.api_key).name,
        partitions=partitions,
        error=str(error) or type(error).__name__,
    )
