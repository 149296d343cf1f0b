"""A trigger without new data: what did not change is neither loaded nor gone over again."""

from __future__ import annotations

import pytest

from tests.fakes.counted_calls import CountedCalls
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition, TopicPartition
from tieringd.spark.source.data_loss import LossRule
from tieringd.spark.source.data_source import TieringdDataSource
from tieringd.spark.source.options import Subscription
from tieringd.spark.source.schema import schema_of
from tieringd.spark.source.stream import StreamOffsets, goes_on_from
from tieringd.spark.source.subscribed_topics import SubscribedPartitions, SubscriptionTopics
from tieringd.storage.file import FileStore

PARTITIONS = 300


class CountedManifests(dict):
    """Manifests by partition; each time that one goes over all of them is counted."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()

    def keys(self):
        """Count the walk that a view stands for."""
        self.walks += 1
        return super().keys()

    def items(self):
        """Count the walk that a view stands for."""
        self.walks += 1
        return super().items()


def manifests(count):
    return CountedManifests(
        (
            TopicPartition("orders", number),
            PartitionManifest.begin(TopicIdPartition("c", "orders", "id", number), start_offset=0),
        )
        for number in range(count)
    )


def test_all_partitions_are_gone_over_a_few_times():
    """
    A trigger goes over all partitions at most three times.

    Once per partition took 24 s for 8,000 partitions.
    """
    found = manifests(PARTITIONS)
    start = StreamOffsets(dict.fromkeys(found, 0), {"orders": "id"})
    found.walks = 0
    goes_on_from(start, SubscribedPartitions(found), rule=LossRule())
    assert found.walks <= 3


def test_names_of_a_subscription_are_gathered_once():
    """Each topic of the bucket is compared with them."""
    subscription = Subscription(topics=("orders", "audit"))
    assert subscription.names is subscription.names


@pytest.fixture
def requests(monkeypatch):
    """Give the reads of this process's file stores: operation, arguments with the key, and options."""
    return CountedCalls.of(monkeypatch, FileStore, "get", "head").calls


def test_second_scan_of_an_unchanged_archive_is_the_first_one(archive, bucket, requests):
    """A request for each partition tells that nothing was committed; nothing is loaded or built again."""
    archive.filled("orders", 0)
    archive.filled("orders", 3)
    topics = SubscriptionTopics(bucket, Subscription(topics=("orders",)))
    before = topics.current()
    requests.clear()

    assert topics.current() is before
    loaded = [key for name, (key,), _ in requests if name == "get" and key.endswith("/manifest")]
    assert len(loaded) == 2, "only what is not archived yet is asked for as a whole"
    assert len([name for name, _, _ in requests if name == "head"]) == 2

    archive.filled("orders", 1)
    after = topics.current()
    assert after is not before
    assert after.manifests[TopicPartition("orders", 0)] is before.manifests[TopicPartition("orders", 0)]


def test_trigger_without_new_data_reads_and_decodes_nothing(archive, requests, monkeypatch):
    """A trigger within `refreshInterval` sends no request and decodes nothing: it compares two documents."""
    for number in range(3):
        archive.filled("orders", number)
    options = {"path": archive.url, "subscribe": "orders", "startingOffsets": "earliest"}
    reader = TieringdDataSource(options).streamReader(schema_of(("offset",)))
    start, limit = reader.initialOffset(), reader.getDefaultReadLimit()
    end = reader.latestOffset(start, limit)
    assert reader.latestOffset(end, limit) == end
    report = reader.reportLatestOffset()
    requests.clear()
    decoded = []
    # Spark gives the stream plain documents, and the stream decodes them where no test can count.
    monkeypatch.setattr(StreamOffsets, "from_json", decoded.append)

    assert reader.latestOffset(dict(end), limit) == end
    assert reader.reportLatestOffset() is report
    assert (requests, decoded) == ([], [])
