"""
How much more do two workers of a gateway serve than one, and at what cost?

`tieringd gateway --archive-only` in front of a directory, with one worker and with two, in turns. All that is
read is in the chunk cache. The client asks for the same megabytes again and again on eight connections, and
lets the kernel discard the answers (`MSG_TRUNC`), so that it costs little and the two processors are left to
the workers. It comes from an address of this machine that is not the loopback's, as clients on other machines
do: for those the kernel sizes the send buffer. It has the lowest priority: where both processors serve, it
wakes for more bytes at a time. CPU seconds are those of the daemon and its workers, from /proc. The memory of
a worker is its VmRSS and its share of unshared pages, before it has served anything and after.

Beside them, in the same turns, one and two bare processes answer the same client with pieces of a file
(`bare_sender`). `two_bare_vs_one` is what the machine and the client allow any two processes.

`two_workers_vs_one` needs a machine with nothing else to do. Where other work runs beside it,
`two_workers_vs_one_by_cpu` is the better estimate: two processors' worth of the CPU that a GiB costs.

The path is the gateway's: connections, frames, cache and `sendfile` are the same beside a broker, where each
answer needs the broker's permission as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.bare_sender import BareSenders
from benchmarks.harness import GIB, Figures, Sample, machine, print_table, write_json
from tests.fakes.archive import archive_in
from tests.fakes.log_writer import LogWriter
from tests.support.archive_endpoints import archive_topic
from tests.support.daemon import Daemon, run_well, write_config
from tests.support.kafka_messages import fetch_request, request_frame
from tieringd.storage.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

_CONNECTIONS: Final = 8
_SEGMENTS: Final = 4
_RECORDS: Final = 64
_VALUE_BYTES: Final = 256 << 10
_ANSWER_BYTES: Final = 2 << 20
_TOPIC: Final = "orders"
_ALL: Final = range(1 << 16)


class _Endpoint(Daemon):
    arguments = ("gateway", "--archive-only")


def _own_address() -> str:
    """Return an address of this machine that others reach too; the loopback's where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))  # Chooses a route. Nothing is sent.
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def _config(directory: Path, workers: int) -> Path:
    return write_config(
        directory / f"endpoint{workers}.yaml",
        {
            "state_directory": str(directory / f"state{workers}"),
            "cloud_storage_enabled": True,
            "cloud_storage_backend": "file",
            "cloud_storage_file_root": str(directory / "archive"),
            "cloud_storage_single_writer": True,
            "cloud_storage_cache_size": 4 << 30,
            "storage_min_free_bytes": 0,
            "gateway": {
                "host": _own_address(),
                "port": 0,
                "workers": workers,
                "archive_only_for_everyone": True,
            },
            "admin": {"port": 0},
        },
    )


async def _make_archive(directory: Path) -> list[int]:
    """Archive one partition, and return offsets from which to read."""
    (directory / "archive").mkdir()
    run_well("archive", "init", "--config", str(_config(directory, 0)))
    store = FileStore(directory / "archive", prefix="", has_single_writer=True)
    writer, random = LogWriter(directory / "log", _TOPIC), Random(1)
    for _ in range(_SEGMENTS):
        for _ in range(_RECORDS):
            writer.append(random.randbytes(_VALUE_BYTES))
        writer.roll()
    manifest = await archive_topic(writer, archive_in(store))
    await store.close()
    return [offset for offset in writer.batch_bases if offset < manifest.next_offset][:-8]


class _Reader:
    """One connection that asks again and again, and discards what comes."""

    def __init__(self, port: int, frames: list[bytes], first: int) -> None:
        self._sock = socket.create_connection((_own_address(), port))
        self._frames = frames
        self._at = first
        self._buffer = bytearray(2 * _ANSWER_BYTES)
        self.received_bytes = 0

    def run(self, until: float) -> None:
        """Read until a monotonic time."""
        while time.monotonic() < until:
            self._at = (self._at + 1) % len(self._frames)
            self._sock.sendall(self._frames[self._at])
            size = int.from_bytes(self._exactly(4))
            self._discard(size)
            self.received_bytes += size

    def close(self) -> None:
        self._sock.close()

    def _exactly(self, size: int) -> bytes:
        data = self._sock.recv(size, socket.MSG_WAITALL)
        assert len(data) == size, "the endpoint closed the connection"
        return data

    def _discard(self, size: int) -> None:
        left = size
        while left:
            # TCP discards what MSG_TRUNC receives, without a copy.
            got = self._sock.recv_into(self._buffer, left, socket.MSG_TRUNC | socket.MSG_WAITALL)
            assert got, "the endpoint closed the connection"
            left -= got


class _Readers:
    """A client with a connection for each reader, in front of processes whose CPU is counted."""

    def __init__(
        self,
        ports: Sequence[int],
        pids: Sequence[int],
        frames: list[bytes],
        *,
        processors: Container[int] = _ALL,
    ) -> None:
        """Connect to *ports* in turn; *pids* serve them. All of them use *processors*."""
        self._pids = pids
        self._processors = {one for one in os.sched_getaffinity(0) if one in processors}
        self._readers = []
        for number in range(_CONNECTIONS):
            first = number * (len(frames) // _CONNECTIONS)
            reader = _Reader(ports[number % len(ports)], frames, first)
            reader.run(time.monotonic() + 0.05)  # It is accepted before the next one comes.
            self._readers.append(reader)

    def read(self, seconds: float) -> Sample:
        """Read for some seconds on all connections."""
        usual = os.sched_getaffinity(0)
        for pid in (0, *self._pids):
            # That of this thread passes on to the readers' threads.
            os.sched_setaffinity(pid, self._processors)
        before = sum(each.received_bytes for each in self._readers)
        cpu_before, began = sum(map(_cpu_seconds, self._pids)), time.monotonic()
        threads = [threading.Thread(target=each.run, args=(began + seconds,)) for each in self._readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.monotonic() - began
        for pid in (0, *self._pids):
            os.sched_setaffinity(pid, usual)
        received = sum(each.received_bytes for each in self._readers) - before
        return Sample(took, sum(map(_cpu_seconds, self._pids)) - cpu_before, received / GIB)

    def close(self) -> None:
        """Close the connections."""
        for each in self._readers:
            each.close()


class _Serving:
    """An endpoint with some workers."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.daemon = _Endpoint(_config(directory, workers), directory / f"endpoint{workers}.log")
        self.daemon.launch()
        self.daemon.until(lambda: self.daemon.events("archive endpoint listens"), "it listens")
        self.daemon.wait_until_listening()
        (event,) = self.daemon.events("archive endpoint listens")
        self.worker_pids = [one["pid"] for one in self.daemon.status()["gateway_workers"]]
        self.pids = [self.daemon.server.pid, *self.worker_pids]
        self.memory_before = [_memory_mib(pid) for pid in self.worker_pids]
        self.port = event["port"]

    @property
    def connections(self) -> list[int]:
        """Return how many connections each worker has."""
        return [one["connections"] for one in self.daemon.status()["gateway_workers"]]

    def close(self) -> None:
        """End the endpoint."""
        self.daemon.server.stop()


def _frames(offsets: Iterable[int]) -> list[bytes]:
    return [
        request_frame(
            fetch_request(
                12,
                {_TOPIC: {0: {"fetch_offset": offset, "partition_max_bytes": _ANSWER_BYTES}}},
                max_bytes=_ANSWER_BYTES,
                isolation_level=0,
            )
        )
        for offset in offsets
    ]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int) -> tuple[float, float]:
    """Return the resident memory of a process, and the part of it that is its own alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {
        name: int(rest.split()[0]) / 1024 for name, _, rest in (line.partition(":") for line in lines[1:])
    }
    return found["Rss"], found["Private_Clean"] + found["Private_Dirty"]


def _measured(clients: dict[str, _Readers], *, rounds: int, seconds: float) -> dict[str, Figures]:
    samples: dict[str, list[Sample]] = {name: [] for name in clients}
    for client in clients.values():
        client.read(2 * seconds)  # Fills the cache, and checks each chunk in each worker.
    for _ in range(rounds):
        for name, client in clients.items():
            samples[name].append(client.read(seconds))
    return {name: Figures.of(each) for name, each in samples.items()}


def _ratios(two: _Serving, figures: dict[str, Figures]) -> dict[str, float]:
    one_worker, two_workers = figures["1 worker"], figures["2 workers"]
    one_bare, two_bare = figures["1 bare process"], figures["2 bare processes"]
    after = [_memory_mib(pid) for pid in two.worker_pids]
    return {
        "two_workers_vs_one": two_workers.throughput_median / one_worker.throughput_median,
        "two_processors_vs_one": two_workers.throughput_median / figures["1 processor"].throughput_median,
        "two_bare_vs_one": two_bare.throughput_median / one_bare.throughput_median,
        # Where other work takes the processors, this is what two of them would carry by what a GiB costs.
        "two_workers_vs_one_by_cpu": 2 * one_worker.cpu_seconds_per_gib / two_workers.cpu_seconds_per_gib,
        "two_bare_vs_one_by_cpu": 2 * one_bare.cpu_seconds_per_gib / two_bare.cpu_seconds_per_gib,
        "cpu_per_gib_one": one_worker.cpu_seconds_per_gib,
        "cpu_per_gib_two": two_workers.cpu_seconds_per_gib,
        "cpu_per_gib_one_processor": figures["1 processor"].cpu_seconds_per_gib,
        "cpu_per_gib_one_bare": one_bare.cpu_seconds_per_gib,
        "cpu_per_gib_two_bare": two_bare.cpu_seconds_per_gib,
        "worker_idle_mib": median(rss for rss, _ in two.memory_before),
        "worker_idle_own_mib": median(own for _, own in two.memory_before),
        "worker_mib": median(rss for rss, _ in after),
        "worker_own_mib": median(own for _, own in after),
    }


def main() -> None:
    """Measure, print, and write the JSON file if one is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    rounds, seconds = (5, 1.0) if options.quick else (15, 2.0)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        frames = _frames(asyncio.run(_make_archive(directory)))
        (directory / "bare").write_bytes(Random(2).randbytes(_SEGMENTS * _RECORDS * _VALUE_BYTES))
        clients: dict[str, _Readers] = {}
        for workers in (1, 2):
            serving = _Serving(directory, workers)
            stack.callback(serving.close)
            clients[f"{workers} worker" + "s" * (workers > 1)] = _Readers(
                [serving.port], serving.pids, frames
            )
            if workers == 1:
                clients["1 processor"] = _Readers([serving.port], serving.pids, frames, processors={0})
        for processes in (1, 2):
            bare = stack.enter_context(BareSenders(directory / "bare", processes, answer_bytes=_ANSWER_BYTES))
            clients[f"{processes} bare process" + "es" * (processes > 1)] = _Readers(
                bare.ports, bare.pids, frames
            )
        # Of this thread, and so of the readers' threads: the servers keep theirs.
        os.nice(19)
        print(f"connections of each worker: {serving.connections}; load {os.getloadavg()[0]:.1f}")
        figures = _measured(clients, rounds=rounds, seconds=seconds)
        ratios = _ratios(serving, figures)
        for client in clients.values():
            client.close()
    print_table(figures, reference="1 worker")
    for key, value in ratios.items():
        print(f"{key} {value:.3f}")
    if options.json is not None:
        write_json(
            options.json, name="gateway_workers", machine=machine("uvloop"), figures=figures, ratios=ratios
        )


if __name__ == "__main__":
    main()
