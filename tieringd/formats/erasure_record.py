"""
The records of an erasure, as JSON in the bucket: what was asked for, and what was done.

There are two, and neither ever changes: one is stored before anything else is, one at the end. So nothing is
erased without a trace, and where the second is missing nothing tells how far the job came. One that was
stopped in the middle and could still store it says so in its faults: what they name is to be done again.

They hold no key, only the SHA-256 of each: who knows a key can tell that it was erased. Keys that can be
guessed can be found out by it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tieringd.model.partition import TopicIdPartition

ERASURE_VERSION = 2
"""Version 1 had no `gone_over`, `objects_left` and `kept_by_store`."""


@dataclass(frozen=True, slots=True)
class ErasureRequest:
    """What was asked for, by whom."""

    job_id: str
    begun_at_ms: int
    requested_by: str
    reason: str
    topics: tuple[str, ...]
    """The names and patterns that were given."""
    key_sha256: tuple[str, ...]
    """Of each key, in hex, ascending."""


@dataclass(frozen=True, slots=True)
class ErasedPartition:
    """What was done in one partition."""

    partition: TopicIdPartition
    records: int
    """How many were taken out."""
    replaced: tuple[str, ...]
    """Keys of data objects that hold them still, until they are deleted; each has an index beside it."""
    stored: tuple[str, ...]
    """Keys of those in their places."""
    retired_at_ms: int
    deletion_due_at_ms: int
    """By the configuration of the job; a daemon goes by its own."""


@dataclass(frozen=True, slots=True)
class PartitionGoneOver:
    """A partition in which every record of a range of offsets was looked at, and none has a key any more."""

    partition: TopicIdPartition
    start_offset: int
    next_offset: int
    """Exclusive. Records from here on came later, and were not looked at."""


@dataclass(frozen=True, slots=True)
class ErasureOutcome:
    """What came of it."""

    finished_at_ms: int
    partitions: tuple[ErasedPartition, ...]
    deleted_at_ms: int | None
    """
    When the job deleted the replaced objects itself.

    None where that is left to a daemon, where anything was left undone, and where the store keeps what is
    deleted.
    """
    faults: tuple[str, ...]
    """What was left undone."""
    gone_over: tuple[PartitionGoneOver, ...] = ()
    """All that was gone over whole; a partition of a fault is not among them."""
    objects_left: tuple[str, ...] = ()
    """Keys of objects that no manifest names, and that have one of the keys or cannot be read."""
    kept_by_store: tuple[str, ...] = ()
    """How the store keeps the bytes of deleted objects, as far as it tells."""


def encode_erasure_request(request: ErasureRequest) -> bytes:
    """Return the record that is stored at the beginning."""
    return _encoded(asdict(request))


def encode_erasure_outcome(request: ErasureRequest, outcome: ErasureOutcome) -> bytes:
    """Return the record that is stored at the end; it says all that the first one does."""
    return _encoded(asdict(request) | asdict(outcome))


def _encoded(document: dict[str, Any]) -> bytes:
    return json.dumps({"version": ERASURE_VERSION, **document}, indent=2, sort_keys=True).encode() + b"\n"
