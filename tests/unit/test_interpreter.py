"""Which interpreter `make` takes for `.venv`."""

from __future__ import annotations

import sys

import pytest

from tests.support.interpreter import chosen


@pytest.fixture
def interpreter(tmp_path):
    """Return a stand-in for an interpreter: it says by its exit code whether it can serve."""

    def make(exit_code):
        path = tmp_path / "python3"
        path.write_text(f"#!/bin/sh\nexit {exit_code}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("optimized", "exit_code", "is_distributions"), [(True, 0, False), (False, 0, True), (False, 1, False)]
)
def test_distributions_interpreter_is_taken_where_the_own_is_slower(
    interpreter, optimized, exit_code, is_distributions
):
    """It must be recent enough, and able to make virtual environments."""
    other = interpreter(exit_code)
    taken = chosen("/opt/python3", is_optimized=optimized, distributions=other)
    assert taken == (other if is_distributions else "/opt/python3")


def test_own_interpreter_is_taken_where_there_is_no_other(tmp_path):
    """A machine without a distribution's Python."""
    assert chosen("/opt/python3", is_optimized=False, distributions=str(tmp_path / "none")) == "/opt/python3"


def test_interpreter_that_runs_the_tests_can_serve():
    """The question is one that an interpreter of a supported version answers with yes."""
    assert chosen("/opt/python3", is_optimized=False, distributions=sys.executable) == sys.executable
