"""
The upload gate: lets uploads begin at the current pace, in the policy's order.

The gate only delays beginnings. An upload that is under way runs at its own speed, so that its speed can
be measured, and a lower pace affects only uploads that have not begun. `policies.upload_control` decides
the pace and the order.

There is no task behind the gate. It acts when an upload asks, ends or is cancelled, when the pace
changes, and on one timer while all waiting uploads wait for a byte budget or a last moment.

It reports what holds uploads back, and for how long, with the constants of `policies.upload_control`.

`UploadQueue` holds the waiting uploads in the order of `policies.upload_control`, without sorting them again
for each upload. The line knows turns and danger. The gate knows slots and byte budgets.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from typing import Protocol

from tieringd.model.partition import TopicIdPartition
from tieringd.policies.upload_control import (
    LIMIT,
    LISTENING,
    SLOTS,
    OrderLimits,
    UploadPace,
    WaitingPartition,
    is_fair_turn,
    is_near_loss,
    last_moment_of,
)

_STALE_PLACES = 64
"""How many outdated entries a heap may hold, beyond twice the number of queues, before it is rebuilt."""

_BURST_SECONDS = 1.0
"""An idle gate saves up at most this many seconds of its rate, so a few small segments pass together."""

_MEASURE_FADE = 0.9
"""The factor by which a measurement's weight fades with each upload: about the last ten count."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """What the archiver knows of its partition when it asks to upload."""

    seconds_to_loss: float = math.inf
    """Time until the broker would delete bytes that are not durable yet; infinity when it would not."""
    backlog_bytes: int = 0
    """Backlog of the partition, a tie-breaker between equally urgent ones."""
    is_new: bool = False
    """Whether the segment was closed a moment ago; see `policies.upload_control.is_new`."""

    def __post_init__(self) -> None:
        assert not math.isnan(self.seconds_to_loss), "a loss comes at some time, or never"


NO_URGENCY = Urgency()


class Admission(Enum):
    """Which uploads the gate lets begin now."""

    ALL = auto()
    EXEMPT = auto()
    """Only uploads exempt from the brake: new segments, and partitions at their last moment."""
    LAST_MOMENT = auto()
    """Only partitions at their last moment."""


@dataclass(eq=False, slots=True)
class UploadRequest:
    """One upload, from its request to its end."""

    partition: TopicIdPartition
    size_bytes: int
    urgency: Urgency
    asked_at: float
    loss_at: float
    admitted: asyncio.Future[None]
    is_charged: bool = False
    """Whether the brake counted its bytes."""
    is_limit_charged: bool = False
    """Whether the hard limit counted its bytes."""
    speed_mark: float = 0.0


@dataclass(eq=False, slots=True)
class _Queue:
    """The waiting requests of one partition, oldest first. The oldest one sets the partition's place."""

    requests: deque[UploadRequest]
    place: WaitingPartition


class _Heap:
    """Places ordered by a key. An outdated place is dropped when it comes up."""

    def __init__(
        self,
        key: Callable[[WaitingPartition], tuple[object, ...]],
        belongs: Callable[[WaitingPartition], bool] = lambda _: True,
    ) -> None:
        """Order by *key* the places for which *belongs* is true."""
        self._key = key
        self._belongs = belongs
        self._entries: list[tuple[tuple[object, ...], int, WaitingPartition]] = []
        self._pushed = 0

    def push(self, place: WaitingPartition, queues: Mapping[TopicIdPartition, _Queue]) -> None:
        """Add the place of one of *queues*, if it belongs here."""
        if not self._belongs(place):
            return
        if len(self._entries) > 2 * len(queues) + _STALE_PLACES:
            places = [one.place for one in queues.values() if self._belongs(one.place)]
            self._entries = [(self._key(one), 0, one) for one in places]
            heapify(self._entries)
            return
        self._pushed += 1
        # The number keeps places with equal keys from being compared themselves.
        heappush(self._entries, (self._key(place), self._pushed, place))

    def first(self, queues: Mapping[TopicIdPartition, _Queue]) -> _Queue | None:
        """Return the first of *queues* that belongs here; None where none does."""
        while self._entries:
            place = self._entries[0][2]
            queue = queues.get(place.partition)
            if queue is not None and queue.place is place:
                return queue
            heappop(self._entries)
        return None


class UploadQueue:
    """
    All waiting requests in the policy's order, without sorting again for every upload.

    *requests*, *new_requests* and *size_bytes* are exact at any time. A cancelled caller counts until its
    own cancellation handler removes it.
    """

    def __init__(self, limits: OrderLimits, *, segments_per_turn: int) -> None:
        assert segments_per_turn >= 1, "a turn lets something begin"
        self._limits = limits
        self._segments_per_turn = segments_per_turn
        self.requests = 0
        self.new_requests = 0
        self.size_bytes = 0
        self._queues: dict[TopicIdPartition, _Queue] = {}
        self._served: dict[TopicIdPartition, int] = {}
        self._by_loss = _Heap(lambda place: place.loss_key)
        self._by_turn = _Heap(lambda place: place.turn_key)
        self._new_by_turn = _Heap(lambda place: place.turn_key, lambda place: place.is_new)
        self._turn = 0
        self._turn_of: _Queue | None = None
        self._left_in_turn = 0

    @property
    def partitions(self) -> int:
        """Return how many partitions wait."""
        return len(self._queues)

    def oldest_asked_at(self) -> float:
        """Return when the oldest request was made; infinity when there is none."""
        return min((queue.requests[0].asked_at for queue in self._queues.values()), default=math.inf)

    def last_moment(self) -> float:
        """Return when the first waiting upload may begin past every brake; infinity when none waits."""
        nearest = self._by_loss.first(self._queues)
        return math.inf if nearest is None else last_moment_of(nearest.place, self._limits)

    def has_new(self) -> bool:
        """Say whether the oldest waiting segment of some partition is new."""
        return self._new_by_turn.first(self._queues) is not None

    def asked_at(self, partition: TopicIdPartition) -> float | None:
        """Return when the partition's oldest request was made; None when it has none."""
        queue = self._queues.get(partition)
        return None if queue is None else queue.requests[0].asked_at

    def append(self, request: UploadRequest) -> None:
        """Add a request behind its partition's others."""
        self.requests += 1
        self.new_requests += request.urgency.is_new
        self.size_bytes += request.size_bytes
        queue = self._queues.get(request.partition)
        if queue is not None:
            queue.requests.append(request)
            return
        queue = _Queue(deque((request,)), self._place_of(request))
        self._queues[request.partition] = queue
        self._push(queue)

    def discard(self, request: UploadRequest) -> None:
        """Remove a request, if it is still in the line."""
        queue = self._queues.get(request.partition)
        if queue is not None and request in queue.requests:
            queue.requests.remove(request)
            self._removed(queue, request)

    def pop(self, now: float, admits: Admission) -> UploadRequest | None:
        """Remove and return the request that is to begin next; None when none may."""
        while (queue := self._choose(now, admits)) is not None:
            request = queue.requests[0]
            if request.admitted.cancelled():
                self.discard(request)
                continue
            self._count_turn(queue)
            queue.requests.popleft()
            self._removed(queue, request)
            return request
        return None

    def forget_turns(self) -> None:
        """Forget past turns: when no upload waits, no partition is owed a turn."""
        self._served.clear()

    def _choose(self, now: float, admits: Admission) -> _Queue | None:
        nearest = self._by_loss.first(self._queues)
        if nearest is None:
            return None
        if admits is not Admission.ALL:
            if last_moment_of(nearest.place, self._limits) <= now:
                return nearest
            return self._new_by_turn.first(self._queues) if admits is Admission.EXEMPT else None
        if self._left_in_turn and self._turn_of is not None:
            return self._turn_of
        if not is_fair_turn(self._turn + 1, self._limits) and is_near_loss(
            nearest.place, self._limits, now=now
        ):
            return nearest
        return self._by_turn.first(self._queues)

    def _count_turn(self, queue: _Queue) -> None:
        """Continue the queue's turn, or begin one that is limited to the requests already waiting."""
        if queue is self._turn_of and self._left_in_turn:
            self._left_in_turn -= 1
            return
        self._turn += 1
        self._served[queue.place.partition] = self._turn
        self._turn_of = queue
        self._left_in_turn = min(self._segments_per_turn, len(queue.requests)) - 1

    def _removed(self, queue: _Queue, request: UploadRequest) -> None:
        self.requests -= 1
        self.new_requests -= request.urgency.is_new
        self.size_bytes -= request.size_bytes
        if queue.requests:
            place = self._place_of(queue.requests[0])
            if place != queue.place:
                queue.place = place
                self._push(queue)
            return
        del self._queues[request.partition]
        if queue is self._turn_of:
            self._turn_of = None

    def _place_of(self, request: UploadRequest) -> WaitingPartition:
        return WaitingPartition(
            partition=request.partition,
            loss_at=request.loss_at,
            backlog_bytes=request.urgency.backlog_bytes,
            last_served_turn=self._served.get(request.partition, 0),
            is_new=request.urgency.is_new,
        )

    def _push(self, queue: _Queue) -> None:
        for heap in (self._by_loss, self._by_turn, self._new_by_turn):
            heap.push(queue.place, self._queues)


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
    line, and an admitted one that has not begun gives back its slot and its bytes. An upload that fails
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
            self.on_quiet()

    def _admit(self, now: float) -> None:
        """Let uploads begin that may begin now, and set a timer for when that changes with time alone."""
        while self._line.requests and (admits := self._admits(now)) is not None:
            request = self._line.pop(now, admits)
            if request is None:
                break
            self._begin(request, now)
        if not self._line.requests and not self._uploads_in_flight:
            self._line.forget_turns()
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
        if not self._uploads_in_flight:
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
