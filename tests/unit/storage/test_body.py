"""The body of a PUT, sent by aiohttp to a server that a test controls."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from contextlib import suppress

import aiohttp
import pytest
import uvloop

from tests.support.executors import RecordingExecutor
from tests.support.raw_http import Exchange, serving
from tieringd.errors import LocalFileError
from tieringd.storage.base import FileSlice
from tieringd.storage.body import CHUNK_BYTES, SENDFILE_FROM_BYTES, FileBody
from tieringd.storage.tls_transport import TlsConnector

LARGE = 24 << 20  # More than the sockets of a connection ever hold.
SMALL = SENDFILE_FROM_BYTES - 1


@pytest.fixture
def executor():
    with RecordingExecutor() as executor:
        yield executor


@pytest.fixture
def both_ends_of_tls(server_tls, certificate):
    return server_tls, ssl.create_default_context(cafile=str(certificate))


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def body_of(file_slice: FileSlice, executor, *, stall_seconds: float = 20) -> FileBody:
    return FileBody(file_slice, executor=executor, stall_seconds=stall_seconds)


async def send(url: str, body: FileBody, *, tls: ssl.SSLContext | bool = True) -> int:
    async with (
        aiohttp.ClientSession(connector=TlsConnector()) as session,
        session.put(url, data=body, ssl=tls) as response,
    ):
        return response.status


async def run_on(new_loop, scenario) -> None:
    """Run a coroutine on a loop of the given kind, in a thread: the test's own loop stays as it is."""

    def run() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(scenario)

    await asyncio.to_thread(run)


class Sink:
    """Answers 200 to every PUT, and keeps the bodies."""

    def __init__(self):
        self.bodies = []

    async def __call__(self, exchange: Exchange) -> None:
        self.bodies.append(await exchange.read_body())
        await exchange.answer("200 OK")


class HalfReader:
    """A server that reads a part of the first body, says so, and goes on when it may."""

    def __init__(self):
        self.has_begun = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.rest = asyncio.get_running_loop().create_future()

    async def __call__(self, exchange: Exchange) -> None:
        received = len(await exchange.reader.readexactly(CHUNK_BYTES))
        self.has_begun.set()
        await self.may_go_on.wait()
        # A client that gives up may end the connection in order, or reset it.
        with suppress(ConnectionError):
            received += len(await exchange.read_to_end())
        self.rest.set_result(received)


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("size", [1, SMALL, SENDFILE_FROM_BYTES, LARGE])
async def test_body_arrives_whole_on_both_event_loops(slice_of, executor, size, new_loop):
    """The server receives exactly the slice, whatever its size and whichever loop runs the client."""
    data = content(size)
    body = body_of(slice_of(data), executor)

    async def scenario() -> None:
        sink = Sink()
        async with serving(sink) as url:
            assert await send(url, body) == 200
        assert sink.bodies == [data]
        assert body.is_sent

    await run_on(new_loop, scenario())


async def test_body_stays_behind_the_cipher_under_tls(slice_of, executor, server_tls, certificate):
    """A large body is encrypted under TLS, and the server that decrypts it receives the slice."""
    data, sink = content(LARGE), Sink()
    client_tls = ssl.create_default_context(cafile=str(certificate))
    async with serving(sink, tls=server_tls) as url:
        assert await send(url, body_of(slice_of(data), executor), tls=client_tls) == 200
    assert sink.bodies == [data]


async def test_connection_is_used_again_after_a_body(slice_of, executor):
    """A body leaves its connection in order: requests before and after it share one."""
    connections = []

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        connections.append(exchange.connection)
        await exchange.answer("200 OK")

    async with serving(handle) as url, aiohttp.ClientSession() as session:
        for size in (LARGE, 10, SENDFILE_FROM_BYTES, SMALL):
            async with session.put(url, data=body_of(slice_of(content(size)), executor)) as response:
                await response.read()
        async with session.put(url, data=b"bytes") as response:
            await response.read()
    assert connections == [1] * 5


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_short_file_fails_and_its_connection_is_not_used_again(slice_of, executor, size):
    """A file shorter than its slice is reported, and the half-used connection is given up."""
    whole = slice_of(content(size))
    short = FileSlice(whole.fd, whole.position, size + 1000)
    received, connections = asyncio.get_running_loop().create_future(), []

    async def handle(exchange: Exchange) -> None:
        connections.append(exchange.connection)
        if not received.done():
            received.set_result(len(await exchange.read_to_end()))
            return
        await exchange.read_body()
        await exchange.answer("200 OK")

    body = body_of(short, executor)
    async with serving(handle) as url, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.put(url, data=body)
        assert await received < size + 1000
        async with session.put(url, data=body_of(whole, executor)) as response:
            assert response.status == 200
    assert isinstance(body.failure, LocalFileError)
    assert not body.is_sent
    assert connections == [1, 2]


async def test_file_truncated_under_way_is_reported(slice_of, executor):
    """A file that loses its end while it is being sent fails the body; the process lives."""
    file_slice = slice_of(content(LARGE))
    body = body_of(file_slice, executor)
    server = HalfReader()
    async with serving(server) as url:
        task = asyncio.create_task(send(url, body))
        await server.has_begun.wait()
        os.ftruncate(file_slice.fd, file_slice.position + 2 * CHUNK_BYTES)
        server.may_go_on.set()
        with pytest.raises(aiohttp.ClientError):
            await task
    assert isinstance(body.failure, LocalFileError)
    assert "ends at byte" in str(body.failure)


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("is_tls", [False, True], ids=["sendfile", "tls"])
async def test_cancelled_body_ends_its_thread_before_stop_returns(
    slice_of, executor, both_ends_of_tls, new_loop, is_tls
):
    """No thread works after a cancelled request and `stop`, and the server has less than was promised."""
    body = body_of(slice_of(content(LARGE)), executor)
    server_tls, client_tls = both_ends_of_tls if is_tls else (None, True)

    async def scenario() -> None:
        server = HalfReader()
        async with serving(server, tls=server_tls) as url:
            task = asyncio.create_task(send(url, body, tls=client_tls))
            await server.has_begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await body.stop()
            assert executor.submitted
            assert executor.is_idle()
            server.may_go_on.set()
            assert await server.rest < LARGE
        assert not body.is_sent

    await run_on(new_loop, scenario())


async def test_stop_interrupts_a_body_that_was_not_cancelled(slice_of, executor):
    """`stop` alone ends the sending: the request fails, and no thread works."""
    body = body_of(slice_of(content(LARGE)), executor)
    server = HalfReader()
    async with serving(server) as url:
        task = asyncio.create_task(send(url, body))
        await server.has_begun.wait()
        await body.stop()
        assert executor.is_idle()
        with pytest.raises(aiohttp.ClientError):
            await task


async def test_stop_survives_being_cancelled(slice_of, executor):
    """A `stop` that is itself cancelled still waits for the thread, and is cancelled then."""
    body = body_of(slice_of(content(LARGE)), executor)
    server = HalfReader()
    async with serving(server) as url:
        sending = asyncio.create_task(send(url, body))
        await server.has_begun.wait()
        stopping = asyncio.create_task(body.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert executor.is_idle()
        with pytest.raises(aiohttp.ClientError):
            await sending


@pytest.mark.parametrize("is_tls", [False, True], ids=["sendfile", "tls"])
async def test_peer_that_takes_nothing_is_given_up(slice_of, executor, server_tls, certificate, is_tls):
    """A request fails if the peer takes no byte for the allowed time."""
    body = body_of(slice_of(content(LARGE)), executor, stall_seconds=0.1)
    client_tls = ssl.create_default_context(cafile=str(certificate)) if is_tls else True
    server = HalfReader()
    async with serving(server, tls=server_tls if is_tls else None) as url:
        with pytest.raises((aiohttp.ClientError, TimeoutError)):
            await send(url, body, tls=client_tls)
        await body.stop()
    assert executor.is_idle()
    assert not body.is_sent


async def test_peer_that_dies_under_way_fails_the_request(slice_of, executor):
    """A connection reset in the middle of a body is a connection error, not a wait."""
    body = body_of(slice_of(content(LARGE)), executor)

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(CHUNK_BYTES)
        exchange.reset()

    async with serving(handle) as url:
        with pytest.raises(aiohttp.ClientError):
            await send(url, body)
        await body.stop()
    assert executor.is_idle()
    assert body.failure is None
    assert not body.is_sent


async def test_sending_leaves_no_descriptor_open(slice_of, executor):
    """The duplicate of the socket is closed after success and after failure."""
    file_slice = slice_of(content(LARGE))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    async with serving(Sink()) as url:
        await send(url, body_of(file_slice, executor))
        with pytest.raises(aiohttp.ClientError):
            await send(url, body_of(FileSlice(file_slice.fd, 0, 2 * LARGE), executor))
    # The ends of the failed connection close in the loop's next rounds.
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_body_is_a_file_to_botocore(slice_of, executor):
    """A body has a length, and can be read, asked for its position, and rewound."""
    body = body_of(slice_of(b"0123456789"), executor)
    assert (len(body), body.tell(), body.read(4), body.tell(), body.read()) == (10, 0, b"0123", 4, b"456789")
    assert body.seek(0, os.SEEK_END) == 10
    assert body.seek(0) == 0
    assert body.read(3) == b"012"


def test_body_refuses_to_become_text(slice_of, executor):
    """Nothing turns a segment into a string by accident."""
    with pytest.raises(TypeError):
        body_of(slice_of(b"0123456789"), executor).decode()
