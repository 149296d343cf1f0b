"""
The load watch: what a machine does, and what it does in the moments without uploads.

It reads the kernel's counters when it is asked, and whenever the first upload begins or the last one ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.broker.host_load import load_between, sum_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.broker.host_load import HostCounters
    from tieringd.policies.upload_contention import HostLoad

_RECENT_SECONDS = 5.0
"""A longer moment says nothing of the machine as it is now."""


class LoadWatch:
    """Split a machine's load by whether uploads were under way. Belongs to one event loop."""

    def __init__(self, counters: Callable[[], HostCounters]) -> None:
        self._counters = counters
        self._looked = self._quiet_since = counters()
        self._is_uploading = False
        self._others: list[HostLoad] = []

    def uploads_begin(self) -> None:
        """Note that the first upload begins."""
        reading = self._counters()
        self._note_quiet(reading)
        self._is_uploading = True
        if reading.at - self._looked.at > _RECENT_SECONDS:
            self._looked = reading

    def uploads_end(self) -> None:
        """Note that the last upload has ended."""
        self._is_uploading, self._quiet_since = False, self._counters()

    def look(self) -> tuple[HostLoad, HostLoad]:
        """Return the load since the last look, and that of the moments without uploads up to now."""
        reading = self._counters()
        total, self._looked = load_between(self._looked, reading), reading
        if not self._is_uploading:
            self._note_quiet(reading)
        return total, sum_of(self._others)

    def forget_others(self) -> None:
        """Begin anew with the moments without uploads."""
        self._others.clear()

    def _note_quiet(self, reading: HostCounters) -> None:
        load, self._quiet_since = load_between(self._quiet_since, reading), reading
        if 0 < load.seconds <= _RECENT_SECONDS:
            self._others = [sum_of((*self._others, load))]
