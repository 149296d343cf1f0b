"""Small messages and the heads of requests: ApiVersions capped, kio's messages read and written."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from tests.support.kafka_messages import (
    fields_of,
    followed_by,
    milliseconds,
    read_response,
    request_frame,
    request_module,
    response_frame,
    response_module,
)
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.messages import decode_request, decode_response, encode_response, made
from tieringd.formats.kafka_wire.request_header import (
    KNOWN_VERSIONS,
    RequestHead,
    cap_versions,
    request_body,
    unsupported,
)

SMALL = [(key, version) for key in (2, 18, 23, 35) for version in KNOWN_VERSIONS[key]]


def versions_frame(version, offered):
    module = response_module(18, version)
    response = module.ApiVersionsResponse(
        **fields_of(module.ApiVersionsResponse, throttle_time=milliseconds(0)),
        error_code=ErrorCode.none,
        api_keys=tuple(
            module.ApiVersion(api_key=key, min_version=low, max_version=high) for key, low, high in offered
        ),
    )
    return response_frame(response)


@pytest.mark.parametrize("version", range(5))
def test_only_versions_that_are_not_understood_are_lowered(version):
    """Newer versions of APIs that the gateway looks at go; everything else is offered as before."""
    frame = versions_frame(version, [(0, 0, 99), (1, 4, 18), (2, 1, 12), (3, 0, 99), (23, 2, 4), (68, 0, 1)])
    size = len(frame)
    cap_versions(memoryview(frame), version)
    offered = {each.api_key: each.max_version for each in read_response(frame, 18, version).api_keys}
    assert offered == {0: 13, 1: 18, 2: 11, 3: 99, 23: 4, 68: 1}
    assert len(frame) == size


@pytest.mark.parametrize("version", range(5))
def test_broker_of_today_is_not_changed(version):
    """The response is the broker's, byte for byte, if no version has to be lowered."""
    frame = versions_frame(version, [(key, 0, known.stop - 1) for key, known in KNOWN_VERSIONS.items()])
    before = bytes(frame)
    cap_versions(memoryview(frame), version)
    assert bytes(frame) == before


@pytest.mark.parametrize("version", [3, 4, 9])
def test_broker_that_does_not_know_the_version_is_understood(version):
    """Such a broker answers in version 0, whatever was asked."""
    frame = bytearray(unsupported(7))
    cap_versions(memoryview(frame), min(version, 4))
    response = read_response(frame, 18, 0)
    assert response.error_code == ErrorCode.unsupported_version
    (only,) = response.api_keys
    assert (only.api_key, only.min_version, only.max_version) == (18, 0, 4)


@given(st.integers(0, 4), st.binary(max_size=100))
def test_garbage_for_api_versions_is_read_or_refused(version, garbage):
    """Nothing but a violation comes of it."""
    frame = bytearray(len(garbage).to_bytes(4) + bytes(4) + garbage)
    with suppress(ProtocolViolation):
        cap_versions(memoryview(frame), version)


def list_offsets_request(version):
    module = request_module(2, version)
    partition = module.ListOffsetsPartition
    topic = module.ListOffsetsTopic(name="t", partitions=(partition(partition_index=3, timestamp=-2),))
    return module.ListOffsetsRequest(
        **fields_of(module.ListOffsetsRequest, isolation_level=1, timeout=milliseconds(5)),
        replica_id=-1,
        topics=(topic,),
    )


@pytest.mark.parametrize("version", KNOWN_VERSIONS[2])
@pytest.mark.parametrize("client_id", [None, "", "client"])
def test_request_is_read_as_it_was_written(version, client_id):
    """The header is passed in its own form, and the message is kio's."""
    request = list_offsets_request(version)
    frame = request_frame(request, client_id=client_id)
    head = RequestHead.read(memoryview(frame))
    assert decode_request(memoryview(frame), head) == request


@pytest.mark.parametrize("version", KNOWN_VERSIONS[2])
@pytest.mark.parametrize("rest", [bytes(3), b"xyz"])
def test_bytes_after_a_request_are_ignored(version, rest):
    """A broker does so (`test_kafka_broker`), and librdkafka sends some."""
    request = list_offsets_request(version)
    frame = followed_by(rest, request_frame(request))
    assert decode_request(memoryview(frame), RequestHead.read(memoryview(frame))) == request


def test_request_of_librdkafka_for_all_topics_is_read():
    """The count of its array is a null of one byte, with three zeros of the count's room at the end."""
    frame = memoryview(bytes.fromhex("00000019 0003000d 00000003 00077264 6b61666b 61 00 00 0000 00 000000"))
    request = decode_request(frame, RequestHead.read(frame))
    assert request.topics is None
    assert not request.allow_auto_topic_creation


@pytest.mark.parametrize("name", [b"\xff" * 30_000, b"\xff" + b"secret" * 5_000])
def test_error_about_a_message_does_not_repeat_it(name):
    """The error goes to the log, and clients choose the bytes of a message."""
    body = b"\x00\x03\x00\x00" + bytes(4) + b"\xff\xff" + b"\x00\x00\x00\x01" + len(name).to_bytes(2) + name
    frame = memoryview(len(body).to_bytes(4) + body)
    with pytest.raises(ProtocolViolation, match="of version 0 cannot be read") as error:
        decode_request(frame, RequestHead.read(frame))
    assert len(str(error.value)) < 400
    assert "secret" not in str(error.value)


def test_bytes_after_a_response_are_a_violation():
    """A broker sends none, so the message is another one."""
    response = response_module(17, 1).SaslHandshakeResponse(error_code=ErrorCode.none, mechanisms=())
    frame = followed_by(bytes(3), response_frame(response))
    with pytest.raises(ProtocolViolation, match="3 bytes too long"):
        decode_response(memoryview(frame), 17, 1)


@pytest.mark.parametrize("version", KNOWN_VERSIONS[2])
def test_response_is_written_as_kio_would(version):
    """A response is written with its header, and decodes to the same message."""
    module = response_module(2, version)
    partition = module.ListOffsetsPartitionResponse(partition_index=1, error_code=ErrorCode.none, offset=9)
    topic = module.ListOffsetsTopicResponse(name="t", partitions=(partition,))
    fields = fields_of(module.ListOffsetsResponse, throttle_time=milliseconds(0))
    response = module.ListOffsetsResponse(**fields, topics=(topic,))
    frame = encode_response(77, response)
    assert frame == bytes(response_frame(response, correlation_id=77))
    assert decode_response(memoryview(frame), 2, version) == response


@given(st.sampled_from(SMALL), st.binary(max_size=200))
def test_garbage_for_kio_is_read_or_refused(api, garbage):
    """Every error that kio raises for garbage becomes a protocol violation."""
    key, version = api
    request = (8 + len(garbage)).to_bytes(4) + key.to_bytes(2) + version.to_bytes(2) + bytes(4) + garbage
    response = (4 + len(garbage)).to_bytes(4) + bytes(4) + garbage
    head = RequestHead.read(memoryview(request))
    for read in (
        lambda: decode_request(memoryview(request), head),
        lambda: decode_response(memoryview(response), key, version),
    ):
        try:
            read()
        except ProtocolViolation:
            continue


@pytest.mark.parametrize("version", [1, 6])
def test_array_of_2_billion_entries_is_a_violation(version):
    """Kio believes a count only as far as there are bytes."""
    head = b"\x00\x02" + version.to_bytes(2) + bytes(4) + b"\xff\xff" + (b"\x00" if version >= 6 else b"")
    count = b"\xff\xff\xff\xff\x07" if version >= 6 else b"\x7f\xff\xff\xff"
    frame = head + b"\xff\xff\xff\xff" + (b"\x00" if version >= 2 else b"") + count
    frame = len(frame).to_bytes(4) + frame
    with pytest.raises(ProtocolViolation):
        decode_request(memoryview(frame), RequestHead.read(memoryview(frame)))


def test_header_with_tags_is_passed():
    """A client may put tagged fields into a flexible header; a long client id is no hindrance."""
    client_id = b"c" * 32_767
    body = b"\x00\x01\x00\x0c" + bytes(4) + len(client_id).to_bytes(2) + client_id + b"\x02\x00\x01z\x09\x00"
    frame = len(body).to_bytes(4) + body
    assert request_body(memoryview(frame), RequestHead.read(memoryview(frame))) == len(frame)


OTHERS = [(0, 13), (3, 0), (3, 13), (8, 10), (9, 10), (10, 6), (11, 9), (22, 6), (32, 4), (60, 2), (75, 0)]
"""APIs at which the gateway does not look, and an archive without a broker does."""


@pytest.mark.parametrize(("api_key", "version"), [(3, 0), (3, 8), (3, 9), (3, 12)])
def test_requests_of_other_apis_are_read_as_well(api_key, version):
    """A request of another API has the header of its version, which is flexible or not."""
    module = request_module(api_key, version)
    topics = (module.MetadataRequestTopic(name="orders", **({"topic_id": None} if version >= 10 else {})),)
    fields = fields_of(
        module.MetadataRequest,
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=True,
    )
    message = module.MetadataRequest(topics=topics, **fields)
    frame = memoryview(request_frame(message, client_id="c"))
    assert decode_request(frame, RequestHead.read(frame)) == message


@given(st.sampled_from(OTHERS), st.binary(max_size=200))
def test_garbage_in_a_request_of_another_api_is_read_or_refused(api, garbage):
    """Nothing but a violation comes of it."""
    api_key, version = api
    head = api_key.to_bytes(2) + version.to_bytes(2) + bytes(4)
    frame = memoryview((8 + len(garbage)).to_bytes(4) + head + garbage)
    with suppress(ProtocolViolation):
        decode_request(frame, RequestHead.read(frame))


def test_fields_that_a_version_lacks_are_left_out():
    """One list of fields is enough for all versions."""
    schemas = [request_module(60, version).DescribeClusterRequest for version in (0, 1)]
    first, second = (
        made(one, include_cluster_authorized_operations=True, endpoint_type=2) for one in schemas
    )
    assert first == schemas[0](include_cluster_authorized_operations=True)
    assert second.endpoint_type == 2
