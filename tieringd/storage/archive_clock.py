"""
The clock of an archive: the host's clock, compared with the object store's at every response.

`policies.retention_time` decides what follows from the comparison. This module keeps the readings, and
warns operators when the host's clock cannot be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import structlog

from tieringd.clock import steady_seconds, wall_clock_ms
from tieringd.metrics import Metrics
from tieringd.policies.retention_time import ClockHistory, ClockStatus, HostTime, StoreTime, clock_status
from tieringd.storage.base import TimedStore

log = structlog.get_logger(__name__)

_SAME_SECONDS = 0.001
"""How long a status holds, if nothing else changes: the archive's time is in milliseconds."""
COMMIT_DOUBT_SHOWN_SECONDS = 60.0
"""How long a doubt about one partition stays shown after it was last met. No event marks its end."""


class ArchiveClock:
    """
    The clock of one process's archive. Calling it returns milliseconds since the epoch.

    Its methods may be called from any thread. The store reports its time on the event loop's thread.
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
        self._started = self._host_time()
        self._agreed: tuple[HostTime, StoreTime | None] = (self._started, None)
        """The last certain reading, and the last time that the store had reported by then."""
        self._store_time: StoreTime | None = None
        self._awaits_store = False
        self._is_doubted = False
        self._found: tuple[HostTime, StoreTime | None, bool, ClockStatus] | None = None
        """The last status and what it came from. A step of an archiver asks for the time ten times."""
        self._shown: tuple[int, bool] | None = None
        """Error and doubt as the metrics show them."""
        self._commit_doubted_at = -math.inf
        """Time on the steady clock at which a manifest with a future commit time was last met."""

    def listen_to(self, store: object) -> None:
        """Compare with the clock of *store* from now on, if the store reports a time at all."""
        if isinstance(store, TimedStore):
            is_own = store.has_own_clock
            self._awaits_store = is_own
            store.tell_time_to(lambda store_ms: self._take_store_time(store_ms, is_own=is_own))

    def __call__(self) -> int:
        """Return the time by which new objects, commits and marks are dated."""
        return self.status().now_ms

    def ages_ms(self, committed_at_ms: int = 0) -> int:
        """
        Return the time from which ages are computed, or `NOTHING_IS_OLD_MS` while no age is certain.

        *committed_at_ms* is the time of the last commit to the data that may be deleted, or 0 where
        there is none.
        """
        found = self.status()
        doubt = found.doubt_after(committed_at_ms)
        if doubt and not found.doubt:
            self._commit_doubted_at = self._steady_seconds()
            self._show(doubt, error_ms=found.now_ms - committed_at_ms)
        return found.ages_ms(committed_at_ms)

    def wall_ms(self) -> int:
        """Return what this host's clock shows, right or wrong. Local files and the broker are dated by it."""
        return self._wall_ms()

    def steady_ms(self) -> int:
        """Return milliseconds of a clock that never jumps, for measuring waits. Its origin is arbitrary."""
        return round(self._steady_seconds() * 1000)

    def status(self) -> ClockStatus:
        """Return the current time, and whether ages are certain. Log when the certainty changes."""
        wall_ms, steady_seconds = self._wall_ms(), self._steady_seconds()
        store_time, awaits_store = self._store_time, self._awaits_store
        if self._found is not None:
            before, store_time_then, awaited_store, found = self._found
            if (
                before.wall_ms == wall_ms
                and 0 <= steady_seconds - before.steady_seconds < _SAME_SECONDS
                and store_time_then is store_time
                and awaited_store == awaits_store
            ):
                return found
        host = HostTime(wall_ms, steady_seconds)
        agreed, store_time_before = self._agreed
        found = clock_status(
            host, ClockHistory(self._started, agreed, store_time, store_time_before, awaits_store)
        )
        if not found.doubt:
            self._agreed = host, store_time
        if found.doubt or host.steady_seconds - self._commit_doubted_at >= COMMIT_DOUBT_SHOWN_SECONDS:
            self._show(found.doubt, error_ms=found.error_ms)
        self._found = host, store_time, awaits_store, found
        return found

    def _show(self, doubt: str, *, error_ms: int) -> None:
        # A store that does not answer is reported elsewhere.
        shown = error_ms, bool(doubt) and not self._awaits_store
        if self._metrics is not None and shown != self._shown:
            self._metrics.clock.error_seconds.set(error_ms / 1000)
            self._metrics.clock.is_doubted.set(shown[1])
            self._shown = shown
        if bool(doubt) == self._is_doubted or (doubt and self._awaits_store):
            return
        self._is_doubted = bool(doubt)
        if doubt:
            log.error(
                "nothing is deleted by age: the time is not certain; set this host's clock, with NTP, or the "
                "object store's if that is the wrong one; restart tieringd where the doubt stays",
                reason=doubt,
                error_seconds=error_ms / 1000,
            )
        else:
            log.warning("the time is certain again; deletion by age goes on")

    def _take_store_time(self, store_ms: int | None, *, is_own: bool) -> None:
        # A store whose responses carry no time cannot be waited for: only this host's clock is left.
        self._awaits_store = False
        if store_ms is not None:
            self._store_time = StoreTime(store_ms, self._host_time(), is_own)
        self.status()

    def _host_time(self) -> HostTime:
        return HostTime(self._wall_ms(), self._steady_seconds())
