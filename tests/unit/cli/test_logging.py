"""The daemon's log: what a traceback in it may show."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import structlog

from tieringd.cli.logging import RepeatFold, fatal_errors_logged, one_type_each
from tieringd.config.model import LogConfig
from tieringd.errors import ConfigError

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
    """A traceback shows no local variables: one may be a key to the bucket."""
    program = PROGRAM.replace("{format!r}", repr(form))
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "it went wrong" in done.stderr
    assert "fails" in done.stderr
    assert "hidden" not in done.stderr


@pytest.mark.parametrize(
    ("partition", "fields"),
    [
        (3, {"partition": 3}),
        ("pay.ments-eu-3", {"topic": "pay.ments-eu", "partition": 3}),
        ("unknown", {"partition_name": "unknown"}),
    ],
)
def test_partition_is_a_number_in_every_event(partition, fields):
    """A store of logs gives a field one type."""
    assert one_type_each(None, "info", {"event": "x", "partition": partition}) == {"event": "x"} | fields


def test_repeats_are_folded_and_counted():
    """The first ones of a minute pass; the next minute's first one has the number of the others."""
    now = [0.0]
    fold = RepeatFold(now=lambda: now[0])

    def passed(name, level="warning", count=1):
        kept = []
        for _ in range(count):
            try:
                kept.append(fold(None, level, {"event": name}))
            except structlog.DropEvent:
                continue
        return kept

    assert len(passed("store is full", count=500)) == 50
    assert len(passed("another")) == 1
    assert len(passed("durable", level="info", count=500)) == 500
    now[0] = 60.0
    assert passed("store is full") == [{"event": "store is full", "repeated": 450}]
    assert passed("store is full") == [{"event": "store is full"}]


def test_a_fatal_error_is_json_too():
    """The event has the error's kind, its hint and its exit code. The error goes on to the command line."""
    with (
        structlog.testing.capture_logs() as events,
        pytest.raises(ConfigError),
        fatal_errors_logged(LogConfig()),
    ):
        raise ConfigError("it is wrong", problems=("one",), hint="Mend it")
    (event,) = events
    assert json.loads(json.dumps(event)) == {
        "event": "ended by an error",
        "log_level": "critical",
        "error": "it is wrong",
        "kind": "ConfigError",
        "hint": "Mend it",
        "problems": ["one"],
        "exit_code": 2,
    }
