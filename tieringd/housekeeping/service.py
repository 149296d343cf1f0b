"""
The housekeeping service: gives turns to work that can wait, while the object store is idle.

`policies.housekeeping_turns` decides when there is a turn, and which job gets it. Turns come one at a time. A
job's requests to the store are marked, so that they do not count as traffic. A turn that has begun is
finished when traffic returns: it is short, and its work would have to be repeated.

`TrafficWatch` measures how busy the object store is with other work. It is notified of each attempt of
each request, in the task that made the request. Housekeeping marks its tasks (`storage.background`), so
its own requests do not count. A response that asks to slow down counts for every task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from tieringd.errors import TieringError
from tieringd.housekeeping.partition_sweep import HousekeepingJob, JobTurn
from tieringd.metrics.archive_work import HousekeepingMetrics
from tieringd.policies.housekeeping_turns import (
    HousekeepingLimits,
    HousekeepingState,
    JobStatus,
    SlidingCount,
    Traffic,
    TurnPlan,
    pause_after_failures,
    plan_turn,
)
from tieringd.storage.background import background, is_background

log = structlog.get_logger(__name__)

_BREATH_SECONDS = 0.01
"""Minimum pause between two turns: a turn with nothing to do may not yield to other tasks at all."""
TURN_REQUESTS_MAX = 200
"""A turn makes at most about this many requests, so that returning traffic waits for no more."""


class TrafficWatch:
    """Count requests over a sliding window. One per store, on one event loop."""

    def __init__(self, *, window_seconds: float, now: Callable[[], float]) -> None:
        """Start counting; *now* is a clock that never goes back."""
        self._now = now
        self._window_seconds = window_seconds
        self._requests = SlidingCount(window_seconds)
        self._throttled = SlidingCount(window_seconds)
        self._since = now()

    def set_window(self, window_seconds: float) -> None:
        """Count over another window; the earlier counts do not apply to it and are dropped."""
        if window_seconds != self._window_seconds:
            self._window_seconds, self._since = window_seconds, self._now()
            self._requests, self._throttled = SlidingCount(window_seconds), SlidingCount(window_seconds)

    def note(self, *, is_throttled: bool) -> None:
        """Count one attempt of a request."""
        now = self._now()
        if not is_background():
            self._requests.note(now)
        if is_throttled:
            self._throttled.note(now)

    @property
    def traffic(self) -> Traffic:
        """Return the current counts."""
        now = self._now()
        return Traffic(self._requests.count(now), self._throttled.count(now), now - self._since)


@dataclass(slots=True)
class _Job:
    """A job and its scheduling state."""

    job: HousekeepingJob
    served_at: float
    covered_at: float
    is_done: bool = False
    failures: int = 0
    """The number of failures in a row."""
    not_before: float = 0.0

    @property
    def status(self) -> JobStatus:
        # A failure neither delays the end of the round, nor waits for it.
        is_done = self.is_done and not self.failures
        return JobStatus(self.job.name, is_done, self.served_at, self.covered_at, self.not_before)


class Housekeeping:
    """
    Run housekeeping jobs. One per daemon; `run` lives as long as the daemon.

    It may be cancelled at any await, as the turns may be.
    """

    def __init__(
        self,
        jobs: Sequence[HousekeepingJob],
        *,
        traffic: TrafficWatch,
        limits: HousekeepingLimits,
        metrics: HousekeepingMetrics,
        now: Callable[[], float],
    ) -> None:
        """Take the jobs, whose names differ; *now* is a clock that never goes back."""
        self._traffic = traffic
        self._limits = limits
        self._metrics = metrics
        self._now = now
        began = now()
        self._jobs = {job.name: _Job(job, served_at=began, covered_at=began) for job in jobs}
        assert len(self._jobs) == len(jobs), "each kind of work has a name of its own"
        self._round_at = began
        self._state = HousekeepingState.IDLE
        self._changed = asyncio.Event()
        metrics.show_state(self._state)
        for name in self._jobs:
            # Set from the start, so that a job which never succeeds is visible as well.
            metrics.covered_at.labels(name).set_to_current_time()

    def set_limits(self, limits: HousekeepingLimits) -> None:
        """Use *limits* from now on."""
        if limits != self._limits:
            self._limits = limits
            self._traffic.set_window(limits.window_seconds)
            self._changed.set()

    async def run(self) -> None:
        """Give turns until cancelled."""
        while True:
            self._changed.clear()
            wait_seconds = await self.step()
            try:
                async with asyncio.timeout(max(wait_seconds, _BREATH_SECONDS)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def step(self) -> float:
        """Give one turn, if it is time for one; return how many seconds to wait before the next step."""
        plan = plan_turn(
            [each.status for each in self._jobs.values()],
            self._traffic.traffic,
            self._limits,
            round_at=self._round_at,
            now=self._now(),
        )
        self._show(plan)
        if plan.job is not None:
            await self._turn(self._jobs[plan.job], is_forced=plan.is_forced)
            if all(each.is_done for each in self._jobs.values()):
                self._end_round()
        return plan.wait_seconds

    async def _turn(self, each: _Job, *, is_forced: bool) -> None:
        name = each.job.name
        each.served_at = self._now()
        self._metrics.turns.labels(name, "forced" if is_forced else "idle").inc()
        try:
            with background():
                turn = await each.job.turn(requests_max=TURN_REQUESTS_MAX)
        except TieringError as error:
            self._note_failure(each, error)
            log.warning("housekeeping failed; it comes again later", job=name, error=str(error))
        except Exception as error:
            # The boundary between tasks: a bug in one kind of work must not end the archiving.
            self._note_failure(each, error)
            log.exception("housekeeping failed; it comes again later", job=name)
        else:
            self._note_turn(each, turn)

    def _note_turn(self, each: _Job, turn: JobTurn) -> None:
        each.failures = 0
        each.is_done = not turn.has_more
        self._metrics.requests.labels(each.job.name).inc(turn.requests)
        if turn.has_covered_all or not turn.has_more:
            each.covered_at = self._now()
            self._metrics.covered_at.labels(each.job.name).set_to_current_time()

    def _note_failure(self, each: _Job, error: Exception) -> None:
        each.failures += 1
        each.is_done = True
        each.not_before = self._now() + pause_after_failures(each.failures, self._limits)
        self._metrics.failures.labels(each.job.name, type(error).__name__).inc()

    def _end_round(self) -> None:
        self._metrics.rounds.inc()
        self._round_at = self._now() + self._limits.window_seconds
        for each in self._jobs.values():
            each.is_done = False

    def _show(self, plan: TurnPlan) -> None:
        if plan.state is self._state:
            return
        if plan.state is HousekeepingState.PAUSED:
            self._metrics.pauses.inc()
        log.debug("housekeeping", state=plan.state.value, reason=plan.reason)
        self._state = plan.state
        self._metrics.show_state(plan.state)
