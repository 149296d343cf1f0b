"""
Kafka messages that kio encodes and decodes: the reference for our own parsers.

Plain functions, independent of pytest.
"""

from __future__ import annotations

from datetime import timedelta
from io import BytesIO
from typing import TYPE_CHECKING, Any

from kio.index import load_payload_module, load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType
from kio.static.primitive import i32Timedelta

if TYPE_CHECKING:
    import uuid
    from types import ModuleType

FETCH_VERSIONS = range(4, 19)
PRODUCE_VERSIONS = range(3, 14)


def encoded(entity: Any) -> bytes:
    """Return kio's bytes of an entity."""
    buffer = BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def framed(*parts: bytes) -> bytearray:
    """Return *parts* with their total size before them."""
    body = b"".join(parts)
    return bytearray(len(body).to_bytes(4) + body)


def request_frame(message: Any, *, correlation_id: int = 7, client_id: str | None = "test") -> bytearray:
    """Return the bytes of a request on the wire."""
    header = message.__header_schema__(
        request_api_key=message.__api_key__,
        request_api_version=message.__version__,
        correlation_id=correlation_id,
        client_id=client_id,
    )
    return framed(encoded(header), encoded(message))


def followed_by(rest: bytes, frame: bytes) -> bytearray:
    """Return *frame* with *rest* at its end, and the size of both before it."""
    return framed(frame[4:], rest)


def response_frame(message: Any, *, correlation_id: int = 7) -> bytearray:
    """Return the bytes of a response on the wire."""
    return framed(encoded(message.__header_schema__(correlation_id=correlation_id)), encoded(message))


def read_request(frame: bytes, api_key: int, version: int) -> Any:
    """Decode a request that has a size and a header, with kio."""
    return _read(frame, load_request_schema(api_key, version))


def read_response(frame: bytes, api_key: int, version: int) -> Any:
    """Decode a response that has a size and a header, with kio."""
    return _read(frame, load_response_schema(api_key, version))


def _read(frame: bytes, schema: Any) -> Any:
    assert int.from_bytes(frame[:4]) == len(frame) - 4
    _, size = entity_reader(schema.__header_schema__)(bytes(frame), 4)
    message, size_of_message = entity_reader(schema)(bytes(frame[4 + size :]), 0)
    assert 4 + size + size_of_message == len(frame)
    return message


def fields_of(schema: Any, **values: Any) -> dict[str, Any]:
    """Return the *values* whose fields this version of a message has."""
    return {name: value for name, value in values.items() if name in schema.__dataclass_fields__}


def request_module(api_key: int, version: int) -> ModuleType:
    """Return kio's module with the classes of a request."""
    return load_payload_module(api_key, version, EntityType.request)


def response_module(api_key: int, version: int) -> ModuleType:
    """Return kio's module with the classes of a response."""
    return load_payload_module(api_key, version, EntityType.response)


def topic_fields(schema: Any, topic: str | uuid.UUID) -> dict[str, Any]:
    """Return the field that names a topic in this version."""
    by_id = "topic_id" in schema.__dataclass_fields__
    return (
        {"topic_id": topic}
        if by_id
        else {"name" if "name" in schema.__dataclass_fields__ else "topic": topic}
    )


def milliseconds(value: int) -> i32Timedelta:
    """Return a time span of *value* milliseconds in kio's type."""
    return i32Timedelta.parse(timedelta(milliseconds=value))


def fetch_request(
    version: int, topics: dict[Any, dict[int, dict[str, int]]], *, replica_id: int = -1, **values: Any
) -> Any:
    """Return a Fetch request: topics, their partitions, and the fields of each."""
    module = request_module(1, version)
    partition_schema = module.FetchPartition
    made = tuple(
        module.FetchTopic(
            **topic_fields(module.FetchTopic, topic),
            partitions=tuple(
                partition_schema(
                    partition=index,
                    **fields_of(
                        partition_schema, **{"fetch_offset": 0, "partition_max_bytes": 1 << 20} | asked
                    ),
                )
                for index, asked in partitions.items()
            ),
        )
        for topic, partitions in topics.items()
    )
    replica: dict[str, Any] = {"replica_id": replica_id}
    if hasattr(module, "ReplicaState"):
        replica = {"replica_state": module.ReplicaState(replica_id=replica_id, replica_epoch=replica_id)}
    defaults: dict[str, Any] = {"max_wait": milliseconds(500), "min_bytes": 1, "forgotten_topics_data": ()}
    fields = fields_of(module.FetchRequest, **defaults | replica | values)
    return module.FetchRequest(topics=made, **fields)


def fetch_response(version: int, topics: dict[Any, dict[int, dict[str, Any]]], **values: Any) -> Any:
    """Return a Fetch response: topics, their partitions, and the fields of each."""
    module = response_module(1, version)
    return module.FetchResponse(
        **fields_of(
            module.FetchResponse,
            **{"throttle_time": milliseconds(0), "error_code": ErrorCode.none} | values,
        ),
        responses=tuple(
            module.FetchableTopicResponse(
                **topic_fields(module.FetchableTopicResponse, topic),
                partitions=tuple(_fetched(module, index, said) for index, said in partitions.items()),
            )
            for topic, partitions in topics.items()
        ),
    )


def _fetched(module: ModuleType, index: int, said: dict[str, Any]) -> Any:
    defaults = {
        "error_code": 0,
        "high_watermark": -1,
        "records": b"",
        "aborted_transactions": None,
        "preferred_read_replica": -1,
    }
    fields = defaults | said
    fields["error_code"] = ErrorCode(fields["error_code"])
    if fields["aborted_transactions"] is not None:
        fields["aborted_transactions"] = tuple(
            module.AbortedTransaction(producer_id=producer_id, first_offset=first_offset)
            for producer_id, first_offset in fields["aborted_transactions"]
        )
    if "leader_epoch" in fields and hasattr(module, "LeaderIdAndEpoch"):
        fields["current_leader"] = module.LeaderIdAndEpoch(leader_id=3, leader_epoch=fields["leader_epoch"])
    schema = module.PartitionData
    return schema(partition_index=index, **fields_of(schema, **fields))


def produce_response(version: int, topics: dict[Any, dict[int, dict[str, Any]]]) -> Any:
    """Return a Produce response: topics, their partitions, and the fields of each."""
    module = response_module(0, version)
    return module.ProduceResponse(
        throttle_time=milliseconds(0),
        responses=tuple(
            module.TopicProduceResponse(
                **topic_fields(module.TopicProduceResponse, topic),
                partition_responses=tuple(
                    _produced(module, index, said) for index, said in partitions.items()
                ),
            )
            for topic, partitions in topics.items()
        ),
    )


def _produced(module: ModuleType, index: int, said: dict[str, Any]) -> Any:
    fields: dict[str, Any] = {"base_offset": 9, "record_errors": (), "error_message": None} | said
    fields["error_code"] = ErrorCode(fields.get("error_code", 0))
    if fields["record_errors"] and hasattr(module, "BatchIndexAndErrorMessage"):
        fields["record_errors"] = tuple(
            module.BatchIndexAndErrorMessage(batch_index=at, batch_index_error_message=message)
            for at, message in fields["record_errors"]
        )
    if "leader_epoch" in fields and hasattr(module, "LeaderIdAndEpoch"):
        fields["current_leader"] = module.LeaderIdAndEpoch(leader_id=3, leader_epoch=fields["leader_epoch"])
    schema = module.PartitionProduceResponse
    return schema(index=index, **fields_of(schema, **fields))
