"""
`tieringd` commands inside this process, for those that use the Spark session of the tests.

It is the command's own `main`, with its own exit codes. A thread keeps its event loop away from the
tests' own. What a command's process prints on its way down is the matter of a process: a few tests
run commands as processes for that (`tests.support.daemon`).
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
