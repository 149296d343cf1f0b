"""When a broker closed the segments of a topic, and when they were durable. Lag is the time in between."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

SegmentName = tuple[int, int]
"""A partition and a base offset."""


class ClosedSegments:
    """Sees in a log directory which segments are closed, and asks a tiering system which ones are durable."""

    def __init__(self, log_dir: Path, topic: str, durable: Callable[[], Iterable[SegmentName]]) -> None:
        self._log_dir = log_dir
        self._topic = topic
        self._ask = durable
        self._closed: dict[SegmentName, float] = {}
        self._bytes: dict[SegmentName, int] = {}
        self._durable: dict[SegmentName, float] = {}

    def sample(self) -> None:
        """Note what is new. A segment that is closed, copied and deleted between two samples is not seen."""
        now = time.monotonic()
        found: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for log in self._log_dir.glob(f"{self._topic}-*/*.log"):
            try:
                size_bytes = log.stat().st_size
            except FileNotFoundError:
                continue
            found[int(log.parent.name.rpartition("-")[2])][int(log.stem)] = size_bytes
        for partition, sizes in found.items():
            for base in sorted(sizes)[:-1]:
                self._closed.setdefault((partition, base), now)
                self._bytes[partition, base] = sizes[base]
        for one in self._ask():
            self._durable.setdefault(one, now)

    @property
    def waiting(self) -> set[SegmentName]:
        """Return the closed segments that are not durable."""
        return self._closed.keys() - self._durable.keys()

    @property
    def waiting_bytes(self) -> int:
        """Return the size of the closed segments that are not durable."""
        return sum(self._bytes[one] for one in self.waiting)

    @property
    def last_durable_at(self) -> float:
        """Return when the last of the closed segments became durable, in monotonic seconds."""
        return max(self._durable[one] for one in self._closed)

    def ages(self) -> list[float]:
        """Return how many seconds each closed segment was not durable; up to now where it is not yet."""
        now = time.monotonic()
        return [self._durable.get(one, now) - closed for one, closed in self._closed.items()]
