"""
Counts the functions that this thread calls.

The count stands for the time that a piece of work takes from the loop. It is the same on a busy machine and
on a slow one, and a garbage collection does not change it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@contextmanager
def counted_calls() -> Iterator[Callable[[], int]]:
    """Count the calls of this thread in the context, which gives a function that returns the count so far."""
    count = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        yield lambda: count
    finally:
        sys.setprofile(None)
