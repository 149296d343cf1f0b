"""Offsets for positions, and the outcome if the archive does not have these offsets."""

from __future__ import annotations

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.counted_calls import CountedCalls
from tieringd.errors import ConfigError, DataLossError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition, TopicPartition
from tieringd.spark.source.data_loss import LossRule
from tieringd.spark.source.offset_finder import OffsetFinder, readable_range, require_order
from tieringd.spark.source.options import Subscription
from tieringd.spark.source.positions import AtOffsets, AtTime, AtTimes, Edge
from tieringd.spark.source.subscribed_topics import SubscribedPartitions, SubscriptionTopics
from tieringd.storage.file import FileStore

ORDERS = [TopicPartition("orders", number) for number in range(3)]
STRICT, LENIENT = LossRule(), LossRule(is_fatal=False)


@pytest.fixture
def finder(archive, bucket):
    """Give offsets 12 to 35 of one partition, 0 to 11 of a second, and a third without any."""
    writer = archive.filled("orders", 0)
    archive.expire(writer, 1)
    archive.filled("orders", 1, segments=1)
    archive.filled("orders", 3, segments=1)
    subscription = Subscription(assigned=tuple(ORDERS))
    return OffsetFinder(bucket, SubscriptionTopics(bucket, subscription).existing())


def starts(finder, position, on_no_match="error"):
    return list(finder.starts(position, on_no_match=on_no_match).values())


def test_edges_are_the_archive_s(finder):
    """The earliest offset is the first that retention left, and the latest is the end of the archive."""
    assert starts(finder, Edge.EARLIEST) == [12, 0, 0]
    assert list(finder.ends(Edge.LATEST).values()) == [36, 12, 0]


def test_offsets_are_taken_as_they_are(finder):
    """Given offsets are taken as they are. -2 and -1 are the two ends, as in Kafka."""
    given = dict(zip(ORDERS, (-2, 7, 0), strict=True))
    assert starts(finder, AtOffsets(given, "startingOffsets")) == [12, 7, 0]
    given = dict(zip(ORDERS, (30, -1, -1), strict=True))
    assert list(finder.ends(AtOffsets(given, "endingOffsets")).values()) == [30, 12, 0]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        pytest.param({ORDERS[0]: 1}, "startingOffsets: does not name orders-1, orders-2", id="missing"),
        pytest.param(
            dict.fromkeys([*ORDERS, TopicPartition("audit", 0)], 1), "names audit, which is not", id="another"
        ),
    ],
)
def test_offsets_name_every_partition(finder, given, match):
    """
    Every partition needs an offset, as with the Kafka source.

    A partition that is left out is a mistake.
    """
    with pytest.raises(ConfigError, match=match):
        finder.starts(AtOffsets(given, "startingOffsets"), on_no_match="error")
    with pytest.raises(ConfigError, match=match.replace("Offsets:", "OffsetsByTimestamp:")):
        finder.starts(AtTimes(given, "startingOffsetsByTimestamp"), on_no_match="error")


@pytest.mark.parametrize("later", [-1, 0, 1, 17])
def test_time_is_the_first_record_that_is_as_late(archive, bucket, later):
    """Exactly, also inside a batch: the record's own offset."""
    writer = archive.filled("orders", 0)
    values = {offset: DEFAULT_TIME_MS + offset for offset in writer.values()}
    time_ms = DEFAULT_TIME_MS + later
    wanted = next(offset for offset, each in values.items() if each >= time_ms)
    finder = OffsetFinder(bucket, SubscriptionTopics(bucket, Subscription(topics=("orders",))).existing())

    assert starts(finder, AtTime(time_ms, "startingTimestamp")) == [wanted]
    assert starts(finder, AtTimes({ORDERS[0]: time_ms}, "startingOffsetsByTimestamp")) == [wanted]


@pytest.mark.parametrize("value_bytes", [900_000, 2_000], ids=["large batches", "small batches"])
def test_time_costs_little_of_a_segment(archive, bucket, monkeypatch, value_bytes):
    """The index leads to the batch, and a header or some tens of kilobytes are enough: not two chunks."""
    writer = archive.writer("orders", 0)
    for number in range(9_000_000 // value_bytes):
        writer.append(bytes(value_bytes), timestamp_ms=DEFAULT_TIME_MS + 1_000 * number)
    writer.roll()
    archive.add(writer)
    finder = OffsetFinder(bucket, SubscriptionTopics(bucket, Subscription(topics=("orders",))).existing())
    reads = CountedCalls.of(monkeypatch, FileStore, "get_range")

    assert starts(finder, AtTime(DEFAULT_TIME_MS + 4_500, "startingTimestamp")) == [5]
    read_bytes = [options["size_bytes"] for _, _, options in reads.calls]
    assert 0 < sum(read_bytes) <= 100 << 10


def test_time_after_all_records_is_an_error_to_begin_at(finder):
    """Such a time is no error if partitions are to begin at their end. As an end it means all records."""
    position = AtTime(DEFAULT_TIME_MS + 20, "startingTimestamp")
    with pytest.raises(ConfigError, match=r"startingTimestamp: no archived record of orders-1 has a time of"):
        finder.starts(position, on_no_match="error")
    assert starts(finder, position, "latest") == [20, 12, 0]
    assert list(finder.ends(position).values()) == [20, 12, 0]


def test_batch_may_not_end_before_it_begins():
    """An end before the start is refused if both are offsets. Times may cross in one partition."""
    partition = ORDERS[0]
    start, end = AtOffsets({partition: 9}, "startingOffsets"), AtOffsets({partition: 8}, "endingOffsets")
    with pytest.raises(ConfigError, match="endingOffsets: orders-0 would end at 8, before it begins at 9"):
        require_order(start, end, {partition: 9}, {partition: 8})
    require_order(start, start, {partition: 9}, {partition: 9})
    require_order(AtTime(9, ""), end, {partition: 9}, {partition: 8})
    require_order(AtOffsets({partition: -2}, ""), end, {partition: 9}, {partition: 8})


MANIFEST = PartitionManifest(TopicIdPartition("c", "orders", "id", 0), start_offset=100, next_offset=200)


@pytest.mark.parametrize(
    ("asked", "readable", "lost"),
    [
        pytest.param((100, 200), (100, 200), None, id="all"),
        pytest.param((150, 160), (150, 160), None, id="some"),
        pytest.param((200, 200), (200, 200), None, id="nothing at the end"),
        pytest.param((50, 50), (50, 50), None, id="nothing before the beginning"),
        pytest.param((160, 150), (160, 160), None, id="times that cross"),
        pytest.param((50, 200), (100, 200), (50, 99), id="expired in part"),
        pytest.param((50, 80), (100, 100), (50, 79), id="expired"),
        pytest.param((150, 300), (150, 200), (200, 299), id="not archived in part"),
        pytest.param((250, 300), (250, 250), (250, 299), id="not archived"),
        pytest.param((250, 200), (250, 250), (200, 249), id="begins past the end"),
    ],
)
def test_what_the_archive_does_not_have_is_told(warnings, asked, readable, lost):
    """Offsets that the archive lacks are named in an error, or in a warning if records may be missing."""
    rule = LossRule(is_fatal=False)
    assert readable_range(ORDERS[0], MANIFEST, *asked, rule=rule) == readable
    told = [
        (each["base_offset"], each["last_offset"]) for each in warnings.of("records are not in the archive")
    ]
    assert told == ([] if lost is None else [lost])

    if lost is None:
        assert readable_range(ORDERS[0], MANIFEST, *asked, rule=STRICT) == readable
    else:
        with pytest.raises(
            DataLossError, match=f"offsets {lost[0]} to {lost[1]} of orders-0: .*failOnDataLoss"
        ):
            readable_range(ORDERS[0], MANIFEST, *asked, rule=STRICT)


def test_both_ends_may_be_missing(warnings):
    """Each missing end is reported."""
    assert readable_range(ORDERS[0], MANIFEST, 0, 300, rule=LENIENT) == (100, 200)
    assert [each["base_offset"] for each in warnings.of("records are not in the archive")] == [0, 200]


def test_partition_of_which_nothing_is_archived():
    """Nothing may be asked of it but nothing."""
    assert readable_range(ORDERS[0], None, 0, 0, rule=STRICT) == (0, 0)
    with pytest.raises(DataLossError, match="offsets 0 to 4 of orders-0: the bucket has nothing"):
        readable_range(ORDERS[0], None, 0, 5, rule=STRICT)


def test_loss_is_told_once(warnings):
    """A stream asks many times a second."""
    rule = LossRule(is_fatal=False)
    for _ in range(3):
        readable_range(ORDERS[0], MANIFEST, 50, 150, rule=rule)
    assert len(warnings.events()) == 1


def test_positions_of_no_partitions():
    """A pattern may match nothing."""
    finder = OffsetFinder(None, SubscribedPartitions({}))
    assert finder.starts(Edge.EARLIEST, on_no_match="error") == {}
