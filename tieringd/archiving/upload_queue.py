"""
The queue of the upload gate: the uploads that wait, in the order of `policies.upload_control`.

An upload waits in its partition's queue. The partition's place comes from its oldest waiting upload: how
soon the broker deletes the data, and how long ago the partition had a turn. `UploadQueue` keeps the places in
heaps, so that they are not sorted again for each upload.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heappop, heappush

from tieringd.model.partition import TopicIdPartition
from tieringd.policies.upload_control import (
    OrderLimits,
    WaitingPartition,
    is_fair_turn,
    is_near_loss,
    last_moment_of,
)

_STALE_PLACES = 64
"""How many outdated entries a heap may hold, beyond twice the number of queues, before it is rebuilt."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """The facts that an archiver states of its partition when it asks to upload."""

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
