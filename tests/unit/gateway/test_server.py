"""The gateway between a raw client and a scripted broker: order, limits, bad peers, back-pressure, TLS."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.gateway_peers import (
    METADATA,
    MIB,
    TopicArchive,
    closed,
    fetch,
    fetched,
    partition_of,
    plain_answer,
    plain_request,
    produce,
    running,
)
from tests.fakes.scripted_broker import scripted_broker
from tests.support.certificate import write_certificate
from tests.support.kafka_messages import (
    milliseconds,
    read_request,
    read_response,
    request_frame,
)
from tests.support.raw_kafka import connected
from tests.support.tls_relay import presenting, trusting
from tieringd.gateway.archive_answers import LONGEST_WAIT_SECONDS
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.frames import MAX_REQUESTS
from tieringd.gateway.server import GatewayServer


async def test_requests_and_answers_pass_byte_for_byte(broker):
    """Requests and answers of any size pass unchanged, in parts of any size."""
    async with running(broker) as server, connected(server.port) as client:
        for number, size in enumerate([12, 50, 70_000, 3 * MIB]):
            client.writer.write(plain_request(number, size=size)[:9])
            await client.writer.drain()
            client.writer.write(plain_request(number, size=size)[9:])
            _, frame, answers = await broker.next()
            assert frame == plain_request(number, size=size)
            answers.write(plain_answer(number, size=size))
            assert await client.frame() == plain_answer(number, size=size)
        assert server.counters.from_client_bytes == 12 + 50 + 70_000 + 3 * MIB


async def test_broker_is_connected_to_when_the_first_request_has_begun(broker):
    """A client that says nothing costs the broker nothing."""
    async with running(broker) as server, connected(server.port) as client, connected(server.port):
        client.writer.write(plain_request(1))
        await broker.next()
        assert broker.connections == 1
        assert server.open_connections == 2


async def test_pipelined_requests_are_passed_at_once_and_answered_in_order(broker):
    """All of them reach the broker before any is answered."""
    async with running(broker) as server, connected(server.port) as client:
        client.writer.write(b"".join(plain_request(number) for number in range(100)))
        taken = [await broker.next() for _ in range(100)]
        assert [head.correlation_id for head, _, _ in taken] == list(range(100))
        taken[0][2].write(b"".join(plain_answer(number) for number in range(100)))
        assert [await client.frame() for _ in range(100)] == [plain_answer(number) for number in range(100)]


async def test_more_requests_than_the_limit_wait_for_answers(broker):
    """A client that asks without reading is stopped, and served in the end."""
    async with running(broker) as server, connected(server.port) as client:
        client.writer.write(b"".join(plain_request(number) for number in range(600)))
        taken = [await broker.next() for _ in range(MAX_REQUESTS)]
        async with connected(server.port) as other:
            other.writer.write(plain_request(700))
            assert (await broker.next())[0].correlation_id == 700
        for number in range(600):
            _, frame, answers = taken[number] if number < len(taken) else await broker.next()
            assert frame == plain_request(number)
            answers.write(plain_answer(number))
            assert await client.frame() == plain_answer(number)


async def test_write_without_acknowledgement_takes_no_answer(broker):
    """The answer that comes next belongs to the next request."""
    async with running(broker) as server, connected(server.port) as client:
        client.send(produce(9, acks=0))
        client.writer.write(plain_request(5))
        _, frame, _ = await broker.next()
        assert read_request(frame, 0, 9) == produce(9, acks=0)
        _, _, answers = await broker.next()
        answers.write(plain_answer(5))
        assert await client.frame() == plain_answer(5)


@pytest.mark.parametrize("version", range(3, 13))
async def test_refused_write_is_answered_in_its_turn(broker, version):
    """The broker never sees it, and its answer comes after those of earlier requests."""
    archive = TopicArchive()
    archive.is_writable = False
    async with running(broker, archive) as server, connected(server.port) as client:
        client.writer.write(plain_request(5))
        client.send(produce(version, acks=-1))
        client.writer.write(plain_request(6))
        for number in (5, 6):
            head, _, answers = await broker.next()
            assert head.correlation_id == number
        answers.write(plain_answer(5))
        assert await client.frame() == plain_answer(5)
        answer = await client.answer(produce(version, acks=-1))
        (partition,) = answer.responses[0].partition_responses
        assert (partition.index, partition.error_code) == (4, ErrorCode.broker_not_available)
        answers.write(plain_answer(6))
        assert await client.frame() == plain_answer(6)


async def test_refused_write_without_acknowledgement_closes_the_connection(broker):
    """There is no answer in which it could be told."""
    archive = TopicArchive()
    archive.is_writable = False
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(produce(9, acks=0))
        assert await closed(client) == b""
        assert broker.requests.empty()


async def test_version_question_that_is_too_new_is_answered_here(broker):
    """The answer has the versions that the client may ask in, as a broker's does."""
    async with running(broker) as server, connected(server.port) as client:
        client.writer.write(struct.pack(">ihhi", 30, 18, 99, 3) + bytes(22))
        answer = read_response(await client.frame(), 18, 0)
        assert answer.error_code == ErrorCode.unsupported_version
        assert answer.api_keys[0].max_version == 4
        assert broker.connections == 0


BAD = {
    "2 GiB": b"\x7f\xff\xff\xff" + bytes(60),
    "negative": b"\xff\xff\xff\xff" + bytes(60),
    "too small": b"\x00\x00\x00\x04" + bytes(60),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
    "raw SASL": struct.pack(">ihhi", 20, 17, 0, 1) + b"\x00\x00\x00\x05PLAIN" + bytes(60),
    "Fetch of garbage": struct.pack(">ihhi", 40, 1, 12, 1) + b"\xff" * 32,
    "Produce of garbage": struct.pack(">ihhi", 40, 0, 9, 1) + b"\x7f" * 32,
    "Produce of tomorrow": struct.pack(">ihhi", 40, 0, 99, 1) + bytes(32),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_client_costs_only_its_own_connection(broker, name):
    """The bad client's connection is closed, the broker hears nothing of it, and others are served on."""
    async with running(broker) as server, connected(server.port) as good, connected(server.port) as bad:
        bad.writer.write(BAD[name])
        assert await closed(bad) == b""
        assert broker.connections == 0
        good.writer.write(plain_request(1))
        _, _, answers = await broker.next()
        answers.write(plain_answer(1))
        assert await good.frame() == plain_answer(1)
        assert server.counters.broken_connections == 1


@pytest.mark.parametrize("size", [1, 11, 40, 5000])
async def test_client_that_stops_in_the_middle_of_a_request_costs_what_it_sent(broker, size):
    """Nothing is set aside or counted for bytes that were announced and do not come."""
    async with running(broker) as server, connected(server.port) as client:
        frame = struct.pack(">ihhi", 90 * MIB, METADATA, 9, 1) + bytes(5000)
        client.writer.write(frame[:size])
        await client.writer.drain()
        async with connected(server.port) as other:
            other.writer.write(plain_request(1))
            await broker.next()
        assert server.buffered_bytes <= size


async def test_client_beyond_the_limit_is_closed(broker):
    """The others keep their connections, and a place that gets free is given again."""
    async with running(broker, max_connections=2, max_connections_per_host=2) as server:
        async with connected(server.port) as one:
            async with connected(server.port), connected(server.port) as third:
                assert await closed(third) == b""
            one.writer.write(plain_request(1))
            _, _, answers = await broker.next()
            answers.write(plain_answer(1))
            assert await one.frame() == plain_answer(1)
        assert server.counters.refused_connections == 1


async def test_connection_on_which_nothing_moves_is_closed(broker):
    """A peer whose machine is gone does not keep its place."""
    async with running(broker, idle_timeout_seconds=0.05) as server, connected(server.port) as client:
        assert await closed(client) == b""


@pytest.mark.parametrize(
    "answer", [plain_answer(2), b"\x00\x00\x00\x03\x00\x00\x00\x01", b"\xff\xff\xff\xff\x00\x00\x00\x01"]
)
async def test_answer_without_a_request_closes_the_connection(broker, answer):
    """No client gets it. A response with an impossible size closes the connection as well."""
    async with running(broker) as server, connected(server.port) as client:
        client.writer.write(plain_request(1))
        _, _, answers = await broker.next()
        answers.write(answer)
        assert await closed(client) == b""
        assert server.counters.broken_connections == 1


async def test_broker_that_is_away_is_a_disconnect():
    """The client sees what it would see of the broker itself."""
    # The port stays taken, so that no other process listens there.
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = GatewayServer(GatewaySettings("127.0.0.1", 0, "127.0.0.1", unused.getsockname()[1]))
        await server.start()
        async with connected(server.port) as client:
            client.writer.write(plain_request(1))
            assert await closed(client) == b""
        await server.close()


async def test_what_the_broker_said_last_still_arrives(broker):
    """A broker that answers and closes, as after a failed authentication, is heard to the end."""
    async with running(broker) as server, connected(server.port) as client:
        client.writer.write(plain_request(1))
        _, _, answers = await broker.next()
        answers.write(plain_answer(1, size=2 * MIB))
        answers.close()
        assert await closed(client) == plain_answer(1, size=2 * MIB)


async def test_archived_partition_replaces_an_answer_that_comes_in_parts(broker):
    """
    The archived partition replaces the answer, however the broker's bytes arrive.

    Another answer follows right behind.
    """
    archive = TopicArchive()
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch())
        client.writer.write(plain_request(9))
        head, _, answers = await broker.next()
        frame = fetched(head, {"old": {0: {"error_code": 1}}}) + plain_answer(9)
        for at in range(0, len(frame), 7):
            answers.write(frame[at : at + 7])
            await answers.drain()
            await asyncio.sleep(0)
        answer = await client.answer(fetch())
        assert partition_of(answer, "old").records == b"archived"
        assert await client.frame() == plain_answer(9)
        assert archive.released == 1


async def test_partition_that_is_not_archived_stays_out_of_range(broker):
    """The archive is not even asked, and the answer is the broker's, byte for byte."""
    archive = TopicArchive()
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch(("new",)))
        head, _, answers = await broker.next()
        frame = fetched(head, {"new": {0: {"error_code": 1}}})
        answers.write(frame)
        assert await client.frame() == frame
        assert archive.questions == []


async def test_answers_wait_for_the_archive_and_keep_their_order(broker):
    """Later answers of the broker come after it, and the client may even ask more."""
    archive = TopicArchive()
    archive.may_answer.clear()
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch())
        head, _, answers = await broker.next()
        client.writer.write(plain_request(9))
        await broker.next()
        answers.write(fetched(head, {"old": {0: {"error_code": 1}}}) + plain_answer(9))
        await archive.is_asked.wait()
        client.writer.write(plain_request(10))
        assert (await broker.next())[0].correlation_id == 10
        archive.may_answer.set()
        assert partition_of(await client.answer(fetch()), "old").records == b"archived"
        assert await client.frame() == plain_answer(9)
        answers.write(plain_answer(10))
        assert await client.frame() == plain_answer(10)


async def test_client_that_goes_while_the_archive_reads_ends_the_reading(broker):
    """The answer for such a client would have no receiver."""
    archive = TopicArchive()
    archive.may_answer.clear()
    async with running(broker, archive) as server:
        async with connected(server.port) as client:
            client.send(fetch())
            head, _, answers = await broker.next()
            answers.write(fetched(head, {"old": {0: {"error_code": 1}}}))
            async with asyncio.timeout(20):
                await archive.is_asked.wait()
        async with asyncio.timeout(20):
            await archive.is_cancelled.wait()
        assert server.open_connections == 0


async def test_archive_that_is_late_is_waited_for_as_long_as_the_client_says(broker):
    """The answer after that has no records, no error, and unknown bounds: the client asks again."""
    archive = TopicArchive()
    archive.may_answer.clear()
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch(max_wait=milliseconds(30)))
        head, _, answers = await broker.next()
        answers.write(fetched(head, {"old": {0: {"error_code": 1}}}))
        said = partition_of(await client.answer(fetch()), "old")
        assert (said.error_code, said.records, said.high_watermark) == (ErrorCode.none, b"", -1)
        assert archive.questions[0].wait_seconds == 0.03
        assert server.counters.unread_answers == 1


async def test_archive_is_waited_for_some_seconds_at_most(broker):
    """The wait has a bound, whatever the client asks for."""
    archive = TopicArchive()
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch(max_wait=milliseconds(500_000)))
        head, _, answers = await broker.next()
        answers.write(fetched(head, {"old": {0: {"error_code": 1}}}))
        await client.answer(fetch())
        assert archive.questions[0].wait_seconds == LONGEST_WAIT_SECONDS


async def test_records_of_the_broker_do_not_wait_for_the_archive(broker):
    """The broker's records go out at once, and so does what the client sent behind its Fetch."""
    archive = TopicArchive()
    archive.may_answer.clear()
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch(("old", "live"), max_wait=milliseconds(500_000)))
        client.writer.write(plain_request(9))
        head, _, answers = await broker.next()
        topics = {"old": {0: {"error_code": 1}}, "live": {0: {"records": b"live-record"}}}
        answers.write(fetched(head, topics))
        behind, _, _ = await broker.next()
        answers.write(plain_answer(behind.correlation_id))
        began = asyncio.get_running_loop().time()
        answer = await client.answer(fetch())
        assert await client.frame() == plain_answer(9)
        assert asyncio.get_running_loop().time() - began < 2
        assert partition_of(answer, "live").records == b"live-record"
        assert partition_of(answer, "old").error_code == ErrorCode.none


async def test_archived_partition_late_in_a_large_answer_comes_with_the_next_one(broker):
    """The first answer says "nothing new" for it; the next one is asked to be small, and is completed."""
    archive = TopicArchive()
    records = bytes(range(256)) * 4 * 5000
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch(("new", "old"), max_bytes=50 * MIB))
        head, frame, answers = await broker.next()
        assert read_request(frame, 1, 12).max_bytes == 50 * MIB
        topics = {"new": {0: {"records": records}}, "old": {0: {"error_code": 1}}}
        answers.write(fetched(head, topics))
        answer = await client.answer(fetch())
        assert partition_of(answer, "new").records == records
        assert partition_of(answer, "old").error_code == ErrorCode.none
        assert partition_of(answer, "old").records == b""
        assert archive.questions == []

        client.send(fetch(("new", "old"), max_bytes=50 * MIB))
        head, frame, answers = await broker.next()
        assert read_request(frame, 1, 12).max_bytes == MIB
        topics["new"][0]["records"] = records[:MIB]
        answers.write(fetched(head, topics))
        answer = await client.answer(fetch())
        assert partition_of(answer, "new").records == records[:MIB]
        assert partition_of(answer, "old").records == b"archived"
        (question,) = archive.questions
        assert question.max_bytes == 50 * MIB - MIB
        assert not question.needs_a_batch


async def test_archived_partition_early_in_a_large_answer_comes_with_it(broker):
    """Nothing has been passed on when it is found, so the whole answer is held."""
    archive = TopicArchive()
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(fetch(("old", "new")))
        head, _, answers = await broker.next()
        answers.write(fetched(head, {"old": {0: {"error_code": 1}}, "new": {0: {"records": bytes(MIB)}}}))
        answer = await client.answer(fetch())
        assert partition_of(answer, "old").records == b"archived"
        assert partition_of(answer, "new").records == bytes(MIB)


async def test_what_is_held_is_given_back_when_the_connection_ends(broker):
    """The gateway holds nothing in the end, even if a request and an answer never became whole."""
    async with running(broker) as server, connected(server.port) as client:
        request = request_frame(fetch(), correlation_id=1)
        client.writer.write(bytes(request) + bytes(request)[:-1])
        head, _, answers = await broker.next()
        answers.write(fetched(head, {"new": {0: {"records": bytes(1000)}}})[:-1])
        async with connected(server.port) as other:
            other.writer.write(plain_request(1))
            await broker.next()
        assert server.buffered_bytes > 0
        client.writer.write(bytes(request)[-1:])
        await broker.next()


@pytest.mark.parametrize("version", [4, 7, 11, 12])
async def test_large_answers_pass_unchanged(broker, version):
    """Several partitions with large records arrive as they were sent, through the kernel or not."""
    async with running(broker, TopicArchive()) as server, connected(server.port) as client:
        topics = {
            "a": {n: {"records": bytes([n]) * (900_000 + n)} for n in range(4)},
            "b": {0: {"records": b"b"}},
        }
        for _ in range(3):
            client.send(fetch(("a",), version=version))
            head, _, answers = await broker.next()
            frame = fetched(head, topics, version=version)
            answers.write(frame)
            assert await client.frame() == frame


async def test_slow_client_holds_back_the_broker(broker):
    """The memory for a slow client is bounded, however much the broker has to say."""
    async with running(broker) as server:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", server.port))
            await loop.sock_sendall(slow, plain_request(1) + request_frame(fetch(), correlation_id=2))
            _, _, answers = await broker.next()
            head, _, _ = await broker.next()
            frame = plain_answer(1, size=20 * MIB) + fetched(head, {"new": {0: {"records": bytes(10 * MIB)}}})
            answers.write(frame)
            received = bytearray()
            while len(received) < len(frame):
                chunk = await loop.sock_recv(slow, 1 << 18)
                assert chunk
                received += chunk
                for _ in range(10):
                    # Turns of the loop in which a gateway without bounds would read on.
                    await asyncio.sleep(0)
                assert server.buffered_bytes <= MIB
            assert received == frame


async def test_slow_broker_holds_back_the_client(broker):
    """A request that the broker does not take stays with the client."""
    async with running(broker) as server, connected(server.port) as client:
        client.writer.write(plain_request(1))
        await broker.next()
        client.writer.write(plain_request(2, size=60 * MIB))
        async with asyncio.timeout(60):
            while broker.requests.empty():
                assert server.buffered_bytes <= MIB
                await asyncio.sleep(0)
        assert (await broker.next())[1] == plain_request(2, size=60 * MIB)


async def test_gateway_without_budget_still_serves(broker):
    """A gateway without a budget reads in small steps, and holds nothing that can pass."""
    async with running(broker, TopicArchive(), buffered_bytes=0) as server, connected(server.port) as client:
        client.send(fetch(("new",)))
        head, _, answers = await broker.next()
        frame = fetched(head, {"new": {0: {"records": bytes(500_000)}}})
        answers.write(frame)
        assert await client.frame() == frame


async def test_closing_waits_for_answers_that_are_due(broker):
    """A client gets its answer, no further request is taken, and idle ones are closed at once."""
    server = GatewayServer(GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port))
    await server.start()
    async with connected(server.port) as busy, connected(server.port) as idle:
        busy.writer.write(plain_request(1))
        _, _, answers = await broker.next()
        closing = asyncio.create_task(server.close(grace_seconds=20))
        assert await closed(idle) == b""
        answers.write(plain_answer(1))
        assert await closed(busy) == plain_answer(1)
        await closing
    assert server.open_connections == 0


async def test_tls_on_both_sides(tmp_path):
    """Records, requests and archived answers pass through two handshakes."""
    certificate = write_certificate(tmp_path / "certificate.pem")
    archive = TopicArchive()
    async with scripted_broker(tls=presenting(certificate)) as broker:
        settings = {"client_tls": presenting(certificate), "broker_tls": trusting(certificate)}
        async with running(broker, archive, **settings) as server:
            async with connected(server.port, tls=trusting(certificate)) as client:
                client.writer.write(plain_request(1, size=2 * MIB))
                _, frame, answers = await broker.next()
                assert frame == plain_request(1, size=2 * MIB)
                answers.write(plain_answer(1, size=3 * MIB))
                assert await client.frame() == plain_answer(1, size=3 * MIB)
                client.send(fetch(("new", "old")))
                head, _, answers = await broker.next()
                topics = {"new": {0: {"records": bytes(900_000)}}, "old": {0: {"error_code": 1}}}
                answers.write(fetched(head, topics))
                answer = await client.answer(fetch())
                assert len(partition_of(answer, "new").records) == 900_000
            async with connected(server.port) as plain:
                plain.writer.write(b"no TLS at all" * 10)
                await closed(plain)


async def test_last_record_of_a_burst_is_not_left_in_the_cipher(tmp_path, broker):
    """Bytes left in the cipher are handled, though the socket is not readable for them."""
    certificate = write_certificate(tmp_path / "certificate.pem")
    async with (
        # Without a budget it reads 16 KiB at once, less than the two records below.
        running(broker, client_tls=presenting(certificate), buffered_bytes=0) as server,
        connected(server.port, tls=trusting(certificate)) as client,
    ):
        client.writer.write(b"".join(plain_request(number) for number in range(MAX_REQUESTS + 1)))
        taken = [await broker.next() for _ in range(MAX_REQUESTS)]
        # The gateway reads nothing now, so both records are in its socket before it goes on.
        large = plain_request(999, size=20_000)
        client.writer.write(large[:10_000])
        client.writer.write(large[10_000:])
        taken[0][2].write(b"".join(plain_answer(number) for number in range(MAX_REQUESTS)))
        assert (await broker.next())[0].correlation_id == MAX_REQUESTS
        assert (await broker.next())[1] == large


async def test_broker_whose_certificate_is_not_trusted_is_a_disconnect(tmp_path):
    """Nothing is sent to it."""
    certificate = write_certificate(tmp_path / "certificate.pem")
    other = write_certificate(tmp_path / "other.pem")
    async with (
        scripted_broker(tls=presenting(certificate)) as broker,
        running(broker, broker_tls=trusting(other)) as server,
        connected(server.port) as client,
    ):
        client.writer.write(plain_request(1))
        assert await closed(client) == b""
        assert broker.requests.empty()
