"""KafkaBroker in a cluster of three: leaders, followers, and what the brokers delete by."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.bounds import bounds_of
from tieringd.broker.kafka import KafkaBroker, KafkaSettings
from tieringd.broker.log_dir import scan_log_dirs
from tieringd.errors import BrokerUnavailable
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.partition import LogBounds, Replica, TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.kafka import KafkaCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
_TOPIC_NUMBERS = count()

CLEAN = {"unclean.leader.election.enable": "false"}
"""A default of the broker that is told of every topic."""


@pytest.fixture
def cluster(brokers) -> KafkaCluster:
    """Give three brokers that keep records for a day, unless a topic says otherwise."""
    return brokers


@pytest_asyncio.fixture(loop_scope="module")
async def clients(cluster) -> AsyncIterator[dict[int, KafkaBroker]]:
    """Give a client beside each broker, by node id."""
    clients = {
        node.node_id: KafkaBroker(
            KafkaSettings((node.bootstrap,), node_id=node.node_id, request_timeout_seconds=60)
        )
        for node in cluster.brokers
    }
    yield clients
    for client in clients.values():
        await client.close()


@pytest.fixture
def topic() -> str:
    return f"topic-{next(_TOPIC_NUMBERS)}"


async def eventually(value, is_right, *, seconds: float = 180):
    """Return the awaited *value()* once *is_right* of it; brokers do not report when they are done."""
    deadline = time.monotonic() + seconds
    while not is_right(seen := await value()):
        assert time.monotonic() < deadline, f"the brokers stay at {seen}"
        await asyncio.sleep(0.05)
    return seen


async def directories(cluster: KafkaCluster, node_id: int, topic: str, number: int) -> list[LocalPartition]:
    """Return a node's directories of *topic*, once all *number* of them have their topic id."""

    async def found() -> list[LocalPartition]:
        scan = await asyncio.to_thread(scan_log_dirs, [str(cluster.log_dir(node_id))])
        return sorted(
            (one for one in scan.partitions if one.topic_partition.topic == topic),
            key=lambda one: one.topic_partition,
        )

    # A directory without partition.metadata yet has the zero id.
    return await eventually(
        found, lambda seen: len(seen) == number and not any(one.topic_id.startswith("AAAA") for one in seen)
    )


async def test_replicas_tell_leaders_from_followers(cluster, clients, topic):
    """Each broker leads its own and follows the others', under the same epochs, and counts them all."""
    await cluster.create_topic(topic, replicas=[[1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 3, 2]])
    for node_id, broker in clients.items():
        found = await directories(cluster, node_id, topic, 4)
        view = await broker.replicas(found)
        leaders = {0: 1, 1: 2, 2: 3, 3: 1}
        assert view.replicas == {
            TopicPartition(topic, number): Replica(0, is_leader=leader == node_id)
            for number, leader in leaders.items()
        }
        assert view.partition_counts == {topic: 4}


async def test_partition_count_is_that_of_the_cluster_and_not_of_the_disk(cluster, clients, topic):
    """A broker that holds some of a topic's partitions knows of the others."""
    await cluster.create_topic(topic, replicas=[[1, 2], [2, 3], [3, 1], [2, 1], [3, 2]])
    held = {
        1: {0: True, 2: False, 3: False},
        2: {0: False, 1: True, 3: True, 4: False},
        3: {1: False, 2: True, 4: True},
    }
    for node_id, expected in held.items():
        found = await directories(cluster, node_id, topic, len(expected))
        view = await clients[node_id].replicas(found)
        assert view.replicas == {
            TopicPartition(topic, number): Replica(0, is_leader=is_leader)
            for number, is_leader in expected.items()
        }
        assert view.partition_counts == {topic: 5}


async def test_directory_that_is_no_replica_any_more_is_left_out(cluster, clients, topic):
    """A partition on another broker is not this one's, though its directory may still lie here."""
    await cluster.create_topic(topic, replicas=[[2], [1]])
    (elsewhere,) = await directories(cluster, 2, topic, 1)
    (here,) = await directories(cluster, 1, topic, 1)
    view = await clients[1].replicas([elsewhere, here])
    assert view.replicas == {TopicPartition(topic, 1): Replica(0, is_leader=True)}
    assert view.partition_counts == {topic: 2}


async def test_bounds_are_the_leader_s_to_tell(cluster, clients, topic):
    """A follower is refused, by partition, and the leader answers for its own."""
    await cluster.create_topic(topic, replicas=[[1, 2, 3], [2, 3, 1]])
    for number in (0, 1):
        await cluster.produce(topic, [b"a", b"b", b"c"], partition=number, acks="all")
    logs = [LocalLog(one, (), ()) for one in await directories(cluster, 1, topic, 2)]
    bounds = await eventually(
        lambda: bounds_of(clients[1], *logs),
        lambda seen: seen[TopicPartition(topic, 0)] == LogBounds(0, 3, 3),
    )
    refused = bounds[TopicPartition(topic, 1)]
    assert isinstance(refused, BrokerUnavailable)
    assert "NOT_LEADER_OR_FOLLOWER" in str(refused)


async def test_retention_in_force_is_the_broker_s_default_where_a_topic_has_none(cluster, clients, topic):
    """How a topic is deleted from is known in any case, and only what is set on it is its own."""
    await cluster.create_topic(topic, replicas=[[1, 2, 3]])
    await cluster.create_topic(
        f"{topic}-own", replicas=[[1, 2, 3]], configs={"retention.ms": "5000000", "retention.bytes": "7000"}
    )
    for broker in clients.values():
        configs = await broker.topic_configs([topic, f"{topic}-own"])
        assert configs == {
            topic: {"retention.ms": "86400000", "retention.bytes": "-1", "cleanup.policy": "delete", **CLEAN},
            f"{topic}-own": {
                "retention.ms": "5000000",
                "retention.bytes": "7000",
                "cleanup.policy": "delete",
                **CLEAN,
            },
        }
        assert await broker.topic_overrides(topic) == {}
        assert await broker.topic_overrides(f"{topic}-own") == {
            "retention.ms": "5000000",
            "retention.bytes": "7000",
        }


# Long: a broker stops, starts and leads again.
async def test_follower_takes_over_under_a_higher_epoch_and_gives_back(cluster, clients, topic):
    """A follower becomes leader under a higher epoch when the leader dies. The returned broker follows."""
    await cluster.create_topic(topic, replicas=[[2, 1, 3]])
    await cluster.produce(topic, [b"a", b"b"], acks="all")
    name = TopicPartition(topic, 0)
    found = {node_id: await directories(cluster, node_id, topic, 1) for node_id in (1, 2, 3)}

    async def seen_by(node_id: int) -> Replica:
        return (await clients[node_id].replicas(found[node_id])).replicas[name]

    assert await seen_by(1) == Replica(0, is_leader=False)
    await cluster.brokers[1].kill()
    try:
        taken = await eventually(lambda: seen_by(1), lambda seen: seen.is_leader)
        assert taken.leader_epoch > 0
        follower = await eventually(lambda: seen_by(3), lambda seen: seen.leader_epoch == taken.leader_epoch)
        assert not follower.is_leader
        log = LocalLog(found[1][0], (), ())
        bounds = await eventually(
            lambda: bounds_of(clients[1], log), lambda seen: isinstance(seen[name], LogBounds)
        )
        assert bounds[name] == LogBounds(0, 2, 2)
    finally:
        await cluster.launch()
    back = await eventually(lambda: seen_by(2), lambda seen: seen.leader_epoch >= taken.leader_epoch)
    assert not back.is_leader
