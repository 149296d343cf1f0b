"""What the broker's client remembers: no more than the brokers and topics that there are."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from kio.schema.errors import ErrorCode
from structlog.testing import capture_logs

from tests.fakes.scripted_broker import scripted_broker
from tests.support.kafka_messages import fields_of, milliseconds, response_frame, response_module
from tieringd.broker.kafka import KafkaBroker, metadata_request
from tieringd.broker.kafka_protocol import (
    METADATA,
    KafkaConnections,
    KafkaRequest,
    KafkaSettings,
)
from tieringd.errors import BrokerUnavailable
from tieringd.model.local_log import LocalPartition
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.scripted_broker import ScriptedBroker

API_VERSIONS, METADATA_VERSION = 18, 12
TOPIC_ID = uuid.UUID(int=7)


class Cluster:
    """One broker, and the error that it gives for the topic `orders`."""

    def __init__(self) -> None:
        self.error = ErrorCode.topic_authorization_failed

    async def answer(self, peer: ScriptedBroker) -> None:
        """Answer each request."""
        while True:
            head, _, writer = await peer.next()
            message = self._versions() if head.api_key == API_VERSIONS else self._metadata(peer.port)
            writer.write(response_frame(message, correlation_id=head.correlation_id))

    def _versions(self):
        module = response_module(API_VERSIONS, 0)
        key = module.ApiVersion(api_key=3, min_version=0, max_version=METADATA_VERSION)
        return module.ApiVersionsResponse(error_code=ErrorCode.none, api_keys=(key,))

    def _metadata(self, port: int):
        module = response_module(3, METADATA_VERSION)
        topic = module.MetadataResponseTopic(
            **fields_of(
                module.MetadataResponseTopic,
                error_code=self.error,
                name="orders",
                topic_id=TOPIC_ID,
                partitions=(),
            )
        )
        broker = module.MetadataResponseBroker(node_id=1, host="127.0.0.1", port=port, rack=None)
        return module.MetadataResponse(
            **fields_of(
                module.MetadataResponse,
                brokers=(broker,),
                cluster_id="cluster",
                controller_id=1,
                throttle_time=milliseconds(0),
                topics=(topic,),
            )
        )


@asynccontextmanager
async def answering(cluster: Cluster) -> AsyncIterator[ScriptedBroker]:
    async with scripted_broker() as peer:
        task = asyncio.create_task(cluster.answer(peer))
        try:
            yield peer
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_topic_that_was_visible_again_is_reported_again():
    """A warning is remembered only as long as it holds, and the topic is on this disk."""
    cluster = Cluster()
    orders, other = (LocalPartition(TopicPartition(one, 0), "", "/x", "/") for one in ("orders", "other"))
    async with answering(cluster) as peer:
        broker = KafkaBroker(KafkaSettings((f"127.0.0.1:{peer.port}",), node_id=1))
        try:
            with capture_logs() as events:
                for _ in range(2):
                    await broker.replicas([orders])
                assert len(events) == 1
                cluster.error = ErrorCode.none
                await broker.replicas([orders])
                cluster.error = ErrorCode.topic_authorization_failed
                await broker.replicas([orders])
                assert len(events) == 2
                cluster.error = ErrorCode.unknown_topic_or_partition
                await broker.replicas([other])
                cluster.error = ErrorCode.topic_authorization_failed
                await broker.replicas([orders])
            assert [one["topic"] for one in events] == ["orders"] * 3
        finally:
            await broker.close()


async def test_brokers_that_have_gone_are_forgotten():
    """The connections are those of brokers that answer, however many there were."""
    connections = KafkaConnections(KafkaSettings(("127.0.0.1:1",)))
    request = KafkaRequest(METADATA, metadata_request(()))
    for _ in range(5):
        async with answering(Cluster()) as peer:
            await asyncio.gather(*(connections.send(("127.0.0.1", peer.port), request) for _ in range(3)))
            assert peer.connections == 1, "calls at the same time share a connection"
        gone = ("127.0.0.1", peer.port)
        with suppress(BrokerUnavailable):
            await connections.send(gone, request)
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(answering(Cluster()))
        await connections.send(("127.0.0.1", peer.port), request)
        assert set(connections._open) == {("127.0.0.1", peer.port)}
        assert connections._opening == {}
        await connections.close()
