"""Several workers that accept from one port: clients are spread evenly, and the limit is one for all."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.fakes.gateway_peers import closed
from tests.support.raw_kafka import connected
from tieringd.errors import ConfigError
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.server import GatewayServer
from tieringd.gateway.shared_port import ConnectionCounts, SharedPort, listening_socket


@pytest.fixture
async def port(request):
    """Give a listening socket and the memory of the counts of two workers."""
    listener = listening_socket("127.0.0.1", 0)
    fd, counts = ConnectionCounts.create(2)
    yield listener, fd, counts
    listener.close()


async def worker_on(stack, port, broker, own, **settings):
    """Start one server on the port."""
    listener, fd, _ = port
    counts = ConnectionCounts(fd, workers=2, own=own)
    shared = SharedPort(listener.dup(), counts)
    server = GatewayServer(GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port, **settings), port=shared)
    await server.start()
    stack.push_async_callback(server.close, grace_seconds=0)
    return server


async def workers_on(stack, port, broker, **settings):
    """Start two servers on one port."""
    return [await worker_on(stack, port, broker, own, **settings) for own in range(2)]


async def connect_until(stack, servers, wanted):
    """Connect one client after another until so many are accepted."""
    while sum(one.open_connections for one in servers) < wanted:
        before = sum(one.open_connections for one in servers)
        await stack.enter_async_context(connected(servers[0].port))
        async with asyncio.timeout(20):
            while sum(one.open_connections for one in servers) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_worker_with_fewer_clients_goes_first(broker, port):
    """Clients are spread evenly, also a few of them, and a new worker gets its part."""
    async with AsyncExitStack() as stack:
        servers = [await worker_on(stack, port, broker, 0)]
        await connect_until(stack, servers, 5)
        servers.append(await worker_on(stack, port, broker, 1))
        await connect_until(stack, servers, 10)
        assert [one.open_connections for one in servers] == [5, 5]
        assert [port[2].of(number) for number in range(2)] == [5, 5]
        assert port[2].total == 10


async def test_limit_of_connections_is_one_for_all(broker, port):
    """It is not divided: a client is refused when all places of all workers are taken, and not before."""
    async with AsyncExitStack() as stack:
        servers = await workers_on(stack, port, broker, max_connections=5, max_connections_per_host=5)
        for _ in range(5):
            await stack.enter_async_context(connected(servers[0].port))
        async with connected(servers[0].port) as refused:
            assert await closed(refused) == b""
        assert sum(one.open_connections for one in servers) == 5
        assert sum(one.counters.refused_connections for one in servers) == 1


async def test_worker_takes_clients_of_one_that_has_ended_or_is_stuck(broker, port):
    """Its number is cleared; and a worker that gives way does not wait for ever."""
    async with AsyncExitStack() as stack:
        servers = await workers_on(stack, port, broker)
        await servers[0].close(grace_seconds=0)
        for number in range(1, 4):
            await stack.enter_async_context(connected(servers[1].port))
            async with asyncio.timeout(20):
                while port[2].of(1) < number:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        port[2].clear(0)
        assert port[2].total == 3


def test_address_that_cannot_be_used_is_a_fault_of_the_configuration():
    """The daemon ends with what to do."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:1"):
        listening_socket("192.0.2.1", 1)
