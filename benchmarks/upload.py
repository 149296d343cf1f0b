"""
How fast does the daemon upload, and what does it cost, beside the tools one could use instead?

Seven parts, each a file of its own; each can be run alone:

* plain: closed segments of 64 MiB, in the page cache, to an S3 server that discards them. The daemon
  checks every batch, indexes it and stores a sidecar as well; the others move bytes.
* tls: the same over TLS.
* reads: ranged GETs of 16 MiB.
* small: objects of 256 KiB and of 4 KiB.
* clouds: Google's and Azure's stores, over TLS.
* stalls: the longest stall of the event loop while cold files are uploaded.
* waiting: memory while 200 segments of 1 GiB wait (24 with --quick, which leaves it out unless asked).

Alternatives take turns, all of them in each round, because a machine's speed drifts. Before that, a round
that is not timed proves that all deliver the same bytes, and every timed round counts them.

    python -m benchmarks.upload [--quick] [--only PART ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.certificate import Certificate, write_certificate
from benchmarks.clouds import ALTERNATIVES as CLOUDS
from benchmarks.harness import machine, print_table, write_json
from benchmarks.peers import (
    Obstore,
    ObstoreChecked,
    ObstoreMapped,
    ObstoreOnePut,
    S5cmd,
    Tieringd,
    TieringdBytesOnly,
)
from benchmarks.raw_sockets import RawSocket, RawTlsSocket
from benchmarks.reads import measure_reads
from benchmarks.segments import write_partition
from benchmarks.small import SIZES, measure_small, write_objects
from benchmarks.stalls import measure_stalls
from benchmarks.turns import Work, measure_uploads
from benchmarks.waiting import measure_waiting, write_big_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.harness import Alternative, Figures

PLAIN: dict[str, Callable[..., Alternative]] = {
    "tieringd": Tieringd,
    "s5cmd": S5cmd,
    "obstore": Obstore,
    "obstore, one PUT": ObstoreOnePut,
    "obstore, mapped": ObstoreMapped,
    "obstore, same checks": ObstoreChecked,
    "tieringd, bytes only": TieringdBytesOnly,
    "raw socket": RawSocket,
}
TLS: dict[str, Callable[..., Alternative]] = {
    "tieringd": Tieringd,
    "obstore": Obstore,
    "obstore, one PUT": ObstoreOnePut,
    "tieringd, bytes only": TieringdBytesOnly,
    "raw socket": RawTlsSocket,
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts share, and where they leave what they found."""

    root: Path
    work: Work
    certificate: Certificate
    is_quick: bool
    figures: dict[str, Figures | float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def few(self) -> Work:
        """Return the work in fewer rounds, for parts that are slower."""
        return replace(self.work, rounds=min(self.work.rounds, 2 if self.is_quick else 7))

    def note(self, part: str, figures: Mapping[str, Figures | float], ratios: Mapping[str, float]) -> None:
        """Keep a part's figures, and print its ratios and single figures."""
        self.figures.update({f"{part}: {name}": value for name, value in figures.items()})
        self.ratios.update(ratios)
        singles = {name: value for name, value in figures.items() if isinstance(value, float)}
        print()
        for name, value in (singles | dict(ratios)).items():
            print(f"{name:44} {value:8.2f}")

    def title(self, text: str) -> None:
        """Begin a part's output, with what else the machine is doing."""
        print(f"\n== {text} (load {os.getloadavg()[0]:.1f})\n", flush=True)


def main() -> None:
    """Measure, print the tables, and write the JSON file if there is to be one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.upload", description="Measure the paths to and from the store."
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer segments and rounds, without the part `waiting`"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--segments", type=int, help="segments of 64 MiB in each round")
    parser.add_argument("--rounds", type=int, help="timed rounds")
    options = parser.parse_args()
    segments = options.segments or (4 if options.quick else 16)
    rounds = options.rounds or (2 if options.quick else 11)
    where = machine("aiobotocore", "obstore", "s5cmd")
    print(f"{segments} segments of 64 MiB to a sink that discards them, {rounds} rounds in turns\n{where}")
    with tempfile.TemporaryDirectory(prefix="tieringd-upload-") as directory:
        root = Path(directory)
        logs = write_partition(root / "log" / "benchmark-0", segments=segments)
        bench = Bench(root, Work(root / "log", logs, rounds), write_certificate(root), is_quick=options.quick)
        for name in options.only or (_QUICK_PARTS if options.quick else PARTS):
            PARTS[name](bench)
    if options.json:
        write_json(options.json, name="upload", machine=where, figures=bench.figures, ratios=bench.ratios)


def plain(bench: Bench) -> None:
    """Upload without TLS."""
    bench.title("plain: uploads over HTTP")
    figures, sink_cpu = measure_uploads(PLAIN, bench.work)
    print_table(figures, reference="tieringd")
    _print_sink(sink_cpu)
    ratios: dict[str, float] = {}
    for name in PLAIN:
        if not name.startswith("tieringd"):
            key = name.replace(",", "").replace(" ", "_").lower()
            ratios[f"throughput_vs_{key}"] = _throughput(figures, "tieringd", name)
            ratios[f"cpu_vs_{key}"] = _cpu(figures, "tieringd", name)
    for name in ("obstore", "raw socket"):
        key = name.replace(" ", "_")
        ratios[f"bytes_only_throughput_vs_{key}"] = _throughput(figures, "tieringd, bytes only", name)
        ratios[f"bytes_only_cpu_vs_{key}"] = _cpu(figures, "tieringd, bytes only", name)
    bench.note("plain", figures, ratios)


def tls(bench: Bench) -> None:
    """Upload over TLS."""
    bench.title("tls: uploads over TLS")
    figures, sink_cpu = measure_uploads(TLS, bench.few, certificate=bench.certificate)
    print_table(figures, reference="tieringd")
    _print_sink(sink_cpu)
    bench.note(
        "tls",
        figures,
        {
            "tls_vs_raw_socket": _throughput(figures, "tieringd", "raw socket"),
            "tls_vs_obstore": _throughput(figures, "tieringd", "obstore"),
            "tls_bytes_only_vs_raw_socket": _throughput(figures, "tieringd, bytes only", "raw socket"),
            "tls_bytes_only_vs_obstore": _throughput(figures, "tieringd, bytes only", "obstore"),
            "tls_cpu_vs_raw_socket": _cpu(figures, "tieringd", "raw socket"),
            "tls_cpu_vs_obstore": _cpu(figures, "tieringd", "obstore"),
        },
    )


def reads(bench: Bench) -> None:
    """Read ranges, without TLS and with it."""
    for prefix, certificate in (("", None), ("tls_", bench.certificate)):
        bench.title(f"reads: ranges of 16 MiB, {'over HTTP' if certificate is None else 'over TLS'}")
        figures, sink_cpu = measure_reads(
            bench.root / "log", rounds=bench.few.rounds, certificate=certificate
        )
        print_table(figures, reference="tieringd")
        _print_sink(sink_cpu)
        ratios = {
            f"{prefix}get_vs_obstore": _throughput(figures, "tieringd", "obstore"),
            f"{prefix}get_vs_raw_socket": _throughput(figures, "tieringd", "raw socket"),
            f"{prefix}get_cpu_vs_obstore": _cpu(figures, "tieringd", "obstore"),
        }
        bench.note(f"{prefix}reads", figures, ratios)


def small(bench: Bench) -> None:
    """Put small objects."""
    for name, size_bytes in SIZES.items():
        bench.title(f"small: objects of {name}, 16 at once")
        directory = bench.root / f"objects-{size_bytes}"
        count = (400 if bench.is_quick else 2000) if size_bytes > 64 << 10 else 2000
        write_objects(directory, count=count, size_bytes=size_bytes)
        figures = measure_small(directory, count=count, rounds=bench.few.rounds)
        print_table(figures, reference="tieringd", unit="1000")
        key = name.replace(" ", "").lower()
        ratios = {
            f"put_{key}_vs_{peer.replace(' ', '_')}": _throughput(figures, "tieringd", peer)
            for peer in figures
            if peer != "tieringd"
        }
        if size_bytes == min(SIZES.values()):
            # A worker counts thousands: CPU seconds for each of them are milliseconds for an object.
            ratios["small_put_cpu_ms"] = figures["tieringd"].cpu_seconds_per_gib
            ratios["small_puts_per_s"] = figures["tieringd"].throughput_median * 1000
        bench.note(f"small {name}", figures, ratios)


def clouds(bench: Bench) -> None:
    """Upload to Google's and Azure's stores."""
    bench.title("clouds: Google's and Azure's stores, bytes only, over TLS")
    figures, sink_cpu = measure_uploads(CLOUDS, bench.few, certificate=bench.certificate)
    print_table(figures, reference="tieringd, GCS")
    _print_sink(sink_cpu)
    ratios = {}
    for cloud in ("GCS", "Azure"):
        own = f"tieringd, {cloud}"
        ratios[f"{cloud.lower()}_vs_obstore"] = _throughput(figures, own, f"obstore, {cloud}")
        ratios[f"{cloud.lower()}_vs_raw_socket"] = _throughput(figures, own, "raw socket")
        ratios[f"{cloud.lower()}_cpu_vs_obstore"] = _cpu(figures, own, f"obstore, {cloud}")
    bench.note("clouds", figures, ratios)


def stalls(bench: Bench) -> None:
    """Watch the loop while cold files are uploaded, without TLS and with it."""
    for prefix, certificate in (("", None), ("tls_", bench.certificate)):
        bench.title(f"stalls: cold files, {'over HTTP' if certificate is None else 'over TLS'}")
        figures = measure_stalls(bench.few, certificate=certificate)
        bench.note(f"{prefix}stalls", {f"{prefix}{name}": value for name, value in figures.items()}, {})


def waiting(bench: Bench) -> None:
    """Measure memory under a backlog; in a quick run with fewer segments, and without TLS only."""
    log = write_big_segment(bench.root / "big" / "waiting-0")
    segments, seconds = (24, 5.0) if bench.is_quick else (200, 30.0)
    for prefix, certificate in (("", None),) if bench.is_quick else (("", None), ("tls_", bench.certificate)):
        transport = "over HTTP" if certificate is None else "over TLS"
        bench.title(f"waiting: {segments} segments of 1 GiB, {transport}")
        figures = measure_waiting(
            bench.root / f"{prefix}waiting", log, segments=segments, seconds=seconds, certificate=certificate
        )
        bench.note(f"{prefix}waiting", {f"{prefix}{name}": value for name, value in figures.items()}, {})


PARTS: dict[str, Callable[[Bench], None]] = {
    part.__name__: part for part in (plain, tls, reads, small, clouds, stalls, waiting)
}


_QUICK_PARTS = [name for name in PARTS if name != "waiting"]
"""Its segments alone take longer to write and to find than the rest of a quick run."""


def _throughput(figures: Mapping[str, Figures], own: str, peer: str) -> float:
    """Return the ratio of medians: better above 1."""
    return figures[own].throughput_median / figures[peer].throughput_median


def _cpu(figures: Mapping[str, Figures], own: str, peer: str) -> float:
    """Return the ratio of medians: better below 1."""
    return figures[own].cpu_seconds_per_gib / figures[peer].cpu_seconds_per_gib


def _print_sink(cpu: Mapping[str, float]) -> None:
    print("\nCPU s/GiB of the sink: " + "; ".join(f"{name} {value:.2f}" for name, value in cpu.items()))


if __name__ == "__main__":
    main()
