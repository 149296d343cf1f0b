"""One Kafka connection on which a test sends single messages, in exactly the versions that it chooses."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.support.connections import end
from tests.support.kafka_messages import followed_by, read_response, request_frame

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator


class RawKafka:
    """Sends requests made with kio, and reads their answers in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._next = 0

    async def ask(self, message: Any, *, rest: bytes = b"") -> Any:
        """Send a request, with *rest* after its fields, and return the answer."""
        self.send(message, rest=rest)
        return await self.answer(message)

    def send(self, message: Any, *, rest: bytes = b"") -> int:
        """Send a request, and return its correlation id."""
        self._next += 1
        self.writer.write(followed_by(rest, request_frame(message, correlation_id=self._next)))
        return self._next

    async def answer(self, message: Any) -> Any:
        """Return the next answer, which must answer *message*."""
        frame = await self.frame()
        return read_response(frame, message.__api_key__, message.__version__)

    async def frame(self) -> bytes:
        """Return the bytes of the next message, with its size."""
        size = await self.reader.readexactly(4)
        return size + await self.reader.readexactly(int.from_bytes(size))


@asynccontextmanager
async def connected(
    port: int, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[RawKafka]:
    """Open a connection on loopback, from *host*."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="127.0.0.1" if tls else None, local_addr=(host, 0)
    )
    try:
        yield RawKafka(reader, writer)
    finally:
        await end(writer)
