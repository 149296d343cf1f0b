"""
What every broker of a cluster tells of its log directories: Kafka's DescribeLogDirs.

Unlike all else that is asked of Kafka this concerns the other brokers too. One that does not answer,
or refuses, is an error in the answer: an operator who looks at disks must see the others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_protocol import Api, KafkaRequest
from tieringd.errors import BrokerDenied, BrokerUnavailable
from tieringd.model.local_log import LogDirSizes, ReplicaSize
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from tieringd.broker.kafka_protocol import KafkaConnections

DESCRIBE_LOG_DIRS: Final = Api("DescribeLogDirs", 35, min_version=1, max_version=4)


async def log_dir_sizes(
    connections: KafkaConnections, brokers: Mapping[int, tuple[str, int]]
) -> tuple[LogDirSizes, ...]:
    """Ask each of *brokers*, whose addresses are given by id; return the answers by id and path."""
    found = await asyncio.gather(*(_of_broker(connections, *broker) for broker in sorted(brokers.items())))
    return tuple(directory for directories in found for directory in directories)


async def _of_broker(
    connections: KafkaConnections, broker: int, address: tuple[str, int]
) -> list[LogDirSizes]:
    try:
        response = await connections.send(address, KafkaRequest(DESCRIBE_LOG_DIRS, _all_topics))
    except (BrokerUnavailable, BrokerDenied) as error:
        return [LogDirSizes(broker, "", error=str(error))]
    # Older versions answer a caller without rights as if there were nothing.
    refusal = getattr(response, "error_code", ErrorCode.none)
    if refusal is not ErrorCode.none:
        return [LogDirSizes(broker, "", error=refusal.name.upper())]
    return sorted((_directory(broker, result) for result in response.results), key=lambda one: one.path)


def _all_topics(module: ModuleType) -> Any:
    return module.DescribeLogDirsRequest(topics=None)


def _directory(broker: int, result: Any) -> LogDirSizes:
    error = "" if result.error_code is ErrorCode.none else result.error_code.name.upper()
    replicas = tuple(
        ReplicaSize(TopicPartition(topic.name, each.partition_index), each.partition_size)
        for topic in result.topics
        for each in topic.partitions
    )
    return LogDirSizes(broker, result.log_dir, replicas, error)
