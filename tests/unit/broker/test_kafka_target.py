"""A cluster that records are restored into: topics that one broker does not know yet, and what is written."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka.producer.message_accumulator import BatchBuilder

from tieringd.broker.kafka_protocol import KafkaSettings
from tieringd.broker.kafka_target import TargetCluster, TargetTopic, TargetWriter
from tieringd.formats.record_batch import parse_header
from tieringd.formats.records import Record, iter_records
from tieringd.formats.recovery_mark import RecoveryMark

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

UNKNOWN = 3
TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


class Leader:
    """The broker that creates topics, and knows them at once."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[str, int]] = {}

    async def topic_shape(self, name: str) -> tuple[str, int] | None:
        """Return id and number of partitions."""
        return self.shapes.get(name)

    async def close(self) -> None:
        """Nothing is open."""


class Follower:
    """The broker that is asked for settings. It learns of a topic only after a few requests."""

    def __init__(self, leader: Leader, *, late_by: int) -> None:
        self._leader, self._left = leader, late_by

    async def create_topics(self, topics: list[Any]) -> Any:
        """Create them on the leader."""
        for topic in topics:
            self._leader.shapes[topic.name] = (TOPIC_ID, topic.num_partitions)
        return SimpleNamespace(topic_errors=[(topic.name, 0, None) for topic in topics])

    async def describe_configs(self, resources: list[Any]) -> list[Any]:
        """Answer for the one topic."""
        (asked,) = resources
        if self._left:
            self._left -= 1
            return [SimpleNamespace(resources=[(UNKNOWN, "", 2, asked.name, [])])]
        return [SimpleNamespace(resources=[(0, None, 2, asked.name, [("retention.ms", "-1")])])]

    async def close(self) -> None:
        """Nothing is open."""


def cluster(*, late_by: int) -> TargetCluster:
    """Return a cluster of the two."""
    target: Any = TargetCluster(KafkaSettings(bootstrap=("127.0.0.1:1",)))
    target._broker = Leader()
    target._admin = Follower(target._broker, late_by=late_by)
    found: TargetCluster = target
    return found


async def test_topic_that_one_broker_does_not_know_yet_is_waited_for():
    """The recovery ended with UnknownTopicOrPartition, though the topic had been created."""
    made = await cluster(late_by=2).create("orders", partitions=3, replication_factor=1, settings={})
    assert (made.name, made.topic_id, made.partition_count) == ("orders", TOPIC_ID, 3)
    assert made.settings == {"retention.ms": "-1"}


async def test_topic_that_is_not_there_is_none():
    """No settings are asked for."""
    assert await cluster(late_by=0).topic("orders") is None


class Producer:
    """A transactional producer that keeps the bytes of the batches. The client's own builder makes them."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.records = 0

    def create_batch(self) -> BatchBuilder:
        """Return an empty batch of at most 16 KiB."""
        return BatchBuilder(16 << 10, 0, is_transactional=True)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Begin and end nothing."""
        yield

    async def send_batch(self, batch: BatchBuilder, topic: str, partition: int) -> asyncio.Future[Any]:
        """Keep a batch, and return its future place."""
        place = asyncio.get_running_loop().create_future()
        place.set_result(SimpleNamespace(offset=self.records))
        self.records += batch.record_count()
        self.batches.append(bytes(batch._build()))
        return place

    async def send_offsets_to_transaction(self, offsets: Any, group: str) -> None:
        """Keep no mark."""


async def written(records: Sequence[Record]) -> tuple[list[Record], list[int], RecoveryMark]:
    """Write *records*, and return the target's records, the first time of each batch, and the mark."""
    producer = Producer()
    writer = TargetWriter(producer, TargetTopic("orders", TOPIC_ID, 1, {}), "group", lambda _: nullcontext())
    mark = await writer.write(0, records, RecoveryMark(0, TOPIC_ID, "read_committed"))
    views = [memoryview(data) for data in producer.batches]
    found = [one for view in views for one in iter_records(view)]
    return found, [parse_header(view).base_timestamp_ms for view in views], mark


@pytest.mark.parametrize(
    ("times", "firsts"),
    [
        ([-1, -1, 1_700_000_000_000, 1_700_000_000_001], [-1, 1_700_000_000_000]),
        ([1_700_000_000_000, -1, 1_700_000_000_001], [1_700_000_000_000]),
        ([1_700_000_000_000, -1, -1], [1_700_000_000_000]),
        ([-1, 0, -1, 5], [-1, 0]),
        ([-1, -1], [-1]),
    ],
)
async def test_each_record_keeps_its_time(times, firsts):
    """A record without a time (-1) has none in the target either, before and after records that have one."""
    records = [Record(number, time_ms, 0, b"key", b"value", ()) for number, time_ms in enumerate(times)]
    found, first_times, mark = await written(records)
    assert [one.timestamp_ms for one in found] == times
    assert first_times == firsts
    assert (mark.records, mark.first_target, mark.last_target) == (len(times), 0, len(times) - 1)


async def test_keys_values_and_headers_stay_as_they_are():
    """A missing key, value or header value is not an empty one."""
    headers = (("a", None), ("a", b""), ("", b"x"))
    record = Record(0, 5, 0, None, b"", headers)
    found, _, _ = await written([record])
    assert found == [record]
