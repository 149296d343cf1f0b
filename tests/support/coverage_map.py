"""
Record what each test file runs: `make coverage-map`, or `python -m tests.support.coverage_map [FILE ...]`.

Each test file runs in a pytest of its own, so that shared fixtures are recorded for it too.
`tests/coverage.json` gets the modules of tieringd whose functions ran in that process and in the processes
that it started (`tests/support/ran_modules`). A file with a failed or skipped test is left out, because not
everything that it runs was recorded. `tests.support.affected` reads the map.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from tests.support.affected import (
    ROOT,
    CoverageMap,
    digest_of,
    digests_of_tests,
    import_graph,
    module_of,
    tracked_files,
)
from tests.support.suite_report import load_durations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_RECORDER: Final = Path(__file__).parent / "ran_modules"


@contextmanager
def recorder_in(site_packages: Path) -> Iterator[None]:
    """
    Make every Python process that reads *site_packages* record its modules in `TIERINGD_RAN_MODULES`, if set.

    PYTHONPATH cannot be used for this, as tests set it for the processes that they start.
    """
    path = site_packages / f"tieringd_ran_modules_{os.getpid()}.pth"
    start = 'import os; "TIERINGD_RAN_MODULES" in os.environ and __import__("ran_modules_recorder")'
    path.write_text(f"{_RECORDER}\n{start}\n")
    try:
        yield
    finally:
        path.unlink()


@dataclass(frozen=True, slots=True)
class Recording:
    """The modules that one test file ran."""

    modules: frozenset[str]
    problem: str
    """Why the recording is incomplete; empty if it is complete."""


def record(test: str) -> Recording:
    """Run a test file, and return the modules whose functions ran."""
    with tempfile.TemporaryDirectory(prefix="tieringd-ran-") as directory:
        ran, report = Path(directory) / "ran", Path(directory) / "report.xml"
        ran.touch()
        environ = os.environ | {"TIERINGD_RAN_MODULES": str(ran)}
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", test]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        modules = frozenset(module_of(line) for line in ran.read_text().splitlines())
        if done.returncode:
            return Recording(modules, f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        suites = ET.parse(report).getroot().iter("testsuite")
        skipped = sum(int(suite.get("skipped", "0")) for suite in suites)
        return Recording(modules, f"{skipped} tests were skipped" if skipped else "")


def merged(
    old: CoverageMap,
    recordings: Mapping[str, Recording],
    *,
    test_digests: Mapping[str, str],
    module_digests: Mapping[str, str],
) -> CoverageMap:
    """
    Return a map with the new recordings, and with the entries of the old map that are still valid.

    An old entry with a module that has changed since is dropped, because the map has one digest for each
    module.
    """
    stale = {one for one, digest in old.module_digests.items() if module_digests.get(one) != digest}
    ran = {
        test: modules
        for test, modules in old.ran.items()
        if test not in recordings
        and not stale.intersection(modules)
        and old.test_digests[test] == test_digests.get(test)
    }
    ran |= {test: one.modules for test, one in recordings.items() if not one.problem}
    return CoverageMap(
        ran=ran,
        test_digests={test: test_digests[test] for test in ran},
        module_digests={one: module_digests[one] for modules in ran.values() for one in modules},
    )


def main() -> int:
    """Record, write the map, and print the test files that could not be recorded; then return 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.coverage_map", description="Record what each test file runs."
    )
    parser.add_argument("tests", nargs="*", help="test files or folders; all without")
    parser.add_argument("--workers", type=int, default=1, help="test files at a time")
    options = parser.parse_args()
    files = tracked_files()
    tests = [file for file in files if Path(file).name.startswith("test_")]
    wanted = options.tests or ["tests"]
    chosen = [test for test in tests if any(Path(test).is_relative_to(one) for one in wanted)]
    seconds = load_durations()
    chosen.sort(key=lambda test: -seconds.get(test, 0.0))
    recordings: dict[str, Recording] = {}
    with recorder_in(Path(sysconfig.get_path("purelib"))), ThreadPoolExecutor(options.workers) as threads:
        for test, one in zip(chosen, threads.map(record, chosen), strict=True):
            recordings[test] = one
            says = f"NOT RECORDED, {one.problem}" if one.problem else f"{len(one.modules)} modules"
            sys.stdout.write(f"[{len(recordings)}/{len(chosen)}] {test}: {says}\n")
            sys.stdout.flush()
    graph = import_graph(files)
    merged(
        CoverageMap.load(),
        recordings,
        test_digests=digests_of_tests(tests, files, graph, ROOT),
        module_digests={module_of(file): digest_of([(ROOT / file).read_text()]) for file in files},
    ).write()
    return 1 if any(one.problem for one in recordings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
