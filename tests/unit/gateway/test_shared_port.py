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


async def workers_on(stack, port, broker, **settings):
    """Start two servers on one port."""
    listener, fd, _ = port
    servers = []
    for own in range(2):
        counts = ConnectionCounts(fd, workers=2, own=own)
        shared = SharedPort(listener.dup(), counts)
        server = GatewayServer(
            GatewaySettings("127.0.0.1", 0, "127.0.0.1", broker.port, **settings), port=shared
        )
        await server.start()
        stack.push_async_callback(server.close, grace_seconds=0)
        servers.append(server)
    return servers


async def test_clients_are_spread_evenly(broker, port):
    """Also a few of them."""
    async with AsyncExitStack() as stack:
        servers = await workers_on(stack, port, broker)
        for number in range(1, 7):
            await stack.enter_async_context(connected(servers[0].port))
            async with asyncio.timeout(20):
                while sum(one.open_connections for one in servers) < number:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        assert [one.open_connections for one in servers] == [3, 3]
        assert [port[2].of(number) for number in range(2)] == [3, 3]
        assert port[2].total == 6


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
