"""The walk over a Fetch response, with kio's encoder as the reference."""

from __future__ import annotations

import struct
import tracemalloc
import uuid
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kafka_messages import FETCH_VERSIONS, fetch_response, read_response, response_frame
from tests.unit.formats.kafka_wire.fetch_strategies import fetch_responses
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.fetch import FetchResponseWalk


def walked(version, frame, *, steps=()):
    """Walk over *frame*, offered in parts that end at *steps*, each with what the last one left."""
    walk = FetchResponseWalk(version, int.from_bytes(frame[:4]))
    for end in [*sorted(steps), len(frame)]:
        walk.feed(memoryview(frame)[walk.position : max(end, walk.position)])
    return walk


def expected(drawn):
    return [
        (topic, index, said["error_code"], said["high_watermark"], said["records"] or b"")
        for topic, partitions in drawn.topics.items()
        for index, said in partitions.items()
    ]


def seen(walk, frame):
    return [
        (
            each.topic,
            each.index,
            each.error_code,
            each.high_watermark,
            bytes(frame[each.records_begin : each.records_begin + each.records_bytes]),
        )
        for each in walk.partitions
    ]


@given(fetch_responses(), st.data())
def test_walk_sees_what_kio_wrote_however_it_arrives(drawn, data):
    """Each partition, its error and its records are found in every version and however bytes are split."""
    steps = data.draw(st.lists(st.integers(0, len(drawn.frame)), max_size=12))
    walk = walked(drawn.version, drawn.frame, steps=steps)
    assert walk.is_done
    assert walk.position == len(drawn.frame)
    assert seen(walk, drawn.frame) == expected(drawn)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_walk_sees_the_same_byte_by_byte(version):
    """No split is special, in any version."""
    topic = uuid.UUID(int=9) if version >= 13 else "topic"
    said = {0: {"records": b"r" * 40, "aborted_transactions": [(1, 2), (3, 4)], "leader_epoch": 5}}
    frame = response_frame(fetch_response(version, {topic: said | {7: {"error_code": 1, "records": None}}}))
    walk = walked(version, frame, steps=range(len(frame)))
    assert walk.is_done
    assert seen(walk, frame) == [(topic, 0, 0, -1, b"r" * 40), (topic, 7, 1, -1, b"")]


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_log_start_is_written_over_where_it_stands(version):
    """
    The decoder of kio reads the written values, and nothing else has changed.

    Version 4 has no log start.
    """
    topic = uuid.UUID(int=9) if version >= 13 else "topic"
    said = {
        index: {"log_start_offset": 70 + index, "high_watermark": 90, "records": b"r" * index}
        for index in range(3)
    }
    frame = response_frame(fetch_response(version, {topic: said}))
    walk = walked(version, frame)
    assert [each.log_start_offset for each in walk.partitions] == (
        [70, 71, 72] if version >= 5 else [-1, -1, -1]
    )
    if version < 5:
        return
    for each in walk.partitions:
        struct.pack_into(">q", frame, each.log_start_at, 5)
    changed = {index: fields | {"log_start_offset": 5} for index, fields in said.items()}
    assert frame == response_frame(fetch_response(version, {topic: changed}))


@given(fetch_responses())
def test_partitions_lie_side_by_side_between_begin_and_end(drawn):
    """The bytes of a partition lie between its begin and its end, apart from those of all others."""
    walk = walked(drawn.version, drawn.frame)
    frame = bytearray(drawn.frame)
    for each in walk.partitions:
        struct.pack_into(">h", frame, each.error_at, 3)
    response = read_response(frame, 1, drawn.version)
    codes = [partition.error_code for topic in response.responses for partition in topic.partitions]
    assert codes == [3] * len(walk.partitions)
    for one, other in zip(walk.partitions, walk.partitions[1:], strict=False):
        assert (
            one.begin < one.records_begin <= one.records_begin + one.records_bytes <= one.end <= other.begin
        )


@pytest.mark.parametrize("version", [4, 11, 12, 18])
def test_records_pass_without_being_offered(version):
    """The walk gives the number of record bytes after a partition's header, and counts them as passed."""
    topic = uuid.UUID(int=9) if version >= 13 else "topic"
    frame = response_frame(fetch_response(version, {topic: {0: {"records": b"r" * 5000}}}))
    walk = FetchResponseWalk(version, len(frame) - 4)
    taken = walk.feed(memoryview(frame)[:200])
    assert taken == 200
    left = walk.partitions[0].records_begin + 5000 - 200
    assert walk.passing == left
    walk.passed(left)
    walk.feed(memoryview(frame)[walk.position :])
    assert walk.is_done


@given(fetch_responses(), st.data())
def test_walk_takes_nothing_beyond_its_response(drawn, data):
    """Bytes after the response are left for the next one."""
    more = data.draw(st.binary(min_size=1, max_size=50))
    walk = FetchResponseWalk(drawn.version, len(drawn.frame) - 4)
    assert walk.feed(memoryview(drawn.frame + more)) == len(drawn.frame)


@given(fetch_responses(), st.data())
def test_response_that_ends_early_is_a_violation(drawn, data):
    """A size that is too small for what the response holds is found, whatever the size is."""
    size = data.draw(st.integers(4, len(drawn.frame) - 5))
    walk = FetchResponseWalk(drawn.version, size)
    with pytest.raises(ProtocolViolation):
        walk.feed(memoryview(drawn.frame))


@given(fetch_responses(), st.integers(1, 40))
def test_response_that_is_too_long_is_a_violation(drawn, more):
    """Bytes after the last field are no part of a response."""
    frame = drawn.frame + bytes(more)
    walk = FetchResponseWalk(drawn.version, len(frame) - 4)
    with pytest.raises(ProtocolViolation):
        walk.feed(memoryview(frame))


@given(st.sampled_from(FETCH_VERSIONS), st.binary(max_size=400), st.integers(4, 2**31 - 1))
def test_garbage_is_taken_bit_by_bit_or_refused(version, garbage, size):
    """Nothing but a violation comes of garbage, and never more is taken than there is."""
    walk = FetchResponseWalk(version, size)
    with suppress(ProtocolViolation):
        assert 0 <= walk.feed(memoryview(garbage)) <= len(garbage)


@given(fetch_responses(), st.data())
def test_damaged_response_is_walked_over_or_refused(drawn, data):
    """A flipped byte moves what is seen, or is a violation; nothing else."""
    frame = bytearray(drawn.frame)
    frame[data.draw(st.integers(4, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        walk = walked(drawn.version, frame)
    except ProtocolViolation:
        return
    assert walk.position <= len(frame)


@pytest.mark.parametrize("version", [4, 12])
def test_length_of_2_gib_costs_nothing(version):
    """A length is compared with what the response can hold before anything is made of it."""
    frame = response_frame(fetch_response(version, {"topic": {0: {"records": b"r" * 9}}}))
    at = bytes(frame).index(b"r" * 9) - (1 if version >= 12 else 4)
    huge = b"\xff\xff\xff\xff\x07" if version >= 12 else (2**31 - 1).to_bytes(4)
    frame[at : at + len(huge)] = huge
    walk = FetchResponseWalk(version, 1 << 20)
    tracemalloc.start()
    with pytest.raises(ProtocolViolation, match="2147483"):
        walk.feed(memoryview(frame))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_response_of_2_gib_is_walked_over_without_being_held():
    """Only headers count: two GiB of records pass as a number."""
    records = 2**31 - 200
    frame = response_frame(fetch_response(12, {"topic": {0: {"records": b"r" * 9}}}))
    at = bytes(frame).index(b"r" * 9)
    size = records + 1
    length = bytes(
        [size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F | 0x80, size >> 21 & 0x7F | 0x80]
    )
    head = bytes(frame[: at - 1]) + length + bytes([size >> 28])
    walk = FetchResponseWalk(12, len(head) - 4 + records + 3)
    assert walk.feed(memoryview(head)) == len(head)
    walk.passed(walk.passing)
    assert walk.feed(memoryview(b"\x00\x00\x00")) == 3
    assert walk.is_done
    assert walk.partitions[0].records_bytes == records
