"""
The rules for the committed offsets of a group: by whom they may be written, how long they stay.

A member commits under the current generation only. So what a member of an older generation has read last
never replaces what its successor has committed. A consumer that is no member, or a tool, may write offsets
while the group has no members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tieringd.model.consumer_group import (
    NO_GENERATION,
    CommittedOffset,
    ConsumerGroup,
    GroupState,
    GroupTopic,
    Offsets,
)
from tieringd.policies.group_membership import GroupError, Step, member_error, watched_by


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """Offsets that a member, or a consumer that is none, wants to have kept."""

    member_id: str
    instance_id: str | None
    generation: int
    endpoint_id: str
    offsets: Offsets


def commit(group: ConsumerGroup, request: CommitRequest) -> Step[GroupError]:
    """Keep offsets. They replace those before, also where they are smaller: a consumer may go back."""
    is_simple = request.generation <= NO_GENERATION and group.simple
    if not is_simple:
        error = member_error(group, request.member_id, request.instance_id, request.generation)
        if error is GroupError.NONE and group.state is GroupState.COMPLETING:
            error = GroupError.REBALANCE_IN_PROGRESS
        if error is not GroupError.NONE:
            return Step(group, error)
        group = watched_by(group, request.member_id, request.endpoint_id)
    return Step(replace(group, offsets=_merged(group.offsets, request.offsets)), GroupError.NONE)


def _merged(before: Offsets, added: Offsets) -> Offsets:
    newest = {topic.name: topic for topic in added}
    # Of a topic that was created again, only the newest counts.
    merged = {
        topic: partitions for topic, partitions in before.items() if newest.get(topic.name, topic) == topic
    }
    for topic, partitions in added.items():
        merged[topic] = {**merged.get(topic, {}), **partitions}
    return {topic: partitions for topic, partitions in merged.items() if partitions}


def knows_otherwise(group: ConsumerGroup, topics: Iterable[tuple[str, str | None]]) -> bool:
    """
    Say whether *group* has offsets of a topic with one of these names under another id.

    Then the topic was created again, and either these ids are old, or those in the group.
    """
    ids: dict[str, set[str]] = {}
    for topic in group.offsets:
        ids.setdefault(topic.name, set()).add(topic.topic_id)
    return any(ids.get(name, set()) - {topic_id} for name, topic_id in topics)


def changed_offsets(before: ConsumerGroup, after: ConsumerGroup) -> Iterator[tuple[GroupTopic, int]]:
    """Yield the partitions whose offset is not the same in both states, or is in one of them alone."""
    for topic in before.offsets.keys() | after.offsets.keys():
        old, new = before.offsets.get(topic, {}), after.offsets.get(topic, {})
        if old is not new:
            yield from (
                (topic, number) for number in old.keys() | new.keys() if old.get(number) != new.get(number)
            )


def without_offsets(group: ConsumerGroup, removed: Mapping[str, Collection[int]]) -> ConsumerGroup:
    """Return *group* without the offsets of some partitions, by the topic's name."""
    kept = {
        topic: {
            number: one for number, one in partitions.items() if number not in removed.get(topic.name, ())
        }
        for topic, partitions in group.offsets.items()
    }
    return replace(group, offsets={topic: partitions for topic, partitions in kept.items() if partitions})


def deleted(group: ConsumerGroup) -> Step[GroupError]:
    """Delete a group without members. Its generation stays, so that it never goes back."""
    if not group.exists:
        return Step(group, GroupError.GROUP_ID_NOT_FOUND)
    if group.members:
        return Step(group, GroupError.NON_EMPTY_GROUP)
    return Step(replace(group, offsets={}, protocol_type=None, emptied_at_ms=None), GroupError.NONE)


def without_expired(group: ConsumerGroup, *, now_ms: int, retention_ms: int) -> ConsumerGroup:
    """
    Return *group* without offsets that are older than the retention.

    Age counts from the last commit, and from when the last member left if that was later. A group with
    members keeps all.
    """
    if group.members:
        return group
    kept = {
        topic: {
            number: one for number, one in partitions.items() if _age_ms(group, one, now_ms) < retention_ms
        }
        for topic, partitions in group.offsets.items()
    }
    kept = {topic: partitions for topic, partitions in kept.items() if partitions}
    if kept == group.offsets:
        return group
    changed = replace(group, offsets=kept)
    return changed if kept else deleted(group).group


def _age_ms(group: ConsumerGroup, offset: CommittedOffset, now_ms: int) -> int:
    return now_ms - max(offset.committed_at_ms, group.emptied_at_ms or 0)


def offset_of(group: ConsumerGroup, topic: GroupTopic, partition: int) -> CommittedOffset | None:
    """Return a committed offset; None where there is none."""
    return group.offsets.get(topic, {}).get(partition)
