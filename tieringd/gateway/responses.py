"""
From broker to client: every response is forwarded unchanged, in the order of the requests.

Responses to Fetch and Produce are parsed while they pass. Their log start is the broker's own. If the
archive begins before it, the archive's start is written over it, in place.

The walk over a Fetch response also finds archived partitions. If a partition's offset is out of range and the
archive may have it, no byte of the response is forwarded: it becomes a question, and the answer to that
replaces it. A large response begins to pass before all of it has been seen. Archived partitions in its later
part are turned into "nothing new", and the next Fetch is limited to a response that can be held.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire import request_header
from tieringd.formats.kafka_wire.cursor import SIZE_BYTES
from tieringd.formats.kafka_wire.fetch import (
    OFFSET_OUT_OF_RANGE,
    FetchedPartition,
    FetchResponseWalk,
)
from tieringd.formats.kafka_wire.produce import FIRST_LOG_START, ProducedPartition, ProduceResponseWalk
from tieringd.formats.kafka_wire.request_header import InspectedApi
from tieringd.gateway.frames import ALWAYS_HELD_BYTES, ClientResponse, Frames, PendingRequest, PendingRequests
from tieringd.gateway.seen_login import ClaimedLogin
from tieringd.gateway.wire import MemoryBudget

SPLICED_BYTES: Final = 64 << 10
"""From this size on, passing records on inside the kernel is cheaper."""
_HEADER_ROOM_BYTES: Final = 8 << 10
_HEAD: Final = struct.Struct(">ii")
_INT64: Final = struct.Struct(">q")
_NO_ERROR: Final = b"\x00\x00"
_UNKNOWN_PRODUCER_ID: Final = 59
_MAY_PASS: Final = frozenset({InspectedApi.FETCH, InspectedApi.DESCRIBE_LOG_DIRS})
"""Responses that need not be held: an archived partition then waits, and sizes of the archive are missing."""


@dataclass(frozen=True, slots=True)
class ArchivableResponse:
    """A response of the broker that the archive may add to."""

    pending: PendingRequest
    response: bytes
    out_of_range: tuple[FetchedPartition, ...] = ()
    """The out-of-range partitions of a Fetch response that the archive may have."""
    hidden: tuple[FetchedPartition, ...] = ()
    """The partitions of a Fetch that the gateway asked the broker for at an offset that no log has."""
    records_bytes: int = 0
    """The size of the broker's own records in a Fetch response."""


class ResponseFrames(Frames):
    """
    The responses of one connection.

    *log_start* returns where the whole log of a partition begins, given the broker's log start. *ask*
    gets a question; no bytes are taken until `answered`. *send* gets a prepared answer when its turn
    comes. *take_ahead* gets the broker's response to a request that no client has sent yet. *on_late* is
    called for each archived partition whose answer has to wait for a later Fetch. *on_passed* gets each
    Fetch whose response was the broker's own, and the size of that response. *on_login* gets the responses to
    SaslAuthenticate, their versions, and the users whose login they accept or refuse.
    """

    def __init__(
        self,
        scratch: memoryview,
        budget: MemoryBudget,
        pending: PendingRequests,
        *,
        forward: Callable[[memoryview], None],
        may_have: Callable[[str | UUID, int], bool],
        log_start: Callable[[str | UUID, int, int], int],
        ask: Callable[[ArchivableResponse], None],
        send: Callable[[PendingRequest, ClientResponse], None],
        take_ahead: Callable[[ArchivableResponse | None], None],
        on_late: Callable[[], None],
        on_passed: Callable[[PendingRequest, int], None],
        on_login: Callable[[memoryview, int, ClaimedLogin | None], None],
        held_bytes: int,
    ) -> None:
        super().__init__(scratch, budget, forward, held_bytes=held_bytes)
        self._pending = pending
        self._may_have = may_have
        self._log_start = log_start
        self._ask = ask
        self._send = send
        self._take_ahead = take_ahead
        self._on_late = on_late
        self._on_passed = on_passed
        self._on_login = on_login
        self._frame_bytes = 0
        """Size of the current response if it is the broker's own."""
        self._walk: FetchResponseWalk | ProduceResponseWalk | None = None
        self._sees_large_records = False

    @property
    def is_between_messages(self) -> bool:
        """Say whether no response is incomplete."""
        return super().is_between_messages and self._walk is None and not self._is_stopped

    def room(self) -> memoryview:
        """Return the memory for the next bytes. Only a header fits in if large records follow it."""
        room = super().room()
        if self._held is not None or not self._sees_large_records:
            return room
        return room[: self.passing_bytes + _HEADER_ROOM_BYTES]

    @property
    def passing_bytes(self) -> int:
        """Return how many of the next bytes need no inspection. The kernel may pass them on."""
        if self._carry or self._held is not None:
            return 0
        return self._passing if self._walk is None else self._walk.passing

    def passed(self, size: int) -> None:
        """
        Count *size* bytes, at most `passing_bytes`, that the kernel passed on.

        Raises:
            ProtocolViolation: The response ends too early.
        """
        if self._walk is None:
            self._passing -= size
            if not self._passing:
                self._is_over()
            return
        self._walk.passed(size)
        # The response may end with these bytes, so the walk goes on without further ones.
        if not self._walk.passing:
            self._pass_walking(self._walk, self._scratch[:0])

    def answered(self) -> None:
        """
        Go on after a question whose answer was sent.

        Raises:
            ProtocolViolation: The bytes that follow are not a response.
        """
        self._frame_bytes = 0
        self._is_over()
        self.resume()

    def send_own_answers(self) -> None:
        """Send the gateway's own answers whose turn has come."""
        while (first := self._pending.first) is not None and first.is_own:
            self._pending.pop()
            if first.prepared is not None:
                self._send(first, first.prepared)
            else:
                self._forward(memoryview(first.own_answer or b""))

    def _is_over(self) -> None:
        pending = self._pending.first
        if pending is not None and pending.reader is not None and self._frame_bytes:
            self._on_passed(pending, self._frame_bytes)
        self._pending.pop()
        self.send_own_answers()

    def _step(self, view: memoryview) -> int:
        if self._walk is not None:
            return self._pass_walking(self._walk, view)
        if self._passing:
            return self._pass_response(view)
        if self._dropping:
            return self._drop_ahead(view)
        return self._begin(view) if len(view) >= _HEAD.size else 0

    def _begin(self, view: memoryview) -> int:
        size, correlation_id = (int(value) for value in _HEAD.unpack_from(view))
        pending = self._pending.first
        if pending is None or pending.head.correlation_id != correlation_id or size < _HEAD.size - SIZE_BYTES:
            asked = (
                "no request is pending"
                if pending is None
                else f"a response to request {pending.head.correlation_id} is due"
            )
            raise ProtocolViolation(
                f"the broker sent a response of {size} bytes to request {correlation_id}, but {asked}"
            )
        frame_bytes = self._frame_bytes = SIZE_BYTES + size
        if pending.request is None:
            head = pending.head
            if head.api_key == InspectedApi.PRODUCE and head.is_known and head.version >= FIRST_LOG_START:
                self._walk = ProduceResponseWalk(head.version, size)
                return self._pass_walking(self._walk, view)
            self._passing = frame_bytes
            return self._pass_response(view)
        if len(view) >= frame_bytes:
            return self._whole(view[:frame_bytes], pending)
        is_fetch = pending.head.api_key == InspectedApi.FETCH
        is_held = (self._pending.may_be_archived or not is_fetch) and not pending.is_ahead
        # Most responses that matter are far smaller than what is always held.
        if (is_held or frame_bytes <= ALWAYS_HELD_BYTES) and self._hold(view, frame_bytes):
            return len(view)
        return self._begin_unheld(view)

    def _held_may_pass(self) -> bool:
        pending = self._pending.first
        return pending is not None and (pending.is_ahead or pending.head.api_key in _MAY_PASS)

    def _begin_unheld(self, view: memoryview) -> int:
        pending = self._pending.first
        assert pending is not None, "an answer has begun, and nothing was asked"
        head = pending.head
        size = int(_HEAD.unpack_from(view)[0])
        if pending.is_ahead:
            self._dropping = SIZE_BYTES + size
            return self._drop_ahead(view)
        if head.api_key == InspectedApi.FETCH:
            return self._begin_walking(FetchResponseWalk(head.version, size), view)
        if head.api_key == InspectedApi.SASL_AUTHENTICATE:
            # No login is seen, so the user's name stays unknown.
            self._passing = SIZE_BYTES + size
            return self._pass_response(view)
        if head.api_key == InspectedApi.DESCRIBE_LOG_DIRS:
            # The response then lacks the archive's sizes, on which no client acts.
            self._passing = SIZE_BYTES + size
            return self._pass_response(view)
        raise self._unheld(f"a response to {InspectedApi(head.api_key).name}", SIZE_BYTES + size)

    def _begin_walking(self, walk: FetchResponseWalk, view: memoryview) -> int:
        taken = walk.feed(view)
        # No byte has been forwarded yet, so the whole response can still be held.
        if any(self._is_archived(partition) for partition in walk.partitions) and self._hold(view, walk.end):
            return len(view)
        self._walk = walk
        return self._pass_walked(walk, view[:taken])

    def _pass_response(self, view: memoryview) -> int:
        taken = self._pass(view)
        if not self._passing:
            self._is_over()
        return taken

    def _pass_walking(self, walk: FetchResponseWalk | ProduceResponseWalk, view: memoryview) -> int:
        return self._pass_walked(walk, view[: walk.feed(view)])

    def _pass_walked(self, walk: FetchResponseWalk | ProduceResponseWalk, view: memoryview) -> int:
        """Forward the bytes that the walk has just taken."""
        begin = walk.position - len(view)
        for partition in walk.partitions:
            self._tell_log_start(view, begin, partition)
            if not isinstance(partition, FetchedPartition):
                continue
            self._sees_large_records = walk.passing >= SPLICED_BYTES
            if self._is_hidden(partition) or self._is_archived(partition):
                at = partition.error_at - begin
                view[at : at + len(_NO_ERROR)] = _NO_ERROR
                self._note_late(partition)
        walk.partitions.clear()
        if len(view):
            self._forward(view)
        if walk.is_done:
            self._walk = None
            self._is_over()
        return len(view)

    def _note_late(self, partition: FetchedPartition) -> None:
        """Let later Fetches ask for less, because an archived partition was found too late to replace it."""
        pending = self._pending.first
        if pending is None or self._is_hidden(partition):
            return
        self._on_late()
        self._pending.may_be_archived = True
        if pending.is_limited:
            self._pending.starving.add((partition.topic, partition.index))

    def _drop_ahead(self, view: memoryview) -> int:
        """Drop a response with the broker's own records. The broker sends them again when the client asks."""
        taken = self._drop(view)
        if not self._dropping:
            self._take_ahead(None)
            self._is_over()
        return taken

    def _whole(self, frame: memoryview, pending: PendingRequest) -> int:
        head = pending.head
        question: ArchivableResponse | None = None
        if pending.is_ahead:
            self._take_ahead(self._fetch_question(frame, pending))
            self._is_over()
            return len(frame)
        if head.api_key == InspectedApi.API_VERSIONS:
            request_header.cap_versions(frame, head.version)
        elif head.api_key == InspectedApi.SASL_AUTHENTICATE:
            self._on_login(frame, head.version, pending.claimed)
        elif head.api_key == InspectedApi.FETCH:
            question = self._fetch_question(frame, pending)
        else:
            question = ArchivableResponse(pending, bytes(frame))
        if question is None:
            self._forward(frame)
            self._is_over()
        else:
            self._is_stopped = True
            self._ask(question)
        return len(frame)

    def _fetch_question(self, frame: memoryview, pending: PendingRequest) -> ArchivableResponse | None:
        walk = FetchResponseWalk(pending.head.version, len(frame) - SIZE_BYTES)
        walk.feed(frame)
        for partition in walk.partitions:
            self._tell_log_start(frame, 0, partition)
        hidden = tuple(partition for partition in walk.partitions if self._is_hidden(partition))
        archived = tuple(
            partition
            for partition in walk.partitions
            if self._is_archived(partition) and not self._is_hidden(partition)
        )
        self._pending.may_be_archived = bool(archived) and len(archived) < len(walk.partitions)
        if not archived and not hidden:
            return None
        records_bytes = sum(partition.records_bytes for partition in walk.partitions)
        return ArchivableResponse(pending, bytes(frame), archived, hidden, records_bytes)

    def _tell_log_start(
        self, view: memoryview, begin: int, partition: FetchedPartition | ProducedPartition
    ) -> None:
        """Write the start of the whole log over the broker's, in *view*, which begins at *begin*."""
        said = partition.log_start_offset
        # Nothing lies before offset 0, and a negative start means unknown. After this error a producer
        # compares the log start with its last write, to learn whether the broker itself has deleted that.
        if said <= 0 or partition.error_code == _UNKNOWN_PRODUCER_ID:
            return
        told = self._log_start(partition.topic, partition.index, said)
        if told != said:
            _INT64.pack_into(view, partition.log_start_at - begin, told)

    def _is_hidden(self, partition: FetchedPartition) -> bool:
        pending = self._pending.first
        return (
            pending is not None
            and bool(pending.hidden)
            and partition.error_code == OFFSET_OUT_OF_RANGE
            and (partition.topic, partition.index) in pending.hidden
        )

    def _is_archived(self, partition: FetchedPartition) -> bool:
        return partition.error_code == OFFSET_OUT_OF_RANGE and self._may_have(
            partition.topic, partition.index
        )
