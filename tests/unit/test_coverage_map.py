"""The recorder of what processes run, and how records are put together."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.affected import CoverageMap
from tests.support.coverage_map import Recording, merged, recorder_in
from tests.support.old_python import MENDS_TIMEOUTS


@pytest.mark.parametrize(
    ("script", "ran"),
    [
        pytest.param("import tieringd.errors, tieringd.model.partition", set(), id="import"),
        pytest.param(
            "from tieringd.formats.log_names import is_topic_name as f\nimport threading\n"
            "thread = threading.Thread(target=f, args=('a',))\nthread.start()\nthread.join()",
            {"tieringd/formats/log_names.py"},
            id="thread",
        ),
        pytest.param(
            "import os, signal\nfrom tieringd.clock import wall_clock_ms\n"
            "if os.fork() == 0:\n    wall_clock_ms()\n    os.kill(os.getpid(), signal.SIGKILL)\nos.wait()",
            {"tieringd/clock.py"},
            id="forked and killed",
        ),
    ],
)
def test_functions_that_ran_are_recorded(tmp_path, script, ran):
    """Imports alone are not; threads, forked processes and killed ones are."""
    path, script = tmp_path / "ran", f"import site\nsite.addsitedir({str(tmp_path)!r})\n{script}"
    path.touch()
    environ = os.environ | {"TIERINGD_RAN_MODULES": str(path)}
    with recorder_in(tmp_path):
        subprocess.run([sys.executable, "-c", script], env=environ, check=True)
    at_import = {"tieringd/timeouts.py"} if MENDS_TIMEOUTS else set()
    assert set(path.read_text().splitlines()) == ran | at_import


def test_record_replaces_what_was_recorded_before():
    """A file that could not be recorded now loses its old entry: that is not what it runs."""
    old = CoverageMap(
        ran={"one": ["m.a"], "two": ["m.b"], "three": ["m.c"], "gone": ["m.a"], "edited": ["m.a"]},
        test_digests=dict.fromkeys(("one", "two", "three", "gone", "edited"), "1"),
        module_digests={"m.a": "a", "m.b": "b", "m.c": "c"},
    )
    found = merged(
        old,
        {"one": Recording(frozenset({"m.b"}), ""), "two": Recording(frozenset(), "1 tests were skipped")},
        test_digests={"one": "2", "two": "1", "three": "1", "edited": "9"},
        module_digests={"m.a": "a", "m.b": "new", "m.c": "c"},
    )
    assert found.ran == {"one": {"m.b"}, "three": ["m.c"]}
    assert found.test_digests == {"one": "2", "three": "1"}
    assert found.module_digests == {"m.b": "new", "m.c": "c"}


def test_entry_that_ran_what_has_changed_is_dropped():
    """The map has one digest for a module, and it must not make an old entry look new."""
    old = CoverageMap({"old": ["m.a"]}, {"old": "1"}, {"m.a": "before"})
    found = merged(
        old,
        {"new": Recording(frozenset({"m.a"}), "")},
        test_digests={"old": "1", "new": "1"},
        module_digests={"m.a": "after"},
    )
    assert set(found.ran) == {"new"}


def test_recorder_is_gone_afterwards(tmp_path):
    """Later processes do not even look for the recorder."""
    with recorder_in(tmp_path):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
