"""
The rules of Kafka's newer group protocol (KIP-848): the endpoint assigns partitions, and members follow.

Each change of members, subscriptions or topics begins an epoch of the group with a new target. A member comes
to its target in steps, one with each heartbeat: first it gives up what is not in the target, then it reaches
the epoch, and gets what the others have given up. A partition has no second owner before the first one has
said that it reads it no more, or has been removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tieringd.model.consumer_group import (
    ConsumerGroup,
    ConsumerMember,
    GroupMember,
    GroupPartition,
    GroupState,
    SubscribedTopic,
)
from tieringd.policies.group_membership import GroupError, GroupLimits, Step, watched_by, without_members
from tieringd.policies.partition_assignment import ASSIGNORS, retargeted

JOINS: Final = 0
"""The epoch with which a member joins."""
LEAVES: Final = -1
LEAVES_FOR_A_WHILE: Final = -2
"""The epochs with which a member leaves; the second is of a static one."""


@dataclass(frozen=True, slots=True)
class ConsumerHeartbeat:
    """A member's heartbeat, with what it wants to be changed."""

    member: GroupMember
    """As it is when it joins. Its rebalance timeout is -1 where it stays as it was."""
    epoch: int
    subscribed: tuple[str, ...] | None
    """None where they stay as they were."""
    assignor: str | None
    owned: frozenset[GroupPartition] | None
    """What the member reads now; None where that stays as it was."""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """What a member is told."""

    error: GroupError
    epoch: int = 0
    assigned: frozenset[GroupPartition] | None = None
    """What the member may read; None where it knows."""


def consumer_heartbeat(
    group: ConsumerGroup,
    request: ConsumerHeartbeat,
    topic_of: Callable[[str], SubscribedTopic | None],
    limits: GroupLimits,
    *,
    now_ms: int,
    is_again: bool = False,
) -> Step[HeartbeatReply]:
    """
    Let a member join, go on, or leave.

    Args:
        group: The group before.
        request: What the member says.
        topic_of: What is known of a topic by its name; None where there is no such topic.
        limits: The bounds of groups.
        now_ms: The time, for a group that gets empty.
        is_again: Whether this request was decided before. *group* may have its change by then, and the member
            was not told of it.
    """
    member_id = request.member.member_id
    error = _fault(group, request, limits, is_again=is_again)
    if error is not GroupError.NONE:
        return Step(group, HeartbeatReply(error))
    if request.epoch in {LEAVES, LEAVES_FOR_A_WHILE}:
        left = without_members(group, {member_id}, now_ms=now_ms)
        return Step(left, HeartbeatReply(GroupError.NONE, request.epoch))
    if _changes_nothing(group, request, topic_of, limits):
        consumer = _consumer_of(group, member_id)
        told = consumer.assigned if is_again or request.owned is not None else None
        return Step(group, HeartbeatReply(GroupError.NONE, consumer.epoch, told))
    changed = _subscribed(group, request, topic_of, limits)
    before = _consumer_of(changed, member_id).assigned
    changed = _reconciled(changed, member_id, request.owned)
    consumer = _consumer_of(changed, member_id)
    is_asked = is_again or request.epoch == JOINS or request.owned is not None
    is_told = is_asked or consumer.assigned != before or request.epoch != consumer.epoch
    assigned = consumer.assigned if is_told else None
    return Step(changed, HeartbeatReply(GroupError.NONE, consumer.epoch, assigned))


def _fault(
    group: ConsumerGroup, request: ConsumerHeartbeat, limits: GroupLimits, *, is_again: bool
) -> GroupError:
    member_id, instance_id = request.member.member_id, request.member.instance_id
    if group.members and not group.is_newer:
        return GroupError.GROUP_ID_NOT_FOUND
    if request.assignor is not None and request.assignor not in ASSIGNORS:
        return GroupError.UNSUPPORTED_ASSIGNOR
    known = group.members.get(member_id)
    if request.epoch == JOINS:
        return _fault_of_join(group, request, limits)
    if known is None or known.consumer is None:
        has_left = is_again and request.epoch in {LEAVES, LEAVES_FOR_A_WHILE}
        return GroupError.NONE if has_left else GroupError.UNKNOWN_MEMBER_ID
    if known.instance_id != instance_id and instance_id is not None:
        return GroupError.FENCED_INSTANCE_ID
    return (
        GroupError.NONE if request.epoch < 0 else _fault_of_epoch(known.consumer, request, is_again=is_again)
    )


def _fault_of_join(group: ConsumerGroup, request: ConsumerHeartbeat, limits: GroupLimits) -> GroupError:
    member_id, instance_id = request.member.member_id, request.member.instance_id
    static = None if instance_id is None else group.static_member(instance_id)
    if static is not None and static.member_id != member_id:
        return GroupError.UNRELEASED_INSTANCE_ID
    is_full = member_id not in group.members and len(group.members) >= limits.members
    size = sum(map(len, request.subscribed or ()))
    return GroupError.GROUP_MAX_SIZE_REACHED if is_full or size > limits.member_bytes else GroupError.NONE


def _fault_of_epoch(consumer: ConsumerMember, request: ConsumerHeartbeat, *, is_again: bool) -> GroupError:
    if request.epoch == consumer.epoch:
        return GroupError.NONE
    # The answer that told the current epoch may have been lost.
    is_before = request.epoch == consumer.previous_epoch and request.epoch < consumer.epoch
    is_inside = request.owned is not None and request.owned <= consumer.assigned
    # Decided again, the request may have moved the epoch itself, and the member is told all that it has.
    is_own = is_again and request.owned is None
    return GroupError.NONE if is_before and (is_inside or is_own) else GroupError.FENCED_MEMBER_EPOCH


def _consumer_of(group: ConsumerGroup, member_id: str) -> ConsumerMember:
    consumer = group.members[member_id].consumer
    assert consumer is not None, "members of such a group follow the newer protocol"
    return consumer


def _changes_nothing(
    group: ConsumerGroup,
    request: ConsumerHeartbeat,
    topic_of: Callable[[str], SubscribedTopic | None],
    limits: GroupLimits,
) -> bool:
    """
    Say that a member has what it is to have, and tells nothing new.

    Almost every heartbeat is of this kind. It is decided from the member and its own topics alone: a large
    group has a hundred thousand pairs of member and topic. Topics of the others are seen by their heartbeats.
    """
    told = request.member
    known = group.members.get(told.member_id)
    if known is None or known.consumer is None or request.epoch == JOINS:
        return False
    consumer = known.consumer
    return (
        request.epoch == consumer.epoch == group.generation
        and consumer.assigned == consumer.target
        and not consumer.revoking
        and request.subscribed in {None, consumer.subscribed}
        and request.assignor in {None, consumer.assignor}
        and (told.rebalance_timeout_ms < 0 or told.rebalance_timeout_ms == known.rebalance_timeout_ms)
        and known.session_timeout_ms == limits.newer_session_timeout_ms
        and known.endpoint_id == told.endpoint_id
        and all(_is_current(group, name, topic_of) for name in consumer.subscribed)
    )


def _subscribed(
    group: ConsumerGroup,
    request: ConsumerHeartbeat,
    topic_of: Callable[[str], SubscribedTopic | None],
    limits: GroupLimits,
) -> ConsumerGroup:
    """Return the group with what the member has told of itself, in a new epoch if that makes a difference."""
    told = request.member
    known = group.members.get(told.member_id)
    if known is None:
        consumer, rebalance_timeout_ms = ConsumerMember(), told.rebalance_timeout_ms
    else:
        consumer, rebalance_timeout_ms = _consumer_of(group, told.member_id), known.rebalance_timeout_ms
    if told.rebalance_timeout_ms >= 0:
        rebalance_timeout_ms = told.rebalance_timeout_ms
    subscribed = consumer.subscribed if request.subscribed is None else tuple(sorted(set(request.subscribed)))
    assignor = consumer.assignor if request.assignor is None else request.assignor
    member = replace(
        told if known is None else known,
        rebalance_timeout_ms=rebalance_timeout_ms,
        session_timeout_ms=limits.newer_session_timeout_ms,
        consumer=replace(consumer, subscribed=subscribed, assignor=assignor),
    )
    changed = replace(
        group.with_member(member), state=GroupState.STABLE, protocol_type="consumer", emptied_at_ms=None
    )
    changed = watched_by(changed, told.member_id, told.endpoint_id)
    wanted = {name for one in changed.members.values() if one.consumer for name in one.consumer.subscribed}
    newest = {name: _newer(group.topics.get(name), topic_of(name)) for name in sorted(wanted)}
    changed = replace(changed, topics={name: one for name, one in newest.items() if one is not None})
    is_same = (
        known is not None
        and changed.topics == group.topics
        and (subscribed, assignor) == (consumer.subscribed, consumer.assignor)
    )
    return changed if is_same else retargeted(changed)


def _is_current(group: ConsumerGroup, topic: str, topic_of: Callable[[str], SubscribedTopic | None]) -> bool:
    """Say whether nothing newer is known of a topic than what the group counts on."""
    known = group.topics.get(topic)
    return _newer(known, topic_of(topic)) == known


def _newer(known: SubscribedTopic | None, seen: SubscribedTopic | None) -> SubscribedTopic | None:
    """Return what is to count of a topic. Another endpoint may know more: partitions are only added."""
    if known is None or seen is None:
        return known or seen
    if known.topic_id == seen.topic_id and seen.partition_count < known.partition_count:
        return known
    return seen


def _reconciled(
    group: ConsumerGroup, member_id: str, owned: frozenset[GroupPartition] | None
) -> ConsumerGroup:
    """Return the group with its member one step nearer to its target."""
    consumer = _consumer_of(group, member_id)
    to_revoke = consumer.revoking | (consumer.assigned - consumer.target)
    if to_revoke:
        is_given_up = owned is not None and not to_revoke & owned
        kept = consumer.assigned & consumer.target
        if not is_given_up:
            return _with_consumer(
                group, member_id, replace(consumer, assigned=kept - to_revoke, revoking=to_revoke)
            )
        consumer = replace(consumer, assigned=kept - to_revoke, revoking=frozenset())
    taken = {
        partition
        for name, one in group.members.items()
        if name != member_id and one.consumer is not None
        for partition in one.consumer.assigned | one.consumer.revoking
    }
    assigned = consumer.assigned | (consumer.target - taken)
    if consumer.epoch != group.generation:
        consumer = replace(consumer, previous_epoch=consumer.epoch, epoch=group.generation)
    return _with_consumer(group, member_id, replace(consumer, assigned=assigned))


def _with_consumer(group: ConsumerGroup, member_id: str, consumer: ConsumerMember) -> ConsumerGroup:
    return group.with_member(replace(group.members[member_id], consumer=consumer))


def is_settled(group: ConsumerGroup) -> bool:
    """Say whether each member has reached its target."""
    return all(
        one.consumer is not None
        and one.consumer.epoch == group.generation
        and one.consumer.assigned == one.consumer.target
        for one in group.members.values()
    )
