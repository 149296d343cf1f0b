"""Requests of many partitions: decoded in a thread or in steps, and refused from a limit on."""

from __future__ import annotations

import asyncio
import struct

import pytest

from tests.fakes.gateway_peers import TopicArchive, closed, running
from tests.support.archive_endpoints import CALLS_IN_A_TURN, most_calls_in_a_turn
from tests.support.kafka_messages import framed
from tests.support.raw_kafka import connected
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import MAX_STRING_BYTES, MAX_TAGS, uvarint
from tieringd.formats.kafka_wire.fetch import remove_session
from tieringd.formats.kafka_wire.request_header import RequestHead
from tieringd.gateway.archive_answers import ListedOffset


class BeginningArchive(TopicArchive):
    """Knows that topic "old" begins at offset 1."""

    async def list_offsets(self, asked, *, read_committed):
        return dict.fromkeys(asked, ListedOffset(1, -1, 0))


def topic_of(partition, count):
    return uvarint(2) + uvarint(4) + b"old" + uvarint(count + 1) + partition * count + b"\0"


def offsets_request(count):
    partition = struct.pack(">iiq", 0, -1, -2) + b"\0"
    head = struct.pack(">hhih", 2, 7, 1, -1) + b"\0" + struct.pack(">ib", -1, 0)
    return framed(head, topic_of(partition, count), b"\0")


def offsets_response(count):
    partition = struct.pack(">ihqqi", 0, 0, -1, 5, -1) + b"\0"
    return framed(struct.pack(">i", 1), b"\0", struct.pack(">i", 0), topic_of(partition, count), b"\0")


async def test_large_answer_does_not_stop_the_loop(broker):
    """Other clients have their turns while the answer is decoded, changed and encoded."""
    count = 40_000
    async with running(broker, BeginningArchive()) as server, connected(server.port) as client:
        client.writer.write(offsets_request(count))
        _, _, answers = await broker.next()
        answers.write(offsets_response(count))
        size = asyncio.create_task(client.reader.readexactly(4))
        assert await most_calls_in_a_turn(size) < CALLS_IN_A_TURN
        assert int.from_bytes(size.result()) == len(offsets_response(count)) - 4
        await client.reader.readexactly(int.from_bytes(size.result()))


def deletion(count):
    partition = struct.pack(">iq", 0, 5) + b"\0"
    return framed(
        struct.pack(">hhih", 21, 2, 1, -1), b"\0", topic_of(partition, count), struct.pack(">i", 9), b"\0"
    )


def fetch_of(count):
    partition = struct.pack(">iiqiqi", 0, -1, 0, -1, -1, 1 << 20) + b"\0"
    head = struct.pack(">hhih", 1, 12, 1, -1) + b"\0" + struct.pack(">iiiibii", -1, 500, 1, 1 << 20, 0, 0, -1)
    return framed(head, topic_of(partition, count), b"\x01\x01\0")


@pytest.mark.parametrize(
    "request_of", [lambda: offsets_request(300_000), lambda: deletion(30_000), lambda: fetch_of(130_000)]
)
async def test_request_beyond_the_limit_of_its_kind_ends_its_connection(broker, request_of):
    """The broker does not see it."""
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        client.writer.write(request_of())
        assert await closed(client) == b""
        assert server.counters.broken_connections == 1
        assert broker.requests.empty()


def tags_of(count):
    return uvarint(count) + b"\x7f\0" * count


def fetch_with_tags(count):
    head = struct.pack(">hhih", 1, 12, 1, -1) + tags_of(count)
    return framed(head, struct.pack(">iiiibii", -1, 500, 1, 1 << 20, 0, 0, -1), b"\x01\x01\x01\0")


async def test_request_with_many_tagged_fields_ends_its_connection(broker):
    """The header is not walked over: a request of 4 MB has room for two million empty fields in it."""
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        client.writer.write(fetch_with_tags(100_000))
        end = asyncio.create_task(closed(client))
        assert await most_calls_in_a_turn(end) < CALLS_IN_A_TURN
        assert end.result() == b""
        assert server.counters.broken_connections == 1
        assert broker.requests.empty()


async def test_request_with_a_few_tagged_fields_passes(broker):
    """A newer client may send fields that the gateway does not know."""
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        client.writer.write(fetch_with_tags(MAX_TAGS))
        head, _, _ = await broker.next()
        assert head.api_key == 1


TOPIC = b"\x07" * 16
TAGGED_PARTITION = bytes(32) + uvarint(MAX_TAGS) + b"\x7f\0" * MAX_TAGS


@pytest.mark.parametrize(
    ("topics", "forgotten"),
    [
        (uvarint(60_001) + (TOPIC + b"\x01\0") * 60_000, b"\x01"),
        (uvarint(2) + TOPIC + uvarint(20_001) + TAGGED_PARTITION * 20_000 + b"\0", b"\x01"),
        (b"\x01", uvarint(60_001) + (TOPIC + b"\x01\0") * 60_000),
    ],
    ids=["topics", "tags", "forgotten topics"],
)
def test_fetch_with_many_topics_like_a_replicas_is_refused(topics, forgotten):
    """The walk that tells whether a replica sends a Fetch has a limit."""
    head = struct.pack(">hhih", 1, 17, 1, -1) + b"\0" + struct.pack(">iiibii", 500, 1, 1 << 20, 0, 0, -1)
    frame = framed(head, topics, forgotten, b"\x01\x01\x01\x0d", struct.pack(">iq", 1, 1), b"\0")
    with pytest.raises(ProtocolViolation, match="more than 50000 partitions"):
        remove_session(memoryview(frame), RequestHead.read(memoryview(frame)))


async def test_fetch_with_many_topics_like_a_replicas_does_not_stop_the_loop(broker):
    """Such a Fetch reaches the broker, and other clients have their turns beside it."""
    head = struct.pack(">hhih", 1, 17, 1, -1) + b"\0" + struct.pack(">iiibii", 500, 1, 1 << 20, 0, 0, -1)
    topics = uvarint(40_001) + (TOPIC + b"\x01\0") * 40_000
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        client.writer.write(framed(head, topics, b"\x01\x01\x01\x01\x0d", struct.pack(">iq", 1, 1), b"\0"))
        received = asyncio.create_task(broker.next())
        assert await most_calls_in_a_turn(received) < CALLS_IN_A_TURN


async def test_produce_whose_beginning_is_too_long_ends_its_connection(broker):
    """The beginning of a Produce is read again whenever bytes come, so it has a limit."""
    begun = struct.pack(">ihhih", 50 << 20, 0, 9, 1, -1) + b"\x01\x7f" + uvarint(10 << 20)
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        client.writer.write(begun + bytes(100_000))
        assert await closed(client) == b""
        assert server.counters.broken_connections == 1
        assert broker.requests.empty()


async def test_produce_with_the_longest_names_passes(broker):
    """A client's and a transaction's name may be as long as the protocol allows."""
    name = b"n" * MAX_STRING_BYTES
    head = struct.pack(">hhih", 0, 9, 1, len(name)) + name + b"\0" + uvarint(len(name) + 1) + name
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        frame = framed(head, struct.pack(">hi", 1, 500), b"\x01\0")
        for begin in range(0, len(frame), 4_000):
            client.writer.write(frame[begin : begin + 4_000])
            await client.writer.drain()
        _, received, _ = await broker.next()
        assert received == frame


async def test_fetch_that_names_too_many_partitions_is_not_read(broker):
    """A Fetch with too many partitions is not read if the archive has to look at each of them."""
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        client.writer.write(fetch_of(60_000))
        head, _, answers = await broker.next()
        partition = (
            struct.pack(">ihqqq", 0, 1, -1, -1, -1) + uvarint(0) + struct.pack(">i", -1) + uvarint(0) + b"\0"
        )
        topics = topic_of(partition, 1)
        answers.write(
            framed(struct.pack(">i", head.correlation_id), b"\0", struct.pack(">ihi", 0, 0, 0), topics, b"\0")
        )
        assert await closed(client) == b""
