"""
A pytest plugin that reports a run: its plan, its progress, its slowest tests, and the real components used.

`tests/durations.json` has the seconds of each file from a recorded run. They give the expected time, and
let the longest files start first, so that no worker ends with a long file alone. `--record-durations`
writes the file.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.components import USED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xdist.workermanage import WorkerController

ROOT: Final = Path(__file__).parents[2]
DURATIONS: Final = ROOT / "tests" / "durations.json"
GROUPS: Final = (
    "e2e/spark",
    "e2e",
    "integration",
    "contract",
    "simulation",
    "unit/storage",
    "unit/spark",
    "unit",
)
"""Folders of tests, inner folders first. A file belongs to the first folder that contains it."""
SHARED: Final = {
    "three brokers": (
        "tests/e2e/test_cluster_leadership.py",
        "tests/e2e/test_cluster_pins.py",
        "tests/e2e/test_cluster_storm.py",
        "tests/e2e/test_cluster_unclean.py",
        "tests/e2e/test_cluster_uploads.py",
        "tests/e2e/test_recover.py::test_new_producers_with_the_ids_of_old_ones_lose_nothing",
        "tests/e2e/test_storage_commands.py::test_commands_beside_a_follower_tell_what_is_known_there",
        "tests/integration/test_kafka_replicas.py",
    ),
    "a broker behind a gateway": (
        "tests/e2e/test_compaction.py",
        "tests/e2e/test_gateway.py",
        "tests/e2e/test_gateway_workers.py",
        "tests/e2e/test_merging.py",
        "tests/integration/test_gateway_clients.py",
    ),
    "a broker to restore into": (
        "tests/e2e/test_archive_owner.py",
        "tests/e2e/test_data_archiving.py",
        "tests/e2e/test_recover.py",
        "tests/e2e/test_recover_cluster.py",
        "tests/e2e/test_spillover.py",
    ),
    "a Spark session": ("tests/e2e/spark/",),
    "guarded brokers": (
        "tests/integration/test_client_quotas.py",
        "tests/integration/test_kafka_broker.py",
        "tests/integration/test_kafka_log_dirs.py",
    ),
}
"""
What starts once for many tests, with prefixes of the node ids of its tests. One worker runs all of a group,
and a test belongs to the first group that fits. `ended_fixtures` ends it after the group.
"""
WITH_PROCESSES: Final = ("tests/e2e/", "tests/integration/")
"""Folders whose tests come first: their brokers and servers end before the others begin."""
_WITH_PROCESSES_AT_ONCE: Final = 2
_FILLER_NICENESS: Final = 5
_QUICK_TEST_SECONDS: Final = 2
_SLOW_FILE_SECONDS: Final = 15
LONG_TEST_SECONDS: Final = 15
LONG_FILE_SECONDS: Final = 30
_SECONDS_BETWEEN_LINES: Final = 20
_SLOWEST: Final = 10
_SMALL_SUITE: Final = 200
"""Number of tests; smaller runs have pytest's own dots."""


def group_of(file: str) -> str:
    """Return the group of a test file, by its path from the repository's root."""
    return next((group for group in GROUPS if file.startswith(f"tests/{group}/")), "other")


def load_durations(kind: str = "files") -> dict[str, float]:
    """
    Return seconds in the recorded run; empty without a record.

    *kind* is `files` for each test file, or `long_tests` for each test of some seconds.
    """
    if not DURATIONS.exists():
        return {}
    found: dict[str, float] = json.loads(DURATIONS.read_text())[kind]
    return found


def minutes(seconds: float) -> str:
    """Return a time as minutes and seconds for people, such as `1:05`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class SuiteReport:
    """Counts the test reports of one run, in the process that prints the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._begun = time.monotonic()
        self._said_at = self._begun
        self._collected: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._failed = 0
        self._file_seconds: Counter[str] = Counter()
        self._test_seconds: Counter[str] = Counter()
        self.components: set[str] = set()

    def is_large(self) -> bool:
        """Return whether the run prints lines of progress instead of dots."""
        return self._collected.total() >= _SMALL_SUITE

    def collected(self, files: Iterable[str]) -> None:
        """Count the tests of a run, and print the plan once."""
        if self._collected:
            return
        self._collected.update(group_of(file) for file in files)
        if self.is_large():
            self._say(self._plan())

    def _plan(self) -> str:
        counts = ", ".join(f"{group} {self._collected[group]}" for group in GROUPS if self._collected[group])
        recorded = load_durations()
        groups = {group for group in GROUPS if self._collected[group]}
        seconds = sum(took for file, took in recorded.items() if group_of(file) in groups)
        workers = self._workers()
        at_once = workers * self._core_share()
        expected = f"; about {minutes(seconds / at_once)} minutes with {workers} at a time" if seconds else ""
        return f"{self._collected.total()} tests on real components: {counts}{expected}"

    def _workers(self) -> int:
        return max(1, int(self._config.getoption("numprocesses", 0) or 1))

    def _core_share(self) -> float:
        """Return the part of a core that each worker has: four on two cores have a half."""
        return min(1.0, (os.cpu_count() or 1) / self._workers())

    def reported(self, report: pytest.TestReport) -> None:
        """Count one phase of a test, and print a line of progress if the last one is old enough."""
        test = report.nodeid.partition("@")[0]
        file = test.partition("::")[0]
        self._file_seconds[file] += report.duration
        self._test_seconds[test] += report.duration
        self._failed += report.failed
        if report.failed and self.is_large():
            self._say(f"FAILED {test} ({report.when})")
        if report.when == "teardown":
            self._done[group_of(file)] += 1
        now = time.monotonic()
        if self.is_large() and now - self._said_at >= _SECONDS_BETWEEN_LINES:
            self._said_at = now
            self._say(self._progress(now))

    def _progress(self, now: float) -> str:
        parts = [
            f"{group} {self._done[group]}/{self._collected[group]}"
            for group in GROUPS
            if self._collected[group]
        ]
        failed = f", {self._failed} FAILED" if self._failed else ""
        return f"[{minutes(now - self._begun)}] {', '.join(parts)}{failed}"

    def _say(self, line: str) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(line)

    def summary(self, write: Any) -> None:
        """Write the times by group, the slowest files and tests, and the real components."""
        if not self.is_large():
            return
        shares: Counter[str] = Counter()
        for file, seconds in self._file_seconds.items():
            shares[group_of(file)] += seconds
        total = shares.total() or 1.0
        write("Seconds by group, over all workers:")
        for group, seconds in shares.most_common():
            write(f"  {seconds:7.0f}  {100 * seconds / total:4.0f} %  {group} ({self._done[group]} tests)")
        write("Slowest files:")
        for file, seconds in self._file_seconds.most_common(_SLOWEST):
            write(f"  {seconds:7.1f}  {file}")
        write("Slowest tests:")
        for test, seconds in self._test_seconds.most_common(_SLOWEST):
            write(f"  {seconds:7.1f}  {test}")
        write(f"Real components: {', '.join(sorted(self.components)) or 'none'}")

    def record(self, path: Path = DURATIONS) -> None:
        """
        Write the seconds of each file, for the order and the expected time of later runs.

        They are seconds of a core, so that a record does not depend on the number of workers.
        """
        share = self._core_share()
        files, tests = (
            {name: round(share * took, 1) for name, took in seconds.items() if share * took >= least}
            for seconds, least in ((self._file_seconds, 1), (self._test_seconds, _QUICK_TEST_SECONDS))
        )
        document = {
            "cores": os.cpu_count(),
            "wall_seconds": round(time.monotonic() - self._begun),
            "files": dict(sorted(files.items())),
            "long_tests": dict(sorted(tests.items())),
        }
        path.write_text(json.dumps(document, indent=1) + "\n")


def resource_group(test: str) -> str:
    """Return the group of a test, by its node id: an expensive shared resource, or else its file."""
    for group, beginnings in SHARED.items():
        if test.startswith(beginnings):
            return group
    return test.partition("::")[0]


def longest_first(items: list[pytest.Item], seconds: Mapping[str, float]) -> list[pytest.Item]:
    """
    Return *items* with the slowest groups first, and those of processes before all others.

    Tests of a group keep their order.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(resource_group(item.nodeid), []).append(item)

    def rank(group: str) -> tuple[bool, float]:
        files = {_file_of(item.nodeid) for item in groups[group]}
        has_processes = any(file.startswith(WITH_PROCESSES) for file in files)
        return has_processes, sum(seconds.get(file, 0.0) for file in files)

    return [item for group in sorted(groups, key=rank, reverse=True) for item in groups[group]]


def shuffled(items: list[pytest.Item], seed: int, seconds: Mapping[str, float]) -> list[pytest.Item]:
    """
    Return *items* with groups, and the files of each group, in the random order of *seed*.

    Groups of processes still come before all others, as their brokers are shared, and the groups of more than
    one file before those. By their *seconds*, slow files come before fast ones: the last one to begin would
    be the end of the run on one worker. Tests of a file keep their order. Every worker gets the same order
    from the same seed.
    """
    groups: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        files = groups.setdefault(resource_group(item.nodeid), {})
        files.setdefault(_file_of(item.nodeid), []).append(item)
    draw = random.Random(seed)
    names = sorted(groups)
    draw.shuffle(names)
    # Sorting is stable: what is equal here keeps its random order.
    names.sort(key=lambda name: sum(seconds.get(file, 0.0) for file in groups[name]) < _SLOW_FILE_SECONDS)
    names.sort(key=lambda name: not any(file.startswith(WITH_PROCESSES) for file in groups[name]))
    names.sort(key=lambda name: name not in SHARED)
    order = []
    for name in names:
        files = sorted(groups[name])
        draw.shuffle(files)
        order += [item for file in files for item in groups[name][file]]
    return order


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def is_filler(worker: str) -> bool:
    """
    Return whether a worker fills the processor time that tests with processes leave idle.

    Tests that wait for brokers and daemons leave half of two processors idle. From the third one on, workers
    take the groups without processes first, at a lower priority. *worker* is xdist's name for it, such as
    `gw2`.
    """
    return int(worker.removeprefix("gw")) >= _WITH_PROCESSES_AT_ONCE


class GroupScheduling(LoadScopeScheduling):
    """Gives workers whole groups in the order of collection, the next one when the last is nearly done."""

    def _split_scope(self, nodeid: str) -> str:
        return resource_group(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if is_filler(node.gateway.id):
            groups = self.workqueue.items()
            quiet = (name for name, tests in groups if not next(iter(tests)).startswith(WITH_PROCESSES))
            if (first := next(quiet, None)) is not None:
                self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """
    Keep the tests of a group on one worker under `--dist loadgroup`.

    xdist 3.8 writes groups into `Item._nodeid`, which pytest 9.2 no longer reads. So the scheduler of xdist
    would treat each test as a group.
    """
    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that record a run, order it, and leave out what took long in the recorded run."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json anew")
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the files in the random order of a seed"
    )
    parser.addoption(
        "--without-long-tests",
        action="store_true",
        help=f"leave out the tests that took {_QUICK_TEST_SECONDS} s or more in the recorded run",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the report in the process that prints the run, not in workers."""
    given = getattr(config, "workerinput", None)
    if given is None:
        config.stash[_REPORT] = SuiteReport(config)
    elif is_filler(given["workerid"]):
        os.nice(_FILLER_NICENESS)


_REPORT = pytest.StashKey[SuiteReport]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    Put the slowest groups first, or all in random order with `--shuffle`; leave long tests out on request.

    In a worker, xdist has `--dist loadgroup` as the option `loadgroup`.
    """
    if config.getoption("--without-long-tests"):
        long_tests = load_durations("long_tests").keys()
        left_out = [item for item in items if item.nodeid.partition("@")[0] in long_tests]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if (seed := config.getoption("--shuffle")) is not None:
        items[:] = shuffled(items, seed, load_durations())
    elif config.getoption("loadgroup", default=False):
        items[:] = longest_first(items, load_durations())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print the plan of a run without workers."""
    report = session.config.stash.get(_REPORT, None)
    if report is not None and session.items:
        report.collected(item.nodeid.partition("::")[0] for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Print the plan of a run with workers."""
    report: SuiteReport = node.config.stash[_REPORT]
    report.collected(one.partition("::")[0] for one in ids)


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Print no dots in a large run."""
    shown = config.stash.get(_REPORT, None)
    if shown is not None and shown.is_large() and report.passed:
        return ("passed" if report.when == "call" else "", "", "")
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Register the listener for test reports, in the process that prints the run."""
    report = session.config.stash.get(_REPORT, None)
    if report is not None:
        session.config.pluginmanager.register(_Listener(report))


class _Listener:
    def __init__(self, report: SuiteReport) -> None:
        self._report = report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._report.reported(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Pass on the components that this process has started."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["components"] = sorted(USED)
    else:
        session.config.stash[_REPORT].components |= USED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the components that a worker has started."""
    output = getattr(node, "workeroutput", None) or {}
    node.config.stash[_REPORT].components |= set(output.get("components", ()))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the summary, and the record with `--record-durations`."""
    report = config.stash.get(_REPORT, None)
    if report is None:
        return
    report.summary(terminalreporter.write_line)
    if config.getoption("--record-durations"):
        report.record()
