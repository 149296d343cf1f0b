"""What connections hold: counted as it arrives, bounded, and no reason to pass what must be parsed."""

from __future__ import annotations

import asyncio
import struct
from contextlib import AsyncExitStack

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.gateway_peers import (
    MIB,
    TopicArchive,
    closed,
    fetch,
    fetched,
    partition_of,
    plain_answer,
    plain_request,
    running,
)
from tests.support.archive_endpoints import until
from tests.support.certificate import write_certificate
from tests.support.kafka_messages import (
    milliseconds,
    read_response,
    request_frame,
    request_module,
    response_frame,
    response_module,
)
from tests.support.raw_kafka import connected
from tests.support.tls_relay import trusting
from tieringd.formats.kafka_wire.request_header import KNOWN_VERSIONS, InspectedApi
from tieringd.gateway.ahead import FetchAhead
from tieringd.gateway.archive_answers import EpochEnd, ListedOffset, NoArchive
from tieringd.gateway.deletion_epochs import DeletionEpochs
from tieringd.gateway.frames import MAX_REQUESTS, SCRATCH_BYTES, PendingRequests
from tieringd.gateway.requests import RequestFrames
from tieringd.gateway.seen_login import SeenLogin
from tieringd.gateway.wire import MemoryBudget

NO_TIME = milliseconds(0)
OUT_OF_RANGE = {"old": {0: {"error_code": 1}}}


class KnowingArchive(TopicArchive):
    """Knows where the log of topic "old" begins, and where its first epoch ends."""

    async def list_offsets(self, asked, *, read_committed):
        return dict.fromkeys(asked, ListedOffset(3))

    async def offset_for_leader_epoch(self, asked):
        return dict.fromkeys(asked, EpochEnd(0, 7))


def names(count):
    """Return topics of 200 bytes each, after "old"."""
    return ["old", *(f"{number:0200}" for number in range(count - 1))]


def list_offsets(*, topics=1):
    """Return a question for the earliest offset, and the broker's answer to it: 50."""
    ask, say = request_module(2, 7), response_module(2, 7)
    asked = (ask.ListOffsetsPartition(partition_index=0, timestamp=-2),)
    said = (say.ListOffsetsPartitionResponse(partition_index=0, error_code=ErrorCode.none, offset=50),)
    return (
        ask.ListOffsetsRequest(
            replica_id=-1,
            isolation_level=0,
            topics=tuple(ask.ListOffsetsTopic(name=name, partitions=asked) for name in names(topics)),
        ),
        say.ListOffsetsResponse(
            throttle_time=NO_TIME,
            topics=tuple(say.ListOffsetsTopicResponse(name=name, partitions=said) for name in names(topics)),
        ),
    )


def leader_epochs():
    """Return a question for the end of epoch 0, and the broker's answer to it: 50."""
    ask, say = request_module(23, 4), response_module(23, 4)
    asked = ask.OffsetForLeaderPartition(partition=0, leader_epoch=0)
    said = say.EpochEndOffset(error_code=ErrorCode.none, partition=0, leader_epoch=0, end_offset=50)
    return (
        ask.OffsetForLeaderEpochRequest(
            replica_id=-1, topics=(ask.OffsetForLeaderTopic(topic="old", partitions=(asked,)),)
        ),
        say.OffsetForLeaderEpochResponse(
            throttle_time=NO_TIME, topics=(say.OffsetForLeaderTopicResult(topic="old", partitions=(said,)),)
        ),
    )


def api_versions():
    """Return a question for versions, and the answer of a broker from the future."""
    say = response_module(18, 3)
    key = say.ApiVersion(api_key=1, min_version=4, max_version=99)
    return (
        request_module(18, 3).ApiVersionsRequest(client_software_name="a", client_software_version="1"),
        say.ApiVersionsResponse(error_code=ErrorCode.none, api_keys=(key,), throttle_time=NO_TIME),
    )


def log_dirs(*, topics):
    """Return a question for sizes, and the broker's answer to it."""
    say = response_module(35, 2)
    partition = say.DescribeLogDirsPartition(
        partition_index=0, partition_size=9, offset_lag=0, is_future_key=False
    )
    result = say.DescribeLogDirsResult(
        error_code=ErrorCode.none,
        log_dir="/data",
        topics=tuple(say.DescribeLogDirsTopic(name=name, partitions=(partition,)) for name in names(topics)),
    )
    return (
        request_module(35, 2).DescribeLogDirsRequest(topics=None),
        say.DescribeLogDirsResponse(throttle_time=NO_TIME, results=(result,)),
    )


async def send_in_two(writer, frame, received):
    """Send *frame* in two parts, the second when the gateway has received the first; *received* counts."""
    before, half = received(), len(frame) // 2
    writer.write(bytes(frame[:half]))
    await until(lambda: received() >= before + half)
    writer.write(bytes(frame[half:]))


async def test_announced_sizes_take_nothing_from_the_budget(broker):
    """Unknown clients that announce more than the budget leave a Fetch, in two segments, what it needs."""
    async with running(broker, TopicArchive()) as server, AsyncExitStack() as strangers:
        head = struct.pack(">ihhi", (4 * MIB) - 4, InspectedApi.FETCH, 12, 1)
        for _ in range(70):
            stranger = await strangers.enter_async_context(connected(server.port))
            stranger.writer.write(head)
        await until(lambda: server.counters.from_client_bytes == 70 * len(head))
        assert server.buffered_bytes == 70 * len(head)
        async with connected(server.port) as client:
            frame = request_frame(fetch(), correlation_id=1)
            await send_in_two(client.writer, frame, lambda: server.counters.from_client_bytes)
            head, _, answers = await broker.next()
            answers.write(fetched(head, OUT_OF_RANGE))
            assert partition_of(await client.answer(fetch()), "old").records == b"archived"


async def test_spent_budget_lets_small_fetches_be_parsed(broker):
    """Request and answer come in two parts each, and the archive's records come all the same."""
    async with (
        running(broker, TopicArchive(), buffered_bytes=0) as server,
        connected(server.port) as client,
    ):
        frame = request_frame(fetch(), correlation_id=1)
        await send_in_two(client.writer, frame, lambda: server.counters.from_client_bytes)
        head, _, answers = await broker.next()
        await send_in_two(answers, fetched(head, OUT_OF_RANGE), lambda: server.counters.from_broker_bytes)
        assert partition_of(await client.answer(fetch()), "old").records == b"archived"


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (list_offsets(), lambda answer: answer.topics[0].partitions[0].offset == 3),
        (leader_epochs(), lambda answer: answer.topics[0].partitions[0].end_offset == 7),
        (
            api_versions(),
            lambda answer: answer.api_keys[0].max_version == KNOWN_VERSIONS[InspectedApi.FETCH].stop - 1,
        ),
    ],
    ids=["ListOffsets", "OffsetForLeaderEpoch", "ApiVersions"],
)
async def test_spent_budget_lets_small_answers_be_parsed(broker, message, found):
    """A small answer in two parts is held even with a spent budget, and reaches the client changed."""
    request, response = message
    async with (
        running(broker, KnowingArchive(), buffered_bytes=0) as server,
        connected(server.port) as client,
    ):
        client.send(request)
        head, _, answers = await broker.next()
        frame = response_frame(response, correlation_id=head.correlation_id)
        await send_in_two(answers, frame, lambda: server.counters.from_broker_bytes)
        assert found(await client.answer(request))


@pytest.mark.parametrize("settings", [{"max_held_bytes": 100_000}, {"buffered_bytes": 100_000}])
@pytest.mark.parametrize(
    "request_of",
    [lambda: fetch(names(2000)), lambda: list_offsets(topics=2000)[0]],
    ids=["Fetch", "ListOffsets"],
)
async def test_request_that_cannot_be_held_ends_its_connection(broker, settings, request_of):
    """Passed on unseen, its answer would be the broker's alone: a consumer would skip what is archived."""
    async with running(broker, TopicArchive(), **settings) as server, connected(server.port) as client:
        client.send(request_of())
        assert await closed(client) == b""
        assert broker.requests.empty()
        assert server.counters.broken_connections == 1


@pytest.mark.parametrize("settings", [{"max_held_bytes": 500_000}, {"buffered_bytes": 500_000}])
async def test_answer_that_cannot_be_held_ends_its_connection(broker, settings):
    """No byte of it goes on."""
    _, response = list_offsets(topics=4000)
    async with running(broker, KnowingArchive(), **settings) as server, connected(server.port) as client:
        client.send(list_offsets()[0])
        head, _, answers = await broker.next()
        answers.write(response_frame(response, correlation_id=head.correlation_id))
        assert await closed(client) == b""
        assert server.counters.broken_connections == 1


@pytest.mark.parametrize("settings", [{"max_held_bytes": 100_000}, {"buffered_bytes": 100_000}])
async def test_sizes_that_cannot_be_held_pass(broker, settings):
    """The response lacks the archive's sizes then. Clients do not depend on them."""
    request, response = log_dirs(topics=4000)
    async with running(broker, TopicArchive(), **settings) as server, connected(server.port) as client:
        client.send(request)
        head, _, answers = await broker.next()
        frame = response_frame(response, correlation_id=head.correlation_id)
        answers.write(frame)
        assert await client.frame() == frame


async def test_fetch_answer_that_outgrows_the_budget_is_walked_over(broker):
    """The answer is held at first, and then passes. Its archived partitions have nothing new then."""
    records = bytes(range(256)) * 2400
    topics = {"new": {0: {"records": records}}} | OUT_OF_RANGE
    async with (
        running(broker, TopicArchive(), buffered_bytes=300_000) as server,
        connected(server.port) as client,
    ):
        for _ in range(2):
            client.send(fetch(("new", "old")))
            head, _, answers = await broker.next()
            answers.write(fetched(head, topics))
            answer = await client.answer(fetch())
            assert partition_of(answer, "new").records == records
            assert partition_of(answer, "old").error_code == ErrorCode.none
            assert partition_of(answer, "old").records == b""


async def test_remembered_requests_count_until_they_are_answered(broker):
    """Many connections that fetch much at once are a matter of memory too."""
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        client.send(fetch(names(1000)))
        head, frame, answers = await broker.next()
        assert server.buffered_bytes == len(frame) > 200_000
        answers.write(fetched(head, {"new": {0: {}}}))
        await client.frame()
        assert server.buffered_bytes == 0


@pytest.mark.parametrize("partitions", [1800, 2500])
async def test_budget_bounds_what_all_connections_hold(broker, partitions):
    """
    Each of 20 clients sends 20 Fetches at once, smaller or larger than what is always held.

    Connections slow down. None is cut, and all have their answers in the end.
    """
    frame = bytes(request_frame(fetch(offsets=dict.fromkeys(range(partitions), 0))))
    most = 0
    async with (
        running(broker, TopicArchive(), buffered_bytes=MIB) as server,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(connected(server.port)) for _ in range(20)]
        for client in clients:
            client.writer.write(frame * 20)
        for _ in range(20 * 20):
            head, _, answers = await broker.next()
            most = max(most, server.buffered_bytes)
            answers.write(fetched(head, {"new": {0: {"records": b"r"}}}))
        for client in clients:
            for _ in range(20):
                await client.frame()
        assert server.counters.broken_connections == 0
    # What one read may add, and what each connection may read that holds nothing.
    assert MIB // 2 < most < MIB + SCRATCH_BYTES + 20 * (8 << 10)


async def test_beginning_of_a_field_counts_while_it_is_kept(broker):
    """Eleven bytes are no header yet."""
    async with running(broker) as server, connected(server.port) as client:
        client.writer.write(plain_request(1)[:11])
        await until(lambda: server.counters.from_client_bytes == 11)
        assert server.buffered_bytes == 11
        client.writer.write(plain_request(1)[11:])
        await broker.next()
        assert server.buffered_bytes == 0


async def test_request_counts_while_the_broker_is_connected_to(broker, tmp_path):
    """The broker of this test takes connections, and never says a word of TLS."""
    certificate = write_certificate(tmp_path / "certificate.pem")
    async with (
        running(broker, broker_tls=trusting(certificate)) as server,
        connected(server.port) as client,
    ):
        client.writer.write(plain_request(1, size=5000))
        await until(lambda: server.counters.from_client_bytes == 5000)
        assert server.buffered_bytes == 5000


async def test_answer_counts_while_the_archive_is_asked(broker):
    """The answer is kept until it is known what takes its place."""
    archive = TopicArchive()
    archive.may_answer.clear()
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch(("new", "old")))
        head, request, answers = await broker.next()
        frame = fetched(head, {"new": {0: {"records": bytes(30_000)}}} | OUT_OF_RANGE)
        answers.write(frame)
        async with asyncio.timeout(20):
            await archive.is_asked.wait()
        assert server.buffered_bytes == len(request) + len(frame)
        archive.may_answer.set()
        await client.frame()
        assert server.buffered_bytes == 0


async def test_own_answers_that_stop_a_client_let_it_go_on(broker):
    """A client goes on after the gateway's own answers have stopped it, without anything else to wake it."""
    question = struct.pack(">ihhi", 30, InspectedApi.API_VERSIONS, 99, 3) + bytes(22)
    async with running(broker) as server, connected(server.port) as client:
        client.writer.write(question * (3 * MAX_REQUESTS))
        for _ in range(3 * MAX_REQUESTS):
            async with asyncio.timeout(20):
                answer = read_response(await client.frame(), 18, 0)
            assert answer.error_code == ErrorCode.unsupported_version
        client.writer.write(plain_request(9))
        _, _, answers = await broker.next()
        answers.write(plain_answer(9))
        assert await client.frame() == plain_answer(9)


async def test_connection_that_ends_amid_a_turn_leaves_nothing_counted():
    """A failed send closes the connection while messages are taken and answers are sent."""
    budget = MemoryBudget(MIB)
    pending = PendingRequests(budget)
    frame = bytes(request_frame(fetch()))

    def lose(_):
        requests.close()
        pending.close()

    requests = RequestFrames(
        memoryview(bytearray(SCRATCH_BYTES)),
        budget,
        pending,
        ahead=FetchAhead(
            asyncio.get_running_loop(),
            NoArchive(),
            timeout_seconds=1,
            bytes_max=lambda: 1,
            on_known=pytest.fail,
            on_broken=lose,
            on_failed=lose,
        ),
        deletions=DeletionEpochs(
            asyncio.get_running_loop(),
            NoArchive(),
            timeout_seconds=1,
            on_known=pytest.fail,
            on_failed=lose,
        ),
        forward=lose,
        may_produce=lambda: True,
        max_request_bytes=MIB,
        held_bytes=MIB,
        login=SeenLogin(),
    )
    requests.room()[: len(frame) + 5] = frame + frame[:5]
    requests.received(len(frame) + 5)
    assert budget.used == 0
    assert pending.pop().request == frame
    assert budget.used == 0
