"""The daemon's log: what a traceback in it may show."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import structlog
from tieringd.cli.logging import configure_logging
from tieringd.config.model import LogConfig

configure_logging(LogConfig(format={format!r}))

def fails():
    secret = "".join(["hid", "den"])
    raise ValueError("it went wrong")

try:
    fails()
except ValueError:
    structlog.get_logger().exception("archiver failed")
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_traceback_in_the_log_shows_no_variables(form):
    """Among the local variables of any function may be a key to the bucket."""
    program = PROGRAM.replace("{format!r}", repr(form))
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "it went wrong" in done.stderr
    assert "fails" in done.stderr
    assert "hidden" not in done.stderr
