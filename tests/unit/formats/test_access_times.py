"""The list of access times: read as written, and nothing else is read."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.errors import CorruptDataError
from tieringd.formats.access_times import MAGIC, decode_access_times, encode_access_times
from tieringd.formats.envelope import seal

NAMES = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\n"), min_size=1)


@given(st.dictionaries(NAMES, st.integers(0, 2**53)))
def test_access_times_are_read_as_they_were_written(times):
    """Names may hold anything but a line's end."""
    assert decode_access_times(encode_access_times(times)) == times


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"no zlib", id="not-compressed"),
        pytest.param(zlib.compress(b"x name"), id="no-number"),
        pytest.param(zlib.compress(b"\xff\xfe name"), id="no-text"),
    ],
)
def test_damaged_access_times_are_corrupt(body):
    """Any damage raises CorruptDataError, and no other error."""
    with pytest.raises(CorruptDataError, match="access times"):
        decode_access_times(seal(MAGIC, 1, body))


@given(st.integers(0, 200), st.integers(1, 255))
def test_any_flipped_byte_is_noticed(at, flip):
    """The envelope's checksum covers all of it."""
    data = bytearray(encode_access_times({"a": 1, "b": 2}))
    data[at % len(data)] ^= flip
    with pytest.raises(CorruptDataError):
        decode_access_times(bytes(data))
