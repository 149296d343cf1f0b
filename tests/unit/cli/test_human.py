"""Sizes in the form that `rpk` prints."""

from __future__ import annotations

import pytest

from tieringd.cli.human import human_size


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [
        (0, "0B"),
        (999, "999B"),
        (1_000, "1kB"),
        (1_024, "1.024kB"),
        (1_500_000, "1.5MB"),
        (123_456_789, "123.5MB"),
        (2 * 10**12, "2TB"),
        (5_000 * 10**18, "5000EB"),
    ],
)
def test_human_size_has_four_digits_at_most(size_bytes, words):
    """Units are decimal, and the largest one takes all that is larger still."""
    assert human_size(size_bytes) == words
