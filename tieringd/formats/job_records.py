"""
The records that jobs leave, as JSON in the bucket. A record never changes.

The record of a rewriting says that all segments that it names are stored. It is stored directly before they
take their places in the manifest. Only a rebuild reads it, where the manifest is lost: the objects alone do
not tell those of a job that was killed half way from those that the manifest named.

An erasure has two records: what was asked for, stored before anything else, and what was done, stored at the
end. So nothing is erased without a trace. Where the second record is missing nothing tells how far the job
came. A job that was stopped in the middle and could still store it says so in its faults: what they name is
to be done again. The records hold no key, only the SHA-256 of each: with a key one can tell that it was
erased. Keys that can be guessed can be found out by it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

from tieringd.errors import CorruptDataError
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import Rewriting, RewritingKind, SegmentIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable


ERASURE_VERSION = 2
"""Version 1 had no `gone_over`, `objects_left` and `kept_by_store`."""

REWRITING_VERSION = 1


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


def encode_rewriting(partition: TopicIdPartition, rewriting: Rewriting) -> bytes:
    """Return the record of a rewriting; the same rewriting is the same bytes."""
    document = {
        "version": REWRITING_VERSION,
        "cluster": partition.cluster,
        "topic": partition.topic,
        "topic_id": partition.topic_id,
        "partition": partition.partition,
        "kind": rewriting.kind.value,
        "replaced": [astuple(one) for one in rewriting.replaced],
        "stored": [astuple(one) for one in rewriting.stored],
    }
    return json.dumps(document, sort_keys=True).encode() + b"\n"


def decode_rewriting(data: bytes, *, source: str) -> tuple[TopicIdPartition, Rewriting]:
    """
    Return whose record it is, and what it says.

    Raises:
        CorruptDataError: It is none, or is of a newer version.
    """
    try:
        document = json.loads(data)
        version = document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(f"this is no record of a rewriting: {error}", source=source) from error
    if version != REWRITING_VERSION:
        raise CorruptDataError(
            f"this record of a rewriting is of version {version}; version {REWRITING_VERSION} can be read",
            source=source,
        )
    try:
        partition = TopicIdPartition(
            document["cluster"], document["topic"], document["topic_id"], int(document["partition"])
        )
        rewriting = Rewriting(
            RewritingKind(document["kind"]),
            _identities(document["replaced"]),
            _identities(document["stored"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(f"this record of a rewriting is damaged: {error}", source=source) from error
    if not rewriting.stored:
        raise CorruptDataError("this record of a rewriting names no segment", source=source)
    return partition, rewriting


def _identities(rows: Iterable[Any]) -> tuple[SegmentIdentity, ...]:
    return tuple(
        SegmentIdentity(int(base), int(last), int(size), int(epoch), str(writer))
        for base, last, size, epoch, writer in rows
    )
