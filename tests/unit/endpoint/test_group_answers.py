"""The requests of consumer groups in every offered version, one at a time, and what principals may do."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from structlog.testing import capture_logs

from tests.fakes.log_writer import CLUSTER
from tests.support.archive_endpoints import archive_topic, asking, metadata, topic_uuid, until
from tests.support.group_endpoints import group_endpoint
from tests.support.kafka_messages import fields_of, milliseconds, request_module, topic_fields
from tests.support.raw_kafka import connected
from tieringd.endpoint.access import Access, AccessRule, Operation, Resource
from tieringd.endpoint.endpoint_settings import ADVERTISED, ADVERTISED_WITH_GROUPS, ApiKey
from tieringd.endpoint.newer_group_answers import Client, NewerGroupAnswers
from tieringd.endpoint.users_file import Users
from tieringd.errors import ConfigError, StorageDenied
from tieringd.formats.group_documents import group_key
from tieringd.formats.object_keys import TopicKey

GROUP = "readers"


@pytest.fixture
async def client(archive, writer, tmp_path):
    """Give a connection to an endpoint with one archived topic, and its id."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with (
        group_endpoint(archive, tmp_path, group_offset_metadata_bytes=10) as endpoint,
        connected(endpoint.server.port) as connection,
    ):
        connection.topic_id = topic_uuid(writer)
        yield connection


def request(api, version, name, /, **values):
    """Return a request with those of *values* that its version has."""
    schema = getattr(request_module(api, version), name)
    return schema(**fields_of(schema, **values))


def versions(key):
    """Return a decorator for a test of each version of a request."""
    return pytest.mark.parametrize("version", ADVERTISED_WITH_GROUPS[key])


def joining(version, member_id="", *, instance_id=None, group=GROUP, session_ms=10_000):
    """Return a request to join."""
    module = request_module(ApiKey.JOIN_GROUP, version)
    return request(
        ApiKey.JOIN_GROUP,
        version,
        "JoinGroupRequest",
        group_id=group,
        session_timeout=milliseconds(session_ms),
        rebalance_timeout=milliseconds(20_000),
        member_id=member_id,
        group_instance_id=instance_id,
        protocol_type="consumer",
        protocols=(module.JoinGroupRequestProtocol(name="range", metadata=b"m"),),
        reason=None,
    )


def syncing(version, member_id, generation, assignments=None, *, instance_id=None, group=GROUP):
    """Return a request to synchronise."""
    module = request_module(ApiKey.SYNC_GROUP, version)
    return request(
        ApiKey.SYNC_GROUP,
        version,
        "SyncGroupRequest",
        group_id=group,
        generation_id=generation,
        member_id=member_id,
        group_instance_id=instance_id,
        protocol_type="consumer",
        protocol_name="range",
        assignments=tuple(
            module.SyncGroupRequestAssignment(member_id=name, assignment=data)
            for name, data in (assignments or {}).items()
        ),
    )


def committing(version, topic, offsets, *, member_id="", generation=-1, group=GROUP, text=""):
    """Return a commit of offsets, by partition."""
    module = request_module(ApiKey.OFFSET_COMMIT, version)
    partition = module.OffsetCommitRequestPartition
    one = module.OffsetCommitRequestTopic(
        **topic_fields(module.OffsetCommitRequestTopic, topic),
        partitions=tuple(
            partition(
                **fields_of(
                    partition,
                    partition_index=number,
                    committed_offset=offset,
                    committed_leader_epoch=4,
                    committed_metadata=text,
                )
            )
            for number, offset in offsets.items()
        ),
    )
    return request(
        ApiKey.OFFSET_COMMIT,
        version,
        "OffsetCommitRequest",
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member_id,
        group_instance_id=None,
        topics=(one,),
    )


def fetching(version, topic, *numbers, group=GROUP):
    """Return a question for offsets; for all of them where no partition is named."""
    module = request_module(ApiKey.OFFSET_FETCH, version)
    schema = getattr(module, "OffsetFetchRequestTopics", None) or module.OffsetFetchRequestTopic
    topics = (schema(**topic_fields(schema, topic), partition_indexes=numbers),) if numbers else None
    if version < 8:
        return request(
            ApiKey.OFFSET_FETCH, version, "OffsetFetchRequest", group_id=group, topics=topics,
            require_stable=False,
        )  # fmt: skip
    asked = request(ApiKey.OFFSET_FETCH, version, "OffsetFetchRequestGroup", group_id=group, topics=topics)
    return request(ApiKey.OFFSET_FETCH, version, "OffsetFetchRequest", groups=(asked,), require_stable=False)


def fetched(answer, version):
    """Return the error of the group, and the offsets by partition."""
    group = answer.groups[0] if version >= 8 else answer
    partitions = [one for topic in group.topics for one in topic.partitions]
    return getattr(group, "error_code", ErrorCode.none), {
        one.partition_index: (one.committed_offset, one.error_code) for one in partitions
    }


async def member(client, *, version=9, group=GROUP):
    """Join as the only member; return its id and generation."""
    given = await client.ask(joining(version, group=group))
    assert given.error_code is ErrorCode.member_id_required
    joined = await client.ask(joining(version, given.member_id, group=group))
    assert joined.error_code is ErrorCode.none
    assignments = {given.member_id: b"all"}
    done = await client.ask(syncing(5, given.member_id, joined.generation_id, assignments, group=group))
    assert (done.error_code, done.assignment) == (ErrorCode.none, b"all")
    return given.member_id, joined.generation_id


async def test_only_what_is_built_is_offered(archive, writer, tmp_path, client):
    """Groups are offered where they are kept, and nowhere else."""
    asked = request(
        ApiKey.API_VERSIONS, 3, "ApiVersionsRequest", client_software_name="t", client_software_version="1"
    )
    with_groups = await client.ask(asked)
    async with asking(archive, tmp_path / "without") as other:
        without = await other.ask(asked)
    for answer, expected in ((with_groups, ADVERTISED_WITH_GROUPS), (without, ADVERTISED)):
        offered = {one.api_key: range(one.min_version, one.max_version + 1) for one in answer.api_keys}
        assert offered == expected


@versions(ApiKey.FIND_COORDINATOR)
async def test_coordinator_is_the_node_of_the_metadata(client, version):
    """A group's coordinator is a node of the metadata. Transactions have none."""
    (broker,) = (await metadata(client, "orders")).brokers
    asked = {"key": GROUP, "coordinator_keys": (GROUP,)}
    found = await client.ask(
        request(ApiKey.FIND_COORDINATOR, version, "FindCoordinatorRequest", key_type=0, **asked)
    )
    one = found.coordinators[0] if version >= 4 else found
    assert (one.error_code, one.node_id, one.port) == (ErrorCode.none, broker.node_id, broker.port)
    if version >= 1:
        found = await client.ask(
            request(ApiKey.FIND_COORDINATOR, version, "FindCoordinatorRequest", key_type=1, **asked)
        )
        one = found.coordinators[0] if version >= 4 else found
        assert one.error_code is ErrorCode.transactional_id_authorization_failed


@versions(ApiKey.JOIN_GROUP)
async def test_join(client, version):
    """A new member gets an id, and is told all members as their leader."""
    answer = await client.ask(joining(version))
    if version >= 4:
        assert answer.error_code is ErrorCode.member_id_required
        answer = await client.ask(joining(version, answer.member_id))
    assert answer.error_code is ErrorCode.none
    assert (answer.generation_id, answer.leader, answer.protocol_name) == (1, answer.member_id, "range")
    assert [(one.member_id, one.metadata) for one in answer.members] == [(answer.member_id, b"m")]
    unknown = await client.ask(joining(version, "stranger"))
    assert unknown.error_code is ErrorCode.unknown_member_id
    short = await client.ask(joining(version, answer.member_id, session_ms=1))
    assert short.error_code is ErrorCode.invalid_session_timeout


@pytest.mark.parametrize("version", range(5, 10))
async def test_static_member_comes_back(client, version):
    """It keeps its assignment, and does not make another one, in the way of each version."""
    first = await client.ask(joining(version, instance_id="i"))
    assert first.error_code is ErrorCode.none
    await client.ask(
        syncing(5, first.member_id, first.generation_id, {first.member_id: b"all"}, instance_id="i")
    )
    back = await client.ask(joining(version, instance_id="i"))
    assert (back.error_code, back.generation_id) == (ErrorCode.none, first.generation_id)
    assert back.member_id != first.member_id
    if version == 9:
        assert (back.leader, back.skip_assignment) == (back.member_id, True)
    else:
        assert back.leader == first.member_id
    done = await client.ask(syncing(5, back.member_id, back.generation_id, instance_id="i"))
    assert done.assignment == b"all"
    fenced = await client.ask(syncing(5, first.member_id, first.generation_id, instance_id="i"))
    assert fenced.error_code is ErrorCode.fenced_instance_id


@versions(ApiKey.SYNC_GROUP)
async def test_sync_of_another_generation(client, version):
    """It is refused, and so is a stranger's."""
    member_id, generation = await member(client)
    for name, number, error in (
        (member_id, generation + 1, ErrorCode.illegal_generation),
        ("stranger", generation, ErrorCode.unknown_member_id),
        (member_id, generation, ErrorCode.none),
    ):
        assert (await client.ask(syncing(version, name, number))).error_code is error


@versions(ApiKey.HEARTBEAT)
async def test_heartbeat(client, version):
    """A member is answered without error; one of another generation and a stranger are refused."""
    member_id, generation = await member(client)
    for name, number, error in (
        (member_id, generation, ErrorCode.none),
        (member_id, generation - 1, ErrorCode.illegal_generation),
        ("stranger", generation, ErrorCode.unknown_member_id),
    ):
        asked = request(
            ApiKey.HEARTBEAT, version, "HeartbeatRequest", group_id=GROUP, member_id=name,
            generation_id=number, group_instance_id=None,
        )  # fmt: skip
        assert (await client.ask(asked)).error_code is error


@versions(ApiKey.LEAVE_GROUP)
async def test_leave(client, version):
    """The member is gone, and a second time it is unknown."""
    member_id, generation = await member(client)
    for error in (ErrorCode.none, ErrorCode.unknown_member_id):
        if version < 3:
            leaving = {"member_id": member_id}
        else:
            identity = request_module(ApiKey.LEAVE_GROUP, version).MemberIdentity
            leaving = {
                "members": (
                    identity(**fields_of(identity, member_id=member_id, group_instance_id=None, reason=None)),
                )
            }
        asked = request(ApiKey.LEAVE_GROUP, version, "LeaveGroupRequest", group_id=GROUP, **leaving)
        answer = await client.ask(asked)
        assert (answer.members[0] if version >= 3 else answer).error_code is error
    refused = await client.ask(committing(2, "orders", {0: 1}, member_id=member_id, generation=generation))
    assert refused.topics[0].partitions[0].error_code is ErrorCode.unknown_member_id


@versions(ApiKey.OFFSET_COMMIT)
async def test_commit(client, version):
    """A member of the generation commits. A refusal for one partition leaves the others alone."""
    topic = client.topic_id if version >= 10 else "orders"
    member_id, generation = await member(client)
    for number, error in ((generation, ErrorCode.none), (generation + 1, ErrorCode.illegal_generation)):
        answer = await client.ask(
            committing(version, topic, {0: 2, 7: 1}, member_id=member_id, generation=number)
        )
        codes = [one.error_code for one in answer.topics[0].partitions]
        other = ErrorCode.unknown_topic_or_partition if error is ErrorCode.none else error
        assert codes == [error, other]
    for offset, text, error in (
        (-1, "", ErrorCode.invalid_request),
        (1, "x" * 11, ErrorCode.offset_metadata_too_large),
    ):
        answer = await client.ask(
            committing(version, topic, {0: offset}, member_id=member_id, generation=generation, text=text)
        )
        assert answer.topics[0].partitions[0].error_code is error
    unknown = member_id if version < 10 else client.topic_id.__class__(int=1)
    answer = await client.ask(committing(version, unknown, {0: 1}))
    expected = ErrorCode.unknown_topic_id if version >= 10 else ErrorCode.unknown_topic_or_partition
    assert answer.topics[0].partitions[0].error_code is expected
    assert fetched(await client.ask(fetching(5, "orders", 0)), 5)[1] == {0: (2, ErrorCode.none)}


@versions(ApiKey.OFFSET_FETCH)
async def test_fetch_of_offsets(client, version):
    """The answer has partitions with and without an offset, or all that have one."""
    topic = client.topic_id if version >= 10 else "orders"
    await client.ask(committing(9, "orders", {0: 3}))
    found = fetched(await client.ask(fetching(version, topic, 0, 1)), version)
    assert found == (ErrorCode.none, {0: (3, ErrorCode.none), 1: (-1, ErrorCode.none)})
    if version >= 2:
        found = fetched(await client.ask(fetching(version, topic)), version)
        assert found == (ErrorCode.none, {0: (3, ErrorCode.none)})


@versions(ApiKey.DESCRIBE_GROUPS)
async def test_description(client, version):
    """A group with a member is described, and one that does not exist is dead."""
    member_id, _ = await member(client)
    asked = request(
        ApiKey.DESCRIBE_GROUPS, version, "DescribeGroupsRequest", groups=(GROUP, "none"),
        include_authorized_operations=True,
    )  # fmt: skip
    known, missing = (await client.ask(asked)).groups
    assert (known.group_state, known.protocol_data) == ("Stable", "range")
    (one,) = known.members
    assert (one.member_id, one.client_id, one.client_host) == (member_id, "test", "/127.0.0.1")
    assert (one.member_metadata, one.member_assignment) == (b"m", b"all")
    assert (missing.group_state, missing.members) == ("Dead", ())
    if version >= 3:
        assert known.authorized_operations == 1 << 3 | 1 << 6 | 1 << 8


@versions(ApiKey.LIST_GROUPS)
async def test_list(client, version):
    """All groups, by state and by type where the version can ask for it."""
    await client.ask(committing(9, "orders", {0: 3}, group="simple"))
    await member(client)

    async def listed(**filters):
        defaults = {"states_filter": (), "types_filter": ()} | filters
        answer = await client.ask(request(ApiKey.LIST_GROUPS, version, "ListGroupsRequest", **defaults))
        return {one.group_id: one.protocol_type for one in answer.groups}

    assert await listed() == {"simple": "", GROUP: "consumer"}
    if version >= 4:
        assert set(await listed(states_filter=("Stable",))) == {GROUP}
    if version >= 5:
        assert set(await listed(types_filter=("consumer",))) == set()


@versions(ApiKey.DELETE_GROUPS)
async def test_deletion(client, version):
    """Only groups without members are deleted. A deleted group is gone for all clients."""
    await client.ask(committing(9, "orders", {0: 3}, group="simple"))
    await member(client)
    asked = request(
        ApiKey.DELETE_GROUPS, version, "DeleteGroupsRequest", groups_names=("simple", GROUP, "none")
    )
    found = {one.group_id: one.error_code for one in (await client.ask(asked)).results}
    assert found == {
        "simple": ErrorCode.none,
        GROUP: ErrorCode.non_empty_group,
        "none": ErrorCode.group_id_not_found,
    }
    assert fetched(await client.ask(fetching(5, "orders", 0, group="simple")), 5)[1][0][0] == -1


async def test_deletion_of_offsets(client):
    """Only of a group without members."""
    module = request_module(ApiKey.OFFSET_DELETE, 0)

    def deleting(group):
        topic = module.OffsetDeleteRequestTopic(
            name="orders", partitions=(module.OffsetDeleteRequestPartition(partition_index=0),)
        )
        return module.OffsetDeleteRequest(group_id=group, topics=(topic,))

    await client.ask(committing(9, "orders", {0: 3}, group="simple"))
    await member(client)
    answer = await client.ask(deleting(GROUP))
    assert answer.topics[0].partitions[0].error_code is ErrorCode.group_subscribed_to_topic
    answer = await client.ask(deleting("simple"))
    assert answer.topics[0].partitions[0].error_code is ErrorCode.none
    assert (await client.ask(deleting("simple"))).error_code is ErrorCode.group_id_not_found


def beating_with(version, member_id, epoch, **values):
    """Return a heartbeat of the newer protocol."""
    defaults = {
        "instance_id": None, "rack_id": None, "rebalance_timeout": milliseconds(20_000),
        "subscribed_topic_names": ("orders",), "subscribed_topic_regex": None,
        "server_assignor": None, "topic_partitions": (),
    }  # fmt: skip
    return request(
        ApiKey.CONSUMER_GROUP_HEARTBEAT, version, "ConsumerGroupHeartbeatRequest",
        group_id=GROUP, member_id=member_id, member_epoch=epoch, **(defaults | values),
    )  # fmt: skip


@pytest.mark.parametrize(("session_ms", "interval_ms"), [(45_000, 5000), (9000, 3000)])
async def test_operator_says_how_long_a_newer_member_may_be_silent(
    archive, client, tmp_path, session_ms, interval_ms
):
    """The member is told how often it is to speak, and the group keeps how long it may be silent."""
    async with (
        group_endpoint(archive, tmp_path / "other", consumer_group_session_timeout_ms=session_ms) as endpoint,
        connected(endpoint.server.port) as other,
    ):
        joined = await other.ask(beating_with(1, "me", 0))
        assert joined.heartbeat_interval == timedelta(milliseconds=interval_ms)
        group = await endpoint.groups.coordinator.read(GROUP)
        assert group.members["me"].session_timeout_ms == session_ms


@versions(ApiKey.CONSUMER_GROUP_HEARTBEAT)
async def test_newer_protocol(client, version):
    """A member gets its partitions, is described, and leaves."""
    beating = partial(beating_with, version)
    joined = await client.ask(beating("" if version == 0 else "me", 0))
    assert (joined.error_code, joined.member_epoch) == (ErrorCode.none, 1)
    (given,) = joined.assignment.topic_partitions
    assert (given.topic_id, given.partitions) == (client.topic_id, (0,))
    quiet = {"rebalance_timeout": milliseconds(-1), "subscribed_topic_names": None, "topic_partitions": None}
    again = await client.ask(beating(joined.member_id, 1, **quiet))
    assert (again.member_epoch, again.assignment) == (1, None)
    describing = request(
        ApiKey.CONSUMER_GROUP_DESCRIBE, version, "ConsumerGroupDescribeRequest",
        group_ids=(GROUP, "none"), include_authorized_operations=True,
    )  # fmt: skip
    known, missing = (await client.ask(describing)).groups
    assert (known.group_state, known.group_epoch, known.assignor_name) == ("Stable", 1, "uniform")
    (one,) = known.members
    assert one.assignment.topic_partitions[0].topic_name == "orders"
    assert missing.error_code is ErrorCode.group_id_not_found
    if version == 1:
        refused = await client.ask(beating("other", 0, subscribed_topic_regex="a.*"))
        assert refused.error_code is ErrorCode.invalid_request
    left = await client.ask(beating(joined.member_id, -1, **quiet))
    assert (left.error_code, left.member_epoch) == (ErrorCode.none, -1)


async def test_topics_of_a_group_are_shown_only_to_principals_that_may_describe_them(
    archive, writer, tmp_path
):
    """A rule for a group says nothing of the topics that its members read."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    describing = request(
        ApiKey.CONSUMER_GROUP_DESCRIBE, 1, "ConsumerGroupDescribeRequest",
        group_ids=(GROUP,), include_authorized_operations=False,
    )  # fmt: skip
    may_describe_group = (Operation.DESCRIBE, Resource.GROUP, GROUP)
    async with (
        group_endpoint(archive, tmp_path) as endpoint,
        connected(endpoint.server.port) as client,
    ):
        await client.ask(beating_with(1, "me", 0))
        answers = NewerGroupAnswers(endpoint.topics, endpoint.groups.coordinator)
        for rules, error, members in (
            ((may_describe_group,), ErrorCode.topic_authorization_failed, 0),
            ((may_describe_group, (Operation.DESCRIBE, Resource.TOPIC, "orders")), ErrorCode.none, 1),
        ):
            answer = await answers.describe(1, describing, rules_of(*rules), Client("c", "h", lambda: True))
            (group,) = answer.groups
            assert (group.error_code, len(group.members)) == (error, members)


async def test_id_of_zeros_is_that_of_no_topic(client):
    """It is an error of the topic, and no defect of the endpoint."""
    done = await client.ask(committing(10, UUID(int=0), {0: 5}))
    assert done.topics[0].partitions[0].error_code is ErrorCode.unknown_topic_id
    found = fetched(await client.ask(fetching(10, UUID(int=0), 0)), 10)
    assert found == (ErrorCode.none, {0: (-1, ErrorCode.unknown_topic_id)})
    owned = request_module(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1).TopicPartitions(
        topic_id=UUID(int=0), partitions=(0,)
    )
    joined = await client.ask(beating_with(1, "me", 0, topic_partitions=(owned,)))
    assert joined.error_code is ErrorCode.none


async def test_damaged_group_is_answered(archive, client):
    """Clients try again, and an operator finds the key in the log."""
    archive.store.add(group_key(CLUSTER, "broken"), b"{}")
    version = 5
    found = fetched(await client.ask(fetching(version, "orders", 0, group="broken")), version)
    keys = [key for key in archive.store.objects if "consumer" in key]
    assert keys == [group_key(CLUSTER, "broken")]
    assert found[0] is ErrorCode.coordinator_not_available


async def test_damaged_group_does_not_hide_the_others(archive, client):
    """A list lacks it, and the log names its key, once for each version of the object."""
    await client.ask(committing(9, "orders", {0: 3}))
    archive.store.add(group_key(CLUSTER, "broken"), b"{}")
    with capture_logs() as logs:
        for _ in range(2):
            answer = await client.ask(request(ApiKey.LIST_GROUPS, 2, "ListGroupsRequest"))
            assert answer.error_code is ErrorCode.none
            assert [one.group_id for one in answer.groups] == [GROUP]
    assert sum(group_key(CLUSTER, "broken") in str(one) for one in logs) == 1


@pytest.mark.parametrize("is_commit", [True, False])
async def test_topic_that_was_created_again_keeps_its_offsets(archive, client, tmp_path, is_commit):
    """Another endpoint knows it already. An old listing neither hides its offsets nor replaces them."""
    again = TopicKey(CLUSTER, "orders", "Z" * 21 + "A")
    await archive.manifests.ensure_topic(again, partition_count=1)
    async with (
        group_endpoint(archive, tmp_path / "other") as endpoint,
        connected(endpoint.server.port) as other,
    ):
        done = await other.ask(committing(9, "orders", {0: 5}))
        assert done.topics[0].partitions[0].error_code is ErrorCode.none
        if is_commit:
            done = await client.ask(committing(9, "orders", {0: 900}))
            assert done.topics[0].partitions[0].error_code is ErrorCode.unknown_topic_or_partition
        for each in (other, client):
            found = fetched(await each.ask(fetching(5, "orders", 0)), 5)
            assert found == (ErrorCode.none, {0: (5, ErrorCode.none)})


async def test_connection_of_a_member_that_moved_is_closed(archive, client, tmp_path):
    """What its client has sent behind the old commit is not carried out either."""
    member_id, generation = await member(client)
    by_member = {"member_id": member_id, "generation": generation}
    async with (
        group_endpoint(archive, tmp_path / "other") as endpoint,
        connected(endpoint.server.port) as other,
    ):
        done = await other.ask(committing(9, "orders", {0: 3}, **by_member))
        assert done.topics[0].partitions[0].error_code is ErrorCode.none
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.ask(committing(9, "orders", {0: 2}, **by_member))
        found = fetched(await other.ask(fetching(5, "orders", 0)), 5)
        assert found == (ErrorCode.none, {0: (3, ErrorCode.none)})


async def test_commit_of_a_consumer_that_has_closed_its_connection_is_not_carried_out(
    archive, client, tmp_path
):
    """The consumer has gone on elsewhere: what it committed there is not undone by what waits here."""
    async with (
        group_endpoint(archive, tmp_path / "other") as endpoint,
        connected(endpoint.server.port) as stuck,
    ):
        stuck.send(committing(9, "orders", {0: 2}))
        stuck.writer.close()
        done = await client.ask(committing(9, "orders", {0: 3}))
        assert done.topics[0].partitions[0].error_code is ErrorCode.none
        await until(lambda: endpoint.server.counters.broken_connections == 1)
        found = fetched(await client.ask(fetching(5, "orders", 0)), 5)
        assert found == (ErrorCode.none, {0: (3, ErrorCode.none)})


def rules_of(*rules):
    """Return the access of a principal with these rules: operation, resource and name."""
    return Access(
        tuple(
            AccessRule("User:a", frozenset({operation}), name.removesuffix("*") or "*", name.endswith("*"),
                       resource)
            for operation, resource, name in rules
        )
    )  # fmt: skip


def test_rules_for_groups():
    """They say nothing of topics, and rules for topics nothing of groups."""
    access = rules_of(
        (Operation.READ, Resource.GROUP, "billing"),
        (Operation.DELETE, Resource.GROUP, "tmp.*"),
        (Operation.READ, Resource.TOPIC, "orders"),
    )
    assert access.may_with_group(Operation.READ, "billing")
    assert access.may_with_group(Operation.DESCRIBE, "billing")
    assert not access.may_with_group(Operation.DELETE, "billing")
    assert access.may_with_group(Operation.DESCRIBE, "tmp.1")
    assert not access.may_with_group(Operation.READ, "tmp.1")
    assert not access.may_with_group(Operation.READ, "orders")
    assert not access.may(Operation.READ, "billing")
    assert access.operations("orders") == 1 << 3 | 1 << 8
    assert access.group_operations("tmp.1") == 1 << 6 | 1 << 8


def test_rules_for_groups_in_the_users_file(tmp_path):
    """They are read and written; a rule names one thing, and has operations of its kind."""
    text = """
users: {}
rules:
  - {principal: "User:a", operations: [READ], topic: orders}
  - {principal: "User:a", operations: [READ, DELETE], group: billing}
  - {principal: "User:*", operations: [DESCRIBE], group_prefix: public.}
"""
    users = Users.parsed(text, source="f")
    assert [(one.resource, one.is_prefix) for one in users.rules] == [
        (Resource.TOPIC, False), (Resource.GROUP, False), (Resource.GROUP, True),
    ]  # fmt: skip
    path = tmp_path / "users.yaml"
    users.write(path)
    assert Users.read(path).rules == users.rules
    for rule in (
        '{principal: "User:a", operations: [DESCRIBE_CONFIGS], group: g}',
        '{principal: "User:a", operations: [DELETE], topic: t}',
        '{principal: "User:a", operations: [READ], group: g, topic: t}',
        '{principal: "User:a", operations: [READ]}',
    ):
        with pytest.raises(ConfigError, match="f:3"):
            Users.parsed(f"users: {{}}\nrules:\n  - {rule}\n", source="f")


@asynccontextmanager
async def _denied(archive, tmp_path):
    archive.store.fail_next("put", lambda: StorageDenied("no"), times=3)
    async with group_endpoint(archive, tmp_path):
        yield


async def test_store_that_may_not_be_written_is_told_at_the_start(archive, writer, tmp_path):
    """The error lists the permissions that are missing."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    with pytest.raises(ConfigError, match="PutObject, DeleteObject"):
        async with _denied(archive, tmp_path):
            pass


async def test_bucket_has_to_tell_the_cluster(archive, tmp_path):
    """An empty one cannot, and groups would be lost when it tells another one later."""
    with pytest.raises(ConfigError, match="of which cluster"):
        async with group_endpoint(archive, tmp_path):
            pass
