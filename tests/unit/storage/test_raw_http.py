"""The tests' own server ends what it begins: nothing is left for the garbage collector to report."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
import sys
from asyncio import StreamReaderProtocol
from urllib.parse import urlsplit

import pytest
import uvloop

from tests.support.raw_http import Exchange, serving

RESETS = 200
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
HEAD = b"PUT / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"


class Ageing:
    """
    A loop that makes a connection's protocol one garbage collection older than the future inside it.

    It happens by chance when a collection is due between the two. When both become garbage, the
    future is then looked at first, and tells what the protocol would have kept quiet.
    """

    def create_future(self):
        if sys._getframe(1).f_code is StreamReaderProtocol.__init__.__code__:
            gc.collect(0)
        return super().create_future()


class AgeingLoop(Ageing, asyncio.SelectorEventLoop):
    pass


class AgeingUvloop(Ageing, uvloop.Loop):
    pass


@pytest.fixture
def quiet_collector():
    """Collect garbage when told to and not by chance, and only what is made from now on."""
    gc.collect()
    # It stays frozen: thawed, every later collection would walk through all that the worker holds.
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def asked(port: int, tls: ssl.SSLContext | None) -> socket.socket:
    """Return a connection on which a request's head has been sent; its `close` is a reset."""
    connection = socket.create_connection(("127.0.0.1", port))
    if tls is not None:
        connection = tls.wrap_socket(connection, server_hostname="127.0.0.1")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    connection.sendall(HEAD)
    return connection


@pytest.mark.parametrize("loop_factory", [AgeingLoop, AgeingUvloop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_reset_of_a_connection_is_not_reported(  # noqa: PLR0917 - fixtures
    certificate, server_tls, quiet_collector, caplog, is_tls, loop_factory
):
    """A reset of a connection is not reported, in whatever order garbage is collected."""
    tls = ssl.create_default_context(cafile=str(certificate)) if is_tls else None
    outcomes = []

    async def scenario() -> None:
        begun = asyncio.Event()

        async def read(exchange: Exchange) -> None:
            begun.set()
            try:
                await exchange.read_body()
            except ConnectionResetError as error:
                outcomes.append(type(error))
                raise

        async with serving(read, tls=server_tls if is_tls else None) as url:
            tasks_at_rest = asyncio.all_tasks()
            for _ in range(RESETS):
                with await asyncio.to_thread(asked, urlsplit(url).port, tls):
                    await begun.wait()
                begun.clear()
                if serving_tasks := asyncio.all_tasks() - tasks_at_rest:
                    await asyncio.wait(serving_tasks)
                await asyncio.sleep(0)  # And the loop has forgotten them.
                gc.collect()

    def work() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(scenario())

    await asyncio.to_thread(work)
    assert outcomes == [ConnectionResetError] * RESETS
    assert caplog.records == []


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("turns", range(6))
def test_connection_that_has_just_come_ends_with_the_server(server_tls, recwarn, is_tls, loop_factory, turns):
    """A new connection is closed with the server, however far the event loop has come with it."""

    async def scenario() -> None:
        async with serving(Exchange.read_body, tls=server_tls if is_tls else None) as url:
            with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as connection:
                connection.sendall(HEAD)
                for _ in range(turns):
                    await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario())
    gc.collect()
    assert [str(each.message) for each in recwarn] == []
