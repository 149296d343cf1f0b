"""Uploads in turns: prove first that all alternatives deliver the same bytes, then time them."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import GIB, Figures, Worker
from benchmarks.sink import Received, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.certificate import Certificate
    from benchmarks.harness import Alternative, Sample


@dataclass(frozen=True, slots=True)
class Work:
    """A partition's closed segments, and how often each alternative uploads them."""

    log_dir: Path
    logs: list[Path]
    rounds: int

    @property
    def gibibytes(self) -> float:
        """Return the segments' size."""
        return sum(path.stat().st_size for path in self.logs) / GIB


def measure_uploads(
    alternatives: Mapping[str, Callable[..., Alternative]],
    work: Work,
    *,
    certificate: Certificate | None = None,
) -> tuple[dict[str, Figures], dict[str, float]]:
    """
    Verify and warm up every alternative, then time them in turns.

    Returns the figures of each, and what a GiB from it cost the sink on average.
    """
    with ExitStack() as resources:
        sink = resources.enter_context(Sink(certificate))
        workers = {
            name: resources.enter_context(
                Worker(build, work.log_dir, sink.endpoint, gibibytes=work.gibibytes)
            )
            for name, build in alternatives.items()
        }
        samples: dict[str, list[Sample]] = {name: [] for name in workers}
        sink_cpu = dict.fromkeys(workers, 0.0)
        for name, worker in workers.items():
            sink.begin(verify=True)
            worker.upload()
            _require_all_delivered(name, worker, sink, work.logs, verify=True)
        for _ in range(work.rounds):
            for name, worker in workers.items():
                sink.begin(verify=False)
                sink_cpu[name] -= sink.cpu_seconds()
                samples[name].append(worker.upload())
                sink_cpu[name] += sink.cpu_seconds()
                _require_all_delivered(name, worker, sink, work.logs, verify=False)
        figures = {name: Figures.of(taken) for name, taken in samples.items()}
        return figures, {name: cpu / work.gibibytes / work.rounds for name, cpu in sink_cpu.items()}


def _require_all_delivered(name: str, worker: Worker, sink: Sink, logs: list[Path], *, verify: bool) -> None:
    sent, received = worker.sent_files(), sink.received()
    assert sorted(value for value in sent.values() if isinstance(value, Path)) == logs, (
        f"{name}: some segment was left out"
    )
    assert received.keys() == sent.keys(), f"{name}: {received.keys() ^ sent.keys()} is only on one side"
    for key, source in sent.items():
        expected = _expected(source, verify=verify)
        assert received[key] == expected, f"{name}: {key} is {received[key]} and should be {expected}"


def _expected(source: Path | bytes, *, verify: bool) -> Received:
    if not verify:
        return Received(len(source) if isinstance(source, bytes) else source.stat().st_size, None)
    data = source if isinstance(source, bytes) else source.read_bytes()
    return Received(len(data), hashlib.sha256(data).hexdigest())
