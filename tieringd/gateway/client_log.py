"""
How many lines about its clients a listener logs: a few for each client address and minute.

A client decides how often it is cut off, so its lines must not fill the log. What is left out is counted, and
the number is logged when the minute is over. Addresses beyond a limit share one allowance: a client may have
many of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import structlog

log = structlog.get_logger(__name__)

WINDOW_SECONDS: Final = 60.0
LINES_PER_ADDRESS: Final = 5
"""In each window. One refused client of a fleet behind one address is seen among them."""
ADDRESSES_MAX: Final = 100
OTHERS: Final = "(other)"


@dataclass(slots=True)
class _Window:
    """The lines about one address in its current minute."""

    timer: asyncio.TimerHandle
    logged: int = 0
    folded: int = 0


class ClientLog:
    """The allowances of all client addresses of one listener. It belongs to one event loop."""

    def __init__(self, *, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._windows: dict[str, _Window] = {}

    def admits(self, host: str) -> bool:
        """Say whether one more line about the client at *host* is logged now. If not, it is counted."""
        if host not in self._windows and len(self._windows) >= ADDRESSES_MAX:
            host = OTHERS
        window = self._windows.get(host)
        if window is None:
            timer = asyncio.get_running_loop().call_later(self._window_seconds, self._end, host)
            window = self._windows[host] = _Window(timer)
        if window.logged < LINES_PER_ADDRESS:
            window.logged += 1
            return True
        window.folded += 1
        return False

    def close(self) -> None:
        """Log what was left out until now."""
        for host in list(self._windows):
            self._end(host)

    def _end(self, host: str) -> None:
        window = self._windows.pop(host)
        window.timer.cancel()
        if window.folded:
            log.info("lines about a client were left out", client=host, repeated=window.folded)
