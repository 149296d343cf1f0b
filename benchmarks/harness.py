"""
Timing in worker processes, tables, and the JSON file: what every benchmark here shares.

Each alternative lives in a process of its own, so that its CPU seconds are its alone. A worker
stays alive over all rounds: only what happens between two clock readings is counted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection

GIB = 1 << 30


class Alternative(Protocol):
    """A way to do the work that is measured. Built, used and closed in one process."""

    def upload(self) -> None:
        """Do the work once."""

    def sent(self) -> Mapping[str, Path | bytes]:
        """Return what the last `upload` sent: by key, the file or the bytes."""

    def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed round of one alternative."""

    seconds: float
    cpu_seconds: float
    """CPU seconds of the client and its children, user and system."""
    gibibytes: float

    @property
    def throughput(self) -> float:
        """Return GiB a second."""
        return self.gibibytes / self.seconds

    @property
    def cpu_per_gib(self) -> float:
        """Return CPU seconds for each GiB."""
        return self.cpu_seconds / self.gibibytes


@dataclass(frozen=True, slots=True)
class Figures:
    """All rounds of one alternative, summed up."""

    throughput_min: float
    throughput_median: float
    throughput_max: float
    cpu_seconds_per_gib_min: float
    cpu_seconds_per_gib: float
    """The median."""
    cpu_seconds_per_gib_max: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """Return the figures of *samples*."""
        throughput = [sample.throughput for sample in samples]
        cpu = [sample.cpu_per_gib for sample in samples]
        return cls(
            min(throughput),
            median(throughput),
            max(throughput),
            min(cpu),
            median(cpu),
            max(cpu),
            len(samples),
        )


class Worker:
    """The process of one alternative, as its parent sees it. A context manager."""

    def __init__(self, build: Callable[..., Alternative], *arguments: object, gibibytes: float) -> None:
        self._gibibytes = gibibytes
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, build, arguments), name=build.__name__)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._connection.close()
        self._process.join()

    def upload(self) -> Sample:
        """Do the work once, timed."""
        seconds, cpu_seconds = self._ask("upload")
        return Sample(seconds, cpu_seconds, self._gibibytes)

    def sent_files(self) -> dict[str, Path | bytes]:
        """Return what the last `upload` sent, by key."""
        return dict(self._ask("sent"))

    def _ask(self, question: str) -> Any:
        self._connection.send(question)
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"{self._process.name} failed; its error stands above") from None


def _run(connection: Connection, build: Callable[..., Alternative], arguments: tuple[object, ...]) -> None:
    alternative = build(*arguments)
    try:
        while True:
            try:
                question = connection.recv()
            except EOFError:
                return
            if question == "sent":
                connection.send(alternative.sent())
                continue
            cpu_before, before = _cpu_seconds(), time.perf_counter()
            alternative.upload()
            after, cpu_after = time.perf_counter(), _cpu_seconds()
            connection.send((after - before, cpu_after - cpu_before))
    finally:
        alternative.close()


def _cpu_seconds() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def machine(*distributions: str) -> str:
    """Return in one line what a figure was measured on, with the versions of *distributions*."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = ", ".join(f"{name} {version(name)}" for name in distributions)
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} x {model}, {system}, {versions}"


def print_table(rows: Mapping[str, Figures], *, reference: str, unit: str = "GiB") -> None:
    """
    Print a line for each of *rows*, with its ratios to the row *reference*.

    *unit* says what the workers' samples count, if that is something else than GiB.
    """
    width = max(map(len, rows))
    own = rows[reference]
    speed, cost = f"{unit}/s", f"CPU s/{unit}, client"
    print(f"{'':{width}}  |{speed:^19}| {cost:^20}| {reference} against it")
    print(f"{'':{width}}  |  min   med   max  |  min    med    max | throughput   CPU")
    for name, row in rows.items():
        faster = own.throughput_median / row.throughput_median
        cheaper = own.cpu_seconds_per_gib / row.cpu_seconds_per_gib
        low, middle, high = row.throughput_min, row.throughput_median, row.throughput_max
        print(
            f"{name:{width}}  | {low:5.2f} {middle:5.2f} {high:5.2f} "
            f"| {row.cpu_seconds_per_gib_min:6.3f} {row.cpu_seconds_per_gib:6.3f} "
            f"{row.cpu_seconds_per_gib_max:6.3f} | {faster:9.2f}x {cheaper:5.2f}x"
        )


def write_json(
    path: Path,
    *,
    name: str,
    machine: str,
    figures: Mapping[str, Figures | float],
    ratios: Mapping[str, float],
) -> None:
    """Write a run's result to *path*."""
    document = {
        "name": name,
        "machine": machine,
        "figures": {
            key: asdict(value) if isinstance(value, Figures) else value for key, value in figures.items()
        },
        "ratios": dict(ratios),
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def process_cpu_seconds(pid: int) -> float:
    """Return the user and system time of a running process, without that of its children."""
    # After the command's name, which may hold anything, come the state and then 11 more fields.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
