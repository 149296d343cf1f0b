"""A minimal broker: a test writes the answer to each request, byte by byte."""

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
    """Queues every request that arrives. The test takes requests and writes the answers itself."""

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
        """Return the next request's head and frame, and the writer for its answer."""
        async with asyncio.timeout(60):
            return await self.requests.get()


@asynccontextmanager
async def scripted_broker(*, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedBroker]:
    """Run the broker on a port that the system chooses."""
    broker = ScriptedBroker()
    async with accepting(broker.serve, tls=tls) as port:
        broker.port = port
        yield broker
