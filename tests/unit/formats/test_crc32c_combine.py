"""Checksums of pieces put together, against those of the data itself."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tieringd.formats.crc32c_combine import combine_crc32c, combined_crc32c

CHECK_VALUE = 0xE3069283
"""The published CRC32C of the digits 1 to 9."""


@pytest.mark.parametrize(
    ("first", "first_crc", "second", "second_crc"),
    [
        # The whole has the published check value; the pieces, what a library says of them.
        pytest.param(b"1234", 0xF63AF4EE, b"56789", 0x83B565D8, id="four-and-five"),
        pytest.param(b"", 0, b"123456789", CHECK_VALUE, id="nothing-before"),
        pytest.param(b"123456789", CHECK_VALUE, b"", 0, id="nothing-after"),
    ],
)
def test_combined_checksum_is_the_published_one(first, first_crc, second, second_crc):
    """Pieces of the published check text give its published value."""
    assert (crc32c(first), crc32c(second)) == (first_crc, second_crc)
    assert combine_crc32c(first_crc, second_crc, len(second)) == CHECK_VALUE


def test_zeros_of_a_published_vector_combine():
    """32 zero bytes have the checksum of RFC 3720, in whatever pieces they come."""
    for cut in range(33):
        halves = (crc32c(bytes(cut)), crc32c(bytes(32 - cut)))
        assert combine_crc32c(*halves, 32 - cut) == 0x8A9136AA


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_any_pieces_combine(pieces):
    """The checksums of the pieces give the checksum of the data, however the data is cut."""
    assert combined_crc32c((crc32c(piece), len(piece)) for piece in pieces) == crc32c(b"".join(pieces))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_lengths_add_up(first, one, other):
    """A length that no test could read is as good as two that make it up."""
    assert combine_crc32c(combine_crc32c(first, 0, one), 0, other) == combine_crc32c(first, 0, one + other)
