"""One leader-epoch history: what it says of epochs and offsets, and what a cut leaves of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.policies.epoch_history import (
    clipped,
    completed,
    end_offset_for,
    epoch_at,
    newest_shared_epoch,
    with_records,
    without_below,
    without_from,
)

LOG_END = 40
"""All drawn logs end here, so that every offset of them can be looked at."""


@st.composite
def histories(draw: st.DrawFn, *, min_size: int = 0) -> tuple[tuple[int, int], ...]:
    """Draw a history as a broker may have it: some epochs missing, some without a record."""
    epochs = draw(st.lists(st.integers(0, 20), unique=True, min_size=min_size, max_size=7).map(sorted))
    starts = draw(st.lists(st.integers(0, LOG_END), min_size=len(epochs), max_size=len(epochs)).map(sorted))
    return tuple(zip(epochs, starts, strict=True))


def written_under(history, *, base_offset=0, next_offset=LOG_END) -> dict[int, int]:
    """Return the epoch of each offset that has one, by appending record after record."""
    epochs = {}
    for row, (epoch, start_offset) in enumerate(history):
        end = history[row + 1][1] if row + 1 < len(history) else next_offset
        for offset in range(max(start_offset, base_offset), min(end, next_offset)):
            epochs[offset] = epoch
    return epochs


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        pytest.param((), (), id="empty"),
        pytest.param(((4, 9),), ((4, 9),), id="one epoch"),
        pytest.param(((4, 9), (5, 9)), ((5, 9),), id="nothing but an empty one before it"),
        pytest.param(
            ((0, 0), (1, 0), (2, 0), (3, 30), (4, 40), (5, 60), (6, 60), (7, 70), (8, 70)),
            ((2, 0), (3, 30), (4, 40), (6, 60), (8, 70)),
            id="at the head, inside and at the tail",
        ),
        pytest.param(
            ((0, 0), (1, 10), (2, 20), (3, 30), (4, 40), (5, 60), (6, 60), (7, 70)),
            ((0, 0), (1, 10), (2, 20), (3, 30), (4, 40), (6, 60), (7, 70)),
            id="inside only",
        ),
    ],
)
def test_epochs_without_records_are_left_out(history, expected):
    """An epoch that ends where it begins is dropped, and the last one stays."""
    assert with_records(history) == expected


@pytest.mark.parametrize(
    ("offset", "epoch"),
    [(5, None), (9, None), (10, 0), (19, 0), (20, 1), (25, 1), (29, 1), (30, 5), (50, 5)],
)
def test_epoch_at_is_the_last_that_began_by_then(offset, epoch):
    """An offset belongs to the last epoch that begins at or before it, and to none below the first."""
    assert epoch_at(((0, 10), (1, 20), (5, 30)), offset) == epoch


@given(histories())
def test_epoch_at_agrees_with_the_records_of_the_log(history):
    """Each offset has the epoch under which it was appended."""
    written = written_under(history)
    assert {offset: epoch_at(history, offset) for offset in written} == written


@pytest.mark.parametrize(
    ("history", "epoch", "log_end_offset", "expected"),
    [
        pytest.param((), 7, 0, None, id="no history"),
        pytest.param(((2, 10),), 2, 11, (2, 11), id="the latest epoch ends with the log"),
        pytest.param(((2, 100),), 3, 100, None, id="newer than all"),
        pytest.param(((2, 100), (4, 150)), 5, 200, None, id="newer than all of several"),
        pytest.param(((2, 100), (4, 150)), 1, 200, (1, 100), id="older than all"),
        pytest.param(((5, 11), (7, 12)), 5, 20, (5, 12), id="ends where the next begins"),
        pytest.param(((5, 11), (7, 12)), 6, 20, (5, 12), id="between two"),
        pytest.param(((0, 10), (2, 13), (4, 17)), 1, 20, (0, 13), id="after the first"),
        pytest.param(((0, 10), (2, 13), (4, 17)), 2, 20, (2, 17), id="exactly the second"),
        pytest.param(((0, 10), (2, 13), (4, 17)), 3, 20, (2, 17), id="after the second"),
        pytest.param(((1, 11), (2, 13), (3, 15)), 2, 17, (2, 15), id="one of three"),
        pytest.param(((1, 11), (2, 13), (3, 13)), 2, 17, (2, 13), id="without a record"),
    ],
)
def test_end_offset_for_answers_as_a_broker_does(history, epoch, log_end_offset, expected):
    """The answer is the newest epoch not above the asked one, and the offset at which it ends."""
    assert end_offset_for(history, epoch, log_end_offset=log_end_offset) == expected


@given(histories(min_size=1), st.integers(0, 22))
def test_end_offset_for_is_past_every_record_of_the_epochs_up_to_it(history, epoch):
    """Records below the answer have the asked epoch or an older one, and all others a newer one."""
    answer = end_offset_for(history, epoch, log_end_offset=LOG_END)
    if answer is None:
        assert epoch > history[-1][0]
        return
    not_newer = {offset for offset, found in written_under(history).items() if found <= epoch}
    assert not_newer == {offset for offset in written_under(history) if offset < answer[1]}


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        pytest.param(0, ((2, 6), (3, 8), (4, 11)), id="before all"),
        pytest.param(6, ((2, 6), (3, 8), (4, 11)), id="at the first"),
        pytest.param(7, ((2, 7), (3, 8), (4, 11)), id="inside the first"),
        pytest.param(8, ((3, 8), (4, 11)), id="at the second"),
        pytest.param(9, ((3, 9), (4, 11)), id="inside the second"),
        pytest.param(11, ((4, 11),), id="at the last"),
        pytest.param(15, ((4, 15),), id="inside the last"),
    ],
)
def test_a_cut_at_the_head_clips_the_epoch_it_falls_into(offset, expected):
    """Older epochs go, and the one that holds the new first offset begins there."""
    assert without_below(((2, 6), (3, 8), (4, 11)), offset) == expected


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        pytest.param(6, (), id="at the first"),
        pytest.param(8, ((2, 6),), id="at the second"),
        pytest.param(9, ((2, 6), (3, 8)), id="inside the second"),
        pytest.param(11, ((2, 6), (3, 8)), id="at the last"),
        pytest.param(12, ((2, 6), (3, 8), (4, 11)), id="inside the last"),
    ],
)
def test_a_cut_at_the_tail_drops_the_epochs_that_begin_at_or_past_it(offset, expected):
    """Only epochs that begin below the new end stay."""
    assert without_from(((2, 6), (3, 8), (4, 11)), offset) == expected


@given(histories(), st.integers(0, LOG_END))
def test_a_cut_history_says_the_same_of_every_offset_that_is_left(history, offset):
    """Each offset that remains after a cut at either side keeps its epoch, and no other offset has one."""
    assert written_under(without_below(history, offset)) == written_under(history, base_offset=offset)
    assert written_under(without_from(history, offset), next_offset=offset) == written_under(
        history, next_offset=offset
    )


@pytest.mark.parametrize(
    ("base_offset", "next_offset", "expected"),
    [
        pytest.param(0, 300, ((0, 0), (1, 100), (3, 200)), id="the whole log"),
        pytest.param(100, 200, ((1, 100),), id="exactly one epoch"),
        pytest.param(0, 150, ((0, 0), (1, 100)), id="one and a half"),
        pytest.param(150, 201, ((1, 150), (3, 200)), id="one record of the next"),
        pytest.param(250, 260, ((3, 250),), id="inside the last"),
    ],
)
def test_clipped_gives_the_epochs_of_a_segment(base_offset, next_offset, expected):
    """A segment carries the epochs of its own offsets, and the first begins with it."""
    history = ((0, 0), (1, 100), (2, 200), (3, 200))
    assert clipped(history, base_offset=base_offset, next_offset=next_offset) == expected


@given(histories(), st.integers(0, LOG_END - 1), st.integers(1, LOG_END))
def test_clipped_says_the_same_of_every_offset_of_the_segment(history, base_offset, length):
    """Each offset of a segment keeps its epoch, and every epoch that is named has an offset in it."""
    next_offset = min(LOG_END, base_offset + length)
    found = clipped(history, base_offset=base_offset, next_offset=next_offset)
    inside = written_under(history, base_offset=base_offset, next_offset=next_offset)
    assert written_under(found, next_offset=next_offset) == inside
    assert [epoch for epoch, _ in found] == sorted(set(inside.values()))


@pytest.mark.parametrize(
    ("history", "of_batches", "expected"),
    [
        pytest.param([], [], (), id="neither"),
        pytest.param([], [(1, 0), (3, 5)], ((1, 0), (3, 5)), id="no history"),
        pytest.param([(1, 0), (3, 5)], [(1, 0), (3, 7)], ((1, 0), (3, 5)), id="the history tells all"),
        pytest.param(
            [(3, 5)], [(1, 0), (2, 4), (3, 6)], ((1, 0), (2, 4), (3, 5)), id="from its beginning on"
        ),
    ],
)
def test_completed_takes_from_batches_what_the_history_does_not_reach(history, of_batches, expected):
    """A history knows epochs without batches, and goes first where there is one."""
    assert completed(history, of_batches) == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [(1, 0)], None),
        ([(1, 0)], [(2, 0)], None),
        ([(1, 0), (3, 5)], [(1, 9), (2, 10), (3, 12), (4, 20)], 3),
        ([(1, 0), (3, 5)], [(1, 0), (2, 5)], 1),
    ],
)
def test_newest_shared_epoch_is_the_newest_that_both_know(one, other, expected):
    """The offset where an epoch begins does not count: it moves with the start of the log."""
    assert newest_shared_epoch(one, other) == newest_shared_epoch(other, one) == expected
