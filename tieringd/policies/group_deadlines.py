"""
When a member counts as gone, and when a round of a rebalance is over, as one endpoint sees it.

No two endpoints compare their clocks. Each measures from what it has seen itself: a member's last
heartbeat, the end of another endpoint's lease, the first sight of a round. An endpoint that sees something
late acts late, and never early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tieringd.model.consumer_group import ConsumerGroup, GroupState
from tieringd.policies.group_membership import GroupLimits


@dataclass(frozen=True, slots=True)
class Sightings:
    """What an endpoint has seen of a group, in milliseconds of its own steady clock."""

    own_endpoint_id: str
    heard_ms: Mapping[str, int]
    """By member id: the last request of each member that is connected here."""
    gone_since_ms: Callable[[str], int | None]
    """By endpoint id: since when its lease is known to have ended; None while it is in force."""
    round_seen_ms: int
    """When the group was first seen in its current generation and state."""
    now_ms: int


@dataclass(frozen=True, slots=True)
class DueNow:
    """What is to be done about a group now."""

    expired: frozenset[str] = frozenset()
    """Members that count as gone."""
    is_round_over: bool = False
    """Whether the current round has to end without those that are missing."""

    def __bool__(self) -> bool:
        return bool(self.expired) or self.is_round_over


def due_now(group: ConsumerGroup, seen: Sightings, limits: GroupLimits) -> DueNow:
    """Say which members are gone, and whether the round is over."""
    return DueNow(
        frozenset(name for name in group.members if _is_expired(group, name, seen)),
        _is_round_over(group, seen, limits),
    )


def _is_expired(group: ConsumerGroup, member_id: str, seen: Sightings) -> bool:
    member = group.members[member_id]
    if member.endpoint_id == seen.own_endpoint_id:
        since = seen.heard_ms.get(member_id)
    else:
        since = seen.gone_since_ms(member.endpoint_id)
    if since is not None and seen.now_ms - since >= member.session_timeout_ms:
        return True
    # It is told to give up partitions at its next heartbeat, which is within the session timeout.
    allowed_ms = member.rebalance_timeout_ms + member.session_timeout_ms
    is_revoking = member.consumer is not None and bool(member.consumer.revoking)
    return is_revoking and seen.now_ms - seen.round_seen_ms >= allowed_ms


def _is_round_over(group: ConsumerGroup, seen: Sightings, limits: GroupLimits) -> bool:
    if group.state not in {GroupState.PREPARING, GroupState.COMPLETING}:
        return False
    allowed = max(one.rebalance_timeout_ms for one in group.members.values())
    if group.state is GroupState.PREPARING and group.is_first_round:
        allowed = min(allowed, limits.first_round_ms)
    return seen.now_ms - seen.round_seen_ms >= allowed
