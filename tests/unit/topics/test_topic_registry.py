"""Topic manifests in the bucket: found by listing, read when they change, written by every daemon."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in
from tests.fakes.memory_store import MemoryStore
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import TopicKey, topic_manifest_key
from tieringd.formats.topic_manifest import Archiving
from tieringd.model.partition import TopicIdPartition
from tieringd.topics.each_topic import TopicFaults
from tieringd.topics.topic_registry import PATIENCE_SECONDS, TopicRegistry, partition_counts

ORDERS = TopicKey("cluster", "orders", "W1xNUlUlTfigw_K-dvdxsA")


class CountingStore(MemoryStore):
    """Counts what is read. Its listings leave out what is hidden."""

    def __init__(self):
        super().__init__()
        self.reads = []
        self.hidden = set()

    async def list_page(self, prefix, **options):
        page = await super().list_page(prefix, **options)
        return replace(page, objects=tuple(one for one in page.objects if one.key not in self.hidden))

    async def get(self, key):
        self.reads.append(key)
        return await super().get(key)


@pytest.fixture
def store():
    return CountingStore()


@pytest.fixture
def manifests(store):
    return archive_in(store).manifests


@pytest.fixture
def registry(store, manifests):
    return TopicRegistry(store, manifests)


def partition(number: int) -> TopicIdPartition:
    return TopicIdPartition(ORDERS.cluster, ORDERS.topic, ORDERS.topic_id, number)


async def test_topic_is_counted_by_its_highest_partition(registry, manifests):
    """The manifest is made with the first partition, grows with others, and never shrinks."""
    await registry.ensure(partition_counts([partition(0)]))
    await registry.ensure(partition_counts([partition(2), partition(1)]))
    await registry.ensure(partition_counts([partition(0)]))
    assert (await manifests.load_topic(ORDERS)).partition_count == 3


@pytest.mark.looptime
async def test_partition_is_new_that_no_manifest_counted_before(registry, manifests):
    """It is new once this registry has counted it, and stays so."""

    async def new() -> list[bool]:
        return [await registry.is_new(partition(number)) for number in range(4)]

    await manifests.ensure_topic(ORDERS, partition_count=2)
    await registry.refresh("cluster")
    assert await new() == [False, False, False, False]
    await registry.ensure(partition_counts([partition(2)]))
    assert await new() == [False, False, True, False]
    await registry.ensure(partition_counts([partition(3)]))
    assert await new() == [False, False, True, True]
    other = replace(partition(0), topic="payments")
    assert not await registry.is_new(other)
    await registry.ensure(partition_counts([other]))
    await registry.refresh("cluster")
    assert await registry.is_new(other)
    assert await new() == [False, False, True, True]


@pytest.mark.looptime
async def test_manifest_of_a_topic_is_waited_for(registry):
    """A process that ended between the two would leave a partition that no restore finds."""
    await registry.refresh("cluster")
    asked = [asyncio.create_task(registry.is_new(partition(number))) for number in range(3)]
    other = asyncio.create_task(registry.is_new(replace(partition(0), topic="payments")))
    await asyncio.sleep(PATIENCE_SECONDS / 2)
    assert not any(task.done() for task in asked)
    await registry.ensure(partition_counts([partition(1)]))
    await asyncio.sleep(0.1)
    assert [task.done() for task in (*asked, other)] == [True, True, False, False]
    assert [await task for task in asked] == [True, True, False]
    assert not await other
    assert asyncio.get_running_loop().time() <= PATIENCE_SECONDS + 0.1


@pytest.mark.looptime
async def test_topic_whose_manifest_cannot_be_stored_holds_no_partition_back(registry, store):
    """Its partitions are archived all the same: an operator mends the topic's manifest."""
    await registry.refresh("cluster")
    asked = asyncio.create_task(registry.is_new(partition(0)))
    await asyncio.sleep(0.1)
    store.fail_next("put", lambda: StorageUnavailable("away"))
    with pytest.raises((StorageUnavailable, TopicFaults)):
        await registry.ensure(partition_counts([partition(0)]))
    assert not await asked
    assert not await registry.is_new(partition(0))
    assert asyncio.get_running_loop().time() < 1
    await registry.ensure(partition_counts([partition(0)]))
    assert await registry.is_new(partition(0))


async def test_manifest_is_read_when_it_changed_and_not_again(registry, manifests, store):
    """A listing is enough to see that nothing changed."""
    await manifests.ensure_topic(ORDERS, partition_count=1)
    await registry.refresh("cluster")
    store.reads.clear()
    await registry.refresh("cluster")
    assert store.reads == []

    await manifests.change_topic(ORDERS, lambda known: replace(known, archiving=Archiving.PAUSED))
    store.reads.clear()
    await registry.refresh("cluster")
    assert store.reads == [topic_manifest_key(ORDERS)]
    assert registry.is_paused(ORDERS)


async def test_topic_of_another_cluster_is_not_ours(registry, manifests):
    """Two clusters may share a bucket, and have topics of one name."""
    other = TopicKey("other", ORDERS.topic, ORDERS.topic_id)
    await manifests.change_topic(other, lambda known: replace(known, archiving=Archiving.PAUSED))
    await registry.refresh("cluster")
    assert not registry.is_paused(other)
    assert registry.manifest(other) is None


async def test_what_was_seen_last_stays_while_the_store_is_away(registry, manifests, store):
    """A paused topic stays paused while the store does not answer."""
    await manifests.change_topic(ORDERS, lambda known: replace(known, archiving=Archiving.PAUSED))
    await registry.refresh("cluster")
    store.fail_next("list_page", lambda: StorageUnavailable("away"))
    with pytest.raises(StorageUnavailable):
        await registry.refresh("cluster")
    assert registry.is_paused(ORDERS)


async def test_topic_whose_manifest_is_gone_is_forgotten(registry, manifests, store):
    """A topic that was purged from the bucket leaves nothing behind here."""
    await manifests.ensure_topic(ORDERS, partition_count=1)
    await registry.refresh("cluster")
    await store.delete_many([topic_manifest_key(ORDERS)])
    await registry.refresh("cluster")
    assert registry.manifest(ORDERS) is None


async def test_topic_that_a_listing_misses_stays_paused(registry, manifests, store):
    """A listing may be behind. Only a request for the manifest itself tells that it is gone."""
    await manifests.change_topic(ORDERS, lambda known: replace(known, archiving=Archiving.PAUSED))
    await registry.refresh("cluster")
    store.hidden = {topic_manifest_key(ORDERS)}
    assert not await registry.refresh("cluster")
    assert registry.is_paused(ORDERS)
    await store.delete_many([topic_manifest_key(ORDERS)])
    assert await registry.refresh("cluster")
    assert registry.manifest(ORDERS) is None


async def test_topics_of_the_cluster_before_are_forgotten(registry, manifests):
    """A broker may be formatted anew while the daemon runs. The other cluster's topics are still there."""
    await manifests.ensure_topic(ORDERS, partition_count=1)
    await registry.refresh("cluster")
    assert await registry.refresh("another")
    assert registry.manifests == ()


async def test_damaged_manifest_keeps_what_was_known(registry, manifests, store):
    """Bytes that are no topic manifest are reported, and change nothing."""
    await manifests.change_topic(ORDERS, lambda known: replace(known, archiving=Archiving.PAUSED))
    await registry.refresh("cluster")
    store.add(topic_manifest_key(ORDERS), b"{")
    await registry.refresh("cluster")
    assert registry.is_paused(ORDERS)


async def test_manifest_of_another_topic_is_named_once_and_changes_nothing(registry, manifests, store):
    """An object copied from another topic's manifest neither counts as that topic again nor as this one."""
    other = replace(ORDERS, topic="another")
    await manifests.change_topic(ORDERS, lambda known: replace(known, archiving=Archiving.PAUSED))
    await manifests.ensure_topic(other, partition_count=3)
    await registry.refresh("cluster")
    known = registry.manifests
    store.add(topic_manifest_key(ORDERS), store.objects[topic_manifest_key(other)][0])
    with capture_logs() as lines:
        for _ in range(3):
            await registry.refresh("cluster")
    assert [one["event"] for one in lines] == ["topic manifest is damaged"]
    assert registry.is_paused(ORDERS)
    assert registry.manifests == known


async def test_damaged_manifest_is_named_once(registry, manifests, store):
    """Each version is named once, also where another registry has named it; a mended one is read."""
    await manifests.ensure_topic(ORDERS, partition_count=3)
    key, other = topic_manifest_key(ORDERS), TopicRegistry(store, manifests)
    sound, _ = store.objects[key]
    store.add(key, b"{")
    with capture_logs() as lines:
        for _ in range(3):
            await registry.refresh("cluster")
        assert other.take(registry, "cluster", within_seconds=30)
        await other.refresh("cluster")
        assert [one["event"] for one in lines] == ["topic manifest is damaged"]
        store.add(key, b"{{")
        await registry.refresh("cluster")
    assert len(lines) == 2
    store.add(key, sound)
    await registry.refresh("cluster")
    assert registry.manifest(ORDERS).partition_count == 3


async def test_change_is_made_on_what_others_left(registry, manifests):
    """A change by another daemon in between is kept."""
    await registry.ensure(partition_counts([partition(0)]))
    await manifests.ensure_topic(ORDERS, partition_count=5)
    changed = await registry.change(ORDERS, lambda known: replace(known, archiving=Archiving.PAUSED))
    assert (changed.partition_count, changed.archiving) == (5, Archiving.PAUSED)


@pytest.mark.looptime
async def test_listing_of_another_registry_is_taken_while_it_is_young(store):
    """It is one of the same cluster, and began after this registry's own last change."""
    archive = archive_in(store)
    listed, own = (TopicRegistry(store, archive.manifests) for _ in range(2))
    assert not own.take(listed, "cluster", within_seconds=30), "nothing was listed yet"
    await listed.ensure({ORDERS: 2})
    await listed.refresh("cluster")
    assert own.take(listed, "cluster", within_seconds=30)
    assert own.is_known
    assert own.manifest(ORDERS) == listed.manifest(ORDERS) is not None
    assert not own.take(listed, "another", within_seconds=30)

    await asyncio.sleep(1)
    await own.change(ORDERS, lambda found: replace(found, archiving=Archiving.PAUSED))
    assert not own.take(listed, "cluster", within_seconds=30), "it would undo what is known of the change"
    assert own.is_paused(ORDERS)
    await asyncio.sleep(1)
    await listed.refresh("cluster")
    assert own.take(listed, "cluster", within_seconds=30)
    assert own.is_paused(ORDERS)
    await asyncio.sleep(31)
    assert not own.take(listed, "cluster", within_seconds=30)
