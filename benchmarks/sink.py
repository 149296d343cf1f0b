"""
A store that keeps no segment: it counts the bytes of each PUT and throws them away.

It speaks as much of three protocols as uploads need (`sink_answers`), over TLS if it is given a
certificate, and serves ranges of one object. It runs in a process of its own, one thread for each
connection. Without TLS the kernel discards the bodies (`recv` with MSG_TRUNC), so that it costs little
and the clients are what is measured; under TLS they have to be deciphered. Asked to verify, it reads
and hashes every body instead, and is slow.

Only topic manifests are kept, because a daemon reads them back and writes a missing one again.

It looks at no signature. An object comes in one request or in parts, always with a Content-Length;
anything else is answered with 501, which no client takes for success.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import resource
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from benchmarks.sink_answers import (
    BUCKET,
    google_object,
    other,
    parse_request,
    parts_begun,
    parts_completed,
    range_head,
    refused,
    response,
    served_data,
    split_google_body,
    stored,
    wrong_checksum,
)
from benchmarks.tls_connection import TlsConnection
from tieringd.formats.object_keys import TOPIC_MANIFESTS_PREFIX
from tieringd.storage.checked_puts import PROBE_PREFIX

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from benchmarks.certificate import Certificate
    from benchmarks.sink_answers import Request

__all__ = ["BUCKET", "Endpoint", "Received", "Sink"]

_MAX_RECEIVED_BYTES = 256 << 20
_MAX_HEAD_BYTES = 64 << 10
_RECEIVE_BUFFER_BYTES = 256 << 10
"""Left alone it grows to megabytes on loopback, and the sender pays for much of the receiving."""

_Client: TypeAlias = socket.socket | TlsConnection


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a sink."""

    port: int
    trust_file: Path | None = None
    """The authority of its certificate; None when it speaks without TLS."""

    @property
    def url(self) -> str:
        """Return its root."""
        return f"{'http' if self.trust_file is None else 'https'}://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Received:
    """What arrived under one key."""

    size_bytes: int
    sha256: str | None
    """None when the sink was not asked to verify."""

    @classmethod
    def of(cls, data: bytes, *, verify: bool) -> Self:
        """Return what should arrive of *data*."""
        return cls(len(data), hashlib.sha256(data).hexdigest() if verify else None)


class Sink:
    """The sink's process, as its parent sees it. A context manager."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, certificate), name="sink", daemon=True)
        self._process.start()
        theirs.close()
        self.port: int = self._connection.recv()
        self.endpoint = Endpoint(self.port, certificate.certificate_file if certificate else None)

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
    def __init__(self, certificate: Certificate | None) -> None:
        self.received: dict[str, Received] = {}
        self.is_verifying = False
        self.is_available = True
        self.first_put_at: float | None = None
        self._tls = None if certificate is None else _server_context(certificate)
        self._parts: dict[str, dict[int, _Part]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        # Inherited by each connection, and from then on fixed.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.port: int = self._listener.getsockname()[1]
        # Bodies are "received" into this and never touch it: with MSG_TRUNC nothing is written.
        self._nowhere = mmap.mmap(-1, _MAX_RECEIVED_BYTES)
        self._served_fd: int | None = None
        self._topic_manifests: dict[str, str] = {}
        self._lock = threading.Lock()

    def begin(self, *, is_verifying: bool) -> None:
        """Begin a run: forget all objects of the last one."""
        self.received, self._topic_manifests = {}, {}
        self.is_verifying, self.first_put_at = is_verifying, None

    def accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                client = connection if self._tls is None else TlsConnection(connection, self._tls)
                while (found := _read_head(client)) is not None and self.is_available:
                    head, begun = found
                    self._answer(client, parse_request(head), begun)
            except (ConnectionError, ssl.SSLError):
                return  # The client has gone; what it had sent in full is counted.

    def _answer(self, client: _Client, request: Request, begun: bytes) -> None:
        if request.fields.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        found = request.served_range()
        if found is not None:
            self._send_range(client, *found)
            return
        if request.is_put and PROBE_PREFIX in request.key:
            # A daemon asks with this object whether the store compares checksums. The stores that this sink
            # stands in for do, so nothing is read back from them.
            _read(client, begun, request.size_bytes)
            client.sendall(wrong_checksum())
            return
        if request.key.startswith(TOPIC_MANIFESTS_PREFIX) and request.method in {"PUT", "GET"}:
            client.sendall(self._topic_manifest(client, request, begun))
            return
        client.sendall(self._answer_upload(client, request, begun))

    def _topic_manifest(self, client: _Client, request: Request, begun: bytes) -> bytes:
        if request.is_put:
            self._topic_manifests[request.key] = _read(client, begun, request.size_bytes).decode()
            return stored(request)
        document = self._topic_manifests.get(request.key)
        return other(request) if document is None else response("200 OK", document)

    def _answer_upload(self, client: _Client, request: Request, begun: bytes) -> bytes:
        if not request.has_plain_body:
            return refused()
        if request.is_put:
            self._put(client, begun, request)
            return stored(request)
        if request.is_google_upload:
            return self._put_with_description(client, begun, request)
        if request.is_start_of_parts:
            self._parts[request.key] = {}
            return parts_begun(request)
        if request.is_end_of_parts:
            _read(client, begun, request.size_bytes)
            parts = self._parts.pop(request.key)
            self.received[request.key] = _received([parts[number] for number in sorted(parts)])
            return parts_completed(request)
        return other(request)

    def _send_range(self, client: _Client, position: int, size_bytes: int) -> None:
        client.sendall(range_head(position, size_bytes))
        if isinstance(client, TlsConnection):
            client.sendall(memoryview(served_data())[position : position + size_bytes])
            return
        end = position + size_bytes
        while position < end:
            position += os.sendfile(client.fileno(), self._served_file(), position, end - position)

    def _served_file(self) -> int:
        with self._lock:
            if self._served_fd is None:
                self._served_fd = os.memfd_create("served")
                os.pwrite(self._served_fd, served_data(), 0)
            return self._served_fd

    def _put_with_description(self, client: _Client, begun: bytes, request: Request) -> bytes:
        while (found := split_google_body(request, begun)) is None:
            chunk = client.recv(_MAX_HEAD_BYTES)
            if not chunk:
                raise ConnectionError
            begun += chunk
        description, content_at, after_bytes = found
        if PROBE_PREFIX in description["name"]:
            _read(client, begun, request.size_bytes)
            return wrong_checksum()
        size_bytes = request.size_bytes - content_at - after_bytes
        content = begun[content_at:]
        self.received[description["name"]] = _received([self._take(client, content[:size_bytes], size_bytes)])
        _read(client, content[size_bytes:], after_bytes)
        return google_object(description, size_bytes)

    def _put(self, client: _Client, begun: bytes, request: Request) -> None:
        if self.first_put_at is None and request.key.endswith(".log"):
            self.first_put_at = time.monotonic()
        taken = self._take(client, begun, request.size_bytes)
        if "partNumber" in request.query:
            self._parts[request.key][int(request.query["partNumber"])] = taken
        else:
            self.received[request.key] = _received([taken])

    def _take(self, client: _Client, begun: bytes, size_bytes: int) -> _Part:
        if self.is_verifying:
            return _Part(size_bytes, _read(client, begun, size_bytes))
        self._discard(client, size_bytes - len(begun))
        return _Part(size_bytes, None)

    def _discard(self, client: _Client, left: int) -> None:
        if isinstance(client, TlsConnection):
            scratch = memoryview(bytearray(min(left, _MAX_HEAD_BYTES)))
            while left:
                left -= _some(client.recv_into(scratch[:left]))
            return
        while left:
            left -= _some(
                client.recv_into(
                    self._nowhere, min(left, _MAX_RECEIVED_BYTES), socket.MSG_TRUNC | socket.MSG_WAITALL
                )
            )


def _run(connection: Connection, certificate: Certificate | None) -> None:
    server = _Server(certificate)
    threading.Thread(target=server.accept, daemon=True).start()
    connection.send(server.port)
    while True:
        try:
            question, argument = connection.recv()
        except EOFError:
            return
        answer: object = None
        if question == "begin":
            server.begin(is_verifying=argument)
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


def _server_context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate_file, certificate.key_file)
    # The same cipher for every client, whatever each would like best.
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def _some(count: int) -> int:
    if not count:
        raise ConnectionError
    return count


def _read_head(client: _Client) -> tuple[bytes, bytes] | None:
    """Return a request's head, and what came of its body in the same read; None at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = client.recv(_MAX_HEAD_BYTES)
        if not chunk:
            return None
        data += chunk
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _read(client: _Client, begun: bytes, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    data[: len(begun)] = begun
    view = memoryview(data)[len(begun) :]
    while view:
        view = view[_some(client.recv_into(view)) :]
    return data


def _received(parts: list[_Part]) -> Received:
    digest = hashlib.sha256()
    for part in parts:
        if part.data is None:
            return Received(sum(part.size_bytes for part in parts), None)
        digest.update(part.data)
    return Received(sum(part.size_bytes for part in parts), digest.hexdigest())
