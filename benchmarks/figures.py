"""
Did a change lose a figure? `make figures`, or `python -m benchmarks.figures [--base REVISION]`.

Runs the quick benchmarks that the change can touch, prints the figures before and after side by side, and
exits 1 when one is worse by more than noise. What a ratio to a peer in the same run shows is
compared with `benchmarks/ledger.json`. For seconds, CPU and memory the previous commit runs in
turns with this one, from a temporary worktree. A loss is measured once more, in turns with the previous
commit, before it counts.
`--record` writes the values of this run into the ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.ledger import (
    Comparison,
    Figure,
    Verdict,
    compare_all,
    load_ledger,
    needs_base,
    recorded,
    table,
    values_of,
    write_ledger,
)
from tests.support.affected import (
    ROOT,
    changed_since,
    default_base,
    git,
    import_graph,
    module_of,
    reached_from,
    tracked_files,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What `make figures` has to know of one benchmark."""

    packages: tuple[str, ...]
    """Modules and packages of tieringd that it measures and does not import: it starts commands."""
    minutes: float
    """One quick run, about."""


BENCHMARKS: Final = {
    "upload": Benchmark(("tieringd.daemon.archive", "tieringd.archiving.uploader"), 3),
    "partitions": Benchmark(
        ("tieringd.daemon.assembly", "tieringd.archiving.reconciler", "tieringd.broker.watch"), 1.5
    ),
    "idle_broker": Benchmark(
        (
            "tieringd.daemon.assembly",
            "tieringd.daemon.housekeeping_jobs",
            "tieringd.archiving.reconciler",
            "tieringd.broker.kafka",
        ),
        5,
    ),
    "command_start": Benchmark(("tieringd.cli.main",), 0.3),
    "backlog": Benchmark(
        (
            "tieringd.daemon.assembly",
            "tieringd.archiving.archiver",
            "tieringd.archiving.upload_controller",
            "tieringd.storage.s3",
        ),
        3,
    ),
    "space": Benchmark((), 0.3),
    "manifest": Benchmark((), 0.5),
    "gateway": Benchmark(
        (
            "tieringd.daemon.gateway_service",
            "tieringd.daemon.workers",
            "tieringd.gateway",
            "tieringd.reading.hydrator",
            "tieringd.formats.kafka_wire",
            "tieringd.cache",
        ),
        2,
    ),
    "kafka_tiering": Benchmark(
        (
            "tieringd.daemon.assembly",
            "tieringd.archiving.archiver",
            "tieringd.archiving.upload_controller",
            "tieringd.gateway",
            "tieringd.reading.hydrator",
            "tieringd.storage.file",
        ),
        2.5,
    ),
    "merge": Benchmark((), 1),
    "decode": Benchmark(("tieringd.spark.decoder",), 1),
    "spark": Benchmark(("tieringd.spark.source", "tieringd.spark.worker_daemon"), 2),
    "spark_scrub": Benchmark(("tieringd.spark.worker_daemon",), 1),
    "spark_scale": Benchmark((), 3),
}
"""The quick ones, in the order they run."""

_WIDE: Final = ("pyproject.toml", "benchmarks/harness.py")
"""A change of these can touch every benchmark."""

_STARTERS: Final = frozenset({"tests.support.daemon", "tests.support.warm_start"})
"""They start any command, and so import everything; the table says what of it a benchmark measures."""


def lies_in(module: str, package: str) -> bool:
    """Say whether a module is *package* or lies below it."""
    return module == package or module.startswith(f"{package}.")


def chosen_benchmarks(
    changed: Collection[str],
    graph: Mapping[str, Collection[str]],
    benchmarks: Mapping[str, Benchmark] = BENCHMARKS,
) -> dict[str, str]:
    """
    Return the benchmarks that a change can touch, each with the reason.

    Args:
        changed: Paths from the repository's root.
        graph: Each module with those that it imports.
        benchmarks: All there are.
    """
    if wide := sorted(set(changed) & set(_WIDE)):
        return dict.fromkeys(benchmarks, f"{wide[0]} changed")
    precise = {module: set(named) for module, named in graph.items()}
    for module in _STARTERS & precise.keys():
        precise[module] = {one for one in precise[module] if not lies_in(one, "tieringd")}
    modules = {module_of(one) for one in changed if one.endswith(".py") and not one.startswith("tests/unit/")}
    chosen = {}
    for name, benchmark in benchmarks.items():
        for module in sorted(modules):
            reached = reached_from(precise, {module})
            measured = (f"benchmarks.{name}", *benchmark.packages)
            if any(lies_in(one, package) for one in reached for package in measured):
                chosen[name] = f"it measures {module}"
                break
    return chosen


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of one benchmark gave."""

    values: Mapping[str, float]
    machine: str


def command_of(name: str, *, is_quick: bool) -> list[str]:
    """Return a benchmark's command line, as the ledger records it."""
    return ["python", "-m", f"benchmarks.{name}", *(["--quick"] if is_quick else [])]


def run_benchmark(name: str, tree: Path, *, is_quick: bool) -> Run:
    """
    Run a benchmark of the sources in *tree*, with this interpreter and its packages.

    Raises:
        RuntimeError: The benchmark failed; its output is in the message.
    """
    environ = os.environ | {"PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory(prefix="tieringd-figures-") as directory:
        path = Path(directory) / "figures.json"
        done = subprocess.run(
            [sys.executable, *command_of(name, is_quick=is_quick)[1:], "--json", str(path)],
            cwd=tree,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"benchmarks.{name} failed in {tree}:\n{done.stdout}")
        document = json.loads(path.read_text())
    return Run(values_of(document), document["machine"])


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """Give a temporary worktree of *revision*, and remove it."""
    with tempfile.TemporaryDirectory(prefix="tieringd-base-") as directory:
        tree = Path(directory) / "tree"
        git("worktree", "add", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


class Measuring:
    """The runs of the chosen benchmarks."""

    def __init__(self, ledger: Sequence[Figure], base: Path | None, *, is_quick: bool) -> None:
        self._ledger = ledger
        self._base = base
        self._is_quick = is_quick
        self._before: dict[str, list[Run]] = {}
        self._after: dict[str, list[Run]] = {}

    def measure(self, name: str, *, rounds: int, is_confirming: bool = False) -> None:
        """
        Run a benchmark, *rounds* times before and after in turns where its figures need that.

        Ratios need one run of this commit. To confirm a loss, both commits run all the same: a quick run's
        ratios differ from those of a whole one, and from machine to machine.
        """
        base = self._base
        if not needs_base(self._ledger, name) and not is_confirming:
            base, rounds = None, 1
        elif base is not None and not (base / "benchmarks" / f"{name}.py").exists():
            base = None
        for number in range(rounds):
            for runs, tree, which in ((self._before, base, "before"), (self._after, ROOT, "after")):
                if tree is not None:
                    print(f"{name}: {which}, round {number + 1} of {rounds}", flush=True)
                    runs.setdefault(name, []).append(run_benchmark(name, tree, is_quick=self._is_quick))

    def compare(self) -> list[Comparison]:
        """Compare the medians of what has been measured."""
        return compare_all(
            self._ledger, base=medians(self._before), after=medians(self._after), is_quick=self._is_quick
        )

    def recorded(self, commit: str) -> list[Figure]:
        """Return the ledger with what has been measured."""
        return recorded(
            self._ledger,
            medians(self._after),
            commit=commit,
            machines={name: runs[-1].machine for name, runs in self._after.items()},
            commands={name: shlex.join(command_of(name, is_quick=self._is_quick)) for name in self._after},
        )


def medians(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, float]]:
    """Return by benchmark and figure the median over the runs that gave it."""
    return {
        name: {
            figure: median(run.values[figure] for run in each if figure in run.values)
            for figure in {figure for run in each for figure in run.values}
        }
        for name, each in runs.items()
    }


def main() -> int:
    """Measure what a change can touch; return 1 when a figure is lost or missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument(
        "--base", default="", help="compare with this revision (default: main, or on main HEAD~1)"
    )
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="run these, whatever changed")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--rounds", type=int, default=2, help="of before and after in turns")
    parser.add_argument("--whole", action="store_true", help="without --quick: an hour and more")
    parser.add_argument("--record", action="store_true", help="write this run's values into the ledger")
    options = parser.parse_args()
    base = options.base or default_base()
    if options.record and git("status", "--porcelain"):
        parser.error("commit first: the ledger names the commit that was measured")
    chosen = dict.fromkeys(options.only or (), "it was asked for") or _chosen(base)
    ledger = load_ledger()
    turns = {name: 2 * options.rounds if needs_base(ledger, name) else 1 for name in chosen}
    minutes = sum(BENCHMARKS[name].minutes * turns[name] for name in chosen)
    print(f"{len(chosen)} of {len(BENCHMARKS)} benchmarks can be touched by what differs from {base}")
    for name, reason in chosen.items():
        print(f"  {name}: {reason}; {turns[name]} runs")
    print(f"left out: {', '.join(name for name in BENCHMARKS if name not in chosen) or 'nothing'}")
    print("" if options.whole else f"about {minutes:.0f} minutes", flush=True)
    if options.list or not chosen:
        return 0
    with tree_of(base) as tree:
        measuring = Measuring(ledger, tree, is_quick=not options.whole)
        for name in chosen:
            measuring.measure(name, rounds=options.rounds)
        lost = {one.figure.benchmark for one in measuring.compare() if one.verdict is Verdict.LOSS}
        for name in sorted(lost):
            print(f"{name} has a loss, and is measured once more")
            measuring.measure(name, rounds=options.rounds, is_confirming=True)
    comparisons = measuring.compare()
    print("", *table(comparisons), sep="\n")
    if options.record:
        write_ledger(measuring.recorded(git("rev-parse", "--short=12", "HEAD")[0]))
        print("benchmarks/ledger.json has this run's values: commit it with the reason")
    failed = [one for one in comparisons if one.has_failed]
    for one in failed:
        print(f"{one.verdict}: {one.figure.benchmark}: {one.figure.name} {one.reason}".rstrip())
    return 1 if failed else 0


def _chosen(base: str) -> dict[str, str]:
    return chosen_benchmarks(changed_since(base), import_graph(tracked_files()))


if __name__ == "__main__":
    sys.exit(main())
