"""A cluster that records are restored into, of which one broker knows a new topic before another one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tieringd.broker.kafka_protocol import KafkaSettings
from tieringd.broker.kafka_target import TargetCluster

UNKNOWN = 3
TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


class Leader:
    """The broker that creates topics, and knows them at once."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[str, int]] = {}

    async def topic_shape(self, name: str) -> tuple[str, int] | None:
        """Return id and number of partitions."""
        return self.shapes.get(name)

    async def close(self) -> None:
        """Nothing is open."""


class Follower:
    """The broker that is asked for settings. It learns of a topic only after a few requests."""

    def __init__(self, leader: Leader, *, late_by: int) -> None:
        self._leader, self._left = leader, late_by

    async def create_topics(self, topics: list[Any]) -> Any:
        """Create them on the leader."""
        for topic in topics:
            self._leader.shapes[topic.name] = (TOPIC_ID, topic.num_partitions)
        return SimpleNamespace(topic_errors=[(topic.name, 0, None) for topic in topics])

    async def describe_configs(self, resources: list[Any]) -> list[Any]:
        """Answer for the one topic."""
        (asked,) = resources
        if self._left:
            self._left -= 1
            return [SimpleNamespace(resources=[(UNKNOWN, "", 2, asked.name, [])])]
        return [SimpleNamespace(resources=[(0, None, 2, asked.name, [("retention.ms", "-1")])])]

    async def close(self) -> None:
        """Nothing is open."""


def cluster(*, late_by: int) -> TargetCluster:
    """Return a cluster of the two."""
    target: Any = TargetCluster(KafkaSettings(bootstrap=("127.0.0.1:1",)))
    target._broker = Leader()
    target._admin = Follower(target._broker, late_by=late_by)
    found: TargetCluster = target
    return found


async def test_topic_that_one_broker_does_not_know_yet_is_waited_for():
    """The recovery ended with UnknownTopicOrPartition, though the topic had been created."""
    made = await cluster(late_by=2).create("orders", partitions=3, replication_factor=1, settings={})
    assert (made.name, made.topic_id, made.partition_count) == ("orders", TOPIC_ID, 3)
    assert made.settings == {"retention.ms": "-1"}


async def test_topic_that_is_not_there_is_none():
    """No settings are asked for."""
    assert await cluster(late_by=0).topic("orders") is None
