"""
The body of a large response, received into its final buffer, or into windows that are used again.

aiohttp hands a body on in pieces: copied out of the loop's buffer, out of the parser and into one. For
ranges of 16 MiB that costs more than the kernel's work. Here the connection is taken from the parser
once the head is read, and a thread writes the rest into the result itself. aiohttp still connects, reads
the head, and returns the connection to the pool. It also reads the whole response when TLS passes
through a proxy.

One rule: a connection goes back to the pool only when its body has arrived to the last byte.

`receive` returns the body. `receive_in_windows` hands it on as it arrives.

`ranged` extracts the requested range from a response, in each of the forms that HTTP allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import select
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from tieringd.errors import StorageUnavailable
from tieringd.storage.base import Take
from tieringd.storage.calls import Call, require_whole
from tieringd.storage.ranges import Windows
from tieringd.storage.threads import finished
from tieringd.storage.tls_transport import TlsTransport, receive_lent

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler


T = TypeVar("T")
_Fill: TypeAlias = Callable[[memoryview], None]
"""Fills a buffer with the next bytes of a connection, in a thread."""

_WAKE_BYTES: Final = 256 << 10
"""How many bytes wake a thread that receives."""
RECEIVE_FROM_BYTES = 1 << 20
"""Smaller bodies arrive in few pieces, and the parser has most of them with the head."""


def ranged(
    call: Call, data: bytes, *, status: int, headers: Mapping[str, str], position: int, size_bytes: int
) -> bytes:
    """
    Return the bytes of the object from *position*, at most *size_bytes*.

    *headers* are found by names in lower case.

    Raises:
        StorageUnavailable: The response holds other bytes, fewer or more.
    """
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return b""
    if status != HTTPStatus.PARTIAL_CONTENT:
        # A server may send the whole object instead.
        require_whole(call, len(data), headers)
        return data[position : position + size_bytes]
    content_range = headers.get("content-range")
    require_range(call, len(data), content_range=content_range, position=position, size_bytes=size_bytes)
    return data


def require_range(
    call: Call, found_bytes: int, *, content_range: str | None, position: int, size_bytes: int
) -> None:
    """
    Check that a partial response of *found_bytes* is the range that was requested.

    Raises:
        StorageUnavailable: It holds other bytes, fewer or more.
    """
    span, _, total = (content_range or "").removeprefix("bytes ").partition("/")
    first = span.partition("-")[0]
    if not (first.isdecimal() and total.isdecimal()):
        raise StorageUnavailable(
            f"{call.subject}: the response does not name the range that was requested ({content_range!r})",
            hint="check cloud_storage_api_endpoint, and proxies in between",
        )
    expected = min(size_bytes, int(total) - position)
    if (int(first), found_bytes) != (position, expected):
        raise StorageUnavailable(
            f"{call.subject}: received {found_bytes} bytes from position {first}, not {expected} from "
            f"{position}"
        )


async def receive(response: aiohttp.ClientResponse, *, executor: Executor, stall_seconds: float) -> bytes:
    """
    Return the body of *response*, of which only the head has been read.

    Raises:
        ConnectionError: The connection ended early.
        TimeoutError: No byte came for *stall_seconds*.
    """
    content, size_bytes = response.content, response.content_length or 0
    held = _held_connection(response)
    if held is None:
        return await response.read()
    begun = _begun(content)
    begun_bytes = sum(map(len, begun))

    def whole(fill: _Fill | None = None) -> bytes:
        # In the thread, because new memory is cleared. A BytesIO owns its bytes, and returns them without a
        # copy if no view of them is left.
        result = io.BytesIO(bytes(size_bytes))
        with result.getbuffer() as view:
            at = 0
            for chunk in begun:
                view[at : at + len(chunk)] = chunk
                at += len(chunk)
            if fill is not None:
                with view[at:] as rest:
                    fill(rest)
        return result.getvalue()

    if begun_bytes == size_bytes:
        return await finished(executor.submit(whole), on_cancel=_let_it_end)
    data = await _in_reader(held, executor, stall_seconds, whole)
    content.feed_eof()
    return data


def _begun(content: aiohttp.StreamReader) -> list[bytes]:
    """Return the bytes of a body that arrived with its head."""
    begun: list[bytes] = []
    while chunk := content.read_nowait():
        begun.append(chunk)
    return begun


async def receive_in_windows(
    response: aiohttp.ClientResponse,
    take: Take,
    *,
    windows: Windows,
    executor: Executor,
    stall_seconds: float,
) -> int:
    """
    Hand the body of *response* on to *take*, which runs in a thread of *executor*; return its size in bytes.

    Raises:
        ConnectionError: The connection ended early.
        TimeoutError: No byte came for *stall_seconds*.
        TieringError: *take* raised it.
    """
    content, size_bytes = response.content, response.content_length or 0
    held = _held_connection(response)
    if held is None:
        data = await response.read()
        await finished(executor.submit(take, memoryview(data)), on_cancel=_let_it_end)
        return len(data)
    begun = _begun(content)
    left_bytes = size_bytes - sum(map(len, begun))

    def hand_on(fill: _Fill | None = None) -> None:
        for chunk in begun:
            take(memoryview(chunk))
        if fill is not None:
            windows.pour(left_bytes, fill, take)

    if not left_bytes:
        await finished(executor.submit(hand_on), on_cancel=_let_it_end)
    else:
        await _in_reader(held, executor, stall_seconds, hand_on)
        content.feed_eof()
    return size_bytes


def _let_it_end() -> None:
    """Let a thread finish that has all its bytes, when its caller is cancelled."""


@dataclass(frozen=True, slots=True)
class _Held:
    """The connection of a response, which a thread may read from."""

    transport: asyncio.Transport
    protocol: ResponseHandler


def _held_connection(response: aiohttp.ClientResponse) -> _Held | None:
    """Return the connection with the rest of a large body; None for a body that aiohttp reads."""
    connection = response.connection
    is_small = response.content.is_eof() or (response.content_length or 0) < RECEIVE_FROM_BYTES
    if connection is None or is_small or "Content-Encoding" in response.headers:
        return None
    transport, protocol = connection.transport, connection.protocol
    if transport is None or protocol is None or not _is_for_threads(transport):
        return None
    return _Held(transport, protocol)


async def _in_reader(
    held: _Held,
    executor: Executor,
    stall_seconds: float,
    work: Callable[[_Fill], T],
) -> T:
    """Run *work* in a thread; it gets a function that fills a buffer with the connection's next bytes."""
    held.protocol.pause_reading()  # This also stops aiohttp's read timeout.
    try:
        if isinstance(held.transport, TlsTransport):
            return await _receive_encrypted(held.transport, work, executor, stall_seconds)
        return await _receive_plain(held.transport, work, executor, stall_seconds)
    except BaseException:
        held.transport.abort()
        raise


def _is_for_threads(transport: asyncio.BaseTransport) -> bool:
    """Return False for the loop's own TLS, which connections through a proxy use."""
    return isinstance(transport, TlsTransport) or transport.get_extra_info("sslcontext") is None


async def _receive_encrypted(
    transport: TlsTransport,
    work: Callable[[_Fill], T],
    executor: Executor,
    stall_seconds: float,
) -> T:
    with transport.lent() as connection:
        fill = partial(receive_lent, connection, stall_seconds=stall_seconds)
        return await finished(executor.submit(work, fill), on_cancel=transport.shut)


async def _receive_plain(
    transport: asyncio.BaseTransport,
    work: Callable[[_Fill], T],
    executor: Executor,
    stall_seconds: float,
) -> T:
    # A descriptor of its own: if the transport closed meanwhile, another file could get the number.
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connection:

        def end() -> None:
            with contextlib.suppress(OSError):  # Already closed, which is as good.
                connection.shutdown(socket.SHUT_RDWR)

        receiver = _Receiver(connection, stall_seconds)
        try:
            return await finished(executor.submit(work, receiver.fill), on_cancel=end)
        finally:
            receiver.wake_at(1)


class _Receiver:
    """
    Fills buffers from a socket, in a thread. The owner calls `wake_at(1)` when the thread is done.

    The socket does not block: its descriptor shares the loop's O_NONBLOCK.
    """

    def __init__(self, connection: socket.socket, stall_seconds: float) -> None:
        self._connection = connection
        self._stall_seconds = stall_seconds
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._wake_at_bytes = 1

    def fill(self, buffer: memoryview) -> None:
        """
        Read until *buffer* is full.

        Raises:
            ConnectionResetError: The connection ended early.
            TimeoutError: No byte came for the time of a stall.
        """
        left, is_silent = buffer, False
        while left:
            try:
                count = self._connection.recv_into(left)
            except BlockingIOError:
                if is_silent:
                    raise TimeoutError(f"no data was received for {self._stall_seconds:g} s") from None
                self.wake_at(min(len(left), _WAKE_BYTES))
                # A server may hold back the next bytes until these are acknowledged.
                if sys.platform == "linux":
                    self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                # After a silence there may be fewer bytes than wake the thread.
                is_silent = not self._poller.poll(self._stall_seconds * 1000)
                continue
            if not count:
                raise ConnectionResetError("the connection ended before the end of the response")
            left, is_silent = left[count:], False

    def wake_at(self, size_bytes: int) -> None:
        """Let the thread sleep until *size_bytes* have come, or the end: each wake-up has a fixed cost."""
        if size_bytes != self._wake_at_bytes:
            self._wake_at_bytes = size_bytes
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
