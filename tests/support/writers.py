"""
Producers that keep writing through all failures of the brokers, and record what was acknowledged.

They run in a thread with its own event loop, so that a test may wait for a process meanwhile. Each value is
sent only once. So a value is in the log at most once, and exactly once if it was acknowledged.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

from aiokafka.errors import KafkaError

if TYPE_CHECKING:
    from types import TracebackType

    from aiokafka import AIOKafkaProducer

    from tests.support.kafka import KafkaCluster

_BATCH = 5
_PAUSE_SECONDS = 0.25
_VALUE_BYTES = 20_000
_SETTINGS = {"acks": "all", "enable_idempotence": True, "request_timeout_ms": 10_000, "linger_ms": 5}


class Acknowledged(NamedTuple):
    """A record that the brokers promised to keep."""

    offset: int
    number: int
    """The number of the value. A writer's values have ascending numbers."""


@dataclass
class Writer:
    """The values that were written to one partition."""

    topic: str
    partition: int
    acknowledged: list[Acknowledged] = field(default_factory=list)
    sent: int = 0
    value_bytes: int = _VALUE_BYTES

    def value(self, number: int) -> bytes:
        """Return the value with this number."""
        return b"%s-%d:%d:" % (self.topic.encode(), self.partition, number) + bytes(self.value_bytes)


def number_of(value: bytes) -> int:
    """Return the number of a writer's value."""
    return int(value.split(b":")[1])


class Writers:
    """One writer for each partition of some topics. They run in a `with` block, or until `stop`."""

    def __init__(
        self, kafka: KafkaCluster, topics: dict[str, int], *, value_bytes: int = _VALUE_BYTES
    ) -> None:
        """*topics* has the number of partitions to write to, by topic."""
        self._kafka = kafka
        self.writers = [
            Writer(topic, number, value_bytes=value_bytes)
            for topic, count in topics.items()
            for number in range(count)
        ]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="writers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop writing, and wait until every sent value is acknowledged or has failed."""
        self._stopping.set()
        self._thread.join()

    def writer(self, topic: str, partition: int = 0) -> Writer:
        """Return the writer of a partition."""
        return next(one for one in self.writers if (one.topic, one.partition) == (topic, partition))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for writer in self.writers:
                tasks.create_task(self._write(writer))

    async def _write(self, writer: Writer) -> None:
        while not self._stopping.is_set():
            try:
                async with self._kafka.producer(**_SETTINGS) as producer:
                    is_good = True
                    while is_good and not self._stopping.is_set():
                        is_good = await self._write_batch(producer, writer)
                        await asyncio.sleep(_PAUSE_SECONDS)
            except KafkaError:
                # No broker answers at the moment. Sent values may or may not be in the log, and are not
                # resent.
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _write_batch(self, producer: AIOKafkaProducer, writer: Writer) -> bool:
        """Write some values; return whether all were acknowledged, so that this producer is still usable."""
        numbers = range(writer.sent, writer.sent + _BATCH)
        writer.sent += _BATCH
        sent = [
            await producer.send(writer.topic, writer.value(number), partition=writer.partition)
            for number in numbers
        ]
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        for number, outcome in zip(numbers, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                writer.acknowledged.append(Acknowledged(outcome.offset, number))
            elif not isinstance(outcome, KafkaError):
                raise outcome
        return not any(isinstance(outcome, BaseException) for outcome in outcomes)
