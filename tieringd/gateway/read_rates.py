"""
How fast archived records go out: to all clients together, and to each client.

A broker's fetch quotas know nothing of what comes from the archive, so these are the gateway's own. They
work as a broker's do: an answer is sent whole, and the client is not read from until its bytes have been
earned. What one answer may take is bounded too, so that this is never long. A client is a host: what a
gateway knows of it without asking.
"""

from __future__ import annotations

import math
from typing import Final

AHEAD_SECONDS: Final = 1.0
"""What one answer may take, and what a client may have spent before it has to wait."""
WAIT_SECONDS_MAX: Final = 10.0
"""Clients give up an unanswered request after 30 seconds by default."""
_DEBT_SECONDS_MAX: Final = AHEAD_SECONDS + WAIT_SECONDS_MAX
_HOSTS_KEPT: Final = 1024


class ReadRates:
    """Bytes a second, None without a limit. Not bound to a loop: the caller says what time it is."""

    def __init__(
        self, *, bytes_per_second: int | None = None, client_bytes_per_second: int | None = None
    ) -> None:
        self._all = _Account(bytes_per_second)
        self._client_rate = client_bytes_per_second
        self._clients: dict[str, _Account] = {}
        rates = [one for one in (bytes_per_second, client_bytes_per_second) if one is not None]
        self._answer_bytes_max: float = min(rates, default=math.inf) * AHEAD_SECONDS

    def answer_bytes(self, *, now: float) -> float:
        """
        Return how many archived records an answer should have; a first batch comes whatever its size.

        Many clients that all wait as long as they may, together still get too much: so it is less with debt.
        """
        debt_seconds = max(0.0, self._all.earned_at - now)
        if not debt_seconds:
            return self._answer_bytes_max
        return self._answer_bytes_max * max(0.0, 1 - debt_seconds / _DEBT_SECONDS_MAX)

    def spend(self, host: str, size_bytes: int, *, now: float) -> float:
        """Count what is sent to *host*, and return for how many seconds nothing more is to be."""
        wait = self._all.spend(size_bytes, now=now)
        if self._client_rate is not None and size_bytes:
            account = self._clients.setdefault(host, _Account(self._client_rate))
            wait = max(wait, account.spend(size_bytes, now=now))
            if len(self._clients) > _HOSTS_KEPT:
                self._clients = {one: each for one, each in self._clients.items() if each.earned_at > now}
        return min(wait, WAIT_SECONDS_MAX)


class _Account:
    """When everything that was spent will have been earned."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._bytes_per_second = bytes_per_second
        self.earned_at = -math.inf

    def spend(self, size_bytes: int, *, now: float) -> float:
        if self._bytes_per_second is None:
            return 0.0
        earned_at = max(self.earned_at, now) + size_bytes / self._bytes_per_second
        # What nobody waits for is forgotten: else who is left would wait for those who have gone.
        self.earned_at = min(earned_at, now + _DEBT_SECONDS_MAX)
        return max(0.0, self.earned_at - now - AHEAD_SECONDS)
