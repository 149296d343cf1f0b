"""
The network between the parts of a test: relays that a test cuts, as a switch that drops packets would.

A part reaches another one by the port of a relay. While a way is cut, its bytes stay where they are: no
connection ends, and no peer is told. A new connection is accepted, and leads nowhere. When the network is
whole again, everything that was held goes on its way.

The relay of an address has many users. `Passage.source` tells them apart by the process that holds the other
end of the connection.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.connections import accepting, end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

_CHUNK = 64 << 10
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


@dataclass(eq=False)
class Passage:
    """One connection through a relay."""

    kind: str
    """What the relay is for."""
    node_id: int
    """The node that the relay leads to."""
    client_port: int
    """The port of the peer that has connected."""
    relay_port: int

    def source(self, processes: Iterable[int]) -> int | None:
        """Return which of some processes has connected; None if it is another one, or has ended."""
        return _holder(self.client_port, self.relay_port, processes)


@dataclass
class Network:
    """The relays of a test, and what is cut."""

    held_connections: int = 0
    """The number of connections that were held since the cut."""
    _is_cut: Callable[[Passage], bool] | None = None
    _whole: asyncio.Event = field(default_factory=asyncio.Event)
    _known: dict[Passage, bool] = field(default_factory=dict)
    """What the present cut means for each connection: a look at processes takes milliseconds."""

    def cut(self, is_cut: Callable[[Passage], bool]) -> None:
        """Hold what goes through these connections, and through new ones, until `mend`."""
        self._is_cut, self._known, self.held_connections = is_cut, {}, 0
        self._whole.clear()

    def mend(self) -> None:
        """Let everything pass."""
        self._is_cut = None
        self._known = {}
        self._whole.set()

    @asynccontextmanager
    async def relay(self, kind: str, node_id: int, port: int) -> AsyncIterator[int]:
        """Lead connections to a port on loopback, and yield the port to use in its place."""

        async def connected(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
            passage = Passage(
                kind,
                node_id,
                to_client.get_extra_info("peername")[1],
                to_client.get_extra_info("sockname")[1],
            )
            try:
                await self._until_passable(passage)
                # A part that does not listen refuses; here its peer sees a connection that ends at once.
                with suppress(OSError):
                    server, to_server = await asyncio.open_connection("127.0.0.1", port)
                    try:
                        await self._both_ways(passage, (client, to_server), (server, to_client))
                    finally:
                        await end(to_server)
            finally:
                self._known.pop(passage, None)

        async with accepting(connected) as relay_port:
            yield relay_port

    async def _until_passable(self, passage: Passage) -> None:
        while self._is_cut is not None:
            if passage not in self._known:
                self._known[passage] = self._is_cut(passage)
                self.held_connections += self._known[passage]
            if not self._known[passage]:
                return
            await self._whole.wait()

    async def _both_ways(
        self, passage: Passage, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        tasks = [asyncio.ensure_future(self._pump(passage, *way)) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self, passage: Passage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while True:
                piece = await reader.read(_CHUNK)
                # The end of a connection is held as well.
                await self._until_passable(passage)
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()


def _holder(port: int, peer_port: int, processes: Iterable[int]) -> int | None:
    """Return the process that holds the end *port* of a connection on loopback to *peer_port*."""
    ends = f":{port:04X}", f":{peer_port:04X}"
    names = set()
    for table in _TABLES:
        for line in table.read_text().splitlines()[1:]:
            row = line.split()
            if row[1].endswith(ends[0]) and row[2].endswith(ends[1]):
                names.add(f"socket:[{row[9]}]")
    for process in processes:
        # A process may end, or close a file, meanwhile.
        with suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    if str(descriptor.readlink()) in names:
                        return process
    return None
