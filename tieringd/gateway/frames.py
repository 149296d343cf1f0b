"""
The bytes of one direction of a connection, cut into Kafka's messages.

The reader of the socket asks `room()` for memory, fills it and calls `received()`. Messages that pass
are forwarded from that same memory. It is shared by all connections of a gateway, so nothing in it
survives the return of a call. Only the few bytes of an incomplete field are copied.

`PendingRequests` are the unanswered requests of one connection, in the order in which their answers are due.
The bytes that they keep count in the budget of all connections. A `ClientResponse` holds the bytes to send to
a client, and the cache files that they come from until they are sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tieringd.errors import ProtocolViolation, TieringError
from tieringd.formats.kafka_wire.fetch import readdressed
from tieringd.formats.kafka_wire.pieces import Piece
from tieringd.formats.kafka_wire.request_header import RequestHead
from tieringd.gateway.archive_answers import NextFetch, PartitionKey
from tieringd.gateway.seen_login import ClaimedLogin
from tieringd.gateway.wire import MemoryBudget
from tieringd.metrics.readers import Reader
from tieringd.reading.partition_reader import release_nothing

SCRATCH_BYTES: Final = 256 << 10
ALWAYS_HELD_BYTES: Final = 64 << 10
"""Messages up to this size are held even if the budget is spent, so that ordinary clients still work."""
_POOR_ROOM_BYTES: Final = 4 << 10
"""How much is read at once while the budget is spent, so that little more has to be kept."""


class Frames(ABC):
    """
    One direction of a connection.

    A message either passes while it arrives, or is held until it is whole; then it is inspected and goes
    on as one. *forward* gets the passing bytes. Kept bytes count as they arrive, not as a header
    announces them: a large announcement reserves nothing.
    """

    def __init__(
        self,
        scratch: memoryview,
        budget: MemoryBudget,
        forward: Callable[[memoryview], None],
        *,
        held_bytes: int,
    ) -> None:
        self._scratch = scratch
        self._budget = budget
        self._forward = forward
        self._max_held_bytes = held_bytes
        self._carry = b""
        self._held: bytearray | None = None
        self._held_size = 0
        self._passing = 0
        self._dropping = 0
        self._is_stopped = False
        self._is_closed = False

    @property
    def is_stopped(self) -> bool:
        """Say whether no more bytes can be taken until `resume`."""
        return self._is_stopped

    @property
    def is_between_messages(self) -> bool:
        """Say whether every message that began is complete."""
        return not self._carry and not self._passing and not self._dropping and self._held is None

    def room(self) -> memoryview:
        """Return the memory to receive the next bytes into."""
        if self._held is not None:
            room = self._scratch[: self._held_size - len(self._held)]
        else:
            begin = len(self._carry)
            self._scratch[:begin] = self._carry
            room = self._scratch[begin:]
        left = self._budget.left
        return room if left >= len(room) else room[: max(left, _POOR_ROOM_BYTES)]

    def received(self, size: int) -> None:
        """
        Handle *size* bytes that were received into `room`.

        Raises:
            ProtocolViolation: The bytes are not Kafka messages.
        """
        if self._held is None:
            self._take(self._scratch[: len(self._drop_carry()) + size])
            return
        held = self._held
        held += self._scratch[:size]
        if not self._count(size):
            self._drop_held(uncounted=size)
            self._take(memoryview(held)[self._begin_unheld(memoryview(held)) :])
        elif len(held) == self._held_size:
            self._drop_held()
            self._take(memoryview(held))

    def resume(self) -> None:
        """
        Continue with the bytes that were left when this was stopped.

        Raises:
            ProtocolViolation: The bytes are not a Kafka message.
        """
        self._is_stopped = False
        if carry := self._drop_carry():
            self._take(memoryview(bytearray(carry)))

    def close(self) -> None:
        """Release held bytes, and take nothing more."""
        self._is_stopped = self._is_closed = True
        self._drop_held()
        self._drop_carry()

    def _hold(self, begun: memoryview, size: int) -> bool:
        """Hold a message of *size* bytes that has only begun. Returns False if there is no room for it."""
        self._held_size = size
        if size > self._max_held_bytes or not self._count(len(begun)):
            return False
        self._held = bytearray(begun)
        return True

    def _count(self, size: int) -> bool:
        """Count *size* more bytes of the held message, and say whether they may be held."""
        if self._held_size > ALWAYS_HELD_BYTES:
            if self._held_may_pass():
                return self._budget.take(size)
            if self._held_size > self._budget.limit:
                return False
        self._budget.add(size)
        return True

    @property
    def is_holding(self) -> bool:
        """Say whether bytes of a message that is not whole are held."""
        return self._held is not None or bool(self._carry)

    def _unheld(self, message: str, size: int) -> ProtocolViolation:
        """Return the error for a message of *size* bytes that must be inspected and cannot be held."""
        return ProtocolViolation(
            f"{message} of {size} bytes is too large to be inspected",
            hint=f"The gateway inspects messages of up to {self._max_held_bytes} bytes "
            "(gateway.max_inspected_bytes), and of no more than gateway.buffer_bytes",
        )

    def _drop_held(self, *, uncounted: int = 0) -> None:
        if self._held is not None:
            self._budget.give(len(self._held) - uncounted)
            self._held = None

    def _drop_carry(self) -> bytes:
        carry = self._carry
        if carry:
            self._budget.give(len(carry))
            self._carry = b""
        return carry

    def _take(self, view: memoryview) -> None:
        """Handle *view*, which begins where the last bytes ended. The rest of it is carried over."""
        at = 0
        while at < len(view) and not self._is_stopped:
            taken = self._step(view[at:])
            if not taken:
                break
            at += taken
        if at < len(view) and not self._is_closed:
            self._carry = bytes(view[at:])
            self._budget.add(len(self._carry))

    def _pass(self, view: memoryview) -> int:
        """Forward the part of *view* that belongs to the passing message."""
        size = min(self._passing, len(view))
        self._passing -= size
        self._forward(view[:size])
        return size

    def _drop(self, view: memoryview) -> int:
        """Drop the part of *view* that belongs to the unwanted message."""
        size = min(self._dropping, len(view))
        self._dropping -= size
        return size

    @abstractmethod
    def _held_may_pass(self) -> bool:
        """Say whether the held message may pass instead, if the budget is spent. Others wait for room."""

    @abstractmethod
    def _begin_unheld(self, view: memoryview) -> int:
        """
        Handle the beginning of a message that cannot be held, and return how many bytes were used.

        Raises:
            ProtocolViolation: The message must be inspected, and is larger than any that is held.
        """

    @abstractmethod
    def _step(self, view: memoryview) -> int:
        """Handle the beginning of *view*, and return how many bytes were used. 0 waits for more bytes."""


MAX_REQUESTS: Final = 256
MAX_KEPT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ClientResponse:
    """What goes to the client in place of the broker's response."""

    pieces: tuple[Piece, ...]
    release: Callable[[], None]
    """A function to call once, after the pieces were sent or on failure."""
    archived: bool
    """False if the pieces are the broker's own bytes."""
    has_unread: bool = False
    """Whether a partition of a Fetch has no records because the archive was not read in time."""
    next_fetches: Mapping[PartitionKey, NextFetch] = field(default_factory=dict)
    """The next offsets of a Fetch's partitions, if the archive is expected to serve all of them again."""
    waited_for: tuple[str, ...] = ()
    """The chunks that a Fetch awaited from the object store."""
    starved: frozenset[PartitionKey] = frozenset()
    """Archived partitions whose records did not fit, because the broker's own took the client's limit."""
    on_sent: Callable[[], None] = release_nothing
    """A function to call when the pieces go to the client."""

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
    leader_epochs: Mapping[PartitionKey, int | TieringError] = field(default_factory=dict)
    """Leader epochs that had begun before a DeleteRecords was passed on."""
    is_limited: bool = False
    """Whether the Fetch that the broker got has a lower limit of bytes than the client's."""
    hidden: frozenset[PartitionKey] = frozenset()
    """
    Partitions that a Fetch asks the broker for at an offset that no log has.

    So the response has no records of them. The client gets nothing new for them.
    """
    is_ahead: bool = False
    """Whether the gateway itself asks, and no client. The response is not forwarded."""
    reader: Reader | None = None
    """The reader that sent a Fetch; None for other requests."""
    begun_at: float = 0.0
    """Arrival of a Fetch, on the clock of `time.monotonic`."""
    claimed: ClaimedLogin | None = None
    """The user that has logged in if the broker accepts a SaslAuthenticate."""

    @property
    def is_own(self) -> bool:
        """Say whether the broker has not seen the request."""
        return self.own_answer is not None or self.prepared is not None

    @property
    def kept_bytes(self) -> int:
        """Return how many bytes of messages it keeps."""
        user = "" if self.claimed is None else self.claimed.user
        return len(self.request or b"") + len(self.own_answer or b"") + len(user)


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
        self.starving: set[PartitionKey] = set()
        """
        Archived partitions that were found too late although their Fetch asked for less.

        One batch of another partition is larger than what is held. The next Fetch is for these alone.
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
