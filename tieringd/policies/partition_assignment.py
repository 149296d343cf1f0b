"""
Who is to read which partition, in groups of the newer protocol, where the endpoint assigns them (KIP-848).

`uniform` gives every member as many partitions as the others, and moves as few as possible. `range` gives
each member a run of neighbouring partitions of each topic, so that topics with equally many are read side
by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from tieringd.model.consumer_group import ConsumerGroup, ConsumerMember, GroupPartition

UNIFORM: Final = "uniform"
RANGE: Final = "range"


def retargeted(group: ConsumerGroup) -> ConsumerGroup:
    """Return *group* in its next epoch, with a target for each of its members."""
    consumers = {name: one.consumer for name, one in group.members.items() if one.consumer is not None}
    assignor = chosen_assignor(consumers.values())
    targets = ASSIGNORS[assignor](group, consumers)
    members = {
        name: replace(member, consumer=replace(consumers[name], target=targets[name]))
        for name, member in group.members.items()
    }
    return replace(group, generation=group.generation + 1, protocol=assignor, members=members)


def chosen_assignor(members: Collection[ConsumerMember]) -> str:
    """Return the strategy that most members ask for."""
    votes = Counter(one.assignor for one in members)
    return max((UNIFORM, RANGE), key=lambda name: votes[name])


def _partitions_of(group: ConsumerGroup, topic: str) -> list[GroupPartition]:
    known = group.topics.get(topic)
    return [] if known is None else [(known.topic_id, number) for number in range(known.partition_count)]


def _uniform(
    group: ConsumerGroup, consumers: Mapping[str, ConsumerMember]
) -> dict[str, frozenset[GroupPartition]]:
    subscribers: dict[str, set[str]] = {}
    for name, one in consumers.items():
        for topic in one.subscribed:
            subscribers.setdefault(topic, set()).add(name)
    # All partitions of a topic share one set: a large group has millions of pairs of reader and partition.
    readers = {
        partition: names for topic, names in subscribers.items() for partition in _partitions_of(group, topic)
    }
    least, more = divmod(len(readers), len(consumers))
    targets: dict[str, set[GroupPartition]] = {name: set() for name in consumers}
    taken: set[GroupPartition] = set()
    # Those that have most come first: the spare partitions stay where they are.
    for name in sorted(consumers, key=lambda one: (-len(consumers[one].target), one)):
        kept = sorted(one for one in consumers[name].target if name in readers.get(one, ()))
        allowed = least + (1 if more > 0 and len(kept) > least else 0)
        more -= allowed > least
        targets[name] = {one for one in kept[:allowed] if one not in taken}
        taken |= targets[name]
    for partition in sorted(readers.keys() - taken):
        name = min(readers[partition], key=lambda one: (len(targets[one]), one))
        targets[name].add(partition)
    return {name: frozenset(target) for name, target in targets.items()}


def _range(
    group: ConsumerGroup, consumers: Mapping[str, ConsumerMember]
) -> dict[str, frozenset[GroupPartition]]:
    targets: dict[str, set[GroupPartition]] = {name: set() for name in consumers}
    topics = sorted({topic for one in consumers.values() for topic in one.subscribed})
    for topic in topics:
        partitions = _partitions_of(group, topic)
        names = sorted(name for name, one in consumers.items() if topic in one.subscribed)
        least, more = divmod(len(partitions), len(names))
        begin = 0
        for at, name in enumerate(names):
            end = begin + least + (at < more)
            targets[name] |= set(partitions[begin:end])
            begin = end
    return {name: frozenset(target) for name, target in targets.items()}


ASSIGNORS: Final[
    Mapping[
        str, Callable[[ConsumerGroup, Mapping[str, ConsumerMember]], dict[str, frozenset[GroupPartition]]]
    ]
] = {UNIFORM: _uniform, RANGE: _range}
"""The strategies by name."""
