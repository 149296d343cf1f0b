"""Encrypted connections that can be lent to threads, used by aiohttp with a server that a test controls."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
from contextlib import asynccontextmanager

import aiohttp
import pytest
import uvloop

from tests.support.executors import RecordingExecutor
from tests.support.raw_http import NOBODY, Exchange, serving
from tieringd.storage.body import CHUNK_BYTES, FileBody
from tieringd.storage.calls import send_once
from tieringd.storage.tls_transport import TlsConnector, TlsTransport

LARGE = 24 << 20  # More than the sockets of a connection ever hold.
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture
def executor():
    with RecordingExecutor() as executor:
        yield executor


@pytest.fixture
def client_tls(certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request):
    """Return a function that runs a coroutine on a loop of each kind, beside the test's own."""

    async def run(scenario) -> None:
        def work() -> None:
            with asyncio.Runner(loop_factory=request.param) as runner:
                runner.run(scenario)

        await asyncio.to_thread(work)

    return run


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@asynccontextmanager
async def session_over(tls: ssl.SSLContext, *, connect_seconds: float | None = 60):
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds)
    async with aiohttp.ClientSession(connector=TlsConnector(ssl=tls), timeout=timeout) as session:
        send_once(session)
        yield session


async def answer_length(exchange: Exchange) -> None:
    await exchange.answer("200 OK", str(len(await exchange.read_body())).encode())


async def test_large_body_is_encrypted_by_one_thread(slice_of, executor, server_tls, client_tls, run):
    """A thread encrypts a large file in few pieces of work: it, its tail, and perhaps one after a ticket."""
    file_slice, bodies = slice_of(content(LARGE)), []

    async def keep(exchange: Exchange) -> None:
        bodies.append(await exchange.read_body())
        await exchange.answer("200 OK")

    async def scenario() -> None:
        body = FileBody(file_slice, executor=executor, stall_seconds=20)
        async with (
            serving(keep, tls=server_tls) as url,
            session_over(client_tls) as session,
            session.put(url, data=body) as response,
        ):
            assert response.status == 200
        assert body.is_sent

    await run(scenario())
    assert bodies == [content(LARGE)]
    assert len(executor.submitted) <= 4  # The loop's own way would be a piece for each chunk.
    assert LARGE // CHUNK_BYTES > 4


async def test_connection_serves_requests_of_every_kind(slice_of, executor, server_tls, client_tls, run):
    """Files, bytes and requests without a body follow each other on one connection, lent or not."""
    file_slice, connections = slice_of(content(LARGE)), []

    async def handle(exchange: Exchange) -> None:
        connections.append(exchange.connection)
        await answer_length(exchange)

    async def scenario() -> None:
        async with serving(handle, tls=server_tls) as url, session_over(client_tls) as session:
            for _ in range(3):
                for body in (FileBody(file_slice, executor=executor, stall_seconds=20), b"few", None):
                    async with session.put(url, data=body) as response:
                        assert int(await response.read()) == len(body or b"")

    await run(scenario())
    assert connections == [1] * 9


async def test_answer_before_the_end_of_a_body_is_heard(slice_of, executor, server_tls, client_tls, run):
    """A server that refuses and stops reading is understood at once, long before the body would stall."""
    file_slice = slice_of(content(LARGE))

    async def refuse(exchange: Exchange) -> None:
        await exchange.reader.readexactly(CHUNK_BYTES)
        await exchange.answer("503 Slow Down", b"later", Connection="close")
        await exchange.reader.read()

    async def scenario() -> None:
        body = FileBody(file_slice, executor=executor, stall_seconds=600)
        async with serving(refuse, tls=server_tls) as url, session_over(client_tls) as session:
            async with session.put(url, data=body) as response:
                assert (response.status, await response.read()) == (503, b"later")
            await body.stop()
        assert not body.is_sent

    await run(scenario())
    assert executor.is_idle()


async def test_interim_answer_does_not_end_a_body(slice_of, executor, server_tls, client_tls, run):
    """An interim answer is heard between two pieces of the body, which then goes on."""
    file_slice, bodies = slice_of(content(LARGE)), []

    async def handle(exchange: Exchange) -> None:
        begun = await exchange.reader.readexactly(CHUNK_BYTES)
        exchange.writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        await exchange.writer.drain()
        bodies.append(begun + await exchange.reader.readexactly(exchange.length - CHUNK_BYTES))
        await exchange.answer("200 OK")

    async def scenario() -> None:
        body = FileBody(file_slice, executor=executor, stall_seconds=20)
        async with (
            serving(handle, tls=server_tls) as url,
            session_over(client_tls) as session,
            session.put(url, data=body) as response,
        ):
            assert response.status == 200

    await run(scenario())
    assert bodies == [content(LARGE)]


async def test_many_connections_do_not_mix(slice_of, executor, server_tls, client_tls, run):
    """Bodies that are encrypted at the same time arrive each as it was."""
    slices, bodies = [slice_of(content((4 << 20) + number)) for number in range(4)], {}

    async def keep(exchange: Exchange) -> None:
        bodies[exchange.path] = await exchange.read_body()
        await exchange.answer("200 OK")

    async def scenario() -> None:
        async def put(url: str, number: int) -> None:
            body = FileBody(slices[number], executor=executor, stall_seconds=20)
            async with session.put(f"{url}/{number}", data=body) as response:
                assert response.status == 200

        async with serving(keep, tls=server_tls) as url, session_over(client_tls) as session:
            await asyncio.gather(*(put(url, number) for number in range(4)))

    await run(scenario())
    assert bodies == {f"/{number}": content((4 << 20) + number) for number in range(4)}


async def test_bytes_that_the_peer_takes_slowly_wait_in_order(server_tls, client_tls, run):
    """The loop's own writes keep what the socket does not take, and stop their writer meanwhile."""
    pieces, received = [content((1 << 20) + number) for number in range(24)], []

    async def scenario() -> None:
        may_read = asyncio.Event()
        written = 0

        async def handle(exchange: Exchange) -> None:
            await may_read.wait()
            received.append(await exchange.read_body())
            await exchange.answer("200 OK")

        async def produce():
            nonlocal written
            for piece in pieces:
                yield piece
                written += 1

        async with serving(handle, tls=server_tls) as url, session_over(client_tls) as session:
            headers = {"Content-Length": str(sum(map(len, pieces)))}
            request = asyncio.create_task(session.put(url, data=produce(), headers=headers))
            before = -1
            while written != before or not written:
                before = written
                await asyncio.sleep(0.05)
            assert written < len(pieces)
            may_read.set()
            async with await request as response:
                assert response.status == 200

    await run(scenario())
    assert received == [b"".join(pieces)]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_both_versions_of_tls_are_spoken(slice_of, executor, server_tls, client_tls, version):
    """Servers that know only one of the versions in use are served alike."""
    server_tls.minimum_version = server_tls.maximum_version = version
    body = FileBody(slice_of(content(LARGE)), executor=executor, stall_seconds=20)
    async with (
        serving(answer_length, tls=server_tls) as url,
        session_over(client_tls) as session,
        session.put(url, data=body) as response,
    ):
        assert await response.read() == str(LARGE).encode()


async def test_certificate_that_is_not_trusted_is_refused(server_tls, run):
    """No request is sent to a server whose certificate is not trusted."""

    async def scenario() -> None:
        async with (
            serving(answer_length, tls=server_tls) as url,
            session_over(ssl.create_default_context()) as session,
        ):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url)

    await run(scenario())


async def test_certificate_of_another_host_is_refused(server_tls, client_tls, run):
    """A trusted certificate counts only for the names in it."""

    async def scenario() -> None:
        async with serving(answer_length, tls=server_tls) as url, session_over(client_tls) as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url.replace("127.0.0.1", "localhost"))

    await run(scenario())


async def test_server_without_tls_is_refused(client_tls, run):
    """A server that speaks plain HTTP fails the handshake."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with server, session_over(client_tls) as session:
            with pytest.raises(aiohttp.ClientConnectorSSLError):
                await session.get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    await run(scenario())


async def test_handshake_that_hangs_is_given_up(client_tls, run):
    """A server that accepts and says nothing costs the time allowed for connecting, not more."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with session_over(client_tls, connect_seconds=0.1) as session:
                with pytest.raises(aiohttp.ConnectionTimeoutError):
                    await session.get(f"https://127.0.0.1:{silent.getsockname()[1]}")

    await run(scenario())


async def test_server_that_is_not_there_is_no_tls_error(client_tls, run):
    """A refused connection is the connector's error, as without TLS."""

    async def scenario() -> None:
        async with session_over(client_tls) as session:
            with pytest.raises(aiohttp.ClientConnectorError) as caught:
                await session.get(NOBODY.replace("http", "https"))
            assert not isinstance(caught.value, aiohttp.ClientSSLError)

    await run(scenario())


async def test_connection_that_the_server_closed_is_not_used_again(server_tls, client_tls, run):
    """The next request opens another connection if the server ended an idle one."""
    connections = []

    async def scenario() -> None:
        is_closed = asyncio.Event()

        async def handle(exchange: Exchange) -> None:
            connections.append(exchange.connection)
            await exchange.answer("200 OK")
            if exchange.connection == 1:
                exchange.writer.close()
                await exchange.writer.wait_closed()
                is_closed.set()

        async with serving(handle, tls=server_tls) as url, session_over(client_tls) as session:
            async with session.get(url) as response:
                await response.read()
            await is_closed.wait()
            async with session.get(url) as response:
                await response.read()

    await run(scenario())
    assert connections == [1, 2]


async def test_connection_that_is_closed_while_lent_ends_with_its_loan(server_tls, client_tls, run):
    """Closing interrupts the borrower at once, and ends the connection only when the loan is over."""

    async def scenario() -> None:
        at_work, may_end = asyncio.Event(), asyncio.Event()

        async def handle(exchange: Exchange) -> None:
            at_work.set()
            await may_end.wait()
            await exchange.answer("200 OK")

        async with serving(handle, tls=server_tls) as url, session_over(client_tls) as session:
            request = asyncio.create_task(session.get(url))
            await at_work.wait()
            (protocol,) = [each for each in session.connector._acquired if each.transport is not None]
            transport = protocol.transport
            assert isinstance(transport, TlsTransport)
            with transport.lent() as connection:
                transport.close()
                assert transport.is_closing()
                assert connection.fileno() != -1
                assert connection.recv(1) == b""  # Shut, but not yet given up.
            with pytest.raises(ConnectionResetError), transport.lent():
                pass
            with pytest.raises(aiohttp.ClientError):
                await request
            may_end.set()

    await run(scenario())


async def test_connections_leave_no_descriptor_open(slice_of, executor, server_tls, client_tls, certificate):
    """Nothing stays open after a body that arrives, fails or is cancelled, and after a failed handshake."""
    file_slice = slice_of(content(LARGE))

    async def handle(exchange: Exchange) -> None:
        if exchange.path == "/reset":
            await exchange.reader.readexactly(CHUNK_BYTES)
            exchange.reset()
        else:
            await answer_length(exchange)

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    async with serving(handle, tls=server_tls) as url:
        async with session_over(client_tls) as session:
            body = FileBody(file_slice, executor=executor, stall_seconds=20)
            async with session.put(f"{url}/", data=body) as response:
                await response.read()
            with pytest.raises(aiohttp.ClientError):
                await session.put(f"{url}/reset", data=body)
            await body.stop()
        async with session_over(ssl.create_default_context()) as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url)
    for _ in range(20):  # The last closes happen in the loop's next rounds.
        await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
