"""How tests are given to workers: a file, or the files that share a dear resource, belong to one of them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.suite_report import resource_group

ROOT = Path(__file__).parents[2]
BROKERS = ("tests/e2e/test_cluster_storm.py", "tests/integration/test_kafka_replicas.py")
PLAIN = ("tests/unit/test_one.py", "tests/unit/test_two.py", "tests/unit/test_three.py")
CONFTEST = """
from pathlib import Path

import pytest

def log(line):
    with Path({log!r}).open("a") as file:
        file.write(line + "\\n")

@pytest.fixture(scope="session")
def behind():
    log("behind begins")
    yield
    log("behind ends")

@pytest.fixture(scope="session")
def kafka():
    log("kafka begins")
    yield
    log("kafka ends")

@pytest.fixture(scope="session")
def samples(kafka):
    log("samples begin")
    yield
    log("samples end")
"""
FILE = """
import os
import time
from pathlib import Path

import pytest

LOG = Path({log!r})

@pytest.fixture
def {fixture}():
    pass

def begun():
    return {{line.split()[0] for line in LOG.read_text().splitlines()}} if LOG.exists() else set()

@pytest.mark.parametrize("number", range(8))
def test_it({fixture}, number):
    deadline = time.monotonic() + 180
    while not {awaited!r} <= begun():
        assert time.monotonic() < deadline, begun()
        time.sleep(0.01)
    with LOG.open("a") as log:
        log.write({name!r} + " " + os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


@pytest.fixture
def run_suite(tmp_path):
    """
    Give a function that writes test files, by the fixture that they use, and runs them on some workers.

    All other files wait until those of *awaited* have begun.
    """

    def run(fixtures, *, workers=2, options=(), awaited=frozenset()):
        for name, fixture in fixtures.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            awaited_here = set() if name in awaited else set(awaited)
            log = str(tmp_path / "log")
            path.write_text(FILE.format(name=name, fixture=fixture, log=log, awaited=awaited_here))
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "--numprocesses", str(workers), "--dist", "loadgroup"),
                *("--no-loadscope-reorder", "-p", "tests.support.suite_report", "-p", "no:cacheprovider"),
                *("--import-mode=importlib", "--rootdir", str(tmp_path), str(tmp_path)),
                *options,
            ],
            cwd=ROOT,
            # Each worker would import the plugins that these tests do not use.
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_tests_of_a_file_and_of_a_resource_run_on_one_worker(run_suite, tmp_path):
    """No file is split between two workers, and the files that share three brokers are on the same."""
    done = run_suite(dict.fromkeys(BROKERS, "brokers") | dict.fromkeys(PLAIN, "plain"))
    assert done.returncode == 0, done.stdout + done.stderr
    workers = defaultdict(set)
    for line in (tmp_path / "log").read_text().splitlines():
        file, worker = line.split()
        workers[file].add(worker)
    assert workers.keys() == {*BROKERS, *PLAIN}
    assert {len(each) for each in workers.values()} == {1}
    assert workers[BROKERS[0]] == workers[BROKERS[1]]
    assert set.union(*workers.values()) == {"gw0", "gw1"}


def test_last_of_three_workers_takes_tests_without_processes(run_suite, tmp_path):
    """The other two take those with processes first, so a third broker would only slow them."""
    files = [*(f"tests/e2e/test_{name}.py" for name in "abcd"), *PLAIN, "tests/unit/test_four.py"]
    # Else a third worker that is faster than the others comes to the end of its own.
    awaited = {name for name in files if "/e2e/" in name}
    done = run_suite(dict.fromkeys(files, "plain"), workers=3, awaited=awaited)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = dict(line.split() for line in (tmp_path / "log").read_text().splitlines())
    assert ran.keys() == set(files)
    assert {worker for file, worker in ran.items() if "/e2e/" in file} == {"gw0", "gw1"}
    assert "gw2" in ran.values()


@pytest.fixture
def durations(tmp_path):
    """Give the path of the record of a run, which the suites of `run_suite` read; there is none at first."""
    path = tmp_path / "durations.json"
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from tests.support import suite_report\n"
        f"suite_report.DURATIONS = Path({str(path)!r})\n"
    )
    return path


def test_long_tests_are_left_out_on_request(run_suite, durations):
    """Tests that took long in the recorded run are left out. All tests run without a record."""
    files = dict.fromkeys(PLAIN, "plain")
    assert " 24 passed" in run_suite(files, options=["--without-long-tests"]).stdout
    long_tests = {f"{PLAIN[0]}::test_it[{number}]": 9.0 for number in range(3)}
    durations.write_text(json.dumps({"files": {}, "long_tests": long_tests}))
    assert " 21 passed" in run_suite(files, options=["--without-long-tests"]).stdout
    assert " 24 passed" in run_suite(files).stdout


def test_order_of_files_can_be_shuffled(run_suite, tmp_path, durations):
    """Each seed has an order of its own. Spark, processes and slow files come first."""
    spark, slow, slow_plain = "tests/e2e/spark/test_s.py", "tests/e2e/test_c.py", PLAIN[1]
    durations.write_text(json.dumps({"files": {slow: 20.0, slow_plain: 15.0}, "long_tests": {}}))
    files = dict.fromkeys([spark, *(f"tests/e2e/test_{name}.py" for name in "abcd"), *PLAIN], "plain")

    def order(seed):
        (tmp_path / "log").unlink(missing_ok=True)
        done = run_suite(files, workers=1, options=["--shuffle", str(seed)])
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / "log").read_text().splitlines()
        return list(dict.fromkeys(line.split()[0] for line in lines))

    orders = [order(1), order(2), order(1)]
    assert orders[0] == orders[2] != orders[1]
    assert {*orders[0]} == {*files}
    assert {(order[0], order[1], order[5]) for order in orders} == {(spark, slow, slow_plain)}
    assert all("/e2e/" in file for file in orders[0][:5])


def test_tests_that_use_the_three_brokers_are_listed():
    """One that is not would start a second cluster on another worker."""
    paths = [*ROOT.glob("tests/e2e/**/test_*.py"), *ROOT.glob("tests/integration/test_*.py")]
    found = {
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
        if {"brokers", "daemons_of"} & {one.arg for one in node.args.args}
    }
    assert found
    assert {one for one in found if resource_group(one) != "three brokers"} == set()


def test_shared_brokers_end_before_tests_without_them(tmp_path):
    """An idle broker takes time from all other tests. One that is needed again starts again."""
    fixtures = {
        "tests/e2e/test_gateway.py": "behind",
        "tests/e2e/test_a.py": "samples",
        "tests/integration/test_b.py": "tmp_path",
        "tests/unit/test_c.py": "tmp_path",
        "tests/unit/test_d.py": "kafka",
    }
    log = tmp_path / "log"
    for name, fixture in fixtures.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"def test_it({fixture}):\n    with open({str(log)!r}, 'a') as log:\n"
            f"        log.write({path.name!r} + '\\n')\n"
        )
    (tmp_path / "conftest.py").write_text(CONFTEST.format(log=str(log)))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.support.ended_fixtures", "-p", "no:cacheprovider"),
            *("--import-mode=importlib", "--rootdir", str(tmp_path)),
            *(str(tmp_path / name) for name in fixtures),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert log.read_text().splitlines() == [
        *("behind begins", "test_gateway.py", "behind ends"),
        *("kafka begins", "samples begin", "test_a.py", "test_b.py", "samples end", "kafka ends"),
        "test_c.py",
        *("kafka begins", "test_d.py", "kafka ends"),
    ]
