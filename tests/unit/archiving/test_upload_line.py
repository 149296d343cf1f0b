"""The order in which partitions upload, seen through a gate with one slot on a virtual clock."""

from __future__ import annotations

import math
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes.uploads import ORDER, Uploader, gate_at, on_virtual_time, partition, settle, upload_order
from tieringd.policies.upload_control import WaitingPartition

pytestmark = pytest.mark.looptime


@given(
    st.lists(
        st.tuples(
            st.integers(0, 250) | st.none(),
            st.integers(0, 3),
            st.integers(1, 6),
        ),
        min_size=1,
        max_size=12,
    ),
)
@example([(None, 0, 30), (None, 0, 30), (90, 0, 300), (None, 0, 30)]).via("one in danger for long")
def test_uploads_begin_in_the_order_of_the_policy(facts):
    """Every turn goes to the first of `upload_order`, however many segments each partition has waiting."""
    waiting = {
        number: WaitingPartition(partition(number), math.inf if loss is None else loss, backlog, 0)
        for number, (loss, backlog, _) in enumerate(facts)
    }
    left = {number: segments for number, (_, _, segments) in enumerate(facts)}
    expected: list[int] = []
    for turn in count(2):
        lines = [fact for number, fact in waiting.items() if left[number]]
        if not lines:
            break
        served = upload_order(lines, ORDER, turn=turn, now=0)[0]
        number = served.partition.partition
        expected.append(number)
        left[number] -= 1
        waiting[number] = WaitingPartition(served.partition, served.loss_at, served.backlog_bytes, turn)

    async def run() -> None:
        uploader = Uploader(gate_at(1))
        await uploader.start_all(99)
        for number, (loss, backlog, segments) in enumerate(facts):
            seconds = math.inf if loss is None else loss
            for _ in range(segments):
                uploader.start(number, seconds_to_loss=seconds, backlog_bytes=backlog)
        await settle()
        await uploader.end_all()
        assert uploader.order == [99, *expected]

    on_virtual_time(run())


async def test_a_huge_backlog_does_not_starve_the_others():
    """A partition with a hundred segments waiting and one with three take turns until the three are up."""
    uploader = Uploader(gate_at(1))
    for _ in range(100):
        uploader.start(1, backlog_bytes=2**50)
    for _ in range(3):
        uploader.start(2)
    await settle()
    for _ in range(6):
        await uploader.end_first()
    assert uploader.order == [1, 2, 1, 2, 1, 2, 1]
    await uploader.end_all()


async def test_a_turn_lets_begin_what_is_committed_together():
    """Three segments of a partition begin in a row if a turn has three, oldest first."""
    uploader = Uploader(gate_at(1, segments_per_turn=3))
    await uploader.start_all(99)
    for size_bytes in (1, 2, 3, 4):
        for number in (1, 2):
            uploader.start(number, size_bytes)
    await settle()
    await uploader.end_all()
    assert [(number, size) for _, number, size in uploader.begun[1:]] == [
        *((1, 1), (1, 2), (1, 3)),
        *((2, 1), (2, 2), (2, 3)),
        *((1, 4), (2, 4)),
    ]


async def test_a_turn_is_for_partitions_that_wait_when_it_begins():
    """A segment that asks during its partition's turn waits behind a partition that was there before."""
    uploader = Uploader(gate_at(1, segments_per_turn=3))
    await uploader.start_all(99)
    await uploader.start_all(1, 1, 2)
    await uploader.end_first()
    await uploader.start_all(1)
    await uploader.end_all()
    assert uploader.order == [99, 1, 1, 2, 1]


async def test_a_turn_ends_when_the_rest_of_it_is_cancelled():
    """The next partition gets its turn if the rest of a turn is cancelled."""
    uploader = Uploader(gate_at(1, segments_per_turn=3))
    await uploader.start_all(99)
    await uploader.start_all(1, 1, 1, 2)
    await uploader.end_first()
    for task in uploader.tasks[2:4]:
        task.cancel()
    await settle()
    await uploader.end_all()
    assert uploader.order == [99, 1, 2]


async def test_turns_are_forgotten_when_no_partition_is_left():
    """The gate forgets the partitions that it has served once all segments are uploaded."""
    uploader = Uploader(gate_at(1))
    await uploader.start_all(1, 2, 3)
    await uploader.end_first()
    assert uploader.gate._line._served
    await uploader.end_all()
    assert not uploader.gate._line._served


async def test_a_gate_that_is_never_idle_does_not_grow():
    """The line's tables stay small over thousands of turns that two partitions keep the gate busy."""
    uploader = Uploader(gate_at(1))
    await uploader.start_all(0, 1)
    for _ in range(1000):
        # The nearest to loss, yet not near: below it in the books, outdated places would pile up.
        await uploader.start_all(0, seconds_to_loss=500)
        await uploader.start_all(1)
        await uploader.end_first()
        await uploader.end_first()
    line = uploader.gate._line
    assert (line.requests, line.partitions) == (1, 1)
    assert len(line._by_loss._entries) < 100
    assert len(line._by_turn._entries) < 100
    await uploader.end_all()
