"""
A second request for a range whose bytes begin to come later than nearly all others' do.

A few requests to an object store in a cloud wait many times as long as the rest before their first byte.
Asking once more is usually faster than waiting on. The request whose body begins first is read, and the other
one is cancelled. At most two in a hundred ranges are asked for twice, and two at once: where a store is slow
as a whole, more requests would make it slower.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeAlias

from tieringd.metrics import CacheMetrics
from tieringd.storage.base import ObjectStore, Take
from tieringd.storage.ranges import read_range

KNOWN_MIN: Final = 100
"""How many ranges have to have begun before one counts as late."""
_KNOWN_MAX: Final = 500
_LATE_SHARE: Final = 0.99
_LATE_SECONDS_MIN: Final = 0.02
SECOND_SHARE: Final = 0.02
"""Second requests for each range, at most."""
_SECOND_AT_ONCE: Final = 2
_RECKONED_EVERY: Final = 20

_Ask: TypeAlias = Callable[[Callable[[], Take]], Awaitable[int]]
"""Asks for a range. It calls the function that it is given when the body begins."""


class Lateness:
    """How long ranges take to begin, and from when on one is late."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KNOWN_MAX)
        self._noted = 0
        self.late_seconds: float | None = None
        """The time after which only one of a hundred ranges begins; None while too few are known."""

    def noted(self, begin: Callable[[], Take]) -> Callable[[], Take]:
        """Return *begin* for a range that is asked for now; its first call is noted."""
        now = asyncio.get_running_loop().time
        asked_at, has_begun = now(), False

        def begins() -> Take:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self._note(now() - asked_at)
            return begin()

        return begins

    def _note(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._noted += 1
        if len(self._seconds) >= KNOWN_MIN and self._noted % _RECKONED_EVERY == 0:
            found = sorted(self._seconds)[int(len(self._seconds) * _LATE_SHARE)]
            self.late_seconds = max(found, _LATE_SECONDS_MIN)


class _Race:
    """The requests for one range. The first whose body begins is the one that is read."""

    def __init__(self, ask: _Ask, begin: Callable[[], Take]) -> None:
        self._ask = ask
        self._begin = begin
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first: int | None = None
        """The number of the request whose body began first; None before that."""
        self.requests: list[asyncio.Task[int]] = []

    def enter(self) -> None:
        """Send one more request."""
        begins = partial(self._begins, len(self.requests))
        self.requests.append(asyncio.ensure_future(self._ask(begins)))

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until a body begins or a request ends, at most for *seconds*; say whether that came."""
        running: list[asyncio.Future[Any]] = [one for one in self.requests if not one.done()]
        waited_for = [self._begun, *running]
        done, _ = await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    @property
    def ended(self) -> asyncio.Task[int] | None:
        """The request that counts: the one that is read, or has ended well, or was the last to fail."""
        if self.first is not None:
            return self.requests[self.first]
        ended = [one for one in self.requests if one.done()]
        good = (one for one in ended if not one.cancelled() and one.exception() is None)
        return next(good, ended[-1] if len(ended) == len(self.requests) else None)

    async def close(self) -> None:
        """Cancel the requests that are not needed, and wait for their end."""
        for one in self.requests:
            one.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)

    def _begins(self, number: int) -> Take:
        if self.first is None:
            self.first = number
            self._begun.set_result(None)
        # The slower request is about to be cancelled. Its body may begin before that.
        return self._begin() if number == self.first else _drop


class LateRanges:
    """Reads ranges of one store. Belongs to one event loop."""

    def __init__(self, store: ObjectStore, metrics: CacheMetrics) -> None:
        self._store = store
        self._second_requests = metrics.second_requests
        self.lateness = Lateness()
        self._allowed = 0.0
        self._at_once = 0

    async def read_range(self, key: str, *, position: int, size_bytes: int, begin: Callable[[], Take]) -> int:
        """
        Hand on the bytes of a range; see `RangeStore.read_range`. They come from one request.

        Raises:
            ObjectNotFound: No such object.
        """
        self._allowed = min(_SECOND_AT_ONCE, self._allowed + SECOND_SHARE)
        begin = self.lateness.noted(begin)

        def ask(begins: Callable[[], Take]) -> Awaitable[int]:
            return read_range(self._store, key, position=position, size_bytes=size_bytes, begin=begins)

        late_seconds = self.lateness.late_seconds
        if late_seconds is None or not self._may_ask_again:
            return await ask(begin)
        race = _Race(ask, begin)
        race.enter()
        try:
            if not await race.wait(late_seconds) and self._may_ask_again:
                self._allowed -= 1
                self._at_once += 1
                race.enter()
            while (read := race.ended) is None:
                await race.wait()
            return await read
        finally:
            if len(race.requests) > 1:
                self._at_once -= 1
                self._second_requests.labels("faster" if race.first == 1 else "slower").inc()
            await race.close()

    @property
    def _may_ask_again(self) -> bool:
        return self._allowed >= 1 and self._at_once < _SECOND_AT_ONCE


def _drop(_: memoryview) -> None:
    """Take bytes that come from another request."""
