"""
The upload gate: no upload begins before the pace allows it, and the right one begins next.

The gate only delays beginnings. An upload that is under way runs at its own speed, so that its
speed can be measured, and a lower pace takes hold by what is not begun. What the pace should be
and whose turn it is are decided in `policies.upload_control`.

There is no task behind the gate. It acts when someone comes, leaves, is cancelled or sets a new
pace, and on one timer while the byte budget is what everybody waits for.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tieringd.policies.upload_control import OrderLimits
from tieringd.services.upload_line import NO_URGENCY, UploadLine, UploadRequest, Urgency

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tieringd.model.partition import TopicIdPartition
    from tieringd.policies.upload_control import UploadPace

_BURST_SECONDS = 1.0
"""An idle gate saves up at most this much of its rate, so a few small segments pass together."""

_MEASURE_FADE = 0.9
"""What a measurement keeps of its weight at the next upload: about the last ten count."""


class Timer(Protocol):
    """A call that has been arranged and may be called off."""

    def cancel(self) -> None:
        """Call it off."""


class Timers(Protocol):
    """The part of an event loop that the gate needs: a monotonic clock and calls at a time on it."""

    def time(self) -> float:
        """Return the time in seconds."""

    def call_at(self, when: float, callback: Callable[[float], object], argument: float, /) -> Timer:
        """Arrange for *callback* to be called with *argument* at *when*."""


class UploadGate:
    """
    Let uploads begin by the current pace, in the policy's order.

    One per daemon, on one event loop. Cancelling a caller is safe at any await: one that waits
    leaves the line, and one that was let in but has not begun gives back its slot and its bytes.
    An upload that fails under way gives back the slot only, for its bytes may have been sent.
    """

    def __init__(
        self,
        pace: UploadPace,
        *,
        timers: Timers,
        order: OrderLimits | None = None,
        segments_per_turn: int = 4,
    ) -> None:
        self._pace = pace
        self._timers = timers
        self._line = UploadLine(order or OrderLimits(), segments_per_turn=segments_per_turn)
        self._free_at = timers.time()
        self._timer: tuple[float, Timer] | None = None
        self._uploads_in_flight = 0
        self._bytes_in_flight = 0
        self._speedometer = _Speedometer()

    @property
    def pace(self) -> UploadPace:
        """Return the pace in force."""
        return self._pace

    @property
    def waiting_uploads(self) -> int:
        """Return how many uploads wait to begin."""
        return self._line.requests

    @property
    def waiting_bytes(self) -> int:
        """Return the size of the uploads that wait to begin."""
        return self._line.size_bytes

    @property
    def waiting_partitions(self) -> int:
        """Return how many partitions have an upload waiting."""
        return self._line.partitions

    @property
    def longest_wait_seconds(self) -> float:
        """Return how long the oldest waiting upload has waited; 0 when none waits."""
        return max(0.0, self._timers.time() - self._line.oldest_asked_at())

    @property
    def uploads_in_flight(self) -> int:
        """Return how many uploads are under way."""
        return self._uploads_in_flight

    @property
    def bytes_in_flight(self) -> int:
        """Return the size of the uploads that are under way."""
        return self._bytes_in_flight

    @property
    def measured_bytes_per_second(self) -> float | None:
        """
        Return what recent uploads carried per second of time in which any was under way.

        None before the first one has succeeded. The pace does not bear on it, because waiting
        does not count; how many run side by side does, and so does what else the machine does.
        """
        return self._speedometer.bytes_per_second

    def set_pace(self, pace: UploadPace) -> None:
        """
        Put *pace* in force at once.

        Bytes already spent beyond the budget are paid off at the new rate, and forgotten by a
        pace without limit. Uploads under way are left alone.
        """
        now = self._timers.time()
        old, new = self._pace.bytes_per_second, pace.bytes_per_second
        if old is None or new is None:
            self._free_at = now
        else:
            self._free_at = now + max(self._free_at - now, -_BURST_SECONDS) * old / new
        self._pace = pace
        self._admit(now)

    @asynccontextmanager
    async def upload(
        self, partition: TopicIdPartition, size_bytes: int, urgency: Urgency = NO_URGENCY
    ) -> AsyncIterator[None]:
        """
        Hold a place among the uploads for the time of the context; entering waits for it.

        Uploads of one partition begin in the order in which they asked.
        """
        assert size_bytes >= 0, "a size is not negative"
        request = await self._enter(partition, size_bytes, urgency)
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            self._leave(request, succeeded=succeeded)

    async def _enter(self, partition: TopicIdPartition, size_bytes: int, urgency: Urgency) -> UploadRequest:
        now = self._timers.time()
        request = UploadRequest(
            partition=partition,
            size_bytes=size_bytes,
            urgency=urgency,
            asked_at=now,
            loss_at=now + urgency.seconds_to_loss,
            admitted=asyncio.get_running_loop().create_future(),
        )
        self._line.append(request)
        self._admit(now)
        try:
            await request.admitted
        except asyncio.CancelledError:
            if request.admitted.cancelled():
                self._line.discard(request)
                self._admit(self._timers.time())
            else:
                # Let in, and cancelled before it could run: nothing has been sent.
                self._refund(request)
                self._leave(request, succeeded=False)
            raise
        return request

    def _leave(self, request: UploadRequest, *, succeeded: bool) -> None:
        now = self._timers.time()
        self._uploads_in_flight -= 1
        self._bytes_in_flight -= request.size_bytes
        self._speedometer.ended(now, request.speed_mark, request.size_bytes if succeeded else None)
        self._admit(now)

    def _admit(self, now: float) -> None:
        """Let in whoever may begin now, and arrange to look again when that changes by itself."""
        while self._line.requests and self._uploads_in_flight < self._pace.concurrent_uploads:
            request = self._line.pop(now, is_budget_free=self._is_budget_free(now))
            if request is None:
                break
            self._begin(request, now)
        if not self._line.requests and not self._uploads_in_flight:
            self._line.forget_turns()
        self._set_timer()

    def _is_budget_free(self, now: float) -> bool:
        return self._pace.bytes_per_second is None or now >= self._free_at

    def _begin(self, request: UploadRequest, now: float) -> None:
        if self._pace.bytes_per_second is not None:
            # The whole size is borrowed: one segment larger than the budget passes, and the next waits.
            seconds = request.size_bytes / self._pace.bytes_per_second
            self._free_at = max(self._free_at, now - _BURST_SECONDS) + seconds
            request.is_charged = True
        self._uploads_in_flight += 1
        self._bytes_in_flight += request.size_bytes
        request.speed_mark = self._speedometer.began(now)
        request.admitted.set_result(None)

    def _refund(self, request: UploadRequest) -> None:
        if request.is_charged and self._pace.bytes_per_second is not None:
            self._free_at -= request.size_bytes / self._pace.bytes_per_second

    def _set_timer(self) -> None:
        """Look again when the budget is free or someone's last moment has come, if there is a slot then."""
        when = math.inf
        if self._line.requests and self._uploads_in_flight < self._pace.concurrent_uploads:
            when = min(self._free_at, self._line.last_moment())
        if self._timer is not None:
            if self._timer[0] == when:
                return
            self._timer[1].cancel()
            self._timer = None
        if when < math.inf:
            self._timer = (when, self._timers.call_at(when, self._on_timer, when))

    def _on_timer(self, when: float) -> None:
        self._timer = None
        # A loop may call a little early, by the resolution of its clock.
        self._admit(max(when, self._timers.time()))


@dataclass(slots=True)
class _Speedometer:
    """
    How many bytes uploads carry in a second that one of them has to itself.

    Time in which several run is divided among them. An upload that fails takes its part of the
    time with it, so a store that was away does not look like one that is slow.
    """

    _running: int = 0
    _read_at: float = 0.0
    _shared_seconds: float = 0.0
    """What an upload has had to itself, if it has been running from the beginning."""
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        """Return the rate of recent uploads; None when there were none."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    def began(self, now: float) -> float:
        """Count one upload more, and return its mark, to be given back when it ends."""
        self._read(now)
        self._running += 1
        return self._shared_seconds

    def ended(self, now: float, mark: float, size_bytes: int | None) -> None:
        """Count one upload less; *size_bytes* is None when it failed."""
        self._read(now)
        self._running -= 1
        if size_bytes is not None:
            self._bytes = self._bytes * _MEASURE_FADE + size_bytes
            self._seconds = self._seconds * _MEASURE_FADE + self._shared_seconds - mark

    def _read(self, now: float) -> None:
        if self._running:
            self._shared_seconds += (now - self._read_at) / self._running
        self._read_at = now
