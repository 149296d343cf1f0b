"""
The requests of consumer groups: authorised here, decided by the group's policy, kept by the coordinator.

Any endpoint answers for any group. `find_coordinator` names the same one for all members of a group where
it can, so that they seldom wait for each other over the bucket.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from tieringd.endpoint.access import Access, Operation
from tieringd.endpoint.cluster_answers import NO_DELAY
from tieringd.endpoint.endpoint_nodes import Nodes, chosen
from tieringd.endpoint.endpoint_settings import ApiKey
from tieringd.endpoint.group_coordinator import Arrival, CommitSource, GroupCoordinator
from tieringd.endpoint.newer_group_answers import (
    NOT_ASKED,
    Client,
    Handler,
    NewerGroupAnswers,
    error_of,
    group_fault,
    state_name,
)
from tieringd.endpoint.served_manifests import ServedTopic, ServedTopics
from tieringd.errors import ObjectTooLarge, TieringError
from tieringd.formats.kafka_wire.messages import made, response_module
from tieringd.model.consumer_group import (
    NO_GENERATION,
    CommittedOffset,
    ConsumerGroup,
    GroupMember,
    GroupTopic,
)
from tieringd.policies.group_membership import (
    GroupError,
    JoinAnswer,
    JoinRequest,
    Step,
    SyncRequest,
    leave,
    member_error,
)
from tieringd.policies.group_offsets import (
    CommitRequest,
    commit,
    deleted,
    knows_otherwise,
    offset_of,
    without_offsets,
)
from tieringd.storage.threads import in_steps, in_thread_if_large

_GROUP: Final = 0
"""The coordinator type of groups. The other types are for transactions and share groups."""
_GIVEN_IDS_MAX: Final = 10_000
_PARTITION_BYTES: Final = 64
"""For a partition in a request, to tell whether it takes a thread."""
_NO_ID: Final = UUID(int=0)
_NAME_MAX: Final = 255
"""Characters of a member's, an instance's or a client's name."""
_PROTOCOLS_MAX: Final = 64
"""Protocols of a member: its assignors. Clients have a few."""
_BATCH_JOINS_FROM: Final = 4
"""The first version of JoinGroup in which a new member asks for an id before it joins."""
_SKIPS_FROM: Final = 9
"""The first version of JoinGroup that can tell a leader to leave assignments as they are."""
_ID_TOPICS_FROM: Final = 10
"""The first version of OffsetCommit and OffsetFetch that names topics by id."""


def _type_name(group: ConsumerGroup) -> str:
    return "consumer" if group.is_newer else "classic"


class GroupAnswers:
    """The answers to all requests of consumer groups."""

    def __init__(self, topics: ServedTopics, coordinator: GroupCoordinator, nodes: Nodes) -> None:
        self._topics = topics
        self._coordinator = coordinator
        self._nodes = nodes
        self._given_ids: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Member ids that were given out, by group, and not used yet."""
        self.handlers: dict[int, Handler] = {
            ApiKey.FIND_COORDINATOR: self.find_coordinator,
            ApiKey.JOIN_GROUP: self.join_group,
            ApiKey.SYNC_GROUP: self.sync_group,
            ApiKey.HEARTBEAT: self.heartbeat,
            ApiKey.LEAVE_GROUP: self.leave_group,
            ApiKey.OFFSET_COMMIT: self.offset_commit,
            ApiKey.OFFSET_FETCH: self.offset_fetch,
            ApiKey.OFFSET_DELETE: self.offset_delete,
            ApiKey.DESCRIBE_GROUPS: self.describe_groups,
            ApiKey.LIST_GROUPS: self.list_groups,
            ApiKey.DELETE_GROUPS: self.delete_groups,
        }
        self.handlers |= NewerGroupAnswers(topics, coordinator).handlers

    async def find_coordinator(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Name the endpoint that the members of a group meet at. Transactions have none."""
        module: Any = response_module(ApiKey.FIND_COORDINATOR, version)
        is_group = getattr(request, "key_type", _GROUP) == _GROUP

        def found(key: str) -> dict[str, Any]:
            refused = {"node_id": -1, "host": "", "port": -1}
            if not is_group:
                error, text = (
                    ErrorCode.transactional_id_authorization_failed,
                    "An archive has no transactions",
                )
                return {**refused, "error_code": error, "error_message": text}
            if not access.may_with_group(Operation.DESCRIBE, key):
                return {
                    **refused,
                    "error_code": ErrorCode.group_authorization_failed,
                    "error_message": "No rule allows to describe this group",
                }
            node = chosen(self._nodes.all(), f"group/{key}")
            return {
                "node_id": node.node_id,
                "host": node.host,
                "port": node.port,
                "error_code": ErrorCode.none,
                "error_message": None,
            }

        if hasattr(request, "coordinator_keys"):
            keys = in_steps(dict.fromkeys(request.coordinator_keys))
            coordinators = tuple([module.Coordinator(key=key, **found(key)) async for key in keys])
            return made(module.FindCoordinatorResponse, throttle_time=NO_DELAY, coordinators=coordinators)
        return made(module.FindCoordinatorResponse, throttle_time=NO_DELAY, **found(request.key))

    async def join_group(self, version: int, request: Any, access: Access, client: Client) -> Any:
        """Let a member join, and answer when its generation has begun."""
        module: Any = response_module(ApiKey.JOIN_GROUP, version)
        group_id, member_id = request.group_id, request.member_id
        instance_id = getattr(request, "group_instance_id", None)

        def answered(answer: JoinAnswer, given: str, *, leader: str = "", skips: bool = False) -> Any:
            return made(
                module.JoinGroupResponse,
                throttle_time=NO_DELAY,
                error_code=ErrorCode(answer.error),
                generation_id=answer.generation,
                protocol_type=answer.protocol_type,
                protocol_name=answer.protocol or ("" if version < 7 else None),  # noqa: PLR2004
                leader=leader or answer.leader,
                skip_assignment=skips,
                member_id=given,
                members=tuple(
                    made(
                        module.JoinGroupResponseMember,
                        member_id=one.member_id,
                        group_instance_id=one.instance_id,
                        metadata=one.metadata_of(answer.protocol),
                    )
                    for one in answer.members
                ),
            )

        error = group_fault(access, group_id, Operation.READ)
        names = (member_id, instance_id, client.client_id)
        is_strange = len(request.protocols) > _PROTOCOLS_MAX or any(
            len(name or "") > _NAME_MAX for name in names
        )
        if error is GroupError.NONE and is_strange:
            error = GroupError.INVALID_REQUEST
        if error is not GroupError.NONE:
            return answered(JoinAnswer(error), member_id)
        is_new = not member_id
        if is_new:
            member_id = f"{instance_id or client.client_id}-{secrets.token_hex(16)}"
            if version >= _BATCH_JOINS_FROM and instance_id is None:
                self._give(group_id, member_id)
                return answered(JoinAnswer(GroupError.MEMBER_ID_REQUIRED), member_id)
        elif (group_id, member_id) in self._given_ids:
            is_new = True
        session_timeout_ms = _ms(request.session_timeout)
        rebalance_timeout_ms = _ms(getattr(request, "rebalance_timeout", None))
        joining = JoinRequest(
            GroupMember(
                member_id,
                instance_id,
                client.client_id,
                client.host,
                self._coordinator.endpoint_id,
                session_timeout_ms,
                rebalance_timeout_ms if rebalance_timeout_ms >= 0 else session_timeout_ms,
                tuple((one.name, bytes(one.metadata)) for one in request.protocols),
            ),
            is_new=is_new,
            protocol_type=request.protocol_type,
        )
        try:
            joined = await self._coordinator.join(group_id, joining)
        except TieringError as fault:
            return answered(JoinAnswer(error_of(fault)), member_id)
        self._given_ids.pop((group_id, member_id), None)
        if not joined.is_replaced:
            return answered(joined.answer, member_id)
        # A static member is back. Its group goes on, so a leader is not to assign partitions again. A client
        # that cannot be told so gets another leader's name: its own former one.
        is_leader = joined.answer.leader == member_id
        skips = version >= _SKIPS_FROM and is_leader
        if is_leader and not skips:
            answer = JoinAnswer(
                GroupError.NONE, joined.answer.generation, joined.answer.protocol_type, joined.answer.protocol
            )
            return answered(answer, member_id, leader=joined.old_member_id)
        return answered(joined.answer, member_id, skips=skips)

    def _give(self, group_id: str, member_id: str) -> None:
        self._given_ids[group_id, member_id] = None
        if len(self._given_ids) > _GIVEN_IDS_MAX:
            self._given_ids.popitem(last=False)

    async def sync_group(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Answer with a member's assignment, when the leader has brought it."""
        module: Any = response_module(ApiKey.SYNC_GROUP, version)
        error, assignment = group_fault(access, request.group_id, Operation.READ), b""
        protocol_type = getattr(request, "protocol_type", None)
        protocol = getattr(request, "protocol_name", None)
        if error is GroupError.NONE:
            asked = SyncRequest(
                request.member_id,
                getattr(request, "group_instance_id", None),
                request.generation_id,
                protocol_type,
                protocol,
                self._coordinator.endpoint_id,
                {one.member_id: bytes(one.assignment) for one in request.assignments},
            )
            try:
                error, assignment = await self._coordinator.sync(request.group_id, asked)
            except TieringError as fault:
                error = error_of(fault)
        return made(
            module.SyncGroupResponse,
            throttle_time=NO_DELAY,
            error_code=ErrorCode(error),
            protocol_type=protocol_type,
            protocol_name=protocol,
            assignment=assignment,
        )

    async def heartbeat(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Say to a member whether its generation is the current one."""
        module: Any = response_module(ApiKey.HEARTBEAT, version)
        error = group_fault(access, request.group_id, Operation.READ)
        if error is GroupError.NONE:
            try:
                error = await self._coordinator.heartbeat(
                    request.group_id,
                    request.member_id,
                    getattr(request, "group_instance_id", None),
                    request.generation_id,
                )
            except TieringError as fault:
                error = error_of(fault)
        return made(module.HeartbeatResponse, throttle_time=NO_DELAY, error_code=ErrorCode(error))

    async def leave_group(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Let one or several members leave."""
        module: Any = response_module(ApiKey.LEAVE_GROUP, version)
        members = [
            (one.member_id, getattr(one, "group_instance_id", None))
            for one in getattr(request, "members", (request,))
        ]
        error = group_fault(access, request.group_id, Operation.READ)
        errors: tuple[GroupError, ...] = ()
        if error is GroupError.NONE:
            now_ms = self._coordinator.now_ms()
            try:
                errors = await self._coordinator.apply(
                    request.group_id, lambda group: leave(group, members, now_ms=now_ms)
                )
            except TieringError as fault:
                error = error_of(fault)
        if errors and not hasattr(request, "members"):
            error = errors[0]
        return made(
            module.LeaveGroupResponse,
            throttle_time=NO_DELAY,
            error_code=ErrorCode(error),
            members=tuple(
                [
                    module.MemberResponse(
                        member_id=member_id, group_instance_id=instance_id, error_code=ErrorCode(each)
                    )
                    async for (member_id, instance_id), each in in_steps(zip(members, errors, strict=False))
                ]
            )
            if hasattr(module, "MemberResponse")
            else (),
        )

    async def offset_commit(self, version: int, request: Any, access: Access, client: Client) -> Any:
        """Keep offsets; the answer says that they are in the bucket."""
        arrived = self._coordinator.arrival(request.group_id, request.member_id)
        await self._topics.ensure_fresh()
        error = group_fault(access, request.group_id, Operation.READ)
        size_bytes = _entry_bytes([one.partitions for one in request.topics])
        offsets, refused = await in_thread_if_large(
            size_bytes, self._offsets_in, request, access, self._coordinator.now_ms()
        )
        if error is GroupError.NONE and offsets:
            asked_for = CommitRequest(
                request.member_id,
                getattr(request, "group_instance_id", None),
                request.generation_id_or_member_epoch,
                self._coordinator.endpoint_id,
                offsets,
            )
            error = await self._committed(request.group_id, asked_for, client, arrived)
        return await in_thread_if_large(size_bytes, _commit_answer, version, request, refused, error)

    def _offsets_in(
        self, request: Any, access: Access, now_ms: int
    ) -> tuple[dict[GroupTopic, dict[int, CommittedOffset]], dict[tuple[int, int], ErrorCode]]:
        """Return the offsets of a commit, and the error of each that is refused by its place there."""
        refused: dict[tuple[int, int], ErrorCode] = {}
        offsets: dict[GroupTopic, dict[int, CommittedOffset]] = {}
        for at, asked in enumerate(request.topics):
            topic, fault = self._topic_for(asked, access)
            for number, one in enumerate(asked.partitions):
                found = fault or self._fault_of_offset(topic, one)
                if found is not None:
                    refused[at, number] = found
                    continue
                assert topic is not None, "an unknown topic is a fault"
                offsets.setdefault(_group_topic(topic), {})[one.partition_index] = CommittedOffset(
                    one.committed_offset,
                    getattr(one, "committed_leader_epoch", -1),
                    one.committed_metadata or "",
                    now_ms,
                )
        return offsets, refused

    async def _committed(
        self, group_id: str, asked: CommitRequest, client: Client, arrived: Arrival
    ) -> GroupError:
        source = CommitSource(client.is_connected)
        if asked.generation <= NO_GENERATION:
            partitions = [(topic, number) for topic, numbers in asked.offsets.items() for number in numbers]
            source = CommitSource(client.is_connected, partitions)
        topics = [(topic.name, topic.topic_id) for topic in asked.offsets]

        def unless_older(group: ConsumerGroup) -> Step[GroupError | None]:
            # Another endpoint may know that a topic was created again: its offsets are not to be replaced.
            return Step(group, None) if knows_otherwise(group, topics) else commit(group, asked)

        async def applied(transition: Callable[[ConsumerGroup], Step[Any]]) -> Any:
            return await self._coordinator.apply(
                group_id,
                transition,
                member_id=asked.member_id,
                arrived=arrived,
                source=source,
            )

        try:
            if asked.generation <= NO_GENERATION and await self._coordinator.is_full(group_id):
                return GroupError.POLICY_VIOLATION
            error: GroupError | None = await applied(unless_older)
            if error is None:
                await self._topics.ensure_newest()
                if any(self._served(topic) is None for topic in asked.offsets):
                    return GroupError.UNKNOWN_TOPIC_OR_PARTITION
                error = await applied(lambda group: commit(group, asked))
        except ObjectTooLarge:
            return GroupError.INVALID_COMMIT_OFFSET_SIZE
        except TieringError as fault:
            return error_of(fault)
        else:
            return error

    def _topic_for(self, asked: Any, access: Access) -> tuple[ServedTopic | None, ErrorCode | None]:
        """Return the topic that a request means, or why it may not have it."""
        by_id = _id_in(asked)
        topic = self._topics.find(by_id) if by_id is not None else self._topics.by_name(asked.name)
        name = topic.name if topic is not None else getattr(asked, "name", None)
        if name is not None and not access.may(Operation.READ, name):
            # Whoever may not know of a topic learns nothing from its id.
            denied = ErrorCode.topic_authorization_failed
            return None, denied if by_id is None else ErrorCode.unknown_topic_id
        if topic is None:
            return None, (
                ErrorCode.unknown_topic_or_partition if by_id is None else ErrorCode.unknown_topic_id
            )
        return topic, None

    def _fault_of_offset(self, topic: ServedTopic | None, one: Any) -> ErrorCode | None:
        if topic is None or topic.partition(one.partition_index) is None:
            return ErrorCode.unknown_topic_or_partition
        limit = self._coordinator.limits.offset_metadata_bytes
        if len((one.committed_metadata or "").encode()) > limit:
            return ErrorCode.offset_metadata_too_large
        return ErrorCode.invalid_request if one.committed_offset < 0 else None

    async def offset_fetch(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Return committed offsets, as the bucket has them now."""
        await self._topics.ensure_fresh()
        module: Any = response_module(ApiKey.OFFSET_FETCH, version)
        if hasattr(request, "groups"):
            groups = []
            # A group that is named twice is read and told once.
            named = {one.group_id: one for one in reversed(request.groups)}
            async for asked in in_steps(reversed(named.values())):
                group, error = await self._read_offsets(asked.group_id, asked, access)
                if error is GroupError.NONE:
                    error = _fault_of_epoch(group, asked)
                is_known = error is GroupError.NONE
                topics = await self._offsets_of(version, group, asked, access) if is_known else ()
                groups.append(
                    module.OffsetFetchResponseGroup(
                        group_id=asked.group_id, topics=topics, error_code=ErrorCode(error)
                    )
                )
            return made(module.OffsetFetchResponse, throttle_time=NO_DELAY, groups=tuple(groups))
        group, error = await self._read_offsets(request.group_id, request, access)
        if error is not GroupError.NONE and version < 2:  # noqa: PLR2004 its answer has no room for one error
            group = ConsumerGroup(request.group_id)
        is_whole = error is GroupError.NONE or version < 2  # noqa: PLR2004
        topics = await self._offsets_of(version, group, request, access, error) if is_whole else ()
        return made(
            module.OffsetFetchResponse, throttle_time=NO_DELAY, topics=topics, error_code=ErrorCode(error)
        )

    def _asked_name(self, asked: Any) -> str | None:
        if (by_id := _id_in(asked)) is None:
            return str(asked.name)
        served = self._topics.find(by_id)
        return None if served is None else served.name

    async def _read_offsets(
        self, group_id: str, asked: Any, access: Access
    ) -> tuple[ConsumerGroup, GroupError]:
        """Read a group, and the topics anew if it has offsets of some that this endpoint does not know."""
        group, error = await self._read(group_id, access, Operation.DESCRIBE)
        names = {topic.name for topic in group.offsets}
        if names and asked.topics is not None:
            names &= {self._asked_name(one) async for one in in_steps(asked.topics)}
        served = {name: self._topics.by_name(name) for name in names}
        known = ((name, None if one is None else one.manifest.key.topic_id) for name, one in served.items())
        if error is GroupError.NONE and knows_otherwise(group, known):
            # Without this a client would be told that there is no offset, and begin anywhere.
            try:
                await self._topics.ensure_newest()
            except TieringError as fault:
                error = error_of(fault)
        return group, error

    async def _offsets_of(
        self,
        version: int,
        group: ConsumerGroup,
        asked: Any,
        access: Access,
        error: GroupError = GroupError.NONE,
    ) -> tuple[Any, ...]:
        size_bytes = _entry_bytes([one.partition_indexes for one in asked.topics or ()])
        size_bytes += _entry_bytes(group.offsets.values())
        return await in_thread_if_large(size_bytes, self._offsets, version, group, asked, access, error)

    def _offsets(
        self,
        version: int,
        group: ConsumerGroup,
        asked: Any,
        access: Access,
        error: GroupError,
    ) -> tuple[Any, ...]:
        module: Any = response_module(ApiKey.OFFSET_FETCH, version)
        one_topic = getattr(module, "OffsetFetchResponseTopics", None) or module.OffsetFetchResponseTopic
        one_partition = (
            getattr(module, "OffsetFetchResponsePartitions", None) or module.OffsetFetchResponsePartition
        )

        def partition(number: int, found: CommittedOffset | None, code: ErrorCode) -> Any:
            return made(
                one_partition,
                partition_index=number,
                committed_offset=-1 if found is None else found.offset,
                committed_leader_epoch=-1 if found is None else found.leader_epoch,
                metadata="" if found is None else found.metadata,
                error_code=code,
            )

        def topic(name: str | None, topic_id: Any, partitions: Iterable[Any]) -> Any:
            return made(one_topic, name=name, topic_id=topic_id, partitions=tuple(partitions))

        if asked.topics is None:
            return tuple(
                topic(
                    served.name,
                    served.topic_id,
                    (partition(number, one, ErrorCode.none) for number, one in sorted(partitions.items())),
                )
                for each, partitions in group.offsets.items()
                if (served := self._served(each)) is not None and access.may(Operation.DESCRIBE, served.name)
            )
        answers = []
        for each in asked.topics:
            by_id = _id_in(each)
            served = self._topics.find(by_id) if by_id is not None else self._topics.by_name(each.name)
            name = served.name if served is not None else getattr(each, "name", None)
            code = ErrorCode(error)
            if name is not None and not access.may(Operation.DESCRIBE, name):
                code = ErrorCode.topic_authorization_failed if by_id is None else ErrorCode.unknown_topic_id
            elif served is None and by_id is not None:
                code = ErrorCode.unknown_topic_id
            known = None if served is None or code is not ErrorCode.none else _group_topic(served)
            found = (
                partition(number, None if known is None else offset_of(group, known, number), code)
                for number in each.partition_indexes
            )
            answers.append(topic(getattr(each, "name", None), by_id, found))
        return tuple(answers)

    def _served(self, topic: GroupTopic) -> ServedTopic | None:
        """Return the topic of stored offsets, if it is still the same topic."""
        served = self._topics.by_name(topic.name)
        return served if served is not None and _group_topic(served) == topic else None

    async def offset_delete(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Delete offsets of a group that has no members."""
        module: Any = response_module(ApiKey.OFFSET_DELETE, version)
        error = group_fault(access, request.group_id, Operation.DELETE)
        removed = {
            each.name: {one.partition_index for one in each.partitions}
            async for each in in_steps(request.topics)
            if access.may(Operation.READ, each.name)
        }

        def transition(group: ConsumerGroup) -> Step[GroupError]:
            if not group.exists:
                return Step(group, GroupError.GROUP_ID_NOT_FOUND)
            if group.members:
                # Which topics the members read is written in their clients' own format.
                return Step(group, GroupError.GROUP_SUBSCRIBED_TO_TOPIC)
            return Step(without_offsets(group, removed), GroupError.NONE)

        if error is GroupError.NONE:
            try:
                error = await self._coordinator.apply(request.group_id, transition)
            except TieringError as fault:
                error = error_of(fault)
        is_of_topics = error is GroupError.GROUP_SUBSCRIBED_TO_TOPIC
        answered = error in {GroupError.NONE, GroupError.GROUP_SUBSCRIBED_TO_TOPIC}
        asked = request.topics if answered else ()
        answers: list[list[Any]] = [[] for _ in asked]
        every = [(at, each.name, one) for at, each in enumerate(asked) for one in each.partitions]
        async for at, name, one in in_steps(every):
            answers[at].append(
                module.OffsetDeleteResponsePartition(
                    partition_index=one.partition_index,
                    error_code=ErrorCode.topic_authorization_failed
                    if name not in removed
                    else ErrorCode(error if is_of_topics else 0),
                )
            )
        return module.OffsetDeleteResponse(
            error_code=ErrorCode.none if answered else ErrorCode(error),
            throttle_time=NO_DELAY,
            topics=tuple(
                [
                    module.OffsetDeleteResponseTopic(name=each.name, partitions=tuple(answers[at]))
                    async for at, each in in_steps(enumerate(asked))
                ]
            ),
        )

    async def describe_groups(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Return members and their assignments."""
        module: Any = response_module(ApiKey.DESCRIBE_GROUPS, version)
        is_asked = getattr(request, "include_authorized_operations", False)
        groups = []
        # A group that is named twice is read and described once.
        async for group_id in in_steps(dict.fromkeys(request.groups)):
            group, error = await self._read(group_id, access, Operation.DESCRIBE)
            # Groups of the newer protocol are described by another request.
            is_missing = error is GroupError.NONE and (not group.exists or group.is_newer)
            text = None
            group = ConsumerGroup(group_id) if is_missing else group
            if is_missing and version >= 6:  # noqa: PLR2004 earlier versions tell it by the state alone
                error, text = GroupError.GROUP_ID_NOT_FOUND, f"Group {group_id} not found."
            groups.append(
                made(
                    module.DescribedGroup,
                    error_code=ErrorCode(error),
                    error_message=text,
                    group_id=group_id,
                    group_state="Dead" if is_missing else state_name(group) if not error else "",
                    protocol_type=group.protocol_type or "",
                    protocol_data=group.protocol or "",
                    members=tuple(
                        made(
                            module.DescribedGroupMember,
                            member_id=one.member_id,
                            group_instance_id=one.instance_id,
                            client_id=one.client_id,
                            client_host=f"/{one.client_host}",
                            member_metadata=one.metadata_of(group.protocol),
                            member_assignment=one.assignment,
                        )
                        for one in group.members.values()
                    ),
                    authorized_operations=access.group_operations(group_id)
                    if is_asked and not error
                    else NOT_ASKED,
                )
            )
        return made(module.DescribeGroupsResponse, throttle_time=NO_DELAY, groups=tuple(groups))

    async def list_groups(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Return all groups that the client may know of."""
        module: Any = response_module(ApiKey.LIST_GROUPS, version)
        error, groups = GroupError.NONE, []
        try:
            groups = await self._coordinator.all_groups()
        except TieringError as fault:
            error = error_of(fault)
        states = {one.lower() for one in getattr(request, "states_filter", ())}
        types = {one.lower() for one in getattr(request, "types_filter", ())}
        return made(
            module.ListGroupsResponse,
            throttle_time=NO_DELAY,
            error_code=ErrorCode(error),
            groups=tuple(
                made(
                    module.ListedGroup,
                    group_id=one.group_id,
                    protocol_type=one.protocol_type or "",
                    group_state=state_name(one),
                    group_type=_type_name(one),
                )
                for one in groups
                if access.may_with_group(Operation.DESCRIBE, one.group_id)
                and (not states or state_name(one).lower() in states)
                and (not types or _type_name(one) in types)
            ),
        )

    async def delete_groups(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Delete groups without members."""
        module: Any = response_module(ApiKey.DELETE_GROUPS, version)
        results = []
        async for group_id in in_steps(dict.fromkeys(request.groups_names)):
            error = group_fault(access, group_id, Operation.DELETE)
            if error is GroupError.NONE:
                try:
                    error = await self._coordinator.apply(group_id, deleted)
                except TieringError as fault:
                    error = error_of(fault)
            results.append(module.DeletableGroupResult(group_id=group_id, error_code=ErrorCode(error)))
        return made(module.DeleteGroupsResponse, throttle_time=NO_DELAY, results=tuple(results))

    async def _read(
        self, group_id: str, access: Access, operation: Operation
    ) -> tuple[ConsumerGroup, GroupError]:
        """Return a group as it is now, or an empty one and an error."""
        error = group_fault(access, group_id, operation)
        if error is GroupError.NONE:
            try:
                return await self._coordinator.read(group_id), GroupError.NONE
            except TieringError as fault:
                error = error_of(fault)
        return ConsumerGroup(group_id), error


def _fault_of_epoch(group: ConsumerGroup, asked: Any) -> GroupError:
    """Check the member that asks, in the versions in which members of the newer protocol name themselves."""
    member_id, epoch = getattr(asked, "member_id", None), getattr(asked, "member_epoch", -1)
    if member_id is None or epoch < 0 or not group.is_newer:
        return GroupError.NONE
    return member_error(group, member_id, None, epoch)


def _commit_answer(
    version: int, request: Any, refused: dict[tuple[int, int], ErrorCode], error: GroupError
) -> Any:
    module: Any = response_module(ApiKey.OFFSET_COMMIT, version)
    return made(
        module.OffsetCommitResponse,
        throttle_time=NO_DELAY,
        topics=tuple(
            made(
                module.OffsetCommitResponseTopic,
                name=getattr(topic, "name", None),
                topic_id=getattr(topic, "topic_id", None),
                partitions=tuple(
                    module.OffsetCommitResponsePartition(
                        partition_index=one.partition_index,
                        error_code=ErrorCode(error)
                        if error is not GroupError.NONE
                        else refused.get((at, number), ErrorCode.none),
                    )
                    for number, one in enumerate(topic.partitions)
                ),
            )
            for at, topic in enumerate(request.topics)
        ),
    )


def _entry_bytes(topics: Collection[Collection[Any]]) -> int:
    """Return about how many bytes *topics* and their partitions take in a request."""
    return _PARTITION_BYTES * (len(topics) + sum(map(len, topics)))


def _id_in(asked: Any) -> UUID | None:
    """Return the id of a topic in a request; None in versions that name topics."""
    if not hasattr(asked, "topic_id"):
        return None
    # kio has None for the id of zeros, which no topic has.
    return asked.topic_id or _NO_ID


def _group_topic(topic: ServedTopic) -> GroupTopic:
    return GroupTopic(topic.name, topic.manifest.key.topic_id)


def _ms(given: timedelta | None) -> int:
    return -1 if given is None else round(given.total_seconds() * 1000)
