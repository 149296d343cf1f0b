"""
The upload gate: lets uploads begin at the current pace, in the policy's order.

The gate only delays beginnings. An upload that is under way runs at its own speed, so that its speed can
be measured, and a lower pace affects only uploads that have not begun. `policies.upload_control` decides
the pace and the order.

There is no task behind the gate. It acts when an upload asks, ends or is cancelled, when the pace
changes, and on one timer while all waiting uploads wait for a byte budget or a last moment.

It reports what holds uploads back, and for how long, with the constants of `policies.upload_control`.

The gate knows slots and byte budgets. Its queue (`upload_queue`) knows turns and danger.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tieringd.archiving.upload_queue import NO_URGENCY, Admission, UploadQueue, UploadRequest, Urgency
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.upload_control import (
    LIMIT,
    LISTENING,
    SLOTS,
    OrderLimits,
    UploadPace,
)

_BURST_SECONDS = 1.0
"""An idle gate saves up at most this many seconds of its rate, so a few small segments pass together."""

_MEASURE_FADE = 0.9
"""The factor by which a measurement's weight fades with each upload: about the last ten count."""


class Timer(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the call."""


class Timers(Protocol):
    """The part of an event loop that the gate needs: a monotonic clock and calls at a time on it."""

    def time(self) -> float:
        """Return the time in seconds."""

    def call_at(self, when: float, callback: Callable[[float], object], argument: float, /) -> Timer:
        """Schedule *callback* to be called with *argument* at *when*."""


class UploadGate:
    """
    Let uploads begin at the current pace, in the policy's order.

    One per daemon, on one event loop. Cancelling a caller is safe at any await: a waiting one leaves the
    queue, and an admitted one that has not begun gives back its slot and its bytes. An upload that fails
    under way gives back the slot only, because its bytes may have been sent.
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
        self._line = UploadQueue(order or OrderLimits(), segments_per_turn=segments_per_turn)
        now = timers.time()
        self._brake = _ByteRate(pace.bytes_per_second, now)
        self._limit = _ByteRate(pace.limit_bytes_per_second, now)
        self._timer: tuple[float, Timer] | None = None
        self._uploads_in_flight = 0
        self._is_busy = False
        """Whether `on_busy` was called since `on_quiet`. An upload may begin as the only other one ends."""
        self._braked_in_flight = 0
        self._bytes_in_flight = 0
        self.succeeded_uploads = 0
        """Uploads that have ended without an error."""
        self._speedometer = _Speedometer()
        self._held_by, self._held_since = "", now
        self._held_seconds: dict[str, float] = {}
        self.on_asked: Callable[[], object] = lambda: None
        """Called when an upload asks to begin."""
        self.on_busy: Callable[[], object] = lambda: None
        """Called before the first upload begins."""
        self.on_quiet: Callable[[], object] = lambda: None
        """Called when the last upload has ended."""

    def time(self) -> float:
        """Return the time of the gate's clock, in seconds; it never goes back."""
        return self._timers.time()

    @property
    def pace(self) -> UploadPace:
        """Return the pace in force."""
        return self._pace

    @property
    def waiting_uploads(self) -> int:
        """Return how many uploads wait to begin."""
        return self._line.requests

    @property
    def waiting_old_uploads(self) -> int:
        """Return how many waiting uploads are not of segments that were closed a moment ago."""
        return self._line.requests - self._line.new_requests

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
        Return the bytes per second that recent uploads carried while any of them was under way.

        None before the first one has succeeded. The pace does not affect it, because waiting does not
        count. The number of concurrent uploads does, and so does other load on the machine.
        """
        return self._speedometer.bytes_per_second

    @property
    def held_by(self) -> str:
        """Return what keeps the next upload from beginning; empty when none waits."""
        return self._held_by

    def held(self, partition: TopicIdPartition) -> tuple[str, float] | None:
        """Return what keeps a partition's next upload from beginning, and the seconds it has waited."""
        asked_at = self._line.asked_at(partition)
        return None if asked_at is None else (self._held_by, self._timers.time() - asked_at)

    def take_held_seconds(self) -> dict[str, float]:
        """Return the seconds in which uploads waited, by cause, since this was last called."""
        self._count_held(self._timers.time())
        taken, self._held_seconds = self._held_seconds, {}
        return taken

    def set_pace(self, pace: UploadPace) -> None:
        """
        Put *pace* in force at once.

        Bytes already spent beyond a budget are paid off at the new rate, and forgotten by a pace without
        limit. Uploads under way are not affected.
        """
        now = self._timers.time()
        self._brake.set_rate(pace.bytes_per_second, now)
        self._limit.set_rate(pace.limit_bytes_per_second, now)
        self._pace = pace
        self._admit(now)

    @asynccontextmanager
    async def upload(
        self, partition: TopicIdPartition, size_bytes: int, urgency: Urgency = NO_URGENCY
    ) -> AsyncIterator[None]:
        """
        Hold a slot among the uploads for the time of the context; entering waits for it.

        Uploads of one partition begin in the order of their requests.
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
        self.on_asked()
        self._admit(now)
        try:
            await request.admitted
        except asyncio.CancelledError:
            if request.admitted.cancelled():
                self._line.discard(request)
                self._admit(self._timers.time())
            else:
                # Admitted, and cancelled before it could run: nothing has been sent.
                self._refund(request)
                self._leave(request, succeeded=False)
            raise
        return request

    def _leave(self, request: UploadRequest, *, succeeded: bool) -> None:
        now = self._timers.time()
        self._uploads_in_flight -= 1
        self._braked_in_flight -= not request.urgency.is_new
        self._bytes_in_flight -= request.size_bytes
        self.succeeded_uploads += succeeded
        self._speedometer.ended(now, request.speed_mark, request.size_bytes if succeeded else None)
        self._admit(now)
        if not self._uploads_in_flight:
            if not self._line.requests:
                # Not where all that waits is withdrawn, as for a trim: it asks again soon.
                self._line.forget_turns()
            self._is_busy = False
            self.on_quiet()

    def _admit(self, now: float) -> None:
        """Let uploads begin that may begin now, and set a timer for when that changes with time alone."""
        while self._line.requests and (admits := self._admits(now)) is not None:
            request = self._line.pop(now, admits)
            if request is None:
                break
            self._begin(request, now)
        self._count_held(now)
        self._held_by = self._why_held(now)
        self._set_timer()

    def _admits(self, now: float) -> Admission | None:
        """Return which uploads may begin now; None when none may."""
        if self._uploads_in_flight >= self._pace.most_uploads or not self._limit.is_free(now):
            return None
        if self._pace.is_listening:
            return Admission.LAST_MOMENT
        has_slot = self._braked_in_flight < self._pace.concurrent_uploads
        return Admission.ALL if has_slot and self._brake.is_free(now) else Admission.EXEMPT

    def _why_held(self, now: float) -> str:
        if not self._line.requests:
            return ""
        if self._uploads_in_flight >= self._pace.most_uploads:
            return SLOTS
        if not self._limit.is_free(now):
            return LIMIT
        return LISTENING if self._pace.is_listening else self._pace.held_by or SLOTS

    def _count_held(self, now: float) -> None:
        """Add the time since the last count to the cause that held uploads back in it."""
        if self._held_by:
            counted = self._held_seconds.get(self._held_by, 0.0)
            self._held_seconds[self._held_by] = counted + now - self._held_since
        self._held_since = now

    def _begin(self, request: UploadRequest, now: float) -> None:
        if not self._is_busy:
            self._is_busy = True
            self.on_busy()
        is_new = request.urgency.is_new
        request.is_charged = not is_new and self._brake.charge(request.size_bytes, now)
        request.is_limit_charged = self._limit.charge(request.size_bytes, now)
        self._braked_in_flight += not is_new
        self._uploads_in_flight += 1
        self._bytes_in_flight += request.size_bytes
        request.speed_mark = self._speedometer.began(now)
        request.admitted.set_result(None)

    def _refund(self, request: UploadRequest) -> None:
        if request.is_charged:
            self._brake.refund(request.size_bytes)
        if request.is_limit_charged:
            self._limit.refund(request.size_bytes)

    def _next_admission(self) -> float:
        """Return when a budget or a last moment lets the next upload begin, if there is a slot."""
        if not self._line.requests or self._uploads_in_flight >= self._pace.most_uploads:
            return math.inf
        when = self._line.last_moment()
        if not self._pace.is_listening:
            if self._line.has_new():
                return self._limit.free_at
            if self._braked_in_flight < self._pace.concurrent_uploads:
                when = min(when, self._brake.free_at)
        return max(when, self._limit.free_at)

    def _set_timer(self) -> None:
        when = self._next_admission()
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


class _ByteRate:
    """A byte budget: limits the bytes that may begin per second, or is unlimited (None)."""

    def __init__(self, bytes_per_second: int | None, now: float) -> None:
        self._rate = bytes_per_second
        self.free_at = now
        """The time from which the next upload may begin."""

    def set_rate(self, bytes_per_second: int | None, now: float) -> None:
        """Continue at another rate. Debt or savings are kept in bytes; an unlimited rate forgets them."""
        old, self._rate = self._rate, bytes_per_second
        if old is None or bytes_per_second is None:
            self.free_at = now
        else:
            self.free_at = now + max(self.free_at - now, -_BURST_SECONDS) * old / bytes_per_second

    def is_free(self, now: float) -> bool:
        """Say whether an upload may begin."""
        return self._rate is None or now >= self.free_at

    def charge(self, size_bytes: int, now: float) -> bool:
        """Count an upload that begins; return whether there is a rate that it counts for."""
        if self._rate is None:
            return False
        # The whole size is charged at once: a segment larger than the budget passes, and the next one waits.
        self.free_at = max(self.free_at, now - _BURST_SECONDS) + size_bytes / self._rate
        return True

    def refund(self, size_bytes: int) -> None:
        """Take back a charge."""
        if self._rate is not None:
            self.free_at -= size_bytes / self._rate


@dataclass(slots=True)
class _Speedometer:
    """
    Measure how many bytes an upload carries per second of transfer time.

    Time in which several uploads run is divided among them. A failed upload's share of the time does not
    count, so a store that was away does not appear slow.
    """

    _running: int = 0
    _read_at: float = 0.0
    _shared_seconds: float = 0.0
    """
    The transfer time of an upload that has been running from the beginning: each second divided by the number
    of running uploads.
    """
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        """Return the rate of recent uploads; None when there were none."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    def began(self, now: float) -> float:
        """Count one upload more; return its mark, which `ended` takes back."""
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
