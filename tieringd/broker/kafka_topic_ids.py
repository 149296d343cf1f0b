"""
Which ids the topics of a cluster have now, asked of every live broker.

A broker answers from what it knows, and one that is cut off from the controller knows of no new topic. So
what all of them agree on is told, and nothing else: a topic that one broker has is not gone.
"""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_protocol import METADATA, KafkaConnections, KafkaRequest
from tieringd.model.partition import NO_TOPIC_ID

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from types import ModuleType
    from uuid import UUID

    from kio.schema.metadata.v13 import MetadataResponse


async def topic_ids(
    connections: KafkaConnections, brokers: Iterable[tuple[str, int]], names: Collection[str]
) -> dict[str, frozenset[str]]:
    """
    Ask each of *brokers* for *names*; return by name all ids that were given, none where there is no topic.

    A name of which one broker does not tell is left out.

    Raises:
        BrokerUnavailable: One does not answer.
    """
    request = metadata_request(names)
    answers = await asyncio.gather(*(_told(connections, address, request) for address in brokers))
    told = set(names).intersection(*answers) if answers else set()
    return {name: frozenset[str]().union(*(answer[name] for answer in answers)) for name in told}


def metadata_request(topics: Iterable[str]) -> Any:
    """Return how to build a request for the metadata of *topics*, which creates none of them."""
    names = sorted(topics)

    def build(module: ModuleType) -> Any:
        # Topic ids came with version 10; Redpanda speaks older ones as well.
        ids = {"topic_id": None} if has_field(module.MetadataRequestTopic, "topic_id") else {}
        flags = {
            flag: False
            for flag in (
                "allow_auto_topic_creation",
                "include_cluster_authorized_operations",
                "include_topic_authorized_operations",
            )
            if has_field(module.MetadataRequest, flag)
        }
        topics = tuple(module.MetadataRequestTopic(name=name, **ids) for name in names)
        return module.MetadataRequest(topics=topics, **flags)

    return build


def has_field(message: type[Any], name: str) -> bool:
    """Say whether a message has a field in the version that was chosen."""
    return name in message.__dataclass_fields__


def text_of(topic_id: UUID | None) -> str:
    """Return a topic id as it is written everywhere else."""
    if topic_id is None:
        return NO_TOPIC_ID
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


async def _told(
    connections: KafkaConnections, address: tuple[str, int], build: Any
) -> dict[str, frozenset[str]]:
    response: MetadataResponse = await connections.send(address, KafkaRequest(METADATA, build))
    told: dict[str, frozenset[str]] = {}
    for topic in response.topics:
        if topic.name is None:
            continue
        if topic.error_code is ErrorCode.none:
            told[topic.name] = frozenset({text_of(getattr(topic, "topic_id", None))})
        elif topic.error_code is ErrorCode.unknown_topic_or_partition:
            told[topic.name] = frozenset()
    return told
