"""Three brokers with a gateway each: readers follow the leaders from gateway to gateway, and miss nothing."""

# Long: three brokers, leaders that move, and a broker that restarts.

from __future__ import annotations

import asyncio

import confluent_kafka
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS
from tests.support.cluster import CLUSTER_PROPERTIES, DaemonsBeside, cluster_admin, restart_broker
from tests.support.gateways import LISTENER
from tests.support.kafka import KafkaCluster, Listener
from tests.support.ports import free_ports

_VALUES = [bytes([number]) * 100_000 for number in range(45)]
_WHOLE = list(enumerate(_VALUES))


@pytest_asyncio.fixture
async def tiered(tmp_path, seaweedfs, prefix, topic):
    """Give three brokers, whose second listeners advertise gateways, and a daemon with one beside each."""
    ports = tuple(free_ports(3))
    cluster = await KafkaCluster.start(
        tmp_path / "brokers",
        brokers=3,
        heap_mib=384,
        properties=CLUSTER_PROPERTIES,
        listeners=[Listener(LISTENER, advertised_ports=ports)],
    )
    try:
        topics = {topic: {"remote.storage.enable": True, "local.retention.bytes": 1 << 20}}
        with DaemonsBeside(
            cluster, seaweedfs, tmp_path, bucket=BUCKET, prefix=prefix, changes={"topics": topics}
        ) as daemons:
            for node, port in zip(cluster.brokers, ports, strict=True):
                gateway = {
                    "enabled": True,
                    "host": "127.0.0.1",
                    "port": port,
                    "broker": f"127.0.0.1:{node.listener_ports[LISTENER]}",
                }
                daemons.change(node.node_id, gateway=gateway)
            daemons.launch()
            yield cluster, daemons, ",".join(f"127.0.0.1:{port}" for port in ports)
    finally:
        await cluster.kill()


# Long: leaders move, a broker restarts, a daemon is killed.
async def test_readers_follow_the_leader_through_the_gateways(tiered, topic):
    """Moves, a broker that restarts and a daemon that is killed: each offset comes once and in order."""
    cluster, daemons, bootstrap = tiered
    await cluster.create_topic(topic, replicas=[[1, 2, 3]], configs=SEGMENTS)
    await cluster.produce(topic, _VALUES, max_batch_size=200_000)
    daemons.until_one(lambda one: one.events("local log trimmed"), "the log is trimmed")
    partition = TopicPartition(topic, 0)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="none",
        max_partition_fetch_bytes=100_000,
        metadata_max_age_ms=1000,
    )
    rdkafka = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "none",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.message.max.bytes": 100_000,
            "queued.min.messages": 1,
        }
    )
    rdkafka.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    await consumer.start()
    seen: list[tuple[int, bytes]] = []
    seen_too: list[tuple[int, bytes]] = []

    async def read(count):
        async with asyncio.timeout(300):
            for _ in range(count):
                record = await consumer.getone()
                seen.append((record.offset, record.value))
            while len(seen_too) < len(seen):
                found = await asyncio.to_thread(rdkafka.poll, 0.5)
                if found is not None and found.error() is None:
                    seen_too.append((found.offset(), found.value()))
                elif found is not None:
                    assert found.error().retriable() or found.error().code() < 0, found.error()

    try:
        consumer.assign([partition])
        consumer.seek(partition, 0)
        await read(5)
        async with cluster_admin(cluster) as admin:
            for node_id in (2, 3):
                await admin.move_leader(topic, node_id)
                await read(5)
        await restart_broker(cluster, 3)
        await read(5)
        async with cluster_admin(cluster) as admin:
            await admin.until_in_sync(topic)
            await admin.move_leader(topic, 2)
            await read(5)
        daemons.kill(2)
        daemons.launch(2)
        await read(len(_VALUES) - len(seen))
    finally:
        await consumer.stop()
        rdkafka.close()
    assert seen == seen_too == _WHOLE
