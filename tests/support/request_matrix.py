"""
The same questions about topics in every version of every API: what an authorisation matrix is made of.

A question's bytes may go to a broker and to a gateway, whose answers are then compared field by field.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map, schema_name_map

from tests.support.kafka_messages import (
    fetch_request,
    fields_of,
    milliseconds,
    read_response,
    request_frame,
    request_module,
    topic_fields,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from tests.support.raw_kafka import RawKafka


class Api(IntEnum):
    """The APIs that are asked."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_FETCH = 9
    JOIN_GROUP = 11
    DELETE_RECORDS = 21
    OFFSET_FOR_LEADER_EPOCH = 23
    DESCRIBE_CONFIGS = 32
    DESCRIBE_LOG_DIRS = 35
    DESCRIBE_TOPIC_PARTITIONS = 75


WRITES = frozenset({Api.PRODUCE, Api.DELETE_RECORDS})
"""The APIs that change what later questions are told."""
_API_VERSIONS = 18
GROUP = "a-group"
TOGETHER = "together"
"""A Fetch of every topic, in which archived partitions may be left to a later Fetch."""
_FIRST_FETCH_BY_ID, _FIRST_PRODUCE_BY_ID = 13, 13
_FIRST_METADATA_BY_ID = 12
_FIRST_OFFSET_FETCH_OF_ALL = 2
_NO_PARTITION = 7
"""The number of a partition that no topic has."""
_TIMESTAMPS = (-1, -2, -3, -4, -5, -6, 0)
"""Latest, earliest, with the largest timestamp, earliest local, last tiered, earliest not tiered; a time."""
_TOPIC_RESOURCE = 2
_IDENTITIES = (
    "topic_id",
    "name",
    "topic",
    "partition_index",
    "partition",
    "index",
    "log_dir",
    "resource_name",
    "group_id",
    "node_id",
)
"""The fields that name an entry of a list, the first of those that have a value."""
_AT_ONCE = 64
"""How many questions are on their way at once on one connection."""

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Topic:
    """A topic that is asked about, and the offset of its broker's last records; it need not exist."""

    name: str
    topic_id: UUID
    last_offset: int = 0


@dataclass(frozen=True)
class Question:
    """One request."""

    api: Api
    version: int
    what: str
    topics: tuple[Topic, ...]
    """The topics that it is about; empty for all."""
    message: Any

    def topic_at(self, path: Path) -> str:
        """Return the name of the topic, asked by name or by id, to which a field of the answer belongs."""
        found = (topic.name for topic in self.topics if path[1] in {topic.name, topic.topic_id})
        return next(found, "")

    @property
    def timestamp(self) -> int:
        """Return what ListOffsets looks for."""
        return int(self.message.topics[0].partitions[0].timestamp)

    @property
    def title(self) -> str:
        """Return a line for a report."""
        api = api_key_map[self.api]
        return f"{api} v{self.version}, {self.what}, {', '.join(topic.name for topic in self.topics)}"


def versions_of(api_key: Api) -> frozenset[int]:
    """Return the versions of an API in which questions can be asked."""
    return frozenset(schema_name_map[api_key_map[api_key]])


async def offered_versions(client: RawKafka) -> Mapping[Api, range]:
    """Return the versions of each API that the other side of a connection offers."""
    answer = await client.ask(_part(_API_VERSIONS, 0, "ApiVersionsRequest"))
    return {
        Api(each.api_key): range(each.min_version, each.max_version + 1)
        for each in answer.api_keys
        if each.api_key in set(Api)
    }


async def answers_to(client: RawKafka, requests: Sequence[bytes]) -> list[bytes]:
    """Send whole *requests*, many at once, and return the bytes of their answers."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def send() -> None:
        for request in requests:
            await room.acquire()
            client.writer.write(request)

    async def receive() -> list[bytes]:
        answers = []
        for _ in requests:
            answers.append(await client.frame())
            room.release()
        return answers

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        received = group.create_task(receive())
    return received.result()


def frames_of(questions: Sequence[Question]) -> list[bytes]:
    """Return the bytes of each question. The correlation id is its place in the list."""
    return [bytes(request_frame(each.message, correlation_id=at)) for at, each in enumerate(questions)]


def read(question: Question, frame: bytes) -> dict[Path, Any]:
    """Return every field of an answer to *question* by its path."""
    return dict(_flat((), read_response(frame, question.api, question.version)))


def _flat(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _flat((*path, field.name), getattr(value, field.name))
    elif isinstance(value, tuple):
        # A list that is missing and an empty one differ.
        yield (*path, "size"), len(value)
        for at, each in enumerate(value):
            yield from _flat((*path, _identity(each, at)), each)
    else:
        yield path, value


def _identity(entry: Any, at: int) -> Any:
    values = (getattr(entry, name, None) for name in _IDENTITIES)
    return next((value for value in values if value is not None), at)


def questions(api: Api, versions: Iterable[int], topics: Sequence[Topic]) -> Iterator[Question]:
    """Return the questions to one API: about each topic by itself, and about all where the API has that."""
    for version in versions:
        for what, message in _of_no_topic(api, version):
            yield Question(api, version, what, (), message)
        for topic in topics if api in _OF_A_TOPIC else ():
            for what, message in _OF_A_TOPIC[api](version, topic):
                yield Question(api, version, what, (topic,), message)
        if api == Api.FETCH:
            yield Question(api, version, TOGETHER, tuple(topics), _fetch(version, topics, 0))


def _of_no_topic(api: Api, version: int) -> Iterator[tuple[str, Any]]:
    if api == Api.METADATA:
        yield "every topic", _metadata(version, None)
    if api == Api.DESCRIBE_LOG_DIRS:
        yield "every topic", _part(api, version, "DescribeLogDirsRequest", topics=None)
    if api == Api.OFFSET_FETCH and version >= _FIRST_OFFSET_FETCH_OF_ALL:
        yield "every topic", _offset_fetch(version, None)
    if api == Api.JOIN_GROUP:
        yield "a new member", _join_group(version)


def _part(api_key: int, version: int, name: str, /, **values: Any) -> Any:
    """Return a request, or a part of one, with the values that its version has."""
    schema = getattr(request_module(api_key, version), name)
    return schema(**fields_of(schema, **values))


def _fetch(version: int, topics: Sequence[Topic], offset: int) -> Any:
    asked = {"fetch_offset": offset, "partition_max_bytes": 1}
    keys = [topic.topic_id if version >= _FIRST_FETCH_BY_ID else topic.name for topic in topics]
    wanted = {key: {0: asked, _NO_PARTITION: asked} for key in keys}
    # Each answer has records or an error, so the broker waits for nothing.
    return fetch_request(version, wanted, max_wait=milliseconds(10_000), max_bytes=1 << 20)


def _list_offsets(version: int, topic: Topic, timestamp: int) -> Any:
    partitions = tuple(
        _part(Api.LIST_OFFSETS, version, "ListOffsetsPartition", partition_index=number, timestamp=timestamp)
        for number in (0, _NO_PARTITION)
    )
    entry = _part(Api.LIST_OFFSETS, version, "ListOffsetsTopic", name=topic.name, partitions=partitions)
    values = {"replica_id": -1, "isolation_level": 0, "topics": (entry,), "timeout": milliseconds(10_000)}
    return _part(Api.LIST_OFFSETS, version, "ListOffsetsRequest", **values)


def _metadata(version: int, topic: Mapping[str, Any] | None) -> Any:
    entries: tuple[Any, ...] | None
    if topic is None:
        # Version 0 has no null; an empty list is every topic.
        entries = None if version else ()
    else:
        entries = (_part(Api.METADATA, version, "MetadataRequestTopic", **{"topic_id": None, **topic}),)
    return _part(
        Api.METADATA,
        version,
        "MetadataRequest",
        topics=entries,
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
    )


def _offset_for_leader_epoch(version: int, topic: Topic) -> Any:
    partitions = tuple(
        _part(
            Api.OFFSET_FOR_LEADER_EPOCH, version, "OffsetForLeaderPartition", partition=number, leader_epoch=0
        )
        for number in (0, _NO_PARTITION)
    )
    entry = _part(
        Api.OFFSET_FOR_LEADER_EPOCH, version, "OffsetForLeaderTopic", topic=topic.name, partitions=partitions
    )
    values = {"replica_id": -1, "topics": (entry,)}
    return _part(Api.OFFSET_FOR_LEADER_EPOCH, version, "OffsetForLeaderEpochRequest", **values)


def _delete_records(version: int, topic: Topic) -> Any:
    partitions = tuple(
        _part(Api.DELETE_RECORDS, version, "DeleteRecordsPartition", partition_index=number, offset=0)
        for number in (0, _NO_PARTITION)
    )
    entry = _part(Api.DELETE_RECORDS, version, "DeleteRecordsTopic", name=topic.name, partitions=partitions)
    values = {"topics": (entry,), "timeout": milliseconds(10_000)}
    return _part(Api.DELETE_RECORDS, version, "DeleteRecordsRequest", **values)


def _produce(version: int, topic: Topic) -> Any:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1024,
    )
    assert builder.append(0, timestamp=None, key=None, value=b"written", headers=[]) is not None
    batch = bytes(builder.build())
    partitions = tuple(
        _part(Api.PRODUCE, version, "PartitionProduceData", index=number, records=batch)
        for number in (0, _NO_PARTITION)
    )
    schema = request_module(Api.PRODUCE, version).TopicProduceData
    named = topic_fields(schema, topic.topic_id if version >= _FIRST_PRODUCE_BY_ID else topic.name)
    entry = schema(**named, partition_data=partitions)
    values = {"acks": -1, "timeout": milliseconds(10_000), "topic_data": (entry,)}
    return _part(Api.PRODUCE, version, "ProduceRequest", **values)


def _offset_fetch(version: int, topic: Topic | None) -> Any:
    entries: tuple[Any, ...] | None = None
    module = request_module(Api.OFFSET_FETCH, version)
    in_groups = hasattr(module, "OffsetFetchRequestGroup")
    if topic is not None:
        schema = module.OffsetFetchRequestTopics if in_groups else module.OffsetFetchRequestTopic
        by_id = "topic_id" in schema.__dataclass_fields__
        named = topic_fields(schema, topic.topic_id if by_id else topic.name)
        entries = (schema(**named, partition_indexes=(0, _NO_PARTITION)),)
    if in_groups:
        group = _part(Api.OFFSET_FETCH, version, "OffsetFetchRequestGroup", group_id=GROUP, topics=entries)
        return _part(Api.OFFSET_FETCH, version, "OffsetFetchRequest", groups=(group,))
    return _part(Api.OFFSET_FETCH, version, "OffsetFetchRequest", group_id=GROUP, topics=entries)


def _join_group(version: int) -> Any:
    protocol = _part(Api.JOIN_GROUP, version, "JoinGroupRequestProtocol", name="range", metadata=b"")
    return _part(
        Api.JOIN_GROUP,
        version,
        "JoinGroupRequest",
        group_id=GROUP,
        session_timeout=milliseconds(10_000),
        rebalance_timeout=milliseconds(10_000),
        member_id="",
        protocol_type="consumer",
        protocols=(protocol,),
    )


def _produces(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    yield "one record", _produce(version, topic)


def _fetches(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    yield "from offset 0", _fetch(version, [topic], 0)
    yield "from the broker's last offset", _fetch(version, [topic], topic.last_offset)


def _offset_lists(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    for timestamp in _TIMESTAMPS:
        yield f"timestamp {timestamp}", _list_offsets(version, topic, timestamp)


def _metadata_of(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    yield "by name", _metadata(version, {"name": topic.name})
    if version >= _FIRST_METADATA_BY_ID:
        yield "by id", _metadata(version, {"topic_id": topic.topic_id, "name": None})


def _group_offsets(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    yield "of a topic", _offset_fetch(version, topic)


def _deletions(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    yield "before offset 0", _delete_records(version, topic)


def _epoch_ends(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    yield "epoch 0", _offset_for_leader_epoch(version, topic)


def _descriptions(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    api = Api.DESCRIBE_CONFIGS
    named = {"resource_type": _TOPIC_RESOURCE, "resource_name": topic.name, "configuration_keys": None}
    resources = (_part(api, version, "DescribeConfigsResource", **named),)
    yield "of a topic", _part(api, version, "DescribeConfigsRequest", resources=resources)


def _log_dirs(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    api = Api.DESCRIBE_LOG_DIRS
    topics = (_part(api, version, "DescribableLogDirTopic", topic=topic.name, partitions=(0,)),)
    yield "of a topic", _part(api, version, "DescribeLogDirsRequest", topics=topics)


def _described_partitions(version: int, topic: Topic) -> Iterator[tuple[str, Any]]:
    api = Api.DESCRIBE_TOPIC_PARTITIONS
    topics = (_part(api, version, "TopicRequest", name=topic.name),)
    yield "of a topic", _part(api, version, "DescribeTopicPartitionsRequest", topics=topics)


_OF_A_TOPIC: dict[Api, Callable[[int, Topic], Iterator[tuple[str, Any]]]] = {
    Api.PRODUCE: _produces,
    Api.FETCH: _fetches,
    Api.LIST_OFFSETS: _offset_lists,
    Api.METADATA: _metadata_of,
    Api.OFFSET_FETCH: _group_offsets,
    Api.DELETE_RECORDS: _deletions,
    Api.OFFSET_FOR_LEADER_EPOCH: _epoch_ends,
    Api.DESCRIBE_CONFIGS: _descriptions,
    Api.DESCRIBE_LOG_DIRS: _log_dirs,
    Api.DESCRIBE_TOPIC_PARTITIONS: _described_partitions,
}


async def until_group_is_known(client: RawKafka) -> None:
    """Wait until the broker answers for the group, whose coordinator starts when it is first asked for."""
    find = request_module(10, 2).FindCoordinatorRequest(key=GROUP, key_type=0)
    fetch = _offset_fetch(5, None)
    async with asyncio.timeout(180):
        while True:
            answers = [await client.ask(find), await client.ask(fetch)]
            if all(answer.error_code == ErrorCode.none for answer in answers):
                return
            await asyncio.sleep(0.1)
