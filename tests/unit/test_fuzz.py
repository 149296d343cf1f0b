"""Parsers that are given wrong bytes: those that were handled wrongly once, and new ones from a seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.run import fault_of, kept_inputs
from tests.fuzz.targets import Target, targets
from tieringd.errors import CorruptDataError

ROOT = Path(__file__).parents[2]
_INPUTS = 500
"""For each parser. `make fuzz MINUTES=60` tries more."""
KEPT = [(target, path) for target in targets() for path in kept_inputs(target)]


def fuzz(*options):
    """Run the fuzzer in a process of its own, whose memory it limits."""
    command = [sys.executable, "-m", "tests.fuzz.run", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", [pytest.param(one, id=one.name) for one in targets()])
def test_sound_input_is_read(target):
    """A parser that refuses its own seeds would not be fuzzed behind its first check."""
    read = 0
    for seed in target.seeds:
        try:
            target.parse(seed)
        except target.errors:
            continue
        read += 1
    assert read


@pytest.mark.parametrize(
    ("target", "path"), [pytest.param(*one, id=f"{one[0].name}-{one[1].stem}") for one in KEPT]
)
def test_kept_input_is_handled(target, path):
    """The input was handled wrongly once."""
    assert fault_of(target, path.read_bytes()) is None


def test_wrong_bytes_give_a_documented_error():
    """Every parser, some hundred inputs each, within a limit of time and memory."""
    done = fuzz("--inputs", str(_INPUTS))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " 0 handled wrongly" in done.stdout


def raising(error):
    def parse(_):
        raise error

    return Target("one", parse, (b"",))


def test_fault_is_an_error_that_the_parser_does_not_document():
    """A documented error and a value are right."""
    assert fault_of(raising(CorruptDataError("cut")), b"") is None
    assert fault_of(Target("one", len, (b"",)), b"") is None
    assert "KeyError" in fault_of(raising(KeyError("field")), b"")
    assert "MemoryError" in fault_of(raising(MemoryError()), b"")
