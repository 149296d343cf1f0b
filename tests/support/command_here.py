"""
Run `tieringd` commands inside this process, for commands that use the Spark session of the tests.

The command's own `main` runs, with its exit codes, in a thread, so that its event loop is not that of the
tests. The output of a process at its end can only be tested with a process; a few tests do that
(`tests.support.daemon`).
"""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout

import structlog

from tieringd.cli.main import main


def run_here(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a `tieringd` command to its end and return its exit code and output."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    log_before, argv_before = structlog.get_config(), sys.argv
    sys.argv = ["tieringd", *arguments]
    try:
        with redirect_stdout(output), redirect_stderr(errors), ThreadPoolExecutor(1) as pool:
            code = pool.submit(_exit_code).result()
    finally:
        sys.argv = argv_before
        structlog.configure(**log_before)
    printed = [each.detach().getvalue() for each in (output, errors)]
    return subprocess.CompletedProcess(["tieringd", *arguments], code, *printed)


def _exit_code() -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
