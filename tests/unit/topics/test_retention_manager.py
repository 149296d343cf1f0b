"""Managed retention: taken over in an order that a crash cannot hurt, and given back as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in
from tests.fakes.broker import FakeBroker, broker_unavailable
from tests.fakes.memory_store import MemoryStore
from tests.fakes.slow_store import SlowStore
from tests.fakes.topics import topic_config
from tests.fakes.virtual_loop import virtually
from tieringd.errors import BrokerUnavailable
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import OriginalRetention
from tieringd.topics.retention_manager import ORDER_WITHIN_SECONDS, RetentionManager, release
from tieringd.topics.topic_registry import TopicRegistry

ORDERS = TopicKey("cluster", "orders", "W1xNUlUlTfigw_K-dvdxsA")


@pytest.fixture
def broker():
    broker = FakeBroker()
    broker.configs["orders"] = {"retention.ms": "86400000", "cleanup.policy": "delete"}
    return broker


@pytest.fixture
def registry():
    store = MemoryStore()
    return TopicRegistry(store, archive_in(store).manifests)


@pytest.fixture
def manager(broker, registry):
    return RetentionManager(broker, registry)


def managed(retention_ms: int | None = 86_400_000, retention_bytes: int | None = None):
    config = topic_config(
        broker_retention_ms=retention_ms, broker_retention_bytes=retention_bytes, managed_retention=True
    )
    return {ORDERS: config}


async def test_retention_is_recorded_and_then_unlimited(manager, broker, registry):
    """What was set on the topic is in its manifest, and the broker deletes nothing by itself any more."""
    await manager.step(managed())
    assert registry.manifest(ORDERS).original_retention == OriginalRetention("86400000", None, 86_400_000, -1)
    assert broker.configs["orders"] == {
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "cleanup.policy": "delete",
    }


async def test_record_comes_before_the_change(manager, broker, registry):
    """A daemon that dies in between has lost nothing: the record is there, and the next round goes on."""
    broker.fail_next("alter_topic", broker_unavailable("alter_topic"))
    with pytest.raises(BrokerUnavailable):
        await manager.step(managed())
    assert registry.manifest(ORDERS).original_retention == OriginalRetention("86400000", None, 86_400_000, -1)
    assert broker.configs["orders"]["retention.ms"] == "86400000"

    await manager.step(managed())
    assert broker.configs["orders"]["retention.ms"] == "-1"
    assert registry.manifest(ORDERS).original_retention == OriginalRetention("86400000", None, 86_400_000, -1)


async def test_unlimited_topic_is_left_alone(manager, broker):
    """Where the broker has no limit there is nothing to take over."""
    before = dict(broker.configs["orders"])
    await manager.step(managed(retention_ms=None))
    assert broker.configs["orders"] == before


async def test_new_limit_on_the_broker_becomes_the_total_retention(manager, broker, registry):
    """An operator who sets another limit means the topic's retention, and gets it recorded."""
    await manager.step(managed())
    broker.configs["orders"]["retention.ms"] = "1000"
    await manager.step(managed(retention_ms=1000))
    assert registry.manifest(ORDERS).original_retention == OriginalRetention("1000", None, 1000, -1)
    assert broker.configs["orders"]["retention.ms"] == "-1"


async def test_released_topic_is_not_taken_again(manager, broker, registry):
    """After a release the broker keeps its limit, though the configuration still asks for management."""
    await manager.step(managed())
    original = registry.manifest(ORDERS).original_retention
    await registry.change(
        ORDERS, lambda known: replace(known, retention_released=True, original_retention=None)
    )
    await release(broker, "orders", original)
    await manager.step(managed())
    assert broker.configs["orders"] == {"retention.ms": "86400000", "cleanup.policy": "delete"}


async def test_broker_that_refuses_is_asked_once(manager, broker):
    """Without the permission the topic stays the broker's, and the log says so once."""
    broker.denied.add("orders")
    await manager.step(managed())
    asked = []
    broker.alter_topic = lambda *_: asked.append(1)
    await manager.step(managed())
    assert asked == []


@virtually
async def test_retention_is_not_taken_over_long_after_it_was_recorded():
    """An operator may have released the topic while this process was stopped."""
    broker = FakeBroker()
    broker.configs["orders"] = {"retention.ms": "86400000"}
    store = SlowStore()
    registry = TopicRegistry(store, archive_in(store).manifests)
    manager = RetentionManager(broker, registry)
    store.seconds = ORDER_WITHIN_SECONDS + 1
    with pytest.raises(BrokerUnavailable):
        await manager.step(managed())
    assert broker.configs["orders"] == {"retention.ms": "86400000"}
    store.seconds = 0
    await manager.step(managed())
    assert broker.configs["orders"]["retention.ms"] == "-1"


async def test_refusals_of_topics_that_are_gone_are_forgotten(manager, broker):
    """What was refused is remembered while the topic is managed here."""
    broker.denied.add("orders")
    with capture_logs() as lines:
        for topics in (managed(), managed(), {}, managed(), managed()):
            await manager.step(topics)
    assert [line["event"] for line in lines] == ["retention cannot be managed"] * 2
