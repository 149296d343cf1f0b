"""The history link: it comes back as it was, damage is found, its key is beside the manifest's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.make_own_golden import HISTORY_LINK, OWN
from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal
from tieringd.formats.history_link import HistoryLink, decode_history_link, encode_history_link
from tieringd.formats.object_keys import (
    TopicKey,
    history_link_key,
    parse_topic_manifest_key,
    topic_manifest_key,
)

KEYS = st.builds(TopicKey, st.text(max_size=9), st.text(max_size=9), st.text(max_size=9))
STARTS = st.dictionaries(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), max_size=5)


@given(KEYS, KEYS, STARTS)
def test_link_comes_back_as_it_was(topic, history, starts):
    """A decoded link knows where each partition begins."""
    link = HistoryLink(topic, history, tuple(sorted(starts.items())))
    assert decode_history_link(encode_history_link(link)) == link
    assert {number: link.start_of(number) for number in starts} == starts


def test_golden_link_is_read_and_written():
    """Every later release reads it."""
    data = (OWN / "history-link.v1").read_bytes()
    assert decode_history_link(data) == HISTORY_LINK
    assert encode_history_link(HISTORY_LINK) == data
    assert HISTORY_LINK.start_of(3) == 2**63 - 1
    assert HISTORY_LINK.start_of(1) is None


@given(st.data())
def test_damage_is_found(data):
    """A change of any byte is found."""
    document = bytearray(encode_history_link(HISTORY_LINK))
    at = data.draw(st.integers(0, len(document) - 1))
    document[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptDataError):
        decode_history_link(bytes(document))


@pytest.mark.parametrize(
    "change",
    [{"starts": [[1, 0], [0, 0]]}, {"starts": [[0, -1]]}, {"starts": 5}, {"starts": [[0]]}, {"topic": None}],
)
def test_document_that_makes_no_sense_is_refused(change):
    """The document is refused although its checksum is right."""
    body = json.loads(encode_history_link(HISTORY_LINK)[16:]) | change
    if change == {"topic": None}:
        del body["topic"]
    with pytest.raises(CorruptDataError, match="history link"):
        decode_history_link(seal(b"TRDH", 1, json.dumps(body).encode()))


def test_key_lies_beside_the_topic_manifest():
    """The key of a link is not the key of a topic manifest."""
    key = history_link_key(HISTORY_LINK.topic)
    manifest = topic_manifest_key(HISTORY_LINK.topic)
    assert key.rpartition("/")[0] == manifest.rpartition("/")[0]
    assert parse_topic_manifest_key(key) is None
