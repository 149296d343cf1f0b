"""
Connections to a test's own server: one task serves each, and all end with the server.

This replaces `asyncio.start_server`, which leaves things open. It forgets connections that were accepted and
not yet passed to their handler. And the error of a reset connection stays in a future that is never read; the
garbage collector reports it at a random time. So `end` waits for the end of a connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_LIMIT = 64 << 10


async def end(writer: asyncio.StreamWriter) -> None:
    """Abort a connection, and read the error with which it ended."""
    writer.transport.abort()
    with suppress(OSError):  # The peer is gone. The test checks what that means.
        await writer.wait_closed()


@asynccontextmanager
async def accepting(
    handle: Handler, *, tls: ssl.SSLContext | None = None, limit: int = _LIMIT
) -> AsyncIterator[int]:
    """Serve each connection with *handle*, and yield the port, which the system chooses."""
    tasks: set[asyncio.Task[None]] = set()
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        listener.setblocking(False)
        accept = asyncio.create_task(_accept(listener, handle, tls, limit, tasks))
        try:
            yield listener.getsockname()[1]
        finally:
            # The task is not cancelled: a connection that it is just accepting could get lost.
            listener.shutdown(socket.SHUT_RDWR)
            await accept
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _accept(
    listener: socket.socket,
    handle: Handler,
    tls: ssl.SSLContext | None,
    limit: int,
    tasks: set[asyncio.Task[None]],
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError:
            return  # `accepting` has shut the listener down.
        task = loop.create_task(_serve(connection, handle, tls, limit))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_report)


async def _serve(connection: socket.socket, handle: Handler, tls: ssl.SSLContext | None, limit: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit)
    protocol = asyncio.StreamReaderProtocol(reader)
    # A peer may end its connection at any time.
    with suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await handle(reader, writer)
        finally:
            await end(writer)


def _report(task: asyncio.Task[None]) -> None:
    """Report a handler's error to the event loop, as asyncio's streams do."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": "a handler of the test's own server failed", "exception": error, "task": task}
        )
