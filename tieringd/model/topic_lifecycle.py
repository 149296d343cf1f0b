"""
How a topic's archive stands when its topic is deleted: plain values, kept in the topic manifest.

Which state follows which, and when, is decided in `policies.topic_lifecycle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Lifecycle(StrEnum):
    """The state of one incarnation of a topic, as far as its archive goes."""

    LIVE = "live"
    """The topic is there, or nobody has seen that it is not."""
    DELETED = "deleted"
    """The topic is gone, or an operator has said so; the archive is purged after a grace."""
    KEPT = "kept"
    """The topic is gone, and its archive stays."""
    PURGING = "purging"
    """A daemon deletes the objects; there is no way back."""
    PURGED = "purged"
    """Nothing is left but this mark."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Who purges, and until when nobody else may take that over."""

    owner: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class Deletion:
    """What is known of a topic's end. Only the topic manifest of a topic that is not live has one."""

    noted_at_ms: int
    noted_by: str
    """The daemon's writer id, or `operator`."""
    reason: str
    lease: Lease | None = None
    segments: int | None = None
    """How many segments the archive held when it was closed; None before that."""
    size_bytes: int | None = None
    """Of their data objects."""
    purged_at_ms: int | None = None
    checked_at_ms: int | None = None
    """When the bucket was searched again for what came late; None before that."""
