"""Fetch requests: without their session, and what they ask; kio is the reference."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kafka_messages import FETCH_VERSIONS, fetch_request, read_request, request_frame
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.fetch import (
    AskedPartition,
    asked_of,
    limit_bytes,
    remove_session,
    session_of,
    with_offsets,
)
from tieringd.formats.kafka_wire.request_header import RequestHead

NAMES = ("t", "a.b_c-1", "x" * 249)
IDS = tuple(uuid.UUID(int=number) for number in (1, 2**127, 77))


CONSUMERS = st.just(-1)


@st.composite
def drawn_requests(draw, *, replica_ids=CONSUMERS):
    """Draw a version, what is asked of which partitions, and kio's request."""
    version = draw(st.sampled_from(FETCH_VERSIONS))
    asked = st.fixed_dictionaries(
        {
            "fetch_offset": st.integers(0, 2**63 - 1),
            "partition_max_bytes": st.integers(0, 2**31 - 1),
            "current_leader_epoch": st.integers(-1, 2**31 - 1),
        }
    )
    topics = draw(
        st.dictionaries(
            st.sampled_from(IDS if version >= 13 else NAMES),
            st.dictionaries(st.integers(0, 2**31 - 1), asked, max_size=4),
            max_size=3,
        )
    )
    request = fetch_request(
        version,
        topics,
        replica_id=draw(replica_ids),
        session_id=draw(st.integers(0, 2**31 - 1)),
        session_epoch=draw(st.integers(-1, 2**31 - 1)),
        max_bytes=draw(st.integers(0, 2**31 - 1)),
        isolation_level=draw(st.integers(0, 1)),
        rack_id=draw(st.sampled_from(["", "rack-1"])),
    )
    return version, topics, request


def framed(request, data):
    client_id = data.draw(st.none() | st.sampled_from(["", "rdkafka", "é" * 200]))
    frame = request_frame(request, client_id=client_id)
    return frame, RequestHead.read(memoryview(frame))


def without_session(request):
    fields = {
        name: getattr(request, name) for name in request.__dataclass_fields__ if not name.startswith("__")
    }
    if "session_id" in fields:
        fields |= {"session_id": 0, "session_epoch": -1}
    return type(request)(**fields)


def without_limit(request):
    fields = {
        name: getattr(request, name) for name in request.__dataclass_fields__ if not name.startswith("__")
    }
    return fields | {"max_bytes": None}


@given(drawn_requests(), st.data())
def test_session_of_a_consumer_is_removed_and_nothing_else(drawn, data):
    """The request is the one that kio writes without a session, in every version."""
    version, _, request = drawn
    frame, head = framed(request, data)
    assert remove_session(memoryview(frame), head)
    assert read_request(frame, 1, version) == without_session(request)


@given(drawn_requests(replica_ids=st.integers(0, 2**31 - 1)), st.data())
def test_request_of_a_replica_stays_as_it_is(drawn, data):
    """A replica is recognised in every version, and no byte of its request changes."""
    _, _, request = drawn
    frame, head = framed(request, data)
    before = bytes(frame)
    assert not remove_session(memoryview(frame), head)
    assert bytes(frame) == before


@given(drawn_requests(), st.data())
def test_asked_is_what_kio_was_given(drawn, data):
    """Limits, isolation level and each partition are read in every version."""
    version, topics, request = drawn
    frame, head = framed(request, data)
    asked = asked_of(memoryview(frame), head)
    assert (asked.max_wait_ms, asked.min_bytes, asked.max_bytes) == (500, 1, request.max_bytes)
    assert asked.read_committed == (request.isolation_level == 1)
    assert asked.partitions == {
        (topic, index): AskedPartition(
            each["fetch_offset"],
            each["partition_max_bytes"],
            each["current_leader_epoch"] if version >= 9 else -1,
        )
        for topic, partitions in topics.items()
        for index, each in partitions.items()
    }


@given(drawn_requests(), st.data())
def test_limit_lowers_the_maximum_and_nothing_else(drawn, data):
    """A client that asks for less keeps its own limit."""
    version, _, request = drawn
    frame, head = framed(request, data)
    limit_bytes(memoryview(frame), head, 1 << 20)
    limited = read_request(frame, 1, version)
    assert limited.max_bytes == min(request.max_bytes, 1 << 20)
    assert without_limit(limited) == without_limit(request)


@given(drawn_requests(), st.data())
def test_offsets_are_changed_and_nothing_else(drawn, data):
    """The offsets of the named partitions change in every version, and the given request stays as it is."""
    _, _, request = drawn
    frame, head = framed(request, data)
    before = bytes(frame)
    asked = asked_of(memoryview(frame), head)
    named = data.draw(st.sets(st.sampled_from(sorted(asked.partitions, key=str)))) if asked.partitions else ()
    offsets = {key: data.draw(st.integers(0, 2**63 - 1)) for key in named}
    changed = with_offsets(memoryview(frame), head, offsets)
    assert asked_of(memoryview(frame), head).at(offsets) == asked_of(memoryview(changed), head)
    assert bytes(frame) == before
    there = asked_of(memoryview(changed), head).partitions
    assert {key: one.fetch_offset for key, one in there.items()} == {
        key: offsets.get(key, one.fetch_offset) for key, one in asked.partitions.items()
    }
    back = {key: one.fetch_offset for key, one in asked.partitions.items()}
    assert with_offsets(memoryview(changed), head, back) == before


def test_rack_that_looks_like_a_replica_is_a_consumers():
    """The two bytes that tell replicas apart may stand in a rack's name too."""
    request = fetch_request(
        15, {IDS[0]: {0: {}}}, rack_id="a\x01\r" + "b" * 12, session_id=5, session_epoch=5
    )
    frame = request_frame(request)
    assert bytes(frame[-15:-13]) == b"\x01\r"
    assert remove_session(memoryview(frame), RequestHead.read(memoryview(frame)))
    assert read_request(frame, 1, 15) == without_session(request)


@given(drawn_requests(replica_ids=st.sampled_from([-1, 3])), st.data())
def test_cut_request_is_read_or_refused(drawn, data):
    """No other error comes of a request that ends early."""
    _, _, request = drawn
    frame, head = framed(request, data)
    size = data.draw(st.integers(12, len(frame) - 1))
    for read in (remove_session, asked_of):
        try:
            read(memoryview(frame)[:size], head)
        except ProtocolViolation:
            continue


@given(st.sampled_from(FETCH_VERSIONS), st.binary(max_size=300))
def test_garbage_after_a_head_is_read_or_refused(version, garbage):
    """Nothing but a violation comes of it."""
    frame = bytearray(struct_head(version, garbage))
    head = RequestHead.read(memoryview(frame))
    for read in (remove_session, asked_of):
        try:
            read(memoryview(frame), head)
        except ProtocolViolation:
            continue


def struct_head(version, body):
    return (8 + len(body)).to_bytes(4) + b"\x00\x01" + version.to_bytes(2) + bytes(4) + body


@pytest.mark.parametrize("version", [4, 12])
def test_array_of_2_billion_topics_is_a_violation(version):
    """The count is believed only as far as there are bytes."""
    frame = request_frame(fetch_request(version, {}))
    body = bytes(frame).index((500).to_bytes(4))
    at = body + (13 if version < 7 else 21)
    frame[at : at + 4] = b"\x7f\xff\xff\xff"
    with pytest.raises(ProtocolViolation):
        asked_of(memoryview(frame), RequestHead.read(memoryview(frame)))


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_session_of_a_request_is_found(version):
    """The session's place is the same in every version that has one."""
    frame = memoryview(request_frame(fetch_request(version, {}, session_id=77, session_epoch=3)))
    assert session_of(frame, RequestHead.read(frame)) == (77 if version >= 7 else 0)
