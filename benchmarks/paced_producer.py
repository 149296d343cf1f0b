"""
A producer at a steady rate, in a process of its own: how long does an acknowledgement take?

librdkafka with `acks=all`. It writes to another topic first, until the broker and it have done this for a
while: a broker's first seconds are those of its compiler. A record that is late because the ones before it
had to wait counts from the moment at which it was due.

    python -m benchmarks.paced_producer BOOTSTRAP WARM_TOPIC WARM_SECONDS TOPIC RECORDS MIB_PER_SECOND

It prints a line when it is warm, begins when it reads a line, and prints the 99th percentile in milliseconds.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from confluent_kafka import Producer

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

RECORD_BYTES: Final = 1024
MIB = 1 << 20
_TICK_SECONDS = 0.005
_SAMPLED: Final = 16
"""One in this many records is timed."""
_VALUES = 1024
"""How many different ends of values there are, in turn. Each value begins with the number of its record."""
_PATIENCE_SECONDS = 300


class PacedProducer:
    """Writes records of random bytes at a steady rate."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "batch.size": 128 << 10,
                "linger.ms": 5,
                "queue.buffering.max.kbytes": 32 << 10,
            }
        )
        # The same in each run, because what comes back is compared.
        self._values = [random.Random(number).randbytes(RECORD_BYTES - 8) for number in range(_VALUES)]
        self._seconds: list[float] = []

    def write(self, topic: str, records: int, *, records_per_second: float) -> list[float]:
        """Write *records*, and return the sorted times of acknowledgement in seconds, of a part of them."""
        self._seconds = []
        began = time.monotonic()
        sent = 0
        while sent < records:
            now = time.monotonic()
            due = min(records, int((now - began) * records_per_second))
            for number in range(sent, due):
                late = now - (began + number / records_per_second)
                self._produce(topic, number, late)
            sent = due
            self._producer.poll(0)
            time.sleep(_TICK_SECONDS)
        assert self._producer.flush(_PATIENCE_SECONDS) == 0, "the last records could not be written"
        return sorted(self._seconds)

    def _produce(self, topic: str, number: int, late_seconds: float) -> None:
        value = number.to_bytes(8) + self._values[number % _VALUES]
        asked = time.monotonic()
        while True:
            try:
                if number % _SAMPLED:
                    self._producer.produce(topic, value)
                else:
                    waited = time.monotonic() - asked
                    noted = partial(self._note, late_seconds + waited)
                    self._producer.produce(topic, value, on_delivery=noted)
            except BufferError:
                # The queue is full, as it is with any client that the broker keeps waiting.
                self._producer.poll(_TICK_SECONDS)
            else:
                return

    def _note(self, late_seconds: float, error: KafkaError | None, message: Message) -> None:
        assert error is None, f"a record could not be written: {error}"
        latency = message.latency()
        assert latency is not None
        self._seconds.append(late_seconds + latency)


def main() -> None:
    """Write to the first topic, wait for a line, write to the second, and print the percentile."""
    bootstrap, warm_topic, warm_seconds, topic, records, rate = sys.argv[1:]
    records_per_second = float(rate) * MIB / RECORD_BYTES
    producer = PacedProducer(bootstrap)
    producer.write(
        warm_topic, int(float(warm_seconds) * records_per_second), records_per_second=records_per_second
    )
    print("warm", flush=True)
    sys.stdin.readline()
    seconds = producer.write(topic, int(records), records_per_second=records_per_second)
    print(seconds[int(0.99 * len(seconds))] * 1000)


if __name__ == "__main__":
    main()
