"""
What the fetches of readers leave behind: counts, and a line in the log for a slow one.

Slow fetches come in crowds when a store is slow. So only a few lines are written in an interval, and the next
one says how many were left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from tieringd.gateway.frames import ClientResponse
from tieringd.metrics.readers import Reader, ReaderCounts, Source

log = structlog.get_logger(__name__)

LINES_MAX: Final = 10
"""How many slow fetches are logged in an interval."""
INTERVAL_SECONDS: Final = 60.0


class ReaderRecords:
    """Count the fetches of one listener, and log slow ones."""

    def __init__(
        self,
        counts: ReaderCounts | None,
        *,
        slow_seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the arguments. Without *counts*, slow fetches are logged and none is counted."""
        self._counts = counts
        self.slow_seconds = slow_seconds
        """Fetches of archived records that take longer are logged."""
        self._now = now
        self._begun_at = now()
        self._lines = 0
        self._left_out = 0

    def passed(self, reader: Reader, size_bytes: int, *, seconds: float) -> None:
        """Count a response of the broker that was passed on. Its wait is the broker's and the client's."""
        if self._counts is not None:
            self._counts.count_fetch(reader, Source.BROKER, size_bytes, seconds)

    def fetched(self, reader: Reader, sent: ClientResponse, size_bytes: int, *, seconds: float) -> None:
        """Count a response that the archive was asked for."""
        source = Source.BROKER
        if sent.archived:
            source = Source.STORE if sent.waited_for else Source.CACHE
        self.archived(
            reader,
            source,
            size_bytes,
            seconds=seconds,
            waited_for=sent.waited_for,
            has_unread=sent.has_unread,
        )

    def archived(
        self,
        reader: Reader,
        source: Source,
        size_bytes: int,
        *,
        seconds: float,
        waited_for: tuple[str, ...] = (),
        has_unread: bool = False,
    ) -> None:
        """Count a response from *source*, and log it if it was slow. *waited_for* names awaited chunks."""
        if self._counts is not None:
            self._counts.count_fetch(reader, source, size_bytes, seconds)
        if seconds < self.slow_seconds or not self._may_log():
            return
        log.info(
            "a Fetch of archived records was slow",
            principal=reader.principal,
            client_id=reader.client_id,
            seconds=round(seconds, 3),
            size_bytes=size_bytes,
            waited_for=_waited_for(waited_for, has_unread=has_unread),
            chunk=waited_for[0] if waited_for else None,
            left_out=self._left_out,
        )
        self._left_out = 0

    def throttled(self, reader: Reader, seconds: float) -> None:
        """Count the *seconds* that a reader was told to wait."""
        if self._counts is not None:
            self._counts.count_throttled(reader, seconds)

    def _may_log(self) -> bool:
        now = self._now()
        if now - self._begun_at >= INTERVAL_SECONDS:
            self._begun_at, self._lines = now, 0
        if self._lines >= LINES_MAX:
            self._left_out += 1
            return False
        self._lines += 1
        return True


def _waited_for(chunks: tuple[str, ...], *, has_unread: bool) -> str:
    if chunks:
        return "the object store"
    if has_unread:
        return "the manifest, the broker's bounds or the object store; the read goes on"
    return "the manifest, the broker's bounds or the cache's disk"
