"""Which tests a change can touch: by imports, by what was recorded, and by names."""

from __future__ import annotations

import pytest

from tests.support.affected import (
    ROOT,
    CoverageMap,
    affected_tests,
    differs_in_functions_only,
    digest_of,
    digests_of_tests,
    import_graph,
    imports_of,
    module_of,
    reached_from,
)

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

    def choose(*changed, coverage=None, inside=()):
        return affected_tests(
            changed, files=FILES, coverage=coverage, in_functions_only=inside, root=tmp_path
        )

    return choose


@pytest.fixture
def record(chosen, tmp_path):
    """Give a function that records what tests ran of the small project as it is."""

    def record(**ran):
        ran = {f"tests/{name.replace('__', '/')}.py": modules for name, modules in ran.items()}
        return CoverageMap(
            ran=ran,
            test_digests=digests_of_tests(ran, FILES, import_graph(FILES, tmp_path), tmp_path),
            module_digests={
                module_of(file): digest_of([(tmp_path / file).read_text()])
                for file in FILES
                if file.startswith("tieringd/")
            },
        )

    return record


def test_imports_inside_functions_count_and_those_for_types_do_not():
    """An import for type checkers alone never runs, and a name in a table of modules may."""
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


def test_record_of_what_ran_narrows_imports_down(chosen, record):
    """A recorded test is chosen by what it ran; a change of its own helpers chooses it all the same."""
    ran = record(e2e__test_daemon=["tieringd.cli"])
    inside = ["tieringd/store.py", "tieringd/cli.py", "tests/support/daemon.py"]
    assert set(chosen("tieringd/store.py", coverage=ran, inside=inside)) == {"tests/unit/test_store.py"}
    assert chosen("tieringd/cli.py", coverage=ran, inside=inside) == {
        "tests/e2e/test_daemon.py": "it ran tieringd.cli"
    }
    assert "tests/e2e/test_daemon.py" in chosen("tests/support/daemon.py", coverage=ran, inside=inside)


def test_record_does_not_speak_of_what_runs_at_import(chosen, record):
    """A constant that changes touches tests that run no function of its module: imports decide."""
    ran = record(e2e__test_daemon=["tieringd.cli"])
    assert "tests/e2e/test_daemon.py" in chosen("tieringd/store.py", coverage=ran)


def test_test_that_changed_since_its_record_falls_back_on_imports(chosen, record, tmp_path):
    """The record is not of what the changed test, or its changed helper, runs now."""
    ran = record(e2e__test_daemon=["tieringd.cli"])
    (tmp_path / "tests/support/daemon.py").write_text("# It starts another command now.\n")
    assert chosen("tieringd/store.py", coverage=ran, inside=["tieringd/store.py"]) == {
        "tests/unit/test_store.py": "it imports what changed",
        "tests/e2e/test_daemon.py": "it imports what changed",
    }


def test_module_that_changed_since_the_record_stands_for_what_it_imports(chosen, record, tmp_path):
    """A function that was recorded may call other modules now than it did."""
    ran = record(e2e__test_daemon=["tieringd.cli"])
    (tmp_path / "tieringd/cli.py").write_text("def run():\n    from tieringd import plans\n")
    inside = ["tieringd/plans.py", "tieringd/store.py"]
    reason = {"tests/e2e/test_daemon.py": "it ran tieringd.plans"}
    assert chosen("tieringd/plans.py", coverage=ran, inside=inside).items() >= reason.items()
    assert "tests/e2e/test_daemon.py" not in chosen("tieringd/store.py", coverage=ran, inside=inside)


def test_map_is_read_as_it_was_written(record, tmp_path):
    """The file is sorted, with a line for each test file."""
    ran = record(unit__test_store=["tieringd.store", "tieringd.cli"], e2e__test_daemon=["tieringd.cli"])
    ran.write(tmp_path / "coverage.json")
    read = CoverageMap.load(tmp_path / "coverage.json")
    assert read.ran == {
        "tests/e2e/test_daemon.py": ["tieringd.cli"],
        "tests/unit/test_store.py": ["tieringd.cli", "tieringd.store"],
    }
    assert (read.test_digests, read.module_digests) == (ran.test_digests, ran.module_digests)
    assert CoverageMap.load(tmp_path / "none.json") == CoverageMap()


@pytest.mark.parametrize(
    ("after", "is_inside"),
    [
        ("LIMIT = 1\nclass A:\n    x: int = 1\n    def f(self, y=2):\n        return 5\n", True),
        ('"""Text."""\nLIMIT = 1\nclass A:\n    x: int = 1\n    def f(self, y=2):\n        return 3\n', True),
        ("LIMIT = 2\nclass A:\n    x: int = 1\n    def f(self, y=2):\n        return 3\n", False),
        ("LIMIT = 1\nclass A:\n    x: int = 2\n    def f(self, y=2):\n        return 3\n", False),
        ("LIMIT = 1\nclass A:\n    x: int = 1\n    def f(self, y=3):\n        return 3\n", False),
        ("LIMIT = 1\nclass A:\n    x: int = 1\n    @cache\n    def f(self, y=2):\n        return 3\n", False),
    ],
)
def test_bodies_of_functions_are_told_from_what_runs_at_import(after, is_inside):
    """Constants, fields, defaults and decorators belong to the import."""
    before = "LIMIT = 1\nclass A:\n    x: int = 1\n    def f(self, y=2):\n        return 3\n"
    assert differs_in_functions_only(before, after) == is_inside


def test_machine_code_is_never_narrowed_down():
    """Calls of compiled functions are not seen, so imports decide."""
    before = "import numba\ndef f():\n    return 1\n"
    assert not differs_in_functions_only(before, before.replace("1", "2"))


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
