"""Leader epochs of batches that move to another cluster: nothing else of them changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.builders import batch
from tieringd.formats.batch_check import check_batches
from tieringd.formats.leader_epochs import exchange_epochs, pieces_under_first_epoch
from tieringd.formats.record_batch import parse_header

EPOCHS = {100: 37, 103: 37, 106: 41}
STORED = b"".join(batch(base, leader_epoch=epoch) for base, epoch in EPOCHS.items())
SIZE_BYTES = len(STORED) // 3


def test_batch_under_the_first_epoch_differs_in_nothing_else():
    """Its checksum holds as before, as the epoch is outside of it."""
    stored = STORED[:SIZE_BYTES]
    moved = b"".join(pieces_under_first_epoch(memoryview(stored)))
    assert (parse_header(stored).leader_epoch, parse_header(moved).leader_epoch) == (37, 0)
    assert parse_header(moved)._replace(leader_epoch=37) == parse_header(stored)
    assert moved[16:] == stored[16:]
    check_batches(memoryview(moved), base_offset=100, next_offset=103)


def test_epochs_are_exchanged_and_given_back():
    """What they were is told, and put back they make the bytes that were stored."""
    data = bytearray(STORED)
    assert exchange_epochs(data, lambda _: 0) == (len(STORED), {37, 41})
    assert data != STORED
    assert exchange_epochs(data, EPOCHS.__getitem__) == (len(STORED), {0})
    assert data == STORED


@given(st.integers(0, len(STORED)))
def test_batch_that_is_cut_is_left_alone(size_bytes):
    """Whole batches before it are changed."""
    data = bytearray(STORED[:size_bytes])
    whole, before = exchange_epochs(data, lambda _: 0)
    assert whole == size_bytes // SIZE_BYTES * SIZE_BYTES
    assert len(before) == (0, 1, 1, 2)[whole // SIZE_BYTES]
    assert data[whole:] == STORED[whole:size_bytes]


def test_bytes_that_are_no_batch_end_it():
    """A length that no batch has is not followed."""
    data = bytearray(STORED[:SIZE_BYTES] + bytes(200))
    assert exchange_epochs(data, lambda _: 5) == (SIZE_BYTES, {37})
    assert data[SIZE_BYTES:] == bytes(200)
