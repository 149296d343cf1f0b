"""
Blocking calls in a thread that a cancelled caller does not leave behind.

A cancelled `asyncio.to_thread` returns at once, while its thread works on with files that the caller is
about to close, and with a result that nobody closes. Here the caller waits until the thread is done,
and then disposes of what it returned. For calls that end soon; what may take long is cut into several.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return what *function* returns in a thread; a cancellation meanwhile takes effect afterwards."""
    return await in_thread_or(_forget, partial(function, *arguments, **options))


async def in_thread_or(dispose: Callable[[T], object], function: Callable[[], T]) -> T:
    """Return what *function* returns; where the caller was cancelled meanwhile, *dispose* gets it."""
    work = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                continue  # It is passed on below.
        if not work.cancelled() and work.exception() is None:
            dispose(work.result())
        raise
    return work.result()


def _forget(result: object) -> None:
    """Do nothing with a result that holds nothing open."""
