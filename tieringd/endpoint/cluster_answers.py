"""
The cluster as clients see it: its nodes, and the topics of the bucket.

Without consumer groups the only node is this endpoint. With them each endpoint of the archive that is alive
is a node, and partitions are spread over all. Each endpoint serves any partition, so it does no harm when
two of them name different leaders for a while.

Leader epochs are those of the manifests. A request that names topics reads their manifests. A request for all
topics only reads those anew that were read before, since it may be about tens of thousands of partitions.

`DescriptionAnswers` answers admin tools: a topic's settings, as far as its manifest has them, and the content
of the bucket. Nothing can be changed here, and no setting has an effect on this endpoint: it deletes nothing.
The reported retention is the one that the topic had before tieringd managed it, if that is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.static.primitive import i32Timedelta

from tieringd.endpoint.access import Access, Operation
from tieringd.endpoint.endpoint_nodes import Node, Nodes, chosen
from tieringd.endpoint.endpoint_settings import ADVERTISED, ApiKey, EndpointSettings
from tieringd.endpoint.served_manifests import ServedPartitions, ServedTopic, ServedTopics
from tieringd.errors import TieringError
from tieringd.formats.kafka_wire.messages import made, response_module
from tieringd.model.partition import TopicIdPartition
from tieringd.storage.at_once import at_once
from tieringd.storage.threads import STEP, in_steps

NO_DELAY: Final = i32Timedelta.parse(timedelta(0))
_UNKNOWN_EPOCH: Final = -1
_CLUSTER_OPERATIONS: Final = 1 << 8 | 1 << 10
_NOT_ASKED: Final = -(2**31)
_BROKERS: Final = 1
"""The type of this endpoint in DescribeCluster. The other type is a controller."""
_PATIENCE_SECONDS: Final = 3.0
_AT_ONCE: Final = 16
"""How many partitions of one DescribeLogDirs may wait for the store at once."""
_FIRST_NULL_NAMES: Final = 12
"""The first version of Metadata whose answer may leave out the name of a topic."""
_MOST_PARTITIONS: Final = 2000
"""In one response to DescribeTopicPartitions, as in Kafka."""

_TOPIC: Final = 2
_BROKER: Final = 4
_OF_THE_TOPIC: Final = 1
_DEFAULT: Final = 5
_BOOLEAN, _LONG, _LIST = 1, 5, 7
"""Kafka's types of settings."""
_UNLIMITED: Final = "-1"
_Setting: TypeAlias = tuple[str, str, int, int]
"""Name, value, source and type of a setting."""


class ClusterAnswers:
    """ApiVersions, Metadata, DescribeCluster and DescribeTopicPartitions."""

    def __init__(
        self,
        topics: ServedTopics,
        partitions: ServedPartitions,
        nodes: Nodes,
        *,
        versions: Mapping[int, range] = ADVERTISED,
    ) -> None:
        """Keep the arguments. *versions* are the offered APIs and versions."""
        self._topics = topics
        self._partitions = partitions
        self._nodes = nodes
        self.versions = versions

    async def api_versions(self, version: int, _request: Any, _access: Access) -> Any:
        """Return the offered APIs and versions."""
        module: Any = response_module(ApiKey.API_VERSIONS, version)
        return made(
            module.ApiVersionsResponse,
            error_code=ErrorCode.none,
            throttle_time=NO_DELAY,
            api_keys=tuple(
                module.ApiVersion(api_key=key, min_version=versions.start, max_version=versions.stop - 1)
                for key, versions in sorted(self.versions.items())
            ),
        )

    async def metadata(self, version: int, request: Any, access: Access) -> Any:
        """Return the nodes, and the requested topics."""
        await self._topics.ensure_fresh()
        module: Any = response_module(ApiKey.METADATA, version)
        is_asked = getattr(request, "include_topic_authorized_operations", False)

        def operations(one: ServedTopic) -> int:
            return access.operations(one.name) if is_asked else _NOT_ASKED

        # Version 0 asks for all topics with an empty list, later versions with null.
        if request.topics is None or (version == 0 and not request.topics):
            await self._read_anew()
            found = list((await self._described(module, await self._seen(access), operations)).values())
        else:
            # A topic that is named twice is described once: many names of a large one are a larger answer.
            topics = in_steps(request.topics)
            asked = {(getattr(one, "topic_id", None), one.name): None async for one in topics}
            judged = [
                (one, served, _is_denied(access, one[1], served))
                async for one in in_steps(asked)
                for served in [self._asked_for(*one)]
            ]
            allowed = [one for _, one, is_denied in judged if one is not None and not is_denied]
            await self._read(allowed)
            described = await self._described(module, allowed, operations)
            found = [
                _unknown(module, *asked_for, version, is_denied=is_denied)
                if one is None or is_denied
                else described[one.name]
                async for asked_for, one, is_denied in in_steps(judged)
            ]
        cluster_operations = getattr(request, "include_cluster_authorized_operations", False)
        return made(
            module.MetadataResponse,
            throttle_time=NO_DELAY,
            brokers=tuple(
                made(
                    module.MetadataResponseBroker,
                    node_id=one.node_id,
                    host=one.host,
                    port=one.port,
                    rack=None,
                )
                for one in self._nodes.all()
            ),
            cluster_id=self._topics.cluster_id,
            controller_id=self._nodes.own.node_id,
            topics=tuple(found),
            cluster_authorized_operations=_CLUSTER_OPERATIONS if cluster_operations else _NOT_ASKED,
            error_code=ErrorCode.none,
        )

    async def describe_cluster(self, version: int, request: Any, _access: Access) -> Any:
        """Return the nodes."""
        module: Any = response_module(ApiKey.DESCRIBE_CLUSTER, version)
        is_meant = getattr(request, "endpoint_type", _BROKERS) == _BROKERS
        brokers = tuple(
            made(
                module.DescribeClusterBroker,
                broker_id=one.node_id,
                host=one.host,
                port=one.port,
                rack=None,
                is_fenced=False,
            )
            for one in self._nodes.all()
        )
        asked = request.include_cluster_authorized_operations
        return made(
            module.DescribeClusterResponse,
            throttle_time=NO_DELAY,
            error_code=ErrorCode.none if is_meant else ErrorCode.mismatched_endpoint_type,
            error_message=None
            if is_meant
            else "There is no controller: this endpoint serves an archive without a broker",
            endpoint_type=_BROKERS,
            cluster_id=self._topics.cluster_id,
            controller_id=self._nodes.own.node_id,
            brokers=brokers if is_meant else (),
            cluster_authorized_operations=_CLUSTER_OPERATIONS if asked else _NOT_ASKED,
        )

    async def describe_topic_partitions(self, version: int, request: Any, access: Access) -> Any:
        """Return partitions from the cursor on, up to the request's limit."""
        await self._topics.ensure_fresh()
        module: Any = response_module(ApiKey.DESCRIBE_TOPIC_PARTITIONS, version)
        names = sorted({one.name for one in request.topics} or {one.name for one in await self._seen(access)})
        begin = ("", 0)
        if request.cursor is not None:
            begin = (request.cursor.topic_name, request.cursor.partition_index)
        left = min(max(request.response_partition_limit, 1), _MOST_PARTITIONS)
        found, following = [], None
        async for name in in_steps(name for name in names if name >= begin[0]):
            topic = self._topics.by_name(name)
            first = begin[1] if name == begin[0] else 0
            if left <= 0:
                following = module.Cursor(topic_name=name, partition_index=first)
                break
            if not access.may(Operation.DESCRIBE, name):
                found.append(_unknown_partitions(module, name, ErrorCode.topic_authorization_failed))
                continue
            if topic is None:
                found.append(_unknown_partitions(module, name, ErrorCode.unknown_topic_or_partition))
                continue
            numbers = range(first, min(topic.partition_count, first + left))
            left -= len(numbers)
            await self._read([topic], numbers)
            found.append(self._partitions_of(module, topic, numbers, access.operations(name)))
            if numbers.stop < topic.partition_count:
                following = module.Cursor(topic_name=name, partition_index=numbers.stop)
                break
        return module.DescribeTopicPartitionsResponse(
            throttle_time=NO_DELAY, topics=tuple(found), next_cursor=following
        )

    async def _seen(self, access: Access) -> list[ServedTopic]:
        """Return the topics that a client may know of."""
        topics = self._topics.all()
        return [one async for one in in_steps(topics) if access.may(Operation.DESCRIBE, one.name)]

    def _asked_for(self, topic_id: UUID | None, name: str | None) -> ServedTopic | None:
        if name is not None:
            return self._topics.by_name(name)
        return None if topic_id is None else self._topics.by_id(topic_id)

    async def _read(self, topics: Iterable[ServedTopic], numbers: range | None = None) -> None:
        """Read the manifests of topics, as `_ensure_fresh` does."""
        found = (
            topic.partition(number) for topic in topics for number in numbers or range(topic.partition_count)
        )
        await self._ensure_fresh([one async for one in in_steps(found) if one is not None])

    async def _read_anew(self) -> None:
        """Read those manifests of served topics that were read before, as `_ensure_fresh` does."""
        read = self._partitions.read_before()
        await self._ensure_fresh([one async for one in in_steps(read) if self._is_served(one)])

    def _is_served(self, partition: TopicIdPartition) -> bool:
        topic = self._topics.by_name(partition.topic)
        return topic is not None and topic.partition(partition.partition) == partition

    async def _ensure_fresh(self, partitions: Iterable[TopicIdPartition]) -> None:
        """
        Read manifests that are not known yet or too old, for a limited time.

        Those that are still unknown then get no leader epoch. A client that knows a later epoch than it is
        told ignores the answer, and goes on asking a node that has died.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._partitions.ensure_fresh(partitions)

    def _epoch(self, topic: ServedTopic, number: int) -> int:
        partition = topic.partition(number)
        manifest = None if partition is None else self._partitions.known(partition)
        return _UNKNOWN_EPOCH if manifest is None else manifest.leader_epoch

    async def _described(
        self, module: Any, topics: Iterable[ServedTopic], operations: Callable[[ServedTopic], int]
    ) -> dict[str, Any]:
        """
        Return what Metadata tells of *topics*, by their names and in their order.

        Topics may have tens of thousands of partitions, so other clients are served in between.
        """
        nodes = self._nodes.all()
        asked = {one.name: one for one in topics}
        partitions: dict[str, list[Any]] = {one: [] for one in asked}
        every = ((one, number) for one in asked.values() for number in range(one.partition_count))
        async for one, number in in_steps(every):
            described = made(
                module.MetadataResponsePartition,
                error_code=ErrorCode.none,
                partition_index=number,
                leader_epoch=self._epoch(one, number),
                **_replicas(nodes, one, number),
            )
            partitions[one.name].append(described)
        return {
            one.name: made(
                module.MetadataResponseTopic,
                error_code=ErrorCode.none,
                name=one.name,
                topic_id=one.topic_id,
                is_internal=False,
                partitions=tuple(partitions[one.name]),
                topic_authorized_operations=operations(one),
            )
            async for one in in_steps(asked.values())
        }

    def _partitions_of(self, module: Any, topic: ServedTopic, numbers: range, operations: int) -> Any:
        nodes = self._nodes.all()
        return module.DescribeTopicPartitionsResponseTopic(
            error_code=ErrorCode.none,
            name=topic.name,
            topic_id=topic.topic_id,
            is_internal=False,
            topic_authorized_operations=operations,
            partitions=tuple(
                module.DescribeTopicPartitionsResponsePartition(
                    error_code=ErrorCode.none,
                    partition_index=number,
                    leader_epoch=self._epoch(topic, number),
                    eligible_leader_replicas=(),
                    last_known_elr=(),
                    **_replicas(nodes, topic, number),
                )
                for number in numbers
            ),
        )


def _replicas(nodes: Sequence[Node], topic: ServedTopic, number: int) -> dict[str, Any]:
    leader = chosen(nodes, f"{topic.name}/{number}") if len(nodes) > 1 else nodes[0]
    return {
        "leader_id": leader.node_id,
        "replica_nodes": (leader.node_id,),
        "isr_nodes": (leader.node_id,),
        "offline_replicas": (),
    }


def _is_denied(access: Access, name: str | None, served: ServedTopic | None) -> bool:
    """Say whether a topic may not be described. A name is judged whether there is such a topic or not."""
    known = served.name if name is None and served is not None else name
    return known is not None and not access.may(Operation.DESCRIBE, known)


def _unknown(module: Any, topic_id: UUID | None, name: str | None, version: int, *, is_denied: bool) -> Any:
    by_id = name is None
    error = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
    return made(
        module.MetadataResponseTopic,
        error_code=ErrorCode.topic_authorization_failed if is_denied else error,
        name="" if by_id and version < _FIRST_NULL_NAMES else name,
        topic_id=topic_id if by_id else None,
        is_internal=False,
        partitions=(),
        topic_authorized_operations=_NOT_ASKED,
    )


def _unknown_partitions(module: Any, name: str, error: ErrorCode) -> Any:
    return module.DescribeTopicPartitionsResponseTopic(
        error_code=error,
        name=name,
        topic_id=None,
        is_internal=False,
        topic_authorized_operations=_NOT_ASKED,
        partitions=(),
    )


class DescriptionAnswers:
    """DescribeConfigs and DescribeLogDirs."""

    def __init__(
        self, topics: ServedTopics, partitions: ServedPartitions, settings: EndpointSettings, nodes: Nodes
    ) -> None:
        self._topics = topics
        self._partitions = partitions
        self._settings = settings
        self._nodes = nodes

    async def configs(self, version: int, request: Any, access: Access) -> Any:
        """Return the settings of topics. This node has no settings to show."""
        await self._topics.ensure_fresh()
        module: Any = response_module(ApiKey.DESCRIBE_CONFIGS, version)
        resources = {one: None async for one in in_steps(request.resources)}
        return made(
            module.DescribeConfigsResponse,
            throttle_time=NO_DELAY,
            results=tuple([self._resource(module, one, access) async for one in in_steps(resources)]),
        )

    async def log_dirs(self, version: int, request: Any, access: Access) -> Any:
        """Return the bucket as the only log directory, to clients that may see everything."""
        module: Any = response_module(ApiKey.DESCRIBE_LOG_DIRS, version)
        if not access.is_whole:
            # Kafka's ACLs ask for a permission of the cluster, and rules are about topics.
            denied = ErrorCode.cluster_authorization_failed
            return made(module.DescribeLogDirsResponse, throttle_time=NO_DELAY, error_code=denied, results=())
        await self._topics.ensure_fresh()
        # A partition that is named twice is measured and told once.
        wanted: dict[str, tuple[ServedTopic, dict[int, None]]] = {}
        if request.topics is None:
            named = [(one, range(one.partition_count)) for one in self._topics.all()]
        else:
            named = [
                (topic, one.partitions)
                async for one in in_steps(request.topics)
                if (topic := self._topics.by_name(one.topic)) is not None
            ]
        async for topic, numbers in in_steps(named):
            wanted.setdefault(topic.name, (topic, {}))[1].update(dict.fromkeys(numbers))
        every = [(topic, number) for topic, numbers in wanted.values() for number in numbers]
        sizes = await self._sizes(every)
        answers: dict[str, list[Any]] = {name: [] for name in wanted}
        async for topic, number in in_steps(every):
            if (topic.name, number) in sizes:
                answers[topic.name].append(
                    module.DescribeLogDirsPartition(
                        partition_index=number,
                        partition_size=sizes[topic.name, number],
                        offset_lag=0,
                        is_future_key=False,
                    )
                )
        topics = tuple(
            [
                module.DescribeLogDirsTopic(name=name, partitions=tuple(found))
                async for name, found in in_steps(answers.items())
            ]
        )
        directory = made(
            module.DescribeLogDirsResult,
            error_code=ErrorCode.none,
            log_dir=f"remote://{self._settings.bucket}",
            topics=topics,
            total_bytes=-1,
            usable_bytes=-1,
        )
        return made(
            module.DescribeLogDirsResponse,
            throttle_time=NO_DELAY,
            error_code=ErrorCode.none,
            results=(directory,),
        )

    async def _sizes(self, wanted: Iterable[tuple[ServedTopic, int]]) -> dict[tuple[str, int], int]:
        """Return the archived bytes of those partitions whose manifests can be read in time."""
        sizes: dict[tuple[str, int], int] = {}

        async def measure(partition: TopicIdPartition) -> None:
            with suppress(TieringError):
                sizes[partition.topic, partition.partition] = await self._partitions.size_bytes(partition)

        served = [
            found
            async for topic, number in in_steps(wanted)
            if (found := topic.partition(number)) is not None
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.answer_timeout_seconds):
                # Those whose manifests are known are measured without a wait, so that they are few in a turn.
                async for begin in in_steps(range(0, len(served), STEP), step=1):
                    await at_once(served[begin : begin + STEP], measure, count=_AT_ONCE)
        return sizes

    def _node_names(self) -> set[str]:
        return {"", *(str(one.node_id) for one in self._nodes.all())}

    def _resource(self, module: Any, asked: Any, access: Access) -> Any:
        error, message = ErrorCode.none, None
        settings: tuple[_Setting, ...] = ()
        topic = self._topics.by_name(asked.resource_name) if asked.resource_type == _TOPIC else None
        is_topic = asked.resource_type == _TOPIC
        if is_topic and not access.may(Operation.DESCRIBE_CONFIGS, asked.resource_name):
            error = ErrorCode.topic_authorization_failed
        elif asked.resource_type == _BROKER and not access.is_whole:
            error = ErrorCode.cluster_authorization_failed
        elif topic is not None:
            settings = _settings_of(topic)
        elif is_topic:
            error, message = ErrorCode.unknown_topic_or_partition, "The archive has no such topic"
        elif asked.resource_type != _BROKER or asked.resource_name not in self._node_names():
            error, message = ErrorCode.invalid_request, "The archive has only topic configurations"
        keys = asked.configuration_keys
        return module.DescribeConfigsResult(
            error_code=error,
            error_message=message,
            resource_type=asked.resource_type,
            resource_name=asked.resource_name,
            configs=tuple(
                made(
                    module.DescribeConfigsResourceResult,
                    name=name,
                    value=value,
                    read_only=True,
                    is_default=source == _DEFAULT,
                    config_source=source,
                    is_sensitive=False,
                    synonyms=(),
                    config_type=kind,
                    documentation=None,
                )
                for name, value, source, kind in settings
                if keys is None or name in keys
            ),
        )


def _settings_of(topic: ServedTopic) -> tuple[_Setting, ...]:
    original = topic.manifest.original_retention

    def limit(name: str, recorded: str | None) -> _Setting:
        return (name, *((_UNLIMITED, _DEFAULT) if recorded is None else (recorded, _OF_THE_TOPIC)), _LONG)

    return (
        ("cleanup.policy", "delete", _DEFAULT, _LIST),
        ("remote.storage.enable", "true", _OF_THE_TOPIC, _BOOLEAN),
        limit("retention.bytes", original.retention_bytes if original else None),
        limit("retention.ms", original.retention_ms if original else None),
    )
