"""
What admin tools see: a topic's settings, as far as its manifest tells them, and what the bucket holds.

Nothing here can be changed, and no setting has an effect on this endpoint: it deletes nothing. The
retention is what the topic had before tieringd managed it, where that is recorded.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kio.schema.errors import ErrorCode

from tieringd.endpoint.cluster import NO_DELAY
from tieringd.endpoint.keys import ApiKey
from tieringd.endpoint.settings import NODE_ID
from tieringd.errors import TieringError
from tieringd.formats.kafka_wire.messages import made, response_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tieringd.endpoint.partitions import ServedPartitions
    from tieringd.endpoint.settings import EndpointSettings
    from tieringd.endpoint.topics import ServedTopic, ServedTopics
    from tieringd.model.partition import TopicIdPartition

_TOPIC: Final = 2
_BROKER: Final = 4
_OF_THE_TOPIC: Final = 1
_DEFAULT: Final = 5
_BOOLEAN, _LONG, _LIST = 1, 5, 7
"""Kafka's types of settings."""
_UNLIMITED: Final = "-1"
_Setting: TypeAlias = tuple[str, str, int, int]
"""Name, value, source and type."""


class DescriptionAnswers:
    """DescribeConfigs and DescribeLogDirs."""

    def __init__(
        self, topics: ServedTopics, partitions: ServedPartitions, settings: EndpointSettings
    ) -> None:
        self._topics = topics
        self._partitions = partitions
        self._settings = settings

    async def configs(self, version: int, request: Any) -> Any:
        """Return the settings of topics; this node has none to show."""
        await self._topics.look()
        module: Any = response_module(ApiKey.DESCRIBE_CONFIGS, version)
        return made(
            module.DescribeConfigsResponse,
            throttle_time=NO_DELAY,
            results=tuple(self._resource(module, one) for one in request.resources),
        )

    async def log_dirs(self, version: int, request: Any) -> Any:
        """Return the bucket as the only log directory."""
        await self._topics.look()
        module: Any = response_module(ApiKey.DESCRIBE_LOG_DIRS, version)
        wanted: list[tuple[ServedTopic, Sequence[int]]] = []
        if request.topics is None:
            wanted = [(one, range(one.partition_count)) for one in self._topics.all()]
        else:
            for asked in request.topics:
                topic = self._topics.by_name(asked.topic)
                if topic is not None:
                    wanted.append((topic, asked.partitions))
        sizes = await self._sizes((topic, number) for topic, numbers in wanted for number in numbers)
        topics = tuple(
            module.DescribeLogDirsTopic(
                name=topic.name,
                partitions=tuple(
                    module.DescribeLogDirsPartition(
                        partition_index=number,
                        partition_size=sizes[topic.name, number],
                        offset_lag=0,
                        is_future_key=False,
                    )
                    for number in numbers
                    if (topic.name, number) in sizes
                ),
            )
            for topic, numbers in wanted
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
        """Return the bytes of those partitions whose manifests can be read in time."""
        sizes: dict[tuple[str, int], int] = {}

        async def look_at(partition: TopicIdPartition) -> None:
            with suppress(TieringError):
                sizes[partition.topic, partition.partition] = await self._partitions.size_bytes(partition)

        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.answer_timeout_seconds), asyncio.TaskGroup() as tasks:
                for topic, number in wanted:
                    partition = topic.partition(number)
                    if partition is not None:
                        tasks.create_task(look_at(partition))
        return sizes

    def _resource(self, module: Any, asked: Any) -> Any:
        error, message = ErrorCode.none, None
        settings: tuple[_Setting, ...] = ()
        topic = self._topics.by_name(asked.resource_name) if asked.resource_type == _TOPIC else None
        if topic is not None:
            settings = _settings_of(topic)
        elif asked.resource_type == _TOPIC:
            error, message = ErrorCode.unknown_topic_or_partition, "The archive has no such topic"
        elif asked.resource_type != _BROKER or asked.resource_name not in {"", str(NODE_ID)}:
            error, message = ErrorCode.invalid_request, "An archive has the settings of its topics only"
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
