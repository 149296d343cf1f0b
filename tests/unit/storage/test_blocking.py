"""Calls in a thread: a cancelled caller waits for its thread, and loses nothing that it returned."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tieringd.storage.threads import in_thread, in_thread_or


async def test_result_and_error_come_through():
    """The result and the error of the function come through, as from any call."""
    assert await in_thread(sorted, [2, 1], reverse=True) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 1, 0)


async def test_cancelled_caller_outlasts_its_thread_and_disposes_of_the_result():
    """Even one that is cancelled again and again."""
    begun, may_end, disposed = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        may_end.wait()
        return "result"

    caller = asyncio.create_task(in_thread_or(disposed.append, work))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    assert disposed == []
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert disposed == ["result"]


async def test_cancelled_caller_of_a_failing_thread_is_cancelled():
    """There is nothing to dispose of, and no caller is left to get the error."""
    begun, may_end, disposed = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        may_end.wait()
        raise ValueError("too late")

    caller = asyncio.create_task(in_thread_or(disposed.append, work))
    await asyncio.to_thread(begun.wait)
    caller.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert disposed == []
