"""A machine whose load a test sets, on the running loop's clock."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tieringd.broker.host_load import HostCounters

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeHost:
    """
    A machine with one processor and one disk. A demand of 1.0 uses one of them completely.

    *others* is the demand of everything but uploads for the processor, and *others_io* for the disk.
    *uploads* is the demand of running uploads for the processor. If the demands together exceed 1.0, tasks
    wait.
    """

    def __init__(self, *, others: float = 0.0, others_io: float = 0.0, uploads: float = 0.0) -> None:
        self._others, self._others_io, self._uploads = others, others_io, uploads
        self._running = 0
        self._since = self._now()
        self._total = self._idle = self._waited = self._io_waited = self._own = 0.0
        self.readings = 0

    def set_others(self, others: float, *, io: float = 0.0) -> None:
        """Set the demand of everything but uploads from now on."""
        self._advance()
        self._others, self._others_io = others, io

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Run an upload in the context."""
        self._advance()
        self._running += 1
        try:
            yield
        finally:
            self._advance()
            self._running -= 1

    def counters(self) -> HostCounters:
        """Return the counters that a kernel would have now."""
        self._advance()
        self.readings += 1
        own = self._own
        return HostCounters(self._since, self._total, self._idle, self._waited, self._io_waited, 0.0, own)

    def _advance(self) -> None:
        now = self._now()
        seconds, self._since = now - self._since, now
        own = self._uploads if self._running else 0.0
        demand = self._others + own
        self._own += seconds * own / max(1.0, demand)
        self._total += seconds
        self._idle += seconds * max(0.0, 1 - demand)
        self._waited += seconds * min(1.0, max(0.0, demand - 1))
        self._io_waited += seconds * self._others_io

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
