"""
The requests of the newer group protocol (KIP-848), and what the answers of both protocols share.

A member of it asks with each heartbeat, and is told what it may read. Subscriptions by regular expression are
refused: a client's expression could keep this process busy.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, Final, TypeAlias
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.static.primitive import i32Timedelta

from tieringd.endpoint.access import Access, Operation
from tieringd.endpoint.cluster_answers import NO_DELAY
from tieringd.endpoint.endpoint_settings import ApiKey
from tieringd.endpoint.group_coordinator import GroupCoordinator
from tieringd.endpoint.served_manifests import ServedTopics
from tieringd.errors import ObjectTooLarge, ProtocolViolation, TieringError
from tieringd.formats.group_documents import is_storable_group
from tieringd.formats.kafka_wire.messages import made, response_module
from tieringd.model.consumer_group import (
    ConsumerGroup,
    GroupMember,
    GroupPartition,
    GroupState,
    SubscribedTopic,
)
from tieringd.policies.consumer_protocol import LEAVES, ConsumerHeartbeat, HeartbeatReply, is_settled
from tieringd.policies.group_membership import GroupError
from tieringd.storage.threads import in_steps

NOT_ASKED: Final = -(2**31)
"""In place of allowed operations that were not asked for."""
_NAME_MAX: Final = 255
_CONSUMER: Final = 1
"""The type of a member that follows this protocol, and not the classic one."""
_STATES: Final = {
    GroupState.EMPTY: "Empty",
    GroupState.PREPARING: "PreparingRebalance",
    GroupState.COMPLETING: "CompletingRebalance",
    GroupState.STABLE: "Stable",
}


@dataclass(frozen=True, slots=True)
class Client:
    """The client that a request came from."""

    client_id: str
    host: str
    is_connected: Callable[[], bool]
    """Says whether the client still has its connection, as far as the kernel knows."""


Handler: TypeAlias = Callable[[int, Any, Access, Client], Coroutine[Any, Any, Any]]


class NewerGroupAnswers:
    """ConsumerGroupHeartbeat and ConsumerGroupDescribe."""

    def __init__(self, topics: ServedTopics, coordinator: GroupCoordinator) -> None:
        self._topics = topics
        self._coordinator = coordinator
        self.handlers: dict[int, Handler] = {
            ApiKey.CONSUMER_GROUP_HEARTBEAT: self.heartbeat,
            ApiKey.CONSUMER_GROUP_DESCRIBE: self.describe,
        }

    async def heartbeat(self, version: int, request: Any, access: Access, client: Client) -> Any:
        """Tell a member what it may read."""
        arrived = self._coordinator.arrival(request.group_id, request.member_id)
        await self._topics.ensure_fresh()
        module: Any = response_module(ApiKey.CONSUMER_GROUP_HEARTBEAT, version)
        error, text = self._fault(request, access, client)
        # In version 0 the endpoint gives a new member its id.
        member_id = request.member_id or secrets.token_hex(16)
        reply = HeartbeatReply(error)
        if error is GroupError.NONE:
            try:
                reply = await self._coordinator.consumer_heartbeat(
                    request.group_id,
                    self._asked(request, member_id, client),
                    self._topic_of,
                    arrived=arrived,
                )
            except TieringError as fault:
                reply = HeartbeatReply(error_of(fault))
        assigned = reply.assigned
        limits = self._coordinator.limits
        return made(
            module.ConsumerGroupHeartbeatResponse,
            throttle_time=NO_DELAY,
            error_code=ErrorCode(reply.error),
            error_message=text,
            member_id=member_id,
            member_epoch=reply.epoch,
            heartbeat_interval=i32Timedelta.parse(timedelta(milliseconds=limits.newer_heartbeat_ms)),
            assignment=None
            if assigned is None
            else module.Assignment(
                topic_partitions=tuple(
                    module.TopicPartitions(topic_id=topic_id, partitions=numbers)
                    for topic_id, numbers in _by_topic(assigned)
                )
            ),
        )

    def _fault(self, request: Any, access: Access, client: Client) -> tuple[GroupError, str | None]:
        error = group_fault(access, request.group_id, Operation.READ)
        if error is not GroupError.NONE:
            return error, None
        if getattr(request, "subscribed_topic_regex", None):
            return GroupError.INVALID_REQUEST, "This endpoint matches no regular expressions: name the topics"
        names = (request.member_id, request.instance_id, client.client_id)
        if any(len(name or "") > _NAME_MAX for name in names) or request.member_epoch < LEAVES - 1:
            return GroupError.INVALID_REQUEST, "A name is too long, or the epoch is none"
        if request.member_epoch != 0 and not request.member_id:
            return GroupError.INVALID_REQUEST, "A member that has joined names itself"
        if any(not access.may(Operation.DESCRIBE, one) for one in request.subscribed_topic_names or ()):
            return GroupError.TOPIC_AUTHORIZATION_FAILED, None
        return GroupError.NONE, None

    def _asked(self, request: Any, member_id: str, client: Client) -> ConsumerHeartbeat:
        rebalance_timeout_ms = round(request.rebalance_timeout.total_seconds() * 1000)
        owned = request.topic_partitions
        return ConsumerHeartbeat(
            GroupMember(
                member_id,
                request.instance_id,
                client.client_id,
                client.host,
                self._coordinator.endpoint_id,
                self._coordinator.limits.newer_session_timeout_ms,
                rebalance_timeout_ms,
            ),
            request.member_epoch,
            None if request.subscribed_topic_names is None else tuple(request.subscribed_topic_names),
            request.server_assignor,
            None
            if owned is None
            # kio has None for the id of zeros, which no topic has.
            else frozenset(
                (one.topic_id.hex, number) for one in owned if one.topic_id for number in one.partitions
            ),
        )

    def _topic_of(self, name: str) -> SubscribedTopic | None:
        served = self._topics.by_name(name)
        return None if served is None else SubscribedTopic(served.topic_id.hex, served.partition_count)

    async def describe(self, version: int, request: Any, access: Access, _client: Client) -> Any:
        """Return members, with what they have and what they are to have."""
        module: Any = response_module(ApiKey.CONSUMER_GROUP_DESCRIBE, version)
        described = []
        # A group that is named twice is read and described once.
        async for group_id in in_steps(dict.fromkeys(request.group_ids)):
            error, text = group_fault(access, group_id, Operation.DESCRIBE), None
            group = ConsumerGroup(group_id)
            if error is GroupError.NONE:
                try:
                    group = await self._coordinator.read(group_id)
                except TieringError as fault:
                    error = error_of(fault)
            if error is GroupError.NONE and not group.is_newer:
                error, text = GroupError.GROUP_ID_NOT_FOUND, f"Group {group_id} is not a consumer group."
                group = ConsumerGroup(group_id)
            elif not all(access.may(Operation.DESCRIBE, one) for one in _topics_of(group)):
                error, text = GroupError.TOPIC_AUTHORIZATION_FAILED, "No rule allows to describe its topics"
                group = ConsumerGroup(group_id)
            is_asked = request.include_authorized_operations and error is GroupError.NONE
            described.append(
                module.DescribedGroup(
                    error_code=ErrorCode(error),
                    error_message=text,
                    group_id=group_id,
                    group_state=state_name(group),
                    group_epoch=group.generation,
                    assignment_epoch=group.generation,
                    assignor_name=group.protocol or "",
                    members=tuple(self._member(module, group, one) for one in group.members.values()),
                    authorized_operations=access.group_operations(group_id) if is_asked else NOT_ASKED,
                )
            )
        return module.ConsumerGroupDescribeResponse(throttle_time=NO_DELAY, groups=tuple(described))

    def _member(self, module: Any, group: ConsumerGroup, member: GroupMember) -> Any:
        consumer = member.consumer
        assert consumer is not None, "members of such a group follow the newer protocol"
        names = {UUID(one.topic_id): name for name, one in group.topics.items()}

        def assignment(partitions: frozenset[GroupPartition]) -> Any:
            return module.Assignment(
                topic_partitions=tuple(
                    module.TopicPartitions(
                        topic_id=topic_id, topic_name=names.get(topic_id, ""), partitions=numbers
                    )
                    for topic_id, numbers in _by_topic(partitions)
                )
            )

        return made(
            module.Member,
            member_id=member.member_id,
            instance_id=member.instance_id,
            rack_id=None,
            member_epoch=consumer.epoch,
            client_id=member.client_id,
            client_host=f"/{member.client_host}",
            subscribed_topic_names=consumer.subscribed,
            subscribed_topic_regex=None,
            assignment=assignment(consumer.assigned),
            target_assignment=assignment(consumer.target),
            member_type=_CONSUMER,
        )


def _topics_of(group: ConsumerGroup) -> set[str]:
    """Return the names of all topics that a description of *group* shows."""
    subscribed = (one.consumer.subscribed for one in group.members.values() if one.consumer is not None)
    return {*group.topics, *chain.from_iterable(subscribed)}


def _by_topic(partitions: frozenset[GroupPartition]) -> list[tuple[UUID, tuple[int, ...]]]:
    found: dict[UUID, list[int]] = {}
    for topic_id, number in sorted(partitions):
        found.setdefault(UUID(topic_id), []).append(number)
    return [(topic_id, tuple(numbers)) for topic_id, numbers in found.items()]


def state_name(group: ConsumerGroup) -> str:
    """Return the name that Kafka's tools have for a group's state."""
    if group.is_newer and not is_settled(group):
        return "Reconciling"
    return _STATES[group.state]


def group_fault(access: Access, group_id: str, operation: Operation) -> GroupError:
    """Say why a client may not ask for a group; `NONE` if it may."""
    if not access.may_with_group(operation, group_id):
        return GroupError.GROUP_AUTHORIZATION_FAILED
    return GroupError.NONE if is_storable_group(group_id) else GroupError.INVALID_GROUP_ID


def error_of(fault: TieringError) -> GroupError:
    """
    Return the error for a group that could not be read or written. Clients try again, elsewhere too.

    Raises:
        ProtocolViolation: It is *fault*: the client's connection has to be closed.
    """
    if isinstance(fault, ProtocolViolation):
        raise fault
    if isinstance(fault, ObjectTooLarge):
        return GroupError.GROUP_MAX_SIZE_REACHED
    return GroupError.COORDINATOR_NOT_AVAILABLE
