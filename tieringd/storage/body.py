"""
The body of a PUT: a slice of an open file, sent without becoming a Python object.

aiohttp writes a `FileBody`, and botocore treats it as a file. On a plain connection a thread lets the
kernel move the file to the socket (`sendfile`). Under TLS a thread reads, encrypts and sends. For small
bodies, and behind proxies, a thread reads chunks and the loop writes them. The file is never mapped: a
broker may truncate a log file, and touching a mapped page that is gone kills the process.

Three rules: the loop's thread reads no file; `sendfile` never bypasses a cipher; no thread touches a
descriptor after `stop` has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import select
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp.payload import Payload

from tieringd.errors import LocalFileError
from tieringd.storage.base import FileSlice, truncated, unreadable
from tieringd.storage.threads import finished, outlast
from tieringd.storage.tls_transport import TlsTransport, send_lent

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter

T = TypeVar("T")

SENDFILE_FROM_BYTES = 1 << 20
"""Below this size, a thread and a second descriptor cost more than the copies they save."""

CHUNK_BYTES = 1 << 20
"""The fastest of 256 KiB, 1 MiB and 4 MiB reads, and short enough to leave the loop responsive."""


_ENCRYPTED_CHUNK_BYTES = 256 << 10
"""Small enough to be still in the processor's cache when the cipher reads it."""

_TAIL_BYTES = 4096


class FileBody(Payload):
    """
    The body of one PUT. Its owner calls `stop` when the request is over, however it ended.

    *stall_seconds* limits the time in which the peer takes no byte.
    """

    _autoclose = True  # `stop` has released everything; the file is the caller's.

    def __init__(self, file_slice: FileSlice, *, executor: Executor, stall_seconds: float) -> None:
        super().__init__(file_slice, content_type="application/octet-stream")
        self._size = file_slice.size_bytes
        self._slice = file_slice
        self._executor = executor
        self._stall_seconds = stall_seconds
        self._read_position = 0
        self._work: Future[Any] | None = None
        self._interrupt: Callable[[], None] | None = None
        self._is_stopped = False
        self.failure: LocalFileError | None = None
        """Why the file could not be read. aiohttp and botocore hide this error behind their own."""
        self.is_sent = False
        """Whether the last byte may have left. Until then the store cannot hold the object."""

    # The methods that botocore calls on a file.

    def __len__(self) -> int:
        return self._slice.size_bytes

    def tell(self) -> int:
        """Return the position of the next `read`."""
        return self._read_position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position of the next `read`; botocore rewinds a body that it sends again."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._read_position, io.SEEK_END: len(self)}[whence]
        self._read_position = origin + offset
        return self._read_position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes. It blocks, so nothing on our way to the wire calls it."""
        left = max(0, len(self) - self._read_position)
        wanted = left if size < 0 else min(size, left)
        data = os.pread(self._slice.fd, wanted, self._slice.position + self._read_position)
        self._read_position += len(data)
        return data

    # The methods that aiohttp calls on a payload.

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:  # noqa: ARG002
        """Refuse: a segment is not text."""
        raise TypeError("the body of a PUT cannot be decoded")

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write the whole slice, which is what the request's headers promise."""
        assert content_length in (None, len(self)), "the Content-Length header is not the slice's length"
        await self.write(writer)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """
        Write the whole slice.

        Raises:
            LocalFileError: The file is shorter than promised, or cannot be read.
            OSError: The connection failed, or the peer took nothing for too long.
        """
        self.is_sent = False
        try:
            if len(self) < SENDFILE_FROM_BYTES:
                await self._send_chunks(writer, self._slice.position)
            elif isinstance(writer.transport, TlsTransport):
                await self._send_by_cipher(writer, writer.transport)
            elif _is_plain(writer):
                await self._send_by_kernel(writer)
            else:
                await self._send_chunks(writer, self._slice.position)
        except LocalFileError as error:
            self.failure = error
            raise

    async def stop(self) -> None:
        """Interrupt the work under way. Afterwards no thread uses the file's descriptor."""
        self._is_stopped = True
        if self._work is not None:
            self._work.cancel()
            self._interrupt_thread()
            await outlast(self._work)

    async def _send_chunks(self, writer: AbstractStreamWriter, position: int) -> None:
        """Send the slice from *position* on: a thread reads it, the loop writes it."""
        end = self._slice.position + len(self)
        while position < end:
            chunk = await self._in_thread(self._read, min(CHUNK_BYTES, end - position), position)
            position += len(chunk)
            self.is_sent = position == end
            async with asyncio.timeout(self._stall_seconds):
                await writer.write(chunk)

    async def _send_by_cipher(self, writer: AbstractStreamWriter, transport: TlsTransport) -> None:
        await self._flush_headers(writer, transport)
        rest, position = memoryview(b""), self._slice.position
        tail = position + len(self) - _TAIL_BYTES
        while rest or position < tail:
            self._interrupt = transport.shut
            with transport.lent() as connection:
                encrypt = partial(self._encrypt, may_be_answered=transport.is_reading())
                rest, position = await self._in_thread(encrypt, connection, rest, position, tail)
            self._interrupt = None
            # The peer answered before it had everything. If that ends the request, aiohttp cancels us here.
            await asyncio.sleep(0)
        # As with `sendfile`, the loop itself writes the end.
        await self._send_chunks(writer, position)

    def _encrypt(
        self, connection: ssl.SSLSocket, rest: memoryview, position: int, tail: int, *, may_be_answered: bool
    ) -> tuple[memoryview, int]:
        """
        Send *rest*, then the slice from *position* to *tail*, until the peer answers.

        Returns the bytes that were read but not sent, and the position of the first byte not read.
        """
        while True:
            rest = send_lent(
                connection, rest, stall_seconds=self._stall_seconds, may_be_answered=may_be_answered
            )
            if rest or position >= tail:
                return rest, position
            rest = memoryview(self._read(min(_ENCRYPTED_CHUNK_BYTES, tail - position), position))
            position += len(rest)

    async def _send_by_kernel(self, writer: AbstractStreamWriter) -> None:
        transport = writer.transport
        assert transport is not None
        await self._flush_headers(writer, transport)
        # The thread has a descriptor of its own. If the transport closed meanwhile, another file could
        # get the number of its descriptor a moment later.
        number = os.dup(transport.get_extra_info("socket").fileno())
        connection = socket.socket(fileno=number)
        self._interrupt = partial(_shut, connection)
        try:
            position = await self._in_thread(self._sendfile, number)
        finally:
            self._interrupt = None
            connection.close()
        # The loop itself writes the end. If the thread did, the response could arrive before the loop
        # notices that the thread is done, and a good connection would be dropped as half written.
        await self._send_chunks(writer, position)

    async def _flush_headers(self, writer: AbstractStreamWriter, transport: asyncio.WriteTransport) -> None:
        """Return when the kernel has everything written so far, because the thread's bytes come after it."""
        transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(self._stall_seconds):
                writer.send_headers()
                while transport.get_write_buffer_size():
                    await writer.drain()
                    await asyncio.sleep(0)
        finally:
            transport.set_write_buffer_limits()

    def _sendfile(self, out: int) -> int:
        """
        Move the slice up to its tail to the socket, and return the tail's position.

        The socket does not block: the descriptor shares the loop's O_NONBLOCK.
        """
        poller = select.poll()
        poller.register(out, select.POLLOUT)
        position, end = self._slice.position, self._slice.position + len(self) - _TAIL_BYTES
        while position < end:
            try:
                sent = os.sendfile(out, self._slice.fd, position, end - position)
            except BlockingIOError:
                if not poller.poll(self._stall_seconds * 1000):
                    raise TimeoutError(f"the peer accepted no data for {self._stall_seconds:g} s") from None
                continue
            except OSError as error:
                if error.errno == errno.EIO:
                    raise unreadable(self._slice.fd, error) from error
                raise
            if sent == 0:
                raise truncated(self._slice, position)
            position += sent
        return position

    def _read(self, size: int, position: int) -> bytes:
        """
        Return the next bytes of the file. A thread calls this, once for each chunk and in order.

        Raises:
            LocalFileError: The file ends here, or cannot be read.
        """
        return read_chunk(self._slice, size, position)

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        if self._is_stopped:
            raise ConnectionAbortedError("the request has ended")
        self._work = work = self._executor.submit(function, *arguments)
        return await finished(work, on_cancel=self._interrupt_thread)

    def _interrupt_thread(self) -> None:
        """End the thread's wait and its sending. The peer sees a body that ends early."""
        if self._interrupt is not None:
            self._interrupt()


def read_chunk(file_slice: FileSlice, size: int, position: int) -> bytes:
    """
    Return up to *size* bytes of the slice's file from *position* on.

    Raises:
        LocalFileError: The file ends here, or cannot be read.
    """
    try:
        chunk = os.pread(file_slice.fd, size, position)
    except OSError as error:
        raise unreadable(file_slice.fd, error) from error
    if not chunk:
        raise truncated(file_slice, position)
    return chunk


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # Already closed, which is as good.
        connection.shutdown(socket.SHUT_RDWR)


def _is_plain(writer: AbstractStreamWriter) -> bool:
    """Return whether the peer reads the socket's bytes as they are (no TLS in between)."""
    transport = writer.transport
    return transport is not None and transport.get_extra_info("sslcontext") is None
