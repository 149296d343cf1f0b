"""
The requests of one connection that have no answer yet, in the order in which answers are due.

What is kept of them counts in the budget of all connections.

An `Answer` holds the bytes that are sent to a client, and the cache's files that they come from until they
are sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from tieringd.formats.kafka_wire.fetch import readdressed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tieringd.formats.kafka_wire.pieces import Piece
    from tieringd.formats.kafka_wire.request_header import RequestHead
    from tieringd.gateway.archive_answers import Onward, PartitionKey
    from tieringd.gateway.wire import ByteBudget


MAX_REQUESTS: Final = 256
MAX_KEPT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes to the client in place of the broker's response."""

    pieces: tuple[Piece, ...]
    release: Callable[[], None]
    """To be called once, when the pieces were sent or given up."""
    archived: bool
    """False when they are the broker's own bytes."""
    onward: Mapping[PartitionKey, Onward] = field(default_factory=dict)
    """Of a Fetch: how all of its partitions go on, when all of them will be read from the archive again."""

    def addressed_to(self, correlation_id: int) -> Answer:
        """Return it as the answer to another request that asks the same."""
        return replace(self, pieces=readdressed(self.pieces, correlation_id))


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """One request that waits for its answer."""

    head: RequestHead
    request: bytes | None = None
    """The whole request when its answer is to be looked at; None lets the answer pass."""
    own_answer: bytes | None = None
    """What the gateway itself answers, when the request's turn comes; the broker has not seen it."""
    prepared: Answer | None = None
    """The same, of an answer of the archive's that was ready before the request came."""
    is_ahead: bool = False
    """The gateway asks, and no client: the answer is not passed on."""

    @property
    def is_own(self) -> bool:
        """Say whether the broker has not seen it."""
        return self.own_answer is not None or self.prepared is not None

    @property
    def kept_bytes(self) -> int:
        """Return how many bytes of messages it keeps."""
        return len(self.request or b"") + len(self.own_answer or b"")


class PendingRequests:
    """A queue with bounds on how many requests it holds, and how many of their bytes."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._is_closed = False
        self._queue: deque[PendingRequest] = deque()
        self._kept_bytes = 0
        self.may_be_archived = False
        """True after an answer came too late to be replaced: the next ones are asked to be small."""

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
        """Remove the first request, which has its answer."""
        request = self._queue.popleft()
        self._count(-request.kept_bytes)
        return request

    def close(self) -> None:
        """Give back what is kept; what is still in the queue counts no more, and is never sent."""
        self._count(-self._kept_bytes)
        self._is_closed = True
        for request in self._queue:
            if request.prepared is not None:
                request.prepared.release()
        self._queue = deque(request for request in self._queue if request.prepared is None)

    def _count(self, size: int) -> None:
        # A send that fails closes the connection amid the turn that goes on to pop the request.
        if size and not self._is_closed:
            self._kept_bytes += size
            self._budget.add(size)
