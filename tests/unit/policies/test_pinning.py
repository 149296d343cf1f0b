"""Pinning: what to hold on to, what to let go, what belongs to the log, and what a budget costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import local, local_log
from tieringd.errors import CorruptDataError
from tieringd.model.manifest_parts import Gap
from tieringd.policies.pinning import (
    Pin,
    PinnedLog,
    PinPlan,
    judged,
    pins_over_budget,
    plan_pins,
    with_pins,
    without_successor,
)


def pin(
    base_offset: int, next_offset: int, *, is_held: bool = False, is_open: bool = False, **changes
) -> Pin:
    """Return a pin of the segment that `values.local` gives, so of the same file as the log's."""
    path = f"/pins/orders-3/{base_offset:020d}-{next_offset:020d}.log"
    return Pin(
        replace(local(base_offset, next_offset), **{"path": path, **changes}), is_held, is_open=is_open
    )


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
    """A pin that a truncation took off every lineage is replaced: what is in the log is pinned anew."""
    log = local_log(log_bases)
    plan = plan_pins(log, [pinned], next_offset=0)
    assert (plan.release, plan.replaced) == ((), (pinned,))
    assert plan.make == log.closed_segments


@pytest.mark.parametrize("log_bases", [[], [20], [20, 30], [25]])
def test_pin_of_what_the_broker_deleted_stays(log_bases):
    """A pin before the log's first segment, or of an empty directory, is all that holds the bytes."""
    plan = plan_pins(local_log(log_bases), [pin(0, 10), pin(10, 20)], next_offset=None)
    assert plan.release == ()


@pytest.mark.parametrize(
    ("pinned", "log_bases", "expiring_end", "is_kept"),
    [
        pytest.param(pin(10, 13, is_open=True), [0, 10], 13, True, id="as it was"),
        pytest.param(pin(10, 13, is_open=True), [0, 10], 16, True, id="it has grown"),
        pytest.param(pin(10, 13, is_open=True), [0, 10], None, True, id="it has grown, and expires later"),
        pytest.param(pin(10, 20, is_open=True), [0, 10, 20], None, True, id="closed where it ended"),
        pytest.param(pin(10, 13, is_open=True), [0, 10, 20], None, False, id="closed later"),
        pytest.param(
            pin(10, 23, is_open=True), [0, 10, 20], None, False, id="rolled before its end was asked"
        ),
        pytest.param(pin(10, 13), [0, 10], 13, False, id="a name without the mark"),
        pytest.param(pin(10, 13, is_open=True, inode=999), [0, 10], 13, False, id="another file"),
    ],
)
def test_pin_of_an_active_segment_stays_while_it_is_active(pinned, log_bases, expiring_end, is_kept):
    """The pin holds all of the file; once the file is closed, a pin's name tells its end."""
    plan = plan_pins(local_log(log_bases), [pin(0, 10), pinned], next_offset=0, expiring_end=expiring_end)
    assert (plan.release, plan.replaced) == ((), () if is_kept else (pinned,))
    assert bases(plan.make) == ([] if is_kept else [10])


def test_changed_bytes_of_the_same_file_keep_their_pin():
    """Truncation in place changes pin and log together: the pin is a name, and checks nothing."""
    shorter = pin(0, 10, size_bytes=1, modified_ns=99)
    assert plan_pins(local_log([0, 10]), [shorter], next_offset=None) == PinPlan()


@pytest.mark.parametrize(
    ("log_bases", "expiring_end", "next_offset", "expected"),
    [
        pytest.param([10], None, 13, "released", id="not near its deletion"),
        pytest.param([10], 16, 13, "kept", id="near its deletion, and durable in part"),
        pytest.param([10], 16, 16, "released", id="near its deletion, and durable"),
        pytest.param([10, 20], None, 13, "replaced", id="closed, and durable in part"),
        pytest.param([10, 20], None, 20, "released", id="closed, and durable"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False], ids=["marked", "of a release without the mark"])
def test_pin_of_a_grown_active_segment_is_durable_when_the_segment_is(
    log_bases, expiring_end, next_offset, expected, is_open
):
    """The pin holds what came after it was made, and the file may be gone when the next pin is to be made."""
    if not is_open and expected == "kept":
        expected = "replaced"
    grown = pin(10, 13, is_open=is_open)
    plan = plan_pins(local_log(log_bases), [grown], next_offset=next_offset, expiring_end=expiring_end)
    found = {"released": plan.release, "replaced": plan.replaced}
    assert [name for name, pins in found.items() if pins] == ([] if expected == "kept" else [expected])
    assert bases(plan.make) == ([10] if expected == "replaced" else [])


@pytest.mark.parametrize(
    ("unmade", "stay"),
    [
        pytest.param([], [], id="all is pinned"),
        pytest.param([local(20, 30)], [], id="another one is not"),
        pytest.param([local(0, 11)], [0, 10], id="one that ends inside it"),
        pytest.param([local(19, 30)], [10], id="one that begins inside it"),
        pytest.param([local(0, 30)], [0, 10], id="one for several"),
    ],
)
def test_replaced_pin_stays_until_all_in_its_place_is_pinned(unmade, stay):
    """A cleaner makes one segment of several, and another leader may have cut the log elsewhere."""
    replaced = (pin(0, 10), pin(10, 20))
    assert [each.segment.base_offset for each in without_successor(replaced, unmade)] == stay


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

    assert {*plan.release, *plan.replaced} <= set(pins)
    assert bases(plan.make) == sorted(bases(plan.make))
    assert all(each.segment.next_offset > durable_to for each in plan.replaced)
    kept = [each.segment for each in pins if each not in (*plan.release, *plan.replaced)]
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
    """
    The budget releases held pins by the time of the file, not by offset.

    All partitions share one order.
    """
    young = pin(0, 10, is_held=True, size_bytes=100, modified_ns=30)
    oldest = pin(50, 60, is_held=True, size_bytes=100, modified_ns=10)
    middle = pin(20, 30, is_held=True, size_bytes=100, modified_ns=20)
    pins = [young, oldest, middle]
    assert pins_over_budget(pins, budget_bytes=300) == ()
    assert pins_over_budget(pins, budget_bytes=299) == (oldest,)
    assert pins_over_budget(pins, budget_bytes=200) == (oldest,)
    assert pins_over_budget(pins, budget_bytes=199) == (oldest, middle)
    assert pins_over_budget(pins, budget_bytes=0) == (oldest, middle, young)


def test_budget_takes_durable_pins_first():
    """A younger pin whose segment is durable costs nothing."""
    oldest = pin(0, 10, is_held=True, size_bytes=100, modified_ns=10)
    durable = [pin(each, each + 10, is_held=True, size_bytes=100, modified_ns=each) for each in (20, 30)]
    pins = [oldest, *durable]
    assert pins_over_budget(pins, budget_bytes=200, durable=durable) == (durable[0],)
    assert pins_over_budget(pins, budget_bytes=99, durable=durable) == (*durable, oldest)


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
    """The remaining pins fit, and would not fit together with the last one given up."""
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
        pytest.param([pin(0, 0), pin(0, 20)], [20], ["pin 0", "log 20"], id="without a record"),
        pytest.param([pin(30, 40)], [20], ["log 20"], id="behind the log"),
        pytest.param([pin(0, 10)], [], [], id="an empty directory"),
    ],
)
def test_uploadable_segments_are_the_log_and_what_only_pins_hold_before_it(pins, log_bases, expected):
    """The broker's own files go first; what it deleted before them is taken from the pins, oldest first."""
    found = with_pins(local_log(log_bases), pins)
    sources = ["pin" if each.path.startswith("/pins/") else "log" for each in found]
    assert [f"{source} {each.base_offset}" for source, each in zip(sources, found, strict=True)] == expected


def log_with(epochs, *, first_offset: int = 20):
    """Return a log from *first_offset* on, closed at 30, with another segment; *epochs* are its history."""
    return replace(local_log([first_offset, first_offset + 10]), epochs=tuple(epochs))


def strays(log, found: PinnedLog) -> list[int]:
    """Return the bases of the pins that nothing shows to be of *log*."""
    _, pins = judged(log, found)
    assert [replace(each, is_stray=False) for each in pins] == [
        replace(each, is_stray=False) for each in found.pins
    ]
    return [each.segment.base_offset for each in pins if each.is_stray]


HEAD = (pin(0, 10, is_held=True), pin(10, 20, is_held=True))
"""What the broker deleted of a log that begins at 20."""


@pytest.mark.parametrize(
    ("noted", "epochs", "expected"),
    [
        pytest.param([(3, 0)], [(3, 20)], [], id="the leader of then has written on"),
        pytest.param([(3, 0)], [(3, 0), (5, 20)], [], id="a history that was not cut"),
        pytest.param([(3, 0), (4, 5)], [(4, 20), (6, 30)], [], id="a newer leader since"),
        pytest.param([(3, 0), (4, 5), (5, 12)], [(5, 20)], [], id="the newest of several"),
        pytest.param([(3, 0)], [(5, 20)], [0, 10], id="another leader's log only"),
        pytest.param([(3, 0), (4, 12)], [(5, 20)], [0, 10], id="a newer one's only"),
        pytest.param([(4, 0)], [(3, 20)], [0, 10], id="an older one's only"),
        pytest.param(
            [(3, 0), (4, 15)], [(3, 0), (5, 16)], [10], id="parted where the old one ends the epoch"
        ),
        pytest.param([(2, 0), (3, 1)], [(3, 1), (5, 15)], [10], id="parted where the new one ends the epoch"),
        pytest.param([(3, 0), (4, 10)], [(3, 0), (5, 10)], [10], id="parted between the two"),
        pytest.param([(3, 0), (4, 20)], [(3, 0), (5, 20)], [], id="parted after them"),
        pytest.param(None, [(3, 0)], [0, 10], id="nothing was noted"),
        pytest.param([], [(3, 20)], [0, 10], id="there was no epoch"),
        pytest.param([(3, 0)], [], [0, 10], id="there is no epoch any more"),
        pytest.param(None, [], [], id="a log without epochs"),
        pytest.param([], [], [], id="a log without epochs, noted"),
    ],
)
def test_pin_is_of_the_log_where_the_histories_share_an_epoch_past_its_end(noted, epochs, expected):
    """An epoch has one leader: two logs that both have it are equal up to where the first of them ends it."""
    noted = None if noted is None else tuple(noted)
    assert strays(log_with(epochs), PinnedLog(HEAD, noted)) == expected


@pytest.mark.parametrize(
    ("anchor", "expected"),
    [
        pytest.param(21, [], id="its first segment"),
        pytest.param(31, [], id="a later one"),
        pytest.param(1, [0, 10], id="one that is gone"),
        pytest.param(None, [0, 10], id="none"),
    ],
)
def test_pin_is_of_the_log_that_has_a_file_of_that_time(anchor, expected):
    """
    A file that was there when the pin was made proves the log: nothing below the file's base was cut off.

    The leader epochs do not matter for that.
    """
    assert strays(log_with([(9, 20)]), PinnedLog(HEAD, ((3, 0),), anchor)) == expected


def test_file_with_that_number_on_another_disk_says_nothing():
    """Two filesystems number their files alike. Only the leader epochs speak for pins in another place."""
    elsewhere = PinnedLog(HEAD, ((3, 0),), 21, is_elsewhere=True)
    log, pins = judged(log_with([(9, 20)]), PinnedLog(elsewhere=(elsewhere,)))
    assert [one.is_stray for one in pins] == [True, True]
    assert log.epochs == ((9, 20),)
    log, pins = judged(log_with([(3, 20)]), PinnedLog(elsewhere=(elsewhere,)))
    assert [one.is_stray for one in pins] == [False, False]
    assert log.epochs == ((3, 0),)


def test_note_speaks_for_the_pins_beside_it_alone():
    """
    Epoch 3 went on where the pins here have epoch 4, which only a note beside them could tell.

    The log's history goes back as far as that of the pins that are its own.
    """
    elsewhere = PinnedLog((pin(0, 10),), ((2, 0), (3, 5)), is_elsewhere=True)
    log = replace(local_log([40, 50]), epochs=((3, 40), (5, 45)))
    for note in (None, ((4, 10),)):
        found, pins = judged(log, PinnedLog((pin(10, 20),), note, elsewhere=(elsewhere,)))
        assert {one.segment.base_offset: one.is_stray for one in pins} == {10: True, 0: False}
        assert found.epochs == ((2, 0), (3, 5), (5, 45))


def test_pins_in_two_places_are_uploaded_once():
    """The one that begins first counts, where pins overlap."""
    pins = [pin(0, 10), pin(0, 10, path="/elsewhere"), pin(5, 15), pin(10, 20)]
    assert bases(with_pins(local_log([20, 30]), pins)) == [0, 10, 20, 30]


def test_file_of_that_time_says_nothing_of_what_lies_past_its_base():
    """A follower cuts files in place: the log may go on otherwise within them."""
    log = log_with([(9, 15)], first_offset=10)
    _, pins = judged(log, PinnedLog((pin(0, 10), pin(5, 15)), ((3, 0),), anchor=11))
    assert [each.is_stray for each in pins] == [False, True]


def test_pin_of_a_segment_that_the_log_still_has_shows_what_came_before_it():
    """A pin of such a segment was made when everything before it was known to be of the log."""
    log = log_with([(9, 20)])
    assert strays(log, PinnedLog((*HEAD, pin(20, 30)), ((3, 0),))) == []
    aside = pin(20, 30)
    assert strays(log, PinnedLog((*HEAD, replace(aside, is_stray=True)), ((3, 0),))) == [0, 10, 20]


def test_pins_of_an_empty_directory_are_not_judged():
    """There is no log that they could be of, or not of; nor is anything uploaded of them."""
    found = PinnedLog(HEAD, ((3, 0),))
    assert judged(local_log([]), found) == (local_log([]), HEAD)
    assert with_pins(local_log([]), HEAD) == ()


def test_what_was_set_aside_stays_aside():
    """A log that is known again does not bring back pins that were not kept meanwhile."""
    aside = tuple(replace(each, is_stray=True) for each in HEAD)
    assert strays(log_with([(3, 0)]), PinnedLog(aside, ((3, 0),))) == [0, 10]


@pytest.mark.parametrize(
    ("noted", "anchor", "epochs", "expected"),
    [
        pytest.param([(3, 0)], None, [(3, 20)], [(3, 0)], id="the same epoch goes on"),
        pytest.param(
            [(2, 0), (3, 5)], None, [(3, 20), (4, 25)], [(2, 0), (3, 5), (4, 25)], id="and others follow"
        ),
        pytest.param([(3, 0)], 21, [(5, 20)], [(3, 0), (5, 20)], id="a new one begins where the log does"),
        pytest.param([(3, 0)], 21, [(5, 22)], [(5, 22)], id="between the two there may be others"),
        pytest.param([(2, 0), (3, 12), (4, 21)], 21, [], [(2, 0), (3, 12)], id="none is left"),
        pytest.param(
            [(2, 0), (3, 12)], 21, [(2, 0), (3, 12)], [(2, 0), (3, 12)], id="nothing is forgotten yet"
        ),
        pytest.param([(3, 0)], None, [(5, 20)], [(5, 20)], id="another log's"),
    ],
)
def test_history_of_a_log_goes_as_far_back_as_its_pins(noted, anchor, epochs, expected):
    """A broker forgets the epochs of what it deletes; they were noted, where the log is the same."""
    log, _ = judged(log_with(epochs), PinnedLog(HEAD, tuple(noted), anchor))
    assert log == replace(log_with(epochs), epochs=tuple(expected))


@pytest.mark.parametrize("epochs", [[(2, 0), (3, 12)], [(2, 0), (3, 12), (4, 15)]])
def test_epochs_that_all_begin_before_the_log_are_no_evidence(epochs):
    """A log that begins anew has the old file of epochs for a moment: the pins are judged by the next one."""
    with pytest.raises(CorruptDataError, match="/logs/orders-3: the log begins at offset 20"):
        judged(log_with(epochs), PinnedLog(HEAD, ((2, 0), (3, 12)), anchor=1))


def test_history_without_pins_is_the_broker_s():
    """A note beside pins that are gone, or set aside, is not used."""
    for pins in ((), tuple(replace(each, is_stray=True) for each in HEAD), (pin(20, 30),)):
        log, _ = judged(log_with([(3, 20)]), PinnedLog(pins, ((2, 0), (3, 5))))
        assert log.epochs == ((3, 20),)


STRAY = replace(pin(10, 20, is_held=True), is_stray=True)


@pytest.mark.parametrize(
    ("next_offset", "gaps", "is_kept"),
    [
        pytest.param(None, [], True, id="nothing is durable"),
        pytest.param(19, [], True, id="all but its last offset"),
        pytest.param(20, [], False, id="all of it, of another log"),
        pytest.param(40, [(15, 16)], True, id="a part is lost"),
        pytest.param(40, [(0, 10)], True, id="its first offset is lost"),
        pytest.param(40, [(19, 30)], True, id="its last offset is lost"),
        pytest.param(40, [(0, 9), (20, 30)], False, id="what lies beside it is lost"),
    ],
)
def test_stray_pin_stays_where_it_may_be_the_only_copy(next_offset, gaps, is_kept):
    """A stray pin goes when the archive holds its offsets, and stays if the archive has them as lost."""
    gaps = [Gap(first, last, "deleted", 0) for first, last in gaps]
    plan = plan_pins(local_log([30, 40]), [STRAY], next_offset=next_offset, gaps=gaps)
    assert (plan.stray, plan.release) == (((STRAY,), ()) if is_kept else ((), (STRAY,)))


def test_stray_pin_is_in_no_other_pin_s_way():
    """A log that comes back to these offsets has its segments pinned, and the stray pin stays."""
    plan = plan_pins(local_log([10, 20, 30]), [STRAY], next_offset=None)
    assert actions(plan) == ([10, 20], [])
    assert plan.stray == (STRAY,)


def test_stray_pin_is_not_uploaded():
    """A stray pin might be another log's. Pins that are known to be of this log are uploaded."""
    found = with_pins(local_log([20, 30]), [pin(0, 10), STRAY])
    assert bases(found) == [0, 20, 30]
