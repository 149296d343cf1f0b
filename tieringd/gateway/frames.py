"""
Bytes of one direction of a connection, cut into Kafka's messages.

Whoever reads the socket asks `room()` for memory, fills it and calls `received()`. Messages that
pass are handed on from that very memory. It is shared by all connections of a gateway: what is
left in it when a call returns is gone, except for the few bytes of a field that is not complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from tieringd.errors import BrokerUnavailable, ProtocolViolation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.gateway.wire import ByteBudget

SCRATCH_BYTES: Final = 256 << 10
ALWAYS_HELD_BYTES: Final = 64 << 10
"""Messages up to this are held although the budget is spent: it is not to lock out ordinary clients."""
_POOR_ROOM_BYTES: Final = 16 << 10
"""What is read at once while the budget is spent, so that little more has to be kept."""


class Frames(ABC):
    """
    One direction.

    A message either passes while it arrives, or is held until it is whole; then it is looked at
    and goes on as one. *forward* gets what passes. What is kept counts as it arrives, never as it
    is announced: an announcement costs a stranger nothing.
    """

    def __init__(
        self,
        scratch: memoryview,
        budget: ByteBudget,
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
        """Say whether every message that began has been dealt with."""
        return not self._carry and not self._passing and not self._dropping and self._held is None

    def room(self) -> memoryview:
        """Return where the next bytes are to be received."""
        if self._held is not None:
            room = self._scratch[: self._held_size - len(self._held)]
        else:
            begin = len(self._carry)
            self._scratch[:begin] = self._carry
            room = self._scratch[begin:]
        return room[:_POOR_ROOM_BYTES] if self._budget.is_spent else room

    def received(self, size: int) -> None:
        """
        Deal with *size* bytes that were received into `room`.

        Raises:
            ProtocolViolation: They are no messages of Kafka's.
            BrokerUnavailable: A message that must be looked at cannot be held now.
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
        Go on with what was left when this was stopped.

        Raises:
            ProtocolViolation: It is no message of Kafka's.
            BrokerUnavailable: A message that must be looked at cannot be held now.
        """
        self._is_stopped = False
        if carry := self._drop_carry():
            self._take(memoryview(bytearray(carry)))

    def close(self) -> None:
        """Give back what is held, and take nothing more."""
        self._is_stopped = self._is_closed = True
        self._drop_held()
        self._drop_carry()

    def _hold(self, begun: memoryview, size: int) -> bool:
        """Hold a message of *size* bytes that has only begun; false if there is no room for it."""
        self._held_size = size
        if size > self._max_held_bytes or not self._count(len(begun)):
            return False
        self._held = bytearray(begun)
        return True

    def _count(self, size: int) -> bool:
        """Count *size* bytes more of the held message, and say whether they may be held."""
        if self._held_size > ALWAYS_HELD_BYTES:
            return self._budget.take(size)
        self._budget.add(size)
        return True

    def _unheld(self, message: str, size: int) -> BrokerUnavailable | ProtocolViolation:
        """Return the error for a message of *size* bytes that must be looked at and cannot be held."""
        if size > self._max_held_bytes:
            return ProtocolViolation(
                f"{message} of {size} bytes would have to be looked at",
                hint=f"The gateway holds messages of up to {self._max_held_bytes} bytes",
            )
        return BrokerUnavailable(
            f"{message} of {size} bytes must be looked at, and the connections hold all that they may",
            hint="Raise gateway.buffer_bytes, or find the clients that take nothing or send half a request",
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
        """Deal with *view*, which begins where the last bytes ended; what is left is carried."""
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
        """Forward what *view* has of the message that passes."""
        size = min(self._passing, len(view))
        self._passing -= size
        self._forward(view[:size])
        return size

    def _drop(self, view: memoryview) -> int:
        """Drop what *view* has of the message that nobody wants."""
        size = min(self._dropping, len(view))
        self._dropping -= size
        return size

    @abstractmethod
    def _begin_unheld(self, view: memoryview) -> int:
        """
        Deal with the beginning of a message that cannot be held, and return how many bytes of it.

        Raises:
            ProtocolViolation: It must be looked at, and is larger than what is ever held.
            BrokerUnavailable: It must be looked at, and the budget is spent.
        """

    @abstractmethod
    def _step(self, view: memoryview) -> int:
        """Deal with the beginning of *view*, and return how many bytes of it; 0 waits for more."""
