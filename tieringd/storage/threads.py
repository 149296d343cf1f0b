"""
Blocking work in threads that never outlives the call that started it.

A cancelled `run_in_executor` returns at once and leaves its thread at work, with descriptors
that the caller is about to close. Here a cancelled caller asks the thread to stop, and
waits until it has.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")


async def finished(work: Future[T], *, on_cancel: Callable[[], None]) -> T:
    """
    Return the result of *work*, which an executor runs.

    When the caller is cancelled: work that has not begun never runs; work that has begun is
    told by *on_cancel* to stop, and waited for.
    """
    waiter = asyncio.wrap_future(work)
    try:
        await asyncio.wait({waiter})
    except asyncio.CancelledError:
        if not work.cancel():
            on_cancel()
            await _until_done(waiter)
        raise
    return waiter.result()


async def outlast(work: Future[T]) -> None:
    """Wait until *work* has ended, however it ends; cancellations meanwhile take effect afterwards."""
    await _until_done(asyncio.wrap_future(work))


async def _until_done(waiter: asyncio.Future[T]) -> None:
    is_cancelled = False
    while not waiter.done():
        try:
            await asyncio.wait({waiter})
        except asyncio.CancelledError:
            is_cancelled = True
    if not waiter.cancelled():
        waiter.exception()  # Looked at, so that the loop does not report it as forgotten.
    if is_cancelled:
        raise asyncio.CancelledError
