"""
How long does a command take that does nothing: `tieringd version`, from its start to its end?

Each run is a process of its own, started as a shell does. The first one is not counted: it may compile
modules, and it brings their files into the page cache. CPU seconds are beside the time, because other work on
the machine changes them less.

    python -m benchmarks.command_start [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import machine, write_json
from tests.support.processes import program

_ROUNDS, _QUICK_ROUNDS = 31, 11


def main() -> None:
    """Measure, print the figures, and write the JSON file if there is to be one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.command_start", description="Measure how long `tieringd version` takes."
    )
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROUNDS} runs, a few seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args()
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    _run_once()
    samples = [_run_once() for _ in range(rounds)]
    figures = {
        "version_seconds": median(seconds for seconds, _ in samples),
        "version_seconds_min": min(seconds for seconds, _ in samples),
        "version_seconds_max": max(seconds for seconds, _ in samples),
        "version_cpu_seconds": median(cpu_seconds for _, cpu_seconds in samples),
    }
    where = machine("typer")
    print(f"tieringd version, {rounds} runs")
    print(where)
    print()
    for name, value in figures.items():
        print(f"{name:24} {value:6.3f}")
    if options.json:
        write_json(options.json, name="command_start", machine=where, figures=figures, ratios={})


def _run_once() -> tuple[float, float]:
    """Run the command to its end; return its seconds, and its CPU seconds."""
    cpu_before, before = _cpu_seconds(), time.monotonic()
    subprocess.run([program("tieringd"), "version"], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - before, _cpu_seconds() - cpu_before


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
