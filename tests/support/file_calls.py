"""How often the program asks the filesystem, by the kind of call."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = ("stat", "scandir", "open")


@contextmanager
def counted_file_calls() -> Iterator[Counter[str]]:
    """
    Count calls of `os.stat`, `os.scandir` and `os.open` from any thread, for the time of the context.

    The calls are made all the same. What a listing's entries are asked for counts as part of the listing.
    """
    counts: Counter[str] = Counter()

    def counting(kind: str) -> Callable[..., Any]:
        call = getattr(os, kind)

        @wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            counts[kind] += 1
            return call(*arguments, **options)

        return counted

    with ExitStack() as stack:
        for kind in KINDS:
            stack.enter_context(patch.object(os, kind, counting(kind)))
        yield counts
