"""
The body of a large answer, received where it will stay.

aiohttp hands a body on in pieces: copied out of the loop's buffer, out of the parser and into one.
For ranges of 16 MiB that costs more than the kernel does. Here the connection is taken from the
parser once the head is read, and a thread writes the rest into the result itself. What is left to
aiohttp: connecting, the head, and the connection's return to the pool. Answers that come
through a proxy and TLS are left to it whole.

One rule: a connection goes back only when its body has arrived to the last byte.

`ranged` tells what an answer to a request for a range holds, in each of HTTP's ways to give it.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING

from tieringd.errors import StorageUnavailable
from tieringd.storage.threads import finished
from tieringd.storage.tls_transport import TlsTransport, receive_lent

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Executor

    import aiohttp

    from tieringd.storage.calls import Call


RECEIVE_FROM_BYTES = 1 << 20
"""Below this the pieces are few, and the parser has most of them with the head."""


def ranged(
    call: Call, data: bytes, *, status: int, content_range: str | None, position: int, size_bytes: int
) -> bytes:
    """
    Return those of *size_bytes* from *position* that the object has.

    Raises:
        StorageUnavailable: The answer holds other bytes, fewer or more.
    """
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return b""
    if status != HTTPStatus.PARTIAL_CONTENT:
        # A server may answer with the whole object instead.
        return data[position : position + size_bytes]
    span, _, total = (content_range or "").removeprefix("bytes ").partition("/")
    first = span.partition("-")[0]
    if not (first.isdecimal() and total.isdecimal()):
        raise StorageUnavailable(
            f"{call.subject}: the answer does not say which range it is ({content_range!r})",
            hint="check cloud_storage_api_endpoint, and proxies on the way",
        )
    expected = min(size_bytes, int(total) - position)
    if (int(first), len(data)) != (position, expected):
        raise StorageUnavailable(
            f"{call.subject}: {len(data)} bytes from {first} arrived, not {expected} from {position}"
        )
    return data


async def receive(response: aiohttp.ClientResponse, *, executor: Executor, stall_seconds: float) -> bytes:
    """
    Return the body of *response*, of which only the head has been read.

    Raises:
        ConnectionError: The connection ended early.
        TimeoutError: Nothing came for *stall_seconds*.
    """
    content, connection, size_bytes = response.content, response.connection, response.content_length or 0
    is_small = content.is_eof() or size_bytes < RECEIVE_FROM_BYTES
    if connection is None or is_small or "Content-Encoding" in response.headers:
        return await response.read()
    transport, protocol = connection.transport, connection.protocol
    if transport is None or protocol is None or not _is_for_threads(transport):
        return await response.read()
    # It owns its bytes and gives them away without a copy.
    result = io.BytesIO(bytes(size_bytes))
    with result.getbuffer() as view:
        begun = 0
        while chunk := content.read_nowait():
            view[begun : begun + len(chunk)] = chunk
            begun += len(chunk)
        if begun < size_bytes:
            protocol.pause_reading()  # And with it aiohttp's own clock for silence.
            try:
                # `getvalue` copies while a view lives, and the thread forgets its own a moment too late.
                with view[begun:] as rest:
                    if isinstance(transport, TlsTransport):
                        await _receive_encrypted(transport, rest, executor, stall_seconds)
                    else:
                        await _receive_plain(transport, rest, executor, stall_seconds)
            except BaseException:
                transport.abort()
                raise
            content.feed_eof()
    return result.getvalue()


def _is_for_threads(transport: asyncio.BaseTransport) -> bool:
    """Deny it for the loop's own TLS, which connections through a proxy have."""
    return isinstance(transport, TlsTransport) or transport.get_extra_info("sslcontext") is None


async def _receive_encrypted(
    transport: TlsTransport, buffer: memoryview, executor: Executor, stall_seconds: float
) -> None:
    with transport.lent() as connection:
        work = executor.submit(receive_lent, connection, buffer, stall_seconds=stall_seconds)
        await finished(work, on_cancel=transport.shut)


async def _receive_plain(
    transport: asyncio.BaseTransport, buffer: memoryview, executor: Executor, stall_seconds: float
) -> None:
    # A descriptor of its own: were the transport closed meanwhile, its number could be another file's.
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connection:

        def end() -> None:
            with contextlib.suppress(OSError):  # Already gone, which is as good.
                connection.shutdown(socket.SHUT_RDWR)

        work = executor.submit(_fill, connection.fileno(), buffer, stall_seconds)
        await finished(work, on_cancel=end)


def _fill(fd: int, buffer: memoryview, stall_seconds: float) -> None:
    """Read until *buffer* is full. The socket does not block: its descriptor shares the loop's O_NONBLOCK."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    left = buffer
    while left:
        try:
            count = os.readv(fd, [left])
        except BlockingIOError:
            if not poller.poll(stall_seconds * 1000):
                raise TimeoutError(f"nothing came for {stall_seconds:g} s") from None
            continue
        if not count:
            raise ConnectionResetError("the connection ended before the body did")
        left = left[count:]
