"""Messages of peers that are newer than kio: unknown tagged fields and error codes are no error."""

from __future__ import annotations

from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_payload_module, load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader
from kio.serial.errors import SerialError
from kio.static.constants import EntityType

from tests.support.kafka_messages import (
    encoded,
    fetch_request,
    fetch_response,
    fields_of,
    milliseconds,
    produce_response,
)
from tieringd.formats.kafka_wire.cursor import uvarint
from tieringd.formats.kafka_wire.kio_decoding import (
    UNREADABLE,
    _by_field,
    decoded,
    decoded_of_broker,
    error_code,
)

NEW_TAG = uvarint(1) + uvarint(50) + uvarint(3) + b"new"
"""A section of tagged fields with an unknown one."""


def offsets(code=ErrorCode.none, *, version=7, count=1):
    module = load_payload_module(2, version, EntityType.response)
    partition = module.ListOffsetsPartitionResponse(partition_index=0, error_code=code, offset=5)
    topic = module.ListOffsetsTopicResponse(name="old", partitions=(partition,) * count)
    return module.ListOffsetsResponse(
        topics=(topic,), **fields_of(module.ListOffsetsResponse, throttle_time=milliseconds(0))
    )


def test_unknown_tagged_fields_of_a_message_are_skipped():
    """Tagged fields that a newer peer puts at the end of a message are skipped."""
    message = offsets()
    data = encoded(message)[:-1] + NEW_TAG
    with pytest.raises(KeyError):
        entity_reader(type(message))(data, 0)
    assert decoded(type(message), data) == decoded_of_broker(type(message), data) == (message, len(data))


def test_unknown_tagged_fields_of_a_part_are_skipped():
    """A partition's, before others follow."""
    message = offsets(count=2)
    part = encoded(message.topics[0].partitions[0])
    data = encoded(message).replace(part, part[:-1] + NEW_TAG, 1)
    assert decoded(type(message), data) == (message, len(data))


def test_known_tagged_fields_beside_unknown_ones_are_read():
    """Fetch has both a leader and, in newer versions, the addresses of nodes."""
    message = fetch_response(16, {uuid4(): {0: {"leader_epoch": 5, "error_code": 74}}})
    module = load_payload_module(1, 16, EntityType.response)
    leader = encoded(module.LeaderIdAndEpoch(leader_id=3, leader_epoch=5))
    known = uvarint(1) + uvarint(1) + uvarint(len(leader)) + leader
    data = encoded(message)
    assert known in data
    data = data.replace(known, uvarint(2) + known[1:] + NEW_TAG[1:], 1)
    assert decoded(type(message), data) == (message, len(data))


@pytest.mark.parametrize("version", [4, 7])
def test_unknown_error_code_keeps_its_number(version):
    """
    An unknown error code keeps its number in versions with and without tagged fields.

    It is written as it was read, and is no known code.
    """
    data = encoded(offsets(version=version)).replace(
        b"\x00\x00\x00\x00\x00\x00\xff", b"\x00\x00\x00\x00\x00\xc8\xff", 1
    )
    with pytest.raises(ValueError, match="200 is not a valid ErrorCode"):
        entity_reader(type(offsets(version=version)))(data, 0)
    message, size = decoded(type(offsets(version=version)), data)
    code = message.topics[0].partitions[0].error_code
    assert (size, code, code.name, code.retriable) == (len(data), 200, "unknown_error_200", False)
    assert code is error_code(200)
    assert code not in set(ErrorCode)
    assert encoded(message) == data


def test_tagged_field_that_is_longer_than_the_message_is_refused():
    """The field is refused, whatever size it announces."""
    data = encoded(offsets())[:-1] + uvarint(1) + uvarint(50) + uvarint(2**31) + b"new"
    with pytest.raises(SerialError):
        decoded(type(offsets()), data)


@pytest.mark.parametrize("count", [b"\x7f\xff\xff\xff", b"\x00\xff\xff\xff"])
def test_array_that_announces_more_than_the_message_has_is_refused(count):
    """Kio's own reader reserves memory for all entries, and ends the process if there is not enough."""
    data = b"\xff\xff\xff\xff" + count + b"\x00\x01t" + count
    with pytest.raises(SerialError, match="entries"):
        decoded(load_request_schema(2, 1), data)
    compact = b"\xff\xff\xff\xff\x7f"
    with pytest.raises(SerialError, match="entries"):
        decoded(load_request_schema(21, 2), uvarint(2) + b"\x02t" + compact + bytes(20))


@pytest.mark.parametrize(("version", "null"), [(1, b"\xff\xff\xff\xff"), (6, b"\x00")])
def test_null_array_is_refused_where_no_null_may_be(version, null):
    """A null array is refused as kio refuses it: a handler would meet it as None."""
    isolation = b"\x00" if version > 1 else b""
    with pytest.raises(SerialError, match="null"):
        decoded(load_request_schema(2, version), b"\xff\xff\xff\xff" + isolation + null + b"\x00")


@given(
    st.binary(max_size=300), st.sampled_from([(1, 16), (1, 4), (2, 7), (3, 12), (18, 4), (35, 4), (75, 0)])
)
def test_garbage_is_read_or_refused(data, api):
    """Garbage raises only the named exceptions."""
    for load in (load_request_schema, load_response_schema):
        try:
            decoded(load(*api), data)
        except UNREADABLE:
            continue


MESSAGES = [
    offsets(),
    offsets(version=4),
    fetch_request(17, {uuid4(): {0: {}, 5: {"fetch_offset": 7}}}, replica_id=4),
    fetch_request(4, {"t": {0: {}}}),
    fetch_response(12, {"t": {0: {"records": b"abc", "aborted_transactions": [(1, 2)]}}}),
    fetch_response(4, {"t": {0: {"records": b"abc", "aborted_transactions": None}}}),
    produce_response(
        10, {"t": {0: {"record_errors": [(0, "bad")], "error_message": "bad", "leader_epoch": 4}}}
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: f"{type(one).__name__}-{one.__version__}")
def test_message_is_read_as_kio_reads_it(message):
    """Field by field, with nothing unknown in it."""
    data = encoded(message)
    assert _by_field(type(message))(data, 0) == entity_reader(type(message))(data, 0)
    assert _by_field(type(message))(data, 0) == (message, len(data))


def test_every_message_of_this_package_has_a_reader():
    """Every kind of field of every API that the package sends, receives or offers."""
    for key in (0, 1, 2, 3, 8, 9, 10, 11, 18, 21, 22, 23, 32, 35, 44, 48, 49, 60, 75, 16, 90):
        for load in (load_request_schema, load_response_schema):
            for version in range(20):
                try:
                    schema = load(key, version)
                except Exception:  # noqa: BLE001 a version that does not exist
                    continue
                _by_field(schema)
                _by_field(schema.__header_schema__)
