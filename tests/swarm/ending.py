"""
The orderly end of a swarm: a signal cancels its task, and no thread goes on after that.

A thread cannot be cancelled. A thread that starts a daemon while the swarm ends would leave the daemon
behind. So a task that is cancelled waits for its thread.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_P = ParamSpec("_P")
_T = TypeVar("_T")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def in_thread(function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Run a function in a thread, and return what it returns. A cancellation waits for the function's end."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            # The cancellation is told, and not what became of the thread.
            running.exception()
        raise


@contextmanager
def cancelled_by_signals() -> Iterator[list[signal.Signals]]:
    """
    Cancel the current task at the first SIGTERM or SIGINT. The list that is yielded then has the signal.

    Further signals change nothing, because what the task cleans up must not be interrupted.
    """
    task = asyncio.current_task()
    assert task is not None, "signals are for a task"
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield received
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
