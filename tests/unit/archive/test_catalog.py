"""What a bucket holds, found out from the bucket alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in, archived
from tests.fakes.deleted_topics import OLD, DeletedTopics
from tests.fakes.log_writer import LogWriter
from tieringd.errors import ConfigError, CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import TopicKey, manifest_key, spillover_prefix, topic_manifest_key
from tieringd.model.topic_lifecycle import Lifecycle

_OTHER_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


def key_of(writer: LogWriter) -> TopicKey:
    each = writer.identified
    return TopicKey(each.cluster, each.topic, each.topic_id)


async def archive_of(writer: LogWriter, archive, *, partitions: int = 1):
    """Archive a segment of *writer*'s partition, and count its topic's partitions."""
    writer.closed_segment()
    await archive.manifests.ensure_topic(key_of(writer), partition_count=partitions)
    return await archived(writer, archive)


async def test_empty_bucket_has_no_topics(archive):
    """Nothing is found in a bucket that holds nothing."""
    assert [each async for each in archive.catalog.topics()] == []


async def test_topics_come_by_cluster_and_name(archive, tmp_path):
    """Every topic is listed, in the order of the keys."""
    for name in ("orders", "audit", "payments"):
        await archive_of(LogWriter(tmp_path, name), archive)

    assert [each.key.topic async for each in archive.catalog.topics()] == ["audit", "orders", "payments"]


async def test_topics_that_are_not_wanted_are_not_loaded(archive, store, tmp_path):
    """A damaged topic manifest does not affect other topics."""
    for name in ("orders", "audit"):
        await archive_of(LogWriter(tmp_path, name), archive)
    (audit,) = [each.key async for each in archive.catalog.topics(lambda key: key.topic == "audit")]
    store.add(topic_manifest_key(audit), b"damaged")

    assert [each.key.topic async for each in archive.catalog.topics(lambda key: key.topic == "orders")] == [
        "orders"
    ]
    with pytest.raises(CorruptDataError):
        [each async for each in archive.catalog.topics()]


async def test_listing_takes_all_pages(archive, store, tmp_path):
    """More topics than one page holds are all found."""
    for number in range(5):
        await archive_of(LogWriter(tmp_path, f"topic{number}"), archive)
    list_page = store.list_page

    async def small_page(prefix, *, start_after=None, limit=1000):
        return await list_page(prefix, start_after=start_after, limit=2)

    store.list_page = small_page

    assert len([each async for each in archive.catalog.topics()]) == 5


async def test_other_objects_are_passed_over(archive, store, writer):
    """Objects among the topic manifests that are none are left alone."""
    await archive_of(writer, archive)
    store.add("meta/cluster/topics/notes.txt", b"")

    assert [each.key.topic async for each in archive.catalog.topics()] == ["orders"]


async def test_topic_comes_with_the_partitions_that_are_archived(archive, tmp_path):
    """A partition that was counted and has no manifest yet is not among them."""
    first = await archive_of(LogWriter(tmp_path, "orders", 0), archive, partitions=3)
    third = await archive_of(LogWriter(tmp_path, "orders", 2), archive, partitions=3)

    found = await archive.catalog.topic("orders")

    assert found.topic.partition_count == 3
    assert found.partitions == (first, third)
    assert [one.partition for one in found.without_manifest] == [1]
    purged = replace(found.topic, lifecycle=Lifecycle.PURGED)
    assert replace(found, topic=purged, partitions=()).without_manifest == ()


async def test_of_several_incarnations_the_latest_counts(archive, tmp_path, clock):
    """A topic that was created again shares nothing with its old self."""
    (tmp_path / "new").mkdir()
    new = LogWriter(tmp_path / "new", "orders", topic_id=_OTHER_ID)
    old = LogWriter(tmp_path, "orders")
    await archive_of(old, archive)
    clock.now_ms += 1
    manifest = await archive_of(new, archive)

    found = await archive.catalog.topic("orders")

    assert found.topic.key.topic_id == _OTHER_ID
    assert found.partitions == (manifest,)


async def test_name_in_several_clusters_is_chosen_by_the_cluster(archive, writer, clock):
    """A name that two clusters have is refused without a cluster, whichever created its topic last."""
    manifest = await archive_of(writer, archive)
    ours = key_of(writer)
    theirs = TopicKey("another-cluster", "orders", _OTHER_ID)
    clock.now_ms += 1
    await archive.manifests.ensure_topic(theirs, partition_count=1)

    assert (await archive.catalog.topic("orders", cluster=ours.cluster)).topic.key == ours
    assert (await archive.catalog.topic("orders", cluster=theirs.cluster)).topic.key == theirs
    assert await archive.catalog.partition("orders", 0, cluster=ours.cluster) == manifest
    assert await archive.catalog.partition("orders", 0, own_cluster=ours.cluster) == manifest
    found = await archive.catalog.topic("orders", cluster=theirs.cluster, own_cluster=ours.cluster)
    assert found.topic.key == theirs
    says = (
        rf"another-cluster, {ours.cluster}.*--from-cluster another-cluster or --from-cluster {ours.cluster}"
    )
    for found in (
        archive.catalog.topic("orders"),
        archive.catalog.partition("orders", 0),
        archive.catalog.topic("orders", own_cluster="third"),
    ):
        with pytest.raises(ConfigError, match=says):
            await found
    with pytest.raises(ObjectNotFound, match="no topic named orders of cluster third"):
        await archive.catalog.topic("orders", cluster="third")


async def test_purged_topic_leaves_its_name_to_another_cluster(archive, writer, clock):
    """A purged topic of another cluster makes no name ambiguous."""
    await archive_of(writer, archive)
    clock.now_ms += 1
    theirs = TopicKey("another-cluster", "orders", _OTHER_ID)
    await archive.manifests.ensure_topic(theirs, partition_count=1)
    await archive.manifests.change_topic(theirs, lambda one: replace(one, lifecycle=Lifecycle.PURGED))

    assert (await archive.catalog.topic("orders")).topic.key == key_of(writer)


async def test_unknown_topic_is_told_with_what_to_do(archive):
    """A name that the bucket does not hold is an error that says how to find those it does."""
    with pytest.raises(ObjectNotFound, match=r"no topic named orders.*archive topics"):
        await archive.catalog.topic("orders")


async def test_partition_is_found_by_name_and_number(archive, tmp_path):
    """One partition's manifest, and for a wrong number those that there are."""
    await archive_of(LogWriter(tmp_path, "orders", 0), archive, partitions=2)
    second = await archive_of(LogWriter(tmp_path, "orders", 1), archive, partitions=2)

    assert await archive.catalog.partition("orders", 1) == second
    with pytest.raises(ObjectNotFound, match="partitions archived: 0, 1"):
        await archive.catalog.partition("orders", 7)


async def test_topic_without_any_archived_partition_says_so(archive, writer):
    """A topic may be known before anything of it is stored."""
    await archive.manifests.ensure_topic(key_of(writer), partition_count=1)

    with pytest.raises(ObjectNotFound, match="partitions archived: none"):
        await archive.catalog.partition("orders", 0)


async def test_topic_that_was_only_seen_is_not_in_the_archive(archive, writer):
    """The manifest of a seen topic tells daemons how the topic began. None of its records is stored."""
    await archive.manifests.ensure_topic(key_of(writer), partition_count=0)

    assert [topic async for topic in archive.catalog.topics()] == []
    with pytest.raises(ObjectNotFound, match="no topic named orders"):
        await archive.catalog.topic("orders")


@pytest.mark.parametrize(("damaged", "other"), [(0, 1), (1, 0)])
async def test_partition_that_cannot_be_read_is_left_out_where_a_caller_takes_it(tmp_path, damaged, other):
    """A damaged manifest or spilled part costs its partition, or its topic without such a caller."""
    world = DeletedTopics(tmp_path)
    await world.fill()
    partition = world.writers[damaged].identified
    # Only the first partition has a spilled part.
    prefix = spillover_prefix(partition) if damaged == 0 else manifest_key(partition)
    (key,) = (key for key in world.store.objects if key.startswith(prefix))
    world.store.add(key, world.store.objects[key][0][:-20])
    catalog, faults = archive_in(world.store).catalog, {}

    (found,) = [
        one
        async for one in catalog.archived_topics(
            lambda topic: topic == OLD, with_history=True, on_partition_fault=faults.__setitem__
        )
    ]

    assert [one.partition for one in found.partitions] == [world.writers[other].identified]
    assert list(faults) == [partition]
    topics = {}
    left = [
        one
        async for one in catalog.archived_topics(
            lambda topic: topic == OLD, with_history=True, on_fault=topics.__setitem__
        )
    ]
    assert (left, list(topics)) == ([], [OLD])
