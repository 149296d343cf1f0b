"""
What happens to a topic's archive when the topic is deleted: plain values, kept in the topic manifest.

`policies.topic_lifecycle` decides which state follows which, and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Lifecycle(StrEnum):
    """The state of the archive of one incarnation of a topic."""

    LIVE = "live"
    """The topic exists, or no daemon has seen that it is gone."""
    DELETED = "deleted"
    """The topic is gone, or an operator said so. The archive is purged after a grace period."""
    KEPT = "kept"
    """The topic is gone, and its archive stays."""
    PURGING = "purging"
    """A daemon deletes the objects. This cannot be undone."""
    PURGED = "purged"
    """Only this mark is left."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Which process purges, and until when no other process may take over."""

    owner: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class Deletion:
    """What is known of a topic's deletion. Only the topic manifest of a topic that is not live has one."""

    noted_at_ms: int
    noted_by: str
    """The daemon's writer id, or `operator`."""
    reason: str
    lease: Lease | None = None
    segments: int | None = None
    """How many segments the archive held when it was closed; None before that."""
    size_bytes: int | None = None
    """Size of their data objects; None before the archive was closed."""
    purged_at_ms: int | None = None
    checked_at_ms: int | None = None
    """Time of the second search for late objects in ms since the epoch; None before it."""
