"""
Loss: how long until the broker's own retention would delete what is not durable yet.

Kafka deletes a closed segment when its newest record is older than `retention.ms`, and from the
head while more than `retention.bytes` would remain. The newest record's time is not known before
a segment is read, so the file's modification time stands for it: for data that arrives as it is
produced they are the same.

The active segment is not safe either. When its newest record has expired, Kafka closes and
deletes it in one go: it is never seen closed. So what is stable in it is uploaded in time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.model.local_log import LocalLog


def seconds_to_loss(
    log: LocalLog,
    *,
    next_offset: int,
    log_end_offset: int,
    retention_ms: int | None,
    retention_bytes: int | None,
    now_ms: int,
) -> float:
    """
    Return the time left for the oldest segment that reaches past *next_offset*.

    None is retention without limit. Infinity when nothing waits, or nothing limits; 0 when the
    broker may delete it at its next check. By size the active segment is never deleted.
    """
    remaining_bytes = log.size_bytes
    for segment in log.segments:
        end_offset = log_end_offset if segment.next_offset is None else segment.next_offset
        remaining_bytes -= segment.size_bytes
        if end_offset <= next_offset:
            continue
        is_past_size = retention_bytes is not None and remaining_bytes >= retention_bytes
        if is_past_size and not segment.is_active:
            return 0.0
        if retention_ms is None:
            return math.inf
        return max(0.0, (segment.modified_ns / 1e6 + retention_ms - now_ms) / 1000)
    return math.inf


def rescue_due_ms(log: LocalLog, *, retention_ms: int | None) -> float:
    """
    Return from when on what is stable in the active segment must not wait until it is closed.

    Halfway from its last record to its deletion, which leaves the other half for a store that is
    away. Infinity when the broker deletes nothing by time. A segment that is written to now and
    then never comes to it, and one that was uploaded has nothing more to give.
    """
    if retention_ms is None or not log.segments or not log.segments[-1].is_active:
        return math.inf
    return log.segments[-1].modified_ns / 1e6 + retention_ms / 2
