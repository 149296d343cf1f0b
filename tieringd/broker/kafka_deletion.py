"""
Delete records of a Kafka topic before an offset, as a user of the cluster does.

Each request goes to the broker that leads the partition, wherever it runs. The bounds of a log and its leader
epoch are asked for first: the caller checks the offset, and records the deletion under that epoch.

DeleteRecords names neither a topic id nor a leader epoch. So the caller asks for both again right before each
request, as a trim does (`KafkaBroker.trim`), and the request is sent soon after that or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Self

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka import metadata_request, text_of
from tieringd.broker.kafka_errors import refusal
from tieringd.broker.kafka_protocol import (
    DELETE_RECORDS,
    LIST_OFFSETS,
    METADATA,
    KafkaConnections,
    KafkaRequest,
    KafkaSettings,
)
from tieringd.errors import BrokerUnavailable, LeadershipChanged, ObjectNotFound
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from kio.schema.delete_records.v2 import DeleteRecordsResponse
    from kio.schema.list_offsets.v9 import ListOffsetsResponse
    from kio.schema.metadata.v13 import MetadataResponse

_EARLIEST: Final = -2
_LATEST: Final = -1
_READ_UNCOMMITTED: Final = 0
_CONSUMER: Final = -1


@dataclass(frozen=True, slots=True)
class TopicLeaders:
    """A topic as the cluster's metadata shows it."""

    cluster: str
    topic: str
    topic_id: str
    leaders: dict[int, tuple[tuple[str, int], int]]
    """The address and the leader epoch of each partition's leader; a partition without one is left out."""
    partition_count: int
    asked_at: float
    """Loop time right before the broker that answered was asked."""

    def leader_of(self, number: int) -> tuple[tuple[str, int], int]:
        """
        Return the address and the leader epoch of a partition's leader.

        Raises:
            BrokerUnavailable: The partition has no leader.
        """
        leader = self.leaders.get(number)
        if leader is None:
            raise BrokerUnavailable(f"{self.topic}-{number} has no leader now")
        return leader

    def require_same_log(self, earlier: TopicLeaders, number: int) -> None:
        """
        Check that a partition is still that of *earlier*, under the same leader epoch.

        Raises:
            ObjectNotFound: The topic is another one by now.
            LeadershipChanged: The partition is led under another epoch.
            BrokerUnavailable: The partition has no leader.
        """
        if (self.cluster, self.topic_id) != (earlier.cluster, earlier.topic_id):
            raise ObjectNotFound(
                f"topic {self.topic} was deleted and created again: its id is {self.topic_id} now, not "
                f"{earlier.topic_id}, and a repeat would delete records of the new topic"
            )
        epoch, before = self.leader_of(number)[1], earlier.leader_of(number)[1]
        if epoch != before:
            raise LeadershipChanged(
                f"{self.topic}-{number} is led under leader epoch {epoch} now, not {before}"
            )


@dataclass(frozen=True, slots=True)
class LedLog:
    """The bounds of one partition's log, under one leader epoch."""

    name: TopicPartition
    leader_epoch: int
    log_start_offset: int
    high_watermark: int


class KafkaRecordDeleter:
    """Ask leaders of partitions to delete records. Open it with `async with`; nothing is retried."""

    def __init__(self, settings: KafkaSettings) -> None:
        """
        Check the settings; nothing is connected yet.

        Raises:
            ConfigError: A setting is wrong, or a TLS file cannot be used.
        """
        self._connections = KafkaConnections(settings)
        self._timeout = timedelta(seconds=settings.request_timeout_seconds * 0.8)
        self._effect_within_seconds = settings.effect_within_seconds

    async def __aenter__(self) -> Self:
        """Return itself; connections are opened when they are needed."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._connections.close()

    async def leaders(self, topic: str) -> TopicLeaders:
        """
        Return the leaders of a topic's partitions, by the first bootstrap address that answers.

        Raises:
            BrokerUnavailable: No broker answers.
            ObjectNotFound: The cluster has no such topic, or this user may not see it.
        """
        response, asked_at = await self._metadata(topic)
        addresses = {int(each.node_id): (str(each.host), int(each.port)) for each in response.brokers}
        for found in response.topics:
            if found.name != topic or found.error_code is not ErrorCode.none:
                continue
            leaders = {
                int(one.partition_index): (addresses[int(one.leader_id)], int(one.leader_epoch))
                for one in found.partitions
                if int(one.leader_id) in addresses
            }
            topic_id = text_of(getattr(found, "topic_id", None))
            return TopicLeaders(
                response.cluster_id or "",
                topic,
                topic_id,
                leaders,
                partition_count=len(found.partitions),
                asked_at=asked_at,
            )
        raise ObjectNotFound(
            f"the cluster has no topic named {topic}, or this user may not see it",
            hint="The archive of a topic that is gone is deleted by `tieringd archive delete TOPIC`",
        )

    async def log_of(self, topic: TopicLeaders, number: int) -> LedLog:
        """
        Return the bounds of a partition's log.

        Raises:
            BrokerUnavailable: The partition has no leader, or another one by now.
            BrokerDenied: This user may not.
        """
        name = TopicPartition(topic.topic, number)
        _address, leader_epoch = topic.leader_of(number)
        start = await self._offset(topic, number, _EARLIEST)
        end = await self._offset(topic, number, _LATEST)
        return LedLog(name, leader_epoch, log_start_offset=start, high_watermark=end)

    async def delete_before(self, topic: TopicLeaders, number: int, before_offset: int) -> int:
        """
        Delete a partition's records before an offset; return where its log begins now.

        *topic* is the answer of `leaders` right before: the request is sent within `EFFECT_WITHIN_SECONDS` of
        that question. After a late answer the cluster is asked again.

        Raises:
            BrokerUnavailable: The leader does not answer, another broker leads by now, or the question is
                too long ago.
            LeadershipChanged: It is uncertain under which leader epoch the records were deleted.
            ObjectNotFound: The topic was deleted and created again: the records may be those of the new one.
            BrokerDenied: This user may not, or the topic's records cannot be deleted.
        """
        address, _leader_epoch = topic.leader_of(number)
        send_by = topic.asked_at + self._effect_within_seconds

        def build(module: ModuleType) -> Any:
            deleted = module.DeleteRecordsPartition(partition_index=number, offset=before_offset)
            asked = module.DeleteRecordsTopic(name=topic.topic, partitions=(deleted,))
            return module.DeleteRecordsRequest(topics=(asked,), timeout=self._timeout)

        response: DeleteRecordsResponse = await self._connections.send(
            address, KafkaRequest(DELETE_RECORDS, build, send_by=send_by)
        )
        if asyncio.get_running_loop().time() > send_by:
            # The leader may have applied it long after the question which topic it leads.
            (await self.leaders(topic.topic)).require_same_log(topic, number)
        for result in _partitions(response.topics):
            if result.error_code is not ErrorCode.none:
                raise refusal(f"to delete records of {topic.topic}-{number}", result.error_code)
            return int(result.low_watermark)
        raise BrokerUnavailable(f"the broker's answer says nothing of {topic.topic}-{number}")

    async def _metadata(self, topic: str) -> tuple[MetadataResponse, float]:
        """Return the first answer, and the loop time right before the broker that gave it was asked."""
        failures: list[BrokerUnavailable] = []
        for address in self._connections.bootstrap:
            asked_at = asyncio.get_running_loop().time()
            try:
                response: MetadataResponse = await self._connections.send(
                    address, KafkaRequest(METADATA, metadata_request([topic]))
                )
            except BrokerUnavailable as error:
                failures.append(error)
            else:
                return response, asked_at
        raise BrokerUnavailable("; ".join(error.message for error in failures)) from failures[-1]

    async def _offset(self, topic: TopicLeaders, number: int, timestamp: int) -> int:
        address, leader_epoch = topic.leader_of(number)

        def build(module: ModuleType) -> Any:
            asked = module.ListOffsetsPartition(
                partition_index=number, current_leader_epoch=leader_epoch, timestamp=timestamp
            )
            topics = (module.ListOffsetsTopic(name=topic.topic, partitions=(asked,)),)
            return module.ListOffsetsRequest(
                replica_id=_CONSUMER, isolation_level=_READ_UNCOMMITTED, topics=topics
            )

        response: ListOffsetsResponse = await self._connections.send(
            address, KafkaRequest(LIST_OFFSETS, build)
        )
        for result in _partitions(response.topics):
            if result.error_code is not ErrorCode.none:
                raise refusal(f"the offsets of {topic.topic}-{number}", result.error_code)
            if int(result.offset) >= 0:
                return int(result.offset)
        raise BrokerUnavailable(f"the broker's answer has no offset of {topic.topic}-{number}")


def _partitions(topics: Iterable[Any]) -> Iterable[Any]:
    return (partition for topic in topics for partition in topic.partitions)
