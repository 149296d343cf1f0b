"""
A daemon whose clock a test steps while it runs: `tieringd run` under libfaketime, from Debian's package.

The clock of one process is stepped; the machine's clock, and the clock that only runs forward, stay as they
are. libfaketime is fetched as the other components are. `python -m tests.support.stepped_clock` fetches it.
"""

from __future__ import annotations

import atexit
import runpy
import sys
import threading
import time
from pathlib import Path

from tests.support.components import used
from tests.support.daemon import Daemon
from tests.support.debian_packages import fetch_package
from tests.support.kafka_jars import MissingPartError, cache_directory, tell_where
from tests.support.processes import Server

_PACKAGE = "libfaketime"
_ELSEWHERE = f"install Debian's package {_PACKAGE}"
_LIBRARY = "lib/*/faketime/libfaketimeMT.so.1"  # The one for programs with threads.
_ROOT = Path(__file__).parents[2]
_SHARED_MEMORY = Path("/dev/shm")


def require_libfaketime() -> Path:
    """
    Return the library: the one that is installed, or the one that was fetched.

    Raises:
        MissingPartError: There is neither.
    """
    for root in (Path("/usr"), _fetched() / "usr"):
        for found in root.glob(_LIBRARY):
            used(_PACKAGE)
            return found
    raise MissingPartError(f"{_fetched()} is missing; run `python -m tests.support.stepped_clock`")


def fetch_libfaketime() -> Path:
    """
    Fetch the library unless it is installed, and return its path.

    Raises:
        MissingPartError: This is not Debian, or its package cannot be fetched.
    """
    try:
        return require_libfaketime()
    except MissingPartError:
        fetch_package(_PACKAGE, _fetched(), elsewhere=_ELSEWHERE)
    return require_libfaketime()


def _fetched() -> Path:
    return cache_directory() / _PACKAGE


class SteppedDaemon(Daemon):
    """A daemon with a clock of its own, which begins with the right time."""

    def __init__(self, config: Path, output: Path) -> None:
        super().__init__(config, output)
        self._offset = output.with_suffix(".clock")
        self.step(0)
        environment = (
            "env",
            f"--chdir={_ROOT}",
            f"LD_PRELOAD={require_libfaketime()}",
            f"FAKETIME_TIMESTAMP_FILE={self._offset}",
            "FAKETIME_CACHE_DURATION=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            "NO_FAKE_STAT=1",
        )
        command = [sys.executable, "-m", __name__, "run", "--config", str(config)]
        self.server = Server([*environment, *command], output=output)

    def launch(self) -> None:
        """Start the process; it is not ready yet."""
        super().launch()
        # The library leaves its shared memory behind when its process is killed.
        atexit.register(_remove_shared_memory, self.server.pid)

    def step(self, seconds: int) -> None:
        """Set the clock: this many seconds from the right time. It takes effect within a second or two."""
        new = self._offset.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._offset)


def _remove_shared_memory(process: int) -> None:
    for path in _SHARED_MEMORY.glob(f"*faketime_*_{process}"):
        path.unlink(missing_ok=True)


def _sleep(seconds: float) -> None:
    """Sleep. Under libfaketime 0.9.10 the interpreter's own sleep fails: it waits until a moment."""
    threading.Event().wait(seconds)


def main() -> int:
    """Run `tieringd` with the given arguments; without any, fetch the library and print its path."""
    if sys.argv[1:]:
        time.sleep = _sleep
        runpy.run_module("tieringd", run_name="__main__", alter_sys=True)
        return 0
    return tell_where(fetch_libfaketime)


if __name__ == "__main__":
    sys.exit(main())
