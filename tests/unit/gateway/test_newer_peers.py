"""Clients and brokers that are newer than the gateway: what it does not know, it passes on or ignores."""

from __future__ import annotations

import struct

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.gateway_peers import TopicArchive, closed, plain_answer, plain_request, running
from tests.support.kafka_messages import (
    encoded,
    framed,
    milliseconds,
    read_response,
    request_frame,
    request_module,
    response_frame,
    response_module,
)
from tests.support.raw_kafka import connected
from tieringd.gateway.archive_answers import ListedOffset

NEW_TAG = b"\x01\x32\x01x"
"""A section of tagged fields with field 50, which is in no schema."""
EARLIEST = -2
FUTURE_CODE = 200


class BeginningArchive(TopicArchive):
    """Knows that topic "old" begins at offset 1."""

    async def list_offsets(self, asked, *, read_committed):
        return dict.fromkeys(asked, ListedOffset(1, -1, 0))


def offsets_request():
    module = request_module(2, 7)
    partition = module.ListOffsetsPartition(partition_index=0, timestamp=EARLIEST)
    return module.ListOffsetsRequest(
        replica_id=-1,
        isolation_level=0,
        topics=(module.ListOffsetsTopic(name="old", partitions=(partition,)),),
    )


def offsets_response(*, partitions=1):
    module = response_module(2, 7)
    said = tuple(
        module.ListOffsetsPartitionResponse(partition_index=number, error_code=ErrorCode.none, offset=500)
        for number in range(partitions)
    )
    topic = module.ListOffsetsTopicResponse(name="old", partitions=said)
    return module.ListOffsetsResponse(topics=(topic,), throttle_time=milliseconds(0))


def with_new_tag(frame):
    """Return a flexible message that ends with an unknown tagged field."""
    return framed(bytes(frame[4:-1]), NEW_TAG)


@pytest.mark.parametrize("is_request_newer", [True, False])
@pytest.mark.parametrize("is_response_newer", [True, False])
async def test_unknown_tagged_fields_do_not_hinder_the_archive(broker, is_request_newer, is_response_newer):
    """The broker gets the request as it is, and the client the start of the whole log."""
    async with running(broker, BeginningArchive()) as server, connected(server.port) as client:
        request, response = request_frame(offsets_request()), response_frame(offsets_response())
        request = with_new_tag(request) if is_request_newer else request
        client.writer.write(request)
        _, frame, answers = await broker.next()
        assert frame == request
        answers.write(with_new_tag(response) if is_response_newer else response)
        answer = read_response(await client.frame(), 2, 7)
        assert answer.topics[0].partitions[0].offset == 1


async def test_unknown_error_code_reaches_the_client(broker):
    """An unknown error code passes beside a partition that the archive answers for."""
    response = offsets_response(partitions=2)
    second = encoded(response.topics[0].partitions[1])
    failed = second[:4] + struct.pack(">h", FUTURE_CODE) + second[6:]
    module = request_module(2, 7)
    partitions = tuple(
        module.ListOffsetsPartition(partition_index=number, timestamp=EARLIEST) for number in range(2)
    )
    request = module.ListOffsetsRequest(
        replica_id=-1, isolation_level=0, topics=(module.ListOffsetsTopic(name="old", partitions=partitions),)
    )
    async with running(broker, BeginningArchive()) as server, connected(server.port) as client:
        client.writer.write(request_frame(request))
        _, _, answers = await broker.next()
        answers.write(bytes(response_frame(response)).replace(second, failed))
        frame = await client.frame()
    first = encoded(response.topics[0].partitions[0])
    assert failed in frame
    assert first not in frame


@pytest.mark.parametrize("version", [1, 2])
async def test_request_that_announces_billions_of_partitions_ends_its_own_connection_only(broker, version):
    """A client can send it before its login. Other clients go on."""
    count = b"\xff\xff\xff\xff\x7f" if version > 1 else b"\x7f\xff\xff\xff"
    topic = b"\x02\x04old" + count if version > 1 else b"\x00\x00\x00\x01\x00\x03old" + count
    header = struct.pack(">hhih", 21, version, 1, -1) + (b"\x00" if version > 1 else b"")
    async with (
        running(broker, TopicArchive()) as server,
        connected(server.port) as client,
        connected(server.port) as other,
    ):
        client.writer.write(framed(header, topic, bytes(40)))
        assert await closed(client) == b""
        other.writer.write(plain_request(9))
        head, _, answers = await broker.next()
        answers.write(plain_answer(head.correlation_id))
        assert await other.frame() == plain_answer(9)
        assert server.counters.broken_connections == 1
