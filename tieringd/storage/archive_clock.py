"""
The clock that an archive goes by: the host's, compared with the object store's at every answer.

What follows from the comparison is decided in `policies.retention_time`. This keeps the readings, and tells
people when the host's clock cannot be believed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tieringd.clock import steady_seconds, wall_clock_ms
from tieringd.policies.retention_time import HostTime, StoreTime, judge_clock
from tieringd.storage.base import TimedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.metrics import Metrics
    from tieringd.policies.retention_time import Judgement

log = structlog.get_logger(__name__)


class ArchiveClock:
    """
    Tell the time of one process's archive. Called, it returns milliseconds since the epoch.

    Its methods may be called from any thread; the store tells its time on the loop's.
    """

    def __init__(
        self,
        *,
        metrics: Metrics | None = None,
        wall_ms: Callable[[], int] = wall_clock_ms,
        steady_seconds: Callable[[], float] = steady_seconds,
    ) -> None:
        self._metrics = metrics
        self._wall_ms = wall_ms
        self._steady_seconds = steady_seconds
        self._begun = self._host_time()
        self._told: StoreTime | None = None
        self._is_doubted = False

    def listen_to(self, store: object) -> None:
        """Compare with the clock of *store* from now on, if it tells the time at all."""
        if isinstance(store, TimedStore):
            is_own = store.has_own_clock
            store.tell_time_to(lambda told_ms: self._hear(told_ms, is_own=is_own))

    def __call__(self) -> int:
        """Return the time by which new objects, commits and marks are dated."""
        return self.judgement().now_ms

    def ages_ms(self, committed_at_ms: int = 0) -> int:
        """
        Return the time that ages count to, or `NOTHING_IS_OLD_MS` while no age is certain.

        *committed_at_ms* is the time of the last commit to what is to be let go of, where there is one.
        """
        return self.judgement().ages_ms(committed_at_ms)

    def wall_ms(self) -> int:
        """Return what this host's clock shows, right or wrong: local files and the broker go by it."""
        return self._wall_ms()

    def judgement(self) -> Judgement:
        """Return what time it is, and whether ages are certain; say so when that has changed."""
        found = judge_clock(self._host_time(), begun=self._begun, told=self._told)
        if self._metrics is not None:
            self._metrics.clock.error_seconds.set(found.error_ms / 1000)
            self._metrics.clock.is_doubted.set(bool(found.doubt))
        if bool(found.doubt) != self._is_doubted:
            self._is_doubted = bool(found.doubt)
            if found.doubt:
                log.error(
                    "nothing is deleted by age: the time is not certain; set this host's clock, with NTP; "
                    "restart tieringd where the doubt stays",
                    reason=found.doubt,
                    error_seconds=found.error_ms / 1000,
                )
            else:
                log.warning("the time is certain again; deletion by age goes on")
        return found

    def _hear(self, told_ms: int, *, is_own: bool) -> None:
        self._told = StoreTime(told_ms, self._host_time(), is_own)
        self.judgement()

    def _host_time(self) -> HostTime:
        return HostTime(self._wall_ms(), self._steady_seconds())
