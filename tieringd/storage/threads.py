"""
Blocking work in threads that never outlives the call that started it.

A cancelled `asyncio.to_thread` or `run_in_executor` returns at once and leaves its thread at work, with
files that the caller is about to close. `in_thread` is for calls that end soon: a cancelled caller waits
until the thread is done, and then disposes of its result. `finished` and `outlast` are for bodies: a
cancelled caller asks the thread to stop, and waits until it has stopped.

Threads that move the bytes of bodies run at a lower CPU priority than the loop: otherwise a loop on few
cores stalls while they encrypt. They also have a lower disk priority. A thread's priorities are set when
it starts and stay, because a lowered thread may not be raised again. Only work that releases the
interpreter's lock is lowered: a lowered thread that holds the lock delays everything else.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SMALL_BYTES = 16 << 10
"""Messages of up to this size, of some hundred partitions, are decoded on the loop."""
STEP = 256
"""How many entries a loop over a large message handles before others have their turn."""
_NICER = 5  # 10 and 19 were no better, and made encryption wait for the scans.
_NICEST = 19
_IOPRIO_CALLS = {"x86_64": (252, 251), "aarch64": (31, 30)}
"""Numbers of the system calls ioprio_get and ioprio_set, which the C library does not have."""
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_SHIFT = 13
_IOPRIO_BEST_EFFORT = 2
_IOPRIO_LAST_BEST_EFFORT = (_IOPRIO_BEST_EFFORT << _IOPRIO_CLASS_SHIFT) | 7


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return what *function* returns in a thread. A cancellation takes effect after the thread is done."""
    return await in_thread_or(_forget, partial(function, *arguments, **options))


async def in_thread_if_large(
    size_bytes: int, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> T:
    """
    Return what *function* returns. It runs in a thread if its input of *size_bytes* takes milliseconds.

    Handing work to a thread costs more than decoding a small message.
    """
    if size_bytes <= SMALL_BYTES:
        return function(*arguments, **options)
    return await in_thread(function, *arguments, **options)


async def in_thread_or(dispose: Callable[[T], object], function: Callable[[], T]) -> T:
    """Return what *function* returns in a thread. If the caller was cancelled, *dispose* gets the result."""
    work = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        await _until_done(work)
    except asyncio.CancelledError:
        if not work.cancelled() and work.exception() is None:
            dispose(work.result())
        raise
    return work.result()


async def in_steps(items: Iterable[T], *, step: int = STEP) -> AsyncIterator[T]:
    """Yield *items*. After each *step* of them the loop serves others."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % step:
            await asyncio.sleep(0)


def _forget(result: object) -> None:
    """Drop a result that holds nothing open."""


def body_threads(count: int, *, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads for the bytes of bodies, with a lower priority than the calling thread."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_yield_to_the_loop)


def _yield_to_the_loop() -> None:
    thread = threading.get_native_id()  # On Linux each thread has a priority of its own.
    os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))
    _lower_at_the_disk(thread)


def _lower_at_the_disk(thread: int) -> None:
    """
    Lower the disk priority of a thread of the best-effort class by one level.

    Without an explicit class the thread's level follows from its nice value, and nothing is done. On a
    processor whose call numbers are not known here, the thread keeps the process's level.
    """
    if platform.machine() not in _IOPRIO_CALLS:
        return
    get, set_ = _IOPRIO_CALLS[platform.machine()]
    call = ctypes.CDLL(None, use_errno=True).syscall
    value = call(get, _IOPRIO_WHO_PROCESS, thread)
    if value >> _IOPRIO_CLASS_SHIFT == _IOPRIO_BEST_EFFORT:
        call(set_, _IOPRIO_WHO_PROCESS, thread, min(value + 1, _IOPRIO_LAST_BEST_EFFORT))


async def finished(work: Future[T], *, on_cancel: Callable[[], None]) -> T:
    """
    Return the result of *work*, which runs in an executor.

    When the caller is cancelled, work that has not begun never runs. For work that has begun,
    *on_cancel* is called to make it stop, and the caller waits for its end.
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
    """Wait until *work* has ended, however it ends. Cancellations meanwhile take effect afterwards."""
    await _until_done(asyncio.wrap_future(work))


async def _until_done(waiter: asyncio.Future[T]) -> None:
    """Wait until *waiter* is done, however it ends; a cancellation meanwhile is raised afterwards."""
    is_cancelled = False
    while not waiter.done():
        try:
            await asyncio.wait({waiter})
        except asyncio.CancelledError:
            is_cancelled = True
    if not waiter.cancelled():
        waiter.exception()  # Retrieved, so that the loop does not report it as never retrieved.
    if is_cancelled:
        raise asyncio.CancelledError
