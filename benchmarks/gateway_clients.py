"""
What `benchmarks.gateway` measures with.

librdkafka reading a topic, a raw socket that asks for one record at a time, and idle connections.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

from confluent_kafka import Consumer, TopicPartition

from benchmarks.gateway_archive import LOCAL
from tests.support.kafka_messages import fetch_request, request_frame, request_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FETCH = 12
_ANSWER_SECONDS = 60
_BATCH = 20_000


class RdkafkaReader:
    """Reads the whole topic from one address, with limits that let the network be the bottleneck."""

    in_any_partition: ClassVar[bool] = False
    """Whether it does not matter which partition and offset a value has."""

    def __init__(self, port: int, topic: str, partitions: int, records: int) -> None:
        self._port = port
        self._topic = topic
        self._partitions = partitions
        self._records = records
        self._seen: dict[str, bytes] = {}

    def upload(self) -> None:
        """Read every record once; what is read is only counted."""
        self._read(keep=False)

    def sent(self) -> Mapping[str, bytes]:
        """
        Read every record once more, and return digests.

        There is one of the offsets and values of each partition, or one of all values in any order.
        """
        self._read(keep=True)
        return self._seen

    def close(self) -> None:
        """Nothing is left open."""

    def _read(self, *, keep: bool) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": f"127.0.0.1:{self._port}",
                "group.id": "benchmark",
                "enable.auto.commit": False,
                # With its defaults the client pauses for a second whenever its queue is full.
                "queued.min.messages": 1_000_000,
                "queued.max.messages.kbytes": 2_000_000,
                "fetch.queue.backoff.ms": 1,
            }
        )
        digests = [hashlib.sha256() for _ in range(self._partitions)]
        total = 0
        try:
            consumer.assign([TopicPartition(self._topic, number, 0) for number in range(self._partitions)])
            left = self._records
            while left:
                messages = consumer.consume(min(_BATCH, left), _ANSWER_SECONDS)
                assert messages, f"{left} records did not come"
                left -= len(messages)
                for message in messages if keep else ():
                    if self.in_any_partition:
                        total += int.from_bytes(hashlib.sha256(message.value()).digest())
                    else:
                        digests[message.partition()].update(b"%d" % message.offset() + message.value())
        finally:
            consumer.close()
        self._seen = {str(number): digest.digest() for number, digest in enumerate(digests)}
        if self.in_any_partition:
            self._seen = {"values": b"%x" % total}


class AnyPartitionReader(RdkafkaReader):
    """Reads a topic whose producer chose partitions by itself: only the values count."""

    in_any_partition = True


class RoundTrips:
    """One connection on which one record is fetched again and again."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = {LOCAL: {0: {"fetch_offset": 0, "partition_max_bytes": 1}}}
        self._request = bytes(request_frame(fetch_request(_FETCH, asked)))

    def measure_ms(self, count: int) -> Iterator[float]:
        """Fetch *count* times, and yield how long each took."""
        for _ in range(count):
            begun = time.perf_counter()
            self._socket.sendall(self._request)
            read_frame(self._socket)
            yield (time.perf_counter() - begun) * 1000

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def read_frame(connection: socket.socket) -> bytes:
    """Return the next answer, without its size."""
    (size,) = struct.unpack(">i", _exactly(connection, 4))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the connection was closed"
        data += part
    return data


_IDLE_HOSTS = 20


def idle_connections(port: int, count: int) -> ExitStack:
    """Open connections that have asked for versions, as every client does; the stack closes them."""
    module = request_module(18, 3)
    request = bytes(
        request_frame(module.ApiVersionsRequest(client_software_name="idle", client_software_version="1"))
    )
    stack = ExitStack()
    for number in range(count):
        # From many hosts, because the gateway limits how many connections one of them opens in a second.
        source = (f"127.0.1.{1 + number % _IDLE_HOSTS}", 0)
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=source))
        connection.sendall(request)
        read_frame(connection)
    return stack
