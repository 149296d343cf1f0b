"""
Record the modules of tieringd whose functions a process runs, from the start of the process.

While `tests.support.coverage_map` runs, a file in site-packages imports this module in every Python process
whose variable `TIERINGD_RAN_MODULES` names a file: pytest itself, the stem of `tests.support.warm_start`
and the commands that it forks, Spark's drivers and workers. The package `coverage` is of no use, as it
writes its data at the end of a process, and tests kill daemons. Here a module is appended to the file when
its first function begins.
"""

import inspect
import os
import sys
import threading
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
_FOLDERS = tuple(f"{_ROOT / package}{os.sep}" for package in ("tieringd", "pyspark_tieringd"))


def _record_into(path: str) -> None:
    known: set[str] = set()

    def entered(frame, _event, _argument) -> None:
        code = frame.f_code
        file = code.co_filename
        # The lines of a module or a class itself run at the import. They are not in a function.
        if file in known or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        known.add(file)
        if file.startswith(_FOLDERS):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, f"{os.path.relpath(file, _ROOT)}\n".encode())
            os.close(descriptor)

    threading.settrace(entered)
    sys.settrace(entered)


if "TIERINGD_RAN_MODULES" in os.environ:
    _record_into(os.environ["TIERINGD_RAN_MODULES"])
