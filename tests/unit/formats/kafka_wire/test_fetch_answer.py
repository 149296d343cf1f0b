"""Fetch responses with replaced partitions, read back by kio."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kafka_messages import FETCH_VERSIONS, read_response
from tests.unit.formats.kafka_wire.fetch_strategies import fetch_responses
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.fetch import (
    FetchedPartition,
    FetchResponseWalk,
    PartitionData,
    composed,
    rebuilt,
)
from tieringd.formats.kafka_wire.pieces import FileRegion, piece_bytes

offsets = st.integers(-1, 2**62)
replacements = st.builds(
    PartitionData,
    high_watermark=offsets,
    last_stable_offset=offsets,
    log_start_offset=offsets,
    records=st.lists(st.binary(max_size=400), max_size=3).map(tuple),
    aborted=st.none() | st.lists(st.tuples(st.integers(0, 2**40), offsets), max_size=3).map(tuple),
    error_code=st.sampled_from([0, 56]),
)


def partitions_of(response):
    return [
        (getattr(topic, "topic_id", None) or topic.topic, each)
        for topic in response.responses
        for each in topic.partitions
    ]


def walk_over(drawn):
    walk = FetchResponseWalk(drawn.version, len(drawn.frame) - 4)
    walk.feed(memoryview(drawn.frame))
    return walk


@given(fetch_responses(), st.data())
def test_replaced_partitions_say_what_was_given_and_the_others_what_they_said(drawn, data):
    """Replaced partitions have the given fields, and the others stay, in every version."""
    walk = walk_over(drawn)
    chosen = {
        number: data.draw(replacements) for number in range(len(walk.partitions)) if data.draw(st.booleans())
    }
    response = rebuilt(
        memoryview(drawn.frame),
        drawn.version,
        [(walk.partitions[number], new) for number, new in chosen.items()],
    )
    assert response.size == sum(map(piece_bytes, response.pieces))
    before = partitions_of(read_response(drawn.frame, 1, drawn.version))
    after = partitions_of(read_response(b"".join(response.pieces), 1, drawn.version))
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if number not in chosen:
            assert old == new
            continue
        wanted, (topic, said) = chosen[number], new
        assert (topic, said.partition_index) == (old[0], old[1].partition_index)
        assert (said.error_code, said.high_watermark) == (wanted.error_code, wanted.high_watermark)
        assert said.last_stable_offset == wanted.last_stable_offset
        assert getattr(said, "log_start_offset", wanted.log_start_offset) == wanted.log_start_offset
        assert getattr(said, "preferred_read_replica", -1) == -1
        assert said.records == b"".join(wanted.records)
        aborted = said.aborted_transactions
        assert (
            None if aborted is None else tuple((a.producer_id, a.first_offset) for a in aborted)
        ) == wanted.aborted


@given(fetch_responses())
def test_nothing_replaced_is_the_same_bytes(drawn):
    """A response without replacements is the broker's, byte for byte."""
    response = rebuilt(memoryview(drawn.frame), drawn.version, [])
    assert b"".join(response.pieces) == drawn.frame


@given(fetch_responses(), st.binary(min_size=1, max_size=100))
def test_slice_of_a_file_stands_where_its_bytes_would(drawn, data):
    """A response with a file in it has the bytes of the one that holds them itself."""
    walk = walk_over(drawn)
    replaced = [
        (each, PartitionData(1, 1, 1, records=(FileRegion(3, 5, len(data)),))) for each in walk.partitions
    ]
    held = [(each, PartitionData(1, 1, 1, records=(data,))) for each in walk.partitions]
    one = rebuilt(memoryview(drawn.frame), drawn.version, replaced)
    other = rebuilt(memoryview(drawn.frame), drawn.version, held)
    assert one.size == other.size
    filled = (data if isinstance(piece, FileRegion) else piece for piece in one.pieces)
    assert b"".join(filled) == b"".join(other.pieces)


def test_response_above_2_gib_is_refused():
    """The size field of a response has no room for more than 2 GiB."""
    frame = bytearray(b"\x00\x00\x00\x08" + os.urandom(8))
    partition = FetchedPartition("t", 0, 1, -1, -1, -1, begin=6, records_begin=8, end=10)
    large = PartitionData(1, 1, 1, records=(FileRegion(3, 0, 2**31 - 20),))
    with pytest.raises(ProtocolViolation, match="Fetch response of"):
        rebuilt(memoryview(frame), 4, [(partition, large)])


names = st.text("abc._-", min_size=1, max_size=249)


@given(st.sampled_from(FETCH_VERSIONS), st.data())
def test_composed_response_says_what_was_given(version, data):
    """
    A composed response has the given fields in every version, for topics by name or by id.

    It opens no session.
    """
    topics = data.draw(
        st.dictionaries(
            st.uuids(allow_nil=False) if version >= 13 else names,
            st.dictionaries(st.integers(0, 2**31 - 1), replacements, max_size=3),
            max_size=3,
        )
    )
    error_code = data.draw(st.sampled_from([0, 70])) if version >= 7 else 0
    response = composed(9, version, topics, error_code=error_code)
    assert response.size == sum(map(piece_bytes, response.pieces))
    frame = b"".join(response.pieces)
    assert frame[4:8] == (9).to_bytes(4)
    found = read_response(frame, 1, version)
    if version >= 7:
        assert (found.error_code.value, found.session_id) == (error_code, 0)
    assert {
        getattr(topic, "topic_id", None) or topic.topic: {
            one.partition_index: (
                one.error_code.value,
                one.high_watermark,
                one.last_stable_offset,
                getattr(one, "log_start_offset", None),
                one.records or b"",
                None
                if one.aborted_transactions is None
                else tuple((each.producer_id, each.first_offset) for each in one.aborted_transactions),
            )
            for one in topic.partitions
        }
        for topic in found.responses
    } == {
        topic: {
            index: (
                one.error_code,
                one.high_watermark,
                one.last_stable_offset,
                one.log_start_offset if version >= 5 else None,
                b"".join(one.records),
                one.aborted,
            )
            for index, one in partitions.items()
        }
        for topic, partitions in topics.items()
    }
