"""
Retention initialisation: what a topic that is created with tiering on gets of retention.

Bytes and milliseconds are looked at apart, by the same three rules; a topic that was there before
is no business of this policy: it keeps what it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.policies.local_retention import LocalRetentionTarget

if TYPE_CHECKING:
    from collections.abc import Callable

UNLIMITED = -1
_DAY_MS = 86_400_000
DEFAULT_LOCAL_MS = _DAY_MS
DEFAULT_TOTAL_MS = 7 * _DAY_MS


@dataclass(frozen=True, slots=True)
class RequestedRetention:
    """What the topic's creator set. None is not set; -1 is without limit."""

    retention_ms: int | None = None
    retention_bytes: int | None = None
    local_target_ms: int | None = None
    local_target_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class InitialRetention:
    """What the topic begins with; None is without limit."""

    total_ms: int | None
    total_bytes: int | None
    local_target: LocalRetentionTarget


def initial_retention(requested: RequestedRetention) -> InitialRetention:
    """
    Return the retention of a topic that is created with tiering on.

    The local target is the total where only that is set. Where a local target is set, it is the
    smaller of the two in bytes and the longer of the two in time. Where nothing of a kind is set,
    bytes have no limit, and of time a day stays local out of seven.
    """
    return InitialRetention(
        total_ms=_limit(requested.retention_ms, DEFAULT_TOTAL_MS),
        total_bytes=_limit(requested.retention_bytes, UNLIMITED),
        local_target=LocalRetentionTarget(
            target_ms=_local(
                requested.retention_ms, requested.local_target_ms, choose=max, default=DEFAULT_LOCAL_MS
            ),
            target_bytes=_local(
                requested.retention_bytes, requested.local_target_bytes, choose=min, default=UNLIMITED
            ),
        ),
    )


def _local(
    total: int | None, local: int | None, *, choose: Callable[[float, float], float], default: int
) -> int | None:
    given = [_comparable(value) for value in (total, local) if value is not None]
    if not given:
        return _limit(None, default)
    chosen = given[0] if len(given) == 1 else choose(*given)
    return None if chosen == _ENDLESS else int(chosen)


def _limit(value: int | None, default: int) -> int | None:
    found = default if value is None else value
    return None if found < 0 else found


_ENDLESS = float("inf")


def _comparable(value: int) -> float:
    """Return a limit such that none is larger than no limit."""
    return _ENDLESS if value < 0 else value
