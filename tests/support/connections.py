"""
Connections that a test's own server takes: each served by one task, and all ended with the server.

What `asyncio.start_server` leaves open is closed here. It forgets connections that it has accepted
but not yet handed on. And the error of a reset stays in a future that nobody looks at: whether the
garbage collector reports that, hangs on when it ran last. So whoever ends a connection waits for
its end.
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
    """End a connection at once, and look at how it ended."""
    writer.transport.abort()
    with suppress(OSError):  # A peer that has gone; what that means is for the test to say.
        await writer.wait_closed()


@asynccontextmanager
async def accepting(
    handle: Handler, *, tls: ssl.SSLContext | None = None, limit: int = _LIMIT
) -> AsyncIterator[int]:
    """Serve each connection with *handle*, and yield the port, which the system picks."""
    tasks: set[asyncio.Task[None]] = set()
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        listener.setblocking(False)
        accept = asyncio.create_task(_accept(listener, handle, tls, limit, tasks))
        try:
            yield listener.getsockname()[1]
        finally:
            # Were the task cancelled instead, the connection that it is just accepting could be lost.
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
            return  # It was shut.
        task = loop.create_task(_serve(connection, handle, tls, limit))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_report)


async def _serve(connection: socket.socket, handle: Handler, tls: ssl.SSLContext | None, limit: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit)
    protocol = asyncio.StreamReaderProtocol(reader)
    # Peers that go are part of the play.
    with suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await handle(reader, writer)
        finally:
            await end(writer)


def _report(task: asyncio.Task[None]) -> None:
    """Tell the loop of a handler that failed, as streams do."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": "a handler of the test's own server failed", "exception": error, "task": task}
        )
