"""What a client fetches next is prepared by the broker's word, and used for nothing but that."""

from __future__ import annotations

import asyncio
import math
import struct
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uvloop
from kio.schema.errors import ErrorCode

from tests.fakes.gateway_peers import (
    LAST_OFFSET,
    MIB,
    TopicArchive,
    fetch,
    fetched,
    partition_of,
    plain_answer,
    plain_request,
    produce,
    running,
)
from tests.fakes.virtual_loop import virtually
from tests.support.archive_endpoints import until
from tests.support.kafka_messages import fetch_request, read_request, read_response, request_frame
from tests.support.raw_kafka import connected
from tieringd.errors import StorageUnavailable
from tieringd.formats.kafka_wire.fetch import FetchResponseWalk, asked_of
from tieringd.formats.kafka_wire.pieces import FileRegion
from tieringd.formats.kafka_wire.request_header import InspectedApi, RequestHead
from tieringd.gateway.ahead import PERMIT_SECONDS, FetchAhead
from tieringd.gateway.archive_answers import NextFetch
from tieringd.gateway.combined_answers import fetched_ahead
from tieringd.gateway.deletion_epochs import DeletionEpochs
from tieringd.gateway.frames import SCRATCH_BYTES, ClientResponse, PendingRequest, PendingRequests
from tieringd.gateway.requests import RequestFrames
from tieringd.gateway.responses import ArchivableResponse
from tieringd.gateway.seen_login import SeenLogin
from tieringd.gateway.wire import MemoryBudget

STEP = 10
"""Offsets in every answer of the archive."""
LASTING = {"permit_seconds": 1000.0}
"""The broker's permit holds for longer than any test takes."""
OUT_OF_RANGE = {"old": {0: {"error_code": 1}}}


@pytest.fixture
def archive():
    """Give an archive whose every answer goes on after ten offsets."""
    archive = TopicArchive()
    archive.step = STEP
    return archive


def fetch_at(offset, *, partition=0, **values):
    return fetch(offsets={partition: offset}, **values)


def offset_in(frame):
    head = RequestHead.read(memoryview(frame))
    return asked_of(memoryview(frame), head).partitions["old", 0].fetch_offset


async def answered(broker, client, offset):
    """Fetch at *offset* by way of the broker; the archive answers."""
    client.send(fetch_at(offset))
    head, frame, answers = await broker.next()
    assert offset_in(frame) == offset
    answers.write(fetched(head, OUT_OF_RANGE))
    answer = await client.answer(fetch_at(offset))
    assert partition_of(answer, "old").records
    return answers


@asynccontextmanager
async def following(broker, archive):
    """Give a client that has read two answers on end, and the broker's next request: for the last offset."""
    async with running(broker, archive, **LASTING) as server, connected(server.port) as client:
        await answered(broker, client, 0)
        await answered(broker, client, STEP)
        head, frame, answers = await broker.next()
        assert offset_in(frame) == LAST_OFFSET
        yield server, client, head, answers


async def test_reader_that_goes_on_is_answered_without_the_broker(broker, archive):
    """Answers are prepared before their requests, once the broker has called an offset out of range."""
    async with following(broker, archive) as (server, client, ahead, broker_side):
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        for number in range(2, 6):
            await until(lambda count=number: len(archive.questions) == count + 1)
            correlation_id = client.send(fetch_at(number * STEP))
            frame = await client.frame()
            assert int.from_bytes(frame[4:8]) == correlation_id
            answer = read_response(frame, 1, 12)
            assert partition_of(answer, "old").records == b"archived"
        assert server.counters.prepared_answers == 4
        await until(lambda: len(archive.questions) == 7)
        # The one that is prepared now has gone to no client.
        assert archive.sent == 6
        assert [one.partitions["old", 0].fetch_offset for one in archive.questions] == [
            *range(0, 7 * STEP, STEP)
        ]
        assert broker.requests.empty()


async def test_prepared_answer_ends_when_its_records_are_deleted(broker, archive):
    """A deletion on another connection counts at once: the broker is asked instead."""
    async with following(broker, archive) as (_, client, ahead, broker_side):
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        await until(lambda: len(archive.questions) == 3)
        archive.deleted = 2 * STEP + 1
        client.send(fetch_at(2 * STEP))
        _, frame, _ = await broker.next()
        assert offset_in(frame) == 2 * STEP
        await until(lambda: archive.released == 3)
        assert archive.sent == 2


async def test_first_answer_of_a_client_is_not_gone_on_from(broker, archive):
    """Only one that has gone on from an answer is thought to go on from the next."""
    async with running(broker, archive, **LASTING) as server, connected(server.port) as client:
        await answered(broker, client, 0)
        await answered(broker, client, 500)
        await answered(broker, client, 3)
        client.writer.write(plain_request(9))
        head, _, _ = await broker.next()
        assert head.correlation_id == 9


@pytest.mark.parametrize(
    "other",
    [
        fetch_at(7),
        fetch_at(2 * STEP, max_bytes=5),
        fetch_at(2 * STEP, isolation_level=1),
        fetch_at(2 * STEP, version=11),
        fetch_at(2 * STEP, partition=1),
    ],
    ids=["offset", "limit", "isolation", "version", "partition"],
)
async def test_request_that_asks_anything_else_goes_to_the_broker(broker, archive, other):
    """The prepared answer for another request is released, and nothing is asked ahead at once."""
    async with following(broker, archive) as (_, client, ahead, broker_side):
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        await until(lambda: len(archive.questions) == 3)
        client.send(other)
        _, frame, _ = await broker.next()
        assert read_request(frame, 1, other.__version__) == other
        await until(lambda: archive.released == 3)
        client.writer.write(plain_request(9))
        assert (await broker.next())[0].correlation_id == 9


async def test_archive_is_not_asked_for_a_client_that_has_gone(broker, archive):
    """A client has gone elsewhere before the broker answered."""
    async with following(broker, archive) as (_, client, ahead, broker_side):
        client.send(fetch_at(7))
        head, frame, answers = await broker.next()
        assert offset_in(frame) == 7
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        answers.write(fetched(head, OUT_OF_RANGE))
        await client.answer(fetch_at(7))
        assert [one.partitions["old", 0].fetch_offset for one in archive.questions] == [0, STEP, 7]


async def test_nothing_is_asked_ahead_behind_what_is_under_way(broker, archive):
    """A prepared answer would come later than the client's own request."""
    async with running(broker, archive, **LASTING) as server, connected(server.port) as client:
        await answered(broker, client, 0)
        client.send(fetch_at(STEP))
        client.writer.write(plain_request(9))
        head, _, answers = await broker.next()
        await broker.next()
        answers.write(fetched(head, OUT_OF_RANGE))
        await client.answer(fetch_at(STEP))
        client.writer.write(plain_request(8))
        assert (await broker.next())[0].correlation_id == 8


async def test_nothing_is_written_amid_a_request_that_passes(broker, archive):
    """The broker would take it for a part of that."""
    records = bytes(request_frame(produce(9, acks=0)))
    async with running(broker, archive, **LASTING) as server, connected(server.port) as client:
        await answered(broker, client, 0)
        client.send(fetch_at(STEP))
        client.writer.write(records[:200_000])
        head, _, answers = await broker.next()
        await until(lambda: server.counters.from_client_bytes > 200_000)
        answers.write(fetched(head, OUT_OF_RANGE))
        await client.answer(fetch_at(STEP))
        client.writer.write(records[200_000:])
        assert (await broker.next())[1] == records


@pytest.mark.parametrize("is_handshake_only", [True, False])
async def test_nothing_is_asked_ahead_while_a_client_authenticates_again(broker, archive, is_handshake_only):
    """The broker would close the connection. The client's next Fetch is as any other."""
    async with following(broker, archive) as (server, client, ahead, broker_side):
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        await until(lambda: len(archive.questions) == 3)
        # The gateway asks again when the broker's permit is half over. This one is, and lasts on.
        (connection,) = server._connections
        connection._ahead._permit_seconds *= 4
        for api_key in (17, 36)[: 1 if is_handshake_only else 2]:
            client.writer.write(authentication(api_key))
            head, _, answers = await broker.next()
            assert head.api_key == api_key
            answers.write(plain_answer(head.correlation_id, size=14))
            await client.frame()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await broker.requests.get()
        answer = await client.ask(fetch_at(2 * STEP))
        assert partition_of(answer, "old").records


def authentication(api_key):
    return struct.pack(">ihhih", 20, api_key, 1, api_key, -1) + bytes(10)


async def test_held_back_request_does_not_keep_the_loop_busy(archive):
    """A held-back request comes again when there is something to tell, and not before."""
    ahead = FetchAhead(
        asyncio.get_running_loop(),
        archive,
        timeout_seconds=9,
        bytes_max=lambda: MIB,
        on_known=pytest.fail,
        on_broken=pytest.fail,
        on_failed=pytest.fail,
    )
    budget = MemoryBudget(MIB)
    requests = RequestFrames(
        memoryview(bytearray(SCRATCH_BYTES)),
        budget,
        PendingRequests(budget),
        ahead=ahead,
        deletions=DeletionEpochs(
            asyncio.get_running_loop(),
            archive,
            timeout_seconds=9,
            on_known=pytest.fail,
            on_failed=pytest.fail,
        ),
        forward=pytest.fail,
        may_produce=lambda: True,
        max_request_bytes=MIB,
        held_bytes=MIB,
        login=SeenLogin(),
    )
    frame = bytes(request_frame(fetch_at(STEP)))
    head = RequestHead.read(memoryview(frame))
    pending = PendingRequest(head, bytes(request_frame(fetch_at(0))))
    ahead.expect(
        pending,
        ClientResponse(
            (), lambda: None, archived=True, next_fetches={("old", 0): NextFetch(STEP, LAST_OFFSET)}
        ),
    )
    ahead.is_asked()
    requests.room()[: len(frame)] = frame
    requests.received(len(frame))
    assert requests.is_stopped
    assert not requests.may_resume
    ahead.close()
    assert requests.may_resume
    requests.close()


async def test_request_that_comes_before_the_brokers_answer_waits_for_it(broker, archive):
    """The request goes nowhere itself, and what the client sends behind it waits with it."""
    async with following(broker, archive) as (_, client, ahead, broker_side):
        correlation_id = client.send(fetch_at(2 * STEP))
        client.writer.write(plain_request(9))
        async with connected(broker.port) as other:
            other.writer.write(plain_request(1))
            assert (await broker.next())[0].correlation_id == 1
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        frame = await client.frame()
        assert int.from_bytes(frame[4:8]) == correlation_id
        head, _, answers = await broker.next()
        assert head.correlation_id == 9
        answers.write(plain_answer(9))
        assert await client.frame() == plain_answer(9)


@pytest.mark.parametrize("size", [10, 3 * MIB])
async def test_records_that_the_broker_has_itself_are_asked_for_by_the_client(broker, archive, size):
    """The broker's answer to the request ahead is dropped, however large, even if the client waits for it."""
    async with following(broker, archive) as (_, client, ahead, broker_side):
        client.send(fetch_at(2 * STEP))
        broker_side.write(fetched(ahead, {"old": {0: {"records": bytes(size)}}}))
        head, frame, answers = await broker.next()
        assert offset_in(frame) == 2 * STEP
        answers.write(fetched(head, {"old": {0: {"records": bytes(range(250))}}}))
        answer = await client.answer(fetch_at(0))
        assert partition_of(answer, "old").records == bytes(range(250))
        assert len(archive.questions) == 2


async def test_client_that_may_not_read_any_more_is_told_so(broker, archive):
    """The archive is not asked when the broker refuses; the client's own request gets the refusal."""
    refused = {"old": {0: {"error_code": ErrorCode.topic_authorization_failed.value}}}
    async with following(broker, archive) as (_, client, ahead, broker_side):
        broker_side.write(fetched(ahead, refused))
        client.send(fetch_at(2 * STEP))
        head, _, answers = await broker.next()
        answers.write(fetched(head, refused))
        answer = await client.answer(fetch_at(0))
        assert partition_of(answer, "old").error_code == ErrorCode.topic_authorization_failed
        assert len(archive.questions) == 2


async def test_archive_that_cannot_say_ahead_is_asked_again_by_the_client(broker, archive):
    """The client does not hear of an attempt that it did not make."""
    async with following(broker, archive) as (_, client, ahead, broker_side):
        archive.failure = StorageUnavailable("away")
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        await until(lambda: len(archive.questions) == 3)
        archive.failure = None
        await answered(broker, client, 2 * STEP)


async def test_answers_keep_their_order_around_what_was_asked_ahead(broker, archive):
    """One that is ready waits for the answers to what its client had asked before."""
    async with following(broker, archive) as (_, client, ahead, broker_side):
        client.writer.write(plain_request(9))
        assert (await broker.next())[0].correlation_id == 9
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        await until(lambda: len(archive.questions) == 3)
        correlation_id = client.send(fetch_at(2 * STEP))
        client.writer.write(plain_request(8))
        assert (await broker.next())[0].correlation_id == 8
        broker_side.write(plain_answer(9) + plain_answer(8))
        assert await client.frame() == plain_answer(9)
        frame = await client.frame()
        assert int.from_bytes(frame[4:8]) == correlation_id
        assert await client.frame() == plain_answer(8)


async def test_connection_that_ends_gives_back_what_was_ready(broker, archive):
    """A prepared answer is released with its connection, even if the client has just asked for it."""
    async with following(broker, archive) as (server, client, ahead, broker_side):
        client.writer.write(plain_request(9))
        await broker.next()
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        await until(lambda: len(archive.questions) == 3)
        client.send(fetch_at(2 * STEP))
        client.writer.write(plain_request(8))
        assert (await broker.next())[0].correlation_id == 8
        assert archive.released == 2
        broker_side.close()
        await until(lambda: server.open_connections == 0)
        assert archive.released == 3


async def test_gateway_that_ends_does_not_wait_for_what_is_asked_ahead(broker, archive):
    """A connection is over when its client has all answers and the broker has answered."""
    async with following(broker, archive) as (server, _, ahead, broker_side):
        closing = asyncio.create_task(server.close(grace_seconds=20))
        broker_side.write(fetched(ahead, OUT_OF_RANGE))
        await closing
        assert archive.released == len(archive.questions)


@virtually
@pytest.mark.parametrize("is_late", [False, True])
async def test_unused_answer_is_released_after_a_second(archive, is_late):
    """The broker's word on a client's rights is not used when it is older."""
    ahead = prepared_for(archive)
    await asyncio.sleep(PERMIT_SECONDS * (1.1 if is_late else 0.9))
    assert archive.released == is_late
    assert (ahead.claim(AT_STEP, HEAD) is None) == is_late
    ahead.close()


@virtually
async def test_answer_that_was_prepared_before_a_pause_is_not_sent(archive):
    """The client's request is read before the timer that ends the broker's word."""
    ahead = prepared_for(archive)
    await asyncio.sleep(PERMIT_SECONDS / 2)
    asyncio.get_running_loop().pass_time(300)
    assert ahead.claim(AT_STEP, HEAD) is None
    assert archive.released == len(archive.questions) == 1
    ahead.close()


@virtually
@pytest.mark.parametrize("is_late", [False, True])
async def test_broker_is_asked_again_when_its_word_is_half_a_second_old(archive, is_late):
    """The answer prepared meanwhile is the one that the broker still confirms."""
    ahead = prepared_for(archive)
    await asyncio.sleep(PERMIT_SECONDS * (0.6 if is_late else 0.4))
    found = ahead.claim(AT_STEP, HEAD)
    ahead.expect(PendingRequest(HEAD, bytes(AT_STEP), prepared=found), found)
    ahead.begin()
    assert (ahead.to_ask() is not None) == is_late
    await asyncio.sleep(0.01)
    assert len(archive.questions) == 2
    ahead.close()
    found.release()


@virtually
async def test_word_of_the_broker_that_is_too_old_prepares_nothing(archive):
    """The broker's word is too old once a client has taken long over its last answer."""
    ahead = prepared_for(archive)
    await asyncio.sleep(PERMIT_SECONDS * 0.9)
    found = ahead.claim(AT_STEP, HEAD)
    ahead.expect(PendingRequest(HEAD, bytes(AT_STEP), prepared=found), found)
    await asyncio.sleep(PERMIT_SECONDS * 0.2)
    ahead.begin()
    await asyncio.sleep(0.01)
    assert len(archive.questions) == 1
    found.release()


@virtually
@pytest.mark.parametrize("next_offset", [LAST_OFFSET, LAST_OFFSET + 1])
async def test_brokers_word_goes_no_further_than_what_it_was_asked_for(archive, next_offset):
    """The archive has grown, and the local log begins later; the broker is asked for the new last offset."""
    ahead = prepared_for(archive)
    await asyncio.sleep(0.01)
    found = ahead.claim(AT_STEP, HEAD)
    further = replace(found, next_fetches={("old", 0): NextFetch(next_offset, 2000)})
    ahead.expect(PendingRequest(HEAD, bytes(AT_STEP), prepared=found), further)
    ahead.begin()
    await asyncio.sleep(0.01)
    is_covered = next_offset <= LAST_OFFSET
    assert len(archive.questions) == 1 + is_covered
    assert (ahead.to_ask() is None) == is_covered
    ahead.close()
    found.release()


@virtually
@pytest.mark.parametrize(("epoch", "version"), [(4, 12), (5, 12), (4, 11)])
async def test_brokers_word_is_for_one_leader_epoch_and_version(archive, epoch, version):
    """A client that believes in another leader hears so from the broker, in its own version's words."""
    ahead = prepared_for(archive, current_leader_epoch=4)
    await asyncio.sleep(0.01)
    ahead.expect(*answered_at(0, version=version, current_leader_epoch=epoch))
    following = frame_at(STEP, version=version, current_leader_epoch=epoch)
    ahead.claim(following, RequestHead.read(following))
    assert ahead.is_awaited == ((epoch, version) == (4, 12))
    ahead.close()


@virtually
async def test_word_of_the_broker_is_for_every_partition_or_none(archive):
    """A prepared Fetch needs the broker's word for every partition. Else the client asks itself."""
    ahead = FetchAhead(asyncio.get_running_loop(), archive, **WORKS)
    pending, sent = answered_at(0, partitions=(0, 1))
    ahead.expect(pending, sent)
    assert ahead.claim(frame_at(STEP, partitions=(0, 1)), HEAD) is None
    ahead.expect(pending, sent)
    ahead.to_ask()
    ahead.is_asked()
    ahead.is_answered(question_of(pending, OUT_OF_RANGE))
    await asyncio.sleep(0.01)
    assert not archive.questions


@virtually
async def test_other_word_of_the_broker_ends_what_it_said_before(archive):
    """The answers prepared by the earlier word go, and nothing more is prepared."""
    ahead = prepared_for(archive)
    await asyncio.sleep(PERMIT_SECONDS * 0.6)
    found = ahead.claim(AT_STEP, HEAD)
    pending = PendingRequest(HEAD, bytes(AT_STEP), prepared=found)
    ahead.expect(pending, found)
    ahead.begin()
    ahead.to_ask()
    ahead.is_asked()
    await asyncio.sleep(0.01)
    ahead.is_answered(None)
    assert archive.released == 1
    ahead.expect(pending, found)
    ahead.begin()
    await asyncio.sleep(0.01)
    assert len(archive.questions) == 2
    found.release()


@virtually
async def test_answer_prepared_for_a_client_that_has_gone_is_released(archive):
    """The client has gone on elsewhere while the archive was read."""
    archive.may_answer.clear()
    ahead = prepared_for(archive)
    await archive.is_asked.wait()
    archive.may_answer.set()
    # The task has been woken, and has not run.
    ahead.expect(*answered_at(500))
    await asyncio.sleep(0.01)
    assert archive.released == len(archive.questions) - archive.is_cancelled.is_set()
    ahead.close()


@virtually
async def test_word_of_the_broker_counts_from_when_it_was_asked(archive):
    """The broker's answer may lie in a socket that is not read while a slow client takes its own answer."""
    ahead = FetchAhead(asyncio.get_running_loop(), archive, **WORKS)
    pending, sent = answered_at(0)
    ahead.expect(pending, sent)
    assert ahead.claim(AT_STEP, HEAD) is None
    ahead.expect(pending, sent)
    ahead.is_asked()
    await asyncio.sleep(PERMIT_SECONDS * 1.1)
    ahead.is_answered(question_of(pending, OUT_OF_RANGE))
    await asyncio.sleep(0.01)
    assert not archive.questions


@virtually
@pytest.mark.parametrize("is_late", [False, True])
async def test_request_waits_for_what_is_prepared_only_while_the_word_holds(archive, is_late):
    """A slow store is no reason to send what the broker has not allowed for a second."""
    archive.may_answer.clear()
    ahead = prepared_for(archive)
    await asyncio.sleep(PERMIT_SECONDS * (1.1 if is_late else 0.9))
    assert ahead.claim(AT_STEP, HEAD) is None
    assert ahead.is_awaited != is_late
    ahead.close()


@virtually
async def test_answer_to_something_else_disturbs_no_fetch_that_waits(archive):
    """Clients ask for offsets in between."""
    known = []
    archive.may_answer.clear()
    ahead = prepared_for(archive, on_known=lambda: known.append(1))
    await archive.is_asked.wait()
    assert ahead.claim(AT_STEP, HEAD) is None
    other = replace(HEAD, api_key=InspectedApi.LIST_OFFSETS)
    ahead.expect(
        PendingRequest(other, b"request"), ClientResponse((b"broker's",), lambda: None, archived=False)
    )
    assert ahead.is_awaited
    archive.may_answer.set()
    await asyncio.sleep(0.01)
    assert known == [1]
    found = ahead.claim(AT_STEP, HEAD)
    assert found is not None
    found.release()


@virtually
async def test_fetch_that_waits_is_let_go_when_another_is_answered(archive):
    """A client that sends its requests without waiting for answers is held back by nothing but its limits."""
    known = []
    archive.may_answer.clear()
    ahead = prepared_for(archive, on_known=lambda: known.append(1))
    assert ahead.claim(AT_STEP, HEAD) is None
    assert ahead.is_awaited
    ahead.expect(*answered_at(500))
    await asyncio.sleep(0.01)
    assert (known, ahead.is_awaited) == ([1], False)
    ahead.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_fetch_is_let_go_when_the_archive_takes_longer_than_the_word_holds(archive, new_loop):
    """
    A Fetch is let go when the broker's word has run out, also on the daemon's own event loop.

    A late timer comes before what is ready there.
    """

    async def scenario():
        archive.may_answer.clear()
        for _ in range(1000):
            let_go = asyncio.Event()
            ahead = prepared_for(archive, on_known=let_go.set, permit_seconds=0.05)
            assert ahead.claim(AT_STEP, HEAD) is None
            if ahead.is_awaited:
                break
            # This process stood still for longer than the word holds.
            ahead.close()
        assert ahead.is_awaited
        await asyncio.sleep(0.06)
        archive.may_answer.set()
        async with asyncio.timeout(20):
            await let_go.wait()
        ahead.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


@virtually
async def test_answer_ahead_keeps_to_the_limit_of_every_answer(archive):
    """The limit holds for all archived bytes of a second, prepared or requested."""
    ahead = prepared_for(archive, bytes_max=lambda: 77)
    await asyncio.sleep(0.01)
    assert archive.questions[0].max_bytes == 77
    ahead.close()


@virtually
async def test_archive_that_does_not_say_how_it_goes_on_is_asked_by_the_client(archive):
    """The records are released if the archive does not say where the next ones are."""
    archive.step = None
    prepared_for(archive)
    await asyncio.sleep(0.01)
    assert archive.released == len(archive.questions) == 1


WORKS = {
    "timeout_seconds": 9,
    "bytes_max": lambda: MIB,
    "on_known": pytest.fail,
    "on_broken": pytest.fail,
    "on_failed": pytest.fail,
}


def frame_at(offset, *, version=12, partitions=(0,), **fields):
    asked = {number: {"fetch_offset": offset, **fields} for number in partitions}
    return memoryview(request_frame(fetch_request(version, {"old": asked})))


def answered_at(offset, *, partitions=(0,), **fields):
    """Return a request and its answer, which goes on a step later."""
    frame = frame_at(offset, partitions=partitions, **fields)
    next_fetches = {("old", number): NextFetch(offset + STEP, LAST_OFFSET) for number in partitions}
    sent = ClientResponse((), lambda: None, archived=True, next_fetches=next_fetches)
    return PendingRequest(RequestHead.read(frame), bytes(frame)), sent


def question_of(pending, topics):
    """Return what the broker's answer to a request asks of the archive."""
    response = fetched(pending.head, topics)
    walk = FetchResponseWalk(pending.head.version, len(response) - 4)
    walk.feed(memoryview(response))
    return ArchivableResponse(pending, bytes(response), tuple(walk.partitions))


AT_STEP = frame_at(STEP)
HEAD = RequestHead.read(AT_STEP)


def prepared_for(
    archive, *, bytes_max=lambda: MIB, on_known=pytest.fail, permit_seconds=PERMIT_SECONDS, **fields
):
    """Return what is ahead of a client that goes on from offset 0, when the broker has given its word."""
    works = WORKS | {"bytes_max": bytes_max, "on_known": on_known, "permit_seconds": permit_seconds}
    ahead = FetchAhead(asyncio.get_running_loop(), archive, **works)
    pending, sent = answered_at(0, **fields)
    ahead.expect(pending, sent)
    assert ahead.claim(frame_at(STEP, **fields), HEAD) is None
    ahead.expect(pending, sent)
    assert ahead.to_ask() is not None
    ahead.is_asked()
    ahead.is_answered(question_of(pending, OUT_OF_RANGE))
    return ahead


class HugeArchive(TopicArchive):
    """Its files have more bytes than a response can have."""

    async def fetch(self, question):
        found = await super().fetch(question)
        huge = (FileRegion(0, 0, 1 << 31),)
        answers = {key: replace(one, records=huge) for key, one in found.partitions.items()}
        return replace(found, partitions=answers)


async def test_prepared_answer_that_cannot_be_composed_gives_its_files_back():
    """The connection ends by the defect, and nothing stays open."""
    archive = HugeArchive()
    archive.step = STEP
    frame = memoryview(request_frame(fetch_at(0)))
    head = RequestHead.read(frame)
    asked = asked_of(frame, head)
    with pytest.raises(struct.error):
        await fetched_ahead(asked, head, archive, timeout_seconds=5, bytes_max=math.inf)
    assert archive.released == 1
