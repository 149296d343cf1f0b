"""
TLS connections that can be lent to a thread.

asyncio and uvloop encrypt into memory, copy the result into an object and give that to the socket, all
on the loop's thread: for a large upload this is most of the cost. Here OpenSSL works on the socket
itself. The loop drives such a connection like any other, and lends it to a thread while a large body passes.

One rule: OpenSSL's state belongs to one thread at a time. While a connection is lent, the loop neither
reads nor writes nor closes it. To end a loan early, the socket below is shut down.

`TlsConnector` opens these connections for aiohttp: address, connection and handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohappyeyeballs
import aiohttp

_READ_BYTES = 64 << 10
_READS_AT_ONCE = 16  # Then other connections get their turn.
_HIGH_WATER_BYTES = 64 << 10


class TlsTransport(asyncio.Transport):
    """The loop's side of an encrypted connection, which can be lent to a thread. It owns *connection*."""

    def __init__(self, connection: ssl.SSLSocket, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": connection, "sslcontext": connection.context, "ssl_object": connection})
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._fd = connection.fileno()
        self._protocol: Any = protocol
        self._unsent = bytearray()
        self._high_bytes, self._low_bytes = _HIGH_WATER_BYTES, _HIGH_WATER_BYTES // 4
        self._is_reading = True
        self._is_lent = False
        self._is_closing = False
        self._is_over = False
        self._is_protocol_paused = False
        # OpenSSL may have to write in order to read, and the other way round.
        self._read_wants_write = self._write_wants_read = False
        self._watches_read = self._watches_write = False
        protocol.connection_made(self)
        self._watch()

    @contextmanager
    def lent(self) -> Iterator[ssl.SSLSocket]:
        """
        Lend the non-blocking connection to a thread. No written bytes may be waiting.

        Raises:
            ConnectionResetError: The connection has ended.
        """
        if self._is_closing:
            raise ConnectionResetError("the connection has ended")
        assert not self._unsent, "what was written comes before a thread's bytes"
        self._is_lent = True
        self._watch()
        try:
            yield self._connection
        finally:
            self._is_lent = False
            if self.is_closing():
                self._finish(None)
            elif self._is_reading:
                self._read()  # At once: a response may have come that ends the sending.
            else:
                self._watch()

    def shut(self) -> None:
        """End the connection for the loop or the thread that uses it: waits and sends fail at once."""
        # The SSL socket's own method would also drop the cipher, and send on unencrypted.
        with contextlib.suppress(OSError):  # Already closed, which is as good.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    # Callbacks of the event loop.

    def _watch(self) -> None:
        """Register exactly those events with the loop that a read or a write waits for."""
        is_ours = not self._is_lent and not self._is_over
        wants_read = is_ours and (self._is_reading or self._write_wants_read)
        is_sending = bool(self._unsent) and not self._write_wants_read
        wants_write = is_ours and (is_sending or self._read_wants_write)
        if wants_read != self._watches_read:
            self._watches_read = wants_read
            if wants_read:
                self._loop.add_reader(self._fd, self._ready)
            else:
                self._loop.remove_reader(self._fd)
        if wants_write != self._watches_write:
            self._watches_write = wants_write
            if wants_write:
                self._loop.add_writer(self._fd, self._ready)
            else:
                self._loop.remove_writer(self._fd)

    def _ready(self) -> None:
        if self._unsent:
            self._flush()
        if self._is_reading and not self._is_over:
            self._read()

    def _read(self) -> None:
        self._read_wants_write = False
        for _ in range(_READS_AT_ONCE):
            try:
                data = self._connection.recv(_READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLWantWriteError:
                self._read_wants_write = True
                break
            except OSError as error:
                self._finish(error)
                return
            if not data:
                self._protocol.eof_received()
                self.close()
                return
            self._protocol.data_received(data)
            if not self._is_reading:
                break
        self._watch()

    def _flush(self) -> None:
        try:
            while self._unsent and (sent := self._send(self._unsent)):
                del self._unsent[:sent]
        except OSError as error:
            self._finish(error)
            return
        if len(self._unsent) <= self._low_bytes and self._is_protocol_paused:
            self._is_protocol_paused = False
            self._protocol.resume_writing()
        if self._is_closing and not self._unsent:
            self._finish(None)
        else:
            self._watch()

    def _send(self, data: bytes | bytearray | memoryview) -> int:
        """Return the number of bytes sent. After 0 the same bytes must be sent again, as OpenSSL requires."""
        self._write_wants_read = False
        try:
            return self._connection.send(data)
        except ssl.SSLWantWriteError:
            return 0
        except ssl.SSLWantReadError:
            self._write_wants_read = True
            return 0

    def _finish(self, error: OSError | None) -> None:
        """End the connection. The protocol is told in the loop's next iteration."""
        if self._is_over:
            return
        self._is_closing = self._is_over = True
        self._is_reading = False
        self._unsent.clear()
        self._watch()
        self._loop.call_soon(self._lose, error)

    def _lose(self, error: OSError | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            if error is None:
                with contextlib.suppress(OSError, ValueError):  # A closing message; the peer need not get it.
                    self._connection.unwrap()
            self._connection.close()

    # Methods that a protocol calls on a transport.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send *data*, and keep the bytes that the socket does not take yet."""
        assert not self._is_lent, "a thread is sending"
        if self._is_closing or not data:
            return
        with memoryview(data) as view:
            position = 0
            try:
                while not self._unsent and position < len(view) and (sent := self._send(view[position:])):
                    position += sent
            except OSError as error:
                self._finish(error)
                return
            self._unsent += view[position:]
        if len(self._unsent) > self._high_bytes and not self._is_protocol_paused:
            self._is_protocol_paused = True
            self._protocol.pause_writing()
        self._watch()

    def close(self) -> None:
        """Send what is left, and end the connection. A thread that uses it is interrupted."""
        if self._is_closing:
            return
        if self._unsent:
            self._is_closing, self._is_reading = True, False
            self._watch()
        else:
            self.abort()

    def abort(self) -> None:
        """End the connection. A thread that uses it is interrupted, and its loan ends first."""
        if self._is_lent:
            self._is_closing = True
            self.shut()
        else:
            self._finish(None)

    def is_closing(self) -> bool:
        """Return whether the connection is ending or has ended."""
        return self._is_closing

    def is_reading(self) -> bool:
        """Return whether arriving bytes are read."""
        return self._is_reading

    def pause_reading(self) -> None:
        """Leave arriving bytes in the socket."""
        self._is_reading = False
        self._watch()

    def resume_reading(self) -> None:
        """Read arriving bytes again."""
        self._is_reading = not self._is_closing
        self._watch()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait for the socket."""
        return len(self._unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the sizes at which the protocol is paused and resumed."""
        self._high_bytes = _HIGH_WATER_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that receives arriving bytes."""
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Change the protocol that receives arriving bytes."""
        self._protocol = protocol

    def can_write_eof(self) -> bool:
        """Return False: half a TLS connection cannot be closed."""
        return False


# What a thread does with a connection that was lent to it.


def send_lent(
    connection: ssl.SSLSocket, data: memoryview, *, stall_seconds: float, may_be_answered: bool
) -> memoryview:
    """
    Send *data*, and return the unsent rest: empty unless the peer answers instead of reading.

    The rest must be sent next on this connection. The thread stops for an answer of the peer only with
    *may_be_answered*.

    Raises:
        TimeoutError: The peer took no byte for *stall_seconds*.
        OSError: The connection failed.
    """
    while data:
        try:
            sent = connection.send(data)
        except ssl.SSLWantWriteError:
            events = select.POLLOUT | (select.POLLIN if may_be_answered else 0)
            seen = _wait(connection, events, stall_seconds)
            if not seen:
                raise TimeoutError(f"the peer accepted no data for {stall_seconds:g} s") from None
            if seen & select.POLLIN and not seen & select.POLLOUT:
                return data
        except ssl.SSLWantReadError:
            if not _wait(connection, select.POLLIN, stall_seconds):
                raise TimeoutError(f"the peer accepted no data for {stall_seconds:g} s") from None
        else:
            data = data[sent:]
    return data


def receive_lent(connection: ssl.SSLSocket, buffer: memoryview, *, stall_seconds: float) -> None:
    """
    Fill *buffer* with the next bytes of the connection.

    Raises:
        ConnectionError: The connection ended early.
        TimeoutError: No byte came for *stall_seconds*.
    """
    while buffer:
        try:
            count = connection.recv_into(buffer)
        except ssl.SSLWantReadError:
            events = select.POLLIN
        except ssl.SSLWantWriteError:
            events = select.POLLOUT
        else:
            if not count:
                raise ConnectionResetError("the connection ended before the end of the response")
            buffer = buffer[count:]
            continue
        if not _wait(connection, events, stall_seconds):
            raise TimeoutError(f"no data was received for {stall_seconds:g} s")


def _wait(connection: ssl.SSLSocket, events: int, seconds: float) -> int:
    """Return which of *events*, or errors, occurred within *seconds*; 0 for none."""
    poller = select.poll()
    poller.register(connection, events)
    seen = poller.poll(seconds * 1000)
    return seen[0][1] if seen else 0


class TlsConnector(aiohttp.TCPConnector):
    """
    A connector whose connections can be lent to threads.

    Connections through a proxy are the loop's own, as aiohttp makes them: the proxy's tunnel may itself
    be encrypted.
    """

    async def _wrap_create_connection(self, *args: Any, **kwargs: Any) -> Any:
        context, request = kwargs.get("ssl"), kwargs["req"]
        if not isinstance(context, ssl.SSLContext) or request.proxy is not None:
            return await super()._wrap_create_connection(*args, **kwargs)
        protocol = args[0]()
        # Each failure is raised as the error that aiohttp itself raises when it connects.
        try:
            async with asyncio.timeout(kwargs["timeout"].sock_connect):
                plain = await aiohappyeyeballs.start_connection(kwargs["addr_infos"], loop=self._loop)
                connection = await _shake_hands(context, plain, kwargs["server_hostname"])
        except ssl.SSLCertVerificationError as error:
            raise aiohttp.ClientConnectorCertificateError(request.connection_key, error) from error
        except ssl.SSLError as error:
            raise aiohttp.ClientConnectorSSLError(request.connection_key, error) from error
        except TimeoutError:
            raise
        except OSError as error:
            raise kwargs["client_error"](request.connection_key, error) from error
        return TlsTransport(connection, protocol), protocol


async def _shake_hands(context: ssl.SSLContext, plain: socket.socket, name: str | None) -> ssl.SSLSocket:
    """Return the encrypted connection over *plain*, which it takes over."""
    try:
        connection = context.wrap_socket(plain, server_hostname=name, do_handshake_on_connect=False)
    except BaseException:
        plain.close()
        raise
    return await shaken(connection)


async def shaken(connection: ssl.SSLSocket) -> ssl.SSLSocket:
    """
    Return *connection* after its TLS handshake, and close it if the handshake fails.

    Raises:
        OSError: The other side speaks no accepted TLS version, has no trusted certificate, or is gone.
    """
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                connection.do_handshake()
            except ssl.SSLWantReadError:
                await _until(connection, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _until(connection, loop.add_writer, loop.remove_writer)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


async def _until(connection: ssl.SSLSocket, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    number = connection.fileno()
    event = asyncio.Event()
    add(number, event.set)
    try:
        await event.wait()
    finally:
        remove(number)
