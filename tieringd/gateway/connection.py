"""
One client and its own connection to the broker.

Socket events are handled at once, in their callback. Only a question to the archive takes a task. A side
is not read while the other side has not taken what was read before. So when a side has ended, all its
bytes have been passed on, and both sides are closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final

import structlog

from tieringd.errors import LocalFileError, ProtocolViolation, RetryableError
from tieringd.formats.kafka_wire.pieces import size_of
from tieringd.gateway.ahead import FetchAhead
from tieringd.gateway.archive_answers import ArchiveAnswers
from tieringd.gateway.combined_answers import answer
from tieringd.gateway.connection_opening import GatewaySettings, connected, host_of
from tieringd.gateway.pending import ClientResponse, PendingRequest, PendingRequests
from tieringd.gateway.requests import RequestFrames
from tieringd.gateway.responses import SPLICED_BYTES, ArchivableResponse, ResponseFrames
from tieringd.gateway.wire import NOTHING_NOW, MemoryBudget, PipePool, ReadRates, Wire, wire_of

_WAKE_BYTES: Final = 256 << 10
"""How many bytes of passing records wake the loop: each turn of the loop has a fixed cost."""
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class GatewayCounters:
    """Counts since the gateway started."""

    accepted_connections: int = 0
    refused_connections: int = 0
    """Refused because of the limit on connections."""
    broken_connections: int = 0
    """Closed because of a protocol violation, or because the broker accepted no connection."""
    from_client_bytes: int = 0
    from_broker_bytes: int = 0
    archived_answers: int = 0
    """Answers that differ from the broker's own."""
    delayed_answers: int = 0
    """Archived answers after which the client had to wait, because it exceeded its rate."""
    prepared_answers: int = 0
    """Archived answers that were ready when the client asked."""


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """What all connections of a gateway share."""

    settings: GatewaySettings
    archive: ArchiveAnswers
    scratch: memoryview
    """Every connection receives into it, and is done with it before it returns to the loop."""
    budget: MemoryBudget
    rates: ReadRates = field(default_factory=ReadRates)
    pipes: PipePool = field(default_factory=PipePool)
    counters: GatewayCounters = field(default_factory=GatewayCounters)


class Connection:
    """A client's connection, from its first request to its end. *on_closed* is called once."""

    def __init__(
        self, sock: socket.socket, shared: ConnectionContext, on_closed: Callable[[Connection], None]
    ) -> None:
        self._shared = shared
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._client = self._wire(sock, self._on_client)
        self._broker: Wire | None = None
        self._early: list[bytes] = []
        self._kept_bytes = 0
        """Bytes of `_early`, or of the question that is being answered. They are counted in the budget."""
        self._task: asyncio.Task[None] | None = None
        self._is_finishing = False
        self._is_closed = False
        self._received_bytes = 0
        self._host = host_of(sock)
        self._rest: asyncio.TimerHandle | None = None
        """The timer until which the client is not read."""
        pending = PendingRequests(shared.budget)
        self._pending = pending
        settings = shared.settings
        self._ahead = FetchAhead(
            self._loop,
            shared.archive,
            timeout_seconds=settings.answer_timeout_seconds,
            bytes_max=self._answer_bytes,
            on_known=lambda: self._guarded(self._go_on),
            on_broken=self._break,
        )
        self._requests = RequestFrames(
            shared.scratch,
            shared.budget,
            pending,
            ahead=self._ahead,
            forward=self._to_broker,
            may_produce=shared.archive.may_produce,
            max_request_bytes=settings.max_request_bytes,
            held_bytes=settings.max_held_bytes,
        )
        self._responses = ResponseFrames(
            shared.scratch,
            shared.budget,
            pending,
            forward=self._client.send,
            may_have=shared.archive.may_have,
            log_start=shared.archive.log_start,
            ask=self._on_question,
            send=self._send_archived,
            take_ahead=self._ahead.is_answered,
            held_bytes=settings.max_held_bytes,
        )

    @property
    def moved_bytes(self) -> int:
        """Return a number that grows whenever bytes are received or sent later."""
        sent = self._client.later_bytes + (self._broker.later_bytes if self._broker is not None else 0)
        return self._received_bytes + sent

    def start(self) -> None:
        """Read requests from now on. The first request opens the connection to the broker."""
        self._client.resume_reading()

    def finish(self) -> None:
        """Take no further request, and close when the requests that began have their answers."""
        self._is_finishing = True
        self._settle()

    def abort(self) -> None:
        """Close both sides at once. Closing twice is allowed."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        if self._rest is not None:
            self._rest.cancel()
        self._client.close()
        if self._broker is not None:
            self._broker.close()
        self._requests.close()
        self._responses.close()
        self._ahead.close()
        self._pending.close()
        self._give_kept()
        self._on_closed(self)

    def _wire(self, sock: socket.socket, on_readable: Callable[[], None]) -> Wire:
        return wire_of(sock)(
            sock,
            self._loop,
            self._shared.budget,
            on_readable=on_readable,
            on_drained=self._settle,
            on_lost=self.abort,
            on_unreadable=self._on_unreadable,
        )

    def _on_client(self) -> None:
        size = self._client.receive(self._requests.room())
        if size == NOTHING_NOW:
            return
        if not size:
            self.abort()
            return
        self._received_bytes += size
        self._shared.counters.from_client_bytes += size
        self._guarded(self._requests.received, size)

    def _on_broker(self) -> None:
        broker, responses = self._broker, self._responses
        assert broker is not None
        size, deal = None, responses.passed
        if (passing := responses.passing_bytes) >= SPLICED_BYTES:
            size = broker.splice_to(self._client, passing, self._shared.pipes)
        if size is None:
            size, deal = broker.receive(responses.room()), responses.received
        if size == NOTHING_NOW:
            return
        if not size:
            self.abort()
            return
        self._received_bytes += size
        self._shared.counters.from_broker_bytes += size
        self._guarded(deal, size)
        passing = responses.passing_bytes
        broker.wake_at(min(passing, _WAKE_BYTES) if passing >= SPLICED_BYTES else 1)

    def _guarded(self, call: Callable[..., None], *arguments: int) -> None:
        """Run a handler of received bytes, close the connection if they are not valid Kafka, and settle."""
        if self._is_closed:
            return
        try:
            call(*arguments)
            self._go_on()
        except (ProtocolViolation, RetryableError) as error:
            self._break(str(error))
            return
        self._settle()

    def _go_on(self) -> None:
        if self._requests.may_resume:
            self._requests.resume()

    def _break(self, reason: str) -> None:
        self._shared.counters.broken_connections += 1
        log.info("a gateway connection is closed", reason=reason)
        self.abort()

    def _on_unreadable(self, error: LocalFileError) -> None:
        log.warning("a client's answer is cut off: a cached file cannot be read", path=error.path)
        self._break(str(error))

    def _settle(self) -> None:
        """Read from each side only while the other side takes what was read before."""
        if self._is_closed:
            return
        broker, client = self._broker, self._client
        is_sent = client.is_drained and (broker is None or broker.is_drained)
        if client.is_drained:
            self._responses.send_own_answers()
            if self._requests.may_resume:
                # The gateway's own answers had stopped the client. Its later bytes are handled in a turn
                # of their own.
                self._loop.call_soon(self._guarded, self._go_on)
        if self._is_finishing and is_sent and not self._pending and self._requests.is_between_messages:
            self.abort()
            return
        begins_none = self._is_finishing and self._requests.is_between_messages
        if (
            self._requests.is_stopped
            or self._early
            or self._rest is not None
            or begins_none
            or not (broker is None or broker.is_drained)
        ):
            client.pause_reading()
        else:
            client.resume_reading()
        if broker is None:
            return
        if self._responses.is_stopped or not client.is_drained:
            broker.pause_reading()
        else:
            broker.resume_reading()
        self._ask_ahead(broker)
        if client.is_drained:
            self._ahead.begin()

    def _ask_ahead(self, broker: Wire) -> None:
        """Ask the broker about the client's next Fetch, if the connection is idle."""
        if (
            self._pending
            or not (broker.is_drained and self._client.is_drained)
            or not self._requests.is_between_messages
            or (following := self._ahead.to_ask()) is None
        ):
            return
        head, request = following
        self._pending.push(PendingRequest(head, request, is_ahead=True))
        self._ahead.is_asked()
        broker.send(request)

    def _to_broker(self, data: memoryview) -> None:
        if self._broker is not None:
            self._broker.send(data)
            return
        self._early.append(bytes(data))
        self._keep(len(data))
        if self._task is None:
            self._start(self._connect())

    def _start(self, work: Coroutine[None, None, None]) -> None:
        if self._is_closed:
            work.close()
            return
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if task.cancelled():
            return
        if task.exception() is not None:
            self.abort()
            # A programming error: the loop's exception handler reports it.
            task.result()
        self._settle()

    async def _connect(self) -> None:
        try:
            sock = await connected(self._shared.settings)
        except (OSError, TimeoutError) as error:
            self._break(f"the broker accepts no connection: {error or type(error).__name__}")
            return
        self._broker = self._wire(sock, self._on_broker)
        for data in self._early:
            self._broker.send(data)
        self._early.clear()
        self._give_kept()

    def _rest_after(self, sent: ClientResponse) -> None:
        """Pause reading from the client until its rates allow more archived records."""
        seconds = self._shared.rates.spend(self._host, size_of(sent.pieces), now=self._loop.time())
        if seconds and not self._is_closed:
            self._shared.counters.delayed_answers += 1
            if self._rest is not None:
                self._rest.cancel()
            self._rest = self._loop.call_later(seconds, self._rested)

    def _answer_bytes(self) -> float:
        return self._shared.rates.answer_bytes(now=self._loop.time())

    def _rested(self) -> None:
        self._rest = None
        self._settle()

    def _keep(self, size: int) -> None:
        if not self._is_closed:
            self._kept_bytes += size
            self._shared.budget.add(size)

    def _give_kept(self) -> None:
        self._shared.budget.give(self._kept_bytes)
        self._kept_bytes = 0

    def _on_question(self, question: ArchivableResponse) -> None:
        self._keep(len(question.response))
        self._start(self._answer(question))

    async def _answer(self, question: ArchivableResponse) -> None:
        shared = self._shared
        try:
            found = await answer(
                question,
                shared.archive,
                timeout_seconds=shared.settings.answer_timeout_seconds,
                bytes_max=self._answer_bytes(),
            )
        except ProtocolViolation as error:
            self._break(str(error))
            return
        self._give_kept()
        self._send_archived(question.pending, found)
        self._guarded(self._responses.answered)

    def _send_archived(self, pending: PendingRequest, found: ClientResponse) -> None:
        self._shared.counters.archived_answers += found.archived
        self._shared.counters.prepared_answers += pending.prepared is not None
        if found.archived:
            self._rest_after(found)
        self._ahead.expect(pending, found)
        self._client.send_pieces(found.pieces, found.release)
