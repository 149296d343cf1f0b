"""
A mark for background requests: those that wait until the store has nothing more urgent to do.

The mark is a context variable of the running task, and tasks that it starts inherit the mark. It does
not change a request. A listener of a `ResilientStore` may read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_background: ContextVar[bool] = ContextVar("is_background", default=False)


@contextmanager
def background() -> Iterator[None]:
    """Mark the store requests of the block, and of the tasks that the block starts, as background work."""
    token = _is_background.set(True)
    try:
        yield
    finally:
        _is_background.reset(token)


def is_background() -> bool:
    """Return whether the running task does background work."""
    return _is_background.get()
