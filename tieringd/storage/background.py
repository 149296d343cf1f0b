"""
Which requests are background work: those that wait for a store that has nothing better to do.

A mark on the running task, which what it starts inherits. It changes nothing about a request; who
listens to a `ResilientStore` may ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_background: ContextVar[bool] = ContextVar("is_background", default=False)


@contextmanager
def background() -> Iterator[None]:
    """Mark what is asked of a store in the block, and in the tasks that it starts."""
    token = _is_background.set(True)
    try:
        yield
    finally:
        _is_background.reset(token)


def is_background() -> bool:
    """Say whether the running task does background work."""
    return _is_background.get()
