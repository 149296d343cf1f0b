"""
The manifest's row of a merged segment, from its parts' rows and its index.

The row is the merging writer's: its name is nobody else's. Its times are chosen so that retention lets
none of its records go earlier than it would have without the merge.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tieringd.model.segment import NO_TIMESTAMP, RemoteSegment
from tieringd.policies.retention_time import retention_time_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.segment import SegmentIndex


def merged_segment(
    parts: Sequence[RemoteSegment],
    index: SegmentIndex,
    *,
    sidecar_bytes: int,
    sidecar_crc32c: int,
    leader_epoch: int,
    writer_id: str,
) -> RemoteSegment:
    """
    Return the row of the object that *parts* make; *index* is of that.

    *leader_epoch* and *writer_id* are of the writer who merges.
    """
    base_times = [one.base_timestamp_ms for one in parts if one.base_timestamp_ms != NO_TIMESTAMP]
    broker_times = [one.broker_timestamp_ms for one in parts]
    merged = RemoteSegment(
        base_offset=index.base_offset,
        last_offset=index.last_offset,
        size_bytes=index.size_bytes,
        crc32c=index.crc32c,
        base_timestamp_ms=min(base_times, default=NO_TIMESTAMP),
        max_timestamp_ms=max(one.max_timestamp_ms for one in parts),
        leader_epoch=leader_epoch,
        writer_id=writer_id,
        uploaded_at_ms=max(one.uploaded_at_ms for one in parts),
        index_size_bytes=sidecar_bytes,
        # It stands for all of the records, or for none: a part of which nothing is noted may be newer.
        broker_timestamp_ms=NO_TIMESTAMP if NO_TIMESTAMP in broker_times else max(broker_times),
        index_crc32c=sidecar_crc32c,
    )
    counted_from_ms = max(retention_time_ms(one) for one in parts)
    if retention_time_ms(merged) < counted_from_ms:
        # A part without timestamps counts from its upload, of which the others' timestamps know nothing.
        return replace(merged, broker_timestamp_ms=counted_from_ms)
    return merged
