"""Log directories as real brokers report them, and the errors of brokers that do not."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.ports import free_ports
from tieringd.broker.kafka import KafkaBroker, KafkaSettings, log_dir_sizes
from tieringd.broker.kafka_protocol import KafkaConnections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.kafka import KafkaCluster
    from tieringd.model.local_log import LogDirSizes

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOPIC = "log.dirs-of_all"


@pytest.fixture
def cluster(guarded) -> KafkaCluster:
    """Give two brokers, with a SASL listener whose user "reader" has no rights."""
    return guarded


def told(found: Sequence[LogDirSizes]) -> dict[tuple[int, str, int], int]:
    """Return the sizes of the topic's replicas by broker, directory and partition."""
    return {
        (one.broker, one.path, each.topic_partition.partition): each.size_bytes
        for one in found
        for each in one.replicas
        if each.topic_partition.topic == TOPIC
    }


async def test_every_broker_tells_the_size_of_its_files(cluster):
    """The broker beside us is asked for the addresses, and each broker for its own directories."""
    await cluster.create_topic(TOPIC, replicas=[[1, 2], [2, 1]])
    await cluster.produce(TOPIC, [b"x" * 1000] * 20)
    (path,) = (cluster.log_dir(1) / f"{TOPIC}-0").glob("*.log")
    size_bytes = path.stat().st_size
    assert size_bytes > 20_000
    expected = {
        (1, str(cluster.log_dir(1)), 0): size_bytes,
        (1, str(cluster.log_dir(1)), 1): 0,
        (2, str(cluster.log_dir(2)), 0): size_bytes,
        (2, str(cluster.log_dir(2)), 1): 0,
    }
    broker = KafkaBroker(
        KafkaSettings((cluster.brokers[0].bootstrap,), node_id=1, request_timeout_seconds=60)
    )
    deadline = time.monotonic() + 180
    # A follower takes a moment to have what its leader has.
    while (found := told(await broker.log_dir_sizes())) != expected:
        assert time.monotonic() < deadline, f"the brokers stay at {found}"
        await asyncio.sleep(0.05)
    assert [one.error for one in await broker.log_dir_sizes()] == ["", ""]
    await broker.close()


async def test_broker_that_does_not_answer_is_an_error_beside_the_others(cluster):
    """A broker that is away hides none of the others."""
    connections = KafkaConnections(KafkaSettings((cluster.brokers[0].bootstrap,), request_timeout_seconds=60))
    addresses = {7: ("127.0.0.1", free_ports(1)[0]), 1: ("127.0.0.1", cluster.brokers[0].port)}
    found = await log_dir_sizes(connections, addresses)
    await connections.close()
    assert [(one.broker, one.path) for one in found] == [(1, str(cluster.log_dir(1))), (7, "")]
    assert found[0].error == ""
    assert "cannot be reached" in found[1].error


async def test_broker_that_refuses_says_so(cluster):
    """An error and not an empty disk is the answer without the ACL DESCRIBE on the cluster."""
    port = cluster.brokers[0].listener_ports["GUARDED"]
    settings = KafkaSettings(
        (f"127.0.0.1:{port}",),
        security_protocol="SASL_PLAINTEXT",
        sasl_username="reader",
        sasl_password="right",
        request_timeout_seconds=60,
    )
    broker = KafkaBroker(settings)
    found = await broker.log_dir_sizes()
    await broker.close()
    assert {(one.broker, one.path, one.error) for one in found} == {
        (number, "", "CLUSTER_AUTHORIZATION_FAILED") for number in (1, 2)
    }
