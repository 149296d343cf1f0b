"""Requests of many entries: other clients have their turns beside them, and repetitions cost nothing."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from tests.support.archive_endpoints import (
    CALLS_IN_A_TURN,
    archive_topic,
    asking,
    most_calls_in_a_turn,
    running_endpoint,
)
from tests.support.group_endpoints import group_endpoint
from tests.support.kafka_messages import (
    fetch_request,
    fields_of,
    milliseconds,
    request_frame,
    request_module,
    topic_fields,
)
from tests.support.raw_kafka import connected
from tieringd.endpoint.endpoint_settings import ApiKey

COUNT = 4_000
NAMES = tuple(f"t{number}" for number in range(COUNT))


def made(api, version, name, /, **values):
    """Return an entity of a request with those of *values* that its version has."""
    schema = getattr(request_module(api, version), name)
    return schema(**fields_of(schema, **values))


def metadata_of_unknown_topics():
    topics = tuple(made(ApiKey.METADATA, 9, "MetadataRequestTopic", name=one) for one in NAMES)
    return made(
        ApiKey.METADATA,
        9,
        "MetadataRequest",
        topics=topics,
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=True,
    )


def coordinators_of_groups():
    return made(ApiKey.FIND_COORDINATOR, 4, "FindCoordinatorRequest", key_type=0, coordinator_keys=NAMES)


def configs_of(names=NAMES):
    resources = tuple(
        made(
            ApiKey.DESCRIBE_CONFIGS,
            4,
            "DescribeConfigsResource",
            resource_type=2,
            resource_name=one,
            configuration_keys=None,
        )
        for one in names
    )
    return made(
        ApiKey.DESCRIBE_CONFIGS,
        4,
        "DescribeConfigsRequest",
        resources=resources,
        include_synonyms=False,
        include_documentation=False,
    )


def partitions_of_unknown_topics():
    topics = tuple(made(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, "TopicRequest", name=one) for one in NAMES)
    return made(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        0,
        "DescribeTopicPartitionsRequest",
        topics=topics,
        response_partition_limit=2000,
        cursor=None,
    )


def log_dirs_of(topic="orders", numbers=tuple(range(COUNT))):
    asked = made(ApiKey.DESCRIBE_LOG_DIRS, 4, "DescribableLogDirTopic", topic=topic, partitions=numbers)
    return made(ApiKey.DESCRIBE_LOG_DIRS, 4, "DescribeLogDirsRequest", topics=(asked,))


def members_that_leave():
    members = tuple(
        made(ApiKey.LEAVE_GROUP, 5, "MemberIdentity", member_id=one, group_instance_id=None, reason=None)
        for one in NAMES
    )
    return made(ApiKey.LEAVE_GROUP, 5, "LeaveGroupRequest", group_id="g", members=members)


def member_of(protocols):
    return made(
        ApiKey.JOIN_GROUP,
        9,
        "JoinGroupRequest",
        group_id="g",
        session_timeout=milliseconds(10_000),
        rebalance_timeout=milliseconds(10_000),
        member_id="",
        group_instance_id="x",
        protocol_type="consumer",
        protocols=tuple(
            made(ApiKey.JOIN_GROUP, 9, "JoinGroupRequestProtocol", name=str(one), metadata=b"")
            for one in range(protocols)
        ),
        reason=None,
    )


def member_of_many_protocols():
    return member_of(COUNT)


def groups_to_describe(names=("g",) * COUNT):
    return made(
        ApiKey.DESCRIBE_GROUPS, 5, "DescribeGroupsRequest", groups=names, include_authorized_operations=True
    )


def newer_groups_to_describe():
    return made(
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        0,
        "ConsumerGroupDescribeRequest",
        group_ids=("g",) * COUNT,
        include_authorized_operations=True,
    )


def groups_to_delete():
    return made(ApiKey.DELETE_GROUPS, 2, "DeleteGroupsRequest", groups_names=("g",) * COUNT)


def offsets_to_delete():
    one = made(ApiKey.OFFSET_DELETE, 0, "OffsetDeleteRequestPartition", partition_index=0)
    topics = tuple(
        made(ApiKey.OFFSET_DELETE, 0, "OffsetDeleteRequestTopic", name=name, partitions=(one,) * 2)
        for name in NAMES
    )
    return made(ApiKey.OFFSET_DELETE, 0, "OffsetDeleteRequest", group_id="g", topics=topics)


def heartbeat_of_many_topics():
    return made(
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        1,
        "ConsumerGroupHeartbeatRequest",
        group_id="h",
        member_id="a" * 22,
        member_epoch=0,
        instance_id=None,
        rack_id=None,
        rebalance_timeout=milliseconds(10_000),
        subscribed_topic_names=("t",) * COUNT,
        subscribed_topic_regex=None,
        server_assignor=None,
        topic_partitions=(),
    )


def offsets_of_groups():
    group = made(ApiKey.OFFSET_FETCH, 8, "OffsetFetchRequestGroup", group_id="g", topics=())
    return made(ApiKey.OFFSET_FETCH, 8, "OffsetFetchRequest", groups=(group,) * COUNT, require_stable=False)


def offsets_of_unknown_topics():
    asked = made(
        ApiKey.LIST_OFFSETS,
        7,
        "ListOffsetsPartition",
        partition_index=0,
        current_leader_epoch=-1,
        timestamp=-1,
    )
    topics = tuple(
        made(ApiKey.LIST_OFFSETS, 7, "ListOffsetsTopic", name=one, partitions=(asked,)) for one in NAMES
    )
    return made(ApiKey.LIST_OFFSETS, 7, "ListOffsetsRequest", replica_id=-1, isolation_level=0, topics=topics)


def epochs_of_unknown_topics():
    key = ApiKey.OFFSET_FOR_LEADER_EPOCH
    asked = made(key, 4, "OffsetForLeaderPartition", partition=0, current_leader_epoch=-1, leader_epoch=1)
    topics = tuple(made(key, 4, "OffsetForLeaderTopic", topic=one, partitions=(asked,)) for one in NAMES)
    return made(key, 4, "OffsetForLeaderEpochRequest", replica_id=-1, topics=topics)


def fetch_of_unknown_topics():
    wanted = {one: {0: {"fetch_offset": 0}} for one in NAMES}
    return fetch_request(12, wanted, max_wait=milliseconds(0), max_bytes=1 << 20, isolation_level=0)


def commit_of_unknown_topics(version=8):
    topics = tuple(
        made(ApiKey.OFFSET_COMMIT, version, "OffsetCommitRequestTopic", name=one, partitions=())
        for one in NAMES
    )
    return made(
        ApiKey.OFFSET_COMMIT,
        version,
        "OffsetCommitRequest",
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        topics=topics,
    )


def produce_to_many_topics():
    part = made(ApiKey.PRODUCE, 9, "PartitionProduceData", index=0, records=None)
    schema = request_module(ApiKey.PRODUCE, 9).TopicProduceData
    topics = tuple(schema(**topic_fields(schema, one), partition_data=(part,)) for one in NAMES)
    return made(
        ApiKey.PRODUCE,
        9,
        "ProduceRequest",
        transactional_id=None,
        acks=1,
        timeout=milliseconds(1000),
        topic_data=topics,
    )


REQUESTS = (
    fetch_of_unknown_topics,
    metadata_of_unknown_topics,
    configs_of,
    log_dirs_of,
    partitions_of_unknown_topics,
    offsets_of_unknown_topics,
    epochs_of_unknown_topics,
    produce_to_many_topics,
    coordinators_of_groups,
    member_of_many_protocols,
    commit_of_unknown_topics,
)
OF_GROUPS = (
    members_that_leave,
    groups_to_describe,
    newer_groups_to_describe,
    groups_to_delete,
    offsets_to_delete,
    heartbeat_of_many_topics,
)


async def most_calls(endpoint, message):
    """Return how many functions were called at most in one turn until *message* is answered."""
    async with connected(endpoint.server.port) as client:
        client.writer.write(request_frame(message, correlation_id=1))
        return await most_calls_in_a_turn(asyncio.create_task(client.reader.readexactly(4)))


@pytest.mark.parametrize(
    "request_of", [*REQUESTS, *OF_GROUPS, offsets_of_groups], ids=lambda one: one.__name__
)
async def test_request_of_many_entries_does_not_stop_the_loop(writer, archive, tmp_path, request_of):
    """Other clients have their turns while an endpoint with groups answers."""
    writer.closed_segment()
    await archive_topic(writer, archive, partitions=COUNT)
    async with group_endpoint(archive, tmp_path) as endpoint:
        assert await most_calls(endpoint, request_of()) < CALLS_IN_A_TURN


@pytest.mark.parametrize("request_of", [*REQUESTS, offsets_of_groups], ids=lambda one: one.__name__)
async def test_request_of_many_entries_does_not_stop_the_loop_without_groups(
    writer, archive, tmp_path, request_of
):
    """Other clients have their turns while an endpoint without groups answers or refuses."""
    writer.closed_segment()
    await archive_topic(writer, archive, partitions=COUNT)
    async with running_endpoint(archive, tmp_path / "state") as endpoint:
        assert await most_calls(endpoint, request_of()) < CALLS_IN_A_TURN


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (groups_to_describe(("g", "g", "h", "g")), lambda answer: [one.group_id for one in answer.groups]),
        (
            configs_of(("orders", "orders", "none", "orders")),
            lambda answer: [one.resource_name for one in answer.results],
        ),
        (
            log_dirs_of(numbers=(0, 0, 1, 0)),
            lambda answer: [one.partition_index for one in answer.results[0].topics[0].partitions],
        ),
    ],
    ids=["groups", "configs", "log directories"],
)
async def test_entry_that_is_named_again_is_answered_once(  # noqa: PLR0917 - fixtures
    writer, archive, store, tmp_path, message, parts
):
    """The answers have the order of the request, and the store is asked once for each."""
    writer.closed_segment()
    await archive_topic(writer, archive, partitions=2)
    async with group_endpoint(archive, tmp_path) as endpoint, connected(endpoint.server.port) as client:
        store.requests.clear()
        found = parts(await client.ask(message))
        assert found == list(dict.fromkeys(found))
        assert len(found) == 2
        of_entries = [key for kind, key in store.requests if kind == "get"]
        assert max(map(of_entries.count, of_entries), default=0) <= 1


async def test_topic_that_is_named_again_is_described_once(writer, archive, tmp_path):
    """A small request would have an answer with all partitions of a large topic for each name."""
    await archive_topic(writer, archive, partitions=3)
    async with asking(archive, tmp_path / "state") as client:
        message = made(
            ApiKey.METADATA,
            9,
            "MetadataRequest",
            topics=(made(ApiKey.METADATA, 9, "MetadataRequestTopic", name="orders"),) * 3,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        (topic,) = (await client.ask(message)).topics
        assert len(topic.partitions) == 3


@pytest.mark.parametrize(("count", "error"), [(64, ErrorCode.none), (65, ErrorCode.invalid_request)])
async def test_member_has_no_more_protocols_than_the_limit(writer, archive, tmp_path, count, error):
    """A member of too many is refused before its group is read."""
    await archive_topic(writer, archive)
    async with group_endpoint(archive, tmp_path) as endpoint, connected(endpoint.server.port) as client:
        assert (await client.ask(member_of(count))).error_code is error
