"""
Why a slow test is slow: a comment that begins with `# Long:` beside it.

At the top of a file (before the first import) for a file over 30 s, above a test for one over 15 s, as
`tests/durations.json` recorded them. tests/unit/test_long_tests.py holds the two together.
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
    """Say whether the lines before the first import give the reason."""
    tree = ast.parse(source)
    imports = [node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return _has_mark(source.splitlines()[: min(imports, default=1) - 1])


def reasons_above(source: str, names: Collection[str]) -> list[bool]:
    """
    Return for each function and class of *names* whether the comment above it gives a reason.

    The comment stands above the decorators. A name that is not in the file gives nothing.
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
    Return a line for each slow file and test that has no reason beside it.

    Args:
        files: By path from *root*, the seconds of its tests.
        long_tests: By node id, the seconds of the test.
        root: The repository. What is no longer there is passed over.
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
        # The steps of a state machine are its class' matter.
        reasons = reasons_above((root / file).read_text(), names)
        if reasons and not any(reasons):
            found.append(f"{test} takes {seconds:.0f} s: say why in a comment above it, {MARK!r}")
    return found
