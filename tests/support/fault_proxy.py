"""
A proxy in front of any HTTP server that injects faults into the exchanges that a test selects.

The proxy parses the framing of HTTP/1.1, and depends on no cloud's API. A test queues faults. Each fault
spoils the next exchange that fits; other exchanges pass unchanged. So one table of retries is good for all
stores, and only the error documents differ.

    async with fault_proxy(server_url) as proxy:
        proxy.spoil(Answer("503 Slow Down", headers={"Retry-After": "1"}))
        ...                                   # a client that talks to proxy.url
        assert [each.fault for each in proxy.exchanges] == [..., None]
"""

from __future__ import annotations

import asyncio
import datetime as dt
import fcntl
import re
import termios
from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import format_datetime
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from tests.support.connections import accepting, end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_CHUNK = 64 << 10
_LARGEST_HEAD = 1 << 20
_TURNS_TO_READ = 5
"""Turns of the event loop: the first notices that bytes have arrived, later ones pass them to the request."""


@dataclass(frozen=True)
class Answer:
    """The proxy reads the request and answers it itself. The server does not receive the request."""

    status: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ResetRequest:
    """The connection is reset after *after_bytes* of the request's body. The server receives nothing."""

    after_bytes: int = 0


@dataclass(frozen=True)
class StallRequest:
    """A request of whose body the proxy reads *after_bytes*, and that it never answers."""

    after_bytes: int = 0


@dataclass(frozen=True)
class ResetAnswer:
    """The server handles the request. The connection is reset after *after_bytes* of the answer's body."""

    after_bytes: int = 0


@dataclass(frozen=True)
class TruncateAnswer:
    """
    The server handles the request.

    The connection is closed in order before the end of the answer's body.
    """

    after_bytes: int = 0


@dataclass(frozen=True)
class StallAnswer:
    """The server handles the request. Its answer stops forever after *after_bytes* of the body."""

    after_bytes: int = 0


@dataclass(frozen=True)
class NoAnswer:
    """The server handles the request. The connection is reset before its answer reaches the client."""


@dataclass(frozen=True)
class DelayAnswer:
    """The server handles the request. Its answer is held back until the client gives up."""


@dataclass(frozen=True)
class SlowAnswer:
    """The server handles the request. Its answer passes after some seconds."""

    seconds: float


@dataclass(frozen=True)
class DamageRequest:
    """One bit of the request's body is flipped on the way. The length stays."""


@dataclass(frozen=True)
class DamageAnswer:
    """One bit of the answer's body is flipped on the way. The length stays."""


@dataclass(frozen=True)
class RedateAnswer:
    """The answer's Date header is *seconds* later: the server has another clock than this host."""

    seconds: int


Fault: TypeAlias = (
    Answer
    | ResetRequest
    | StallRequest
    | ResetAnswer
    | TruncateAnswer
    | StallAnswer
    | NoAnswer
    | DelayAnswer
    | SlowAnswer
    | DamageRequest
    | DamageAnswer
    | RedateAnswer
)


@dataclass
class ProxiedExchange:
    """One request that the proxy received, and its fault."""

    method: str
    path: str
    headers: dict[str, str]
    fault: Fault | None = None
    status: int | None = None
    """The status of the answer that was sent to the client, at least in part; None without an answer."""


class FaultProxy:
    """A proxy that `fault_proxy` makes. Clients connect to `url`."""

    def __init__(self, upstream_url: str) -> None:
        upstream = urlsplit(upstream_url)
        assert upstream.scheme == "http"
        self._upstream = (upstream.hostname, upstream.port or 80)
        self._waiting: list[tuple[Fault, Callable[[ProxiedExchange], bool]]] = []
        self.weather: Callable[[ProxiedExchange], Fault | None] = lambda _: None
        """Returns the fault of an exchange that no queued fault fits."""
        self.url = ""
        self.exchanges: list[ProxiedExchange] = []
        self.stalled = asyncio.Event()
        """Set when an exchange has reached its stall or delay."""
        self.on_stall: Callable[[], None] | None = None
        """
        Called at a stall, when the client has read everything that was sent and no other exchange moves.
        """
        self._moving = 0

    def spoil(
        self,
        fault: Fault,
        *,
        times: int = 1,
        where: Callable[[ProxiedExchange], bool] = lambda _: True,
    ) -> None:
        """Spoil the next *times* exchanges for which *where* holds."""
        self._waiting += [(fault, where)] * times

    @property
    def faults_left(self) -> int:
        """Return the number of queued faults that no exchange has had yet."""
        return len(self._waiting)

    def _fault_for(self, exchange: ProxiedExchange) -> Fault | None:
        for position, (fault, where) in enumerate(self._waiting):
            if where(exchange):
                del self._waiting[position]
                return fault
        return self.weather(exchange)

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Serve one connection, request after request."""
        while head := await _read_head(client):
            first, headers = _parse(head)
            method, target = first.split(" ")[:2]
            exchange = ProxiedExchange(method, target, headers)
            exchange.fault = self._fault_for(exchange)
            self.exchanges.append(exchange)
            self._moving += 1
            try:
                if not await self._exchange(exchange, head, client, to_client):
                    return
            finally:
                self._moving -= 1

    async def _exchange(
        self,
        exchange: ProxiedExchange,
        head: bytes,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
    ) -> bool:
        """Forward one exchange, or spoil it; return whether the connection stays open."""
        fault = exchange.fault
        body = _body(client, exchange.headers)
        if isinstance(fault, Answer):
            async for _ in body:
                pass
            await self._answer_itself(exchange, fault, to_client)
            return True
        if isinstance(fault, (ResetRequest, StallRequest)):
            if fault.after_bytes:
                await client.readexactly(fault.after_bytes)
            if isinstance(fault, StallRequest):
                await self._stall(to_client)
            to_client.transport.abort()
            return False
        server, to_server = await asyncio.open_connection(*self._upstream)
        try:
            to_server.write(head)
            damage = isinstance(fault, DamageRequest)
            async for chunk, is_data in body:
                to_server.write(_turned(chunk) if damage and is_data else chunk)
                damage = damage and not is_data
                await to_server.drain()
            return await self._answer(exchange, server, to_client)
        finally:
            await end(to_server)

    async def _answer_itself(
        self, exchange: ProxiedExchange, answer: Answer, to_client: asyncio.StreamWriter
    ) -> None:
        body = b"" if exchange.method == "HEAD" else answer.body
        headers = {"Content-Length": str(len(body)), **answer.headers}
        lines = [f"HTTP/1.1 {answer.status}", *(f"{name}: {value}" for name, value in headers.items())]
        exchange.status = int(answer.status.split(" ")[0])
        to_client.write("\r\n".join([*lines, "", ""]).encode() + body)
        await to_client.drain()

    async def _answer(
        self, exchange: ProxiedExchange, server: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> bool:
        fault = exchange.fault
        head = await _read_head(server)
        if isinstance(fault, NoAnswer) or not head:
            # Without a head, the server has ended before its answer: the client sees the same.
            to_client.transport.abort()
            return False
        if isinstance(fault, DelayAnswer):
            await self._stall(to_client)
            return False
        if isinstance(fault, SlowAnswer):
            await asyncio.sleep(fault.seconds)
        first, headers = _parse(head)
        exchange.status = int(first.split(" ")[1])
        to_client.write(_redated(head, fault.seconds) if isinstance(fault, RedateAnswer) else head)
        if exchange.method == "HEAD" or exchange.status in {204, 304}:
            await to_client.drain()
            return True
        limit = getattr(fault, "after_bytes", None)
        damage = isinstance(fault, DamageAnswer)
        async for chunk, is_data in _body(server, headers, until_end=True):
            if limit is not None and is_data and len(chunk) >= limit:
                to_client.write(chunk[:limit])
                await to_client.drain()
                await self._break_off(fault, to_client)
                return False
            if limit is not None and is_data:
                limit -= len(chunk)
            to_client.write(_turned(chunk) if damage and is_data else chunk)
            damage = damage and not is_data
            await to_client.drain()
        assert limit is None, f"the answer was too short for {fault}"
        return "content-length" in headers or "transfer-encoding" in headers

    async def _break_off(self, fault: Fault | None, to_client: asyncio.StreamWriter) -> None:
        if isinstance(fault, StallAnswer):
            await self._stall(to_client)
        if isinstance(fault, TruncateAnswer):
            to_client.close()
            await to_client.wait_closed()
        to_client.transport.abort()

    async def _stall(self, to_client: asyncio.StreamWriter) -> None:
        self.stalled.set()
        self._moving -= 1
        try:
            if self.on_stall is not None:
                await self._silence(to_client)
                self.on_stall()
            await to_client.wait_closed()
        finally:
            self._moving += 1

    async def _silence(self, to_client: asyncio.StreamWriter) -> None:
        """Wait until a client on this loop has read everything, and only stalled exchanges are left."""
        connection = to_client.transport.get_extra_info("socket")
        unsent = array("i", [0])
        turns = 0
        while turns < _TURNS_TO_READ and not to_client.transport.is_closing():
            fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, unsent)
            is_moving = unsent[0] or to_client.transport.get_write_buffer_size() or self._moving
            turns = 0 if is_moving else turns + 1
            await asyncio.sleep(0.001 if is_moving else 0)


@asynccontextmanager
async def fault_proxy(upstream_url: str) -> AsyncIterator[FaultProxy]:
    """Serve a proxy to a plain HTTP server on a port that the system chooses."""
    proxy = FaultProxy(upstream_url)
    async with accepting(proxy.serve, limit=_LARGEST_HEAD) as port:
        proxy.url = f"http://127.0.0.1:{port}"
        yield proxy


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Return a head with its empty line; empty bytes if the peer has closed the connection."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode().split("\r\n")[:-2]
    return first, {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str], *, until_end: bool = False
) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield a message's body in pieces as received, each with whether it is data (or else framing)."""
    if "chunked" in headers.get("transfer-encoding", ""):
        size = -1
        while size != 0:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line, False
            if size:
                yield await reader.readexactly(size), True
                yield await reader.readexactly(2), False
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            yield line, False
        yield line, False
    elif "content-length" in headers:
        left = int(headers["content-length"])
        while left:
            piece = await reader.readexactly(min(_CHUNK, left))
            left -= len(piece)
            yield piece, True
    elif until_end:
        while piece := await reader.read(_CHUNK):
            yield piece, True


def _redated(head: bytes, seconds: int) -> bytes:
    date = format_datetime(dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds), usegmt=True)
    changed, count = re.subn(rb"(?im)^date: [^\r]*", f"Date: {date}".encode(), head)
    assert count == 1, "the server tells one date"
    return changed


def _turned(piece: bytes) -> bytes:
    return bytes([piece[0] ^ 1]) + piece[1:]
