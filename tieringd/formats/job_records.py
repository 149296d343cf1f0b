"""
The records that jobs leave, as JSON in the bucket. A record never changes.

The record of a rewriting confirms that all segments that it names are stored. It is stored directly
before the segments replace others in the manifest. Only a rebuild of a lost manifest reads it: the
objects alone do not show whether a job was killed half way or the manifest named its segments.

An erasure has two records: the request, stored before anything else, and the outcome, stored at the end.
So nothing is erased without a trace. If the outcome is missing, it is unknown how far the job came. A
job that was stopped in the middle and could still store its outcome lists that in its faults: the
erasure must be repeated for what they name. The records of an erasure hold no key, only the SHA-256 of
each. The holder of a key can tell that it was erased, and keys that can be guessed can be found out from
the hash. A rebuild of manifests reads the records of erasures too: what they say of a partition is a
second witness of what must not come back.

A deletion by offset (`tieringd topic delete-records`) has two records as well: the request and the outcome.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from operator import attrgetter
from typing import Any

from tieringd.errors import CorruptDataError
from tieringd.formats.json_document import MALFORMED, encode_document
from tieringd.formats.object_keys import parse_data_key
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import REWRITER_PREFIX, Rewriting, RewritingKind, SegmentIdentity

ERASURE_VERSION = 3
"""
Version 1 had no `gone_over`, `objects_left` and `kept_by_store`. Version 2 did not say `has_expired`.
"""

REWRITING_VERSION = 1
DELETION_VERSION = 1


@dataclass(frozen=True, slots=True)
class ErasureRequest:
    """The request of an erasure, and its author."""

    job_id: str
    begun_at_ms: int
    requested_by: str
    reason: str
    topics: tuple[str, ...]
    """The requested names and patterns."""
    key_sha256: tuple[str, ...]
    """The SHA-256 of each key, in hex, ascending."""


@dataclass(frozen=True, slots=True)
class ErasedPartition:
    """The erasure in one partition."""

    partition: TopicIdPartition
    records: int
    """The number of erased records."""
    replaced: tuple[str, ...]
    """Keys of the replaced data objects, which hold the records until they are deleted. Each has an index."""
    stored: tuple[str, ...]
    """Keys of the data objects that replace them."""
    retired_at_ms: int
    deletion_due_at_ms: int
    """Time in ms since the epoch at which the job's configuration allows deletion. A daemon uses its own."""


@dataclass(frozen=True, slots=True)
class PartitionGoneOver:
    """A partition with a range of offsets in which every record was checked: no record has a key any more."""

    partition: TopicIdPartition
    start_offset: int
    next_offset: int
    """Exclusive. Records from this offset on came later, and were not checked."""
    has_expired: bool = False
    """
    Whether records before `start_offset` had expired, or a user had deleted them.

    If not, archiving began there, or a record of version 2 does not say it: older objects count as before.
    """


@dataclass(frozen=True, slots=True)
class ErasureOutcome:
    """The outcome of an erasure."""

    finished_at_ms: int
    partitions: tuple[ErasedPartition, ...]
    deleted_at_ms: int | None
    """
    When the job itself deleted the replaced objects.

    None if a daemon shall delete them, if any part of the erasure is unfinished, or if the store keeps
    deleted objects.
    """
    faults: tuple[str, ...]
    """The unfinished parts of the erasure."""
    gone_over: tuple[PartitionGoneOver, ...] = ()
    """All partitions that were checked completely; a partition with a fault is not among them."""
    objects_left: tuple[str, ...] = ()
    """Keys of objects that no manifest references, and that have one of the keys or cannot be read."""
    kept_by_store: tuple[str, ...] = ()
    """How the store keeps the bytes of deleted objects, as far as it reports that."""


@dataclass(frozen=True, slots=True)
class RewrittenPartition:
    """What an erasure replaced in one partition."""

    partition: TopicIdPartition
    rewriting: Rewriting
    retired_at_ms: int


@dataclass(frozen=True, slots=True)
class RecordedErasure:
    """The records of one erasure, as far as a rebuild of manifests uses them."""

    job_id: str
    begun_at_ms: int
    topics: tuple[str, ...]
    """The requested names and patterns."""
    key_sha256: frozenset[str]
    rewritten: tuple[RewrittenPartition, ...]
    """Empty if the erasure has no outcome."""
    gone_over: tuple[PartitionGoneOver, ...] | None
    """Empty if the erasure has no outcome; None in an outcome of version 1, which does not say it."""


@dataclass(frozen=True, slots=True)
class DeletionRequest:
    """The request to delete the records of a topic before an offset, and its author."""

    job_id: str
    begun_at_ms: int
    requested_by: str
    cluster: str
    topic: str
    topic_id: str
    partitions: tuple[int, ...]
    before_offset: int


@dataclass(frozen=True, slots=True)
class DeletedPartition:
    """What a deletion by offset has reached in one partition."""

    partition: int
    log_start_offset: int | None
    """The first offset of the broker's log now; None if the broker did not delete."""
    archive_start_offset: int | None
    """The first offset of the archive now; None if the bucket does not have the deletion."""
    fault: str
    """Why the deletion is unfinished; empty if it is finished."""


@dataclass(frozen=True, slots=True)
class DeletionOutcome:
    """The outcome of a deletion by offset."""

    finished_at_ms: int
    results: tuple[DeletedPartition, ...]


def encode_deletion_request(request: DeletionRequest) -> bytes:
    """Return the record that is stored before anything is deleted."""
    return _encoded(asdict(request), DELETION_VERSION)


def encode_deletion_outcome(request: DeletionRequest, outcome: DeletionOutcome) -> bytes:
    """Return the record that is stored at the end. It includes the fields of the first record."""
    return _encoded(asdict(request) | asdict(outcome), DELETION_VERSION)


def encode_erasure_request(request: ErasureRequest) -> bytes:
    """Return the record that is stored at the beginning."""
    return _encoded(asdict(request), ERASURE_VERSION)


def encode_erasure_outcome(request: ErasureRequest, outcome: ErasureOutcome) -> bytes:
    """Return the record that is stored at the end. It includes the fields of the first record."""
    return _encoded(asdict(request) | asdict(outcome), ERASURE_VERSION)


def decode_erasure(data: bytes, *, source: str) -> RecordedErasure:
    """
    Return what a record of an erasure says. The outcome says all that the request says.

    Raises:
        CorruptDataError: It is no such record, or is of a newer version.
    """
    try:
        document = json.loads(data)
        version = int(document["version"])
    except MALFORMED as error:
        raise CorruptDataError(f"this is not the record of an erasure: {error}", source=source) from error
    if version > ERASURE_VERSION:
        raise CorruptDataError(
            f"this record of an erasure has version {version}; this release reads up to version "
            f"{ERASURE_VERSION}",
            source=source,
        )
    try:
        is_done = "finished_at_ms" in document
        tells_range = not is_done or "gone_over" in document
        return RecordedErasure(
            str(document["job_id"]),
            int(document["begun_at_ms"]),
            tuple(map(str, document["topics"])),
            frozenset(map(str, document["key_sha256"])),
            tuple(map(_rewritten_partition, document["partitions"])) if is_done else (),
            tuple(map(_gone_over, document.get("gone_over", ()))) if tells_range else None,
        )
    except MALFORMED as error:
        raise CorruptDataError(f"this record of an erasure is damaged: {error}", source=source) from error


def _rewritten_partition(row: dict[str, Any]) -> RewrittenPartition:
    replaced, stored = (tuple(map(_identity_of, row[name])) for name in ("replaced", "stored"))
    if not stored:
        raise ValueError("an erased partition has no stored segment")
    rewriting = Rewriting(
        RewritingKind.REWRITTEN,
        tuple(one for one in replaced if one.writer_id.startswith(REWRITER_PREFIX)),
        tuple(sorted(stored, key=attrgetter("base_offset"))),
    )
    return RewrittenPartition(TopicIdPartition(**row["partition"]), rewriting, int(row["retired_at_ms"]))


def _identity_of(key: str) -> SegmentIdentity:
    found = parse_data_key(key)
    if found is None:
        raise ValueError(f"{key!r} is not the key of a data object")
    return found.identity


def _gone_over(row: dict[str, Any]) -> PartitionGoneOver:
    return PartitionGoneOver(
        TopicIdPartition(**row["partition"]),
        int(row["start_offset"]),
        int(row["next_offset"]),
        bool(row.get("has_expired", False)),
    )


def _encoded(document: dict[str, Any], version: int) -> bytes:
    return encode_document({"version": version, **document})


def encode_rewriting(partition: TopicIdPartition, rewriting: Rewriting) -> bytes:
    """Return the record of a rewriting. Equal rewritings give equal bytes."""
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
    Return the partition and the rewriting in a record.

    Raises:
        CorruptDataError: It is no such record, or is of another version.
    """
    try:
        document = json.loads(data)
        version = document["version"]
    except MALFORMED as error:
        raise CorruptDataError(f"this is not a rewriting record: {error}", source=source) from error
    if version != REWRITING_VERSION:
        raise CorruptDataError(
            f"this rewriting record has version {version}; this release reads version {REWRITING_VERSION}",
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
    except MALFORMED as error:
        raise CorruptDataError(f"this rewriting record is damaged: {error}", source=source) from error
    if not rewriting.stored:
        raise CorruptDataError("this rewriting record names no segment", source=source)
    return partition, rewriting


def _identities(rows: Iterable[Any]) -> tuple[SegmentIdentity, ...]:
    return tuple(
        SegmentIdentity(int(base), int(last), int(size), int(epoch), str(writer))
        for base, last, size, epoch, writer in rows
    )
