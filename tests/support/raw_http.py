"""
An HTTP server whose answers a test controls byte by byte: late, short, wrong or never.

A test's coroutine handles each request. The server parses only the head.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.connections import accepting

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

PATIENT = {"connect_timeout_seconds": 60, "read_timeout_seconds": 180}
"""Settings of a store on a machine with much else to do: its server may be silent for a while."""
NOBODY = "http://127.0.0.1:1"
"""Where no server listens. A port that a server has given back may be another test's at once."""


@dataclass
class Exchange:
    """One request, of which only the head has been read."""

    method: str
    path: str
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: int
    """The connection's number, from 1. Later requests of the same connection have the same number."""

    @property
    def length(self) -> int:
        """Return the request's content length; 0 without one."""
        return int(self.headers.get("content-length", "0"))

    async def read_body(self) -> bytes:
        """Read the whole body."""
        return await self.reader.readexactly(self.length)

    async def read_to_end(self) -> bytes:
        """Read until the peer closes the connection."""
        return await self.reader.read()

    async def answer(self, status: str, body: bytes = b"", **headers: str) -> None:
        """Send a response."""
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self.writer.drain()

    def reset(self) -> None:
        """Abort the connection without reading the rest."""
        self.writer.transport.abort()


@asynccontextmanager
async def serving(
    handle: Callable[[Exchange], Awaitable[None]], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve *handle* on a port that the system chooses, and yield the endpoint's URL."""
    connections = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        while not writer.is_closing() and (exchange := await _next_exchange(reader, writer, number)):
            await handle(exchange)

    async with accepting(connected, tls=tls) as port:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"


async def _next_exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
) -> Exchange | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    return Exchange(method, path, headers, reader, writer, connection)
