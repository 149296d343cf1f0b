"""Workers that are forked from one process do what workers of their own would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TESTS = """
import os
import signal
from pathlib import Path

import pytest

IMPORTED_BY = os.getpid()


@pytest.mark.parametrize("number", range(6))
def test_process(number, worker_id):
    with open(Path(__file__).with_name(f"seen-{number}"), "w") as seen:
        seen.write(f"{IMPORTED_BY} {os.getpid()} {worker_id} {os.getcwd()}")


def test_that_fails():
    one = 1
    assert one == 2


def test_that_kills_its_worker():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_are_forks_of_one_process(tmp_path: Path):
    """One process imports the tests. Its forks run them, tell what failed, and one that ends is replaced."""
    (tmp_path / "test_them.py").write_text(_TESTS)
    command = (
        *(sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.support.forked_workers"),
        *("--rootdir", str(tmp_path), "-c", "/dev/null", "-p", "no:cacheprovider", "--numprocesses", "2"),
        str(tmp_path),
    )
    # Other plugins would only be imported.
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environ, capture_output=True, text=True, check=False)
    seen = [path.read_text().split() for path in tmp_path.glob("seen-*")]
    assert len(seen) == 6, done.stdout + done.stderr
    imported_by, processes, workers, directories = (set(column) for column in zip(*seen, strict=True))
    # One process imported the tests, and it ran none of them.
    assert len(imported_by) == 1
    assert not imported_by & processes
    assert workers <= {"gw0", "gw1"}
    assert directories == {str(_ROOT)}
    # What an assertion compares is told, and a worker that ended is told as well.
    assert done.returncode == 1
    assert re.search(r"E\s+assert 1 == 2", done.stdout), done.stdout
    crash = r"worker 'gw\d' crashed while running .*test_that_kills_its_worker"
    assert re.search(crash, done.stdout), done.stdout
    assert not Path(f"/proc/{imported_by.pop()}").exists()
