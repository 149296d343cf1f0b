"""What a group has committed: never less than what its coordinator will show in a moment."""

from __future__ import annotations

import asyncio
import struct

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.scripted_broker import scripted_broker
from tests.support.kafka_messages import encoded, framed, milliseconds, response_module
from tieringd.broker.kafka_protocol import KafkaSettings
from tieringd.broker.kafka_target import TargetCluster, TargetTopic
from tieringd.formats.recovery_mark import RecoveryMark, encode_mark

APIS = {3: 12, 10: 3, 9: 7, 18: 0}
TOPIC = TargetTopic("t", "an-id", 1, {})
MARK = RecoveryMark(41, "an-id", "read_committed")


def versions(head) -> bytes:
    ranges = b"".join(struct.pack(">hhh", key, version, version) for key, version in APIS.items())
    return framed(struct.pack(">ihi", head.correlation_id, 0, len(APIS)), ranges)


def metadata(port):
    module = response_module(3, APIS[3])
    broker = module.MetadataResponseBroker(node_id=1, host="127.0.0.1", port=port, rack=None)
    return module.MetadataResponse(
        throttle_time=milliseconds(0), brokers=(broker,), cluster_id="c", controller_id=1, topics=()
    )


def coordinator(port):
    return response_module(10, APIS[10]).FindCoordinatorResponse(
        throttle_time=milliseconds(0),
        error_code=ErrorCode.none,
        error_message=None,
        node_id=1,
        host="127.0.0.1",
        port=port,
    )


def offsets(*, error=ErrorCode.none, partition_error=None, mark=None):
    """Return a response with the error of the whole, or with one partition."""
    module = response_module(9, APIS[9])
    partition = module.OffsetFetchResponsePartition(
        partition_index=0,
        committed_offset=-1 if mark is None else mark.next_offset,
        metadata="" if mark is None else encode_mark(mark),
        error_code=partition_error or ErrorCode.none,
    )
    topics = (module.OffsetFetchResponseTopic(name="t", partitions=(partition,)),)
    return module.OffsetFetchResponse(
        throttle_time=milliseconds(0), topics=() if error is not ErrorCode.none else topics, error_code=error
    )


async def asked(answers, *, settled):
    """Return the marks that are found with these answers, and what each request said of open transactions."""
    left, stable = list(answers), []
    async with scripted_broker() as peer:

        async def answer() -> None:
            while True:
                head, frame, writer = await peer.next()
                if head.api_key == 18:
                    writer.write(versions(head))
                    continue
                if head.api_key == 9:
                    # The last field but the empty tags.
                    stable.append(bool(frame[-2]))
                made = {3: metadata, 10: coordinator}.get(head.api_key)
                message = left.pop(0) if made is None else made(peer.port)
                writer.write(framed(struct.pack(">i", head.correlation_id), b"\x00", encoded(message)))

        answering = asyncio.create_task(answer())
        cluster = TargetCluster(KafkaSettings((f"127.0.0.1:{peer.port}",)), backoff_seconds=0.0)
        try:
            marks = await cluster.marks("g", TOPIC, settled)
        finally:
            answering.cancel()
            await cluster.__aexit__()
    return marks, stable


@pytest.mark.parametrize(
    "before",
    [
        offsets(error=ErrorCode.coordinator_load_in_progress),
        offsets(error=ErrorCode.not_coordinator),
        offsets(partition_error=ErrorCode.unstable_offset_commit),
    ],
    ids=["loads", "moved", "transaction"],
)
async def test_mark_that_is_not_shown_yet_is_waited_for(before):
    """
    A mark that the coordinator does not show yet is waited for.

    A recovery that took it for none would begin anew, and write its records twice.
    """
    marks, stable = await asked([before, offsets(mark=MARK)], settled={0})
    assert marks == {0: MARK}
    assert stable == [True, True]


async def test_first_look_does_not_wait_for_a_killed_attempts_transaction():
    """Only the writer that comes after it ends that transaction."""
    marks, stable = await asked([offsets()], settled=None)
    assert marks == {}
    assert stable == [False]
