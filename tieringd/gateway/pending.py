"""
The unanswered requests of one connection, in the order in which their answers are due.

The bytes that they keep count in the budget of all connections.

A `ClientResponse` holds the bytes to send to a client, and the cache files that they come from until they are
sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tieringd.formats.kafka_wire.fetch import readdressed
from tieringd.formats.kafka_wire.pieces import Piece
from tieringd.formats.kafka_wire.request_header import RequestHead
from tieringd.gateway.archive_answers import NextFetch, PartitionKey
from tieringd.gateway.wire import MemoryBudget

MAX_REQUESTS: Final = 256
MAX_KEPT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ClientResponse:
    """What goes to the client in place of the broker's response."""

    pieces: tuple[Piece, ...]
    release: Callable[[], None]
    """To be called once, after the pieces were sent or on failure."""
    archived: bool
    """False if the pieces are the broker's own bytes."""
    next_fetches: Mapping[PartitionKey, NextFetch] = field(default_factory=dict)
    """For a Fetch: where each partition continues, if the archive is expected to serve all of them again."""

    def addressed_to(self, correlation_id: int) -> ClientResponse:
        """Return this answer for another request that asks the same."""
        return replace(self, pieces=readdressed(self.pieces, correlation_id))


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """One request that waits for its answer."""

    head: RequestHead
    request: bytes | None = None
    """The whole request if its response is inspected; None lets the response pass."""
    own_answer: bytes | None = None
    """The gateway's own answer, sent when its turn comes. The broker has not seen the request."""
    prepared: ClientResponse | None = None
    """An archived answer that was ready before the request came. The broker has not seen the request."""
    is_ahead: bool = False
    """Whether the gateway itself asks, and no client. The response is not forwarded."""

    @property
    def is_own(self) -> bool:
        """Say whether the broker has not seen the request."""
        return self.own_answer is not None or self.prepared is not None

    @property
    def kept_bytes(self) -> int:
        """Return how many bytes of messages it keeps."""
        return len(self.request or b"") + len(self.own_answer or b"")


class PendingRequests:
    """A queue of requests, bounded by their number and by the bytes that they keep."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._is_closed = False
        self._queue: deque[PendingRequest] = deque()
        self._kept_bytes = 0
        self.may_be_archived = False
        """
        True after an archived partition was found too late to replace it.

        Later Fetches then ask for less.
        """

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Say whether no further request may be read now."""
        return len(self._queue) >= MAX_REQUESTS or self._kept_bytes >= MAX_KEPT_BYTES

    @property
    def first(self) -> PendingRequest | None:
        """Return the request whose answer is due, if there is one."""
        return self._queue[0] if self._queue else None

    def push(self, request: PendingRequest) -> None:
        """Add a request that was just read."""
        self._queue.append(request)
        self._count(request.kept_bytes)

    def pop(self) -> PendingRequest:
        """Remove the first request, whose answer was sent."""
        request = self._queue.popleft()
        self._count(-request.kept_bytes)
        return request

    def close(self) -> None:
        """Release the kept bytes. Requests still in the queue count no more, and are never answered."""
        self._count(-self._kept_bytes)
        self._is_closed = True
        for request in self._queue:
            if request.prepared is not None:
                request.prepared.release()
        self._queue = deque(request for request in self._queue if request.prepared is None)

    def _count(self, size: int) -> None:
        # A failed send closes the connection in the middle of a turn, which then still pops the request.
        if size and not self._is_closed:
            self._kept_bytes += size
            self._budget.add(size)
