"""
The tests that a change can touch: `python -m tests.support.affected [--base REVISION]`.

A test file is chosen when it imports, directly or through others, a Python file that changed, or
when it names another file that changed. `tests/coverage.json`, where it exists, narrows this down:
it holds the modules whose functions each test file really ran, in its own process and in the
commands it started (`make coverage-map` records it). The record counts only while it is sure to hold:

* The test file and the helpers that it imports are as they were when it was recorded.
* Nothing but bodies of functions changed in the module. A constant or a field can touch a test that
  runs no function of the module.
* The module is not compiled to machine code, whose calls cannot be seen.
* A module that the test ran, and that has changed since the record, stands for all that it imports.

Otherwise imports decide. What is left out is said.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.suite_report import group_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

ROOT: Final = Path(__file__).parents[2]
COVERAGE: Final = ROOT / "tests" / "coverage.json"
PACKAGES: Final = ("tieringd", "pyspark_tieringd", "tests", "benchmarks")
ALWAYS_WIDE: Final = ("pyproject.toml", "Makefile", "tests/conftest.py", "tests/support/suite_report.py")
"""A change of these can touch every test."""


def module_of(path: str) -> str:
    """Return the dotted name of a Python file, by its path from the repository's root."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(source: str) -> set[str]:
    """
    Return the dotted names that a module imports when it runs, including imports inside functions.

    `from a import b` gives `a` and `a.b`: the second may be a module. Blocks for type checkers are
    left out.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.update(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_module_name(node.value):
            found.add(node.value)  # As in `python -m tests.support.spark_job`, or a table of commands.
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def _is_module_name(text: str) -> bool:
    return (
        text.startswith(PACKAGES)
        and text.count(".") > 0
        and all(part.isidentifier() for part in text.split("."))
    )


def parents_of(module: str) -> Iterable[str]:
    """Yield the packages that contain a module. Importing the module imports them."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def import_graph(files: Iterable[str], root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules of *files*, each with the modules among them that it imports."""
    sources = {module_of(file): (root / file).read_text() for file in files}
    graph = {}
    for module, source in sources.items():
        named = imports_of(source)
        named |= {parent for one in named for parent in parents_of(one)}
        graph[module] = {one for one in named if one in sources} - {module}
    # A test starts the command by its name, in a process. So the helper for that imports the command line.
    graph.setdefault("tests.support.daemon", set()).add("tieringd.__main__")
    # Tests use the fixtures of a pytest plugin by name, without an import.
    if "tests.support.shared_brokers" in sources:
        for conftest in ("tests.e2e.conftest", "tests.integration.conftest"):
            graph.setdefault(conftest, set()).add("tests.support.shared_brokers")
    return graph


def reached_from(graph: Mapping[str, Collection[str]], changed: Collection[str]) -> set[str]:
    """Return *changed* and all modules that import one of them, directly or through others."""
    importers = defaultdict(set)
    for module, imported in graph.items():
        for one in imported:
            importers[one].add(module)
    reached, waiting = set(changed), list(changed)
    while waiting:
        for importer in importers[waiting.pop()] - reached:
            reached.add(importer)
            waiting.append(importer)
    return reached


def with_imports(graph: Mapping[str, Collection[str]], modules: Collection[str]) -> set[str]:
    """Return *modules* and all that they import, directly or through others."""
    reached, waiting = set(modules), list(modules)
    while waiting:
        for imported in set(graph.get(waiting.pop(), ())) - reached:
            reached.add(imported)
            waiting.append(imported)
    return reached


def outline(source: str) -> str:
    """Return the part of a module that runs at its import: everything but bodies of functions, as text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
        elif isinstance(node, ast.Module | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def differs_in_functions_only(before: str, after: str) -> bool:
    """Return whether only tests that run functions of a module can notice the change of its source."""
    machine_code = any(one.partition(".")[0] == "numba" for one in imports_of(after))
    return not machine_code and outline(before) == outline(after)


def digest_of(texts: Iterable[str]) -> str:
    """Return a short digest of the contents of files."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def own_modules(test: str, files: Collection[str]) -> set[str]:
    """Return the modules that pytest imports for a test file: itself and the conftests above it."""
    conftests = {str(Path(file).parent): module_of(file) for file in files if file.endswith("/conftest.py")}
    return {module_of(test), *(conftests[str(one)] for one in Path(test).parents if str(one) in conftests)}


def digests_of_tests(
    tests: Iterable[str], files: Collection[str], graph: Mapping[str, Collection[str]], root: Path = ROOT
) -> dict[str, str]:
    """Return for each test file a digest of it and of the helpers that it imports."""
    texts = {module_of(file): (root / file).read_text() for file in files}
    helpers = {
        module: {one for one in imported if one.startswith("tests.")} for module, imported in graph.items()
    }
    return {
        test: digest_of(texts[one] for one in sorted(with_imports(helpers, own_modules(test, files))))
        for test in tests
    }


@dataclass(frozen=True, slots=True)
class CoverageMap:
    """The modules whose functions test files ran, as `make coverage-map` recorded it."""

    ran: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By test file, the modules."""
    test_digests: Mapping[str, str] = field(default_factory=dict)
    """By test file, the digest of the file and its helpers when it was recorded."""
    module_digests: Mapping[str, str] = field(default_factory=dict)
    """By module that some test ran, the digest of its source when it was recorded."""

    @classmethod
    def load(cls, path: Path = COVERAGE) -> CoverageMap:
        """Read the map; it is empty if none was recorded."""
        if not path.exists():
            return cls()
        document = json.loads(path.read_text())
        tests = document["tests"]
        return cls(
            ran={test: ran for test, (_, *ran) in tests.items()},
            test_digests={test: digest for test, (digest, *_) in tests.items()},
            module_digests=document["modules"],
        )

    def write(self, path: Path = COVERAGE) -> None:
        """Write the map, sorted, with a line for each test file: its digest, then the modules."""
        tests = ",\n".join(
            f"  {json.dumps(test)}: {json.dumps([self.test_digests[test], *sorted(ran)])}"
            for test, ran in sorted(self.ran.items())
        )
        modules = json.dumps(dict(sorted(self.module_digests.items())), indent=1).replace("\n", "\n ")
        path.write_text(f'{{\n "tests": {{\n{tests}\n }},\n "modules": {modules}\n}}\n')

    def usable(
        self, tests: Mapping[str, str], modules: Mapping[str, str], graph: Mapping[str, Collection[str]]
    ) -> dict[str, set[str]]:
        """
        Return by test file the modules that it runs, for the test files whose record is still valid.

        Args:
            tests: The current digest of each test file.
            modules: The current digest of each module.
            graph: Each module with its current imports.
        """
        stale = {one for one, digest in self.module_digests.items() if modules.get(one) != digest}
        return {
            test: set(ran) | with_imports(graph, stale.intersection(ran))
            for test, ran in self.ran.items()
            if tests.get(test) == self.test_digests[test]
        }


def affected_tests(
    changed: Collection[str],
    *,
    files: Collection[str],
    coverage: CoverageMap | None = None,
    in_functions_only: Collection[str] = (),
    root: Path = ROOT,
) -> dict[str, str]:
    """
    Return the test files that a change can touch, each with the reason.

    Args:
        changed: Paths of changed files from the repository's root, including deleted files.
        files: Paths of all Python files of `PACKAGES`.
        coverage: The modules that test files ran, if recorded.
        in_functions_only: The files among *changed* in which only bodies of functions differ.
        root: The directory that all paths are relative to.
    """
    tests = [file for file in files if Path(file).name.startswith("test_")]
    wide = sorted(set(changed) & set(ALWAYS_WIDE))
    if wide:
        return dict.fromkeys(tests, f"{wide[0]} changed")
    graph = import_graph(files, root)
    modules = {module_of(file) for file in changed if file.endswith(".py")}
    reached = reached_from(graph, modules)
    ran = _what_ran(coverage or CoverageMap(), tests, files, graph, root)
    inside = {module_of(file) for file in in_functions_only} & modules
    # For a test with a record, imports decide only about the other changed files.
    reached_by_rest = reached_from(graph, modules - {one for one in inside if not one.startswith("tests.")})
    others = {file for file in changed if not file.endswith(".py")}
    chosen = {}
    for test in tests:
        own = own_modules(test, files)
        if test in changed:
            chosen[test] = "it changed"
        elif own & (reached_by_rest if test in ran else reached):
            chosen[test] = "it imports what changed"
        elif hit := sorted(inside & ran.get(test, set())):
            chosen[test] = f"it ran {hit[0]}"
        elif named := sorted(one for one in others if Path(one).name in (root / test).read_text()):
            chosen[test] = f"it names {named[0]}"
    return chosen


def _what_ran(
    coverage: CoverageMap,
    tests: Collection[str],
    files: Collection[str],
    graph: Mapping[str, Collection[str]],
    root: Path,
) -> dict[str, set[str]]:
    if not coverage.ran:
        return {}
    digests = {module_of(file): digest_of([(root / file).read_text()]) for file in files}
    return coverage.usable(digests_of_tests(tests, files, graph, root), digests, graph)


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.splitlines()


def changed_since(base: str) -> list[str]:
    """Return the paths that differ from *base*, including files that git does not track yet."""
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def inside_functions_since(base: str, changed: Iterable[str]) -> list[str]:
    """Return the files among *changed* in which only bodies of functions differ from *base*."""
    there = set(git("ls-tree", "-r", "--name-only", base))
    return [
        file
        for file in changed
        if file.endswith(".py")
        and file in there
        and (ROOT / file).exists()
        and differs_in_functions_only("\n".join(git("show", f"{base}:{file}")), (ROOT / file).read_text())
    ]


def tracked_files() -> list[str]:
    """Return the paths of all Python files of `PACKAGES`, including files that git does not track yet."""
    known = git("ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES)
    return [file for file in known if file.endswith(".py") and (ROOT / file).exists()]


def main() -> int:
    """Print the chosen test files and what is left out, run pytest on them, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base", default="", help="compare with this revision (default: main, or on main HEAD~1)"
    )
    parser.add_argument("--list", action="store_true", help="print the files and run nothing")
    parser.add_argument("pytest", nargs="*", help="more arguments of pytest, after --")
    arguments = parser.parse_args()
    base = arguments.base or default_base()
    files = tracked_files()
    changed = changed_since(base)
    chosen = affected_tests(
        changed,
        files=files,
        coverage=CoverageMap.load(),
        in_functions_only=inside_functions_since(base, changed),
    )
    tests = [file for file in files if Path(file).name.startswith("test_")]
    out = sys.stdout.write
    out(f"{len(changed)} files differ from {base}; {len(chosen)} of {len(tests)} test files can be touched\n")
    for file, reason in sorted(chosen.items()):
        out(f"  {file}: {reason}\n")
    left = Counter(group_of(file) for file in tests if file not in chosen).most_common()
    out(f"left out: {', '.join(f'{group} {count} files' for group, count in left) or 'nothing'}\n")
    sys.stdout.flush()
    if arguments.list or not chosen:
        return 0
    command = [sys.executable, "-m", "pytest", *arguments.pytest, *sorted(chosen)]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


def default_base() -> str:
    """Return the commit at which this branch left main; on an unchanged main, the commit before the last."""
    (head,), (fork,) = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "main")
    return "HEAD~1" if head == fork and not git("diff", "--name-only", "HEAD") else fork


if __name__ == "__main__":
    sys.exit(main())
