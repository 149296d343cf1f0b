"""The gate before uploads, on a virtual clock: the pace it keeps, and what it counts."""

from __future__ import annotations

import asyncio
import math

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
from tieringd.archiving.upload_queue import Urgency
from tieringd.policies.upload_control import CPU, LIMIT, SLOTS, UploadPace

pytestmark = pytest.mark.looptime


async def test_a_free_gate_lets_an_upload_begin_at_once():
    """An upload enters a free gate at once, and leaves nothing behind."""
    gate = gate_at(1)
    async with gate.upload(partition(1), 5 * KIB):
        assert (gate.uploads_in_flight, gate.bytes_in_flight, gate.waiting_uploads) == (1, 5 * KIB, 0)
    assert (gate.uploads_in_flight, gate.bytes_in_flight, gate.waiting_uploads) == (0, 0, 0)
    assert now() == 0


async def test_a_segment_larger_than_the_budget_begins_at_once_at_any_pace():
    """A newly closed segment that finds the gate idle goes up promptly, however polite the pace is."""
    gate = gate_at(1, 1)
    async with gate.upload(partition(1), 1024 * KIB):
        assert now() == 0


async def test_no_more_uploads_run_than_the_pace_allows():
    """Two of five uploads begin if the pace allows two, and each end lets one more begin."""
    uploader = Uploader(gate_at(2))
    await uploader.start_all(1, 2, 3, 4, 5)
    assert (uploader.order, uploader.gate.waiting_uploads) == ([1, 2], 3)
    await uploader.end_first()
    assert (uploader.order, uploader.gate.uploads_in_flight) == ([1, 2, 3], 2)
    await uploader.end_all()
    assert (uploader.order, uploader.most_running) == ([1, 2, 3, 4, 5], 2)


async def test_an_upload_that_fails_gives_its_slot_back():
    """The error reaches the caller, and the next one begins."""
    uploader = Uploader(gate_at(1))

    async def fail() -> None:
        async with uploader.gate.upload(partition(1), KIB):
            await uploader.start_all(2)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await fail()
    await settle()
    assert uploader.order == [2]
    await uploader.end_all()


async def test_bytes_per_second_are_kept():
    """Segments of 5, 20 and 10 KiB begin at 10 KiB/s when the bytes before them are paid for."""
    uploader = Uploader(gate_at(9, 10 * KIB))
    for number, kib in enumerate((5, 20, 10, 1)):
        uploader.start(number, kib * KIB, seconds=0.1)
    await asyncio.gather(*uploader.tasks)
    assert uploader.times == [0, 0.5, 2.5, 3.5]


async def test_an_idle_gate_saves_up_one_second():
    """Three segments of half a second begin together after a long rest, and a fourth waits."""
    uploader = Uploader(gate_at(9, 10 * KIB))
    await asyncio.sleep(1000)
    for number in range(4):
        uploader.start(number, 5 * KIB, seconds=0.1)
    await asyncio.gather(*uploader.tasks)
    assert uploader.times == [1000, 1000, 1000, 1000.5]


@given(
    st.integers(1, 5),
    st.integers(1, 50) | st.none(),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 200), st.integers(0, 9), st.floats(0, 30)), max_size=25
    ),
)
def test_pace_holds_over_every_window(uploads, bytes_per_second, asks):
    """
    The pace bounds concurrency at every moment and bytes over every window, for requests at any times.

    The bytes of a window are at most those of its seconds, of one second saved up, and of the last segment,
    which may be borrowed.
    """

    async def run() -> None:
        uploader = Uploader(gate_at(uploads, bytes_per_second))
        for number, size_bytes, seconds, pause in asks:
            uploader.start(number, size_bytes, seconds=seconds)
            await asyncio.sleep(pause)
        await asyncio.gather(*uploader.tasks)
        assert len(uploader.begun) == len(asks)
        assert uploader.most_running <= uploads
        for first, (since, _, _) in enumerate(uploader.begun):
            total = 0
            for until, _, size_bytes in uploader.begun[first:]:
                assert bytes_per_second is None or total <= bytes_per_second * (until - since + 1) + 0.01
                total += size_bytes

    on_virtual_time(run())


async def test_the_last_moment_needs_no_byte_budget():
    """Data ten seconds from its loss begins while others wait for bytes, exactly when it gets that near."""
    uploader = Uploader(gate_at(9, KIB))
    uploader.start(1, 500 * KIB, seconds=1)
    uploader.start(2, 500 * KIB, seconds=1)
    uploader.start(3, 20 * KIB, seconds=1, seconds_to_loss=17)
    uploader.start(4, seconds=1, seconds_to_loss=3)
    await asyncio.gather(*uploader.tasks)
    # Partition 2 pays for all of them: 500, 1 and 20 KiB.
    assert (uploader.order, uploader.times) == ([1, 4, 3, 2], [0, 0, 7, 521])


async def test_the_last_moment_needs_a_slot():
    """No more uploads run than the pace allows, however near the loss is."""
    uploader = Uploader(gate_at(1, KIB))
    uploader.start(1, seconds=30)
    uploader.start(2, seconds=1, seconds_to_loss=0)
    await asyncio.gather(*uploader.tasks)
    assert (uploader.times, uploader.most_running) == ([0, 30], 1)


async def test_a_faster_pace_takes_hold_at_once():
    """More slots are filled without waiting for an upload to end."""
    uploader = Uploader(gate_at(1))
    await uploader.start_all(1, 2, 3, 4)
    uploader.gate.set_pace(UploadPace(3, None))
    await settle()
    assert (uploader.order, now()) == ([1, 2, 3], 0)
    assert uploader.gate.pace == UploadPace(3, None)
    await uploader.end_all()


async def test_a_slower_pace_lets_what_runs_run():
    """No upload begins at a slower pace until enough of those under way have ended."""
    uploader = Uploader(gate_at(3))
    await uploader.start_all(1, 2, 3, 4)
    uploader.gate.set_pace(UploadPace(1, None))
    await uploader.end_first()
    await uploader.end_first()
    assert uploader.order == [1, 2, 3]
    await uploader.end_first()
    assert uploader.order == [1, 2, 3, 4]
    await uploader.end_all()


@pytest.mark.parametrize(
    ("pace", "begins_at"),
    [
        pytest.param(40 * KIB, 8, id="faster"),
        pytest.param(5 * KIB, 22, id="slower"),
        pytest.param(10 * KIB, 14, id="as before"),
        pytest.param(None, 6, id="without limit"),
    ],
)
async def test_bytes_owed_are_paid_at_the_new_rate(pace, begins_at):
    """140 KiB begun at 10 KiB/s leave 80 KiB to pay after six seconds, at whatever the rate is then."""
    uploader = Uploader(gate_at(9, 10 * KIB))
    uploader.start(1, 140 * KIB, seconds=0)
    uploader.start(2, seconds=0)
    await asyncio.sleep(6)
    uploader.gate.set_pace(UploadPace(9, pace))
    await asyncio.gather(*uploader.tasks)
    assert uploader.times == [0, begins_at]


@pytest.mark.parametrize(
    ("before", "times"),
    [
        pytest.param(None, [100, 101, 102], id="nothing from a time without limit"),
        pytest.param(40 * KIB, [100, 100, 101], id="a second of the new rate from a faster one"),
        pytest.param(5 * KIB, [100, 100.5, 101.5], id="the bytes from a slower one"),
    ],
)
async def test_a_new_pace_begins_with_what_was_saved(before, times):
    """Segments of a second each begin after the saved bytes, which are at most a second of either rate."""
    uploader = Uploader(gate_at(9, before))
    await asyncio.sleep(100)
    uploader.gate.set_pace(UploadPace(9, 10 * KIB))
    for number in range(3):
        uploader.start(number, 10 * KIB, seconds=0)
    await asyncio.gather(*uploader.tasks)
    assert uploader.times == times


async def test_a_timer_that_comes_early_counts_as_on_time():
    """A loop may call by its clock's resolution too soon: the gate acts then, and sets no second timer."""
    timers = CountingTimers(early_seconds=0.001)
    uploader = Uploader(gate_at(9, 10 * KIB, timers=timers))
    uploader.start(1, 20 * KIB, seconds=0)
    uploader.start(2, seconds=0)
    await asyncio.gather(*uploader.tasks)
    assert (uploader.times, timers.made) == ([0, 1.999], 1)


async def test_a_wait_for_bytes_takes_one_timer():
    """A hundred that wait for the same bytes do not each set a timer."""
    timers = CountingTimers()
    uploader = Uploader(gate_at(9, 10 * KIB, timers=timers))
    uploader.start(0, 20 * KIB, seconds=0)
    await uploader.start_all(*range(1, 101), seconds=0)
    assert timers.made == 1
    for task in uploader.tasks:
        task.cancel()
    await asyncio.gather(*uploader.tasks, return_exceptions=True)
    assert not timers.pending


async def test_waiting_can_be_read_at_any_time():
    """Uploads, bytes and partitions that wait are counted, and the age of the oldest."""
    uploader = Uploader(gate_at(1))
    gate = uploader.gate
    assert gate.longest_wait_seconds == 0
    await uploader.start_all(1)
    await asyncio.sleep(3)
    await uploader.start_all(2, 2)
    await asyncio.sleep(4)
    await uploader.start_all(3, size_bytes=7)
    assert (gate.waiting_uploads, gate.waiting_partitions) == (3, 2)
    assert (gate.waiting_bytes, gate.longest_wait_seconds) == (2 * KIB + 7, 4)
    await uploader.end_all()
    assert (gate.waiting_uploads, gate.waiting_partitions) == (0, 0)
    assert (gate.waiting_bytes, gate.longest_wait_seconds) == (0, 0)


async def test_speed_is_that_of_the_uploads_and_not_of_the_pace():
    """Segments of 20 KiB that take two seconds each are 10 KiB/s, even when one in ten seconds may begin."""
    uploader = Uploader(gate_at(9, 2 * KIB))
    assert uploader.gate.measured_bytes_per_second is None
    for number in range(4):
        uploader.start(number, 20 * KIB, seconds=2)
    await asyncio.gather(*uploader.tasks)
    assert uploader.times == [0, 10, 20, 30]
    assert uploader.gate.measured_bytes_per_second == pytest.approx(10 * KIB)


async def test_speed_of_uploads_side_by_side_is_counted_together():
    """Four at once that each carry 20 KiB in two seconds are 40 KiB/s."""
    uploader = Uploader(gate_at(4))
    await uploader.start_all(1, 2, 3, 4, size_bytes=20 * KIB, seconds=2)
    await asyncio.gather(*uploader.tasks)
    assert uploader.gate.measured_bytes_per_second == pytest.approx(40 * KIB)


async def test_speed_leaves_out_what_failed():
    """An hour of uploads that fail does not make the store look slow once it is back."""
    uploader = Uploader(gate_at(2))
    hanging = [uploader.start(number, 1000 * KIB) for number in (1, 2)]
    await asyncio.sleep(3600)
    for task in hanging:
        task.cancel()
    await uploader.end_all()
    assert uploader.gate.measured_bytes_per_second is None
    uploader.start(3, 20 * KIB, seconds=2)
    await asyncio.gather(*uploader.tasks, return_exceptions=True)
    assert uploader.gate.measured_bytes_per_second == pytest.approx(10 * KIB)


async def test_speed_follows_what_the_machine_can_do_now():
    """A store that has become ten times slower is measured within half by twenty uploads."""
    uploader = Uploader(gate_at(1))
    for seconds in (1, 10):
        for _ in range(20):
            await uploader.start(1, 10 * KIB, seconds=seconds)
    assert KIB < uploader.gate.measured_bytes_per_second < 1.5 * KIB


async def test_the_brake_lets_new_segments_pass():
    """One that was closed a moment ago begins beside those that wait for bytes, and takes none of theirs."""
    pace = UploadPace(1, 10 * KIB, held_by=CPU, new_uploads=3)
    uploader = Uploader(gate_at(pace))
    uploader.start(1, 50 * KIB, seconds=1)
    uploader.start(2, 50 * KIB, seconds=1)
    for number in (3, 4, 5):
        uploader.start(number, 1000 * KIB, seconds=2, is_new=True)
    await asyncio.gather(*uploader.tasks)
    assert (uploader.order, uploader.times) == ([1, 3, 4, 5, 2], [0, 0, 0, 1, 5])


async def test_the_hard_limit_binds_new_segments_and_the_last_moment():
    """Each upload pays the cost of a link, whatever its hurry is."""
    uploader = Uploader(gate_at(UploadPace(9, None, limit_bytes_per_second=10 * KIB)))
    uploader.start(1, 50 * KIB, seconds=0)
    uploader.start(2, 50 * KIB, seconds=0, is_new=True)
    uploader.start(3, 50 * KIB, seconds=0, seconds_to_loss=0)
    await asyncio.gather(*uploader.tasks)
    assert (uploader.order, uploader.times) == ([1, 3, 2], [0, 5, 10])


async def test_listening_lets_only_the_last_moment_begin():
    """No upload begins while the machine is heard, but what is about to be lost."""
    uploader = Uploader(gate_at(UploadPace(9, None, is_listening=True)))
    uploader.start(1, seconds=1)
    uploader.start(2, seconds=1, is_new=True)
    uploader.start(3, seconds=1, seconds_to_loss=12)
    await asyncio.sleep(5)
    assert (uploader.order, uploader.times) == ([3], [2])
    uploader.gate.set_pace(UploadPace(9, None))
    await asyncio.gather(*uploader.tasks)
    assert uploader.times == [2, 5, 5]


async def test_the_gate_says_when_uploads_begin_and_end():
    """The gate reports once that it is busy, before the first upload, and once that it is quiet."""
    uploader = Uploader(gate_at(9))
    said = []
    uploader.gate.on_busy = lambda: said.append(("busy", now()))
    uploader.gate.on_quiet = lambda: said.append(("quiet", now()))
    for seconds in (1, 3):
        uploader.start(seconds, seconds=seconds)
    await asyncio.gather(*uploader.tasks)
    assert said == [("busy", 0), ("quiet", 3)]


async def test_a_slot_that_passes_to_the_next_upload_leaves_no_quiet_moment():
    """An upload that begins in the moment in which the only other one ends finds the gate busy."""
    uploader = Uploader(gate_at(1))
    said = []
    uploader.gate.on_busy = lambda: said.append(("busy", now()))
    uploader.gate.on_quiet = lambda: said.append(("quiet", now()))
    for number in (1, 2):
        uploader.start(number, seconds=1)
    await asyncio.gather(*uploader.tasks)
    assert said == [("busy", 0), ("quiet", 2)]


@pytest.mark.parametrize(
    ("pace", "by"),
    [
        pytest.param(UploadPace(1, None), SLOTS, id="every slot is taken"),
        pytest.param(UploadPace(9, 10 * KIB, held_by=CPU), CPU, id="others want the machine"),
        pytest.param(UploadPace(9, None, limit_bytes_per_second=10 * KIB), LIMIT, id="the hard limit"),
    ],
)
async def test_the_gate_says_what_holds_uploads_and_for_how_long(pace, by):
    """Time counts while something waits; a partition's own wait is known too."""
    uploader = Uploader(gate_at(pace))
    uploader.start(1, 50 * KIB, seconds=5)
    await asyncio.sleep(1)
    assert (uploader.gate.held_by, uploader.gate.take_held_seconds()) == ("", {})
    uploader.start(2, KIB, seconds=0)
    await asyncio.sleep(3)
    assert uploader.gate.held(partition(2)) == (by, pytest.approx(3))
    assert uploader.gate.held(partition(1)) is None
    assert uploader.gate.take_held_seconds() == {by: pytest.approx(3)}
    await asyncio.gather(*uploader.tasks)
    await asyncio.sleep(60)
    assert uploader.gate.take_held_seconds() == {by: pytest.approx(1)}


async def test_senseless_arguments_are_refused():
    """A negative size, a loss at no time and a turn of nothing are mistakes of the caller."""
    gate = gate_at(1)
    with pytest.raises(AssertionError):
        async with gate.upload(partition(1), -1):
            pass
    with pytest.raises(AssertionError):
        Urgency(seconds_to_loss=math.nan)
    with pytest.raises(AssertionError):
        gate_at(1, segments_per_turn=0)
    assert (gate.uploads_in_flight, gate.waiting_uploads) == (0, 0)
