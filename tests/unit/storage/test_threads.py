"""Threads for the bytes of bodies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tieringd.storage.threads import body_threads


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_body_threads_come_after_the_loop():
    """The threads' priority is lower than that of the thread that made them, which keeps its own."""
    before = priority()
    with body_threads(2, name="test") as threads:
        assert threads.submit(priority).result() == min(19, before + 5)
    assert priority() == before


def test_process_of_the_lowest_priority_has_body_threads_too():
    """There is nothing lower, and nothing to ask the superuser for."""
    script = """
import os
os.nice(19)
from tests.unit.storage.test_threads import body_threads, priority
with body_threads(1, name="test") as threads:
    assert threads.submit(priority).result() == 19
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param("-c2 -n6", "best-effort: prio 7", id="of the shipped unit"),
        pytest.param("-c2 -n7", "best-effort: prio 7", id="the last already"),
        pytest.param("-c3", "idle", id="a class below"),
    ],
)
def test_body_threads_come_later_at_the_disk(before, expected):
    """A level of the best-effort class later than the process; other classes stay as they are."""
    script = """
import subprocess
import threading
from tieringd.storage.threads import body_threads
def level():
    thread = str(threading.get_native_id())
    return subprocess.run(["ionice", "-p", thread], capture_output=True, text=True).stdout.strip()
with body_threads(1, name="test") as threads:
    print(threads.submit(level).result())
"""
    command = ["ionice", *before.split(), sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == expected
