"""
Rules by principal, like Kafka's ACLs: the topics and consumer groups that a client may see and use.

Rules only allow. What no rule allows is refused, and a topic that a client may not describe looks the same
to it whether it exists or not. READ and DELETE include DESCRIBE. To READ a group is to be its member and to
commit its offsets. An endpoint without users has no rules: its clients may read everything, and use every
group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

EVERYONE: Final = "User:*"
"""The principal of a rule that is for all principals."""
EVERY_NAME: Final = "*"
"""The literal name that stands for every topic, or every group."""


class Operation(IntEnum):
    """The operations, as Kafka numbers them."""

    READ = 3
    DELETE = 6
    DESCRIBE = 8
    DESCRIBE_CONFIGS = 10


class Resource(Enum):
    """What rules are about, with the operations that it has."""

    TOPIC = frozenset({Operation.READ, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS})
    GROUP = frozenset({Operation.READ, Operation.DELETE, Operation.DESCRIBE})


_INCLUDED: Final = {
    Operation.READ: frozenset({Operation.READ, Operation.DESCRIBE}),
    Operation.DELETE: frozenset({Operation.DELETE, Operation.DESCRIBE}),
}


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A principal, or everyone, may do something with topics or with groups."""

    principal: str
    operations: frozenset[Operation]
    name: str
    """The name, `EVERY_NAME`, or what names begin with."""
    is_prefix: bool = False
    resource: Resource = Resource.TOPIC

    def allows(self, operation: Operation, name: str, resource: Resource = Resource.TOPIC) -> bool:
        """Say whether the rule allows *operation* on the topic or group *name*, for its principal."""
        if resource is not self.resource:
            return False
        if not any(operation in _INCLUDED.get(one, {one}) for one in self.operations):
            return False
        if self.is_prefix:
            return name.startswith(self.name)
        return self.name in {name, EVERY_NAME}


@dataclass(frozen=True, slots=True)
class Access:
    """The permissions of one client, at the time of one request."""

    rules: tuple[AccessRule, ...] | None
    """The rules of the client's principal; None allows everything."""

    @classmethod
    def of(cls, principal: str, rules: Iterable[AccessRule]) -> Access:
        """Return what *principal* may do by *rules*."""
        return cls(tuple(one for one in rules if one.principal in {principal, EVERYONE}))

    @property
    def is_whole(self) -> bool:
        """Say whether everything is allowed, also what is not about topics."""
        return self.rules is None

    def may(self, operation: Operation, topic: str) -> bool:
        """Say whether *operation* on *topic* is allowed."""
        return self.rules is None or any(one.allows(operation, topic) for one in self.rules)

    def may_with_group(self, operation: Operation, group: str) -> bool:
        """Say whether *operation* on a consumer group is allowed."""
        return self.rules is None or any(one.allows(operation, group, Resource.GROUP) for one in self.rules)

    def operations(self, topic: str) -> int:
        """Return the allowed operations on *topic* as a bit field of Kafka."""
        return sum(1 << one for one in sorted(Resource.TOPIC.value) if self.may(one, topic))

    def group_operations(self, group: str) -> int:
        """Return the allowed operations on a consumer group as a bit field of Kafka."""
        return sum(1 << one for one in sorted(Resource.GROUP.value) if self.may_with_group(one, group))


EVERYTHING: Final = Access(None)
