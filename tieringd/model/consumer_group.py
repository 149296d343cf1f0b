"""
A consumer group of the archive-only endpoint: its members, their assignments, and the committed offsets.

One value holds all of it, because one object holds all of it: a commit of offsets is written together with
the generation that it was made under, so a member of an older generation cannot write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

NO_GENERATION = -1
"""The generation of a consumer that is no member of a group."""


class GroupState(Enum):
    """The states of a group, as Kafka has them."""

    EMPTY = "empty"
    """No members; perhaps offsets."""
    PREPARING = "preparing_rebalance"
    """Members join the next generation."""
    COMPLETING = "completing_rebalance"
    """The generation has begun, and its leader has not yet assigned partitions."""
    STABLE = "stable"
    """Each member has its assignment."""


GroupPartition: TypeAlias = tuple[str, int]
"""A partition as the newer protocol names it: the topic's UUID in hex digits, and the number."""


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    """What the newer protocol (KIP-848) knows of a member. The endpoint assigns partitions there."""

    epoch: int = 0
    """The group's epoch that the member has reached; 0 before the first."""
    previous_epoch: int = 0
    """The one before, which the member still names when an answer was lost."""
    subscribed: tuple[str, ...] = ()
    """The names of topics, in order."""
    assignor: str | None = None
    target: frozenset[GroupPartition] = frozenset()
    """What the member is to have in the group's epoch."""
    assigned: frozenset[GroupPartition] = frozenset()
    """What the member may have now."""
    revoking: frozenset[GroupPartition] = frozenset()
    """What the member has to give up before anything else happens. No other member gets it before."""


@dataclass(frozen=True, slots=True)
class SubscribedTopic:
    """A topic as the group's targets count on it."""

    topic_id: str
    """Its UUID in hex digits, as clients know it."""
    partition_count: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One consumer of a group."""

    member_id: str
    instance_id: str | None
    """Of a static member: the name that outlives its process."""
    client_id: str
    client_host: str
    endpoint_id: str
    """The endpoint that the member was last connected to. It watches over the member's heartbeats."""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...] = ()
    """The assignment strategies that the member knows, the preferred one first, each with its metadata."""
    assignment: bytes = b""
    """What the leader has assigned, in the clients' own format."""
    has_joined: bool = False
    """Whether the member has joined the generation that is being prepared."""
    consumer: ConsumerMember | None = None
    """In a group of the newer protocol; the fields from *protocols* on then mean nothing."""

    def metadata_of(self, protocol: str | None) -> bytes:
        """Return the member's metadata for a strategy; empty where it does not know that."""
        return dict(self.protocols).get(protocol or "", b"")


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """The offset from which a group goes on in one partition."""

    offset: int
    leader_epoch: int
    """That of the last consumed record; -1 where the client has told none."""
    metadata: str
    committed_at_ms: int


@dataclass(frozen=True, slots=True)
class GroupTopic:
    """
    A topic of which a group has offsets: by name and id.

    A topic that was created again shares nothing with the old one, and its offsets count from 0 again.
    """

    name: str
    topic_id: str
    """As the topic's manifest has it."""


Offsets: TypeAlias = Mapping[GroupTopic, Mapping[int, CommittedOffset]]
"""By topic and partition number."""


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """The whole state of one group. A group that does not exist is `ConsumerGroup(group_id)`."""

    group_id: str
    state: GroupState = GroupState.EMPTY
    generation: int = 0
    protocol_type: str | None = None
    """What the members are: "consumer" for consumers; None before the first member."""
    protocol: str | None = None
    """The strategy of the current generation."""
    leader: str | None = None
    is_first_round: bool = False
    """While preparing: whether the group had no members before, so that more may be about to come."""
    members: Mapping[str, GroupMember] = field(default_factory=dict)
    """By member id, in the order in which they came."""
    offsets: Offsets = field(default_factory=dict)
    emptied_at_ms: int | None = None
    """Since when there are no members; None with members, and before the first one."""
    topics: Mapping[str, SubscribedTopic] = field(default_factory=dict)
    """In a group of the newer protocol: the topics that its members have subscribed to, by name."""

    @property
    def exists(self) -> bool:
        """Say whether there is anything to keep of the group."""
        return bool(self.members or self.offsets)

    @property
    def is_newer(self) -> bool:
        """Say whether its members follow the newer protocol, in which the generation is the group's epoch."""
        return any(one.consumer is not None for one in self.members.values())

    @property
    def simple(self) -> bool:
        """Say whether offsets may be committed by consumers that are no members."""
        return not self.members

    def static_member(self, instance_id: str) -> GroupMember | None:
        """Return the member with this instance id."""
        return next((one for one in self.members.values() if one.instance_id == instance_id), None)

    def with_member(self, member: GroupMember) -> ConsumerGroup:
        """Return the group with *member*, in its old place if it is there."""
        return replace(self, members={**self.members, member.member_id: member})


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as an object has it, with what tells commits apart."""

    group: ConsumerGroup
    writer_id: str
    """The endpoint that has written it."""
    commit_number: int
    """How many commits that endpoint had made, this one included."""
