"""
One client and its own connection to the broker, from the opening of both sockets to their end.

Socket events are handled at once, in their callback. Only a question to the archive takes a task. A side
is not read while the other side has not taken what was read before. So when a side has ended, all its
bytes have been passed on, and both sides are closed.

`GatewaySettings` holds the addresses of the gateway and its broker, and the gateway's limits.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import structlog

from tieringd.errors import LocalFileError, ProtocolViolation, RetryableError
from tieringd.formats.kafka_wire.fetch import throttled
from tieringd.formats.kafka_wire.pieces import size_of
from tieringd.gateway.ahead import PERMIT_SECONDS, FetchAhead
from tieringd.gateway.archive_answers import ArchiveAnswers
from tieringd.gateway.client_log import ClientLog
from tieringd.gateway.combined_answers import answer
from tieringd.gateway.deletion_epochs import DeletionEpochs
from tieringd.gateway.frames import ClientResponse, PendingRequest, PendingRequests
from tieringd.gateway.read_rates import HOST, ReadRates
from tieringd.gateway.reader_records import ReaderRecords
from tieringd.gateway.requests import RequestFrames
from tieringd.gateway.responses import SPLICED_BYTES, ArchivableResponse, ResponseFrames
from tieringd.gateway.seen_login import SeenLogin, certified_principal
from tieringd.gateway.sockets import connected
from tieringd.gateway.wire import NOTHING_NOW, MemoryBudget, PipePool, Wire, wire_of
from tieringd.metrics.readers import ANONYMOUS, READER, Reader

SLOW_BYTES_PER_SECOND: Final = 1024


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway; the defaults are Kafka's where Kafka has the same limit."""

    host: str
    port: int
    """0 lets the system choose one."""
    broker_host: str = ""
    broker_port: int = 0
    """The broker's listener whose advertised address is this gateway. None with an archive-only endpoint."""
    proxy_protocol: bool = False
    """Whether every connection begins with a PROXY header, which tells the client's address."""
    client_tls: ssl.SSLContext | None = None
    """TLS towards clients; None is plain."""
    broker_tls: ssl.SSLContext | None = None
    """TLS towards the broker; None is plain."""
    broker_server_name: str | None = None
    """The name in the broker's certificate; None means *broker_host*."""
    max_connections: int = 10_000
    max_connections_per_host: int | None = None
    """None is half of *max_connections*, so that one host does not take all places."""
    host_connections_per_second: float | None = None
    """How many connections one host may open in a second; None is unlimited."""
    host_connections_burst: int = 1
    """How many of them it may open at once."""
    max_request_bytes: int = 100 << 20
    max_held_bytes: int = 4 << 20
    """
    The largest message that is held until it is whole.

    A larger response to Fetch passes as it comes, and archived partitions in it wait for a later Fetch. Any
    other message that must be inspected and is larger
    ends its connection, except DescribeLogDirs, which passes unchanged.
    """
    buffered_bytes: int = 256 << 20
    """How much all connections together may hold. Beyond it they wait, and read in small steps."""
    archive_bytes_per_second: int | None = None
    """Rate of archived records to all clients together; None is unlimited."""
    client_archive_bytes_per_second: int | None = None
    """Rate of archived records to one host; None is unlimited."""
    connect_timeout_seconds: float = 10.0
    """Deadline of a connection to the broker, and of every TLS handshake."""
    answer_timeout_seconds: float = 25.0
    """Deadline of one answer of the archive. Clients give up after 30 seconds by default."""
    permit_seconds: float = PERMIT_SECONDS
    """How long the broker's last response allows an answer that is prepared ahead."""
    idle_timeout_seconds: float = 660.0
    """Time after which a silent connection is closed. Brokers close theirs after 600 seconds by default."""
    slow_timeout_seconds: float = 60.0
    """
    How long a client may take to log in, and how long it may send a request, or take a response, slowly.

    Slower than `SLOW_BYTES_PER_SECOND` is slow.
    """
    slow_fetch_seconds: float = 5.0
    """Archived Fetches that take longer are logged, with what they waited for."""
    principal_bytes_per_second: int | None = None
    """Rate of archived records to one principal; None is unlimited."""
    principal_dollars_per_day: float | None = None
    """What requests to the object store for one principal may cost in a day; None is unlimited."""
    reuse_port: bool = False
    """True lets several processes listen on the port. The kernel spreads clients over them."""


_WAKE_BYTES: Final = 256 << 10
"""How many bytes of passing records wake the loop: each turn of the loop has a fixed cost."""
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class GatewayCounters:
    """Counts since the gateway started."""

    accepted_connections: int = 0
    refused_when_full: int = 0
    """Refused because so many clients are connected as there may be."""
    refused_by_host: int = 0
    """Refused because so many clients of their host are connected as there may be."""
    refused_by_host_rate: int = 0
    """Refused because their host opens connections too often."""
    unanswered_hosts: int = 0
    """How often the kernel was told not to answer a host for a moment."""
    slow_connections: int = 0
    """Closed because the client did not log in, or was too slow to send a request or to take a response."""
    broken_connections: int = 0
    """Closed because of a protocol violation, or because the broker accepted no connection."""
    failed_connections: int = 0
    """Closed because of a defect of the program."""
    from_client_bytes: int = 0
    from_broker_bytes: int = 0
    archived_answers: int = 0
    """Answers that differ from the broker's own."""
    delayed_answers: int = 0
    """Archived answers after which the client had to wait, because it exceeded its rate."""
    archived_bytes: int = 0
    """Bytes of these answers."""
    unread_answers: int = 0
    """Answers to Fetch in which a partition has no records, because the archive was not read in time."""
    late_partitions: int = 0
    """Archived partitions whose answer had to wait for a later Fetch, beside records too large to hold."""
    prepared_answers: int = 0
    """Archived answers that were ready when the client asked."""

    @property
    def refused_connections(self) -> int:
        """Return how many connections were refused because of a limit on connections."""
        return self.refused_when_full + self.refused_by_host + self.refused_by_host_rate


@dataclass(frozen=True, slots=True)
class AwaitedOfClient:
    """Something that only the client can do now: log in, send the rest of a request, or take a response."""

    kind: Literal["login", "request", "response"]
    bytes_done: int
    """Grows while the client does it."""


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """What all connections of a gateway share."""

    settings: GatewaySettings
    archive: ArchiveAnswers
    scratch: memoryview
    """Every connection receives into it, and is done with it before it returns to the loop."""
    budget: MemoryBudget
    readers: ReaderRecords
    rates: ReadRates = field(default_factory=ReadRates)
    pipes: PipePool = field(default_factory=PipePool)
    counters: GatewayCounters = field(default_factory=GatewayCounters)
    client_log: ClientLog = field(default_factory=ClientLog)


class Connection:
    """
    A client's connection, from its first request to its end. *on_closed* is called once.

    *host* is the address of the client, which differs from the socket's behind a load balancer.
    """

    def __init__(
        self,
        sock: socket.socket,
        host: str,
        shared: ConnectionContext,
        on_closed: Callable[[Connection], None],
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
        self._is_granted = False
        """Whether one more read is allowed although the budget is spent."""
        self._host = host
        self._rest: asyncio.TimerHandle | None = None
        """The timer until which the client is not read."""
        self._login = SeenLogin(certified_principal(sock) or ANONYMOUS)
        self._reader: Reader | None = None
        """The reader that got the last answer of the archive."""
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
            on_failed=self._fail,
            permit_seconds=settings.permit_seconds,
            reader=lambda: self._reader,
        )
        self._deletions = DeletionEpochs(
            self._loop,
            shared.archive,
            timeout_seconds=settings.answer_timeout_seconds,
            on_known=lambda: self._guarded(self._go_on),
            on_failed=self._fail,
        )
        self._requests = RequestFrames(
            shared.scratch,
            shared.budget,
            pending,
            ahead=self._ahead,
            deletions=self._deletions,
            forward=self._to_broker,
            may_produce=shared.archive.may_produce,
            max_request_bytes=settings.max_request_bytes,
            held_bytes=settings.max_held_bytes,
            login=self._login,
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
            on_late=self._count_late,
            on_passed=self._count_passed,
            on_login=self._login.see_answer,
            held_bytes=settings.max_held_bytes,
        )

    @property
    def moved_bytes(self) -> int:
        """Return a number that grows whenever bytes are received or sent later."""
        sent = self._client.later_bytes + (self._broker.later_bytes if self._broker is not None else 0)
        return self._received_bytes + sent

    @property
    def awaited(self) -> AwaitedOfClient | None:
        """Return what the client has to do now, and how much of it was done; None if nothing."""
        if not self._client.is_drained:
            return AwaitedOfClient("response", self._client.later_bytes)
        if not self._client.is_reading or self._pending:
            return None
        if not self._requests.is_between_messages:
            return AwaitedOfClient("request", self._received_bytes)
        return AwaitedOfClient("login", 0) if self._requests.is_before_login else None

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
        self._shared.budget.forget(self)
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
        self._deletions.close()
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
        if self._counted(size):
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
        if not self._counted(size):
            return
        self._shared.counters.from_broker_bytes += size
        self._guarded(deal, size)
        passing = responses.passing_bytes
        broker.wake_at(min(passing, _WAKE_BYTES) if passing >= SPLICED_BYTES else 1)

    def _counted(self, size: int) -> bool:
        """Count received bytes, and return whether there are any. A side that has closed ends both."""
        if size == NOTHING_NOW:
            return False
        if not size:
            self.abort()
            return False
        self._is_granted = False
        self._received_bytes += size
        return True

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
        except Exception as error:  # noqa: BLE001 the boundary between connections: the others go on
            self._fail(error)
            return
        self._settle()

    def _go_on(self) -> None:
        if self._requests.may_resume:
            self._requests.resume()

    def _break(self, reason: str) -> None:
        self._shared.counters.broken_connections += 1
        if self._shared.client_log.admits(self._host):
            log.info("a gateway connection is closed", client=self._host, reason=reason)
        self.abort()

    def _fail(self, error: BaseException) -> None:
        """Close the connection because of a defect of the program."""
        self._shared.counters.failed_connections += 1
        log.error("a gateway connection is closed because of a defect", client=self._host, exc_info=error)
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
        is_poor = self._shared.budget.is_spent and not self._is_granted
        begins_none = self._is_finishing and self._requests.is_between_messages
        if (
            self._requests.is_stopped
            or self._early
            or self._rest is not None
            or begins_none
            or (is_poor and self._waits_for_memory(bool(self._pending) or self._requests.is_holding))
            or not (broker is None or broker.is_drained)
        ):
            client.pause_reading()
        else:
            client.resume_reading()
        if broker is None:
            return
        waits = is_poor and self._waits_for_memory(self._responses.is_holding)
        if self._responses.is_stopped or not client.is_drained or waits:
            broker.pause_reading()
        else:
            broker.resume_reading()
        self._ask_ahead(broker)
        if client.is_drained:
            self._ahead.begin()

    def _waits_for_memory(self, holds: bool) -> bool:  # noqa: FBT001 the caller's condition
        """Wait for room if this connection holds something. One that holds nothing is read in small steps."""
        if holds:
            self._shared.budget.wait(self, self._grant)
        return holds

    def _grant(self) -> None:
        self._is_granted = True
        self._settle()

    def _ask_ahead(self, broker: Wire) -> None:
        """Ask the broker about the client's next Fetch, if the connection is idle."""
        if (
            self._pending
            or not (broker.is_drained and self._client.is_drained)
            or not self._requests.is_between_messages
            or self._requests.is_authenticating
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
        if (error := task.exception()) is not None:
            self._fail(error)
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

    def _rest_after(self, size_bytes: int, reader: Reader | None) -> float:
        """Pause reading from the client until its rates allow more archived records; return the seconds."""
        seconds = self._shared.rates.spend(
            self._host, size_bytes, now=self._loop.time(), principal=self._login.principal
        )
        if seconds and not self._is_closed:
            self._shared.counters.delayed_answers += 1
            if reader is not None:
                self._shared.readers.throttled(reader, seconds)
            if self._rest is not None:
                self._rest.cancel()
            self._rest = self._loop.call_later(seconds, self._rested)
        return seconds

    def _answer_bytes(self) -> float:
        return self._shared.rates.answer_bytes(
            now=self._loop.time(), host=self._host, principal=self._login.principal
        )

    def _rested(self) -> None:
        self._rest = None
        self._settle()

    def _keep(self, size: int) -> None:
        if not self._is_closed:
            self._kept_bytes += size
            self._shared.budget.add(size)

    def _count_passed(self, pending: PendingRequest, size_bytes: int) -> None:
        reader = pending.reader
        if reader is not None and not pending.is_ahead:
            seconds = time.monotonic() - pending.begun_at
            self._shared.readers.passed(reader, size_bytes, seconds=seconds)

    def _count_late(self) -> None:
        self._shared.counters.late_partitions += 1

    def _give_kept(self) -> None:
        self._shared.budget.give(self._kept_bytes)
        self._kept_bytes = 0

    def _on_question(self, question: ArchivableResponse) -> None:
        self._keep(len(question.response))
        self._start(self._answer(question))

    async def _answer(self, question: ArchivableResponse) -> None:
        shared = self._shared
        HOST.set(self._host)
        READER.set(question.pending.reader)
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
        if question.pending.is_limited:
            self._pending.starving |= found.starved
        self._send_archived(question.pending, found)
        self._guarded(self._responses.answered)

    def _send_archived(self, pending: PendingRequest, found: ClientResponse) -> None:
        self._shared.counters.archived_answers += found.archived
        self._shared.counters.prepared_answers += pending.prepared is not None
        self._shared.counters.unread_answers += found.has_unread
        size_bytes, reader = size_of(found.pieces), pending.reader
        if reader is not None:
            self._reader = reader
            self._shared.readers.fetched(
                reader, found, size_bytes, seconds=time.monotonic() - pending.begun_at
            )
        if found.archived:
            self._shared.counters.archived_bytes += size_bytes
            seconds = self._rest_after(size_bytes, reader)
            if seconds and reader is not None:
                # As a broker does: the client is told how long it is not read.
                pieces = throttled(found.pieces, pending.head.version, math.ceil(seconds * 1000))
                found = replace(found, pieces=pieces)
        found.on_sent()
        self._ahead.expect(pending, found)
        self._client.send_pieces(found.pieces, found.release)
