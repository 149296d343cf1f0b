"""
What do ten thousand connections, a hundred of them hostile, leave to the honest ones?

An archive-only endpoint in a process of its own, whose server of connections is the gateway's, with its
default settings but for the number of connections. With `--broker` it is the gateway of a real daemon before
a real broker, which holds a connection to the broker for each client, and answers from the archive what the
broker has trimmed. Honest clients hold all connections but a hundred, and
fetch from the archive on a few of them at a time, one connection after another. A hundred hostile
connections come from one other address: slow (a byte at a time, or reading nothing), huge (a request of
100 MiB), malformed, silent and reconnecting. What is cut connects again. The honest throughput with them and
without is measured in turns.

Server, honest clients and hostile clients are three processes that share the machine. A hostile connection
waits ten milliseconds between its steps, so that the hostile process does not take a core for itself; its
CPU counts against the honest throughput all the same. Memory is the endpoint's largest VmRSS, sampled, above
what it holds with honest clients alone before the storm, as a share of `buffer_bytes`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

import structlog
import uvloop

from benchmarks.gateway_archive import PARTITIONS, TIERED, running_twins
from tests.fakes.archive import archive_in
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.support.archive_endpoints import archive_topic, endpoint_config
from tests.support.frame_fuzz import mutated, seed_frames
from tests.support.kafka_messages import fetch_request, milliseconds, request_frame, request_module
from tieringd.daemon.archive_endpoint import archive_endpoint_of
from tieringd.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from multiprocessing.connection import Connection

_HOSTILE = 100
_HOSTILE_HOST = "127.0.2.1"
_HONEST_HOSTS = 50
_AT_ONCE = 32
"""Honest connections that have a request under way."""
_STEP_SECONDS = 0.01
_FETCH_BYTES = 256 << 10
_SPARE_FILES = 500
_SEGMENTS, _RECORDS, _VALUE_BYTES = 8, 16, 64 << 10
_HUGE_BYTES = 100 << 20
_WAIT_MS = 10_000
_BUFFER_BYTES = 256 << 20
"""The default of `gateway.buffer_bytes`."""
_BROKER_RECORDS = 100_000
"""Records of 1 KiB, over all partitions of the broker's topic."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is stormed: a server of connections, and the archived offsets that honest clients fetch from."""

    port: int
    pid: int
    buffer_bytes: int
    topic: str
    offsets: tuple[int, ...]


def _fetch_frame(offset: int, max_bytes: int, topic: str = "orders", *, wait_ms: int = 0) -> bytes:
    asked = {topic: {0: {"fetch_offset": offset, "partition_max_bytes": max_bytes}}}
    wait = milliseconds(wait_ms)
    message = fetch_request(12, asked, max_wait=wait, max_bytes=max_bytes, isolation_level=0)
    return bytes(request_frame(message))


def _versions_frame() -> bytes:
    module = request_module(18, 3)
    message = module.ApiVersionsRequest(client_software_name="storm", client_software_version="1")
    return bytes(request_frame(message))


def serve(directory: str, connections: int, parent: Connection) -> None:
    """Archive a topic, serve it until *parent* says to end, and send the port when it can be reached."""
    log = (Path(directory) / "endpoint.log").open("w")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(log))

    async def work() -> None:
        archive = archive_in(MemoryStore())
        writer, random = LogWriter(Path(directory) / "log"), Random(1)
        for _ in range(_SEGMENTS):
            for _ in range(_RECORDS):
                writer.append(random.randbytes(_VALUE_BYTES))
            writer.roll()
        await archive_topic(writer, archive)
        config = endpoint_config(Path(directory) / "state", max_connections=connections + _SPARE_FILES)
        async with archive_endpoint_of(config, archive, Metrics(), from_cluster=None) as endpoint:
            parent.send((endpoint.server.port, config.gateway.buffer_bytes))
            await asyncio.to_thread(parent.recv)

    with log:
        uvloop.run(work())


async def _connected(port: int, host: str) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.bind((host, 0))
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return connection


async def _received(connection: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = await asyncio.get_running_loop().sock_recv_into(connection, buffer[done:])
        if not count:
            raise ConnectionResetError("the endpoint closed an honest connection")
        done += count


class HonestClients:
    """Connections that fetch in turn, `_AT_ONCE` of them at any time."""

    def __init__(self, target: Target, count: int) -> None:
        """Take what to read from, and how many connections to open."""
        self._port = target.port
        self._count = count
        self._idle: asyncio.Queue[socket.socket] = asyncio.Queue()
        # A gateway answers without records where the archive takes longer than its client waits.
        self._frames = [
            _fetch_frame(offset, _FETCH_BYTES, target.topic, wait_ms=_WAIT_MS) for offset in target.offsets
        ]

    async def open(self) -> None:
        """Open all connections, each with the question that a client begins with."""
        frame, size = _versions_frame(), memoryview(bytearray(4))
        for number in range(self._count):
            connection = await _connected(self._port, f"127.0.1.{1 + number % _HONEST_HOSTS}")
            await asyncio.get_running_loop().sock_sendall(connection, frame)
            await _received(connection, size)
            await _received(connection, memoryview(bytearray(int.from_bytes(size))))
            self._idle.put_nowait(connection)

    async def bytes_a_second(self, seconds: float) -> float:
        """Fetch for *seconds*, and return the bytes of answers in a second."""
        begun = time.perf_counter()
        sizes = await asyncio.gather(*(self._fetch_until(begun + seconds, one) for one in range(_AT_ONCE)))
        return sum(sizes) / (time.perf_counter() - begun)

    async def _fetch_until(self, ends_at: float, seed: int) -> int:
        loop, random, total = asyncio.get_running_loop(), Random(seed), 0
        size, buffer = memoryview(bytearray(4)), memoryview(bytearray(2 << 20))
        while time.perf_counter() < ends_at:
            connection = await self._idle.get()
            await loop.sock_sendall(connection, random.choice(self._frames))
            await _received(connection, size)
            length = int.from_bytes(size)
            if length < _VALUE_BYTES:
                raise ValueError(f"the answer to a Fetch has {length} bytes: it has no records")
            await _received(connection, buffer[:length])
            total += length
            self._idle.put_nowait(connection)
        return total


async def _slow_writer(connection: socket.socket, random: Random) -> None:
    for byte in _fetch_frame(0, _FETCH_BYTES):
        await asyncio.get_running_loop().sock_sendall(connection, bytes([byte]))
        await asyncio.sleep(_STEP_SECONDS * random.randint(5, 20))


async def _reads_nothing(connection: socket.socket, random: Random) -> None:
    frame = _fetch_frame(0, 1 << 20)
    while True:
        await asyncio.get_running_loop().sock_sendall(connection, frame)
        await asyncio.sleep(_STEP_SECONDS * random.randint(1, 3))


async def _huge(connection: socket.socket, random: Random) -> None:
    head = bytearray(_fetch_frame(0, _FETCH_BYTES)[4:])
    await asyncio.get_running_loop().sock_sendall(connection, _HUGE_BYTES.to_bytes(4) + head)
    part = random.randbytes(64 << 10)
    for _ in range(_HUGE_BYTES // len(part)):
        await asyncio.get_running_loop().sock_sendall(connection, part)
        await asyncio.sleep(_STEP_SECONDS)


async def _malformed(connection: socket.socket, random: Random) -> None:
    while True:
        frame = mutated(random, random.choice(_SEED_FRAMES))
        await asyncio.get_running_loop().sock_sendall(connection, frame)
        await asyncio.sleep(_STEP_SECONDS)


async def _silent(connection: socket.socket, random: Random) -> None:
    del random
    if not await asyncio.get_running_loop().sock_recv(connection, 1):
        raise ConnectionResetError


async def _reconnecting(connection: socket.socket, random: Random) -> None:
    del random
    await asyncio.get_running_loop().sock_sendall(connection, _versions_frame())


_SEED_FRAMES = seed_frames()
_KINDS: tuple[Callable[[socket.socket, Random], Awaitable[None]], ...] = (
    _slow_writer,
    _reads_nothing,
    _huge,
    _malformed,
    _silent,
    _reconnecting,
)


def attack(port: int, parent: Connection) -> None:
    """
    Keep the hostile connections up between each True and the False after it.

    None ends the process, which then sends how many connections each kind has opened.
    """
    opened: Counter[str] = Counter()

    async def one(number: int) -> None:
        behave, random = _KINDS[number % len(_KINDS)], Random(number)
        while True:
            with suppress(OSError):
                connection = await _connected(port, _HOSTILE_HOST)
                opened[behave.__name__.strip("_")] += 1
                with connection:
                    await behave(connection, random)
            await asyncio.sleep(_STEP_SECONDS)

    async def storm() -> None:
        tasks = [asyncio.create_task(one(number)) for number in range(_HOSTILE)]
        parent.send(True)
        await asyncio.to_thread(parent.recv)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [one for one in ended if not isinstance(one, asyncio.CancelledError)]
        if failed:
            raise RuntimeError("a hostile connection ended by itself") from failed[0]

    while parent.recv() is not None:
        uvloop.run(storm())
    parent.send(dict(opened))


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def _largest_memory(pid: int, ended: asyncio.Event) -> int:
    largest = 0
    while not ended.is_set():
        largest = max(largest, _resident_bytes(pid))
        await asyncio.sleep(0.05)
    return largest


async def measure(
    target: Target, hostile: Connection, *, connections: int, rounds: int, seconds: float
) -> tuple[list[float], list[float], int, int]:
    """
    Fetch with and without the hostile connections, in turns.

    Returns the bytes a second of each round alone and in the storm, and the server's memory in bytes
    before the first storm and at most.
    """
    clients, ended = HonestClients(target, connections - _HOSTILE), asyncio.Event()
    await clients.open()
    await clients.bytes_a_second(seconds)  # fills the cache
    before = _resident_bytes(target.pid)
    watch = asyncio.create_task(_largest_memory(target.pid, ended))
    alone: list[float] = []
    storm: list[float] = []
    for _ in range(rounds):
        alone.append(await clients.bytes_a_second(seconds))
        hostile.send(True)
        await asyncio.to_thread(hostile.recv)
        storm.append(await clients.bytes_a_second(seconds))
        hostile.send(False)
    ended.set()
    return alone, storm, before, await watch


def _connections_here(wanted: int, *, descriptors_each: int) -> int:
    """Return how many of *wanted* connections a process may have open here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    here = (hard - 2 * _SPARE_FILES) // descriptors_each
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, here)


@contextmanager
def archive_only(directory: Path, connections: int) -> Iterator[Target]:
    """Run an archive-only endpoint in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(str(directory), connections, theirs), daemon=True)
    server.start()
    theirs.close()
    port, buffer_bytes = ours.recv()
    assert server.pid is not None
    step = _RECORDS // 2
    offsets = tuple(range(0, _SEGMENTS * _RECORDS - step, step))
    try:
        yield Target(port, server.pid, buffer_bytes, "orders", offsets)
        ours.send(None)
        server.join(30)
    finally:
        server.kill()


@contextmanager
def before_broker(directory: Path, connections: int) -> Iterator[Target]:
    """Run a broker, and a daemon whose gateway stands before it; the archive has all but the last records."""
    limit = connections + _SPARE_FILES
    gateway = {"max_connections": limit, "buffer_bytes": _BUFFER_BYTES}
    with running_twins(directory, **gateway) as twins, twins.daemon() as daemon:
        twins.write(_BROKER_RECORDS)
        twins.wait_until_trimmed(daemon)
        records = _BROKER_RECORDS // PARTITIONS
        step = records // 50
        offsets = tuple(range(0, records - 2 * step, step))
        yield Target(twins.behind.port, daemon.server.pid, _BUFFER_BYTES, TIERED, offsets)


def _ratios(target: Target, *, connections: int, rounds: int, seconds: float) -> Iterator[tuple[str, float]]:
    spawn = multiprocessing.get_context("spawn")
    hostile_end, hostile_side = spawn.Pipe()
    hostile = spawn.Process(target=attack, args=(target.port, hostile_side), daemon=True)
    hostile.start()
    hostile_side.close()
    try:
        alone, storm, before, largest = uvloop.run(
            measure(target, hostile_end, connections=connections, rounds=rounds, seconds=seconds)
        )
        hostile_end.send(None)
        opened: dict[str, int] = hostile_end.recv()
        hostile.join(30)
    finally:
        hostile.kill()
    yield "connections", connections
    yield "hostile", _HOSTILE
    for kind, count in sorted(opened.items()):
        yield f"opened_{kind}", count
    yield "alone_mib_per_second", median(alone) / (1 << 20)
    yield "storm_mib_per_second", median(storm) / (1 << 20)
    yield "honest_vs_alone", median(storm) / median(alone)
    yield "rss_before_mib", before / (1 << 20)
    yield "rss_largest_mib", largest / (1 << 20)
    yield "rss_over_settings", (largest - before) / target.buffer_bytes


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds, and fewer of them")
    parser.add_argument("--broker", action="store_true", help="a gateway before a broker")
    options = parser.parse_args()
    rounds, seconds = (3, 3.0) if options.quick else (7, 10.0)
    connections = _connections_here(10_000, descriptors_each=2 if options.broker else 1)
    running = before_broker if options.broker else archive_only
    with tempfile.TemporaryDirectory() as directory, running(Path(directory), connections) as target:
        found = dict(_ratios(target, connections=connections, rounds=rounds, seconds=seconds))
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=1))


if __name__ == "__main__":
    main()
