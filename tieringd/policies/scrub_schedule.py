"""When a partition is scrubbed next: the original's intervals, with jitter, so that not all come at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScrubPace:
    """How long to wait between two looks at one partition."""

    is_enabled: bool
    partial_interval_ms: int
    """After a look that did not come to the end."""
    full_interval_ms: int
    """After one that did."""
    jitter_ms: int
    """Up to this much more each time."""
    orphan_grace_ms: int
    """An object that no manifest names is no orphan before this."""
    quarantine_ms: int
    """What is in quarantine is deleted after this."""


def first_due_ms(pace: ScrubPace, *, now_ms: int, jitter: float) -> int:
    """Return when a partition that is new here is looked at first; *jitter* is from 0 to 1."""
    return now_ms + int(pace.jitter_ms * jitter)


def next_due_ms(pace: ScrubPace, *, now_ms: int, is_complete: bool, jitter: float) -> int:
    """Return when a partition is looked at after a look that has just ended."""
    interval_ms = pace.full_interval_ms if is_complete else pace.partial_interval_ms
    return now_ms + interval_ms + int(pace.jitter_ms * jitter)
