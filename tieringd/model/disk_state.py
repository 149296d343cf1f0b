"""
The state of a disk, as a plain value. `policies.disk_alert` decides it.

A full disk slows producers down through client quotas of the Kafka cluster: `QuotaEntity` names the
clients of a quota, and `QuotaChange` is a change of one. `broker.kafka` reads and sets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
"""Bytes a second that each producer of an entity may write on each broker."""


@dataclass(frozen=True, slots=True, order=True)
class QuotaEntity:
    """The clients that a quota is for: pairs of a type and a name, ordered by type."""

    parts: tuple[tuple[str, str | None], ...]
    """Pairs such as ("user", "alice"). The name None is the default for all others of the type."""

    @property
    def types(self) -> frozenset[str]:
        """Return its types: `user`, `client-id`, `ip`."""
        return frozenset(kind for kind, _ in self.parts)

    def __str__(self) -> str:
        return ", ".join(f"{kind} {'(default)' if name is None else name}" for kind, name in self.parts)


def quota_entity(**names: str | None) -> QuotaEntity:
    """Return the entity of these names. An underscore stands for the dash in `client-id`."""
    return QuotaEntity(tuple(sorted((kind.replace("_", "-"), name) for kind, name in names.items())))


EVERY_PRODUCER: Final = quota_entity(user=None, client_id=None)
"""Every client of every user without a more specific quota."""


@dataclass(frozen=True, slots=True)
class QuotaChange:
    """A producer quota that was lowered, and its value before."""

    entity: QuotaEntity
    previous: float | None
    """None if no quota was set before."""


class DiskState(IntEnum):
    """The state of a disk. The numbers are those of the metric."""

    OK = 0
    LOW = 1
    DEGRADED = 2
