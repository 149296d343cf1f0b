"""Cached files that cannot be read while their bytes go to a client."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from tests.fakes.gateway_peers import (
    TopicArchive,
    closed,
    fetch,
    fetched,
    plain_answer,
    plain_request,
    running,
)
from tests.fakes.log_lines import listening
from tests.support.certificate import write_certificate
from tests.support.raw_kafka import connected
from tests.support.tls_relay import presenting, trusting
from tieringd.endpoint.endpoint_connection import EndpointConnection
from tieringd.endpoint.request_handlers import EndpointResponse
from tieringd.endpoint.users_file import UserDirectory
from tieringd.formats.kafka_wire.fetch import PartitionData
from tieringd.formats.kafka_wire.pieces import FileRegion
from tieringd.gateway.archive_answers import ArchivedFetch
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.server import GatewayServer
from tieringd.gateway.wire import MemoryBudget, Wire

PROMISED = 8 << 20
EVENT = "a client's answer is cut off: a cached file cannot be read"


class FileArchive(TopicArchive):
    """An archive that answers with parts of one file, and keeps the reports on that file."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.told = []

    async def fetch(self, question):
        descriptor = os.open(self.path, os.O_RDONLY)

        def tell():
            # The file is still open here, so the callback can read its status.
            self.told.append(os.fstat(descriptor))

        records = (FileRegion(descriptor, 0, PROMISED, tell),)
        answers = {key: PartitionData(9, 9, 0, records=records) for key in question.partitions}
        return ArchivedFetch(answers, lambda: os.close(descriptor))


@pytest.fixture(params=["short", "unreadable"])
def path(request, tmp_path):
    """Give a file that ends too early, and one that opens and cannot be read at its beginning."""
    if request.param == "unreadable":
        return Path("/proc/self/mem")
    path = tmp_path / "chunk"
    path.write_bytes(bytes(PROMISED - 1))
    return path


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_unreadable_file_ends_the_connection_and_is_told(broker, tmp_path, path, is_encrypted):
    """The log, the counter and the callback of the slice each hear of it once, while the file is open."""
    certificate = write_certificate(tmp_path / "certificate.pem")
    settings = {"client_tls": presenting(certificate)} if is_encrypted else {}
    trust = trusting(certificate) if is_encrypted else None
    archive = FileArchive(path)
    with listening() as lines:
        async with running(broker, archive, **settings) as server:
            async with connected(server.port, tls=trust) as client:
                client.send(fetch())
                head, _, answers = await broker.next()
                answers.write(fetched(head, {"old": {0: {"error_code": 1}}}))
                assert len(await closed(client)) < PROMISED + 100
            assert len(archive.told) == 1
            assert lines.events.count(EVENT) == 1
            assert server.counters.broken_connections == 1
            async with connected(server.port, tls=trust) as other:
                other.writer.write(plain_request(1))
                _, _, answers = await broker.next()
                answers.write(plain_answer(1))
                assert await other.frame() == plain_answer(1)


async def test_client_that_goes_says_nothing_of_the_file(tmp_path):
    """The file is as good as it was: only the peer is lost."""
    path = tmp_path / "chunk"
    path.write_bytes(bytes(PROMISED))
    told = []
    ours, theirs = socket.socketpair()
    theirs.close()
    wire = Wire(
        ours,
        asyncio.get_running_loop(),
        MemoryBudget(PROMISED),
        on_readable=lambda: None,
        on_drained=lambda: None,
        on_lost=lambda: told.append("lost"),
        on_unreadable=lambda _: told.append("unreadable"),
    )
    with path.open("rb") as file:
        part = FileRegion(file.fileno(), 0, PROMISED, lambda: told.append("hook"))
        wire.send_pieces([part], lambda: told.append("released"))
        wire.close()
    assert told == ["lost", "released"]


class CountingWire(Wire):
    """Keeps what each call to send from a file has sent."""

    def __init__(self, *arguments, **callbacks):
        super().__init__(*arguments, **callbacks)
        self.sent = []

    def _send_file(self, piece):
        self.sent.append(super()._send_file(piece))
        return self.sent[-1]


async def test_full_socket_is_not_asked_again(tmp_path):
    """It is left alone until it has room: each call costs, and another thread may take the interpreter."""
    path = tmp_path / "chunk"
    path.write_bytes(bytes(PROMISED))
    drained = asyncio.Event()
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setblocking(False)
    wire = CountingWire(
        ours,
        asyncio.get_running_loop(),
        MemoryBudget(PROMISED),
        on_readable=lambda: None,
        on_drained=drained.set,
        on_lost=lambda: None,
        on_unreadable=lambda _: None,
    )
    with path.open("rb") as file, theirs:
        wire.send_pieces([FileRegion(file.fileno(), 0, PROMISED)], lambda: None)
        assert 0 < sum(wire.sent) < PROMISED
        received = 0
        while received < PROMISED:
            received += len(await asyncio.get_running_loop().sock_recv(theirs, PROMISED))
        await drained.wait()
        wire.close()
    assert 0 not in wire.sent


async def test_unreadable_file_ends_a_connection_of_the_archive_endpoint(path):
    """The archive endpoint has no broker, and the same files."""
    told = []

    class FileApi:
        """Answers everything with the file."""

        async def answer(self, head, frame, access, login, *, is_connected):
            descriptor = os.open(path, os.O_RDONLY)
            part = FileRegion(descriptor, 0, PROMISED, lambda: told.append(head.correlation_id))
            return EndpointResponse((part,), lambda: os.close(descriptor))

    server = GatewayServer(
        GatewaySettings("127.0.0.1", 0),
        connect=lambda *arguments: EndpointConnection(
            *arguments, api=FileApi(), users=UserDirectory(None), offers_plain=False
        ),
    )
    await server.start()
    with listening() as lines:
        async with connected(server.port) as client:
            client.writer.write(plain_request(8))
            assert len(await closed(client)) < PROMISED
    await server.close()
    assert told == [8]
    assert lines.events.count(EVENT) == 1
    assert server.counters.broken_connections == 1
