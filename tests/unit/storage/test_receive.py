"""The body of a large answer, received from a server that a test controls, with TLS and without."""

from __future__ import annotations

import asyncio
import functools
import gzip
import random
import socket
import ssl

import aiohttp
import pytest
import uvloop

from tests.support.executors import RecordingExecutor
from tests.support.raw_http import Exchange, serving
from tieringd.errors import LocalFileError
from tieringd.storage.ranges import FIRST_PIECE_BYTES, WINDOW_BYTES, Windows
from tieringd.storage.receive import RECEIVE_FROM_BYTES, receive, receive_in_windows
from tieringd.storage.tls_transport import TlsConnector

LARGE = 24 << 20  # More than the sockets of a connection ever hold.
SMALL = RECEIVE_FROM_BYTES - 1
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture
def executor():
    with RecordingExecutor() as executor:
        yield executor


@pytest.fixture(params=["plain", "tls"])
def both_ends(request, server_tls, certificate):
    if request.param == "plain":
        return None, True
    return server_tls, ssl.create_default_context(cafile=str(certificate))


@functools.lru_cache(maxsize=8)
def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=TlsConnector())


async def get(session, url: str, executor, tls, *, stall_seconds: float = 20) -> bytes:
    async with session.get(url, ssl=tls) as response:
        return await receive(response, executor=executor, stall_seconds=stall_seconds)


async def get_in_windows(session, url: str, executor, tls, windows: Windows, *, stall_seconds: float = 20):
    """Get a body as it is handed on; return it with the sizes of its pieces."""
    found, sizes = bytearray(), []

    def take(piece: memoryview) -> None:
        found.extend(piece)
        sizes.append(len(piece))

    async with session.get(url, ssl=tls) as response:
        count = await receive_in_windows(
            response, take, windows=windows, executor=executor, stall_seconds=stall_seconds
        )
    assert count == len(found)
    return bytes(found), sizes


async def run_on(new_loop, scenario) -> None:
    """Run a coroutine on a loop of the given kind, in a thread: the test's own loop stays as it is."""

    def run() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(scenario)

    await asyncio.to_thread(run)


class Half:
    """Promises a large body and sends half of it; what then follows, a test says."""

    def __init__(self) -> None:
        self.is_sent = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def send(self, exchange: Exchange) -> None:
        exchange.writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {LARGE}\r\n\r\n".encode())
        exchange.writer.write(content(LARGE)[: LARGE // 2])
        await exchange.writer.drain()
        self.is_sent.set()
        await self.may_go_on.wait()

    async def send_both(self, exchange: Exchange) -> None:
        await self.send(exchange)
        exchange.writer.write(content(LARGE)[LARGE // 2 :])
        await exchange.writer.drain()


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("size", [0, 1, SMALL, RECEIVE_FROM_BYTES, LARGE])
async def test_receive_gives_the_bytes_and_keeps_the_connection(new_loop, size, both_ends, executor):
    """Answers of every size arrive whole, one after the other on the same connection."""
    server_tls, client_tls = both_ends
    connections = []

    async def answer(exchange: Exchange) -> None:
        connections.append(exchange.connection)
        await exchange.answer("200 OK", content(size))

    async def scenario() -> None:
        async with serving(answer, tls=server_tls) as url, new_session() as session:
            for _ in range(3):
                assert await get(session, url, executor, client_tls) == content(size)

    await run_on(new_loop, scenario())
    assert connections == [1, 1, 1]


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_receive_serves_many_answers_at_once(new_loop, both_ends, executor):
    """Bodies that arrive at the same time do not mix."""
    server_tls, client_tls = both_ends
    sizes = [LARGE // 4 + number for number in range(4)]

    async def answer(exchange: Exchange) -> None:
        await exchange.answer("200 OK", content(int(exchange.path.strip("/"))))

    async def scenario() -> None:
        async with serving(answer, tls=server_tls) as url, new_session() as session:
            bodies = await asyncio.gather(
                *(get(session, f"{url}/{size}", executor, client_tls) for size in sizes)
            )
        assert bodies == [content(size) for size in sizes]

    await run_on(new_loop, scenario())


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_receive_refuses_a_body_that_ends_early(new_loop, both_ends, executor):
    """A connection that ends before its body did is an error, and the next request gets another one."""
    server_tls, client_tls = both_ends

    async def scenario() -> None:
        half = Half()
        half.may_go_on.set()

        async def answer(exchange: Exchange) -> None:
            if exchange.connection > 1:
                await exchange.answer("200 OK", content(LARGE))
                return
            await half.send(exchange)
            exchange.reset()

        async with serving(answer, tls=server_tls) as url, new_session() as session:
            with pytest.raises((OSError, aiohttp.ClientError)):
                await get(session, url, executor, client_tls)
            assert await get(session, url, executor, client_tls) == content(LARGE)

    await run_on(new_loop, scenario())


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_receive_gives_up_on_a_body_that_stalls(new_loop, both_ends, executor):
    """Silence in the middle of a body is an error, and the next request gets another connection."""
    server_tls, client_tls = both_ends

    async def scenario() -> None:
        half = Half()

        async def answer(exchange: Exchange) -> None:
            if exchange.connection > 1:
                await exchange.answer("200 OK", content(LARGE))
                return
            await half.send(exchange)

        async with serving(answer, tls=server_tls) as url, new_session() as session:
            with pytest.raises(TimeoutError, match=r"no data was received for 0\.1 s"):
                await get(session, url, executor, client_tls, stall_seconds=0.1)
            assert await get(session, url, executor, client_tls) == content(LARGE)
            half.may_go_on.set()

    await run_on(new_loop, scenario())


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_receive_ends_when_it_is_cancelled(new_loop, both_ends, executor):
    """A cancelled read leaves no thread at work, and its connection is not used again."""
    server_tls, client_tls = both_ends

    async def scenario() -> None:
        half = Half()

        async def answer(exchange: Exchange) -> None:
            if exchange.connection > 1:
                await exchange.answer("200 OK", content(LARGE))
                return
            await half.send(exchange)

        async with serving(answer, tls=server_tls) as url, new_session() as session:
            reading = asyncio.create_task(get(session, url, executor, client_tls))
            await half.is_sent.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert await get(session, url, executor, client_tls) == content(LARGE)
            half.may_go_on.set()

    await run_on(new_loop, scenario())


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_receive_waits_for_a_body_that_pauses(new_loop, both_ends, executor):
    """Silence that is shorter than a stall is no error."""
    server_tls, client_tls = both_ends

    async def scenario() -> None:
        half = Half()

        async with serving(half.send_both, tls=server_tls) as url, new_session() as session:
            reading = asyncio.create_task(get(session, url, executor, client_tls))
            await half.is_sent.wait()
            await asyncio.sleep(0.1)  # The silence itself.
            half.may_go_on.set()
            assert await reading == content(LARGE)

    await run_on(new_loop, scenario())


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_thread_that_sleeps_acknowledges_what_came_at_once(new_loop, executor):
    """A server may hold back the next bytes until it hears that these have come."""

    async def scenario() -> None:
        half = Half()

        async with (
            serving(half.send_both) as url,
            new_session() as session,
            session.get(url) as response,
            asyncio.timeout(60),
        ):
            sock = response.connection.transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            reading = asyncio.create_task(receive(response, executor=executor, stall_seconds=20))
            while not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK):  # noqa: ASYNC110 no event
                await asyncio.sleep(0.005)
            half.may_go_on.set()
            assert await reading == content(LARGE)

    await run_on(new_loop, scenario())


async def test_receive_leaves_an_encoded_body_to_the_library(executor):
    """The length of the head is not that of the content then."""
    packed = gzip.compress(content(2 * RECEIVE_FROM_BYTES), compresslevel=1)

    async def answer(exchange: Exchange) -> None:
        await exchange.answer("200 OK", packed, Content_Encoding="gzip")

    async with serving(answer) as url, new_session() as session:
        assert await get(session, url, executor, None) == content(2 * RECEIVE_FROM_BYTES)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("size", [0, 1, SMALL, RECEIVE_FROM_BYTES, LARGE])
async def test_windows_give_the_bytes_and_keep_the_connection(new_loop, size, both_ends, executor):
    """Answers of every size are handed on whole and in order, on the same connection."""
    server_tls, client_tls = both_ends
    connections = []
    windows = Windows()

    async def answer(exchange: Exchange) -> None:
        connections.append(exchange.connection)
        await exchange.answer("200 OK", content(size))

    async def scenario() -> None:
        async with serving(answer, tls=server_tls) as url, new_session() as session:
            for _ in range(3):
                found, sizes = await get_in_windows(session, url, executor, client_tls, windows)
                assert found == content(size)
                assert max(sizes) <= WINDOW_BYTES

    await run_on(new_loop, scenario())
    assert connections == [1, 1, 1]


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_small_answer_after_a_large_one_is_read_at_once(new_loop, both_ends, executor):
    """A thread that receives sleeps until much has come. The loop needs the connection as it was."""
    server_tls, client_tls = both_ends
    connections, windows = [], Windows()

    async def answer(exchange: Exchange) -> None:
        connections.append(exchange.connection)
        await exchange.answer("200 OK", content(int(exchange.path.strip("/"))))

    async def scenario() -> None:
        async with serving(answer, tls=server_tls) as url, new_session() as session, asyncio.timeout(60):
            for size in (LARGE, 5):
                found, _ = await get_in_windows(session, f"{url}/{size}", executor, client_tls, windows)
                assert found == content(size)

    await run_on(new_loop, scenario())
    assert connections == [1, 1]


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_windows_end_with_what_stops_them(new_loop, both_ends, executor):
    """Silence, a refusal and a cancellation end the read, and the next request gets another connection."""
    server_tls, client_tls = both_ends

    def refuse(_: memoryview) -> None:
        raise LocalFileError("the disk is full", path="")

    async def scenario() -> None:
        half = Half()

        async def answer(exchange: Exchange) -> None:
            if exchange.path == "/whole":
                await exchange.answer("200 OK", content(LARGE))
                return
            half.is_sent.clear()
            await half.send(exchange)

        async with serving(answer, tls=server_tls) as url, new_session() as session:
            windows = Windows()
            with pytest.raises(TimeoutError, match=r"no data was received for 0\.1 s"):
                await get_in_windows(session, url, executor, client_tls, windows, stall_seconds=0.1)
            async with session.get(url, ssl=client_tls) as response:
                with pytest.raises(LocalFileError):
                    await receive_in_windows(
                        response, refuse, windows=windows, executor=executor, stall_seconds=20
                    )
            reading = asyncio.create_task(get_in_windows(session, url, executor, client_tls, windows))
            await half.is_sent.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            found, _ = await get_in_windows(session, f"{url}/whole", executor, client_tls, windows)
            assert found == content(LARGE)
            half.may_go_on.set()

    await run_on(new_loop, scenario())


def test_window_is_used_again():
    """Reads one after the other share one window, also after an error. A range begins with a small piece."""
    windows, seen, sizes = Windows(), [], []

    def fill(piece: memoryview) -> None:
        piece[:1] = b"x"

    def take(piece: memoryview) -> None:
        seen.append(id(piece.obj))
        sizes.append(len(piece))

    def fail(piece: memoryview) -> None:
        raise LocalFileError("the disk is full", path="")

    windows.pour(FIRST_PIECE_BYTES + WINDOW_BYTES + 1, fill, take)
    assert sizes == [FIRST_PIECE_BYTES, WINDOW_BYTES, 1]
    with pytest.raises(LocalFileError):
        windows.pour(1, fill, fail)
    windows.pour(1, fill, take)
    assert (len(seen), len(set(seen))) == (4, 1)
