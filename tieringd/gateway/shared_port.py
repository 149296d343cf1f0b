"""
The listening socket of one process, or of several workers, and the numbers of their connections.

Nothing is awaited between the kernel's accept and the caller that gets the client. So a caller that is
cancelled has accepted no client that would be left without an owner.

For workers the daemon binds the port and never accepts. Each worker inherits the socket and accepts from it,
so the port is there from the start to the end: clients that connect while a worker is replaced wait a moment,
and none is refused. A client that waits wakes every worker that is idle. A worker with more connections than
another one lets that one go first, so that connections are spread evenly, even a few of them.

`ConnectionCounts` is how they know: a small memory that all workers map, with the number of connections of
each. A worker writes only its own number. So the limit of connections is one for all of them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from typing import Final

from tieringd.errors import ConfigError
from tieringd.gateway.sockets import BACKLOG

_GIVE_WAY_SECONDS: Final = 0.005
_GIVE_WAY_TIMES: Final = 10
"""How often a worker with more connections than another one leaves a client to it: it may be busy."""
_AWAY: Final = -1
_NUMBER_BYTES: Final = 8


def listening_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """
    Listen on an address, and return the non-blocking socket.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port)
    except OSError as error:
        raise ConfigError(
            f"the gateway cannot listen on {host}:{port}: {error}",
            hint="Choose an address of this machine and a free port",
        ) from error
    listener.setblocking(False)
    return listener


class ConnectionCounts:
    """The number of connections of each worker, in memory that they share."""

    def __init__(self, fd: int, *, workers: int, own: int | None = None) -> None:
        """Map the memory behind *fd*. *own* is the number of this worker, from 0 on; None in the daemon."""
        self._counts = memoryview(mmap.mmap(fd, _NUMBER_BYTES * workers)).cast("q")
        self._own = own

    @classmethod
    def create(cls, workers: int) -> tuple[int, ConnectionCounts]:
        """Make the memory. Returns the descriptor that workers inherit, and the daemon's view."""
        fd = os.memfd_create("tieringd-workers")
        os.ftruncate(fd, _NUMBER_BYTES * workers)
        counts = cls(fd, workers=workers)
        for number in range(workers):
            counts.clear(number)
        return fd, counts

    def clear(self, number: int) -> None:
        """Note that a worker has ended, or does not accept yet."""
        self._counts[number] = _AWAY

    def of(self, number: int) -> int:
        """Return how many connections a worker has."""
        return max(0, self._counts[number])

    def set_own(self, connections: int) -> None:
        """Note how many connections this worker has."""
        assert self._own is not None, "the daemon has no connections of its own"
        self._counts[self._own] = connections

    @property
    def total(self) -> int:
        """Return how many connections all workers have."""
        return sum(one for one in self._counts if one > 0)

    @property
    def gives_way(self) -> bool:
        """Say whether another worker has fewer connections than this one."""
        assert self._own is not None, "the daemon does not accept"
        own = self._counts[self._own]
        return any(_AWAY < one < own for one in self._counts)


class Port:
    """A non-blocking listening socket. Belongs to one event loop."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener

    async def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """
        Return the next client.

        Raises:
            OSError: The system has no descriptor for it.
        """
        while True:
            try:
                return self.listener.accept()
            except BlockingIOError:
                await self._client_waits()

    async def _client_waits(self) -> None:
        loop = asyncio.get_running_loop()
        waits: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.listener.fileno(), _end, waits)
        try:
            await waits
        finally:
            loop.remove_reader(self.listener.fileno())


class SharedPort(Port):
    """A listening socket that other workers accept from as well."""

    def __init__(self, listener: socket.socket, counts: ConnectionCounts) -> None:
        super().__init__(listener)
        self.counts = counts

    async def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """
        Return the next client that no other worker takes.

        Raises:
            OSError: The system has no descriptor for it.
        """
        while True:
            await self._client_waits()
            for _ in range(_GIVE_WAY_TIMES):
                if not self.counts.gives_way:
                    break
                await asyncio.sleep(_GIVE_WAY_SECONDS)
            try:
                return self.listener.accept()
            except BlockingIOError:
                continue


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)
