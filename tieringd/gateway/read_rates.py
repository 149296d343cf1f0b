"""
How fast archived records go out: to all clients together, to each client, and to each principal.

A broker's fetch quotas do not count bytes of the archive, so the gateway has rates of its own. They work like
the broker's: an answer is sent whole, with the time for which the client is to wait, and the gateway does not
read from the client until the answer's bytes have been earned. The size of one answer is bounded too, so the
pause is short. A client is identified by its host, because a gateway knows a client's host without asking.
A principal may have a budget of dollars for a day as well: requests to the object store are charged to it.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Final

AHEAD_SECONDS: Final = 1.0
"""Seconds' worth of the rate that one answer may use, and that a client may overspend without a pause."""
WAIT_SECONDS_MAX: Final = 10.0
"""Longest pause. Clients give up an unanswered request after 30 seconds by default."""
ANSWER_BYTES_MAX: Final = float(55 << 20)
"""
How many bytes of archived records one answer has at most: a broker's default of `fetch.max.bytes`.

A client's limit may allow 2 GiB, which is more than a response can have.
"""
_DAY_SECONDS: Final = 86_400.0
_DEBT_SECONDS_MAX: Final = AHEAD_SECONDS + WAIT_SECONDS_MAX
_HOSTS_KEPT: Final = 1024
_LEAST_BYTES: Final = 1.0
"""With none a Fetch at the log's end would have enough at once, and its client would ask without pause."""
HOST: Final[ContextVar[str]] = ContextVar("HOST", default="")
"""The host of the client whose request is being answered."""


class ReadRates:
    """Rates in bytes a second, None without a limit. Not bound to a loop: the caller passes the time."""

    def __init__(
        self,
        *,
        bytes_per_second: int | None = None,
        client_bytes_per_second: int | None = None,
        principal_bytes_per_second: int | None = None,
        principal_dollars_per_day: float | None = None,
    ) -> None:
        self._all = _Account(None)
        self._clients = _Accounts()
        self._principals = _Accounts()
        # The budget of a whole day may be spent at once.
        self._dollars = _Accounts(ahead_seconds=_DAY_SECONDS)
        self._answer_bytes_max = math.inf
        self.set_limits(
            bytes_per_second=bytes_per_second,
            client_bytes_per_second=client_bytes_per_second,
            principal_bytes_per_second=principal_bytes_per_second,
            principal_dollars_per_day=principal_dollars_per_day,
            now=0.0,
        )

    def set_limits(
        self,
        *,
        bytes_per_second: int | None,
        client_bytes_per_second: int | None,
        principal_bytes_per_second: int | None,
        principal_dollars_per_day: float | None,
        now: float,
    ) -> None:
        """Use other limits from now on. What was overspent is earned at the new rates."""
        self._all.set_rate(bytes_per_second, now=now)
        self._clients.set_rate(client_bytes_per_second, now=now)
        self._principals.set_rate(principal_bytes_per_second, now=now)
        daily = None if principal_dollars_per_day is None else principal_dollars_per_day / _DAY_SECONDS
        self._dollars.set_rate(daily, now=now)
        limits = (bytes_per_second, client_bytes_per_second, principal_bytes_per_second)
        rates = [one for one in limits if one is not None]
        self._answer_bytes_max = min(rates, default=math.inf) * AHEAD_SECONDS

    def answer_bytes(self, *, now: float, host: str = "", principal: str = "") -> float:
        """
        Return how many bytes of archived records an answer should have. A first batch may exceed it.

        It shrinks with the debts: pauses are capped, so many connections that each wait the longest pause
        would together still exceed a rate, also those of one host or one principal. Past a budget of dollars
        only a first batch is left.
        """
        if self._dollars.overspent_seconds(principal, now=now):
            return _LEAST_BYTES
        if not math.isfinite(self._answer_bytes_max):
            return ANSWER_BYTES_MAX
        common_seconds = max(0.0, self._all.earned_at - now)
        own_seconds = max(
            self._clients.overspent_seconds(host, now=now),
            self._principals.overspent_seconds(principal, now=now),
        )
        debt = max(common_seconds / _DEBT_SECONDS_MAX, own_seconds / WAIT_SECONDS_MAX)
        return max(_LEAST_BYTES, min(self._answer_bytes_max * (1 - debt), ANSWER_BYTES_MAX))

    def spend(self, host: str, size_bytes: int, *, now: float, principal: str = "") -> float:
        """
        Count archived bytes sent to *principal* at *host*.

        Return for how many seconds nothing more should be sent to that client.
        """
        wait = self._all.spend(size_bytes, now=now)
        if size_bytes:
            wait = max(
                wait,
                self._clients.spend(host, size_bytes, now=now),
                self._principals.spend(principal, size_bytes, now=now),
                self._dollars.spend(principal, 0, now=now),
            )
        return min(wait, WAIT_SECONDS_MAX)

    def charge(self, principal: str, dollars: float, *, now: float) -> None:
        """Count what requests to the object store cost that *principal* has caused."""
        self._dollars.spend(principal, dollars, now=now)


class _Accounts:
    """An account for each name; None without a limit."""

    def __init__(self, *, ahead_seconds: float = AHEAD_SECONDS) -> None:
        self._per_second: float | None = None
        self._ahead_seconds = ahead_seconds
        self._accounts: dict[str, _Account] = {}

    def set_rate(self, per_second: float | None, *, now: float) -> None:
        self._per_second = per_second
        if per_second is None:
            self._accounts = {}
        for account in self._accounts.values():
            account.set_rate(per_second, now=now)

    def spend(self, name: str, amount: float, *, now: float) -> float:
        if self._per_second is None:
            return 0.0
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(self._per_second, ahead_seconds=self._ahead_seconds)
            if len(self._accounts) > _HOSTS_KEPT:
                self._accounts = {
                    one: each for one, each in self._accounts.items() if each.earned_at > now or one == name
                }
        return account.spend(amount, now=now)

    def overspent_seconds(self, name: str, *, now: float) -> float:
        account = self._accounts.get(name)
        return 0.0 if account is None else max(0.0, account.earned_at - now - self._ahead_seconds)


class _Account:
    """The time at which all that was spent will have been earned."""

    def __init__(self, per_second: float | None, *, ahead_seconds: float = AHEAD_SECONDS) -> None:
        self._per_second = per_second
        self._ahead_seconds = ahead_seconds
        self.earned_at = -math.inf

    def set_rate(self, per_second: float | None, *, now: float) -> None:
        if per_second is None or self._per_second is None:
            self.earned_at = -math.inf
        elif self.earned_at > now:
            self.earned_at = now + (self.earned_at - now) * self._per_second / per_second
        self._per_second = per_second

    def spend(self, amount: float, *, now: float) -> float:
        if self._per_second is None:
            return 0.0
        earned_at = max(self.earned_at, now) + amount / self._per_second
        # Debt beyond the longest pause is forgotten. Otherwise the remaining clients would wait for the
        # debt of clients that left.
        self.earned_at = min(earned_at, now + self._ahead_seconds + WAIT_SECONDS_MAX)
        return max(0.0, self.earned_at - now - self._ahead_seconds)
