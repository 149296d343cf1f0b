"""What the plugin of the whole run does to two workers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_numbers(number):
    pass
"""
RAN = re.compile(r"\[(gw\d)\] .*PASSED .*(test_\w+\.py)::test_numbers\[(\d)\]")


def test_file_stays_on_one_worker(tmp_path):
    """The tests of a file share its fixtures: one worker runs all of them, in their order."""
    files = [f"test_{name}.py" for name in "abcd"]
    for name in files:
        (tmp_path / name).write_text(FILE)
    options = ["-v", "-p", "tests.support.suite_report", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    workers = ["--numprocesses", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *workers, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    by_file = {name: [] for name in files}
    for worker, name, number in RAN.findall(ran.stdout):
        by_file[name].append((worker, int(number)))
    for order in by_file.values():
        assert [number for _, number in order] == list(range(6))
        assert len({worker for worker, _ in order}) == 1
