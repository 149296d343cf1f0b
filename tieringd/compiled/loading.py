"""
The compiled walk of this process: loaded in the background when it is worth that, if numba is installed.

Loading takes a second of CPU and about 70 MiB, so a process that checks few bytes does without. Until it is
loaded, and where numba is not installed or the processor lacks an instruction, callers use their loops in
Python.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import structlog
from crc32c import crc32c

from tieringd.compiled.walks import BatchWalk

log = structlog.get_logger(__name__)


WORTH_BYTES, WORTH_BATCHES = 1 << 30, 1 << 15
"""
A process that has checked so many bytes of segments, in so many batches, loads the walk. Batches count
because what the loop in Python costs is a microsecond or two for each: a GiB of the largest ones costs
hardly more in Python, and a GiB of the smallest a second, as much as loading. The size of single segments
says nothing: a broker's segments are always smaller than its limit, and many small partitions write as
much as a large one. Bytes that wait are as good a reason: after an outage of the store, a process that
loads the walk only then checks the first ones slowly, and the next ones beside the load.
"""

_lock = threading.Lock()
_is_begun = False
_checked_bytes = _checked_batches = 0
_walk: BatchWalk | None = None
_kept_in: Path | None = None
"""The directory of kept machine code, where this process has chosen it."""
_CHECKSUM_FILE = "checksum"


def loaded_walk() -> BatchWalk | None:
    """Return the compiled walk, if this process has loaded it."""
    return _walk


def note_checked(size_bytes: int, batches: int) -> None:
    """
    Note that so much was checked.

    The check that brings the sums to `WORTH_BYTES` and `WORTH_BATCHES` begins to load the walk.
    """
    global _checked_bytes, _checked_batches  # noqa: PLW0603 one count for a process
    with _lock:
        _checked_bytes += size_bytes
        _checked_batches += batches
    _begin_if_worth(_checked_bytes, _checked_batches)


def expect_checks(size_bytes: int) -> None:
    """
    Begin to load the compiled walk if *size_bytes*, which wait to be checked, are worth it.

    Their batches are taken to be as large as those that were checked before. At first only bytes count.
    """
    batches = size_bytes * _checked_batches // _checked_bytes if _checked_bytes else WORTH_BATCHES
    _begin_if_worth(size_bytes, batches)


def _begin_if_worth(size_bytes: int, batches: int) -> None:
    """Begin to load the walk in a thread, once in a process, if it is worth that for so much."""
    global _is_begun  # noqa: PLW0603 one for a process
    with _lock:
        is_worth = size_bytes >= WORTH_BYTES and batches >= WORTH_BATCHES
        begins = is_worth and not _is_begun
        _is_begun = _is_begun or begins
    if begins and find_spec("numba") is not None:
        # Not a daemon thread: an interpreter that ends in the middle of a compilation may crash.
        thread = threading.Thread(target=load, name="load the compiled walk", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("batches are checked without machine code", error=repr(error))


def keep_machine_code_in(directory: str) -> None:
    """
    Let numba keep what it compiles in *directory*, so that the next process loads it in place of compiling.

    A service may write neither beside its packages nor in a home directory. NUMBA_CACHE_DIR goes first.
    """
    global _kept_in  # noqa: PLW0603 one for a process
    _kept_in = None if "NUMBA_CACHE_DIR" in os.environ else Path(directory)


def load() -> BatchWalk | None:
    """Load the compiled walk now, and return it; None where this processor or this numba cannot run it."""
    global _walk  # noqa: PLW0603 one for a process
    try:
        if _kept_in is not None:
            _drop_damaged(_kept_in)
            # Only this user may write there: the daemon runs the machine code in this directory.
            _kept_in.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The environment would pass it on to other programs.
            import_module("numba").config.CACHE_DIR = str(_kept_in)
        module = import_module("tieringd.compiled.batch_walk")
        if module.is_possible():
            _walk = cast("BatchWalk", module.CompiledWalk())
            if _kept_in is not None:
                _note_checksum(_kept_in)
            log.info("batches are checked in machine code")
        else:
            log.info("batches are checked without machine code: it is for x86-64 with SSE 4.2")
    except Exception as error:  # noqa: BLE001 - a numba that does not fit raises anything, and costs only CPU
        log.warning("batches are checked without machine code", error=repr(error))
    return _walk


def _drop_damaged(directory: Path) -> None:
    """
    Remove kept machine code that has not the checksum that was noted. It is compiled again then.

    Numba checks no bytes of it. After a power loss a page may be zeros: the process would end with a signal
    when it runs that code, and again after each restart.
    """
    try:
        is_right = (directory / _CHECKSUM_FILE).read_text() == _checksum_of(directory)
    except (OSError, ValueError):
        is_right = False
    if not is_right:
        shutil.rmtree(directory, ignore_errors=True)


def _note_checksum(directory: Path) -> None:
    """Note the checksum of what is kept. Without it the next process compiles again: that costs only time."""
    with suppress(OSError):
        (directory / _CHECKSUM_FILE).write_text(_checksum_of(directory))


def _checksum_of(directory: Path) -> str:
    checksum = 0
    for path in sorted(directory.rglob("*.nb[ci]")):
        checksum = crc32c(path.read_bytes(), crc32c(path.name.encode(), checksum))
    return f"{checksum:08x}"
