"""Threads for the bytes of bodies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from tieringd.storage.threads import body_threads


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_body_threads_come_after_the_loop():
    """Their priority is lower than that of the thread that made them, which keeps its own."""
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
