"""What a broker's client keeps from round to round is what it would read anew from each answer."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from tests.fakes.scripted_broker import scripted_broker
from tests.support.examples import examples
from tests.support.kafka_messages import (
    fields_of,
    milliseconds,
    read_request,
    response_frame,
    response_module,
)
from tieringd.broker.kafka import KafkaBroker
from tieringd.broker.kafka_kept import KeptQuestion
from tieringd.broker.kafka_protocol import METADATA, KafkaSettings
from tieringd.errors import BrokerDenied, TieringError
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from tests.fakes.scripted_broker import ScriptedBroker

API_VERSIONS, METADATA_KEY, LIST_OFFSETS_KEY, DESCRIBE_CONFIGS_KEY = 18, 3, 2, 32
VERSIONS = {METADATA_KEY: 12, LIST_OFFSETS_KEY: 7, DESCRIBE_CONFIGS_KEY: 4}
TOPICS = tuple(f"topic{number}" for number in range(6))
PARTITIONS = 10
"""Of each topic: all together are enough for a question to be kept."""


class Cluster:
    """One broker, which leads all partitions. Any of the changes below may change its answers."""

    def __init__(self) -> None:
        self.versions = dict(VERSIONS)
        self.epochs = {TopicPartition(topic, number): 0 for topic in TOPICS for number in range(PARTITIONS)}
        self.ids = {topic: uuid.UUID(int=number + 1) for number, topic in enumerate(TOPICS)}
        self.ends = dict.fromkeys(self.epochs, 5)
        self.starts = dict.fromkeys(self.epochs, 0)
        self.followed: set[TopicPartition] = set()
        self.behind: set[TopicPartition] = set()
        self.errors: dict[TopicPartition, ErrorCode] = {}
        self.topic_errors: dict[str, ErrorCode] = {}
        self.retention_ms = dict.fromkeys(TOPICS, "1000")
        self.asked: list[int] = []

    def change(self, what: str, number: int) -> None:
        """Change what *what* names, of one partition or topic."""
        name = list(self.epochs)[number % len(self.epochs)]
        if what == "epoch":
            self.epochs[name] += 1
        elif what == "append":
            self.ends[name] += 1
        elif what == "trim":
            self.starts[name] = self.ends[name]
        elif what == "follow":
            self.followed ^= {name}
        elif what == "lag":
            self.behind ^= {name}
        elif what == "refuse":
            self.errors = {} if name in self.errors else {name: ErrorCode.not_leader_or_follower}
        elif what == "hide":
            shown = name.topic in self.topic_errors
            self.topic_errors = {} if shown else {name.topic: ErrorCode.topic_authorization_failed}
        elif what == "recreate":
            self.ids[name.topic] = uuid.uuid4()
        elif what == "configure":
            self.retention_ms[name.topic] += "0"
        else:
            assert what == "upgrade"
            self.versions = {key: version - number % 2 for key, version in VERSIONS.items()}
            self.versions[DESCRIBE_CONFIGS_KEY] = VERSIONS[DESCRIBE_CONFIGS_KEY]

    async def answer(self, peer: ScriptedBroker) -> None:
        """Answer each request."""
        while True:
            head, frame, writer = await peer.next()
            self.asked.append(head.api_key)
            if head.api_key == API_VERSIONS:
                message = self._api_versions()
            else:
                request = read_request(frame, head.api_key, head.version)
                answers = {
                    METADATA_KEY: self._metadata,
                    LIST_OFFSETS_KEY: self._offsets,
                    DESCRIBE_CONFIGS_KEY: self._configs,
                }
                message = answers[head.api_key](peer.port, request)
            writer.write(response_frame(message, correlation_id=head.correlation_id))

    def _api_versions(self):
        module = response_module(API_VERSIONS, 0)
        keys = tuple(
            module.ApiVersion(api_key=key, min_version=0, max_version=version)
            for key, version in self.versions.items()
        )
        return module.ApiVersionsResponse(error_code=ErrorCode.none, api_keys=keys)

    def _metadata(self, port, request):
        module = response_module(METADATA_KEY, request.__version__)
        topics = [
            module.MetadataResponseTopic(
                **fields_of(
                    module.MetadataResponseTopic,
                    error_code=self.topic_errors.get(one.name, ErrorCode.none),
                    name=one.name,
                    topic_id=self.ids[one.name],
                    partitions=tuple(
                        module.MetadataResponsePartition(
                            error_code=ErrorCode.none,
                            partition_index=name.partition,
                            leader_id=2 if name in self.followed else 1,
                            leader_epoch=epoch,
                            replica_nodes=(1, 2),
                            isr_nodes=(1,) if name in self.behind else (1, 2),
                            offline_replicas=(),
                        )
                        for name, epoch in self.epochs.items()
                        if name.topic == one.name and one.name not in self.topic_errors
                    ),
                )
            )
            for one in request.topics
        ]
        broker = module.MetadataResponseBroker(node_id=1, host="127.0.0.1", port=port, rack=None)
        return module.MetadataResponse(
            **fields_of(
                module.MetadataResponse,
                brokers=(broker,),
                cluster_id="cluster",
                controller_id=1,
                throttle_time=milliseconds(0),
                topics=tuple(topics),
            )
        )

    def _offsets(self, _port, request):
        module = response_module(LIST_OFFSETS_KEY, request.__version__)
        earliest = -2

        def result(topic, asked):
            name = TopicPartition(topic, asked.partition_index)
            error = self.errors.get(name, ErrorCode.none)
            if asked.current_leader_epoch < self.epochs[name]:
                error = ErrorCode.fenced_leader_epoch
            offset = (self.starts if asked.timestamp == earliest else self.ends)[name]
            return module.ListOffsetsPartitionResponse(
                **fields_of(
                    module.ListOffsetsPartitionResponse,
                    partition_index=name.partition,
                    error_code=error,
                    offset=offset if error is ErrorCode.none else -1,
                )
            )

        topics = tuple(
            module.ListOffsetsTopicResponse(
                name=topic.name, partitions=tuple(result(topic.name, one) for one in topic.partitions)
            )
            for topic in request.topics
        )
        return module.ListOffsetsResponse(throttle_time=milliseconds(0), topics=topics)

    def _configs(self, _port, request):
        module = response_module(DESCRIBE_CONFIGS_KEY, request.__version__)
        results = tuple(
            module.DescribeConfigsResult(
                error_code=ErrorCode.none,
                error_message=None,
                resource_type=2,
                resource_name=one.resource_name,
                configs=(
                    module.DescribeConfigsResourceResult(
                        **fields_of(
                            module.DescribeConfigsResourceResult,
                            name="retention.ms",
                            value=self.retention_ms[one.resource_name],
                            read_only=False,
                            config_source=1,
                            is_sensitive=False,
                            synonyms=(),
                            documentation=None,
                        )
                    ),
                ),
            )
            for one in request.resources
        )
        return module.DescribeConfigsResponse(throttle_time=milliseconds(0), results=results)


@asynccontextmanager
async def answering(cluster: Cluster):
    async with scripted_broker() as peer:
        task = asyncio.create_task(cluster.answer(peer))
        try:
            yield peer
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()  # The answer's own mistake, which the client only sees as a lost connection.


def new_broker(peer: ScriptedBroker) -> KafkaBroker:
    return KafkaBroker(KafkaSettings((f"127.0.0.1:{peer.port}",), node_id=1, has_topic_ids_on_disk=False))


def local_logs(cluster: Cluster) -> tuple[LocalLog, ...]:
    return tuple(
        LocalLog(LocalPartition(name, "", f"/logs/{name}", "/logs"), segments=(), epochs=())
        for name in cluster.epochs
    )


async def round_of(broker: KafkaBroker, logs: tuple[LocalLog, ...], found: tuple[LocalPartition, ...]):
    """Return what a round learns from the broker; errors as their text."""
    view = await broker.replicas(found)
    led = {name: one.leader_epoch for name, one in view.replicas.items() if one.is_leader}
    asked = [log for log in logs if log.partition.topic_partition in led]
    bounds = await broker.log_bounds(asked, leader_epochs=led)
    return (
        view,
        {name: str(one) if isinstance(one, TieringError) else one for name, one in bounds.items()},
        dict(await broker.topic_configs(TOPICS)),
        dict(await broker.topic_ids(TOPICS)),
    )


CHANGES = (
    *("epoch", "append", "trim", "follow", "lag", "refuse", "hide", "recreate", "configure", "upgrade"),
)
ROUNDS = st.lists(
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 59)), max_size=3), min_size=1, max_size=6
)


@given(rounds=ROUNDS)
@example(rounds=[[("epoch", 3)], [("append", 3)], [("trim", 3)], [("refuse", 3)], [("refuse", 3)]])
@example(rounds=[[("hide", 3)], [], [("hide", 3)], [("recreate", 3)], [("configure", 3)]])
@example(rounds=[[("upgrade", 1)], [("append", 1)], [("upgrade", 0)], [("follow", 1), ("lag", 2)]])
@settings(max_examples=examples(40), deadline=None)
def test_client_that_remembers_answers_as_a_new_one(rounds):
    """What was kept from earlier rounds is what a new client reads, after any changes of the cluster."""

    async def run() -> None:
        cluster = Cluster()
        logs = local_logs(cluster)
        found = tuple(one.partition for one in logs)
        async with answering(cluster) as peer:
            remembering = new_broker(peer)
            try:
                await round_of(remembering, logs, found)
                for changes in rounds:
                    for what, number in changes:
                        cluster.change(what, number)
                    if any(what == "upgrade" for what, _ in changes):
                        # A broker of another version comes with other connections.
                        await remembering.close()
                    new = new_broker(peer)
                    try:
                        assert await round_of(remembering, logs, found) == await round_of(new, logs, found)
                    finally:
                        await new.close()
            finally:
                await remembering.close()

    asyncio.run(run())


async def test_round_that_learns_nothing_new_returns_the_same_objects_and_asks_all_the_same():
    """What follows from an answer need not be done again; the broker is asked in each round."""
    cluster = Cluster()
    logs = local_logs(cluster)
    found = tuple(one.partition for one in logs)
    epochs = {log.partition.topic_partition: 0 for log in logs}
    async with answering(cluster) as peer:
        broker = new_broker(peer)
        try:
            view, bounds = await broker.replicas(found), await broker.log_bounds(logs, leader_epochs=epochs)
            cluster.asked.clear()
            assert await broker.replicas(found) is view
            assert await broker.log_bounds(logs, leader_epochs=dict(epochs)) is bounds
            assert cluster.asked == [METADATA_KEY, *(3 * [LIST_OFFSETS_KEY])]
            few = logs[:2]
            assert await broker.log_bounds(few, leader_epochs=epochs) == {
                log.partition.topic_partition: bounds[log.partition.topic_partition] for log in few
            }
            assert await broker.log_bounds(logs, leader_epochs=epochs) is bounds, "a few take no place"
        finally:
            await broker.close()


async def test_topic_that_this_user_may_not_see_is_in_the_view():
    """One that the cluster does not have, as a deleted one, is not."""
    cluster = Cluster()
    found = tuple(one.partition for one in local_logs(cluster))
    cluster.topic_errors = {
        TOPICS[0]: ErrorCode.topic_authorization_failed,
        TOPICS[1]: ErrorCode.unknown_topic_or_partition,
    }
    async with answering(cluster) as peer:
        broker = new_broker(peer)
        try:
            view = await broker.replicas(found)
        finally:
            await broker.close()
    assert view.refused == {TOPICS[0]}
    assert {name.topic for name in view.replicas} == set(TOPICS[2:])


def test_answer_is_read_once_for_each_version_and_content():
    """An answer that cannot be used is not kept, and neither is what another version of the message says."""
    read: list[bytes] = []

    def decode_of(data: bytes):
        def decode() -> bytes:
            read.append(data)
            return data

        return decode

    def value_of(data: bytes) -> list[bytes]:
        if data == b"denied":
            raise BrokerDenied("not yours", hint="none")
        return [data]

    question = KeptQuestion(METADATA, lambda _module: None, value_of)
    first = question.value(1, b"a", decode_of(b"a"))
    assert question.value(1, b"a", decode_of(b"a")) is first
    assert read == [b"a"]
    assert question.value(2, b"a", decode_of(b"a")) is not first
    assert question.value(2, b"b", decode_of(b"b")) == [b"b"]
    for _ in range(2):
        with pytest.raises(BrokerDenied):
            question.value(2, b"denied", decode_of(b"denied"))
    assert read == [b"a", b"a", b"b", b"denied", b"denied"]


def test_request_is_built_once_for_each_version():
    """The bytes of a request follow from the question and the version alone."""
    built: list[int] = []
    question = KeptQuestion(METADATA, lambda _module: None, lambda _response: None)

    def body(version: int) -> bytes:
        return question.body(version, lambda: built.append(version) or bytes([version]))

    assert [body(1), body(1), body(2), body(2), body(1)] == [b"\1", b"\1", b"\2", b"\2", b"\1"]
    assert built == [1, 2, 1]
