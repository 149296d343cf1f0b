"""What clients do in a swarm: idempotent producers, and readers through the gateways and past them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from tests.support.writers import number_of

if TYPE_CHECKING:
    from tests.support.writers import Writers

TOPIC = "swarm"
PARTITIONS = 3
_PAUSE_SECONDS = 0.5
_SETTINGS = {
    "enable_auto_commit": False,
    "auto_offset_reset": "none",
    "metadata_max_age_ms": 2000,
    "request_timeout_ms": 15_000,
}


@dataclass
class Reader:
    """
    One reader of all partitions, in ascending offsets from 0. It is made anew after each error.

    A reader past the gateways is told OffsetOutOfRange where the local log was trimmed, and goes on at the
    log's start. To a reader through a gateway that answer breaks a promise.
    """

    name: str
    bootstrap: str
    writers: Writers
    reads_archive: bool
    positions: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(PARTITIONS), 0))
    """The offset that comes next, by partition."""
    numbers: dict[int, dict[int, int]] = field(
        default_factory=lambda: {number: {} for number in range(PARTITIONS)}
    )
    """The number of the value at each offset that was read, by partition."""
    broken: list[str] = field(default_factory=list)
    errors: int = 0

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._read()
            except (KafkaError, OSError):
                # A broker or a gateway is away: the schedule takes them away.
                self.errors += 1
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _read(self) -> None:
        consumer = AIOKafkaConsumer(bootstrap_servers=self.bootstrap, **_SETTINGS)
        try:
            await consumer.start()
            consumer.assign([TopicPartition(TOPIC, number) for number in range(PARTITIONS)])
            for number, offset in self.positions.items():
                consumer.seek(TopicPartition(TOPIC, number), offset)
            while True:
                try:
                    found = await consumer.getmany(timeout_ms=500)
                except OffsetOutOfRangeError as error:
                    await self._out_of_range(consumer, error)
                    return
                for partition, records in found.items():
                    for record in records:
                        self._see(partition.partition, record.offset, record.value)
        finally:
            await consumer.stop()

    async def _out_of_range(self, consumer: AIOKafkaConsumer, error: OffsetOutOfRangeError) -> None:
        for partition, offset in error.args[0].items():
            if self.reads_archive:
                self._break(f"{partition.topic}-{partition.partition}: {offset} is said to be out of range")
                continue
            start = (await consumer.beginning_offsets([partition]))[partition]
            self.positions[partition.partition] = max(start, self.positions[partition.partition])

    def _see(self, partition: int, offset: int, value: bytes) -> None:
        wanted = self.positions[partition]
        if offset != wanted:
            self._break(f"{TOPIC}-{partition}: {offset} came where {wanted} is next")
        number = number_of(value)
        if value != self.writers.writer(TOPIC, partition).value(number):
            self._break(f"{TOPIC}-{partition}: the record at {offset} is not what was written")
        self.numbers[partition][offset] = number
        self.positions[partition] = offset + 1

    def _break(self, what: str) -> None:
        if what not in self.broken:
            self.broken.append(f"{self.name}: {what}")
