"""
The rules of Kafka's classic group protocol: who is a member, in which generation, and with which assignment.

A generation is made in two rounds. Members join, and the last of them, or a deadline, begins the generation.
Its leader then assigns partitions, and each member takes its assignment. Any change of members begins a new
generation. What a member asks under another generation than the group's is refused.

Every function takes a group and returns a `Step`: the group as it is to be stored, and the reply. A step that
is made again from its own result changes nothing more, so it may be repeated when its outcome is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Generic, TypeVar

from tieringd.model.consumer_group import ConsumerGroup, GroupMember, GroupState
from tieringd.policies.partition_assignment import retargeted

T_co = TypeVar("T_co", covariant=True)


class GroupError(IntEnum):
    """The errors of groups, as Kafka numbers them."""

    NONE = 0
    UNKNOWN_TOPIC_OR_PARTITION = 3
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_NOT_AVAILABLE = 15
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113


_NEWER_HEARTBEAT_MS_MAX: Final = 5000
"""As Kafka's group.consumer.heartbeat.interval.ms."""
_NEWER_HEARTBEATS: Final = 3


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The bounds of groups."""

    groups: int = 1000
    """In the archive, without those that were deleted."""
    members: int = 250
    """Of one group."""
    member_bytes: int = 64 << 10
    """Of the metadata that a member joins with, and of its assignment."""
    offset_metadata_bytes: int = 4096
    """Of the text with one committed offset."""
    group_bytes: int = 4 << 20
    """Of a group's object."""
    min_session_timeout_ms: int = 6000
    max_session_timeout_ms: int = 1_800_000
    first_round_ms: int = 3000
    """How long a group that was empty waits for more members."""
    offsets_retention_ms: int = 7 * 24 * 3_600_000
    newer_session_timeout_ms: int = 45_000
    """In the newer protocol the endpoint says how long a member may be silent."""

    @property
    def newer_heartbeat_ms(self) -> int:
        """Return how often a member of the newer protocol is to speak: three times within its session."""
        return min(_NEWER_HEARTBEAT_MS_MAX, self.newer_session_timeout_ms // _NEWER_HEARTBEATS)


@dataclass(frozen=True, slots=True)
class Step(Generic[T_co]):
    """A group after a request, and the reply to it."""

    group: ConsumerGroup
    reply: T_co


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A consumer that wants to be in the next generation."""

    member: GroupMember
    """With the id that it is to have, if it has none yet."""
    is_new: bool
    """Whether the id was made just now."""
    protocol_type: str


@dataclass(frozen=True, slots=True)
class JoinReply:
    """What became of a request to join."""

    error: GroupError
    generation: int = -1
    """The group's generation when the member joined. The answer is due when a later one has begun."""
    is_due: bool = False
    """Whether the answer is due at once: the member is in the current generation."""
    is_replaced: bool = False
    """Whether a static member came back and keeps its assignment."""
    old_member_id: str = ""
    """The id that the static member had before; empty where a write is made again."""


def join(group: ConsumerGroup, request: JoinRequest, limits: GroupLimits) -> Step[JoinReply]:
    """Let a consumer join, or join again."""
    member = request.member
    static = None if member.instance_id is None else group.static_member(member.instance_id)
    is_replacing = static is not None and static.member_id != member.member_id
    known = group.members.get(member.member_id)
    error = _fault_of_request(group, request, limits)
    if error is None:
        error = _fault_of_member(group, request, known, limits, is_replacing=is_replacing)
    if error is not None:
        return Step(group, JoinReply(error))
    if is_replacing and static is not None:
        return _replaced(group, static, request, limits)
    begun = replace(group, protocol_type=request.protocol_type, emptied_at_ms=None)
    if group.state is GroupState.PREPARING:
        return _joined(begun, member, limits)
    is_same = known is not None and known.protocols == member.protocols
    is_leader = member.member_id == group.leader
    if is_same and (group.state is GroupState.COMPLETING or not is_leader or request.is_new):
        # The answer to an earlier request was lost, or the member only asks where it stands.
        kept = watched_by(group, member.member_id, member.endpoint_id)
        # A leader that is new in a group that goes on has come back as a static member, and the write that
        # replaced it is made again. Its former id is not known any more.
        is_replaced = is_leader and request.is_new and group.state is GroupState.STABLE
        return Step(kept, JoinReply(GroupError.NONE, group.generation, is_due=True, is_replaced=is_replaced))
    was_empty = group.state is GroupState.EMPTY
    return _joined(replace(prepared(begun), is_first_round=was_empty), member, limits)


def _fault_of_request(group: ConsumerGroup, request: JoinRequest, limits: GroupLimits) -> GroupError | None:
    member = request.member
    if not limits.min_session_timeout_ms <= member.session_timeout_ms <= limits.max_session_timeout_ms:
        return GroupError.INVALID_SESSION_TIMEOUT
    if not request.protocol_type or not member.protocols:
        return GroupError.INCONSISTENT_GROUP_PROTOCOL
    if sum(len(name) + len(metadata) for name, metadata in member.protocols) > limits.member_bytes:
        return GroupError.GROUP_MAX_SIZE_REACHED
    others = [one for one in group.members.values() if one.member_id != member.member_id]
    if not others:
        return None
    is_other = request.protocol_type != group.protocol_type or group.is_newer
    is_strange = is_other or not _common_protocols([*others, member])
    return GroupError.INCONSISTENT_GROUP_PROTOCOL if is_strange else None


def _fault_of_member(
    group: ConsumerGroup,
    request: JoinRequest,
    known: GroupMember | None,
    limits: GroupLimits,
    *,
    is_replacing: bool,
) -> GroupError | None:
    if is_replacing:
        return None if request.is_new else GroupError.FENCED_INSTANCE_ID
    if known is not None:
        return None
    if not request.is_new:
        return GroupError.UNKNOWN_MEMBER_ID
    return GroupError.GROUP_MAX_SIZE_REACHED if len(group.members) >= limits.members else None


def _replaced(
    group: ConsumerGroup, static: GroupMember, request: JoinRequest, limits: GroupLimits
) -> Step[JoinReply]:
    """Let a static member come back under a new id. Its assignment stays if what it asks for is the same."""
    member = replace(request.member, assignment=static.assignment, has_joined=static.has_joined)
    members = {
        (member.member_id if one.member_id == static.member_id else one.member_id): (
            member if one.member_id == static.member_id else one
        )
        for one in group.members.values()
    }
    leader = member.member_id if group.leader == static.member_id else group.leader
    changed = replace(group, members=members, leader=leader)
    is_same = static.protocols == member.protocols
    if group.state is GroupState.STABLE and is_same:
        reply = JoinReply(
            GroupError.NONE, group.generation, is_due=True, is_replaced=True, old_member_id=static.member_id
        )
        return Step(changed, reply)
    if group.state is not GroupState.PREPARING:
        changed = prepared(changed)
    return _joined(changed, member, limits)


def _joined(group: ConsumerGroup, member: GroupMember, limits: GroupLimits) -> Step[JoinReply]:
    """Note that *member* has joined the generation that is being prepared, and begin it with the last one."""
    known = group.members.get(member.member_id)
    assignment = b"" if known is None else known.assignment
    changed = group.with_member(replace(member, has_joined=True, assignment=assignment))
    waits = changed.is_first_round and limits.first_round_ms > 0
    if not waits and all(one.has_joined for one in changed.members.values()):
        changed = begun_generation(changed)
    return Step(changed, JoinReply(GroupError.NONE, group.generation))


def prepared(group: ConsumerGroup) -> ConsumerGroup:
    """Return *group* while its next generation is prepared, which no member has joined yet."""
    members = {name: replace(one, has_joined=False) for name, one in group.members.items()}
    return replace(group, state=GroupState.PREPARING, members=members, is_first_round=False)


def begun_generation(group: ConsumerGroup) -> ConsumerGroup:
    """Return *group* with the generation that its members have joined. At least one has."""
    joined = [one for one in group.members.values() if one.has_joined]
    leader = group.leader if any(one.member_id == group.leader for one in joined) else joined[0].member_id
    members = {name: replace(one, has_joined=False, assignment=b"") for name, one in group.members.items()}
    return replace(
        group,
        state=GroupState.COMPLETING,
        generation=group.generation + 1,
        protocol=_chosen_protocol(list(group.members.values())),
        leader=leader,
        is_first_round=False,
        members=members,
    )


def _common_protocols(members: Sequence[GroupMember]) -> list[str]:
    """Return the strategies that all *members* know, in the order of the first one."""
    known = [frozenset(name for name, _ in one.protocols) for one in members]
    common = frozenset.intersection(*known)
    return [name for name, _ in members[0].protocols if name in common]


def _chosen_protocol(members: Sequence[GroupMember]) -> str:
    """Return the strategy that most members prefer among those that all know."""
    common = _common_protocols(members)
    votes = Counter(next(name for name, _ in one.protocols if name in common) for one in members)
    return max(common, key=lambda name: votes[name])


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """The generation that a member is in."""

    error: GroupError
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[GroupMember, ...] = ()
    """For the leader: all members."""


def join_answer(
    group: ConsumerGroup, member_id: str, reply: JoinReply, *, instance_id: str | None
) -> JoinAnswer | None:
    """Return the answer to a member that has joined; None while its generation is prepared."""
    if member_id not in group.members:
        return JoinAnswer(_error_of_gone(group, instance_id))
    is_preparing = group.state is GroupState.PREPARING
    if is_preparing and not reply.is_due and group.generation == reply.generation:
        # A member that did not come in time was dropped, and one whose round was begun anew asks again.
        return None if group.members[member_id].has_joined else JoinAnswer(GroupError.UNKNOWN_MEMBER_ID)
    leader = group.leader or ""
    is_leader = leader == member_id
    return JoinAnswer(
        GroupError.NONE,
        group.generation,
        group.protocol_type,
        group.protocol,
        leader,
        tuple(group.members.values()) if is_leader else (),
    )


def _error_of_gone(group: ConsumerGroup, instance_id: str | None) -> GroupError:
    """
    Return the error for a member that is in the group no more.

    One whose place another process has taken would join anew otherwise, and take the place back.
    """
    is_replaced = instance_id is not None and group.static_member(instance_id) is not None
    return GroupError.FENCED_INSTANCE_ID if is_replaced else GroupError.UNKNOWN_MEMBER_ID


def member_error(
    group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int
) -> GroupError:
    """Say whether a request is of a member of the current generation; `NONE` if it is."""
    if instance_id is not None:
        static = group.static_member(instance_id)
        if static is None:
            return GroupError.UNKNOWN_MEMBER_ID
        if static.member_id != member_id:
            return GroupError.FENCED_INSTANCE_ID
    member = group.members.get(member_id)
    if member is None:
        return GroupError.UNKNOWN_MEMBER_ID
    if member.consumer is not None:
        return GroupError.NONE if generation == member.consumer.epoch else GroupError.STALE_MEMBER_EPOCH
    return GroupError.NONE if generation == group.generation else GroupError.ILLEGAL_GENERATION


def watched_by(group: ConsumerGroup, member_id: str, endpoint_id: str) -> ConsumerGroup:
    """Return *group* with a member that is connected to this endpoint now."""
    member = group.members[member_id]
    if member.endpoint_id == endpoint_id:
        return group
    return group.with_member(replace(member, endpoint_id=endpoint_id))


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A member that asks for its assignment; the leader brings all of them."""

    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol: str | None
    endpoint_id: str
    assignments: Mapping[str, bytes]
    """By member id; empty unless it is the leader's."""


def sync(group: ConsumerGroup, request: SyncRequest, limits: GroupLimits) -> Step[GroupError]:
    """Take the leader's assignments. The reply is an error, or `NONE`: the assignment is there or will be."""
    error = member_error(group, request.member_id, request.instance_id, request.generation)
    if error is GroupError.NONE:
        told = ((request.protocol_type, group.protocol_type), (request.protocol, group.protocol))
        if any(given is not None and given != ours for given, ours in told):
            error = GroupError.INCONSISTENT_GROUP_PROTOCOL
        elif group.state is GroupState.PREPARING:
            error = GroupError.REBALANCE_IN_PROGRESS
    if error is not GroupError.NONE:
        return Step(group, error)
    changed = watched_by(group, request.member_id, request.endpoint_id)
    if changed.state is GroupState.COMPLETING and request.member_id == changed.leader:
        if any(len(one) > limits.member_bytes for one in request.assignments.values()):
            return Step(group, GroupError.GROUP_MAX_SIZE_REACHED)
        members = {
            name: replace(one, assignment=request.assignments.get(name, b""))
            for name, one in changed.members.items()
        }
        changed = replace(changed, state=GroupState.STABLE, members=members)
    return Step(changed, GroupError.NONE)


def sync_answer(
    group: ConsumerGroup, member_id: str, generation: int, *, instance_id: str | None
) -> tuple[GroupError, bytes] | None:
    """Return an error or the member's assignment; None while the leader has not assigned partitions."""
    member = group.members.get(member_id)
    if member is None:
        return _error_of_gone(group, instance_id), b""
    if group.generation != generation or group.state is GroupState.PREPARING:
        return GroupError.REBALANCE_IN_PROGRESS, b""
    return None if group.state is GroupState.COMPLETING else (GroupError.NONE, member.assignment)


def heartbeat(
    group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int, endpoint_id: str
) -> Step[GroupError]:
    """Say to a member whether its generation is still the current one."""
    error = member_error(group, member_id, instance_id, generation)
    if error is not GroupError.NONE:
        return Step(group, error)
    if group.state is GroupState.PREPARING:
        error = GroupError.REBALANCE_IN_PROGRESS
    return Step(watched_by(group, member_id, endpoint_id), error)


def leave(
    group: ConsumerGroup, leaving: Sequence[tuple[str, str | None]], *, now_ms: int
) -> Step[tuple[GroupError, ...]]:
    """Let members leave, each by its id and instance id. A tool may name a static one by the latter alone."""
    errors: list[GroupError] = []
    gone: set[str] = set()
    static_members = {one.instance_id: one for one in group.members.values() if one.instance_id is not None}
    for member_id, instance_id in leaving:
        static = None if instance_id is None else static_members.get(instance_id)
        found = member_id if instance_id is None else (static.member_id if static else "")
        if instance_id is not None and static and member_id not in {"", static.member_id}:
            errors.append(GroupError.FENCED_INSTANCE_ID)
        elif found not in group.members:
            errors.append(GroupError.UNKNOWN_MEMBER_ID)
        else:
            errors.append(GroupError.NONE)
            gone.add(found)
    return Step(without_members(group, gone, now_ms=now_ms), tuple(errors))


def without_members(group: ConsumerGroup, gone: Collection[str], *, now_ms: int) -> ConsumerGroup:
    """Return *group* without some members. Those that stay have to join the next generation."""
    members = {name: one for name, one in group.members.items() if name not in gone}
    if len(members) == len(group.members):
        return group
    changed = replace(group, members=members, leader=None if group.leader in gone else group.leader)
    if not members:
        return _emptied(changed, now_ms=now_ms)
    if group.is_newer:
        return retargeted(changed)
    if group.state is not GroupState.PREPARING:
        return prepared(changed)
    is_whole = not changed.is_first_round and all(one.has_joined for one in members.values())
    return begun_generation(changed) if is_whole else changed


def _emptied(group: ConsumerGroup, *, now_ms: int) -> ConsumerGroup:
    return replace(
        group,
        state=GroupState.EMPTY,
        generation=group.generation + 1,
        protocol=None,
        leader=None,
        is_first_round=False,
        members={},
        emptied_at_ms=now_ms,
        topics={},
    )


def end_round(group: ConsumerGroup, *, generation: int, state: GroupState, now_ms: int) -> ConsumerGroup:
    """
    End a round whose time is over, unless it has ended already.

    Members that have not joined in time are dropped, except static ones, which may be starting again. A
    leader that has not assigned partitions in time is dropped as well.
    """
    if (group.generation, group.state) != (generation, state):
        return group
    if state is GroupState.COMPLETING:
        leader = group.leader
        return group if leader is None else without_members(group, {leader}, now_ms=now_ms)
    if state is not GroupState.PREPARING:
        return group
    late = {name for name, one in group.members.items() if not one.has_joined and one.instance_id is None}
    members = {name: one for name, one in group.members.items() if name not in late}
    if not members:
        return _emptied(group, now_ms=now_ms)
    changed = replace(group, members=members)
    if not any(one.has_joined for one in members.values()):
        return changed
    return begun_generation(changed)
