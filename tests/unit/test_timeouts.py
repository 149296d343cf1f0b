"""Timeouts of asyncio in tasks with earlier requests to cancel them, on each Python that tieringd runs on."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

_SCRIPT = """
import sys
{first}
assert ("asyncio" in sys.modules) == ("asyncio" in {first!r})
import asyncio, tieringd

async def cleaning_up():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "a timeout"

async def history():
    task = asyncio.create_task(cleaning_up())
    await asyncio.sleep(0)
    task.cancel()
    return await task

print(asyncio.run(history()))
"""


@pytest.mark.parametrize("first", ["import tieringd", "import asyncio"])
def test_timeouts_are_mended_whichever_is_imported_first(first):
    """A process that imports tieringd has mended timeouts, and tieringd alone imports no asyncio."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(first=first)], check=True, capture_output=True, text=True
    )
    assert done.stdout == "a timeout\n"


async def test_timeout_after_a_task_group_that_failed_is_a_timeout():
    """A task group that fails leaves a request to cancel; a timeout after it still ends as a timeout."""

    async def failing():
        raise ValueError

    async def cleaning_up():
        try:
            # The task that fails while its group is being left makes the request that stays.
            async with asyncio.TaskGroup() as group:
                group.create_task(failing())
        except* ValueError:
            pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        return "done"

    assert await asyncio.create_task(cleaning_up()) == "done"


async def test_timeout_in_the_cleanup_of_a_cancelled_task_is_a_timeout():
    """A task that was cancelled cleans up with a timeout, and its own cancellation goes on afterwards."""
    seen = []

    async def cancelled():
        try:
            await asyncio.Event().wait()
        finally:
            try:
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            except TimeoutError as error:
                seen.append(type(error.__cause__ or error.__context__))

    task = asyncio.create_task(cancelled())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [asyncio.CancelledError]


async def test_cancellation_inside_a_timeout_is_no_timeout():
    """A request that comes while a timeout runs is a cancellation, even when the timeout runs out as well."""

    async def waiting():
        async with asyncio.timeout(0.001) as timeout:
            try:
                await asyncio.Event().wait()
            finally:
                running.cancel()
                assert timeout.expired()

    running = asyncio.create_task(waiting())
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_timeout_that_does_not_run_out_changes_nothing():
    """A body that ends in time gives its result, and one that fails keeps its own error."""
    async with asyncio.timeout(60) as timeout:
        await asyncio.sleep(0)
    assert not timeout.expired()

    async def failing():
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
            raise KeyError

    with pytest.raises(KeyError):
        await failing()


async def test_what_was_cancelled_inside_a_timeout_is_no_timeout():
    """A body that awaits a cancelled future gets CancelledError, as its timeout did not run out."""
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await cancelled
