"""Produce requests, with kio's encoder as the reference."""

from __future__ import annotations

import struct
import uuid
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kafka_messages import (
    PRODUCE_VERSIONS,
    followed_by,
    milliseconds,
    request_frame,
    request_module,
    topic_fields,
)
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import IncompleteMessage
from tieringd.formats.kafka_wire.produce import MAX_PARTITIONS, ProduceRequestWalk, acks_of
from tieringd.formats.kafka_wire.request_header import RequestHead

NAMES = ("t", "a.b_c-1", "x" * 249)
IDS = tuple(uuid.UUID(int=number) for number in (1, 2**127, 77))


def produce_frame(version, topics, *, acks=-1, transactional_id=None):
    module = request_module(0, version)
    request = module.ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout=milliseconds(1000),
        topic_data=tuple(
            module.TopicProduceData(
                **topic_fields(module.TopicProduceData, topic),
                partition_data=tuple(
                    module.PartitionProduceData(index=index, records=records)
                    for index, records in partitions.items()
                ),
            )
            for topic, partitions in topics.items()
        ),
    )
    return request_frame(request)


@st.composite
def drawn_requests(draw):
    """Draw a version, topics with their records, and what is acknowledged."""
    version = draw(st.sampled_from(PRODUCE_VERSIONS))
    topics = draw(
        st.dictionaries(
            st.sampled_from(IDS if version >= 13 else NAMES),
            st.dictionaries(st.integers(0, 2**31 - 1), st.none() | st.binary(max_size=200), max_size=4),
            max_size=3,
        )
    )
    acks = draw(st.sampled_from([-1, 0, 1]))
    transactional_id = draw(st.none() | st.just("tx" * 100))
    return topics, acks, produce_frame(version, topics, acks=acks, transactional_id=transactional_id)


@given(drawn_requests(), st.data())
def test_walk_lists_the_partitions_however_they_arrive(drawn, data):
    """Topics and partitions are found in every version and however bytes are split."""
    topics, _, frame = drawn
    walk = ProduceRequestWalk(RequestHead.read(memoryview(frame)))
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(frame)), max_size=9))), len(frame)]:
        walk.feed(memoryview(frame)[walk.position : max(end, walk.position)])
    assert walk.is_done
    assert walk.partitions == {topic: list(partitions) for topic, partitions in topics.items()}


@given(drawn_requests(), st.binary(min_size=1, max_size=9), st.integers(0, 9))
def test_walk_skips_bytes_after_the_request(drawn, rest, split):
    """Bytes after the request are skipped, as a broker skips them."""
    topics, _, frame = drawn
    frame = followed_by(rest, frame)
    walk = ProduceRequestWalk(RequestHead.read(memoryview(frame)))
    walk.feed(memoryview(frame)[: len(frame) - split])
    walk.feed(memoryview(frame)[walk.position :])
    assert walk.is_done
    assert walk.position == len(frame)
    assert walk.partitions == {topic: list(partitions) for topic, partitions in topics.items()}


@given(drawn_requests())
def test_acks_are_read_as_soon_as_they_are_there(drawn):
    """A shorter beginning is incomplete; the rest of the request is not needed."""
    _, acks, frame = drawn
    head = RequestHead.read(memoryview(frame))
    for size in range(12, len(frame)):
        try:
            assert acks_of(memoryview(frame)[:size], head) == acks
        except IncompleteMessage:
            continue
        break
    assert acks_of(memoryview(frame), head) == acks


@pytest.mark.parametrize("version", [0, 1, 2])
def test_acks_of_old_versions_stand_before_transactions_were_invented(version):
    """The acks decide whether there is an answer, so they are read even if nothing else is."""
    frame = b"\x00\x00" + version.to_bytes(2) + bytes(4) + b"\x00\x01c" + b"\x00\x00" + bytes(8)
    frame = len(frame).to_bytes(4) + frame
    assert acks_of(memoryview(frame), RequestHead.read(memoryview(frame))) == 0


def test_version_that_was_never_offered_is_a_violation():
    """An unknown version may or may not have an answer, so later answers could not be told apart."""
    frame = bytearray(produce_frame(13, {}))
    frame[7] = 14
    with pytest.raises(ProtocolViolation, match="version 14"):
        acks_of(memoryview(frame), RequestHead.read(memoryview(frame)))


@given(drawn_requests(), st.data())
def test_damaged_request_is_walked_over_or_refused(drawn, data):
    """A flipped byte moves what is seen, or is a violation; nothing else."""
    _, _, frame = drawn
    frame[data.draw(st.integers(12, len(frame) - 1))] = data.draw(st.integers(0, 255))
    walk = ProduceRequestWalk(RequestHead.read(memoryview(frame)))
    with suppress(ProtocolViolation):
        assert 0 <= walk.feed(memoryview(frame)) <= len(frame)


def listing(*partitions, topics=None):
    """Return a request of version 3 whose topics say that they have so many partitions, and its head."""
    body = struct.pack(">hhii", -1, -1, 1000, len(partitions) if topics is None else topics)
    for number, count in enumerate(partitions):
        body += struct.pack(">h4si", 4, f"{number:04}".encode(), count) + struct.pack(">ii", 5, -1) * count
    frame = struct.pack(">hhihs", 0, 3, 7, 1, b"c") + body
    return memoryview(len(frame).to_bytes(4) + frame)


@pytest.mark.parametrize("partitions", [(MAX_PARTITIONS + 1,), (MAX_PARTITIONS // 2,) * 2 + (1,)])
def test_walk_lists_no_more_partitions_than_the_limit(partitions):
    """Each is eight bytes of a request, and a hundred of memory."""
    frame = listing(*partitions)
    walk = ProduceRequestWalk(RequestHead.read(frame))
    with pytest.raises(ProtocolViolation, match=f"{MAX_PARTITIONS + 1} partitions"):
        walk.feed(frame)
    assert sum(map(len, walk.partitions.values())) <= MAX_PARTITIONS


def test_walk_lists_no_more_topics_than_the_limit():
    """The walk does not begin: a topic without partitions costs memory too."""
    frame = listing(0, 0, topics=MAX_PARTITIONS + 1)
    walk = ProduceRequestWalk(RequestHead.read(frame))
    with pytest.raises(ProtocolViolation, match=f"{MAX_PARTITIONS + 1} topics"):
        walk.feed(frame)
    assert walk.partitions == {}


def test_walk_lists_as_many_partitions_as_the_limit():
    """The largest request that is refused with an answer."""
    frame = listing(MAX_PARTITIONS)
    walk = ProduceRequestWalk(RequestHead.read(frame))
    walk.feed(frame)
    assert walk.is_done
    assert len(walk.partitions["0000"]) == MAX_PARTITIONS
