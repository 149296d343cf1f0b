"""
The reason for a slow test: a comment beside the test that begins with `# Long:`.

A file over 30 s needs the comment before its first import, and a test over 15 s above the test. The times are
those in `tests/durations.json`. tests/unit/test_long_tests.py checks that the comments exist.
"""

from __future__ import annotations

import ast
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from tests.support.suite_report import LONG_FILE_SECONDS, LONG_TEST_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

MARK: Final = "# Long:"


def has_reason_at_top(source: str) -> bool:
    """Return whether the lines before the first import have a reason."""
    tree = ast.parse(source)
    imports = [node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return _has_mark(source.splitlines()[: min(imports, default=1) - 1])


def reasons_above(source: str, names: Collection[str]) -> list[bool]:
    """
    Return for each function and class in *names* whether the comment above it has a reason.

    The comment is above the decorators. Names that are not in the file are left out.
    """
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_named and node.name in names:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            above = takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines[: first - 1]))
            found.append(_has_mark(list(above)))
    return found


def _has_mark(lines: list[str]) -> bool:
    marked = [line.strip() for line in lines if line.strip().startswith(MARK)]
    return any(len(line) > len(MARK) for line in marked)


def without_reason(files: Mapping[str, float], long_tests: Mapping[str, float], root: Path) -> list[str]:
    """
    Return a message for each slow file and test without a reason.

    Args:
        files: The seconds of each test file, by path from *root*.
        long_tests: The seconds of each slow test, by node id.
        root: The repository. Files and tests that no longer exist are ignored.
    """
    found = [
        f"{file} takes {seconds:.0f} s: say why in a comment at its top that begins with {MARK!r}"
        for file, seconds in files.items()
        if seconds > LONG_FILE_SECONDS
        and (root / file).exists()
        and not has_reason_at_top((root / file).read_text())
    ]
    for test, seconds in long_tests.items():
        file, *names = test.partition("[")[0].split("::")
        if seconds <= LONG_TEST_SECONDS or not (root / file).exists():
            continue
        # For a state machine, the reason may be above its class.
        reasons = reasons_above((root / file).read_text(), names)
        if reasons and not any(reasons):
            found.append(f"{test} takes {seconds:.0f} s: say why in a comment above it, {MARK!r}")
    return found
