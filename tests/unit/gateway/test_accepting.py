"""Clients that cannot be served when they come, and faults of the listener itself."""

from __future__ import annotations

import errno
import socket

import pytest

from tests.fakes.gateway_peers import closed, plain_answer, plain_request
from tests.support.certificate import write_certificate
from tests.support.raw_kafka import connected
from tests.support.tls_relay import presenting, trusting
from tieringd.gateway.connection import Connection, GatewaySettings
from tieringd.gateway.server import GatewayServer


class Unwatched(Connection):
    """A connection that the system does not watch, as when its user may watch no more."""

    def start(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def unwatched_first():
    """Return what makes the first connection one that cannot be watched."""
    kinds = iter([Unwatched])

    def make(*arguments):
        kind = next(kinds, Connection)
        return kind(*arguments)

    return make


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_client_that_cannot_be_watched_is_closed_and_others_are_served(broker, tmp_path, is_encrypted):
    """The client counts as broken, and the listener goes on."""
    certificate = write_certificate(tmp_path / "certificate.pem")
    tls = presenting(certificate) if is_encrypted else None
    trust = trusting(certificate) if is_encrypted else None
    settings = GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port, client_tls=tls)
    server = GatewayServer(settings, connect=unwatched_first())
    await server.start()
    try:
        async with connected(server.port, tls=trust) as first:
            assert await closed(first) == b""
        async with connected(server.port, tls=trust) as second:
            second.writer.write(plain_request(1))
            _, _, answers = await broker.next()
            answers.write(plain_answer(1))
            assert await second.frame() == plain_answer(1)
            assert server.counters.broken_connections == 1
            assert server.open_connections == 1
    finally:
        await server.close()
    assert server.buffered_bytes == 0


async def test_defect_that_a_client_meets_ends_its_connection_only(broker):
    """The connection is counted, and the listener serves the next client."""
    faults = [RuntimeError("a defect")]

    def connect(*arguments):
        if faults:
            raise faults.pop()
        return Connection(*arguments)

    server = GatewayServer(GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port), connect=connect)
    await server.start()
    async with connected(server.port) as first, connected(server.port) as second:
        assert await closed(first) == b""
        second.writer.write(plain_request(1))
        _, _, answers = await broker.next()
        answers.write(plain_answer(1))
        assert await second.frame() == plain_answer(1)
    assert server.counters.failed_connections == 1
    await server.close()


async def test_watching_ends_quietly_with_the_gateway(broker):
    """Closing is no fault."""
    server = GatewayServer(GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port))
    await server.start()
    await server.close()
    await server.watch()


async def test_client_that_went_before_it_was_served_is_counted(broker):
    """The socket of such a client takes no options any more, and no handshake on it is waited for."""
    server = GatewayServer(GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port))
    await server.start()
    with socket.socket() as gone:
        gone.close()
        server._take(gone, "127.0.0.1")
    assert server.counters.broken_connections == 1
    assert server.open_connections == 0
    await server.close()
