"""
The tests that a change can touch: `python -m tests.support.affected [--base REVISION]`.

A test file is chosen when it imports, directly or through others, a Python file that changed, or
when it names another file that changed. `tests/coverage.json`, where it exists, narrows this down:
it holds the modules whose functions each test file really ran, in its own process and in the
commands it started (`make coverage-map` records it). What is left out is said.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.suite_report import group_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

ROOT: Final = Path(__file__).parents[2]
COVERAGE: Final = ROOT / "tests" / "coverage.json"
PACKAGES: Final = ("tieringd", "pyspark_tieringd", "tests")
ALWAYS_WIDE: Final = ("pyproject.toml", "Makefile", "tests/conftest.py", "tests/support/suite_report.py")
"""A change of these can touch every test."""


def module_of(path: str) -> str:
    """Return the dotted name of a Python file, by its path from the repository's root."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(source: str) -> set[str]:
    """
    Return the dotted names that a module imports when it runs, those inside functions too.

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
    """Yield the packages that a module lies in: importing it imports them."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def import_graph(files: Iterable[str], root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules of *files*, each with those of them that it imports."""
    sources = {module_of(file): (root / file).read_text() for file in files}
    graph = {}
    for module, source in sources.items():
        named = imports_of(source)
        named |= {parent for one in named for parent in parents_of(one)}
        graph[module] = {one for one in named if one in sources} - {module}
    # A process is started by its name: the helper that does it stands for the whole command line.
    graph.setdefault("tests.support.daemon", set()).add("tieringd.__main__")
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


def affected_tests(
    changed: Collection[str],
    *,
    files: Collection[str],
    coverage: Mapping[str, Collection[str]],
    root: Path = ROOT,
) -> dict[str, str]:
    """
    Return the test files that a change can touch, each with the reason.

    Args:
        changed: Paths from the repository's root of what changed, files that are gone among them.
        files: Paths of all Python files of `PACKAGES`.
        coverage: For test files that were recorded, the modules whose functions they ran.
        root: What the paths begin from.
    """
    tests = [file for file in files if Path(file).name.startswith("test_")]
    wide = sorted(set(changed) & set(ALWAYS_WIDE))
    if wide:
        return dict.fromkeys(tests, f"{wide[0]} changed")
    graph = import_graph(files, root)
    modules = {module_of(file) for file in changed if file.endswith(".py")}
    reached = reached_from(graph, modules)
    conftests = {str(Path(file).parent): module_of(file) for file in files if file.endswith("/conftest.py")}
    others = {file for file in changed if not file.endswith(".py")}
    chosen = {}
    for test in tests:
        own = {module_of(test), *(conftests[str(one)] for one in Path(test).parents if str(one) in conftests)}
        of_tests = {one for one in modules if one.startswith("tests.")}
        ran = coverage.get(test)
        if test in changed:
            chosen[test] = "it changed"
        elif own & (reached if ran is None else reached_from(graph, of_tests)):
            chosen[test] = "it imports what changed"
        elif ran is not None and (hit := sorted(modules & set(ran))):
            chosen[test] = f"it ran {hit[0]}"
        elif named := sorted(one for one in others if Path(one).name in (root / test).read_text()):
            chosen[test] = f"it names {named[0]}"
    return chosen


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.splitlines()


def changed_since(base: str) -> list[str]:
    """Return the paths that differ from *base*, those that git does not know yet among them."""
    return sorted({*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")})


def main() -> int:
    """Print what is chosen and what is left out, and run pytest on it; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base", default="", help="compare with this revision (default: main, or on main HEAD~1)"
    )
    parser.add_argument("--list", action="store_true", help="print the files and run nothing")
    parser.add_argument("pytest", nargs="*", help="more arguments of pytest, after --")
    arguments = parser.parse_args()
    base = arguments.base or _default_base()
    known = _git("ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES)
    files = [file for file in known if file.endswith(".py") and (ROOT / file).exists()]
    changed = changed_since(base)
    coverage = json.loads(COVERAGE.read_text()) if COVERAGE.exists() else {}
    chosen = affected_tests(changed, files=files, coverage=coverage)
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


def _default_base() -> str:
    """Return where this branch left main; on an unchanged main, the commit before the last."""
    (head,), (fork,) = _git("rev-parse", "HEAD"), _git("merge-base", "HEAD", "main")
    return "HEAD~1" if head == fork and not _git("diff", "--name-only", "HEAD") else fork


if __name__ == "__main__":
    sys.exit(main())
