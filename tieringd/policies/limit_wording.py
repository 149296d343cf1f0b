"""
Limits in words: how a limit of time or size keeps a segment, and when it releases it.

The results are words for people and one number for programs: the time at which the limit releases the
segment if nothing else changes. `local_retention` and `total_retention` decide the limits themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from tieringd.model.human_units import span
from tieringd.policies.local_retention import LocalLimit, LocalTarget
from tieringd.policies.total_retention import TotalRetention


@dataclass(frozen=True, slots=True)
class KeptReason:
    """Why limits keep a segment, and what ends that."""

    reason: str
    next_step: str
    due_ms: int | None = None
    """Time at which the reason ends, in ms since the epoch; None where it depends on more than time."""


def kept_locally(
    target: LocalTarget, *, following_bytes: int, newest_ms: int, now_ms: int
) -> KeptReason | None:
    """
    Say why the local target keeps a segment on the broker; None where it does not.

    *following_bytes* are the bytes of the log after the segment. *newest_ms* is the time from which the
    segment's age counts.
    """
    reasons, ways, due_ms = [], [], None
    if target.ms.enforced is not None:
        due_ms = newest_ms + target.ms.enforced
        if due_ms <= now_ms:
            return None
        age = f"{span(now_ms - newest_ms)} of {span(target.ms.enforced)}"
        reasons.append(f"its newest record is {age} old ({_source(target.ms)})")
        ways.append(_in(due_ms, now_ms=now_ms))
    if target.bytes.enforced is not None:
        if following_bytes >= target.bytes.enforced:
            return None
        reasons.append(
            f"{following_bytes} of {target.bytes.enforced} bytes follow it ({_source(target.bytes)})"
        )
        ways.append(_after(target.bytes.enforced - following_bytes))
    if not reasons:
        sources = f"{_source(target.ms)}; {_source(target.bytes)}"
        return KeptReason(
            f"no local limit is in force ({sources})", "the segment stays as long as there is no limit"
        )
    return KeptReason(
        ", and ".join(reasons), f"local retention releases the segment {' or '.join(ways)}", due_ms
    )


def kept_in_total(limits: TotalRetention, *, left_bytes: int, time_ms: int, now_ms: int) -> KeptReason:
    """
    Say when total retention will release a stored segment that it keeps now.

    *left_bytes* are the partition's bytes from the segment on, each offset counted once.
    """
    ways, due_ms = [], None
    if limits.limit_ms is not None:
        due_ms = time_ms + limits.limit_ms
        ways.append(_in(due_ms, now_ms=now_ms))
    if limits.limit_bytes is not None:
        ways.append(_after(max(0, limits.limit_bytes - left_bytes) + 1))
    return KeptReason(
        "total retention keeps the segment",
        f"total retention removes the segment {' or '.join(ways)}",
        due_ms,
    )


def _source(limit: LocalLimit) -> str:
    is_advice = limit.enforced != limit.advised
    return f"{limit.source}, which is not enforced: total retention applies" if is_advice else limit.source


def _in(due_ms: int, *, now_ms: int) -> str:
    return f"in {span(due_ms - now_ms)}"


def _after(size_bytes: int) -> str:
    return f"after {size_bytes} more bytes"
