"""
How fast does the daemon upload, and what does a GiB cost it, beside the tools one could use instead?

The work: closed segments of 64 MiB, in the page cache, to an S3 server that discards them. The
daemon checks every batch, indexes it and stores a sidecar as well; the others move bytes. They take
turns, all of them in each round, because a machine's speed drifts. Before that, a round that is
not timed proves that all deliver the same bytes, and every timed round counts them.

    python -m benchmarks.upload [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import GIB, Figures, Sample, Worker, machine, print_table, write_json
from benchmarks.peers import ALTERNATIVES
from benchmarks.segments import write_partition
from benchmarks.sink import Received, Sink

_SEGMENTS, _ROUNDS = 16, 11
_QUICK_SEGMENTS, _QUICK_ROUNDS = 8, 3

_RATIOS = {
    "s5cmd": "s5cmd",
    "obstore": "obstore",
    "obstore_one_put": "obstore, one PUT",
    "obstore_mapped": "obstore, mapped",
    "obstore_same_checks": "obstore, same checks",
    "raw_socket": "raw socket",
}


def main() -> None:
    """Measure, print the table, and write the JSON file if there is to be one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.upload", description="Measure the upload path."
    )
    parser.add_argument("--quick", action="store_true", help="fewer segments and rounds, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--segments", type=int, help="segments of 64 MiB in each round")
    parser.add_argument("--rounds", type=int, help="timed rounds")
    options = parser.parse_args()
    segments = options.segments or (_QUICK_SEGMENTS if options.quick else _SEGMENTS)
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    where = machine("aiobotocore", "obstore", "s5cmd")
    with tempfile.TemporaryDirectory(prefix="tieringd-upload-") as directory:
        log_dir = Path(directory) / "log"
        logs = write_partition(log_dir / "benchmark-0", segments=segments)
        samples, sink_cpu = measure(log_dir, logs, rounds=rounds)
    figures = {name: Figures.of(taken) for name, taken in samples.items()}
    ratios = compare(figures)
    print(f"{segments} segments of 64 MiB to a sink that discards them, {rounds} rounds in turns")
    print(where)
    print()
    print_table(figures, reference="tieringd")
    print()
    for name, value in ratios.items():
        print(f"{name:36} {value:6.2f}")
    print()
    print("CPU s/GiB of the sink: " + "; ".join(f"{name} {value:.2f}" for name, value in sink_cpu.items()))
    if options.json:
        write_json(options.json, name="upload", machine=where, figures=figures, ratios=ratios)


def measure(
    log_dir: Path, logs: list[Path], *, rounds: int
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """
    Verify and warm up every alternative, then time them in turns.

    Returns the samples of each, and what a GiB from it cost the sink on average.
    """
    gibibytes = sum(path.stat().st_size for path in logs) / GIB
    with ExitStack() as resources:
        sink = resources.enter_context(Sink())
        workers = {
            name: resources.enter_context(Worker(build, log_dir, sink.port, gibibytes=gibibytes))
            for name, build in ALTERNATIVES.items()
        }
        samples: dict[str, list[Sample]] = {name: [] for name in workers}
        sink_cpu = dict.fromkeys(workers, 0.0)
        for name, worker in workers.items():
            sink.begin(verify=True)
            worker.upload()
            _require_all_delivered(name, worker, sink, logs, verify=True)
        for _ in range(rounds):
            for name, worker in workers.items():
                sink.begin(verify=False)
                sink_cpu[name] -= sink.cpu_seconds()
                samples[name].append(worker.upload())
                sink_cpu[name] += sink.cpu_seconds()
                _require_all_delivered(name, worker, sink, logs, verify=False)
        return samples, {name: seconds / gibibytes / rounds for name, seconds in sink_cpu.items()}


def compare(figures: dict[str, Figures]) -> dict[str, float]:
    """Return the ratios of medians: throughput is better above 1, CPU below 1."""
    ratios: dict[str, float] = {}
    for key, name in _RATIOS.items():
        own, peer = figures["tieringd"], figures[name]
        ratios[f"throughput_vs_{key}"] = own.throughput_median / peer.throughput_median
        ratios[f"cpu_vs_{key}"] = own.cpu_seconds_per_gib / peer.cpu_seconds_per_gib
    bytes_only = figures["tieringd, bytes only"]
    for key in ("obstore", "raw_socket"):
        peer = figures[_RATIOS[key]]
        ratios[f"bytes_only_throughput_vs_{key}"] = bytes_only.throughput_median / peer.throughput_median
        ratios[f"bytes_only_cpu_vs_{key}"] = bytes_only.cpu_seconds_per_gib / peer.cpu_seconds_per_gib
    return ratios


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


if __name__ == "__main__":
    main()
