"""The check of stored batches: what is right passes, whatever the windows; what is wrong is named."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import OLD_MESSAGE_V1, batch, golden_log, segment_bytes
from tieringd.errors import CorruptDataError
from tieringd.formats.batch_check import BatchCheck, check_batches, check_batches_in
from tieringd.formats.batch_offsets import ExpectedBatches

DATA = segment_bytes(100, batches=5, value=b"v" * 300)
BATCH_BYTES = len(DATA) // 5
BOUNDS = ExpectedBatches(100, 115)


def reads(data):
    return lambda position, size_bytes: data[position : position + size_bytes]


def check_pieces(data, bounds, *, ends):
    """Check *data* in pieces that end at *ends*."""
    pieces = BatchCheck(bounds)
    for begin, end in pairwise([0, *ends, len(data)]):
        pieces.take(memoryview(data)[begin:end])
    pieces.end()


@pytest.fixture(params=["memory", "windows", "bytes"])
def check(request):
    """Give the check of bytes in memory, read through windows smaller than a batch, and one by one."""
    if request.param == "memory":
        return lambda data, bounds: check_batches(memoryview(data), bounds)
    if request.param == "bytes":
        return lambda data, bounds: check_pieces(data, bounds, ends=range(1, len(data)))
    return lambda data, bounds: check_batches_in(reads(data), len(data), bounds, window_bytes=100)


def test_whole_batches_pass(check):
    """One, many, none, and those that a real broker wrote."""
    check(DATA, BOUNDS)
    check(b"", ExpectedBatches(0, 0))
    check(batch(7), ExpectedBatches(7, 10))
    for topic in ("codec-gzip", "transactions", "compacted"):
        log = golden_log(topic)
        check(log, ExpectedBatches(0, 1 << 40))


@pytest.mark.parametrize(
    ("data", "bounds", "message", "position"),
    [
        pytest.param(DATA[:-1], BOUNDS, "cut short", 4 * BATCH_BYTES, id="cut"),
        pytest.param(DATA[: BATCH_BYTES + 30], BOUNDS, "cut short", BATCH_BYTES, id="cut-header"),
        pytest.param(DATA + b"\0" * 70, BOUNDS, "magic is 0, not 2", 5 * BATCH_BYTES, id="zeros"),
        pytest.param(DATA[BATCH_BYTES:], ExpectedBatches(104, 115), "are possible there", 0, id="too-early"),
        pytest.param(DATA, ExpectedBatches(100, 114), "are possible there", 4 * BATCH_BYTES, id="too-late"),
        pytest.param(
            DATA[BATCH_BYTES:] + DATA[:BATCH_BYTES],
            BOUNDS,
            "are possible there",
            4 * BATCH_BYTES,
            id="disorder",
        ),
        pytest.param(DATA[:BATCH_BYTES] * 2, BOUNDS, "are possible there", BATCH_BYTES, id="twice"),
        pytest.param(OLD_MESSAGE_V1, BOUNDS, "v1 is not supported", 0, id="old-format"),
    ],
)
def test_wrong_bytes_are_named_with_their_position(check, data, bounds, message, position):
    """An operator can find them in the object."""
    with pytest.raises(CorruptDataError, match=message) as caught:
        check(data, bounds)
    assert caught.value.position == position


@given(st.integers(0, len(DATA) - 1), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(at, bit):
    """
    Every flipped bit is noticed except in the leader epoch, which is outside the checksum.

    The broker fills in the leader epoch.
    """
    damaged = bytearray(DATA)
    damaged[at] ^= 1 << bit
    if 12 <= at % BATCH_BYTES < 16:
        check_batches(memoryview(damaged), BOUNDS)
        return
    with pytest.raises(CorruptDataError):
        check_batches(memoryview(damaged), BOUNDS)
    with pytest.raises(CorruptDataError):
        check_batches_in(reads(bytes(damaged)), len(damaged), BOUNDS)


@given(
    st.lists(st.integers(0, len(DATA)), max_size=12).map(sorted),
    st.integers(0, len(DATA) - 1) | st.none(),
    st.integers(0, len(DATA)),
    st.booleans(),
)
def test_pieces_change_nothing(ends, damaged_at, size, has_checksum):
    """The outcome is that of all bytes at once, position included, wherever they are cut into pieces."""
    data = bytearray(DATA)
    if damaged_at is not None:
        data[damaged_at] ^= 1
    data = bytes(data[:size])
    bounds = replace(BOUNDS, checksum=crc32c(DATA)) if has_checksum else BOUNDS
    whole = outcome(lambda: check_batches(memoryview(data), bounds))
    assert outcome(lambda: check_pieces(data, bounds, ends=[end for end in ends if end <= size])) == whole


def outcome(check):
    try:
        check()
    except CorruptDataError as error:
        return error.message, error.position, error.offset
    return None


def test_bytes_that_end_early_are_cut(check):
    """A file that became shorter is not read for ever."""
    with pytest.raises(CorruptDataError, match="cut short"):
        check_batches_in(reads(DATA[: BATCH_BYTES + 10]), len(DATA), BOUNDS)


def test_batch_with_an_impossible_length_is_not_waited_for():
    """No window grows to what a damaged length asks for beyond the bytes there are."""
    damaged = DATA[:8] + (200 << 20).to_bytes(4, "big") + DATA[12:]
    with pytest.raises(CorruptDataError, match="cut short"):
        check_batches_in(reads(damaged), len(damaged), BOUNDS)


@given(st.lists(st.integers(1, len(DATA) - 1), max_size=12).map(sorted))
def test_what_has_passed_is_whole_batches(ends):
    """It ends with the last batch that was taken whole, wherever the pieces end."""
    check = BatchCheck(BOUNDS)
    assert check.passed == (0, 100)
    for begin, end in pairwise([0, *ends, len(DATA)]):
        check.take(memoryview(DATA)[begin:end])
        whole = end // BATCH_BYTES
        assert check.passed == (whole * BATCH_BYTES, 100 + 3 * whole)
