"""
The live Kafka broker beside us, asked over its own API.

Four questions and one order: Metadata (who leads what, under which epoch), ListOffsets (the
bounds of a log), DescribeConfigs (what is set on a topic) and DeleteRecords (trim). Records are
never fetched; the log directory has them.

Everything but Metadata goes to the broker beside us, for the partitions that it leads.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import structlog
from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_protocol import (
    DELETE_RECORDS,
    DESCRIBE_CONFIGS,
    LIST_OFFSETS,
    METADATA,
    KafkaConnections,
    KafkaRequest,
    KafkaSettings,
)
from tieringd.errors import BrokerDenied, BrokerUnavailable, TieringError
from tieringd.model.partition import NO_TOPIC_ID, LogBounds, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType
    from uuid import UUID

    from kio.schema.delete_records.v2 import DeleteRecordsResponse
    from kio.schema.describe_configs.v4 import DescribeConfigsResponse
    from kio.schema.list_offsets.v9 import ListOffsetsResponse
    from kio.schema.metadata.v13 import MetadataResponse

    from tieringd.model.local_log import LocalLog, LocalPartition
    from tieringd.model.partition import TopicIdPartition

__all__ = ["KafkaBroker", "KafkaSettings"]

log = structlog.get_logger()

_EARLIEST: Final = -2
_LATEST: Final = -1
_READ_UNCOMMITTED: Final = 0
_READ_COMMITTED: Final = 1
_CONSUMER: Final = -1
_TOPIC_RESOURCE: Final = 2
_SET_ON_TOPIC: Final = 1
"""DescribeConfigs' source DYNAMIC_TOPIC_CONFIG; defaults of the broker have other sources."""
_TOPICS_PER_DESCRIBE: Final = 200
"""A topic has some 35 settings; decoding 200 topics holds the event loop for tens of milliseconds."""
_DENIED_HINTS: Final = {
    ErrorCode.policy_violation: "Kafka never deletes records of a topic whose cleanup.policy is only compact",
    ErrorCode.invalid_topic_exception: "Kafka never deletes records of its internal topics",
    ErrorCode.topic_authorization_failed: "Grant this user the ACLs DESCRIBE, DESCRIBE_CONFIGS and DELETE",
    ErrorCode.cluster_authorization_failed: "Grant this user the ACL DESCRIBE on the cluster",
}


class KafkaBroker:
    """
    The broker whose log directories we read, as its clients see it.

    Belongs to the event loop that uses it. It survives restarts of the broker: a call that
    finds it away raises `BrokerUnavailable`, and a later one connects again. A call takes at
    most one request timeout per bootstrap address and one per request.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        """
        Read the TLS files and check the settings; nothing is connected yet.

        Raises:
            ConfigError: A setting is wrong, or a TLS file cannot be used.
        """
        self._connections = KafkaConnections(settings)
        self._settings = settings
        self._node_id = settings.node_id
        self._node_address: tuple[str, int] | None = None
        self._reported: set[str] = set()

    async def cluster_id(self) -> str:
        """Return the id of the cluster; it is part of every object's key."""
        response = await self._metadata(())
        if not response.cluster_id:
            raise BrokerUnavailable("the broker does not know its cluster's id yet")
        return response.cluster_id

    async def led_partitions(self, found: Sequence[LocalPartition]) -> Mapping[TopicPartition, int]:
        """
        Return the leader epoch of each partition among *found* that this broker leads.

        A partition whose topic id on disk differs from the cluster's is not led: its
        directory belongs to a deleted incarnation.
        """
        if not found:
            return {}
        response = await self._metadata({each.topic_partition.topic for each in found})
        node_id = self._require_node_id()
        ids: dict[str, str] = {}
        epochs: dict[TopicPartition, int] = {}
        for topic in response.topics:
            if topic.name is None or topic.error_code is not ErrorCode.none:
                self._report(topic.name, topic.error_code)
                continue
            ids[topic.name] = _topic_id(topic.topic_id)
            for partition in topic.partitions:
                if partition.leader_id == node_id:
                    epochs[TopicPartition(topic.name, partition.partition_index)] = partition.leader_epoch
        return {
            each.topic_partition: epochs[each.topic_partition]
            for each in found
            if each.topic_partition in epochs and ids[each.topic_partition.topic] == each.topic_id
        }

    async def log_bounds(self, logs: Sequence[LocalLog]) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """Return the bounds of each log, or the error that kept this one log from having them."""
        if not logs:
            return {}
        asked = [each.partition.topic_partition for each in logs]
        # In this order each answer is a lower bound of what it would be together with the next:
        # a log start, then a last stable offset, then a high watermark that is not behind it.
        starts = await self._offsets(asked, _EARLIEST, _READ_UNCOMMITTED)
        stables = await self._offsets(asked, _LATEST, _READ_COMMITTED)
        ends = await self._offsets(asked, _LATEST, _READ_UNCOMMITTED)
        return {each: _bounds(each, starts, stables, ends) for each in asked}

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Return what is set on each topic; a topic that the cluster does not know is left out."""
        configs: dict[str, Mapping[str, str]] = {}
        for first in range(0, len(topics), _TOPICS_PER_DESCRIBE):
            response = await self._described(topics[first : first + _TOPICS_PER_DESCRIBE])
            for result in response.results:
                if result.error_code is ErrorCode.unknown_topic_or_partition:
                    continue
                if result.error_code is not ErrorCode.none:
                    # Without its settings a topic would look like one with the defaults.
                    raise _error(f"the settings of topic {result.resource_name}", result.error_code)
                configs[result.resource_name] = {
                    config.name: config.value
                    for config in result.configs
                    if config.config_source == _SET_ON_TOPIC and config.value is not None
                }
        return configs

    async def trim(self, partition: TopicIdPartition, log: LocalLog, *, before_offset: int) -> int:
        """
        Move the log start offset of every replica to *before_offset*; return where it is now.

        The broker deletes the files at its next retention check, plus `file.delete.delay.ms`.

        Raises:
            BrokerDenied: The broker never trims this topic, or we may not.
        """
        # DeleteRecords knows names, not topic ids: it would also cut a topic that was created
        # again under this name. Asked anew, the chance of that is one round trip long.
        led = await self.led_partitions([log.partition])
        if partition.topic_id != log.partition.topic_id or partition.topic_partition not in led:
            raise BrokerUnavailable(
                f"this broker does not lead {partition} with topic id {partition.topic_id} now"
            )
        response: DeleteRecordsResponse = await self._ask(
            KafkaRequest(DELETE_RECORDS, self._deletion(partition.topic_partition, before_offset))
        )
        for topic in response.topics:
            for result in topic.partitions:
                if result.error_code is ErrorCode.offset_out_of_range:
                    raise BrokerUnavailable(
                        f"{partition} cannot be trimmed to offset {before_offset}: the broker holds no "
                        "committed record there",
                        hint="Its high watermark may be behind; the next attempt uses fresh bounds",
                    )
                if result.error_code is not ErrorCode.none:
                    raise _error(f"to trim {partition}", result.error_code)
                return result.low_watermark
        raise BrokerUnavailable(f"the broker's answer says nothing of trimming {partition}")

    async def close(self) -> None:
        """Release connections."""
        await self._connections.close()

    async def _metadata(self, topics: Iterable[str]) -> MetadataResponse:
        """Ask the first broker that answers: the one beside us, or one of the bootstrap addresses."""
        names = sorted(topics)

        def build(module: ModuleType) -> Any:
            return module.MetadataRequest(
                topics=tuple(module.MetadataRequestTopic(topic_id=None, name=name) for name in names),
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=False,
            )

        response: MetadataResponse | None = None
        failures: list[BrokerUnavailable] = []
        for address in self._known_addresses():
            try:
                response = await self._connections.send(address, KafkaRequest(METADATA, build))
            except BrokerUnavailable as error:
                failures.append(error)
            else:
                break
        if response is None:
            raise BrokerUnavailable("; ".join(error.message for error in failures)) from failures[-1]
        self._learn(response)
        return response

    def _known_addresses(self) -> list[tuple[str, int]]:
        own = [] if self._node_address is None else [self._node_address]
        return list(dict.fromkeys([*own, *self._connections.bootstrap]))

    def _learn(self, response: MetadataResponse) -> None:
        """Keep who the broker beside us is and where it listens; it may move when it restarts."""
        live = {int(each.node_id): (each.host, int(each.port)) for each in response.brokers}
        if self._node_id is None:
            named = [node for node, address in live.items() if address in self._connections.bootstrap]
            self._node_id = named[0] if len(named) == 1 else None
        self._node_address = None if self._node_id is None else live.get(self._node_id)

    def _require_node_id(self) -> int:
        if self._node_id is None:
            raise BrokerDenied(
                "which broker of the cluster is beside this daemon is not known: not exactly one "
                "advertises an address of broker.bootstrap",
                hint="Set broker.node_id to the node.id of the broker's own configuration",
            )
        return self._node_id

    async def _ask(self, request: KafkaRequest) -> Any:
        """Send *request* to the broker beside us."""
        if self._node_address is None:
            await self._metadata(())
        if self._node_address is None:
            node_id = self._require_node_id()
            raise BrokerUnavailable(f"broker {node_id} is not among the live brokers of the cluster")
        try:
            return await self._connections.send(self._node_address, request)
        except BrokerUnavailable:
            # It may have come back at another address: ask for it the next time.
            self._node_address = None
            raise

    async def _offsets(
        self, asked: Sequence[TopicPartition], timestamp: int, isolation_level: int
    ) -> Mapping[TopicPartition, int | TieringError]:
        """Return one special offset of each partition, or the error that the broker gave for it."""
        by_topic: defaultdict[str, list[int]] = defaultdict(list)
        for each in asked:
            by_topic[each.topic].append(each.partition)

        def build(module: ModuleType) -> Any:
            topics = tuple(
                module.ListOffsetsTopic(
                    name=name,
                    partitions=tuple(
                        module.ListOffsetsPartition(partition_index=number, timestamp=timestamp)
                        for number in numbers
                    ),
                )
                for name, numbers in by_topic.items()
            )
            return module.ListOffsetsRequest(
                replica_id=_CONSUMER, isolation_level=isolation_level, topics=topics
            )

        response: ListOffsetsResponse = await self._ask(KafkaRequest(LIST_OFFSETS, build))
        offsets: dict[TopicPartition, int | TieringError] = {}
        for topic in response.topics:
            for result in topic.partitions:
                each = TopicPartition(topic.name, result.partition_index)
                offsets[each] = (
                    result.offset
                    if result.error_code is ErrorCode.none
                    else _error(f"the offsets of {each}", result.error_code)
                )
        return offsets

    async def _described(self, topics: Sequence[str]) -> DescribeConfigsResponse:
        def build(module: ModuleType) -> Any:
            resources = tuple(
                module.DescribeConfigsResource(
                    resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=None
                )
                for topic in topics
            )
            return module.DescribeConfigsRequest(resources=resources)

        response: DescribeConfigsResponse = await self._ask(KafkaRequest(DESCRIBE_CONFIGS, build))
        return response

    def _deletion(self, partition: TopicPartition, before_offset: int) -> Callable[[ModuleType], Any]:
        # The broker's answer has to arrive before we give up waiting for it.
        timeout = timedelta(seconds=self._settings.request_timeout_seconds * 0.8)

        def build(module: ModuleType) -> Any:
            deleted = module.DeleteRecordsPartition(partition_index=partition.partition, offset=before_offset)
            topic = module.DeleteRecordsTopic(name=partition.topic, partitions=(deleted,))
            return module.DeleteRecordsRequest(topics=(topic,), timeout=timeout)

        return build

    def _report(self, topic: str | None, error: ErrorCode) -> None:
        """Say once that a topic on our disk is hidden from us; a deleted topic is no news."""
        if topic is None or topic in self._reported or error is not ErrorCode.topic_authorization_failed:
            return
        self._reported.add(topic)
        log.warning(
            "topic is not archived: its metadata is not visible", topic=topic, hint=_DENIED_HINTS[error]
        )


def _bounds(
    partition: TopicPartition, *answers: Mapping[TopicPartition, int | TieringError]
) -> LogBounds | TieringError:
    offsets: list[int] = []
    for answer in answers:
        offset = answer.get(partition)
        if isinstance(offset, TieringError):
            return offset
        if offset is None or offset < 0:
            return BrokerUnavailable(f"the broker's answer has no offset of {partition}")
        offsets.append(offset)
    start, stable, end = offsets
    # A new leader's high watermark may be behind the old one's: what both saw is stable.
    return LogBounds(log_start_offset=start, last_stable_offset=min(stable, end), log_end_offset=end)


def _topic_id(topic_id: UUID | None) -> str:
    if topic_id is None:
        return NO_TOPIC_ID
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def _error(subject: str, code: ErrorCode) -> TieringError:
    """Return the error of ours for a code in an answer; *subject* is what was asked for."""
    hint = _DENIED_HINTS.get(code)
    if hint is not None:
        return BrokerDenied(f"the broker refuses {subject}: {code.name.upper()}", hint=hint)
    return BrokerUnavailable(f"the broker cannot give {subject} now: {code.name.upper()}")
