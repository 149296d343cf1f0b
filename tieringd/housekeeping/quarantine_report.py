"""
The report of what a scrub puts into quarantine, as JSON in the bucket, for people.

It is written before anything is moved. What is in quarantine is told by the objects there and their keys;
nothing depends on a report.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tieringd.policies.scrub_orphans import Orphan

VERSION = 1


def encode_quarantine_report(orphans: Iterable[Orphan], *, now_ms: int, writer_id: str) -> bytes:
    """Return the report of a move that is about to begin."""
    document = {
        "version": VERSION,
        "reported_at_ms": now_ms,
        "writer_id": writer_id,
        "objects": [
            {
                "key": one.stored.key,
                "size_bytes": one.stored.size_bytes,
                "modified_ms": one.stored.modified_ms,
                "topic": one.partition.topic,
                "topic_id": one.partition.topic_id,
                "partition": one.partition.partition,
                "reason": one.detail,
            }
            for one in orphans
        ],
    }
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
