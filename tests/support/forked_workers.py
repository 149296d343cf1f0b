"""
A pytest plugin that forks the workers of pytest-xdist from one process, which has imported all tests.

A worker that is an interpreter of its own imports each module of the tests and of the packages again: nine
of its first fourteen CPU seconds, and most of its memory. Here a stem (`tests.support.warm_start`) collects
the same tests once, and each worker is a fork of it. A worker still collects for itself, so it finds and
reports what it would find alone. xdist starts this module as its workers' interpreter, and that process asks
the stem for a worker.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.warm_start import STEM_OPTION, Stem, end, serve, started

if TYPE_CHECKING:
    import pytest

_MODULE: Final = "tests.support.forked_workers"
_ROOT: Final = Path(__file__).parents[2]
_COLLECT: Final = ("--collect-only", "--quiet", "--numprocesses=0", "--dist=no", "--capture=no")
"""
The stem's own options, behind those of the run: the last one counts.

A module that keeps standard output when it is imported, as structlog does, keeps the process's own then. What
pytest puts in its place is closed when the stem has collected.
"""


class _OpenStem:
    """Ends the stem with the run."""

    def __init__(self, stem: Stem) -> None:
        self._stem = stem

    def pytest_unconfigure(self) -> None:
        self._stem.close()


def pytest_configure(config: pytest.Config) -> None:
    """Start the stem of a run with workers, and have xdist ask it for them."""
    workers = config.getoption("tx", None) or []
    # A single worker gains nothing. Another kind of workers is not started by an interpreter of this machine.
    if len(workers) < 2 or set(workers) != {"popen"}:
        return
    stem = Stem(_MODULE, str(config.invocation_params.dir), *map(str, config.invocation_params.args))
    config.pluginmanager.register(_OpenStem(stem))
    interpreter = ["env", f"PYTHONPATH={_ROOT}", sys.executable, "-m", _MODULE, stem.address]
    config.option.tx = [f"popen//python={shlex.join(interpreter)}"] * len(workers)


def main() -> None:
    """Be the stem; or ask it for a worker, and live as long as that one."""
    if sys.argv[1] == STEM_OPTION:
        _be_stem(*sys.argv[2:])
    else:
        address, *interpreted = sys.argv[1:]
        sys.exit(started(address, interpreted, (0, 1, 2)).wait())


def _be_stem(address: str, directory: str, *arguments: str) -> None:
    """Collect the tests of a run with *arguments* in *directory*, and fork a worker for each connection."""
    os.chdir(directory)
    _collect(arguments)
    gc.collect()
    gc.freeze()
    request = serve(address)
    sys.argv = ["-c"]
    # The line that xdist gives an interpreter: it reads a program from standard input, and runs it.
    exec(request["arguments"][-1], {"__name__": "__main__"})
    end(0)


def _collect(arguments: tuple[str, ...]) -> None:
    """Import the tests. Their faults and the list of them go nowhere: each worker finds them again."""
    streams = [os.dup(1), os.dup(2)]
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    import_module("pytest").main([*arguments, *_COLLECT])
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)


if __name__ == "__main__":
    main()
