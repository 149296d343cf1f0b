"""
One client and its own connection to the broker, from the opening of both sockets to their end.

Socket events are handled at once, in their callback. Only a question to the archive takes a task. A side
is not read while the other side has not taken what was read before. So when a side has ended, all its
bytes have been passed on, and both sides are closed.

`GatewaySettings` holds the addresses of the gateway and its broker, and the gateway's limits.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

import structlog
from aiohappyeyeballs import start_connection

from tieringd.errors import LocalFileError, ProtocolViolation, RetryableError
from tieringd.formats.kafka_wire.pieces import size_of
from tieringd.gateway.ahead import PERMIT_SECONDS, FetchAhead
from tieringd.gateway.archive_answers import ArchiveAnswers
from tieringd.gateway.combined_answers import answer
from tieringd.gateway.deletion_epochs import DeletionEpochs
from tieringd.gateway.frames import ClientResponse, PendingRequest, PendingRequests
from tieringd.gateway.requests import RequestFrames
from tieringd.gateway.responses import SPLICED_BYTES, ArchivableResponse, ResponseFrames
from tieringd.gateway.wire import NOTHING_NOW, MemoryBudget, PipePool, ReadRates, Wire, wire_of

_LOCAL_SEND_BYTES: Final = 128 << 10
"""
The send buffer to a client on this machine, which the kernel doubles. The kernel copies sent bytes.

With a larger buffer the bytes have left the processor's cache before the client reads them. For clients
on other machines the kernel sizes the buffer itself.
"""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway; the defaults are Kafka's where Kafka has the same limit."""

    host: str
    port: int
    """0 lets the system choose one."""
    broker_host: str = ""
    broker_port: int = 0
    """The broker's listener whose advertised address is this gateway. None with an archive-only endpoint."""
    client_tls: ssl.SSLContext | None = None
    """TLS towards clients; None is plain."""
    broker_tls: ssl.SSLContext | None = None
    """TLS towards the broker; None is plain."""
    broker_server_name: str | None = None
    """The name in the broker's certificate; None means *broker_host*."""
    max_connections: int = 10_000
    max_request_bytes: int = 100 << 20
    max_held_bytes: int = 4 << 20
    """
    The largest message that is held until it is whole.

    A larger response to Fetch passes as it comes, and archived partitions in it wait for a later Fetch. Any
    other message that must be inspected and is larger
    ends its connection, except DescribeLogDirs, which passes unchanged.
    """
    buffered_bytes: int = 256 << 20
    """How much all connections together may hold. Beyond it they read in small steps."""
    archive_bytes_per_second: int | None = None
    """Rate of archived records to all clients together; None is unlimited."""
    client_archive_bytes_per_second: int | None = None
    """Rate of archived records to one host; None is unlimited."""
    connect_timeout_seconds: float = 10.0
    """For a connection to the broker, and for every TLS handshake."""
    answer_timeout_seconds: float = 25.0
    """For one answer of the archive. Clients give up after 30 seconds by default."""
    permit_seconds: float = PERMIT_SECONDS
    """How long the broker's last response allows an answer that is prepared ahead."""
    idle_timeout_seconds: float = 660.0
    """For a connection on which nothing moves. Brokers close theirs after 600 seconds by default."""
    reuse_port: bool = False
    """True lets several processes listen on the port. The kernel spreads clients over them."""


def prepare(sock: socket.socket) -> None:
    """Set the options that every connection of the gateway needs."""
    sock.setblocking(False)
    # Send small messages at once, and detect a peer whose machine is gone.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if ip_address(sock.getpeername()[0]).is_loopback:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)


def host_of(sock: socket.socket) -> str:
    """Return the address of a client's host, or an empty string if the client is gone."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


async def connected(settings: GatewaySettings) -> socket.socket:
    """
    Return a connection to the broker, encrypted if the settings ask for it.

    Raises:
        OSError: The broker accepts no connection, or its certificate is not trusted.
        TimeoutError: The broker did not answer in time.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(settings.connect_timeout_seconds):
        addresses = await loop.getaddrinfo(
            settings.broker_host, settings.broker_port, type=socket.SOCK_STREAM
        )
        sock = await start_connection(addresses)
        try:
            prepare(sock)
            if settings.broker_tls is None:
                return sock
            name = settings.broker_server_name or settings.broker_host
            return await _shaken(
                settings.broker_tls.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            )
        except BaseException:
            sock.close()
            raise


async def accepted(sock: socket.socket, settings: GatewaySettings) -> socket.socket:
    """
    Return a client's connection after its TLS handshake.

    Raises:
        OSError: The client speaks no accepted TLS version or cipher, or is gone.
        TimeoutError: The client was silent for too long.
    """
    assert settings.client_tls is not None, "a plain connection needs no handshake"
    async with asyncio.timeout(settings.connect_timeout_seconds):
        try:
            return await _shaken(
                settings.client_tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            )
        except BaseException:
            sock.close()
            raise


async def _shaken(sock: ssl.SSLSocket) -> ssl.SSLSocket:
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                await _ready(sock, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _ready(sock, loop.add_writer, loop.remove_writer)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


async def _ready(sock: socket.socket, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    ready = asyncio.Event()
    descriptor = sock.fileno()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)


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
    failed_connections: int = 0
    """Closed because of a defect of the program."""
    from_client_bytes: int = 0
    from_broker_bytes: int = 0
    archived_answers: int = 0
    """Answers that differ from the broker's own."""
    delayed_answers: int = 0
    """Archived answers after which the client had to wait, because it exceeded its rate."""
    late_partitions: int = 0
    """Archived partitions whose answer had to wait for a later Fetch, beside records too large to hold."""
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
            on_failed=self._fail,
            permit_seconds=settings.permit_seconds,
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
        except Exception as error:  # noqa: BLE001 the boundary between connections: the others go on
            self._fail(error)
            return
        self._settle()

    def _go_on(self) -> None:
        if self._requests.may_resume:
            self._requests.resume()

    def _break(self, reason: str) -> None:
        self._shared.counters.broken_connections += 1
        log.info("a gateway connection is closed", reason=reason)
        self.abort()

    def _fail(self, error: BaseException) -> None:
        """Close the connection because of a defect of the program."""
        self._shared.counters.failed_connections += 1
        log.error("a gateway connection is closed because of a defect", exc_info=error)
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
