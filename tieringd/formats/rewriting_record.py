"""
The record of a rewriting, as JSON in the bucket: all segments that it names are stored.

It is stored directly before they take their places in the manifest, and never changes. Only a rebuild reads
it, where the manifest is lost: from the objects alone nobody can tell those of a job that was killed half
way from those that the manifest named.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from tieringd.errors import CorruptDataError
from tieringd.model.partition import TopicIdPartition
from tieringd.model.rewriting import Rewriting, RewritingKind, SegmentIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable

REWRITING_VERSION = 1


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
