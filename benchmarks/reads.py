"""
How fast are ranges of 16 MiB read, beside obstore and a bare socket?

The sink serves one object from memory. Each alternative reads all of it several times over, eight
ranges at a time, through the daemon's own event loop or threads. The hash of what was read is compared
before anything is timed; in the timed rounds every range must have its full length.
"""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import obstore
import uvloop

from benchmarks.harness import GIB, Figures, Worker
from benchmarks.peers import obstore_s3, sink_config
from benchmarks.raw_sockets import Connections
from benchmarks.sink import BUCKET, Sink
from benchmarks.sink_answers import SERVED_BYTES, SERVED_KEY, served_data
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_opening import s3_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.certificate import Certificate
    from benchmarks.harness import Sample
    from benchmarks.sink import Endpoint

_RANGE_BYTES = 16 << 20
_AT_ONCE = 8
_PASSES = 16
"""Over the object, so that a round is a GiB."""
_GIBIBYTES = SERVED_BYTES * _PASSES / GIB
_POSITIONS = range(0, SERVED_BYTES, _RANGE_BYTES)


class _Reader:
    """Something that reads ranges; `sent` is what it read last, by position."""

    def __init__(self) -> None:
        self._last: dict[str, bytes] = {}

    def sent(self) -> dict[str, bytes]:
        """Return the SHA-256 of each range, by its position."""
        return {key: hashlib.sha256(data).digest() for key, data in self._last.items()}

    def keep(self, position: int, data: bytes) -> None:
        """Keep what one read gave, in place of what it gave before."""
        assert len(data) == _RANGE_BYTES, f"{len(data)} bytes arrived"
        self._last[str(position)] = data


class TieringdReads(_Reader):
    """The daemon's S3 store on the daemon's loop."""

    def __init__(self, log_dir: Path, endpoint: Endpoint) -> None:
        super().__init__()
        self._runner = asyncio.Runner(loop_factory=self.new_loop)
        self._store = self._runner.run(S3Store.open(s3_settings(sink_config(log_dir, endpoint))))

    @staticmethod
    def new_loop() -> asyncio.AbstractEventLoop:
        """Return a loop as the daemon has it."""
        return uvloop.new_event_loop()

    def upload(self) -> None:
        """Read everything."""
        self._runner.run(self._read())

    def close(self) -> None:
        """Close the store and its loop."""
        self._runner.run(self._store.close())
        self._runner.close()

    async def _read(self) -> None:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def read(position: int) -> None:
            async with slots:
                self.keep(
                    position,
                    await self._store.get_range(SERVED_KEY, position=position, size_bytes=_RANGE_BYTES),
                )

        await asyncio.gather(*(read(position) for _ in range(_PASSES) for position in _POSITIONS))


class TieringdReadsByAsyncio(TieringdReads):
    """The same on the standard library's loop, which the commands that only read use."""

    @staticmethod
    def new_loop() -> asyncio.AbstractEventLoop:
        """Return a loop of the standard library."""
        return asyncio.new_event_loop()


class _ThreadedReader(_Reader):
    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(_AT_ONCE)

    def upload(self) -> None:
        """Read everything."""
        for _ in self._threads.map(self._read_and_keep, [*_POSITIONS] * _PASSES):
            pass

    def read(self, position: int) -> bytes:
        """Read one range."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _read_and_keep(self, position: int) -> None:
        self.keep(position, self.read(position))


class ObstoreReads(_ThreadedReader):
    """obstore's `get_range`. What it returns is a buffer of its own, not copied into Python's bytes."""

    def __init__(self, _log_dir: Path, endpoint: Endpoint) -> None:
        super().__init__()
        self._store = obstore_s3(endpoint)

    def read(self, position: int) -> bytes:
        """Read one range."""
        return obstore.get_range(self._store, SERVED_KEY, start=position, length=_RANGE_BYTES)


class RawReads(_ThreadedReader):
    """The bare copy: a request, and `recv_into` a buffer of the range's size."""

    def __init__(self, _log_dir: Path, endpoint: Endpoint) -> None:
        super().__init__()
        self._connections = Connections(endpoint)

    def read(self, position: int) -> bytes:
        """Read one range."""
        connection = self._connections.mine()
        last = position + _RANGE_BYTES - 1
        fields = f"Host: sink\r\nRange: bytes={position}-{last}\r\n"
        connection.sendall(f"GET /{BUCKET}/{SERVED_KEY} HTTP/1.1\r\n{fields}\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        assert head.startswith(b"HTTP/1.1 206 "), head
        begun = head.partition(b"\r\n\r\n")[2]
        data = bytearray(_RANGE_BYTES)
        data[: len(begun)] = begun
        view = memoryview(data)[len(begun) :]
        while view:
            view = view[connection.recv_into(view) :]
        return data

    def close(self) -> None:
        """End the threads and the connections."""
        super().close()
        self._connections.close()


READERS: dict[str, Callable[[Path, Endpoint], TieringdReads | _ThreadedReader]] = {
    "tieringd": TieringdReads,
    "obstore": ObstoreReads,
    "tieringd, asyncio's loop": TieringdReadsByAsyncio,
    "raw socket": RawReads,
}


def measure_reads(
    root: Path, *, rounds: int, certificate: Certificate | None = None
) -> tuple[dict[str, Figures], dict[str, float]]:
    """
    Time every reader in turns.

    Returns the figures of each, and what a GiB for it cost the sink on average.
    """
    expected = {
        str(position): hashlib.sha256(served_data()[position : position + _RANGE_BYTES]).digest()
        for position in _POSITIONS
    }
    with ExitStack() as resources:
        sink = resources.enter_context(Sink(certificate))
        workers = {
            name: resources.enter_context(Worker(build, root, sink.endpoint, gibibytes=_GIBIBYTES))
            for name, build in READERS.items()
        }
        samples: dict[str, list[Sample]] = {name: [] for name in workers}
        sink_cpu = dict.fromkeys(workers, 0.0)
        for name, worker in workers.items():
            worker.upload()
            assert worker.sent_files() == expected, f"{name} read other bytes"
        for _ in range(rounds):
            for name, worker in workers.items():
                sink_cpu[name] -= sink.cpu_seconds()
                samples[name].append(worker.upload())
                sink_cpu[name] += sink.cpu_seconds()
                assert worker.sent_files() == expected, f"{name} read other bytes"
        figures = {name: Figures.of(taken) for name, taken in samples.items()}
        return figures, {name: cpu / _GIBIBYTES / rounds for name, cpu in sink_cpu.items()}
