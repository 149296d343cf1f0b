"""
Which kind of housekeeping gets the next turn, and whether it is the time for one.

Housekeeping waits for a store that is idle: over a sliding window there were no more requests than the
threshold allows for the window's seconds, and the store asked no client to slow down. Before a whole
window was observed the store counts as busy. Work that has waited for a whole interval is not put off any
longer, whatever the traffic.

Jobs take turns: the job whose last turn is longest ago is next. A round is over when each job has
reported that there is nothing more to do; the next one begins a window later. Times are seconds of one
clock that never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_SLOTS = 100
"""The number of slots that a window is counted in: memory does not grow with the traffic."""
_RETRIES_PER_WINDOW = 10
"""How often per window the traffic is checked again while there is too much of it."""
_WAIT_SECONDS_MIN = 0.001
_BACKOFF_DOUBLINGS_MAX = 16


@dataclass(frozen=True, slots=True)
class HousekeepingLimits:
    """What an idle store is, and how long work may wait for one."""

    window_seconds: float
    threshold_rps: int
    """A window with at most this many requests per second counts as idle."""
    interval_seconds: float

    @property
    def requests_max(self) -> float:
        """Return the maximum number of requests in a window of an idle store."""
        return self.threshold_rps * self.window_seconds


@dataclass(frozen=True, slots=True)
class Traffic:
    """A store's requests over the last window, without those of housekeeping."""

    requests: int
    throttled: int
    """Responses that asked to slow down, those to housekeeping included."""
    watched_seconds: float
    """How long the requests have been counted, at most a window."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The scheduling state of one kind of work."""

    name: str
    is_done: bool
    """Whether it had nothing more to do in this round."""
    served_at: float
    """Time of its last turn's start, or of its registration, on the steady clock."""
    covered_at: float
    """Time of the last completion of all of its work, on the steady clock."""
    not_before: float = 0.0
    """The earliest time of the next turn, after a failure."""


class HousekeepingState(StrEnum):
    """What housekeeping does, for metrics and logs."""

    ACTIVE = "active"
    PAUSED = "paused"
    """There is work, but the store is busy."""
    IDLE = "idle"
    """There is no work."""


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """The next turn, or how long to wait for one."""

    state: HousekeepingState
    job: str | None
    """The job whose turn it is; None when no job gets one."""
    is_forced: bool
    reason: str
    wait_seconds: float
    """Seconds until the next plan; 0 where there is a turn."""


def plan_turn(
    jobs: Sequence[JobStatus], traffic: Traffic, limits: HousekeepingLimits, *, round_at: float, now: float
) -> TurnPlan:
    """Choose the next turn; *round_at* is when this round begins, or began."""
    ready = [job for job in jobs if job.not_before <= now]
    overdue = [job for job in ready if now >= job.covered_at + limits.interval_seconds]
    waiting = [job for job in ready if not job.is_done] if round_at <= now else []
    busy = why_busy(traffic, limits)
    if waiting and not busy:
        return _turn(waiting, is_forced=False, reason="the object store is idle")
    if overdue:
        reason = busy or "this work has waited for a whole interval"
        return _turn(overdue, is_forced=True, reason=reason)
    next_due = min(
        (max(job.covered_at + limits.interval_seconds, job.not_before) for job in jobs),
        default=now + limits.interval_seconds,
    )
    if waiting:
        retry_at = now + limits.window_seconds / _RETRIES_PER_WINDOW
        wait_seconds = max(_WAIT_SECONDS_MIN, min(retry_at, next_due) - now)
        return TurnPlan(
            HousekeepingState.PAUSED, None, is_forced=False, reason=busy, wait_seconds=wait_seconds
        )
    starts = [max(job.not_before, round_at) for job in jobs if not job.is_done]
    wait_seconds = max(_WAIT_SECONDS_MIN, min([next_due, *starts]) - now)
    reason = "there is nothing to do"
    return TurnPlan(HousekeepingState.IDLE, None, is_forced=False, reason=reason, wait_seconds=wait_seconds)


def why_busy(traffic: Traffic, limits: HousekeepingLimits) -> str:
    """Say why the store is not idle; empty when it is."""
    if traffic.throttled:
        return f"the object store asked to slow down {traffic.throttled} times in {limits.window_seconds:g} s"
    if traffic.requests > limits.requests_max:
        return (
            f"there were {traffic.requests} requests to the object store in {limits.window_seconds:g} s, "
            f"more than {limits.requests_max:g}"
        )
    if traffic.watched_seconds < limits.window_seconds:
        return f"the object store has not been watched for {limits.window_seconds:g} s yet"
    return ""


def pause_after_failures(failures: int, limits: HousekeepingLimits) -> float:
    """Return for how many seconds a job is left alone after *failures* failures in a row."""
    doublings = min(failures - 1, _BACKOFF_DOUBLINGS_MAX)
    return min(limits.interval_seconds, limits.window_seconds * 2.0**doublings)


def _turn(jobs: Sequence[JobStatus], *, is_forced: bool, reason: str) -> TurnPlan:
    job = min(jobs, key=lambda one: one.served_at)
    return TurnPlan(HousekeepingState.ACTIVE, job.name, is_forced, reason, wait_seconds=0.0)


class SlidingCount:
    """
    Count the events of the last seconds.

    A slot counts as long as any moment of it is in the window, so the count is never too small.
    """

    def __init__(self, window_seconds: float) -> None:
        self._slots: deque[tuple[int, int]] = deque()
        self._total = 0
        self._window_seconds = window_seconds
        self._slot_seconds = window_seconds / _SLOTS

    def note(self, now: float) -> None:
        """Count one event."""
        slot = int(now / self._slot_seconds)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = (slot, self._slots[-1][1] + 1)
        else:
            self._forget(now)
            self._slots.append((slot, 1))
        self._total += 1

    def count(self, now: float) -> int:
        """Return the events of the window that ends now."""
        self._forget(now)
        return self._total

    def _forget(self, now: float) -> None:
        while self._slots and (self._slots[0][0] + 1) * self._slot_seconds <= now - self._window_seconds:
            self._total -= self._slots.popleft()[1]
