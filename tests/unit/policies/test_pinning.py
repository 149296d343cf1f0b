"""Pinning: what to hold on to, what to let go, and what a budget costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import local, local_log
from tieringd.policies.pinning import Pin, PinPlan, pins_over_budget, plan_pins, with_pins


def pin(base_offset: int, next_offset: int, *, is_held: bool = False, **changes) -> Pin:
    """Return a pin of the segment that `values.local` gives, so of the same file as the log's."""
    path = f"/pins/orders-3/{base_offset:020d}-{next_offset:020d}.log"
    return Pin(replace(local(base_offset, next_offset), path=path, **changes), is_held)


def bases(segments) -> list[int]:
    return [each.base_offset for each in segments]


def actions(plan: PinPlan) -> tuple[list[int], list[int]]:
    """Return the bases to pin and those of the pins to release."""
    return bases(plan.make), [each.segment.base_offset for each in plan.release]


@pytest.mark.parametrize(
    ("next_offset", "expected"),
    [
        pytest.param(None, [0, 10, 20], id="nothing is durable"),
        pytest.param(0, [0, 10, 20], id="an empty archive"),
        pytest.param(9, [0, 10, 20], id="all but the last offset of the first"),
        pytest.param(10, [10, 20], id="the first"),
        pytest.param(11, [10, 20], id="one offset of the second"),
        pytest.param(30, [], id="all closed ones"),
        pytest.param(35, [], id="a part of the active one too"),
    ],
)
def test_pins_are_made_of_closed_segments_that_are_not_durable(next_offset, expected):
    """A closed segment with an offset past the durable ones gets a pin; the active one never does."""
    log = local_log([0, 10, 20, 30])
    assert actions(plan_pins(log, [], next_offset=next_offset)) == (expected, [])
    made = [pin(each, each + 10) for each in expected]
    assert plan_pins(log, made, next_offset=next_offset) == PinPlan(), "once pinned nothing is left to do"


@pytest.mark.parametrize(
    ("next_offset", "released"),
    [
        pytest.param(None, [], id="nothing is durable"),
        pytest.param(9, [], id="all but the last offset of the first"),
        pytest.param(10, [0], id="the first"),
        pytest.param(19, [0], id="all but the last offset of the second"),
        pytest.param(99, [0, 10, 20], id="all"),
    ],
)
@pytest.mark.parametrize("is_held", [False, True])
def test_pin_goes_when_its_segment_is_durable_to_its_end(next_offset, released, is_held):
    """One offset that is not durable keeps a pin, whether the broker still has the file or not."""
    pins = [pin(20, 30, is_held=is_held), pin(0, 10, is_held=is_held), pin(10, 20, is_held=is_held)]
    log = local_log([30]) if is_held else local_log([0, 10, 20, 30])
    assert actions(plan_pins(log, pins, next_offset=next_offset)) == ([], released)


@pytest.mark.parametrize(
    ("pinned", "log_bases"),
    [
        pytest.param(pin(10, 20, inode=999), [0, 10, 20], id="another file has its place"),
        pytest.param(pin(10, 15), [0, 10, 20], id="the same file ends elsewhere"),
        pytest.param(pin(10, 20), [0, 10], id="the same file is active again"),
        pytest.param(pin(10, 20), [0, 15, 20], id="the log was cut elsewhere"),
        pytest.param(pin(10, 20), [0], id="the log ends before it"),
        pytest.param(pin(10, 20), [10, 25], id="the following segment begins elsewhere"),
    ],
)
def test_pin_goes_when_the_log_has_other_bytes_in_its_place(pinned, log_bases):
    """After a truncation a pin is on no lineage any more, and what is in the log is pinned anew."""
    log = local_log(log_bases)
    plan = plan_pins(log, [pinned], next_offset=0)
    assert plan.release == (pinned,)
    assert plan.make == log.closed_segments


@pytest.mark.parametrize("log_bases", [[], [20], [20, 30], [25]])
def test_pin_of_what_the_broker_deleted_stays(log_bases):
    """A pin before the log's first segment, or of an empty directory, is all that holds the bytes."""
    plan = plan_pins(local_log(log_bases), [pin(0, 10), pin(10, 20)], next_offset=None)
    assert plan.release == ()


def test_changed_bytes_of_the_same_file_keep_their_pin():
    """Truncation in place changes pin and log together: the pin is a name, and checks nothing."""
    shorter = pin(0, 10, size_bytes=1, modified_ns=99)
    assert plan_pins(local_log([0, 10]), [shorter], next_offset=None) == PinPlan()


@st.composite
def situations(draw: st.DrawFn):
    """Draw a log and pins of some of its segments, of others before it, and of files that were replaced."""
    every = draw(st.lists(st.integers(0, 60), unique=True, min_size=2, max_size=9).map(sorted))
    first = draw(st.integers(0, len(every) - 1))
    pins = []
    for base, end in pairwise(every):
        kind = draw(st.sampled_from(["none", "same", "same", "replaced"]))
        if kind != "none":
            pins.append(
                pin(
                    base,
                    end,
                    is_held=base < every[first],
                    **({"inode": 10**6 + base} if kind == "replaced" else {}),
                )
            )
    return local_log(every[first:]), draw(st.permutations(pins)), draw(st.none() | st.integers(0, 70))


@given(situations())
def test_pins_after_a_plan_hold_all_that_is_not_durable_and_nothing_else(situation):
    """Each closed undurable file gets or keeps its pin, each deleted one keeps it, and no other is left."""
    log, pins, next_offset = situation
    plan = plan_pins(log, pins, next_offset=next_offset)
    durable_to = next_offset or 0

    assert set(plan.release) <= set(pins)
    assert bases(plan.make) == sorted(bases(plan.make))
    kept = [each.segment for each in pins if each not in plan.release]
    held = {(each.base_offset, each.next_offset, each.inode) for each in (*kept, *plan.make)}
    assert len(held) == len(kept) + len(plan.make), "nothing is pinned twice"
    in_log = {
        (each.base_offset, each.next_offset, each.inode)
        for each in log.closed_segments
        if each.next_offset > durable_to
    }
    lost = {
        (each.segment.base_offset, each.segment.next_offset, each.segment.inode)
        for each in pins
        if each.segment.base_offset < log.first_offset and each.segment.next_offset > durable_to
    }
    assert held == in_log | lost
    assert (
        plan_pins(log, [Pin(each, is_held=False) for each in (*kept, *plan.make)], next_offset=next_offset)
        == PinPlan()
    )


def test_budget_gives_up_the_oldest_held_files_first():
    """By the time of the file, not by offset: pins of all partitions stand in one line."""
    young = pin(0, 10, is_held=True, size_bytes=100, modified_ns=30)
    oldest = pin(50, 60, is_held=True, size_bytes=100, modified_ns=10)
    middle = pin(20, 30, is_held=True, size_bytes=100, modified_ns=20)
    pins = [young, oldest, middle]
    assert pins_over_budget(pins, budget_bytes=300) == ()
    assert pins_over_budget(pins, budget_bytes=299) == (oldest,)
    assert pins_over_budget(pins, budget_bytes=200) == (oldest,)
    assert pins_over_budget(pins, budget_bytes=199) == (oldest, middle)
    assert pins_over_budget(pins, budget_bytes=0) == (oldest, middle, young)


def test_budget_counts_and_gives_up_only_held_pins():
    """A pin of a file that the broker still has takes no space, however large and old."""
    free = pin(0, 10, size_bytes=10**12, modified_ns=0)
    held = pin(10, 20, is_held=True, size_bytes=100)
    assert pins_over_budget([free, held], budget_bytes=100) == ()
    assert pins_over_budget([free, held], budget_bytes=99) == (held,)
    assert pins_over_budget([free], budget_bytes=0) == ()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 5)), max_size=8), st.integers(0, 200)
)
def test_budget_is_kept_and_nothing_is_given_up_in_vain(drawn, budget_bytes):
    """What stays fits, and would not fit together with the last one given up."""
    pins = [
        pin(10 * at, 10 * at + 10, is_held=is_held, size_bytes=size_bytes, modified_ns=modified_ns)
        for at, (is_held, size_bytes, modified_ns) in enumerate(drawn)
    ]
    given_up = pins_over_budget(pins, budget_bytes=budget_bytes)

    def held_bytes(*gone: Pin) -> int:
        return sum(each.segment.size_bytes for each in pins if each.is_held and each not in gone)

    assert all(each.is_held for each in given_up)
    assert held_bytes(*given_up) <= budget_bytes
    if given_up:
        assert held_bytes(*given_up[:-1]) > budget_bytes
    stayed = [each.segment.modified_ns for each in pins if each.is_held and each not in given_up]
    assert all(each.segment.modified_ns <= min(stayed, default=10**9) for each in given_up)


@pytest.mark.parametrize(
    ("pins", "log_bases", "expected"),
    [
        pytest.param([], [0, 10], ["log 0", "log 10"], id="no pins"),
        pytest.param([pin(0, 10)], [0, 10], ["log 0", "log 10"], id="the log's own goes before its pin"),
        pytest.param([pin(0, 10), pin(10, 20)], [20], ["pin 0", "pin 10", "log 20"], id="before the log"),
        pytest.param([pin(10, 20), pin(0, 10)], [20], ["pin 0", "pin 10", "log 20"], id="in any order"),
        pytest.param([pin(0, 10)], [20], ["pin 0", "log 20"], id="with a hole behind it"),
        pytest.param([pin(0, 25)], [20], ["log 20"], id="reaching into the log"),
        pytest.param([pin(30, 40)], [20], ["log 20"], id="behind the log"),
        pytest.param([pin(0, 10)], [], ["pin 0"], id="an empty directory"),
    ],
)
def test_uploadable_segments_are_the_log_and_what_only_pins_hold_before_it(pins, log_bases, expected):
    """The broker's own files go first; what it deleted is taken from the pins, oldest first."""
    found = with_pins(local_log(log_bases), pins)
    sources = ["pin" if each.path.startswith("/pins/") else "log" for each in found]
    assert [f"{source} {each.base_offset}" for source, each in zip(sources, found, strict=True)] == expected
