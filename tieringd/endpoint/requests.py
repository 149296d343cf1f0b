"""
Bytes of one client, collected until they are a whole request.

Memory grows with what has arrived, never with what was announced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.request_header import HEAD, SIZE_BYTES, RequestHead

if TYPE_CHECKING:
    from tieringd.gateway.wire import ByteBudget

_MIN_REQUEST_BYTES: Final = HEAD.size - SIZE_BYTES
_ALWAYS_HELD_BYTES: Final = 64 << 10
"""What a client may send while the budget is spent: the requests of ordinary clients."""


class RequestBuffer:
    """The requests of one connection, one after another."""

    def __init__(self, budget: ByteBudget, *, max_request_bytes: int) -> None:
        self._budget = budget
        self._max_request_bytes = max_request_bytes
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def add(self, data: memoryview) -> None:
        """
        Take bytes that arrived.

        Raises:
            ProtocolViolation: There is no room for them.
        """
        if self._budget.is_spent and len(self._bytes) > _ALWAYS_HELD_BYTES:
            raise ProtocolViolation(f"there is no room for a request of more than {len(self._bytes)} bytes")
        self._bytes += data
        self._budget.add(len(data))

    def next(self) -> tuple[RequestHead, bytes] | None:
        """
        Take the first request out, if it is whole.

        Raises:
            ProtocolViolation: It is no request.
        """
        if len(self._bytes) < HEAD.size:
            return None
        head = RequestHead.read(memoryview(bytes(self._bytes[: HEAD.size])))
        if not _MIN_REQUEST_BYTES <= head.size <= self._max_request_bytes:
            raise ProtocolViolation(
                f"a request announces {head.size} bytes",
                hint=f"Requests may have up to {self._max_request_bytes} bytes",
            )
        size = SIZE_BYTES + head.size
        if len(self._bytes) < size:
            return None
        frame = bytes(self._bytes[:size])
        del self._bytes[:size]
        self._budget.give(size)
        return head, frame

    def close(self) -> None:
        """Give back what is held."""
        self._budget.give(len(self._bytes))
        self._bytes.clear()
