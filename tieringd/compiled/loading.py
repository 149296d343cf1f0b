"""
The compiled walk of this process: loaded in the background when it is first wanted, if numba is installed.

Loading takes a second of CPU and about 70 MiB, so a process that never sees a large segment does without.
Until it is loaded, and where numba is not installed or the processor lacks an instruction, callers use their
loops in Python.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import structlog

from tieringd.compiled.walks import BatchWalk

log = structlog.get_logger(__name__)


_lock = threading.Lock()
_is_begun = False
_walk: BatchWalk | None = None


def loaded_walk() -> BatchWalk | None:
    """Return the compiled walk, if this process has loaded it."""
    return _walk


def wanted_walk() -> BatchWalk | None:
    """Return the compiled walk if it is loaded; otherwise begin to load it, at the first call."""
    global _is_begun
    with _lock:
        is_first, _is_begun = not _is_begun, True
    if is_first and find_spec("numba") is not None:
        # Not a daemon thread: an interpreter that ends in the middle of a compilation may crash.
        threading.Thread(target=load, name="load the compiled walk", daemon=False).start()
    return _walk


def keep_machine_code_in(directory: str) -> None:
    """
    Let numba keep what it compiles in *directory*, so that the next process loads it in place of compiling.

    A service may write neither beside its packages nor in a home directory. NUMBA_CACHE_DIR goes first.
    """
    os.environ.setdefault("NUMBA_CACHE_DIR", directory)


def load() -> BatchWalk | None:
    """Load the compiled walk now, and return it; None where this processor or this numba cannot run it."""
    global _walk  # noqa: PLW0603 one for a process
    try:
        module = import_module("tieringd.compiled.batch_walk")
        if module.is_possible():
            _walk = cast("BatchWalk", module.CompiledWalk())
            log.info("batches are checked in machine code")
    except Exception as error:  # noqa: BLE001 - a numba that does not fit raises anything, and costs only CPU
        log.warning("batches are checked without machine code", error=repr(error))
    return _walk
