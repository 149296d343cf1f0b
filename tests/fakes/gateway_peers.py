"""A gateway's peers in tests: an archive of one topic, and messages of clients and brokers."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager

from tests.support.kafka_messages import (
    fetch_request,
    fetch_response,
    milliseconds,
    request_module,
    response_frame,
)
from tieringd.formats.kafka_wire.fetch import PartitionData
from tieringd.gateway.archive_answers import ArchivedFetch, NextFetch, NoArchive
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.server import GatewayServer

METADATA = 3
MIB = 1 << 20
LAST_OFFSET = 999
"""The last archived offset of topic "old"."""


class TopicArchive(NoArchive):
    """Has every offset of topic "old", as records of a few bytes. A test may hold back its answers."""

    def __init__(self):
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_asked = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.questions = []
        self.released = 0
        self.sent = 0
        """How many answers went to a client."""
        self.is_writable = True
        self.step = None
        """The number of offsets in an answer; None if the end of an answer is unknown."""
        self.failure = None
        self.deleted = 0
        """The offset before which clients deleted the records."""

    def may_produce(self):
        return self.is_writable

    def may_have(self, topic, partition):
        return topic == "old"

    def deleted_before(self, topic, partition):
        return self.deleted

    async def fetch(self, question):
        self.questions.append(question)
        self.is_asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        if self.failure is not None:
            raise self.failure
        answers = {key: PartitionData(9, 9, 0, records=(b"archived",)) for key in question.partitions}
        next_fetches = {}
        if self.step is not None:
            next_fetches = {
                key: NextFetch(one.fetch_offset + self.step, LAST_OFFSET)
                for key, one in question.partitions.items()
            }
        return ArchivedFetch(answers, self._release, next_fetches, on_sent=self._send)

    def _send(self):
        self.sent += 1

    def _release(self):
        self.released += 1


@asynccontextmanager
async def running(broker, archive=None, readers=None, budget=None, **settings):
    """Run a gateway in front of *broker*. At the end, check that no connection or buffer is left."""
    settings = GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port, **settings)
    server = GatewayServer(settings, archive, readers=readers, budget=budget)
    await server.start()
    try:
        yield server
    finally:
        await server.close(grace_seconds=0)
    assert server.open_connections == 0
    assert server.buffered_bytes == 0


def plain_request(number, *, size=50):
    """Return a request that the gateway forwards without reading it."""
    return struct.pack(">ihhi", size - 4, METADATA, 9, number) + bytes([number % 256]) * (size - 12)


def plain_answer(number, *, size=50):
    return struct.pack(">ii", size - 4, number) + bytes([number % 256]) * (size - 8)


async def closed(client) -> bytes:
    """Return the bytes that a client receives until the connection is closed."""
    async with asyncio.timeout(60):
        try:
            return await client.reader.read()
        except ConnectionResetError:
            return b""


def fetch(topics=("old",), *, version=12, offsets=None, **values):
    """Return a request for partition 0 of *topics*, or for partitions at their *offsets*."""
    partitions = {number: {"fetch_offset": offset} for number, offset in (offsets or {0: 3}).items()}
    return fetch_request(version, dict.fromkeys(topics, partitions), **values)


def fetched(head, topics, *, version=12):
    return response_frame(fetch_response(version, topics), correlation_id=head.correlation_id)


def partition_of(answer, topic):
    return next(each for each in answer.responses if each.topic == topic).partitions[0]


def produce(version, *, acks, topic="t"):
    """Return a request to write 300 kB."""
    module = request_module(0, version)
    partition = module.PartitionProduceData(index=4, records=b"r" * 300_000)
    return module.ProduceRequest(
        acks=acks,
        timeout=milliseconds(5),
        topic_data=(module.TopicProduceData(name=topic, partition_data=(partition,)),),
    )
