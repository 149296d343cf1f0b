"""The daemon's own client of a broker that is newer than its library."""

from __future__ import annotations

import asyncio
import struct

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.scripted_broker import scripted_broker
from tests.support.kafka_messages import encoded, framed, milliseconds, response_module
from tieringd.broker.kafka import KafkaBroker, KafkaSettings
from tieringd.formats.kafka_wire.cursor import uvarint

NO_TAGS, NEW_TAG = b"\x00", uvarint(1) + uvarint(50) + uvarint(1) + b"x"
METADATA_VERSION = 12


def versions(head) -> bytes:
    """Offer ApiVersions and Metadata."""
    ranges = struct.pack(">ihhhhhh", 2, 18, 0, 0, 3, 7, METADATA_VERSION)
    return framed(struct.pack(">ih", head.correlation_id, 0), ranges)


def metadata(head, *, code: int, header_tags: bytes, tags: bytes) -> bytes:
    """Describe one partition, with this error code, and tagged fields in the header and at the end."""
    module = response_module(3, METADATA_VERSION)
    partition = module.MetadataResponsePartition(
        error_code=ErrorCode.none,
        partition_index=0,
        leader_id=1,
        leader_epoch=4,
        replica_nodes=(),
        isr_nodes=(),
        offline_replicas=(),
    )
    part = encoded(partition)
    topic = module.MetadataResponseTopic(
        error_code=ErrorCode.none, name="t", topic_id=None, is_internal=False, partitions=(partition,)
    )
    message = module.MetadataResponse(
        throttle_time=milliseconds(0), brokers=(), cluster_id="c", controller_id=1, topics=(topic,)
    )
    body = encoded(message).replace(part, struct.pack(">h", code) + part[2:])
    return framed(struct.pack(">i", head.correlation_id), header_tags, body[:-1], tags)


@pytest.mark.parametrize(
    ("code", "header_tags", "tags"),
    [(0, NO_TAGS, NO_TAGS), (0, NO_TAGS, NEW_TAG), (0, NEW_TAG, NO_TAGS), (200, NO_TAGS, NEW_TAG)],
    ids=["known", "tag", "header", "code"],
)
async def test_what_the_library_does_not_know_is_ignored(code, header_tags, tags):
    """The rest of the response is read as ever."""
    async with scripted_broker() as peer:
        broker = KafkaBroker(KafkaSettings((f"127.0.0.1:{peer.port}",), node_id=1))
        asking = asyncio.create_task(broker.topic_shape("t"))
        head, _, answers = await peer.next()
        answers.write(versions(head))
        head, _, answers = await peer.next()
        answers.write(metadata(head, code=code, header_tags=header_tags, tags=tags))
        shape = await asking
        await broker.close()
    assert shape is not None
    assert shape[1] == 1
