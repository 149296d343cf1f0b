"""
Rules by principal and topic, like Kafka's ACLs: the topics that a client of an endpoint may see and read.

Rules only allow. What no rule allows is refused, and a topic that a client may not describe looks the same to
it whether it exists or not. READ includes DESCRIBE. An endpoint without users has no rules: its clients may
read everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

EVERYONE: Final = "User:*"
"""The principal of a rule that is for all principals."""
EVERY_TOPIC: Final = "*"
"""The literal name that stands for every topic."""


class Operation(IntEnum):
    """The operations on topics, as Kafka numbers them."""

    READ = 3
    DESCRIBE = 8
    DESCRIBE_CONFIGS = 10


_INCLUDED: Final = {Operation.READ: frozenset({Operation.READ, Operation.DESCRIBE})}


@dataclass(frozen=True, slots=True)
class TopicRule:
    """A principal, or everyone, may do something with topics."""

    principal: str
    operations: frozenset[Operation]
    name: str
    """The topic's name, `EVERY_TOPIC`, or what names begin with."""
    is_prefix: bool = False

    def allows(self, operation: Operation, topic: str) -> bool:
        """Say whether the rule allows *operation* on *topic*, for its principal."""
        if not any(operation in _INCLUDED.get(one, {one}) for one in self.operations):
            return False
        if self.is_prefix:
            return topic.startswith(self.name)
        return self.name in {topic, EVERY_TOPIC}


@dataclass(frozen=True, slots=True)
class Access:
    """The permissions of one client, at the time of one request."""

    rules: tuple[TopicRule, ...] | None
    """The rules of the client's principal; None allows everything."""

    @classmethod
    def of(cls, principal: str, rules: Iterable[TopicRule]) -> Access:
        """Return what *principal* may do by *rules*."""
        return cls(tuple(one for one in rules if one.principal in {principal, EVERYONE}))

    @property
    def is_whole(self) -> bool:
        """Say whether everything is allowed, also what is not about topics."""
        return self.rules is None

    def may(self, operation: Operation, topic: str) -> bool:
        """Say whether *operation* on *topic* is allowed."""
        return self.rules is None or any(one.allows(operation, topic) for one in self.rules)

    def operations(self, topic: str) -> int:
        """Return the allowed operations on *topic* as a bit field of Kafka."""
        return sum(1 << one for one in Operation if self.may(one, topic))


EVERYTHING: Final = Access(None)
