"""Count the program's filesystem calls, by kind."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = {"stat": "stat", "scandir": "scandir", "listdir": "scandir", "open": "open"}
"""The counted functions of `os`, and the kind that a call counts as."""


@contextmanager
def counted_file_calls() -> Iterator[Counter[str]]:
    """
    Count calls of `os.stat`, `os.scandir`, `os.listdir` and `os.open` from any thread in the context.

    Both listings count as `scandir`. The calls are still made. Calls on the entries of a listing are not
    counted separately.
    """
    counts: Counter[str] = Counter()

    def counting(name: str, kind: str) -> Callable[..., Any]:
        call = getattr(os, name)

        @wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            counts[kind] += 1
            return call(*arguments, **options)

        return counted

    with ExitStack() as stack:
        for name, kind in KINDS.items():
            stack.enter_context(patch.object(os, name, counting(name, kind)))
        yield counts
