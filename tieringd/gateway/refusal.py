"""What a client is told when it writes while nobody may: the same as Redpanda says on a full disk."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.static.primitive import i32Timedelta

from tieringd.formats.kafka_wire.messages import encode_response, response_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tieringd.formats.kafka_wire.request_header import RequestHead

REFUSED: Final = ErrorCode.broker_not_available
_MESSAGE: Final = "The broker's disk has no room for writes; ask its operator"
_NO_DELAY: Final = i32Timedelta.parse(timedelta(0))


def refusal(head: RequestHead, partitions: Mapping[str | UUID, Sequence[int]]) -> bytes:
    """Return the answer to a known Produce request: the same error for each of its partitions."""
    module: Any = response_module(head.api_key, head.version)
    fields = module.PartitionProduceResponse.__dataclass_fields__
    explained = {"error_message": _MESSAGE, "record_errors": ()} if "error_message" in fields else {}
    topics = []
    for topic, indexes in partitions.items():
        named = {"topic_id": topic} if isinstance(topic, UUID) else {"name": topic}
        answers = tuple(
            module.PartitionProduceResponse(index=index, error_code=REFUSED, base_offset=-1, **explained)
            for index in indexes
        )
        topics.append(module.TopicProduceResponse(**named, partition_responses=answers))
    response = module.ProduceResponse(responses=tuple(topics), throttle_time=_NO_DELAY)
    return encode_response(head.correlation_id, response)
