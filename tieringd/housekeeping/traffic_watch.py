"""
The traffic watch: how busy the object store is with what is not housekeeping.

It hears of each attempt of each request, in the task that made it. Housekeeping marks its tasks
(`storage.background`), so its own requests are no traffic. That the store asks to slow down
counts whoever was told so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.policies.housekeeping import SlidingCount, Traffic
from tieringd.storage.background import is_background

if TYPE_CHECKING:
    from collections.abc import Callable


class TrafficWatch:
    """Count requests over a sliding window. One for a store, on one event loop."""

    def __init__(self, *, window_seconds: float, now: Callable[[], float]) -> None:
        """Begin to watch; *now* is a clock that never goes back."""
        self._now = now
        self._window_seconds = window_seconds
        self._requests = SlidingCount(window_seconds)
        self._throttled = SlidingCount(window_seconds)
        self._since = now()

    def set_window(self, window_seconds: float) -> None:
        """Count over another window; what was counted before says nothing of it."""
        if window_seconds != self._window_seconds:
            self._window_seconds, self._since = window_seconds, self._now()
            self._requests, self._throttled = SlidingCount(window_seconds), SlidingCount(window_seconds)

    def note(self, *, is_throttled: bool) -> None:
        """Hear of one attempt."""
        now = self._now()
        if not is_background():
            self._requests.note(now)
        if is_throttled:
            self._throttled.note(now)

    @property
    def traffic(self) -> Traffic:
        """Return what was seen up to now."""
        now = self._now()
        return Traffic(self._requests.count(now), self._throttled.count(now), now - self._since)
