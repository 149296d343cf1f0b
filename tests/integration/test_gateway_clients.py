"""Unmodified clients of a real broker do through the gateway what they do directly."""

# Long: clients of five languages, some in processes of their own.

from __future__ import annotations

import asyncio
import time

import confluent_kafka
import confluent_kafka.admin
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.support.gateway_clients import read_aiokafka, read_librdkafka, records_in, run_tool

VALUES = [b"%05d" % number + b"v" * 500 for number in range(3000)]


@pytest.fixture
async def gateway(behind):
    """Give a gateway that passes everything."""
    async with behind.gateway() as server:
        yield server
        assert server.counters.broken_connections == 0
    assert server.open_connections == 0
    assert server.buffered_bytes == 0


async def test_producers_and_consumers_see_one_log(behind, gateway):
    """Records written through the gateway are read directly and through it, by both libraries, in order."""
    await behind.cluster.create_topic("plain")
    async with AIOKafkaProducer(bootstrap_servers=behind.bootstrap, linger_ms=5) as producer:
        for value in VALUES[:1500]:
            await producer.send("plain", value, partition=0)
    rdkafka = confluent_kafka.Producer({"bootstrap.servers": behind.bootstrap, "linger.ms": 5})
    for value in VALUES[1500:]:
        rdkafka.produce("plain", value, partition=0)
    assert await asyncio.to_thread(rdkafka.flush, 180) == 0
    expected = list(enumerate(VALUES))
    for bootstrap in (behind.cluster.bootstrap, behind.bootstrap):
        assert await read_aiokafka(bootstrap, "plain", len(VALUES)) == expected
        assert await asyncio.to_thread(read_librdkafka, bootstrap, "plain", len(VALUES)) == expected


async def test_producer_without_acknowledgements_keeps_the_order_of_answers(behind, gateway):
    """Requests without an answer stand between requests with one, on the same connection."""
    await behind.cluster.create_topic("unacknowledged")
    async with AIOKafkaProducer(bootstrap_servers=behind.bootstrap, acks=0) as producer:
        for value in VALUES[:200]:
            await producer.send_and_wait("unacknowledged", value, partition=0)
            if value.startswith(b"0000"):
                await producer.client.force_metadata_update()
    read = await read_aiokafka(behind.bootstrap, "unacknowledged", 200)
    assert [value for _, value in read] == VALUES[:200]


async def test_committed_reader_sees_only_committed_transactions(behind, gateway):
    """Transactions are made, aborted and filtered through the gateway as directly."""
    await behind.cluster.create_topic("transactions")
    async with AIOKafkaProducer(bootstrap_servers=behind.bootstrap, transactional_id="through") as producer:
        for number in range(6):
            await producer.begin_transaction()
            await producer.send_and_wait("transactions", b"%d" % number, partition=0)
            if number % 2:
                await producer.abort_transaction()
            else:
                await producer.commit_transaction()
    committed = [(0, b"0"), (4, b"2"), (8, b"4")]
    for bootstrap in (behind.cluster.bootstrap, behind.bootstrap):
        read = await read_aiokafka(bootstrap, "transactions", 3, isolation_level="read_committed")
        assert read == committed
        read = await asyncio.to_thread(
            read_librdkafka, bootstrap, "transactions", 3, **{"isolation.level": "read_committed"}
        )
        assert read == committed


# Long: members wait for heartbeats to be told of a rebalance.
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_group_is_rebalanced_when_a_member_joins_and_leaves(behind, gateway, protocol):
    """Both group protocols assign, move and commit partitions through the gateway."""
    topic = f"group-{protocol}"
    await behind.cluster.create_topic(topic, partitions=4)

    def member():
        settings = {"bootstrap.servers": behind.bootstrap, "group.id": topic, "group.protocol": protocol}
        consumer = confluent_kafka.Consumer(
            {**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        )
        consumer.subscribe([topic])
        return consumer

    def rebalance():
        one, other = member(), member()
        for _ in range(1800):
            one.poll(0.05)
            other.poll(0.05)
            shares = sorted((len(one.assignment()), len(other.assignment())))
            if shares == [2, 2]:
                break
        other.close()
        for _ in range(1800):
            one.poll(0.05)
            if len(one.assignment()) == 4:
                break
        alone = len(one.assignment())
        one.commit(offsets=[confluent_kafka.TopicPartition(topic, 1, 17)], asynchronous=False)
        (committed,) = one.committed([confluent_kafka.TopicPartition(topic, 1)], timeout=120)
        one.close()
        return shares, alone, committed.offset

    assert await asyncio.to_thread(rebalance) == ([2, 2], 4, 17)


async def test_admin_clients_do_the_same(behind, gateway):
    """Topics are made, described and deleted, and groups are listed."""
    admin = AIOKafkaAdminClient(bootstrap_servers=behind.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic("made", 2, 1)])
    rdkafka = confluent_kafka.admin.AdminClient({"bootstrap.servers": behind.bootstrap})

    def until_described():
        # The controller answers before the broker has heard of it.
        for _ in range(1800):
            described = rdkafka.list_topics(timeout=120)
            if "made" in described.topics and len(described.topics["made"].partitions) == 2:
                return described
            time.sleep(0.05)
        raise AssertionError("the topic is not there")

    described = await asyncio.to_thread(until_described)
    # The broker's only address is that of the gateway.
    assert {(each.host, each.port) for each in described.brokers.values()} == {("127.0.0.1", behind.port)}
    assert (await admin.describe_topics(["made"]))[0]["topic"] == "made"
    await admin.delete_topics(["made"])
    await admin.close()
    group = rdkafka.list_consumer_groups(request_timeout=120)
    assert not await asyncio.to_thread(lambda: group.result(120).errors)


async def test_kafkas_own_tools_do_the_same(behind, gateway):
    """The console consumer reads every record, and the groups tool deletes the offset that it committed."""
    await behind.cluster.create_topic("tools")
    values = [b"%05d" % number + b"v" * 1000 for number in range(5000)]
    await behind.cluster.produce("tools", values)
    read = await run_tool(
        behind,
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", behind.bootstrap, "--topic", "tools", "--group", "tools", "--from-beginning"),
        *("--max-messages", str(len(values)), "--timeout-ms", "180000"),
    )
    assert records_in(read) == values
    deleted = await run_tool(
        behind,
        "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
        *("--bootstrap-server", behind.bootstrap, "--group", "tools", "--topic", "tools", "--delete-offsets"),
    )
    assert "Successful" in deleted


async def test_broker_that_restarts_is_a_disconnect(behind, gateway):
    """Clients come back by themselves, as they do when they are connected to the broker itself."""
    await behind.cluster.create_topic("restarts")
    async with AIOKafkaProducer(bootstrap_servers=behind.bootstrap) as producer:
        await producer.send_and_wait("restarts", b"before", partition=0)
        await behind.cluster.restart()
        await producer.send_and_wait("restarts", b"after", partition=0)
    read = await read_aiokafka(behind.bootstrap, "restarts", 2)
    assert [value for _, value in read] == [b"before", b"after"]
    gateway.counters.broken_connections = 0  # Attempts while the broker was away.
