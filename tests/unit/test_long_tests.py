"""A slow test has its reason beside it, and `tests/durations.json` says which are slow."""

from __future__ import annotations

import json

import pytest

from tests.support.long_tests import has_reason_at_top, reasons_above, without_reason
from tests.support.suite_report import DURATIONS, ROOT

SOURCE = '''"""Brokers."""

# Long: three brokers start, and one of them is killed.
# It takes a session timeout.

import pytest


# Long: the lease has to run out.
@pytest.mark.parametrize("number", [1])
def test_lease(number):
    """One sentence."""


class TestMachine:
    # Not Long: the mark has to begin the comment.
    def test_steps(self):
        """One sentence."""
'''


@pytest.mark.parametrize(
    ("source", "has_reason"),
    [
        (SOURCE, True),
        (SOURCE.replace("# Long: three", "# Three"), False),
        ("import os\n# Long: too late.\n", False),
        ("# Long:\nimport os\n", False),
    ],
)
def test_reason_of_a_file_stands_before_its_imports(source, has_reason):
    """An empty one is none."""
    assert has_reason_at_top(source) is has_reason


def test_reason_of_a_test_stands_above_it():
    """The reason of a test stands above its decorators."""
    assert reasons_above(SOURCE, ["test_lease"]) == [True]
    assert reasons_above(SOURCE, ["TestMachine", "test_steps"]) == [False, False]
    assert reasons_above(SOURCE, ["test_gone"]) == []


def test_slow_ones_without_a_reason_are_named(tmp_path):
    """Tests under the limits need no reason, and tests that are gone are skipped."""
    (tmp_path / "test_a.py").write_text(SOURCE)
    (tmp_path / "test_b.py").write_text("def test_b():\n    pass\n")
    found = without_reason(
        {"test_a.py": 99, "test_b.py": 31, "test_gone.py": 99, "test_c.py": 29},
        {
            "test_a.py::test_lease[1]": 20,
            "test_a.py::TestMachine::test_steps": 16,
            "test_b.py::test_b": 14,
            "test_b.py::test_gone": 99,
        },
        tmp_path,
    )
    assert [line.partition(" ")[0] for line in found] == ["test_b.py", "test_a.py::TestMachine::test_steps"]


def test_slow_tests_of_this_repository_have_their_reasons():
    """
    Each slow test has a comment that says why it is worth its time.

    Without a recorded run none is checked.
    """
    recorded = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {"files": {}, "long_tests": {}}
    assert without_reason(recorded["files"], recorded["long_tests"], ROOT) == []
