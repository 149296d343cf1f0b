"""
How many small objects a second, beside obstore, s5cmd and bare sockets?

Objects of 256 KiB and 4 KiB: sidecars and manifests are of this size, and segments of quiet topics. The
daemon's store takes them as bytes in memory, which is how it gets sidecars and manifests.
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import obstore
import uvloop
from crc32c import crc32c

from benchmarks.harness import Figures, Worker
from benchmarks.peers import S5cmd, obstore_s3, sink_config
from benchmarks.raw_sockets import Connections
from benchmarks.sink import BUCKET, Received, Sink
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_opening import s3_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.harness import Alternative, Sample
    from benchmarks.sink import Endpoint

SIZES = {"256 KiB": 256 << 10, "4 KiB": 4 << 10}
_AT_ONCE = 16
_THOUSAND = 1000


def write_objects(directory: Path, *, count: int, size_bytes: int) -> None:
    """Write files of random bytes, which differ."""
    directory.mkdir()
    values = random.Random(size_bytes)
    for number in range(count):
        (directory / f"{number:06d}").write_bytes(values.randbytes(size_bytes))


class _Objects:
    def __init__(self, directory: Path) -> None:
        self.objects = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}

    def sent(self) -> Mapping[str, bytes]:
        """Return each object."""
        return self.objects


class TieringdSmall(_Objects):
    """The daemon's S3 store on the daemon's loop."""

    def __init__(self, directory: Path, endpoint: Endpoint) -> None:
        super().__init__(directory)
        self._crc32c = {key: crc32c(data) for key, data in self.objects.items()}
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._store = self._runner.run(S3Store.open(s3_settings(sink_config(directory, endpoint))))

    def upload(self) -> None:
        """Put every object."""
        self._runner.run(self._put_all())

    def close(self) -> None:
        """Close the store and its loop."""
        self._runner.run(self._store.close())
        self._runner.close()

    async def _put_all(self) -> None:
        left = iter(self.objects.items())

        async def put_some() -> None:
            for key, data in left:
                await self._store.put(key, data, crc32c=self._crc32c[key])

        await asyncio.gather(*(put_some() for _ in range(_AT_ONCE)))


class _Threaded(_Objects):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._threads = ThreadPoolExecutor(_AT_ONCE)

    def upload(self) -> None:
        """Put every object."""
        for _ in self._threads.map(self.put, self.objects.keys(), self.objects.values()):
            pass

    def put(self, key: str, data: bytes) -> None:
        """Put one object."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class ObstoreSmall(_Threaded):
    """obstore from threads; from its coroutines it was slower."""

    def __init__(self, directory: Path, endpoint: Endpoint) -> None:
        super().__init__(directory)
        self._store = obstore_s3(endpoint)

    def put(self, key: str, data: bytes) -> None:
        """Put one object."""
        obstore.put(self._store, key, data, use_multipart=False)


class RawSmall(_Threaded):
    """Bare sockets, a thread for each."""

    def __init__(self, directory: Path, endpoint: Endpoint) -> None:
        super().__init__(directory)
        self._connections = Connections(endpoint)

    def put(self, key: str, data: bytes) -> None:
        """Put one object."""
        connection = self._connections.mine()
        head = f"PUT /{BUCKET}/{key} HTTP/1.1\r\nHost: sink\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 "), answer

    def close(self) -> None:
        """End the threads and the connections."""
        super().close()
        self._connections.close()


class S5cmdSmall(S5cmd):
    """s5cmd over the files, a process for each round, with sixteen workers."""

    def __init__(self, directory: Path, endpoint: Endpoint) -> None:
        super().__init__(directory, endpoint, workers=_AT_ONCE, files=sorted(directory.iterdir()))


ALTERNATIVES: dict[str, Callable[[Path, Endpoint], Alternative]] = {
    "tieringd": TieringdSmall,
    "obstore": ObstoreSmall,
    "s5cmd": S5cmdSmall,
    "raw socket": RawSmall,
}


def measure_small(directory: Path, *, count: int, rounds: int) -> dict[str, Figures]:
    """Time every alternative in turns, in thousands of objects."""
    with ExitStack() as resources:
        sink = resources.enter_context(Sink())
        workers = {
            name: resources.enter_context(
                Worker(build, directory, sink.endpoint, gibibytes=count / _THOUSAND)
            )
            for name, build in ALTERNATIVES.items()
        }
        expected = {
            path.name: Received.of(path.read_bytes(), verify=True) for path in sorted(directory.iterdir())
        }
        samples: dict[str, list[Sample]] = {name: [] for name in workers}
        for name, worker in workers.items():
            sink.begin(verify=True)
            worker.upload()
            assert sink.received() == expected, f"{name} delivered something else"
        for _ in range(rounds):
            for name, worker in workers.items():
                sink.begin(verify=False)
                samples[name].append(worker.upload())
                sizes = {key: one.size_bytes for key, one in sink.received().items()}
                assert sizes == {key: one.size_bytes for key, one in expected.items()}, (
                    f"{name}: some is missing"
                )
        return {name: Figures.of(taken) for name, taken in samples.items()}
