"""The walk over a Produce response, with kio's encoder as the reference."""

from __future__ import annotations

import struct
import uuid
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kafka_messages import PRODUCE_VERSIONS, produce_response, response_frame
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.produce import FIRST_LOG_START, ProduceResponseWalk

VERSIONS = PRODUCE_VERSIONS[PRODUCE_VERSIONS.index(FIRST_LOG_START) :]


def topics_of(version, *starts):
    """Return two topics whose partitions have these log starts. The last one has errors as well."""
    one, two = (uuid.UUID(int=1), uuid.UUID(int=2)) if version >= 13 else ("one", "two")
    plain = {index: {"log_start_offset": start} for index, start in enumerate(starts[:-1])}
    failed = {
        "log_start_offset": starts[-1],
        "error_code": 87,
        "record_errors": [(0, "too old"), (3, None)],
        "error_message": "invalid",
        "leader_epoch": 4,
    }
    return {one: plain, two: {7: failed}}


def walked(version, frame, *, steps=()):
    """Walk over *frame*, offered in parts that end at *steps*, each with what the last one left."""
    walk = ProduceResponseWalk(version, int.from_bytes(frame[:4]))
    for end in [*sorted(steps), len(frame)]:
        walk.feed(memoryview(frame)[walk.position : max(end, walk.position)])
    return walk


@pytest.mark.parametrize("version", VERSIONS)
def test_log_starts_are_found_and_written_over_byte_by_byte(version):
    """The decoder of kio reads the written values, and nothing else has changed, however the bytes arrive."""
    frame = response_frame(produce_response(version, topics_of(version, 70, 71, 72)))
    walk = walked(version, frame, steps=range(len(frame)))
    assert walk.is_done
    topics = list(topics_of(version, 0, 0, 0))
    assert [(each.topic, each.index, each.error_code, each.log_start_offset) for each in walk.partitions] == [
        (topics[0], 0, 0, 70),
        (topics[0], 1, 0, 71),
        (topics[1], 7, 87, 72),
    ]
    for each in walk.partitions:
        struct.pack_into(">q", frame, each.log_start_at, 5)
    assert frame == response_frame(produce_response(version, topics_of(version, 5, 5, 5)))


def test_answer_as_a_broker_writes_it():
    """Version 8, the bytes put together by hand from Kafka's description of the message."""
    head = struct.pack(">ihqqq", 3, 0, 1000, -1, 40)
    errors = struct.pack(">i", 1) + struct.pack(">ih", 0, 3) + b"bad" + struct.pack(">h", -1)
    body = struct.pack(">iih", 9, 1, 1) + b"t" + struct.pack(">i", 1) + head + errors + struct.pack(">i", 0)
    frame = len(body).to_bytes(4) + body
    (partition,) = walked(8, frame).partitions
    assert (partition.topic, partition.index, partition.log_start_offset) == ("t", 3, 40)
    assert struct.unpack_from(">q", frame, partition.log_start_at) == (40,)


@pytest.mark.parametrize("version", VERSIONS)
def test_answer_of_another_size_is_a_violation(version):
    """One that ends early, and one that goes on."""
    frame = response_frame(produce_response(version, topics_of(version, 1, 2, 3)))
    with pytest.raises(ProtocolViolation):
        ProduceResponseWalk(version, len(frame) - 5).feed(memoryview(frame))
    with pytest.raises(ProtocolViolation):
        ProduceResponseWalk(version, len(frame)).feed(memoryview(bytes(frame) + b"\0"))


@given(st.sampled_from(VERSIONS), st.binary(max_size=400), st.integers(4, 2**31 - 1))
def test_garbage_is_taken_bit_by_bit_or_refused(version, garbage, size):
    """Nothing but a violation comes of garbage, and never more is taken than there is."""
    walk = ProduceResponseWalk(version, size)
    with suppress(ProtocolViolation):
        assert 0 <= walk.feed(memoryview(garbage)) <= len(garbage)
