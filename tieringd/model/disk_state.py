"""
How a disk is doing, as a plain value; what makes it so is in `policies.disk_alert`.

A full disk slows producers down through client quotas of the Kafka cluster: `QuotaEntity` names the clients
of a quota, and `QuotaChange` is a change of one. `broker.kafka` asks the broker for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
"""Bytes a second that each producer of an entity may write on each broker."""


@dataclass(frozen=True, slots=True, order=True)
class QuotaEntity:
    """Whom a quota is for: types of clients with names, in the order of the types."""

    parts: tuple[tuple[str, str | None], ...]
    """Pairs such as ("user", "alice"); a name that is None is the default for all others of the type."""

    @property
    def types(self) -> frozenset[str]:
        """Return the types that it is about: `user`, `client-id`, `ip`."""
        return frozenset(kind for kind, _ in self.parts)

    def __str__(self) -> str:
        return ", ".join(f"{kind} {'(default)' if name is None else name}" for kind, name in self.parts)


def quota_entity(**names: str | None) -> QuotaEntity:
    """Return the entity of these names; an underscore stands for the dash in `client-id`."""
    return QuotaEntity(tuple(sorted((kind.replace("_", "-"), name) for kind, name in names.items())))


EVERY_PRODUCER: Final = quota_entity(user=None, client_id=None)
"""Every client of every user, where nothing more special is set."""


@dataclass(frozen=True, slots=True)
class QuotaChange:
    """A producer's quota that was lowered, and what it was before."""

    entity: QuotaEntity
    previous: float | None
    """None where nothing was set."""


class DiskState(IntEnum):
    """How a disk is doing; the numbers are those of the metric."""

    OK = 0
    LOW = 1
    DEGRADED = 2
