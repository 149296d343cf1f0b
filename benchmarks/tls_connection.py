"""
A server's end of a TLS connection that reads far ahead.

`ssl.SSLSocket` asks the kernel twice for each record of 16 KiB. Here a read takes what has arrived, up to
256 KiB, and OpenSSL deciphers from memory: a sink that costs less is less in the way of what is measured.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_READ_BYTES = 256 << 10


class TlsConnection:
    """A blocking connection with as much of a socket's interface as the sink uses."""

    def __init__(self, client: socket.socket, context: ssl.SSLContext) -> None:
        self._client = client
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._buffer = memoryview(bytearray(_READ_BYTES))
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            else:
                self._flush()
                return

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Read what there is, at most a record; 0 at the end."""
        while True:
            try:
                return self._object.read(len(buffer), buffer)
            except ssl.SSLWantReadError:
                self._fill()
            except ssl.SSLEOFError:
                return 0

    def recv(self, size: int) -> bytes:
        """Read what there is, at most a record; nothing at the end."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer)])

    def sendall(self, data: bytes | memoryview) -> None:
        """Send everything."""
        view = memoryview(data)
        while view:
            view = view[self._object.write(view[:_READ_BYTES]) :]
            self._flush()

    def _fill(self) -> None:
        count = self._client.recv_into(self._buffer)
        if count:
            self._incoming.write(self._buffer[:count])
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._client.sendall(self._outgoing.read())
