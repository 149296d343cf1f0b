"""The mark of a recovery: it comes back as it was, and what is none of ours is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.errors import CorruptDataError
from tieringd.formats.recovery_mark import RecoveryMark, decode_mark, encode_mark

OFFSETS = st.none() | st.integers(0, 2**63 - 1)


@given(
    st.builds(
        RecoveryMark,
        st.integers(0, 2**63 - 1),
        st.text(max_size=22),
        st.sampled_from(["read_committed", "read_uncommitted"]),
        st.integers(0, 2**63 - 1),
        *[OFFSETS] * 4,
        st.none() | st.just(()) | st.tuples(*[st.integers(0, 2**63 - 1)] * 2, st.integers(0, 2**31 - 1)),
    )
)
def test_mark_comes_back_as_it_was(mark):
    """A mark is much shorter than the 4,096 bytes that a broker takes beside an offset."""
    text = encode_mark(mark)
    assert decode_mark(mark.next_offset, text) == mark
    assert len(text.encode()) < 1024


def test_mark_has_a_text_that_later_releases_read():
    """The text of this mark is in clusters."""
    text = (
        '{"version":1,"target_topic_id":"W1xNUlUlTfigw_K-dvdxsA","isolation":"read_committed","records":3,'
        '"first_source":5,"first_target":0,"last_source":9,"last_target":2}'
    )
    mark = RecoveryMark(10, "W1xNUlUlTfigw_K-dvdxsA", "read_committed", 3, 5, 0, 9, 2)
    assert decode_mark(10, text) == mark
    assert encode_mark(mark) == text


@pytest.mark.parametrize(("text", "newest"), [("[]", ()), ("[6,11,3]", (6, 11, 3))])
def test_mark_with_the_newest_replacement_has_a_text_that_later_releases_read(text, newest):
    """The text of this mark is in clusters as well, since marks know of unclean elections."""
    text = (
        '{"version":1,"target_topic_id":"W1xNUlUlTfigw_K-dvdxsA","isolation":"read_committed","records":3,'
        f'"first_source":5,"first_target":0,"last_source":9,"last_target":2,"newest_replacement":{text}}}'
    )
    mark = RecoveryMark(10, "W1xNUlUlTfigw_K-dvdxsA", "read_committed", 3, 5, 0, 9, 2, newest)
    assert decode_mark(10, text) == mark
    assert encode_mark(mark) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "{}", '{"version":1}', '{"version":1,"extra":0}', "{"),
        '{"version":1,"target_topic_id":"x","isolation":"read_committed","newest_replacement":[6,null]}',
    ],
)
def test_offset_of_someone_else_is_no_mark(text):
    """A group's text may be anything."""
    with pytest.raises(CorruptDataError, match="cannot be read"):
        decode_mark(0, text)


def test_mark_of_a_newer_release_is_told():
    """The mark of a newer release may say what this release does not know."""
    with pytest.raises(CorruptDataError, match="has version 2"):
        decode_mark(0, '{"version":2,"anything":1}')
