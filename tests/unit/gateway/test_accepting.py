"""Clients that cannot be served when they come, and faults of the listener itself."""

from __future__ import annotations

import asyncio
import errno
import socket
import warnings
from contextlib import suppress

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


class Defective(Connection):
    """A connection that cannot start because of a defect."""

    def start(self):
        raise RuntimeError("a defect")


def refused(*_):
    """Fail to make a connection because of a defect."""
    raise RuntimeError("a defect")


@pytest.mark.parametrize("fault", [refused, Defective])
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_defect_that_a_client_meets_ends_its_connection_only(broker, tmp_path, is_encrypted, fault):
    """The connection is counted, and the listener serves the next client."""
    certificate = write_certificate(tmp_path / "certificate.pem")
    tls = presenting(certificate) if is_encrypted else None
    trust = trusting(certificate) if is_encrypted else None
    faults = [fault]

    def connect(*arguments):
        return (faults.pop() if faults else Connection)(*arguments)

    settings = GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port, client_tls=tls)
    server = GatewayServer(settings, connect=connect)
    await server.start()
    async with connected(server.port, tls=trust) as first:
        assert await closed(first) == b""
    async with connected(server.port, tls=trust) as second:
        second.writer.write(plain_request(1))
        _, _, answers = await broker.next()
        answers.write(plain_answer(1))
        assert await second.frame() == plain_answer(1)
        assert server.open_connections == 1
    assert server.counters.failed_connections == 1
    await server.close()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("kind", ["plain", "proxied", "encrypted"])
async def test_client_that_comes_while_the_gateway_closes_is_closed_by_it(broker, tmp_path, kind, turns):
    """
    The socket has an owner that closes it, however far its accept has got. The collector finds none.

    The client is in the kernel's queue. Each turn of the event loop takes it a step further.
    """
    certificate = write_certificate(tmp_path / "certificate.pem")
    settings = GatewaySettings(
        "127.0.0.1",
        0,
        "127.0.0.1",
        broker.port,
        proxy_protocol=kind == "proxied",
        client_tls=presenting(certificate) if kind == "encrypted" else None,
    )
    server = GatewayServer(settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        await server.start()
        await asyncio.sleep(0)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close(grace_seconds=0)
            client.settimeout(30)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert server.open_connections == 0
        assert not server._hosts
    assert [one for one in caught if "unclosed" in str(one.message)] == []


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
