"""
Processes that answer each request with a piece of a file, by `sendfile` and nothing else.

They are the floor beside the gateway's workers: no frame is parsed, no cache is asked and no batch is
looked for. What two of them serve more than one is what the machine and the client allow two processes.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from pathlib import Path

_TURN_BYTES: Final = 1 << 20
"""How much one connection is sent in a turn: as much as the gateway sends."""


class BareSenders:
    """Processes with a port each. A context manager; its end ends them."""

    def __init__(self, path: Path, processes: int, *, answer_bytes: int) -> None:
        """Answer any request with a size in four bytes and as many bytes of the file, by *processes*."""
        context = multiprocessing.get_context("spawn")
        listeners = [socket.create_server(("", 0)) for _ in range(processes)]
        self.ports = [listener.getsockname()[1] for listener in listeners]
        self._processes = [
            context.Process(target=_serve, args=(listener, path, answer_bytes), daemon=True)
            for listener in listeners
        ]
        for process in self._processes:
            process.start()
        for listener in listeners:
            listener.close()

    @property
    def pids(self) -> list[int]:
        """Return the processes' ids."""
        return [process.pid for process in self._processes if process.pid is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


class _Connection:
    def __init__(self, sock: socket.socket, descriptor: int, *, answer_bytes: int) -> None:
        self._sock = sock
        self._file = descriptor
        self._file_bytes = os.fstat(descriptor).st_size
        self._answer_bytes = answer_bytes
        self._position = 0
        self._left = 0

    def turn(self, events: int) -> int:
        """Take a request, or send a part of its answer. Return what to wait for; 0 means the end."""
        if events & selectors.EVENT_READ:
            if not self._sock.recv(1 << 16):
                return 0
            self._sock.send(self._answer_bytes.to_bytes(4), socket.MSG_MORE)
            self._left = self._answer_bytes
            self._position = (self._position + self._answer_bytes) % (self._file_bytes - self._answer_bytes)
        while self._left:
            size = min(self._left, _TURN_BYTES)
            try:
                sent = os.sendfile(self._sock.fileno(), self._file, self._position, size)
            except BlockingIOError:
                break
            self._position += sent
            self._left -= sent
            if sent < size:
                break
        return selectors.EVENT_WRITE if self._left else selectors.EVENT_READ


def _serve(listener: socket.socket, path: Path, answer_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, events in selector.select():
            if key.data is None:
                sock, _ = listener.accept()
                sock.setblocking(False)
                connection = _Connection(sock, descriptor, answer_bytes=answer_bytes)
                selector.register(sock, selectors.EVENT_READ, connection)
                continue
            wanted = key.data.turn(events)
            if not wanted:
                selector.unregister(key.fileobj)
                key.fileobj.close()
            elif wanted != key.events:
                selector.modify(key.fileobj, wanted, key.data)
