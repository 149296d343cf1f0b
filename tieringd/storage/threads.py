"""
Blocking work in threads that never outlives the call that started it.

A cancelled `run_in_executor` returns at once and leaves its thread at work, with descriptors
that the caller is about to close. Here a cancelled caller asks the thread to stop, and
waits until it has.

Threads that move the bytes of bodies come after the loop in the processor's favour: else a loop on few
cores stands still while they cipher.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")

_NICER = 5  # 10 and 19 were no better, and let ciphers wait for the scans.
_NICEST = 19


def body_threads(count: int, *, name: str) -> ThreadPoolExecutor:
    """Return threads for the bytes of bodies, of a lower priority than who makes them."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_yield_to_the_loop)


def _yield_to_the_loop() -> None:
    thread = threading.get_native_id()  # On Linux each thread has a priority of its own.
    os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))


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
