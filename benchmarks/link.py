"""
A network between a store and its clients: a limit of bytes per second in all, and a delay of the first one.

On one machine a store answers as fast as its processors copy, and its readers share them. A real
one is behind a link, and it is the link that a reader has to keep busy.

    python -m benchmarks.link PORT STORE_PORT MIB_PER_SECOND LATENCY_MS

It prints `ready` when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvloop

from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE_BYTES = 256 << 10
_MIB = 1 << 20


@contextmanager
def running_link(store_port: int, *, mib_per_second: int, latency_ms: int) -> Iterator[int]:
    """Run a link in its own process, and yield the port at its other end."""
    (port,) = free_ports(1)
    numbers = (port, store_port, mib_per_second, latency_ms)
    command = [sys.executable, "-m", "benchmarks.link", *map(str, numbers)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n", "the link did not start"
        yield port
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


class Link:
    """The direction from the store, which all connections share."""

    def __init__(self, store_port: int, bytes_per_second: int, latency_seconds: float) -> None:
        self._store_port = store_port
        self._bytes_per_second = bytes_per_second
        self._latency_seconds = latency_seconds
        self._free_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until one of its ends closes."""
        from_store, to_store = await asyncio.open_connection(
            "127.0.0.1", self._store_port, limit=_PIECE_BYTES
        )
        asked = asyncio.Event()
        carrying = {
            asyncio.create_task(self._to_store(reader, to_store, asked)),
            asyncio.create_task(self._from_store(from_store, writer, asked)),
        }
        _, left = await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        for end in (writer, to_store):
            end.close()
            with suppress(ConnectionError):
                await end.wait_closed()

    async def _to_store(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES):
                asked.set()
                writer.write(data)
                await writer.drain()

    async def _from_store(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES):
                if asked.is_set():
                    asked.clear()
                    await asyncio.sleep(self._latency_seconds)
                await self._turn(len(data))
                writer.write(data)
                await writer.drain()

    async def _turn(self, size_bytes: int) -> None:
        now = asyncio.get_running_loop().time()
        begins = max(now, self._free_at)
        self._free_at = begins + size_bytes / self._bytes_per_second
        await asyncio.sleep(self._free_at - now)


async def _run(port: int, store_port: int, mib_per_second: int, latency_ms: int) -> None:
    link = Link(store_port, mib_per_second * _MIB, latency_ms / 1000)
    server = await asyncio.start_server(link.serve, "127.0.0.1", port, limit=_PIECE_BYTES)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(_run(*map(int, sys.argv[1:])))
