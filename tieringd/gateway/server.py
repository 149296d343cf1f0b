"""
The gateway's listener: accepts clients, counts them, and closes idle connections.

It belongs to one event loop. `connection.Connection` serves each client, unless another kind is given.
The given `ArchiveAnswers` decide which answers differ from the broker's.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, TypedDict

import structlog

from tieringd.errors import ProtocolViolation
from tieringd.gateway.archive_answers import ArchiveAnswers, NoArchive
from tieringd.gateway.connection import (
    SLOW_BYTES_PER_SECOND,
    AwaitedOfClient,
    Connection,
    ConnectionContext,
    GatewayCounters,
    GatewaySettings,
)
from tieringd.gateway.connection_rates import ConnectionRates
from tieringd.gateway.frames import SCRATCH_BYTES
from tieringd.gateway.proxy_header import proxied_host
from tieringd.gateway.read_rates import ReadRates
from tieringd.gateway.reader_records import ReaderRecords
from tieringd.gateway.shared_port import Port, SharedPort, listening_socket
from tieringd.gateway.sockets import accepted, prepare
from tieringd.gateway.unanswered_hosts import UnansweredHosts, answer_all
from tieringd.gateway.wire import MemoryBudget
from tieringd.metrics.readers import ReaderCounts
from tieringd.metrics.restarts import restarted
from tieringd.storage.at_once import cancelled

log = structlog.get_logger(__name__)

_SLOW_CHECKS: Final = 6
"""How many times a slow client is checked before its connection is closed."""
_PATIENCE_WITH_RESPONSES: Final = 10
"""Timeouts for an unread response: a consumer that works on what it has polled reads nothing meanwhile."""
_PAUSE_SECONDS: Final = 0.1
"""
Pause after the system had no descriptor for a client.

Otherwise the listener would be ready at once again.
"""
_CLOSED_AT_ONCE: Final = struct.pack("ii", 1, 0)
"""SO_LINGER that ends a connection by a reset: the kernel keeps nothing of it."""


class ClientConnection(Protocol):
    """One client's connection, from its first request to its end."""

    @property
    def moved_bytes(self) -> int:
        """Return a number that grows whenever bytes move."""

    @property
    def awaited(self) -> AwaitedOfClient | None:
        """Return what the client has to do now, and how much of it was done; None if nothing."""

    def start(self) -> None:
        """Read requests from now on."""

    def finish(self) -> None:
        """Take no further request, and close when the requests that began have their answers."""

    def abort(self) -> None:
        """Close at once. Closing twice is allowed."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """A client that has to do something, and since when it has been slow."""

    awaited: AwaitedOfClient
    began_at: float
    seen_at: float

    @property
    def patience(self) -> int:
        """Return how many times the timeout this wait may last."""
        return _PATIENCE_WITH_RESPONSES if self.awaited.kind == "response" else 1

    def goes_on(self, now: AwaitedOfClient, seconds: float) -> bool:
        """Say whether the client still has to do the same, and was slow in the last *seconds*."""
        done = now.bytes_done - self.awaited.bytes_done
        return now.kind == self.awaited.kind and done < SLOW_BYTES_PER_SECOND * seconds


class _Rates(TypedDict):
    bytes_per_second: int | None
    client_bytes_per_second: int | None
    principal_bytes_per_second: int | None
    principal_dollars_per_day: float | None


def _rates_of(settings: GatewaySettings) -> _Rates:
    return {
        "bytes_per_second": settings.archive_bytes_per_second,
        "client_bytes_per_second": settings.client_archive_bytes_per_second,
        "principal_bytes_per_second": settings.principal_bytes_per_second,
        "principal_dollars_per_day": settings.principal_dollars_per_day,
    }


class GatewayServer:
    """Pass clients on to one broker, or serve them as *connect* does. Started once and closed once."""

    def __init__(
        self,
        settings: GatewaySettings,
        archive: ArchiveAnswers | None = None,
        *,
        connect: Callable[
            [socket.socket, str, ConnectionContext, Callable[[Any], None]], ClientConnection
        ] = Connection,
        on_failure: Callable[[str], None] = lambda _: None,
        readers: ReaderCounts | None = None,
        port: SharedPort | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """
        Keep the arguments. *on_failure* gets the name of a task that failed by a defect, for a metric.

        *readers* counts the fetches, and tells what requests to the object store cost. With *port* other
        workers accept clients of the same port, and the limit of connections is one for all of them. *budget*
        is that of *archive*; None makes one.
        """
        self._port = port
        self._settings = settings
        self._on_failure = on_failure
        self._connect = connect
        self._shared = ConnectionContext(
            settings,
            archive or NoArchive(),
            memoryview(bytearray(SCRATCH_BYTES)),
            budget or MemoryBudget(settings.buffered_bytes),
            ReaderRecords(readers, slow_seconds=settings.slow_fetch_seconds),
            ReadRates(**_rates_of(settings)),
        )
        if readers is not None:
            readers.on_cost = self._charge
        self._connections: set[ClientConnection] = set()
        self._hosts: Counter[str] = Counter()
        """The number of connections of each host, those that still shake hands included."""
        self._host_of: dict[ClientConnection, str] = {}
        self._new_connections = ConnectionRates(
            settings.host_connections_per_second, burst=settings.host_connections_burst
        )
        self._unanswered: UnansweredHosts | None = None
        """None where the kernel sees the address of a load balancer instead of a client's."""
        self._arriving: dict[socket.socket, str | None] = {}
        """
        Accepted sockets that a task introduces or shakes hands with, each with the host it counts for.

        None is before the load balancer has told the host.
        """
        self._listened: Port | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: tuple[asyncio.Task[None], ...] = ()
        self._is_empty = asyncio.Event()

    def set_limits(self, settings: GatewaySettings) -> None:
        """Use the rates of *settings*, and its time of slow fetches, from now on. All else stays as it is."""
        self._new_connections.set_limit(
            settings.host_connections_per_second, burst=settings.host_connections_burst
        )
        self._shared.rates.set_limits(**_rates_of(settings), now=asyncio.get_running_loop().time())
        self._shared.readers.slow_seconds = settings.slow_fetch_seconds

    def _charge(self, principal: str, dollars: float) -> None:
        self._shared.rates.charge(principal, dollars, now=asyncio.get_running_loop().time())

    @property
    def port(self) -> int:
        """Return the port that clients connect to. The gateway must listen."""
        assert self._listened is not None, "the gateway does not listen"
        return int(self._listened.listener.getsockname()[1])

    @property
    def counters(self) -> GatewayCounters:
        """Return the counters since the start."""
        return self._shared.counters

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the counters since the start, by name."""
        return asdict(self._shared.counters)

    @property
    def open_connections(self) -> int:
        """Return how many clients are connected."""
        return len(self._connections) + len(self._arriving)

    @property
    def budget(self) -> MemoryBudget:
        """Return the budget that counts the bytes held by all connections."""
        return self._shared.budget

    @property
    def rates(self) -> ReadRates:
        """Return the rates of archived records."""
        return self._shared.rates

    @property
    def buffered_bytes(self) -> int:
        """Return how many bytes all connections hold now."""
        return self._shared.budget.used

    def listen(self) -> Port:
        """
        Take the port, and return it. Clients that connect wait until the gateway starts.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        settings = self._settings
        self._listened = self._port or Port(
            listening_socket(settings.host, settings.port, reuse_port=settings.reuse_port)
        )
        return self._listened

    async def start(self) -> None:
        """
        Listen, unless it does, and accept clients from now on.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        port = self._listened or self.listen()
        if not self._settings.proxy_protocol:
            self._unanswered = UnansweredHosts(port.listener, asyncio.get_running_loop())
        self._note_connections()
        self._serving = tuple(
            self._spawn(restarted(name, run, on_failure=self._on_failure))
            for name, run in (
                ("gateway_listener", lambda: self._accept(port)),
                ("gateway_idle_check", self._end_idle),
                ("gateway_slow_check", self._end_slow),
            )
        )

    async def watch(self) -> None:
        """Wait until the started gateway accepts no more clients. Raises an error that ended it."""
        ended, _ = await asyncio.wait(self._serving, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            if not task.cancelled():
                task.result()

    async def close(self, *, grace_seconds: float = 5.0) -> None:
        """Accept no further client or request, wait for answers that are due, and close everything."""
        await cancelled(tuple(self._tasks))
        for sock in list(self._arriving):
            # A task that is cancelled before its first step does not close its socket itself.
            sock.close()
            self._has_arrived(sock)
        if self._unanswered is not None:
            self._unanswered.close()
        if self._listened is not None:
            self._listened.listener.close()
        for connection in list(self._connections):
            connection.finish()
        if self._connections:
            self._is_empty.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._is_empty.wait()
        for connection in list(self._connections):
            connection.abort()
        self._shared.pipes.close()
        self._shared.client_log.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _note_connections(self) -> None:
        """Tell the other workers of the port how many clients this one has."""
        if self._port is not None:
            self._port.counts.set_own(self.open_connections)

    @property
    def _all_connections(self) -> int:
        """Return how many clients are connected to this port."""
        return self.open_connections if self._port is None else self._port.counts.total

    async def _accept(self, port: Port) -> None:
        while True:
            try:
                sock, address = await port.accept()
            except OSError as error:
                log.warning("the gateway cannot take a client", error=str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            host = address[0]
            if not self._settings.proxy_protocol:
                self._take(sock, host)
            elif self._is_full:
                # The balancer's address must not count for its clients.
                self._refuse_when_full(sock)
            else:
                self._arriving[sock] = None
                self._spawn(self._introduce(sock, host))
            self._note_connections()

    async def _introduce(self, sock: socket.socket, balancer: str) -> None:
        """Take a client whose address its load balancer tells."""
        try:
            sock.setblocking(False)
            seconds = self._settings.connect_timeout_seconds
            host = await proxied_host(sock, timeout_seconds=seconds) or balancer
        except EOFError:
            sock.close()
            return
        except (OSError, ProtocolViolation, TimeoutError) as error:
            self.counters.broken_connections += 1
            reason = str(error) or type(error).__name__
            if self._shared.client_log.admits(balancer):
                log.info("a connection without a PROXY header is closed", balancer=balancer, reason=reason)
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        finally:
            self._has_arrived(sock)
        self._take(sock, host)
        self._note_connections()

    def _has_arrived(self, sock: socket.socket) -> None:
        """Count a socket no more that has a connection from now on, or is closed."""
        host = self._arriving.pop(sock)
        if host is not None:
            self._leave(host)
        self._note_connections()

    def _take(self, sock: socket.socket, host: str) -> None:
        # Refused connections take a token as well: a host that connects in a loop to a full gateway is one.
        if not self._new_connections.admits(host, now=asyncio.get_running_loop().time()):
            self._refuse_often(sock, host)
            return
        if self._is_full:
            self._refuse_when_full(sock)
            return
        if self._hosts[host] >= self._host_limit:
            self.counters.refused_by_host += 1
            sock.close()
            return
        self.counters.accepted_connections += 1
        try:
            self._greet(sock, host)
        except Exception as error:  # noqa: BLE001 the boundary between clients: the listener goes on
            self._fail(sock, host, error)

    @property
    def _is_full(self) -> bool:
        return self._all_connections >= self._settings.max_connections

    def _refuse_when_full(self, sock: socket.socket) -> None:
        self.counters.refused_when_full += 1
        sock.close()

    def _refuse_often(self, sock: socket.socket, host: str) -> None:
        """Close a connection of a host that opens too many of them in a second."""
        self.counters.refused_by_host_rate += 1
        # A system that knows no such option closes the connection all the same.
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSED_AT_ONCE)
        sock.close()
        if self._unanswered is not None:
            self.counters.unanswered_hosts += self._unanswered.add(host)
        now = asyncio.get_running_loop().time()
        if self._new_connections.is_to_be_told(host, now=now) and self._shared.client_log.admits(host):
            log.warning(
                "a client host opens connections too often; further ones are refused",
                client=host,
                hint="Raise gateway.host_connections_per_second where many clients share this address",
            )

    def _fail(self, sock: socket.socket, host: str, error: Exception) -> None:
        """Close a connection that met a defect. It ends alone."""
        self.counters.failed_connections += 1
        log.error("the gateway cannot serve a client because of a defect", client=host, exc_info=error)
        sock.close()

    @property
    def _host_limit(self) -> int:
        settings = self._settings
        return settings.max_connections_per_host or max(1, settings.max_connections // 2)

    def _greet(self, sock: socket.socket, host: str) -> None:
        try:
            prepare(sock)
        except OSError as error:
            self._turn_away(sock, error)
            return
        if self._unanswered is not None:
            # The socket has inherited the filter that the listener has now, also another worker's.
            answer_all(sock)
        if self._settings.client_tls is None:
            self._add(sock, host)
        else:
            self._hosts[host] += 1
            self._arriving[sock] = host
            self._spawn(self._shake(sock, host))

    def _turn_away(self, sock: socket.socket, error: OSError) -> None:
        """Close a connection that cannot be served: its client is gone, or the system lacks resources."""
        self.counters.broken_connections += 1
        log.warning("the gateway cannot serve a client", error=str(error))
        sock.close()

    async def _shake(self, sock: socket.socket, host: str) -> None:
        try:
            encrypted = await accepted(sock, self._settings)
        except (OSError, TimeoutError) as error:
            self.counters.broken_connections += 1
            if self._shared.client_log.admits(host):
                reason = str(error) or type(error).__name__
                log.info("a client's TLS handshake failed", client=host, error=reason)
            return
        finally:
            self._has_arrived(sock)
        try:
            self._add(encrypted, host)
        except Exception as error:  # noqa: BLE001 the boundary between clients
            self._fail(encrypted, host, error)
        self._note_connections()

    def _add(self, sock: socket.socket, host: str) -> None:
        connection = self._connect(sock, host, self._shared, self._on_closed)
        self._connections.add(connection)
        self._hosts[host] += 1
        self._host_of[connection] = host
        try:
            connection.start()
        except OSError as error:
            connection.abort()
            self._turn_away(sock, error)
        except Exception:
            connection.abort()
            raise

    def _on_closed(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._leave(self._host_of.pop(connection))
        self._note_connections()
        if not self._connections:
            self._is_empty.set()

    def _leave(self, host: str) -> None:
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]

    async def _end_slow(self) -> None:
        """Close connections whose clients do not log in, or are too slow for too long."""
        now = asyncio.get_running_loop().time
        timeout = self._settings.slow_timeout_seconds
        waits: dict[ClientConnection, _Wait] = {}
        while True:
            await asyncio.sleep(timeout / _SLOW_CHECKS)
            current: dict[ClientConnection, _Wait] = {}
            for connection in list(self._connections):
                awaited = connection.awaited
                if awaited is None:
                    continue
                wait = waits.get(connection)
                if wait is None or not wait.goes_on(awaited, now() - wait.seen_at):
                    current[connection] = _Wait(awaited, now(), now())
                elif now() - wait.began_at < timeout * wait.patience:
                    current[connection] = _Wait(awaited, wait.began_at, now())
                else:
                    self.counters.slow_connections += 1
                    host = self._host_of[connection]
                    if self._shared.client_log.admits(host):
                        log.info("a slow client's connection is closed", client=host, awaited=awaited.kind)
                    connection.abort()
            waits = current

    async def _end_idle(self) -> None:
        """Close every connection on which nothing moved during a whole interval."""
        seen: dict[ClientConnection, int] = {}
        while True:
            await asyncio.sleep(self._settings.idle_timeout_seconds)
            for connection in list(self._connections):
                if seen.get(connection) == connection.moved_bytes:
                    connection.abort()
            seen = {connection: connection.moved_bytes for connection in self._connections}
