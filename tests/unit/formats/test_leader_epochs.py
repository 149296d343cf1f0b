"""Leader epochs of batches that another cluster serves as its own: nothing else of them changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.builders import batch
from tieringd.formats.batch_check import check_batches
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.formats.record_batch import parse_header
from tieringd.formats.restored_batches import put_first_epoch

STORED = b"".join(batch(base, leader_epoch=epoch) for base, epoch in ((100, 37), (103, 37), (106, 41)))
SIZE_BYTES = len(STORED) // 3


def test_batch_under_the_first_epoch_differs_in_nothing_else():
    """The checksum of the batch holds as before, because the epoch is outside of it."""
    moved = bytearray(STORED)
    put_first_epoch(moved)
    for begin, epoch in ((0, 37), (SIZE_BYTES, 37), (2 * SIZE_BYTES, 41)):
        stored = parse_header(STORED, begin)
        assert (stored.leader_epoch, parse_header(moved, begin).leader_epoch) == (epoch, 0)
        assert parse_header(moved, begin)._replace(leader_epoch=epoch) == stored
        assert moved[begin + 16 : begin + SIZE_BYTES] == STORED[begin + 16 : begin + SIZE_BYTES]
    check_batches(memoryview(moved), ExpectedBatches(100, 109))


@given(st.integers(0, len(STORED)))
def test_batch_that_is_cut_is_left_alone(size_bytes):
    """Whole batches before it are changed."""
    data = bytearray(STORED[:size_bytes])
    put_first_epoch(data)
    whole = size_bytes // SIZE_BYTES * SIZE_BYTES
    assert {parse_header(data, begin).leader_epoch for begin in range(0, whole, SIZE_BYTES)} <= {0}
    assert data[whole:] == STORED[whole:size_bytes]


def test_bytes_that_are_no_batch_end_it():
    """A length that no batch has is not followed."""
    data = bytearray(STORED[:SIZE_BYTES] + bytes(200) + STORED[:SIZE_BYTES])
    put_first_epoch(data)
    assert parse_header(data).leader_epoch == 0
    assert data[SIZE_BYTES:] == bytes(200) + STORED[:SIZE_BYTES]
