"""The bare copy, for bounds: blocking sockets that are kept open, a thread for each, unsigned PUTs."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from typing import TYPE_CHECKING

from benchmarks.peers import RAW_AT_ONCE, ByThreads
from benchmarks.sink import BUCKET

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.sink import Endpoint

_READ_BYTES = 1 << 20  # As the daemon reads. 256 KiB and 4 MiB were no faster.


class Connections:
    """A connection for each thread that asks."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._port = endpoint.port
        self._tls = (
            None
            if endpoint.trust_file is None
            else ssl.create_default_context(cafile=str(endpoint.trust_file))
        )
        self._local = threading.local()
        self._sockets: list[socket.socket] = []

    def mine(self) -> socket.socket:
        """Return the calling thread's connection."""
        if not hasattr(self._local, "connection"):
            plain = socket.create_connection(("127.0.0.1", self._port))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.connection = (
                plain if self._tls is None else self._tls.wrap_socket(plain, server_hostname="127.0.0.1")
            )
            self._sockets.append(self._local.connection)
        connection: socket.socket = self._local.connection
        return connection

    def close(self) -> None:
        """Close all of them."""
        for each in self._sockets:
            each.close()


class RawSocket(ByThreads):
    """Plain sockets, one `sendfile` after another."""

    def __init__(self, log_dir: Path, endpoint: Endpoint) -> None:
        super().__init__(log_dir, RAW_AT_ONCE)
        self._connections = Connections(endpoint)

    def upload_file(self, path: Path) -> None:
        """Upload one file in one request."""
        connection = self._connections.mine()
        with path.open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            head = f"PUT /{BUCKET}/{path.name} HTTP/1.1\r\nHost: sink\r\nContent-Length: {size_bytes}\r\n\r\n"
            connection.sendall(head.encode())
            self.send(connection, file.fileno(), size_bytes)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 "), answer

    def send(self, connection: socket.socket, fd: int, size_bytes: int) -> None:
        """Send a file's bytes."""
        position = 0
        while position < size_bytes:
            position += os.sendfile(connection.fileno(), fd, position, size_bytes - position)

    def close(self) -> None:
        """End the threads and the connections."""
        super().close()
        self._connections.close()


class RawTlsSocket(RawSocket):
    """TLS sockets: reads into a buffer of the thread's own, and OpenSSL's blocking write."""

    def send(self, connection: socket.socket, fd: int, size_bytes: int) -> None:
        """Send a file's bytes."""
        buffer = memoryview(bytearray(_READ_BYTES))
        position = 0
        while position < size_bytes:
            count = os.preadv(fd, [buffer], position)
            connection.sendall(buffer[:count])
            position += count
