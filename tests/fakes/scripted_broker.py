"""A broker of a few lines: a test says what each request is answered with, byte by byte."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.support.connections import accepting
from tieringd.formats.kafka_wire.request_header import RequestHead

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator


class ScriptedBroker:
    """Keeps every request that arrives; the test takes them and writes answers itself."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: asyncio.Queue[tuple[RequestHead, bytes, asyncio.StreamWriter]] = asyncio.Queue()
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the requests of one connection until it ends."""
        self.connections += 1
        while True:
            try:
                size = await reader.readexactly(4)
                frame = size + await reader.readexactly(int.from_bytes(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            self.requests.put_nowait((RequestHead.read(memoryview(frame)), frame, writer))

    async def next(self) -> tuple[RequestHead, bytes, asyncio.StreamWriter]:
        """Return the next request, and where its answer is to be written."""
        async with asyncio.timeout(20):
            return await self.requests.get()


@asynccontextmanager
async def scripted_broker(*, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedBroker]:
    """Run the broker on a port that the system picks."""
    broker = ScriptedBroker()
    async with accepting(broker.serve, tls=tls) as port:
        broker.port = port
        yield broker
