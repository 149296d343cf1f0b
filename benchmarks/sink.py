"""
An S3 server that keeps nothing: it counts the bytes of each PUT and throws them away.

It runs in a process of its own, one thread for each connection. The kernel discards the bodies
(`recv` with MSG_TRUNC), so that it costs little and the clients are what is measured. Asked to
verify, it reads and hashes every body instead, and is slow.

It looks at no signature. An object comes in one PUT or in parts, always with a Content-Length;
anything else is answered with 501, which no client takes for success.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import resource
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BUCKET = "benchmark"
_MAX_OBJECT_BYTES = 256 << 20
_MAX_HEAD_BYTES = 64 << 10
_RECEIVE_BUFFER_BYTES = 256 << 10
"""Left alone it grows to megabytes on loopback, and the sender pays for much of the receiving."""


_CREATED = (
    "<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{key}</Key><UploadId>1</UploadId>"
    "</InitiateMultipartUploadResult>"
)
_NO_SUCH_KEY = "<Error><Code>NoSuchKey</Code><Message>nothing is kept</Message></Error>"
_EMPTY_LISTING = "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
_COMPLETED = (
    "<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{key}</Key><ETag>0</ETag>"
    "</CompleteMultipartUploadResult>"
)


@dataclass(frozen=True, slots=True)
class Received:
    """What arrived under one key."""

    size_bytes: int
    sha256: str | None
    """None when the sink was not asked to verify."""


class Sink:
    """The sink's process, as its parent sees it. A context manager."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs,), name="sink", daemon=True)
        self._process.start()
        theirs.close()
        self.port: int = self._connection.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._connection.close()
        self._process.join()

    def begin(self, *, verify: bool) -> None:
        """Forget what arrived so far; hash the bodies from now on if *verify*."""
        self._ask(("begin", verify))

    def set_available(self, *, available: bool) -> None:
        """Answer from now on, or end every connection at its next request, as a store that is away."""
        self._ask(("available", available))

    def first_put_at(self) -> float:
        """Return when the first segment since `begin` came, as `time.monotonic` has it in every process."""
        return float(self._ask(("first_put_at", None)))

    def received(self) -> dict[str, Received]:
        """Return what arrived since `begin`, by key without the bucket."""
        return dict(self._ask(("received", None)))

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the sink has used since it started."""
        return float(self._ask(("cpu", None)))

    def _ask(self, question: tuple[str, Any]) -> Any:
        self._connection.send(question)
        return self._connection.recv()


@dataclass(frozen=True, slots=True)
class _Part:
    size_bytes: int
    data: bytearray | None
    """None when the bytes were discarded."""


class _Server:
    def __init__(self) -> None:
        self.received: dict[str, Received] = {}
        self.is_verifying = False
        self.is_available = True
        self.first_put_at: float | None = None
        self._parts: dict[str, dict[int, _Part]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        # Inherited by each connection, and from then on fixed.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.port: int = self._listener.getsockname()[1]
        # Bodies are "received" into this and never touch it: with MSG_TRUNC nothing is written.
        self._nowhere = mmap.mmap(-1, _MAX_OBJECT_BYTES)

    def accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while (request := _read_head(client)) is not None and self.is_available:
                    client.sendall(self._answer(client, *request))
            except ConnectionError:
                return  # The client has gone; what it had sent in full is counted.

    def _answer(self, client: socket.socket, head: bytes, begun: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        fields = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        if fields.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        url = urlsplit(target)
        key = unquote(url.path).removeprefix(f"/{BUCKET}/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if "aws-chunked" in fields.get("content-encoding", "") or "transfer-encoding" in fields:
            return _response("501 Not Implemented")
        size_bytes = int(fields.get("content-length", 0))
        if method == "PUT":
            self._put(client, begun, key, size_bytes, query)
            return _response("200 OK")
        if method == "POST" and "uploads" in query:
            self._parts[key] = {}
            return _response("200 OK", _CREATED.format(bucket=BUCKET, key=key))
        if method == "POST" and "uploadId" in query:
            _read(client, begun, size_bytes)
            parts = self._parts.pop(key)
            self.received[key] = _received([parts[number] for number in sorted(parts)])
            return _response("200 OK", _COMPLETED.format(bucket=BUCKET, key=key))
        return _question(method, query)

    def _put(
        self, client: socket.socket, begun: bytes, key: str, size_bytes: int, query: dict[str, str]
    ) -> None:
        if self.first_put_at is None and key.endswith(".log"):
            self.first_put_at = time.monotonic()
        taken = self._take(client, begun, size_bytes)
        if "partNumber" in query:
            self._parts[key][int(query["partNumber"])] = taken
        else:
            self.received[key] = _received([taken])

    def _take(self, client: socket.socket, begun: bytes, size_bytes: int) -> _Part:
        if self.is_verifying:
            return _Part(size_bytes, _read(client, begun, size_bytes))
        self._discard(client, size_bytes - len(begun))
        return _Part(size_bytes, None)

    def _discard(self, client: socket.socket, left: int) -> None:
        while left:
            count = client.recv_into(self._nowhere, left, socket.MSG_TRUNC | socket.MSG_WAITALL)
            if not count:
                raise ConnectionError
            left -= count


def _run(connection: Connection) -> None:
    server = _Server()
    threading.Thread(target=server.accept, daemon=True).start()
    connection.send(server.port)
    while True:
        try:
            question, argument = connection.recv()
        except EOFError:
            return
        answer: object = None
        if question == "begin":
            server.received, server.is_verifying, server.first_put_at = {}, argument, None
        elif question == "available":
            server.is_available = argument
        elif question == "first_put_at":
            answer = server.first_put_at
        elif question == "received":
            answer = server.received
        elif question == "cpu":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            answer = usage.ru_utime + usage.ru_stime
        connection.send(answer)


def _read_head(client: socket.socket) -> tuple[bytes, bytes] | None:
    """Return a request's head, and what came of its body in the same read; None at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = client.recv(_MAX_HEAD_BYTES)
        if not chunk:
            return None
        data += chunk
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _read(client: socket.socket, begun: bytes, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    data[: len(begun)] = begun
    view = memoryview(data)[len(begun) :]
    while view:
        count = client.recv_into(view)
        if not count:
            raise ConnectionError
        view = view[count:]
    return data


def _received(parts: list[_Part]) -> Received:
    digest = hashlib.sha256()
    for part in parts:
        if part.data is None:
            return Received(sum(part.size_bytes for part in parts), None)
        digest.update(part.data)
    return Received(sum(part.size_bytes for part in parts), digest.hexdigest())


def _question(method: str, query: dict[str, str]) -> bytes:
    """Answer what asks and brings nothing: nothing is kept."""
    if method == "HEAD":
        return _response("200 OK")
    if method == "GET":
        return (
            _response("200 OK", _EMPTY_LISTING)
            if "list-type" in query
            else _response("404 Not Found", _NO_SUCH_KEY)
        )
    return _response("501 Not Implemented")


def _response(status: str, body: str = "") -> bytes:
    return (
        f'HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nETag: "0"\r\n'
        f"x-amz-bucket-region: us-east-1\r\n\r\n{body}"
    ).encode()
