"""Which tests a change can touch: by imports, by what was recorded, and by names."""

from __future__ import annotations

import pytest

from tests.support.affected import ROOT, affected_tests, import_graph, imports_of, reached_from

FILES = {
    "tieringd/__init__.py": "",
    "tieringd/__main__.py": "from tieringd.cli import main",
    "tieringd/cli.py": "def run():\n    from tieringd import store\n",
    "tieringd/store.py": "",
    "tieringd/plans.py": "",
    "tests/conftest.py": "",
    "tests/support/daemon.py": "",
    "tests/unit/test_plans.py": "from tieringd import plans\nALERTS = 'deploy/alerts.yml'\n",
    "tests/unit/test_store.py": "import tieringd.store",
    "tests/e2e/conftest.py": "from tests.support import daemon",
    "tests/e2e/test_daemon.py": "",
}


@pytest.fixture
def chosen(tmp_path):
    """Give a function that writes a small project and chooses among its tests."""
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)

    def choose(*changed, coverage=None):
        return affected_tests(changed, files=FILES, coverage=coverage or {}, root=tmp_path)

    return choose


def test_imports_inside_functions_count_and_those_for_types_do_not():
    """What is imported for type checkers alone never runs; a name in a table of modules may."""
    source = (
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\ndef f():\n    from g import h\n"
        "PLACE = 'tieringd.cli.run'\n"
    )
    assert imports_of(source) == {"a.b", "c", "c.d", "g", "g.h", "tieringd.cli.run"}


def test_change_reaches_those_that_import_it_through_others():
    """The direction is against the imports, and a circle ends."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}
    assert reached_from(graph, {"c"}) == {"a", "b", "c"}


def test_process_reaches_whatever_the_command_imports(chosen):
    """A test that starts the daemon is touched by a module that the command imports when it runs."""
    assert chosen("tieringd/store.py") == {
        "tests/unit/test_store.py": "it imports what changed",
        "tests/e2e/test_daemon.py": "it imports what changed",
    }
    assert set(chosen("tieringd/plans.py")) == {"tests/unit/test_plans.py"}


def test_record_of_what_ran_narrows_imports_down(chosen):
    """A recorded test is chosen by what it ran; a change of its own helpers chooses it all the same."""
    ran = {"tests/e2e/test_daemon.py": ["tieringd.cli"]}
    assert set(chosen("tieringd/store.py", coverage=ran)) == {"tests/unit/test_store.py"}
    assert "tests/e2e/test_daemon.py" in chosen("tieringd/cli.py", coverage=ran)
    assert "tests/e2e/test_daemon.py" in chosen("tests/support/daemon.py", coverage=ran)


def test_other_files_choose_the_tests_that_name_them(chosen):
    """A rule, a configuration or a unit is no Python; a change of the build can touch everything."""
    assert set(chosen("deploy/alerts.yml")) == {"tests/unit/test_plans.py"}
    assert len(chosen("pyproject.toml")) == 3
    assert chosen("docs/nothing.md") == {}


def test_graph_of_this_repository_has_its_long_chains():
    """The graph is read from the sources: the daemon's policies are reached from the command line."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tieringd").rglob("*.py")]
    graph = import_graph(files)
    assert "tieringd.cli.main" in reached_from(graph, {"tieringd.policies.space_plan"})
