"""The clock of the time in which this process ran."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.fakes.virtual_loop import virtually
from tieringd.pauses import AwakeClock


@virtually
async def test_time_in_which_the_process_ran_counts():
    """The clock is the loop's as long as the loop turns."""
    clock = AwakeClock()
    running = asyncio.create_task(clock.run())
    began = clock.now()
    await asyncio.sleep(100)
    assert clock.now() - began == pytest.approx(100)
    running.cancel()


@pytest.mark.parametrize("is_read_first", [True, False])
def test_pause_does_not_count(is_read_first):
    """A judgement or the clock's own beat comes first after the pause."""

    @virtually
    async def history():
        clock = AwakeClock()
        running = asyncio.create_task(clock.run())
        await asyncio.sleep(10)
        before = clock.now()
        with capture_logs() as events:
            asyncio.get_running_loop().pass_time(300)
            if not is_read_first:
                await asyncio.sleep(0)
            assert clock.now() - before <= 1
            await asyncio.sleep(10)
        assert 10 <= clock.now() - before <= 11
        assert [one["event"] for one in events] == ["this process stood still"]
        running.cancel()

    history()
