"""Managed retention: taken over in an order that a crash cannot hurt, and given back as it was."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in
from tests.fakes.broker import FakeBroker, broker_unavailable
from tests.fakes.memory_store import MemoryStore
from tests.fakes.slow_store import SlowStore
from tests.fakes.topics import topic_config
from tests.fakes.virtual_loop import virtually
from tieringd.broker.base import EFFECT_WITHIN_SECONDS
from tieringd.errors import BrokerUnavailable, ObjectNotFound
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import OriginalRetention
from tieringd.topics.retention_manager import ORDER_WITHIN_SECONDS, RetentionManager, release
from tieringd.topics.topic_registry import TopicRegistry

ORDERS = TopicKey("cluster", "orders", "W1xNUlUlTfigw_K-dvdxsA")
NEW_ID = "AnotherIdAnotherIdAnoA"
"""The id of a topic that was created again under the same name."""


@pytest.fixture
def broker():
    broker = FakeBroker()
    broker.configs["orders"] = {"retention.ms": "86400000", "cleanup.policy": "delete"}
    broker.cluster_topics["orders"] = {ORDERS.topic_id}
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
    """The topic's own limits are in its manifest, and the broker deletes nothing by itself any more."""
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
    """Nothing is taken over if the broker has no limit."""
    before = dict(broker.configs["orders"])
    await manager.step(managed(retention_ms=None))
    assert broker.configs["orders"] == before


async def test_new_limit_on_the_broker_becomes_the_total_retention(manager, broker, registry):
    """A new limit of an operator is meant as the topic's retention, and is recorded."""
    await manager.step(managed())
    broker.configs["orders"]["retention.ms"] = "1000"
    await manager.step(managed(retention_ms=1000))
    assert registry.manifest(ORDERS).original_retention == OriginalRetention("1000", None, 1000, -1)
    assert broker.configs["orders"]["retention.ms"] == "-1"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"retention.bytes": "5"}, OriginalRetention("86400000", "5", 86_400_000, 5)),
        ({"retention.ms": "1000"}, OriginalRetention("1000", "7", 1000, 7)),
    ],
)
async def test_limit_of_one_kind_leaves_the_record_of_the_other(manager, broker, registry, changed, expected):
    """The broker's limit of the other kind is tieringd's own."""
    has_bytes = "retention.ms" in changed
    if has_bytes:
        broker.configs["orders"]["retention.bytes"] = "7"
    await manager.step(managed(retention_bytes=7 if has_bytes else None))
    broker.configs["orders"] |= changed
    ms, size = (broker.configs["orders"][f"retention.{kind}"] for kind in ("ms", "bytes"))
    await manager.step(managed(None if ms == "-1" else int(ms), None if size == "-1" else int(size)))
    assert registry.manifest(ORDERS).original_retention == expected


async def test_released_topic_is_not_taken_again(manager, broker, registry):
    """The broker keeps its limit after a release, though the configuration still asks for management."""
    await manager.step(managed())
    original = registry.manifest(ORDERS).original_retention
    await registry.change(
        ORDERS, lambda known: replace(known, retention_released=True, original_retention=None)
    )
    await release(broker, ORDERS, original)
    await manager.step(managed())
    assert broker.configs["orders"] == {"retention.ms": "86400000", "cleanup.policy": "delete"}


async def test_release_that_is_not_known_yet_is_respected(broker):
    """The manifest of before the release is what this daemon last read; the one in the bucket counts."""
    store = MemoryStore()
    registry, operator = (TopicRegistry(store, archive_in(store, writer_id=one).manifests) for one in "ab")
    manager = RetentionManager(broker, registry)
    await manager.step(managed())
    original = registry.manifest(ORDERS).original_retention
    await operator.change(ORDERS, lambda known: replace(known, retention_released=True))
    await release(broker, ORDERS, original)
    await operator.change(ORDERS, lambda known: replace(known, original_retention=None))
    assert not registry.manifest(ORDERS).retention_released
    await manager.step(managed())
    assert broker.configs["orders"] == {"retention.ms": "86400000", "cleanup.policy": "delete"}
    assert registry.manifest(ORDERS).original_retention is None


@pytest.mark.parametrize(
    "ids", [{NEW_ID}, {ORDERS.topic_id, NEW_ID}, set()], ids=["created again", "brokers differ", "gone"]
)
async def test_topic_that_was_created_again_after_the_scan_keeps_its_retention(
    manager, broker, registry, ids
):
    """The order goes by name, and would make the new topic's retention unlimited for good."""
    broker.cluster_topics["orders"] = ids
    before = dict(broker.configs["orders"])
    await manager.step(managed())
    assert broker.configs["orders"] == before

    again = TopicKey("cluster", "orders", NEW_ID)
    broker.cluster_topics["orders"] = {NEW_ID}
    await manager.step({again: managed()[ORDERS]})
    assert broker.configs["orders"]["retention.ms"] == "-1"
    assert registry.manifest(again).original_retention == OriginalRetention("86400000", None, 86_400_000, -1)


async def test_release_gives_nothing_to_a_topic_that_was_created_again(broker):
    """The retention of the old topic is not that of the new one."""
    broker.cluster_topics["orders"] = {NEW_ID}
    before = dict(broker.configs["orders"])
    with pytest.raises(ObjectNotFound, match=f"no topic orders with the id {ORDERS.topic_id}"):
        await release(broker, ORDERS, OriginalRetention("1000", None, 1000, -1))
    assert broker.configs["orders"] == before


@virtually
@pytest.mark.parametrize("is_release", [False, True])
async def test_retention_is_not_set_long_after_the_question_for_the_topics_id(is_release):
    """The topic may have been created again while this process was stopped."""

    class Stopped(FakeBroker):
        async def topic_ids(self, topics):
            found = await super().topic_ids(topics)
            await asyncio.sleep(EFFECT_WITHIN_SECONDS + 1)
            return found

    broker, store = Stopped(), MemoryStore()
    broker.configs["orders"] = {"retention.ms": "86400000"}
    broker.cluster_topics["orders"] = {ORDERS.topic_id}
    manager = RetentionManager(broker, TopicRegistry(store, archive_in(store).manifests))
    original = OriginalRetention("1000", None, 1000, -1)
    ordered = release(broker, ORDERS, original) if is_release else manager.step(managed())
    with pytest.raises(BrokerUnavailable, match="too long ago"):
        await ordered
    assert broker.configs["orders"] == {"retention.ms": "86400000"}


@virtually
async def test_release_asks_again_when_its_first_question_took_long():
    """The first question opens a connection to each broker, and so does each repeat of the command."""

    class Far(FakeBroker):
        async def topic_ids(self, topics):
            await asyncio.sleep(0.1 if self.calls["topic_ids"] else EFFECT_WITHIN_SECONDS + 1)
            return await super().topic_ids(topics)

    broker = Far()
    broker.configs["orders"] = {"retention.ms": "-1"}
    broker.cluster_topics["orders"] = {ORDERS.topic_id}
    await release(broker, ORDERS, OriginalRetention("1000", None, 1000, -1))
    assert broker.configs["orders"] == {"retention.ms": "1000"}


@pytest.mark.parametrize("is_known", [False, True])
async def test_daemon_that_was_stopped_does_not_bring_an_old_limit_back(broker, is_known):
    """The daemon that leads by now has recorded a longer one, and no round would correct the record."""
    store = MemoryStore()
    first, second, later = (TopicRegistry(store, archive_in(store, writer_id=one).manifests) for one in "abc")
    leader = RetentionManager(broker, second)
    if is_known:
        await leader.step(managed())
        await first.refresh("cluster")
        broker.configs["orders"]["retention.ms"] = "86400001"

    class Stopped(FakeBroker):
        """The broker as the first daemon sees it: that daemon is stopped while an answer is on its way."""

        async def topic_configs(self, topics):
            answer = {one: dict(found) for one, found in (await broker.topic_configs(topics)).items()}
            for retention_ms in (int(broker.configs["orders"]["retention.ms"]), 604_800_000):
                broker.configs["orders"]["retention.ms"] = str(retention_ms)
                await leader.step(managed(retention_ms))
            return answer

    stopped = Stopped()
    stopped.configs, stopped.cluster_topics = broker.configs, broker.cluster_topics
    manager = RetentionManager(stopped, first)
    await manager.step(managed(86_400_001 if is_known else 86_400_000))
    await later.refresh("cluster")
    found = later.manifest(ORDERS).original_retention
    assert (found.retention_ms, found.effective_ms) == ("604800000", 604_800_000)
    assert broker.configs["orders"]["retention.ms"] == "-1"


@pytest.mark.parametrize("corrected", [{"retention.ms": "604800000"}, {}, {"retention.bytes": "5"}])
async def test_limit_that_was_corrected_after_the_scan_counts(manager, broker, registry, corrected):
    """The scan has seen an hour, by mistake: that must not become the total retention for good."""
    scanned = managed(retention_ms=3_600_000)
    broker.configs["orders"] = dict(corrected)
    await manager.step(scanned)
    assert registry.manifest(ORDERS) is None
    assert broker.configs["orders"] == corrected


async def test_limit_that_changes_while_it_is_recorded_stays_for_the_next_round(broker):
    """The record has the limit of before, and the new one is not overwritten with no limit."""

    class Changing(MemoryStore):
        async def put(self, key, body, *, crc32c, condition=None):
            broker.configs["orders"]["retention.ms"] = "604800000"
            return await super().put(key, body, crc32c=crc32c, condition=condition)

    store = Changing()
    registry = TopicRegistry(store, archive_in(store).manifests)
    manager = RetentionManager(broker, registry)
    await manager.step(managed())
    assert broker.configs["orders"]["retention.ms"] == "604800000"
    await manager.step(managed(retention_ms=604_800_000))
    assert broker.configs["orders"]["retention.ms"] == "-1"
    found = registry.manifest(ORDERS).original_retention
    assert (found.retention_ms, found.effective_ms) == ("604800000", 604_800_000)


async def test_broker_that_refuses_is_asked_once(manager, broker):
    """The topic stays the broker's without the permission, and the broker is not asked again."""
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
    broker.cluster_topics["orders"] = {ORDERS.topic_id}
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
    """A refusal is remembered while the topic is managed here."""
    broker.denied.add("orders")
    with capture_logs() as lines:
        for topics in (managed(), managed(), {}, managed(), managed()):
            await manager.step(topics)
    assert [line["event"] for line in lines] == ["retention cannot be managed"] * 2
