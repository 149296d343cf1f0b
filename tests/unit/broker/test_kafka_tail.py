"""The tail of a partition where the client library cannot decode a record."""

from __future__ import annotations

import pytest
from aiokafka.consumer.fetcher import READ_UNCOMMITTED, FetchResult, PartitionRecords
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record import MemoryRecords

from tieringd.broker import kafka_tail
from tieringd.broker.kafka_protocol import KafkaSettings
from tieringd.broker.kafka_tail import KafkaTail
from tieringd.errors import ProtocolViolation
from tieringd.formats.record_batch import HEADER_BYTES, parse_header, sealed
from tieringd.model.partition import TopicPartition

BAD_NAME = b"\xe9tat"


def batch_of(count: int, *, bad: int) -> bytes:
    """Return a batch with *count* records. The header of record *bad* has a name that is not UTF-8."""
    builder = BatchBuilder(1 << 14, 2, is_transactional=False)
    for number in range(count):
        name = "Z" * len(BAD_NAME) if number == bad else "name"
        builder.append(timestamp=number, key=None, value=b"%d" % number, headers=[(name, b"x")])
    data = bytes(builder._build()).replace(b"Z" * len(BAD_NAME), BAD_NAME)
    return bytes(sealed(parse_header(memoryview(data)), data[HEADER_BYTES:]))


class Position:
    """The assignment of one partition, which is its own state: the library needs no more of either."""

    active, paused = True, False

    def __init__(self):
        self.position = 0

    def state_value(self, _partition):
        return self

    def consumed_to(self, offset):
        self.position = offset


class Consumer:
    """A consumer whose fetches return *data*. The library's own code decodes the records."""

    def __init__(self, data: bytes):
        self._data, self._at, self._fetched = data, Position(), None

    def seek(self, _partition, offset):
        self._at.position, self._fetched = offset, None

    async def position(self, _partition):
        return self._at.position

    async def getmany(self, partition, *, timeout_ms, max_records=None):
        assert timeout_ms
        if self._fetched is None:
            unpacked = PartitionRecords(
                *(partition, MemoryRecords(self._data), [], self._at.position, None, None, True),
                READ_UNCOMMITTED,
            )
            self._fetched = FetchResult(partition, assignment=self._at, partition_records=unpacked, backoff=0)
        records = self._fetched.getall(max_records)
        if not self._fetched.has_more():
            self._fetched = None
        return {partition: records} if records else {}


@pytest.mark.parametrize("bad", [0, 2, 3])
async def test_record_that_the_library_cannot_decode_is_an_error_with_its_offset(monkeypatch, bad):
    """The records before it are read. The error names the partition, the offset and the way around."""
    consumer = Consumer(batch_of(4, bad=bad))
    monkeypatch.setattr(kafka_tail, "AIOKafkaConsumer", lambda **_: consumer)
    tail = KafkaTail(KafkaSettings(("broker:9092",)), TopicPartition("orders", 7), read_committed=False)
    reading = tail.records(from_offset=0, end_offset=4)
    found = [await anext(reading) for _ in range(bad)]
    assert [(one.offset, one.value) for one in found] == [(number, b"%d" % number) for number in range(bad)]
    with pytest.raises(ProtocolViolation, match=f"orders-7 at offset {bad} .*UTF-8.*--archive-only"):
        await anext(reading)


async def test_records_are_read_to_the_end_that_is_asked_for(monkeypatch):
    """The end is exclusive."""
    consumer = Consumer(batch_of(4, bad=-1))
    monkeypatch.setattr(kafka_tail, "AIOKafkaConsumer", lambda **_: consumer)
    tail = KafkaTail(KafkaSettings(("broker:9092",)), TopicPartition("orders", 7), read_committed=False)
    assert [one.offset async for one in tail.records(from_offset=1, end_offset=3)] == [1, 2]
