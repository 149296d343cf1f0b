"""Callers of the upload gate that are cancelled, at every moment, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.uploads import (
    KIB,
    CountingTimers,
    Uploader,
    gate_at,
    now,
    on_virtual_time,
    partition,
    settle,
)
from tieringd.policies.upload_control import UploadPace

pytestmark = pytest.mark.looptime


async def test_cancelling_one_that_waits_leaves_no_trace():
    """A cancelled upload leaves the line with its bytes, and the others begin as if it had never come."""
    uploader = Uploader(gate_at(1, 10 * KIB))
    uploader.start(1, 20 * KIB, seconds=0.5)
    gone = uploader.start(2, 50 * KIB)
    uploader.start(3, seconds=0.5)
    await settle()
    assert (uploader.gate.waiting_uploads, uploader.gate.waiting_bytes) == (2, 51 * KIB)
    gone.cancel()
    await settle()
    assert (uploader.gate.waiting_uploads, uploader.gate.waiting_bytes) == (1, KIB)
    await asyncio.gather(*uploader.tasks, return_exceptions=True)
    assert (uploader.order, uploader.times) == ([1, 3], [0, 2])
    assert gone.cancelled()


async def test_cancelling_one_that_was_let_in_gives_everything_back():
    """Cancelled between being let in and beginning, it has sent nothing: slot and bytes are free again."""
    uploader = Uploader(gate_at(1, 10 * KIB))
    await uploader.start_all(1)
    unlucky = uploader.start(2, 1000 * KIB)
    await asyncio.sleep(5)
    await uploader.let_next_in()
    assert uploader.gate.bytes_in_flight == 1000 * KIB, "let in, and not run yet"
    unlucky.cancel()
    await settle()
    assert (uploader.gate.uploads_in_flight, uploader.gate.bytes_in_flight) == (0, 0)
    uploader.start(3, seconds=0)
    await asyncio.gather(*uploader.tasks, return_exceptions=True)
    assert (uploader.order, uploader.times) == ([1, 3], [0, 5])


async def test_a_pace_without_limit_leaves_nothing_to_give_back():
    """One let in under a budget, and cancelled when there is none any more, changes no later budget."""
    uploader = Uploader(gate_at(1, 10 * KIB))
    await uploader.start_all(1)
    unlucky = uploader.start(2, 1000 * KIB)
    await asyncio.sleep(5)
    await uploader.let_next_in()
    uploader.gate.set_pace(UploadPace(1, None))
    unlucky.cancel()
    await settle()
    uploader.gate.set_pace(UploadPace(1, 10 * KIB))
    uploader.start(3, 10 * KIB, seconds=0)
    uploader.start(4, 10 * KIB, seconds=0)
    await asyncio.gather(*uploader.tasks, return_exceptions=True)
    assert (uploader.order, uploader.times) == ([1, 3, 4], [0, 5, 6])


async def test_cancelling_one_that_is_chosen_next_lets_another_begin():
    """A slot that becomes free in the moment of a cancellation goes to one that still wants it."""
    uploader = Uploader(gate_at(1))
    await uploader.start_all(1)
    unlucky = uploader.start(2)
    await uploader.start_all(3)
    unlucky.cancel()
    await uploader.end_first()
    assert (uploader.order, uploader.gate.waiting_uploads) == ([1, 3], 0)
    await uploader.end_all()


async def test_cancelling_an_upload_under_way_frees_the_slot_and_keeps_the_bytes():
    """The bytes of a cancelled upload may have been sent, so the next one waits until they are paid for."""
    uploader = Uploader(gate_at(1, 10 * KIB))
    running = uploader.start(1, 40 * KIB)
    uploader.start(2, seconds=0)
    await settle()
    running.cancel()
    await settle()
    assert uploader.gate.uploads_in_flight == 0
    await asyncio.gather(*uploader.tasks, return_exceptions=True)
    assert uploader.times == [0, 4]


async def test_a_slot_is_not_lost_on_one_that_was_cancelled_a_moment_ago():
    """An upload that ends right after cancelling the next in line lets the one behind it begin."""
    uploader = Uploader(gate_at(1))
    gate = uploader.gate
    async with gate.upload(partition(1), KIB):
        unlucky = uploader.start(2, 10)
        uploader.start(2, 20)
        uploader.start(2, 40)
        await settle()
        unlucky.cancel()
    assert (gate.bytes_in_flight, gate.waiting_uploads, gate.waiting_bytes) == (20, 1, 40)
    await settle()
    assert (gate.bytes_in_flight, gate.waiting_uploads, gate.waiting_bytes) == (20, 1, 40)
    assert unlucky.cancelled()
    await uploader.end_all()


async def test_a_slot_stays_free_when_everyone_in_line_was_cancelled():
    """An upload that ends right after cancelling the only one in line leaves the gate empty."""
    uploader = Uploader(gate_at(1))
    gate = uploader.gate
    async with gate.upload(partition(1), KIB):
        await uploader.start_all(2)
        uploader.tasks[0].cancel()
    assert (gate.uploads_in_flight, gate.waiting_uploads, gate.waiting_bytes) == (0, 0, 0)
    await settle()
    assert (gate.uploads_in_flight, gate.waiting_uploads, gate.waiting_bytes) == (0, 0, 0)


@given(
    st.integers(1, 4),
    st.integers(1, 50) | st.none(),
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(0, 100),
            st.integers(0, 5),
            st.integers(0, 3) | st.none(),
            st.integers(0, 2),
        ),
        max_size=25,
    ),
)
def test_cancellations_leak_neither_slots_nor_bytes(uploads, bytes_per_second, asks):
    """
    The gate is empty after any mixture of uploads and cancellations, with every slot free.

    Its counts agree with what runs all the time, and the debt is no more than the bytes that began.
    """

    async def run() -> None:
        timers = CountingTimers()
        uploader = Uploader(gate_at(uploads, bytes_per_second, timers=timers))
        gate, loop = uploader.gate, asyncio.get_running_loop()
        for number, size_bytes, seconds, cancelled_after, pause in asks:
            task = uploader.start(number, size_bytes, seconds=seconds)
            if cancelled_after is not None:
                loop.call_later(cancelled_after, task.cancel)
            await asyncio.sleep(pause)
            assert gate.uploads_in_flight >= uploader.running
            assert gate.uploads_in_flight <= uploads
        await asyncio.gather(*uploader.tasks, return_exceptions=True)
        assert (gate.uploads_in_flight, gate.bytes_in_flight) == (0, 0)
        assert (gate.waiting_uploads, gate.waiting_bytes, gate.waiting_partitions) == (0, 0, 0)
        assert not timers.pending
        if bytes_per_second is not None:
            charged = sum(size for _, _, size in uploader.begun)
            assert (gate._brake.free_at - now()) * bytes_per_second <= charged + 0.01
        gate.set_pace(UploadPace(uploads, None))
        before = now()
        await uploader.start_all(*range(uploads + 1))
        assert (gate.uploads_in_flight, gate.waiting_uploads, now()) == (uploads, 1, before)
        await uploader.end_all()

    on_virtual_time(run())
