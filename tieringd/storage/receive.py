"""
The body of a large response, received into its final buffer.

aiohttp hands a body on in pieces: copied out of the loop's buffer, out of the parser and into one. For
ranges of 16 MiB that costs more than the kernel's work. Here the connection is taken from the parser
once the head is read, and a thread writes the rest into the result itself. aiohttp still connects, reads
the head, and returns the connection to the pool. It also reads the whole response when TLS passes
through a proxy.

One rule: a connection goes back to the pool only when its body has arrived to the last byte.

`ranged` extracts the requested range from a response, in each of the forms that HTTP allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import select
import socket
from concurrent.futures import Executor
from http import HTTPStatus
from typing import TYPE_CHECKING

from tieringd.errors import StorageUnavailable
from tieringd.storage.calls import Call
from tieringd.storage.threads import finished
from tieringd.storage.tls_transport import TlsTransport, receive_lent

if TYPE_CHECKING:
    import aiohttp


RECEIVE_FROM_BYTES = 1 << 20
"""Smaller bodies arrive in few pieces, and the parser has most of them with the head."""


def ranged(
    call: Call, data: bytes, *, status: int, content_range: str | None, position: int, size_bytes: int
) -> bytes:
    """
    Return the bytes of the object from *position*, at most *size_bytes*.

    Raises:
        StorageUnavailable: The response holds other bytes, fewer or more.
    """
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return b""
    if status != HTTPStatus.PARTIAL_CONTENT:
        # A server may send the whole object instead.
        return data[position : position + size_bytes]
    span, _, total = (content_range or "").removeprefix("bytes ").partition("/")
    first = span.partition("-")[0]
    if not (first.isdecimal() and total.isdecimal()):
        raise StorageUnavailable(
            f"{call.subject}: the response does not name the range that was requested ({content_range!r})",
            hint="check cloud_storage_api_endpoint, and proxies in between",
        )
    expected = min(size_bytes, int(total) - position)
    if (int(first), len(data)) != (position, expected):
        raise StorageUnavailable(
            f"{call.subject}: received {len(data)} bytes from position {first}, not {expected} from "
            f"{position}"
        )
    return data


async def receive(response: aiohttp.ClientResponse, *, executor: Executor, stall_seconds: float) -> bytes:
    """
    Return the body of *response*, of which only the head has been read.

    Raises:
        ConnectionError: The connection ended early.
        TimeoutError: No byte came for *stall_seconds*.
    """
    content, connection, size_bytes = response.content, response.connection, response.content_length or 0
    is_small = content.is_eof() or size_bytes < RECEIVE_FROM_BYTES
    if connection is None or is_small or "Content-Encoding" in response.headers:
        return await response.read()
    transport, protocol = connection.transport, connection.protocol
    if transport is None or protocol is None or not _is_for_threads(transport):
        return await response.read()
    # A BytesIO owns its bytes, and returns them without a copy.
    result = io.BytesIO(bytes(size_bytes))
    with result.getbuffer() as view:
        begun = 0
        while chunk := content.read_nowait():
            view[begun : begun + len(chunk)] = chunk
            begun += len(chunk)
        if begun < size_bytes:
            protocol.pause_reading()  # This also stops aiohttp's read timeout.
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
    """Return False for the loop's own TLS, which connections through a proxy use."""
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
    # A descriptor of its own: if the transport closed meanwhile, another file could get the number.
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connection:

        def end() -> None:
            with contextlib.suppress(OSError):  # Already closed, which is as good.
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
                raise TimeoutError(f"no data was received for {stall_seconds:g} s") from None
            continue
        if not count:
            raise ConnectionResetError("the connection ended before the end of the response")
        left = left[count:]
