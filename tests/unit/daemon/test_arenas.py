"""Few heaps for many threads."""

from __future__ import annotations

import subprocess
import sys

_HEAPS = """
import ctypes, sys, threading
from tieringd.daemon.heaps import keep_arenas_few

if sys.argv[1] == "few":
    assert keep_arenas_few()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(12)

def work():
    together.wait()
    libc.malloc(100)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
[each.start() for each in threads]
[each.join() for each in threads]
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


def heaps(mode: str) -> int:
    """Return how many heaps a process with twelve threads has, as its C library counts them."""
    command = [sys.executable, "-c", _HEAPS, mode]
    return subprocess.run(command, check=True, capture_output=True).stdout.count(b"<heap nr=")


def test_threads_share_two_heaps():
    """Left alone they have one each, as far as the processors allow."""
    assert heaps("few") <= 2
    assert heaps("many") > 2
