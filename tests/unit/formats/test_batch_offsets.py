"""Offsets of stored batches, which no checksum of a batch covers, against what is known of the segment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.errors import CorruptDataError
from tieringd.formats.batch_offsets import BatchPlace, ExpectedBatches, OffsetCheck

BATCH_BYTES = 100


def places(starts, *, offsets=3):
    """Return batches of three offsets, which begin at *starts*."""
    return [BatchPlace(number * BATCH_BYTES, start, start + offsets) for number, start in enumerate(starts)]


def dense(batches, *entries):
    """Return what is known of batches with a record at each offset, with index entries for some."""
    return ExpectedBatches(
        batches[0].base_offset,
        batches[-1].next_offset,
        [batches[row].position for row in entries],
        [batches[row].base_offset for row in entries],
        is_dense=True,
    )


def sparse(batches, *entries, next_offset):
    """Return what is known of batches that compaction has left, with index entries for some."""
    return ExpectedBatches(
        batches[0].base_offset,
        next_offset,
        [batches[row].position for row in entries],
        [batches[row].base_offset for row in entries],
    )


def moved(batches, row, base_offset):
    """Return *batches* with another base offset in one of them."""
    found = list(batches)
    size = found[row].next_offset - found[row].base_offset
    found[row] = BatchPlace(found[row].position, base_offset, base_offset + size)
    return found


DENSE = places(range(30, 60, 3))
SPARSE = places([100, 110, 120, 130, 140, 150, 160])


@given(
    row=st.integers(0, 9),
    base_offset=st.sampled_from([0, 29, 31, 45, 57, 60, 2**40, 2**62, 2**63 - 1]),
    begin=st.integers(0, 9),
)
def test_dense_segment_loses_just_the_batch_with_the_wrong_offset(row, base_offset, begin):
    """Every other batch is right, wherever reading begins at an index entry."""
    if DENSE[row].base_offset == base_offset:
        return
    check = OffsetCheck(dense(DENSE, *sorted({0, begin})))
    faults = check.faults_of(moved(DENSE, row, base_offset)[begin:])
    assert list(faults) == ([DENSE[row].position] if row >= begin else [])


@pytest.mark.parametrize("row", range(7))
@pytest.mark.parametrize("base_offset", [0, 2**40, 2**63 - 1, 3_000])
def test_offsets_outside_of_the_section_are_faults(row, base_offset):
    """
    Offsets outside are faults, even if compaction left holes.

    An index entry on each side has the bounds.
    """
    check = OffsetCheck(sparse(SPARSE, 0, 4, next_offset=170))
    assert list(check.faults_of(moved(SPARSE, row, base_offset))) == [SPARSE[row].position]


def test_order_tells_which_batch_of_a_section_is_wrong():
    """A batch whose offsets are those of the batches after it is wrong, and they are not."""
    check = OffsetCheck(sparse(SPARSE, 0, next_offset=170))
    assert list(check.faults_of(moved(SPARSE, 2, 155))) == [SPARSE[2].position]


def test_batches_that_the_order_cannot_tell_apart_are_both_left_out():
    """No record is read with an offset that may be another record's."""
    check = OffsetCheck(sparse(SPARSE, 0, next_offset=170))
    assert list(check.faults_of(moved(SPARSE, 5, 161))) == [SPARSE[5].position, SPARSE[6].position]


def test_damaged_batch_says_nothing_of_its_neighbours():
    """The header of a damaged batch may be what is damaged."""
    damaged = [*DENSE[:4], BatchPlace(400, 42, 4_000), *DENSE[5:]]
    check = OffsetCheck(dense(DENSE, 0))
    assert check.faults_of(damaged, damaged={400}) == {}


def test_check_goes_on_from_one_run_to_the_next():
    """The check of several runs finds the same as the check of one."""
    check = OffsetCheck(dense(DENSE, 0))
    assert check.faults_of(DENSE[:4]) == {}
    assert list(check.faults_of(moved(DENSE, 4, 43)[4:])) == [400]


def test_error_has_the_position_and_says_what_was_expected():
    """An operator can find the batch in the object."""
    check = OffsetCheck(dense(DENSE, 0))
    check.require(DENSE[0])
    with pytest.raises(
        CorruptDataError, match="offsets 34 to 36, but it has to begin at offset 33"
    ) as caught:
        check.require(moved(DENSE, 1, 34)[1])
    assert (caught.value.position, caught.value.offset) == (100, 34)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True).map(sorted), st.data())
def test_right_batches_pass_wherever_the_index_has_entries(numbers, data):
    """Batch n has position 10 n and offset 3 n. Reading begins at any of them, and may go back."""
    expected = ExpectedBatches(0, 123, [10 * one for one in numbers], [3 * one for one in numbers])
    begin = data.draw(st.integers(0, 40))
    check = OffsetCheck(expected)
    for number in range(begin, 41):
        assert check.passes(10 * number, 3 * number, 3 * number + 3)
        is_entry = number + 1 in numbers
        assert not (is_entry and check.passes(10 * number + 10, 3 * number + 4, 3 * number + 5))
    assert not check.passes(410, 123, 124)
