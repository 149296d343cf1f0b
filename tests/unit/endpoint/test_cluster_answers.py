"""What clients learn of the cluster: its APIs, its one node, its topics and their leader epochs."""

from __future__ import annotations

import asyncio
import base64
import struct
from uuid import UUID

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient
from kio.schema.errors import ErrorCode

from tests.fakes.log_writer import LogWriter
from tests.support.archive_endpoints import (
    CALLS_IN_A_TURN,
    METADATA,
    archive_topic,
    asking,
    metadata,
    most_calls_in_a_turn,
    running_endpoint,
    topic_uuid,
)
from tests.support.kafka_messages import fields_of, framed, request_module
from tests.support.raw_kafka import connected
from tieringd.endpoint.endpoint_settings import ADVERTISED
from tieringd.errors import StorageDenied, StorageUnavailable
from tieringd.formats.kafka_wire.cursor import uvarint
from tieringd.formats.object_keys import TopicKey

API_VERSIONS, DESCRIBE_CLUSTER, DESCRIBE_TOPIC_PARTITIONS = 18, 60, 75
OTHER_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


def api_versions_request(version):
    schema = request_module(API_VERSIONS, version).ApiVersionsRequest
    return schema(**fields_of(schema, client_software_name="t", client_software_version="1"))


def describe_request(*names, limit=2000, cursor=None):
    module = request_module(DESCRIBE_TOPIC_PARTITIONS, 0)
    return module.DescribeTopicPartitionsRequest(
        topics=tuple(module.TopicRequest(name=name) for name in names),
        response_partition_limit=limit,
        cursor=None if cursor is None else module.Cursor(topic_name=cursor[0], partition_index=cursor[1]),
    )


@pytest.mark.parametrize("version", range(5))
async def test_what_is_answered_is_offered(archive, tmp_path, version):
    """Nothing else is: what changes a cluster is not known here."""
    async with asking(archive, tmp_path / "state") as client:
        answer = await client.ask(api_versions_request(version))
    offered = {one.api_key: range(one.min_version, one.max_version + 1) for one in answer.api_keys}
    assert answer.error_code == ErrorCode.none
    assert offered == ADVERTISED
    assert not offered.keys() & {19, 20, 21, 33, 37, 44}


async def test_unknown_version_of_api_versions_is_answered_in_version_0(archive, tmp_path):
    """The answer has the versions that there are, so that the client can ask again."""
    async with asking(archive, tmp_path / "state") as client:
        client.writer.write(b"\x00\x00\x00\x0a\x00\x12\x00\x63\x00\x00\x00\x07\xff\xff")
        frame = await client.frame()
        assert (
            frame[4:] == b"\x00\x00\x00\x07" + b"\x00\x23" + b"\x00\x00\x00\x01" + b"\x00\x12\x00\x00\x00\x04"
        )
        assert (await client.ask(api_versions_request(4))).error_code == ErrorCode.none


@pytest.mark.parametrize("version", range(14))
async def test_metadata_names_one_node_and_the_topics(archive, tmp_path, version):
    """The endpoint leads every partition under the epoch of its manifest, in every version."""
    for name in ("audit", "orders"):
        writer = LogWriter(tmp_path, name)
        writer.begin_epoch(0)
        writer.closed_segment()
        await archive_topic(writer, archive, partitions=2)
    async with running_endpoint(archive, tmp_path / "state") as endpoint:
        port = endpoint.server.port
        async with connected(port) as client:
            named = await metadata(client, "orders", "none", version=version)
            every = await metadata(client, everything=True, version=version)
    (node,) = named.brokers
    assert (node.node_id, node.host, node.port) == (0, "127.0.0.1", port)
    if version >= 1:
        assert named.controller_id == 0
    if version >= 2:
        assert named.cluster_id == "cluster"
    orders, none = named.topics
    assert (orders.error_code, none.error_code) == (ErrorCode.none, ErrorCode.unknown_topic_or_partition)
    assert [one.partition_index for one in orders.partitions] == [0, 1]
    assert {one.leader_id for one in orders.partitions} == {0}
    if version >= 7:
        assert [one.leader_epoch for one in orders.partitions] == [0, -1]
    if version >= 10:
        assert orders.topic_id == topic_uuid(writer)
    assert [one.name for one in every.topics] == ["audit", "orders"]


@pytest.mark.parametrize("everything", [False, True])
async def test_leader_epoch_is_that_of_a_manifest_of_now(archive, tmp_path, everything):
    """Clients ignore what is told under an older epoch than they know, so they would stay at a dead node."""
    writer = LogWriter(tmp_path)
    writer.closed_segment()
    await archive_topic(writer, archive, partitions=2)
    interval = {"cloud_storage_readreplica_manifest_sync_timeout_ms": 1}
    async with asking(archive, tmp_path / "state", **interval) as client:
        (topic,) = (await metadata(client, "orders")).topics
        assert [one.leader_epoch for one in topic.partitions] == [0, -1]
        writer.begin_epoch(6)
        writer.closed_segment()
        await archive_topic(writer, archive)
        await asyncio.sleep(0.002)
        asked = () if everything else ("orders",)
        (topic,) = (await metadata(client, *asked, everything=everything)).topics
    assert [one.leader_epoch for one in topic.partitions] == [6, -1]


async def test_librdkafka_lists_all_topics(archive, tmp_path):
    """The request of librdkafka for all topics has three bytes after its fields."""
    for name in ("audit", "orders"):
        writer = LogWriter(tmp_path, name)
        writer.closed_segment()
        await archive_topic(writer, archive)
    async with running_endpoint(archive, tmp_path / "state") as endpoint:
        settings = {"bootstrap.servers": f"127.0.0.1:{endpoint.server.port}"}
        for client in (AdminClient(settings), Consumer({**settings, "group.id": "none"})):
            found = await asyncio.to_thread(client.list_topics, timeout=120)
            assert found.topics.keys() == {"audit", "orders"}
        await asyncio.to_thread(client.close)
        assert endpoint.server.counters.broken_connections == 0


async def test_answer_of_all_topics_does_not_stop_the_loop(archive, tmp_path):
    """Other clients have their turns while many topics, and one of many partitions, are described."""
    counts = {f"topic-{number}": 1 for number in range(2000)} | {"large": 10_000}
    for number, (name, count) in enumerate(counts.items()):
        topic_id = base64.urlsafe_b64encode(number.to_bytes(16)).decode().rstrip("=")
        await archive.manifests.ensure_topic(TopicKey("kafka", name, topic_id), partition_count=count)
    every_topic = framed(struct.pack(">hhih", METADATA, 12, 1, -1), b"\0", uvarint(0), b"\0\0\0")
    async with (
        running_endpoint(archive, tmp_path / "state") as endpoint,
        connected(endpoint.server.port) as one,
    ):
        assert len((await metadata(one, everything=True)).topics) == len(counts)
        one.writer.write(every_topic)
        size = asyncio.create_task(one.reader.readexactly(4))
        assert await most_calls_in_a_turn(size) < CALLS_IN_A_TURN
        assert int.from_bytes(size.result()) > sum(counts.values()) * 20


async def test_metadata_by_id_finds_the_topic(writer, archive, tmp_path):
    """A client that knows a topic's id finds the topic, and an unknown id is an error of its own."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with asking(archive, tmp_path / "state") as client:
        known, unknown = (await metadata(client, topic_uuid(writer), UUID(int=9))).topics
    assert (known.name, known.error_code) == ("orders", ErrorCode.none)
    assert (unknown.topic_id, unknown.error_code) == (UUID(int=9), ErrorCode.unknown_topic_id)


@pytest.mark.parametrize("version", [10, 11])
async def test_id_that_is_unknown_has_an_empty_name_where_there_is_no_null(archive, tmp_path, version):
    """These versions have ids, and no null in the place of a name."""
    async with asking(archive, tmp_path / "state") as client:
        (unknown,) = (await metadata(client, UUID(int=9), version=version)).topics
    assert (unknown.name, unknown.error_code) == ("", ErrorCode.unknown_topic_id)


async def test_topic_without_an_id_gets_one_that_stays(archive, tmp_path):
    """Brokers before 2.8 gave none, and newer clients fetch by id."""
    writer = LogWriter(tmp_path, "old", topic_id="A" * 22)
    writer.closed_segment()
    await archive_topic(writer, archive)
    ids = set()
    for _ in range(2):
        async with asking(archive, tmp_path / "state") as client:
            ids.add((await metadata(client, "old")).topics[0].topic_id)
    assert len(ids) == 1
    assert ids != {None}


async def test_newest_incarnation_of_a_topic_is_served(archive, clock, tmp_path):
    """The one before it is in the bucket still, and cannot be meant by the name."""
    old = LogWriter(tmp_path / "old")
    old.closed_segment()
    await archive_topic(old, archive)
    clock.now_ms += 1000
    new = LogWriter(tmp_path / "new", topic_id=OTHER_ID)
    new.closed_segment()
    await archive_topic(new, archive, partitions=3)
    async with asking(archive, tmp_path / "state") as client:
        (topic,) = (await metadata(client, everything=True)).topics
        assert (topic.topic_id, len(topic.partitions)) == (topic_uuid(new), 3)
        (gone,) = (await metadata(client, topic_uuid(old))).topics
        assert gone.error_code == ErrorCode.unknown_topic_id


async def test_new_topic_is_found_after_the_interval(archive, store, tmp_path):
    """The bucket is listed again; within the interval it is not."""
    interval = {"cloud_storage_readreplica_manifest_sync_timeout_ms": 1}
    async with asking(archive, tmp_path / "state", **interval) as client:
        assert (await metadata(client, everything=True)).topics == ()
        writer = LogWriter(tmp_path, "new")
        writer.closed_segment()
        await archive_topic(writer, archive)
        found = ()
        while not found:
            found = (await metadata(client, everything=True)).topics
        assert [one.name for one in found] == ["new"]
    async with asking(archive, tmp_path / "state") as client:
        store.requests.clear()
        for _ in range(3):
            await metadata(client, everything=True)
        assert [one for one in store.requests if one[0] == "list_page"] == []


@pytest.mark.parametrize("error", [StorageUnavailable, StorageDenied])
async def test_bucket_that_cannot_be_listed_leaves_the_topics_that_are_known(
    writer, archive, store, tmp_path, error
):
    """Known topics are still served if the store is away, and if it denies access."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    interval = {"cloud_storage_readreplica_manifest_sync_timeout_ms": 1}
    async with asking(archive, tmp_path / "state", **interval) as client:
        store.requests.clear()
        store.fail_next("list_page", lambda: error("no"), times=1000)
        while ("list_page", "meta/") not in store.requests:
            found = (await metadata(client, everything=True)).topics
            assert [one.name for one in found] == ["orders"]


@pytest.mark.parametrize("version", range(3))
async def test_cluster_is_this_node(writer, archive, tmp_path, version):
    """The cluster has one node, with the address that clients are to use."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    schema = request_module(DESCRIBE_CLUSTER, version).DescribeClusterRequest
    fields = fields_of(
        schema,
        include_cluster_authorized_operations=True,
        endpoint_type=1,
        include_fenced_brokers=False,
    )
    settings = {"advertised": "'archive.example.com:19092'"}
    async with asking(archive, tmp_path / "state", **settings) as client:
        answer = await client.ask(schema(**fields))
        assert (answer.cluster_id, answer.controller_id) == ("cluster", 0)
        (node,) = answer.brokers
        assert (node.host, node.port) == ("archive.example.com", 19092)
        if version:
            controllers = await client.ask(schema(**(fields | {"endpoint_type": 2})))
            assert controllers.error_code == ErrorCode.mismatched_endpoint_type


async def test_partitions_are_described_page_by_page(archive, tmp_path):
    """A page begins at the cursor and has as many partitions as wanted, topics in order of their names."""
    for name, partitions in (("a", 3), ("b", 2), ("c", 1)):
        writer = LogWriter(tmp_path, name)
        writer.closed_segment()
        await archive_topic(writer, archive, partitions=partitions)
    seen, cursor, pages = [], None, 0
    async with asking(archive, tmp_path / "state") as client:
        while pages == 0 or cursor is not None:
            answer = await client.ask(describe_request(limit=2, cursor=cursor))
            pages += 1
            seen += [
                (topic.name, one.partition_index, one.leader_id)
                for topic in answer.topics
                for one in topic.partitions
            ]
            following = answer.next_cursor
            cursor = None if following is None else (following.topic_name, following.partition_index)
        assert seen == [("a", 0, 0), ("a", 1, 0), ("a", 2, 0), ("b", 0, 0), ("b", 1, 0), ("c", 0, 0)]
        assert pages == 3
        answer = await client.ask(describe_request("b", "none"))
    assert [(one.name, one.error_code) for one in answer.topics] == [
        ("b", ErrorCode.none),
        ("none", ErrorCode.unknown_topic_or_partition),
    ]
