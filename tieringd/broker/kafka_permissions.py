"""
What the broker lets this user do: the operations that it lists in its answer to Metadata.

The question changes nothing, where trying an operation would: a DeleteRecords that is allowed deletes.
Without an authorizer a broker lists every operation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_protocol import ApiVersionRange, KafkaRequest
from tieringd.errors import BrokerUnavailable

# Versions before 8 list no operations, and those after 10 list the topics' only.
_METADATA: Final = ApiVersionRange("Metadata", 3, min_version=8, max_version=10)

_CODES: Final = {
    3: "READ",
    4: "WRITE",
    5: "CREATE",
    6: "DELETE",
    7: "ALTER",
    8: "DESCRIBE",
    9: "CLUSTER_ACTION",
    10: "DESCRIBE_CONFIGS",
    11: "ALTER_CONFIGS",
    12: "IDEMPOTENT_WRITE",
}
"""Kafka's codes of its ACL operations: an answer has the bit of each one that is allowed."""
_REFUSED: Final = (ErrorCode.topic_authorization_failed, ErrorCode.unknown_topic_or_partition)
"""A broker says that a topic is unknown to a user who may not describe it."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """The names of the ACL operations that this user may do."""

    cluster_id: str
    cluster: frozenset[str]
    topics: Mapping[str, frozenset[str]]
    """Operations on each topic. A topic that the broker does not show this user has none."""


async def asked(ask: Callable[[KafkaRequest], Awaitable[Any]], topics: Collection[str]) -> Permissions:
    """
    Ask the broker what this user may do with the cluster and with *topics*; *ask* sends the request.

    Raises:
        BrokerUnavailable: The broker does not answer, or does not know its cluster yet.
        BrokerDenied: The credentials are refused, or the broker speaks no version that lists operations.
    """

    def build(module: ModuleType) -> Any:
        with_id = "topic_id" in module.MetadataRequestTopic.__dataclass_fields__
        more = {"topic_id": None} if with_id else {}
        return module.MetadataRequest(
            topics=tuple(module.MetadataRequestTopic(name=name, **more) for name in sorted(topics)),
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=True,
            include_topic_authorized_operations=True,
        )

    response = await ask(KafkaRequest(_METADATA, build))
    if not response.cluster_id:
        raise BrokerUnavailable("the broker does not know its cluster's id yet")
    found = {
        topic.name: _operations(topic.topic_authorized_operations)
        for topic in response.topics
        if topic.name is not None and topic.error_code is ErrorCode.none
    }
    refused = {topic.name for topic in response.topics if topic.error_code in _REFUSED}
    return Permissions(
        response.cluster_id,
        _operations(response.cluster_authorized_operations),
        found | {name: frozenset[str]() for name in refused if name is not None},
    )


def _operations(bits: int) -> frozenset[str]:
    # The smallest number stands for "not asked for", and has no bit of an operation.
    return frozenset(name for code, name in _CODES.items() if bits >> code & 1)
