"""
One client of an archive endpoint: one request at a time, each answered before the next is read.

So a client that sends faster than it receives is not read, and answers keep their order.
`request_handlers.RequestHandlers` interprets the requests. Records go from the cache's files to the socket.

`RequestBuffer` collects a client's bytes until they are a whole request. Its memory grows with the bytes
that have arrived, never with the announced size.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Final

import structlog

from tieringd.endpoint.endpoint_settings import (
    BEFORE_LOGIN_BYTES_MAX,
    OTHER_REQUEST_BYTES_MAX,
    REQUEST_BYTES_MAX,
)
from tieringd.endpoint.request_handlers import RequestHandlers
from tieringd.endpoint.sasl_login import BEFORE_LOGIN, SaslLogin
from tieringd.endpoint.users_file import UserDirectory
from tieringd.errors import LocalFileError, ProtocolViolation
from tieringd.formats.kafka_wire.cursor import SIZE_BYTES
from tieringd.formats.kafka_wire.fetch import throttled
from tieringd.formats.kafka_wire.pieces import size_of
from tieringd.formats.kafka_wire.request_header import HEAD, RequestHead, client_id_of
from tieringd.formats.kafka_wire.request_header import InspectedApi as Kafka
from tieringd.gateway.connection import AwaitedOfClient, ConnectionContext
from tieringd.gateway.read_rates import HOST
from tieringd.gateway.seen_login import certified_principal
from tieringd.gateway.wire import NOTHING_NOW, MemoryBudget, wire_of
from tieringd.metrics.readers import READER, Reader, Source

log = structlog.get_logger(__name__)

_POOR_ROOM_BYTES: Final = 4 << 10
"""How much is read at once while the budget is spent."""


class RequestBuffer:
    """The requests of one connection, one after another."""

    def __init__(self, budget: MemoryBudget, *, max_request_bytes: int) -> None:
        self._budget = budget
        self._max_request_bytes = max_request_bytes
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def add(self, data: memoryview) -> None:
        """Take bytes that arrived."""
        self._bytes += data
        self._budget.add(len(data))

    def next(self, *, is_before_login: bool = False) -> tuple[RequestHead, bytes] | None:
        """
        Take the first request out, if it is whole. Before a login, requests are small.

        Raises:
            ProtocolViolation: Its announced size is not that of a request.
        """
        if len(self._bytes) < HEAD.size:
            return None
        head = RequestHead.read(memoryview(bytes(self._bytes[: HEAD.size])))
        of_its_kind = REQUEST_BYTES_MAX.get(head.api_key, OTHER_REQUEST_BYTES_MAX)
        limit = min(self._max_request_bytes, of_its_kind, self._budget.limit)
        if is_before_login:
            limit = min(limit, BEFORE_LOGIN_BYTES_MAX)
        head.require_size(limit)
        size = SIZE_BYTES + head.size
        if len(self._bytes) < size:
            return None
        frame = bytes(self._bytes[:size])
        del self._bytes[:size]
        self._budget.give(size)
        return head, frame

    def close(self) -> None:
        """Release the held bytes."""
        self._budget.give(len(self._bytes))
        self._bytes.clear()


class EndpointConnection:
    """A client's connection, from its first request to its end. *on_closed* is called once."""

    def __init__(
        self,
        sock: socket.socket,
        host: str,
        shared: ConnectionContext,
        on_closed: Callable[[EndpointConnection], None],
        *,
        api: RequestHandlers,
        users: UserDirectory,
        offers_plain: bool,
    ) -> None:
        self._shared = shared
        self._on_closed = on_closed
        self._api = api
        self._loop = asyncio.get_running_loop()
        self._requests = RequestBuffer(shared.budget, max_request_bytes=shared.settings.max_request_bytes)
        self._task: asyncio.Task[None] | None = None
        self._is_finishing = False
        self._is_closed = False
        self._received_bytes = 0
        self._is_granted = False
        """Whether one more read is allowed although the budget is spent."""
        self._host = host
        self._users = users
        self._login = SaslLogin(users, certified=certified_principal(sock), offers_plain=offers_plain)
        self._wire = wire_of(sock)(
            sock,
            self._loop,
            shared.budget,
            on_readable=self._on_readable,
            on_drained=self._go_on,
            on_lost=self.abort,
            on_unreadable=self._on_unreadable,
        )

    @property
    def moved_bytes(self) -> int:
        """Return a number that grows whenever bytes are received or sent later."""
        return self._received_bytes + self._wire.later_bytes

    @property
    def awaited(self) -> AwaitedOfClient | None:
        """Return what the client has to do now, and how much of it was done; None if nothing."""
        if not self._login.is_done:
            return AwaitedOfClient("login", 0)
        if not self._wire.is_drained:
            return AwaitedOfClient("response", self._wire.later_bytes)
        if self._task is not None or not self._wire.is_reading:
            return None
        if len(self._requests):
            return AwaitedOfClient("request", self._received_bytes)
        return None if self._received_bytes else AwaitedOfClient("login", 0)

    def start(self) -> None:
        """Read requests from now on."""
        self._wire.resume_reading()

    def finish(self) -> None:
        """Take no further request, and close when the current one has its answer."""
        self._is_finishing = True
        self._go_on()

    def abort(self) -> None:
        """Close at once. Closing twice is allowed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._shared.budget.forget(self)
        if self._task is not None:
            self._task.cancel()
        self._wire.close()
        self._requests.close()
        self._on_closed(self)

    def _on_readable(self) -> None:
        room = self._shared.scratch[: max(self._shared.budget.left, _POOR_ROOM_BYTES)]
        size = self._wire.receive(room)
        if size == NOTHING_NOW:
            return
        if not size:
            self.abort()
            return
        self._received_bytes += size
        self._shared.counters.from_client_bytes += size
        self._is_granted = False
        self._requests.add(room[:size])
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next request when the last answer was sent, or read until there is one."""
        if self._is_closed or self._task is not None:
            return
        if not self._wire.is_drained:
            self._wire.pause_reading()
            return
        if self._is_finishing:
            self.abort()
            return
        try:
            request = self._requests.next(is_before_login=not self._login.is_done)
        except ProtocolViolation as error:
            self._break(str(error))
            return
        if request is None:
            if len(self._requests) and self._shared.budget.is_spent and not self._is_granted:
                self._wire.pause_reading()
                self._shared.budget.wait(self, self._grant)
            else:
                self._wire.resume_reading()
            return
        self._wire.pause_reading()
        self._task = self._loop.create_task(self._answer(*request))
        self._task.add_done_callback(self._on_done)

    def _grant(self) -> None:
        self._is_granted = True
        self._go_on()

    async def _answer(self, head: RequestHead, frame: bytes) -> None:
        if not self._login.is_done and head.api_key not in BEFORE_LOGIN:
            raise ProtocolViolation("a client that has not logged in sent a request that needs a login")
        reader, begun_at = None, self._loop.time()
        HOST.set(self._host)
        if head.api_key == Kafka.FETCH:
            reader = Reader.of(self._login.principal, client_id_of(memoryview(frame)))
            READER.set(reader)
        answer = await self._api.answer(
            head,
            memoryview(frame),
            self._users.access_of(self._login.principal),
            self._login,
            is_connected=lambda: not self._wire.is_ended_by_peer,
        )
        self._shared.counters.archived_answers += 1
        pieces, seconds = answer.pieces, 0.0
        if reader is not None:
            size_bytes = size_of(pieces)
            self._shared.counters.archived_bytes += size_bytes
            self._shared.readers.archived(
                reader,
                Source.STORE if answer.waited_for else Source.CACHE,
                size_bytes,
                seconds=self._loop.time() - begun_at,
                waited_for=answer.waited_for,
            )
            seconds = self._shared.rates.spend(
                self._host, size_bytes, now=self._loop.time(), principal=reader.principal
            )
            if seconds:
                self._shared.counters.delayed_answers += 1
                self._shared.readers.throttled(reader, seconds)
                # As a broker does: the client is told how long it is not read.
                pieces = throttled(pieces, head.version, math.ceil(seconds * 1000))
        if self._login.has_failed:
            self._is_finishing = True
            if self._shared.client_log.admits(self._host):
                log.info("a client could not log in", client=self._host, mechanism=self._login.mechanism)
        self._wire.send_pieces(pieces, answer.release)
        if seconds:
            await asyncio.sleep(seconds)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, ProtocolViolation):
            self._break(str(error))
            return
        if error is not None:
            # The boundary between connections: the others go on.
            self._shared.counters.failed_connections += 1
            log.error(
                "a client's connection is closed because of a defect", client=self._host, exc_info=error
            )
            self.abort()
        self._go_on()

    def _on_unreadable(self, error: LocalFileError) -> None:
        log.warning("a client's answer is cut off: a cached file cannot be read", path=error.path)
        self._break(str(error))

    def _break(self, reason: str) -> None:
        if not self._is_closed:
            self._shared.counters.broken_connections += 1
            if self._shared.client_log.admits(self._host):
                log.info("a client's connection is closed", client=self._host, reason=reason)
            self.abort()
