"""How a trim and a user's deletion reach a Kafka broker: what is asked before, and what is never sent."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.scripted_broker import scripted_broker
from tests.support.connections import accepting
from tests.support.kafka_messages import (
    fields_of,
    milliseconds,
    read_request,
    response_frame,
    response_module,
)
from tieringd.broker.kafka import KafkaBroker, KafkaSettings
from tieringd.broker.kafka_deletion import KafkaRecordDeleter
from tieringd.errors import BrokerUnavailable, LeadershipChanged, TieringError
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.partition import Leadership, TopicIdPartition, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable

METADATA, API_VERSIONS, DELETE_RECORDS = 3, 18, 21
VERSIONS = {METADATA: 12, DELETE_RECORDS: 2, API_VERSIONS: 0}
TOPIC_ID = uuid.UUID(int=7)
TOPIC_ID_TEXT = "AAAAAAAAAAAAAAAAAAAABw"
NAME = TopicPartition("orders", 0)
LOG = LocalLog(LocalPartition(NAME, TOPIC_ID_TEXT, "/nowhere/orders-0", "/nowhere"), (), ())


class Peer:
    """A broker that leads `orders-0`, and a client of it."""

    def __init__(self, broker, deleter, *, port, leader_epochs, in_sync) -> None:
        self.client = broker
        self.deleter = deleter
        self.port = port
        self.topic_id = TOPIC_ID
        self.leader_epochs = list(leader_epochs)
        self._in_sync = in_sync
        self.asked: list[int] = []
        self.deleted_before: list[int] = []
        self.on_deletion: Callable[[], object] = lambda: None

    async def trim(self, *, leader_epoch=4, **options) -> int:
        """Trim under *leader_epoch*."""
        leadership = Leadership(TopicIdPartition("cluster", "orders", TOPIC_ID_TEXT, 0), leader_epoch)
        return await self.client.trim(leadership, LOG, before_offset=10, **options)

    async def answer(self, peer) -> None:
        """Answer each request as a broker does; the epoch is the next of those given, and then the last."""
        while True:
            head, frame, writer = await peer.next()
            self.asked.append(head.api_key)
            message = getattr(self, f"_answer_{head.api_key}")(frame)
            writer.write(response_frame(message, correlation_id=head.correlation_id))

    def _answer_18(self, _: bytes):
        module = response_module(API_VERSIONS, 0)
        keys = tuple(
            module.ApiVersion(api_key=key, min_version=0, max_version=version)
            for key, version in VERSIONS.items()
        )
        return module.ApiVersionsResponse(error_code=ErrorCode.none, api_keys=keys)

    def _answer_3(self, frame: bytes):
        module = response_module(METADATA, VERSIONS[METADATA])
        asks_for_topic = read_request(frame, METADATA, VERSIONS[METADATA]).topics
        topic = module.MetadataResponseTopic(
            **fields_of(
                module.MetadataResponseTopic,
                error_code=ErrorCode.none,
                name="orders",
                topic_id=self.topic_id,
                partitions=(self._partition(module),) if asks_for_topic else (),
            )
        )
        broker = module.MetadataResponseBroker(node_id=1, host="127.0.0.1", port=self.port, rack=None)
        return module.MetadataResponse(
            **fields_of(
                module.MetadataResponse,
                brokers=(broker,),
                cluster_id="cluster",
                controller_id=1,
                throttle_time=milliseconds(0),
                topics=(topic,) if asks_for_topic else (),
            )
        )

    def _partition(self, module):
        epochs = self.leader_epochs
        return module.MetadataResponsePartition(
            error_code=ErrorCode.none,
            partition_index=0,
            leader_id=1,
            leader_epoch=epochs.pop(0) if len(epochs) > 1 else epochs[0],
            replica_nodes=(1, 2),
            isr_nodes=self._in_sync,
            offline_replicas=(),
        )

    def _answer_21(self, frame: bytes):
        module = response_module(DELETE_RECORDS, VERSIONS[DELETE_RECORDS])
        asked = read_request(frame, DELETE_RECORDS, VERSIONS[DELETE_RECORDS])
        offset = asked.topics[0].partitions[0].offset
        self.deleted_before.append(offset)
        self.on_deletion()
        result = module.DeleteRecordsPartitionResult(
            partition_index=0, low_watermark=offset, error_code=ErrorCode.none
        )
        topic = module.DeleteRecordsTopicResult(name="orders", partitions=(result,))
        return module.DeleteRecordsResponse(throttle_time=milliseconds(0), topics=(topic,))


@pytest.fixture
def connect():
    @asynccontextmanager
    async def connected(*, leader_epochs=(4,), in_sync=(1, 2), effect_within_seconds=60.0):
        async with AsyncExitStack() as stack:
            peer = await stack.enter_async_context(scripted_broker())
            settings = KafkaSettings(
                (f"127.0.0.1:{peer.port}",), node_id=1, effect_within_seconds=effect_within_seconds
            )
            broker = KafkaBroker(settings)
            deleter = await stack.enter_async_context(KafkaRecordDeleter(settings))
            found = Peer(broker, deleter, port=peer.port, leader_epochs=leader_epochs, in_sync=in_sync)
            task = asyncio.create_task(found.answer(peer))
            try:
                yield found
            finally:
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled(), task.exception()
                await broker.close()

    return connected


async def test_broker_is_asked_for_the_leader_right_before_a_trim(connect):
    """The last question before DeleteRecords is for the leader epoch, and the same broker answers it."""
    async with connect() as peer:
        assert await peer.trim() == 10
        assert peer.asked[-2:] == [METADATA, DELETE_RECORDS]
        assert peer.deleted_before == [10]


@pytest.mark.parametrize("leader_epoch", [3, 5])
async def test_trim_of_another_leader_epoch_is_never_sent(connect, leader_epoch):
    """A broker that leads under another epoch gets no trim."""
    async with connect() as peer:
        with pytest.raises(LeadershipChanged, match=f"epoch 4 now, not {leader_epoch}"):
            await peer.trim(leader_epoch=leader_epoch)
        assert peer.deleted_before == []


async def test_trim_that_comes_too_long_after_the_question_is_never_sent(connect):
    """A process that was stopped in between asks again with the next observation."""
    async with connect(effect_within_seconds=0.0) as peer:
        with pytest.raises(
            BrokerUnavailable, match="DeleteRecords was not sent: the last check of the leadership was"
        ):
            await peer.trim()
        assert peer.asked[-1] == METADATA
        assert peer.deleted_before == []


async def test_trim_that_is_answered_late_under_another_epoch_has_failed(connect, monkeypatch):
    """The epoch under which the broker carried out a late trim is unknown, so the trim has failed."""
    loop = asyncio.get_running_loop()
    now = loop.time
    async with connect(leader_epochs=(4, 6), effect_within_seconds=5.0) as peer:
        # The loop has no setting for its clock, and the limit is one of seconds.
        peer.on_deletion = lambda: monkeypatch.setattr(loop, "time", lambda: now() + 6.0)
        with pytest.raises(LeadershipChanged, match="epoch 6 now, not 4"):
            await peer.trim()
        assert peer.deleted_before == [10]
        assert peer.asked[-2:] == [DELETE_RECORDS, METADATA]


async def test_trim_that_needs_every_replica_is_not_sent_while_one_lags(connect):
    """A replica that lacks records could be elected, and others be written in their place."""
    async with connect(in_sync=(1,)) as peer:
        with pytest.raises(BrokerUnavailable, match="a replica is not in sync"):
            await peer.trim(needs_every_replica=True)
        assert peer.deleted_before == []
        assert await peer.trim() == 10


async def test_users_deletion_that_comes_too_long_after_the_question_is_never_sent(connect):
    """The request goes by name, and the topic may have been created again since."""
    async with connect(effect_within_seconds=0.0) as peer:
        asked = await peer.deleter.leaders("orders")
        with pytest.raises(BrokerUnavailable, match="DeleteRecords was not sent"):
            await peer.deleter.delete_before(asked, 0, 10)
        assert peer.deleted_before == []


async def test_users_deletion_is_sent_though_the_first_bootstrap_address_never_answers(connect):
    """The time that a silent address takes does not count: the broker that answers is asked after it."""

    async def keep_silent(reader, writer):
        await reader.read()
        writer.close()

    async with connect() as peer, accepting(keep_silent) as silent_port:
        bootstrap = tuple(f"127.0.0.1:{port}" for port in (silent_port, peer.port))
        settings = KafkaSettings(bootstrap, node_id=1, request_timeout_seconds=1.0, effect_within_seconds=0.9)
        async with KafkaRecordDeleter(settings) as deleter:
            assert await deleter.delete_before(await deleter.leaders("orders"), 0, 10) == 10
        assert peer.deleted_before == [10]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"leader_epochs": [6]}, "led under leader epoch 6 now, not 4"),
        ({"topic_id": uuid.UUID(int=8)}, "orders was deleted and created again"),
    ],
)
async def test_users_deletion_that_is_answered_late_for_another_log_has_failed(
    connect, monkeypatch, change, fault
):
    """The log whose records the broker deleted is not known for certain, so the deletion has failed."""
    loop = asyncio.get_running_loop()
    now = loop.time
    async with connect(effect_within_seconds=5.0) as peer:
        asked = await peer.deleter.leaders("orders")

        def take_long() -> None:
            for name, value in change.items():
                setattr(peer, name, value)
            # The loop has no setting for its clock, and the limit is one of seconds.
            monkeypatch.setattr(loop, "time", lambda: now() + 6.0)

        peer.on_deletion = take_long
        with pytest.raises(TieringError, match=fault):
            await peer.deleter.delete_before(asked, 0, 10)
        assert peer.deleted_before == [10]
