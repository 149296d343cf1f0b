"""Client quotas on a real Kafka broker: told, set, taken away, and what they do to a producer."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.fakes.archive import Clock
from tests.fakes.memory_store import MemoryStore
from tieringd.broker.kafka import KafkaBroker, KafkaSettings
from tieringd.errors import BrokerDenied, BrokerUnavailable
from tieringd.formats.object_keys import client_quotas_key
from tieringd.model.disk_state import EVERY_PRODUCER, PRODUCER_BYTE_RATE, quota_entity
from tieringd.space.producer_brake import ProducerBrake

ALICE = quota_entity(user="alice")
APP = quota_entity(user=None, client_id="app")
RATE = 20_000
VALUE = bytes(100_000)


@pytest.fixture
async def broker(kafka):
    """Give a client of the shared broker, and take away every quota afterwards."""
    broker = KafkaBroker(KafkaSettings((kafka.bootstrap,), request_timeout_seconds=60))
    yield broker
    left = await broker.client_quotas()
    await broker.alter_client_quotas({entity: dict.fromkeys(values) for entity, values in left.items()})
    await until_quotas(broker, {})
    await broker.close()


async def until_quotas(broker, expected, *, seconds=180) -> None:
    """Return when the broker tells these quotas: it learns of a change a moment after it was made."""
    deadline = time.monotonic() + seconds
    while (seen := await broker.client_quotas()) != expected:
        assert time.monotonic() < deadline, f"the broker stays at {seen}, not {expected}"
        await asyncio.sleep(0.05)


async def test_node_id_is_the_one_of_the_broker_beside_us(kafka, broker):
    """The broker's id is found by its address among bootstrap."""
    assert await broker.node_id() == kafka.broker.node_id


async def test_quotas_are_told_as_they_were_set(broker):
    """Defaults and names stay apart, and other kinds of quotas come with them."""
    assert await broker.client_quotas() == {}
    wanted = {
        ALICE: {PRODUCER_BYTE_RATE: 5e6, "consumer_byte_rate": 7e6},
        APP: {"request_percentage": 12.5},
        EVERY_PRODUCER: {PRODUCER_BYTE_RATE: 65_536.0},
        quota_entity(client_id=None): {PRODUCER_BYTE_RATE: 1.0},
    }
    await broker.alter_client_quotas(wanted)
    await until_quotas(broker, wanted)


async def test_change_leaves_all_other_quotas(broker):
    """One value of one entity is set or taken away, and what is not there can be taken away too."""
    await broker.alter_client_quotas({ALICE: {PRODUCER_BYTE_RATE: 5e6, "consumer_byte_rate": 7e6}})
    await broker.alter_client_quotas({ALICE: {PRODUCER_BYTE_RATE: 1e6}, APP: {PRODUCER_BYTE_RATE: None}})
    await until_quotas(broker, {ALICE: {PRODUCER_BYTE_RATE: 1e6, "consumer_byte_rate": 7e6}})
    await broker.alter_client_quotas({ALICE: {PRODUCER_BYTE_RATE: None}})
    await until_quotas(broker, {ALICE: {"consumer_byte_rate": 7e6}})


async def test_quota_that_kafka_does_not_take_is_an_error_that_names_whom_it_is_for(broker):
    """An answer without an error on the whole still has an error for each entity."""
    with pytest.raises(BrokerDenied, match=r"to set the quota of user alice: INVALID_REQUEST"):
        await broker.alter_client_quotas({ALICE: {"no_such_quota": 1.0}})
    assert await broker.client_quotas() == {}


# Long: a quota counts over ten seconds.
async def test_brake_slows_a_producer_down_and_lets_it_go(kafka, broker):
    """
    A producer that has had its burst waits while the brake is on, and not any more afterwards.

    The quota allows 20 kB a second over some ten seconds. These 500 kB are so many that the next record waits
    as long as Kafka lets it, which is ten seconds.
    """
    await kafka.create_topic("braked")
    await broker.alter_client_quotas({ALICE: {PRODUCER_BYTE_RATE: 5e6}})
    before = {ALICE: {PRODUCER_BYTE_RATE: 5e6}}
    await until_quotas(broker, before)
    store = MemoryStore()
    brake = ProducerBrake(store, broker, cluster=kafka.cluster_id, node_id=1, now_ms=Clock())
    await brake.hold_back(RATE)
    await until_quotas(
        broker, {ALICE: {PRODUCER_BYTE_RATE: float(RATE)}, EVERY_PRODUCER: {PRODUCER_BYTE_RATE: float(RATE)}}
    )
    async with kafka.producer() as producer:
        for value in (VALUE, VALUE, 3 * VALUE):
            await producer.send_and_wait("braked", value)
        held = asyncio.ensure_future(producer.send_and_wait("braked", VALUE))
        # Without the brake the broker answers in hundredths of a second.
        assert await asyncio.wait({held}, timeout=1) == (set(), {held})
        await held
        await brake.refresh((await store.head(client_quotas_key(kafka.cluster_id))).version)
        await brake.let_go()
        await until_quotas(broker, before)
    async with kafka.producer() as producer:
        async with asyncio.timeout(180):
            for _ in range(50):
                await producer.send_and_wait("braked", VALUE)


async def test_user_without_rights_is_told_which_ones_it_needs(guarded):
    """Reading and setting quotas are refused, and the error says what to grant."""
    broker = KafkaBroker(
        KafkaSettings(
            (f"127.0.0.1:{guarded.broker.listener_ports['GUARDED']}",),
            security_protocol="SASL_PLAINTEXT",
            sasl_username="reader",
            sasl_password="right",
            request_timeout_seconds=60,
        )
    )
    with pytest.raises(
        BrokerDenied, match=r"CLUSTER_AUTHORIZATION_FAILED.*DESCRIBE_CONFIGS and ALTER_CONFIGS"
    ):
        await broker.client_quotas()
    with pytest.raises(
        BrokerDenied, match=r"CLUSTER_AUTHORIZATION_FAILED.*DESCRIBE_CONFIGS and ALTER_CONFIGS"
    ):
        await broker.alter_client_quotas({ALICE: {PRODUCER_BYTE_RATE: 1.0}})
    await broker.close()


async def test_quotas_of_a_broker_that_is_away_are_unavailable():
    """The broker may come back, so nothing is decided by its absence."""
    broker = KafkaBroker(KafkaSettings(("127.0.0.1:1",), node_id=1))
    with pytest.raises(BrokerUnavailable):
        await broker.client_quotas()
    with pytest.raises(BrokerUnavailable):
        await broker.alter_client_quotas({ALICE: {PRODUCER_BYTE_RATE: 1.0}})
    await broker.close()
