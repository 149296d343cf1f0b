"""Which topics and partitions a subscription is, found out from the bucket."""

from __future__ import annotations

import pytest

from tests.fakes.log_writer import TOPIC_ID
from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.model.partition import TopicPartition
from tieringd.spark.source.options import Subscription
from tieringd.spark.source.subscribed_topics import SubscriptionTopics

NEW_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


def names_of(archived):
    return sorted(str(one) for one in archived.manifests)


@pytest.fixture
def three_topics(archive):
    """Archive two partitions of one topic, and one each of two others."""
    archive.filled("orders", 0)
    archive.filled("orders", 1)
    archive.filled("orders.old", 0)
    archive.filled("audit", 0)


@pytest.mark.parametrize(
    ("subscription", "found"),
    [
        pytest.param(Subscription(topics=("orders", "audit")), "audit-0 orders-0 orders-1", id="names"),
        pytest.param(Subscription(pattern="orders.*"), "orders-0 orders-1 orders.old-0", id="pattern"),
        pytest.param(Subscription(pattern="nothing"), "", id="pattern of nothing"),
        pytest.param(
            Subscription(assigned=(TopicPartition("orders", 1), TopicPartition("audit", 0))),
            "audit-0 orders-1",
            id="partitions",
        ),
    ],
)
def test_subscription_is_found(bucket, three_topics, subscription, found):
    """A subscription by names, by a pattern or by partitions gives the partitions that exist."""
    assert names_of(SubscriptionTopics(bucket, subscription).existing()) == found.split()


@pytest.mark.parametrize(
    ("subscription", "match"),
    [
        pytest.param(
            Subscription(topics=("orders", "ordrs")), "no topic named ordrs.*archive topics", id="name"
        ),
        pytest.param(
            Subscription(topics=("orders",), cluster="other"), "orders of cluster other", id="cluster"
        ),
        pytest.param(
            Subscription(assigned=(TopicPartition("orders", 2),)),
            "nothing of orders-2. Archived partitions: none",
            id="partition",
        ),
    ],
)
def test_what_is_named_has_to_be_there(bucket, three_topics, subscription, match):
    """A misspelled name is an error, and not an empty table."""
    with pytest.raises(ObjectNotFound, match=match):
        SubscriptionTopics(bucket, subscription).existing()


def test_pattern_of_nothing_is_told(bucket, three_topics, warnings):
    """The pattern may be meant for topics to come, so it is only a warning."""
    SubscriptionTopics(bucket, Subscription(pattern="nothing")).existing()
    assert warnings.of("no archived topic has such a name") == [{"subscribePattern": "nothing"}]


def test_partition_without_segments_is_known(archive, bucket):
    """A topic counts its partitions, and nothing of the first one has been archived."""
    archive.filled("orders", 2)
    archived = SubscriptionTopics(bucket, Subscription(topics=("orders",))).existing()
    assert names_of(archived) == ["orders-2"]
    assert archived.unarchived == {TopicPartition("orders", 0), TopicPartition("orders", 1)}


def test_latest_incarnation_is_read(archive, bucket):
    """A topic that was created again has another id; what its name leads to is the new one."""
    archive.filled("orders")
    archived = SubscriptionTopics(bucket, Subscription(topics=("orders",)))
    assert archived.existing().topic_ids == {"orders": TOPIC_ID}

    writer = archive.writer("orders", topic_id=NEW_ID)
    writer.closed_segment()
    archive.add(writer, now_ms=2 * 10**12)
    assert archived.current().topic_ids == {"orders": NEW_ID}


def test_second_read_sees_what_has_changed(archive, bucket):
    """Nothing that was there before is lost."""
    first, second = archive.filled("orders", 0), archive.filled("orders", 1)
    topics = SubscriptionTopics(bucket, Subscription(topics=("orders",)))
    before = topics.existing()
    first.closed_segment()
    archive.add(first)
    third = archive.filled("orders", 2)
    after = topics.current()

    ends = {name: manifest.next_offset for name, manifest in after.manifests.items()}
    assert ends == {writer.name: writer.next_offset for writer in (first, second, third)}
    assert before.manifests[first.name].next_offset < first.next_offset


def test_clusters_that_share_a_bucket_are_told_apart(archive, bucket):
    """The same name in two clusters is two topics, and the user has to say which one is meant."""
    archive.filled("orders")
    archive.filled("orders", topic_id=NEW_ID, cluster="other")
    with pytest.raises(
        ConfigError, match="option cluster: topic orders is archived from the clusters cluster"
    ):
        SubscriptionTopics(bucket, Subscription(topics=("orders",))).existing()

    found = SubscriptionTopics(bucket, Subscription(topics=("orders",), cluster="other")).existing()
    assert found.topic_ids == {"orders": NEW_ID}


def test_partitions_without_a_manifest_are_told(archive, bucket, warnings):
    """Their manifests may be lost, and nothing of them is read. Only partitions of the subscription count."""
    writers = [archive.filled("orders", number) for number in range(3)]
    topics = SubscriptionTopics(bucket, Subscription(topics=("orders",)))
    topics.existing()
    assert warnings.events() == []
    for writer in writers[1:]:
        archive.forget(writer)

    topics.existing()
    SubscriptionTopics(bucket, Subscription(assigned=(writers[0].name,))).existing()

    assert warnings.of("partitions have no manifest: it is lost, or was not stored yet") == [
        {"partitions": "orders-1, orders-2"}
    ]


def test_topic_that_was_moved_is_told(archive, bucket, warnings):
    """Records archived since are in another bucket."""
    writer = archive.filled("orders")
    archive.move(writer, "s3://other")
    topics = SubscriptionTopics(bucket, Subscription(topics=("orders",)))
    topics.existing()
    topics.current()
    assert warnings.of("the archive of this topic goes on in another bucket") == [
        {"topic": "orders", "bucket": "s3://other"}
    ]
