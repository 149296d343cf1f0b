"""
Hosts that the kernel does not answer for a moment: real sockets and the kernel's own filter.

On loopback the kernel handles a SYN while `connect` sends it. So a connection that is established after
another one was begun shows what has become of the first.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address

import pytest

from tests.fakes.gateway_peers import running
from tests.fakes.log_lines import listening
from tests.support.archive_endpoints import until
from tests.support.raw_kafka import connected
from tests.unit.daemon.test_worker_pool import pool_of
from tests.unit.gateway.test_connection_rates import SLOW, connect_until_full, refused, served
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.server import GatewayServer
from tieringd.gateway.shared_port import ConnectionCounts, SharedPort, listening_socket
from tieringd.gateway.unanswered_hosts import HOSTS_MAX, UnansweredHosts, address_of, filter_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
LONG = 60.0
"""Seconds that no test lasts."""
SO_GET_FILTER = 26


def has_filter(sock):
    """Say whether the kernel runs a filter for *sock*: it would not fit into the answer's four bytes."""
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, SO_GET_FILTER))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return True


def knocking(listener, host):
    """Begin to connect from *host*, and return the socket without waiting."""
    client = socket.socket(listener.family)
    client.bind((host, 0))
    client.setblocking(False)
    with suppress(BlockingIOError):
        client.connect(listener.getsockname()[:2])
    return client


def is_answered(listener, host):
    """Say whether the kernel answers *host*."""
    with knocking(listener, host):
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return False
    return True


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request):
    """Give a listening socket."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as listener:
        listener.setblocking(False)
        yield listener


def unanswered(listener, *, seconds=LONG):
    """Make the filter of a socket."""
    return UnansweredHosts(listener, asyncio.get_running_loop(), seconds=seconds)


async def test_host_is_not_answered_and_others_are():
    """What the host has connected already goes on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        hosts = unanswered(listener)
        with knocking(listener, "127.0.0.2") as early, listener.accept()[0] as accepted:
            assert hosts.add("127.0.0.2")
            assert not hosts.add("127.0.0.2")
            assert has_filter(listener)
            assert not is_answered(listener, "127.0.0.2")
            assert is_answered(listener, "127.0.0.3")
            early.send(b"a")
            accepted.setblocking(True)
            assert accepted.recv(1) == b"a"
        hosts.close()


async def test_host_is_answered_when_its_time_is_over():
    """A host whose time goes on stays in the filter; the last one takes the filter along."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        hosts = unanswered(listener, seconds=0.01)
        hosts.add("127.0.0.2")
        hosts._seconds = LONG
        hosts.add("127.0.0.3")
        await until(lambda: len(hosts) == 1)
        assert is_answered(listener, "127.0.0.2")
        assert not is_answered(listener, "127.0.0.3")
        hosts.close()
        hosts = unanswered(listener, seconds=0.01)
        hosts.add("127.0.0.2")
        await until(lambda: not len(hosts))
        assert not has_filter(listener)
        assert is_answered(listener, "127.0.0.2")


async def test_host_that_is_not_answered_comes_through_by_itself():
    """Its kernel sends the SYN again when the filter has gone: the client waits, and sees no error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        hosts = unanswered(listener)
        hosts.add("127.0.0.2")
        with knocking(listener, "127.0.0.2") as client:
            with pytest.raises(BlockingIOError):
                listener.accept()
            hosts.close()
            async with asyncio.timeout(60):
                accepted, address = await asyncio.get_running_loop().sock_accept(listener)
            with accepted:
                assert address == client.getsockname()


async def test_each_kind_of_address_is_told_from_others(listener):
    """A whole filter, of both families: the last host in it is found, and its neighbour is not."""
    own = listener.getsockname()[0]
    hosts = unanswered(listener)
    for number in range(HOSTS_MAX - 1):
        assert hosts.add(f"2001:db8::{number:x}" if number % 2 else f"127.0.1.{number}")
    assert is_answered(listener, own)
    assert hosts.add(own)
    assert not is_answered(listener, own)
    # A host more than fits is refused by the gateway alone.
    assert not hosts.add("127.0.0.9")
    assert len(hosts) == HOSTS_MAX
    hosts.close()
    assert is_answered(listener, own)


async def test_words_of_an_address_of_ipv6_are_all_compared():
    """Hosts that differ from the client in one of the four words do not keep it out."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        listener.setblocking(False)
        hosts = unanswered(listener)
        for other in ("1::1", "0:0:1::1", "::1:0:0:1", "::1:1", "::2"):
            hosts.add(other)
        assert is_answered(listener, "::1")


async def test_address_of_ipv4_on_a_socket_of_ipv6_is_found():
    """The client's segments are of IPv4, and its address is written as one of IPv6."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        listener.setblocking(False)
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
            accepted, (host, *_) = listener.accept()
            accepted.close()
        assert host == "::ffff:127.0.0.1"
        hosts = unanswered(listener)
        hosts.add(host)
        with socket.socket() as client:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.connect(("127.0.0.1", listener.getsockname()[1]))
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_program_of_a_whole_filter_is_short_enough():
    """A kernel takes 4096 instructions, and a test in it skips 255 at most."""
    program = filter_of([ip_address(number << 64 | 1) for number in range(1 << 40, (1 << 40) + HOSTS_MAX)])
    assert len(program) <= 4096
    assert all(max(one[1], one[2]) <= 255 for one in program)
    assert address_of("fe80::1%eth0").packed == ip_address("fe80::1").packed


async def test_kernel_that_takes_no_filter_leaves_the_refusals():
    """It is said once, with what may be the reason. A socket that is closed stands for such a kernel."""
    with listening() as lines, socket.create_server(("127.0.0.1", 0)) as listener:
        hosts = unanswered(listener)
        listener.close()
        assert not hosts.add("127.0.0.2")
        assert not hosts.add("127.0.0.3")
        assert len(hosts) == 0
    (line,) = lines.entries
    assert "SO_ATTACH_FILTER" in line["hint"]


async def test_gateway_does_not_answer_a_host_that_it_has_refused(broker):
    """The host's next SYN reaches no accept, while another host is served. Without the filter it does."""
    async with running(broker, **SLOW) as server:
        listener, server._unanswered._seconds = server._listened.listener, LONG
        await connect_until_full(broker, server, "127.0.0.2")
        await refused(server, "127.0.0.2")
        assert server.counters.unanswered_hosts == 1
        assert has_filter(listener)
        with knocking(listener, "127.0.0.2"):
            async with connected(server.port, host="127.0.0.3") as other:
                await served(broker, other, 9)
                assert not any(has_filter(one) for one in sockets_of(server))
            # The SYN came before the other host's, and was not accepted.
            assert server.counters.accepted_connections == 4
            assert server.counters.refused_by_host_rate == 1
            server._unanswered.close()
            await until(lambda: server.counters.refused_by_host_rate == 2)


def sockets_of(server):
    """Return the sockets of the clients that are connected to *server*."""
    return [one._client.sock for one in server._connections]


async def test_killed_worker_leaves_no_filter():
    """The pool takes it away: the worker's timers have ended with it."""
    async with pool_of("serving", count=1) as pool:
        await pool.start()
        (first,) = pool.workers
        unanswered(pool._listener).add("127.0.0.2")
        os.kill(first.process.pid, signal.SIGKILL)
        await until(lambda: pool.workers and first not in pool.workers)
        assert not has_filter(pool._listener)


async def test_gateway_that_ends_takes_its_filter_away_and_one_that_starts_finds_none(broker):
    """The listening socket lives on in the daemon when a worker ends."""
    async with gateway_on_a_shared_socket(broker) as (server, listener):
        server._unanswered._seconds = LONG
        await connect_until_full(broker, server, "127.0.0.2")
        await refused(server, "127.0.0.2")
        assert has_filter(listener)


@asynccontextmanager
async def gateway_on_a_shared_socket(broker):
    """Serve as a worker does, and close the listening socket at the end only."""
    with listening_socket("127.0.0.1", 0) as listener:
        fd, _ = ConnectionCounts.create(1)
        port = SharedPort(listener.dup(), ConnectionCounts(fd, workers=1, own=0))
        settings = GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port, **SLOW)
        unanswered(listener).add("127.0.0.2")
        server = GatewayServer(settings, port=port)
        await server.start()
        assert not has_filter(listener)
        yield server, listener
        await server.close(grace_seconds=0)
        assert not has_filter(listener)
