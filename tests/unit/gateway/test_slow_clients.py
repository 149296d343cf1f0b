"""Clients that do nothing, or do it slowly, are closed; those that wait for others are not."""

from __future__ import annotations

import asyncio
import struct
from contextlib import AsyncExitStack, suppress

import pytest

from tests.fakes.gateway_peers import MIB, closed, plain_answer, plain_request, running
from tests.support.archive_endpoints import until
from tests.support.raw_kafka import connected

SOON = {"slow_timeout_seconds": 0.3}


def authentication(api_key):
    return struct.pack(">ihhih", 20, api_key, 1, api_key, -1) + bytes(10)


async def served(broker, client, number=1):
    """Send a request, and have the broker answer it."""
    client.writer.write(plain_request(number))
    head, _, answers = await broker.next()
    answers.write(plain_answer(head.correlation_id))
    assert await client.frame() == plain_answer(number)


async def test_client_that_sends_nothing_is_closed(broker):
    """A silent client takes a place that others need."""
    async with running(broker, **SOON) as server, connected(server.port) as client:
        assert await closed(client) == b""
        assert server.counters.slow_connections == 1


async def test_client_that_does_not_finish_to_authenticate_is_closed(broker):
    """The handshake is answered, and nothing comes after it."""
    async with running(broker, **SOON) as server, connected(server.port) as client:
        client.writer.write(authentication(17))
        head, _, answers = await broker.next()
        answers.write(plain_answer(head.correlation_id))
        await client.frame()
        assert await closed(client) == b""
        assert server.counters.slow_connections == 1


@pytest.mark.parametrize("is_first", [True, False])
async def test_client_that_sends_a_byte_at_a_time_is_closed(broker, is_first):
    """The client's request would never end, and each byte keeps it from being idle."""
    async with running(broker, **SOON) as server, connected(server.port) as client:
        if not is_first:
            await served(broker, client)
        frame = struct.pack(">ihhih", 4000, 2, 7, 1, -1) + bytes(1000)
        with suppress(ConnectionError):
            for at in range(100):
                client.writer.write(frame[at : at + 1])
                await client.writer.drain()
                await asyncio.sleep(0.01)
        await until(lambda: not server.open_connections)
        assert server.counters.slow_connections == 1


async def test_client_that_takes_no_response_is_closed(broker):
    """The memory for the client is given back."""
    async with running(broker, **SOON) as server, connected(server.port) as client:
        client.writer.write(plain_request(1))
        head, _, answers = await broker.next()
        client.writer.transport.pause_reading()
        answers.write(plain_answer(head.correlation_id, size=64 * MIB))
        await until(lambda: not server.open_connections)
        assert server.counters.slow_connections == 1
        assert server.buffered_bytes == 0


async def test_client_that_waits_for_the_broker_is_not_slow(broker):
    """A client without a request is not slow either."""
    async with running(broker, **SOON) as server, AsyncExitStack() as stack:
        # Each asks as soon as it is connected: a client without any request would be slow.
        waiting = await stack.enter_async_context(connected(server.port))
        waiting.writer.write(plain_request(2))
        head, _, answers = await broker.next()
        resting = await stack.enter_async_context(connected(server.port))
        await served(broker, resting)
        await asyncio.sleep(1)
        answers.write(plain_answer(head.correlation_id))
        assert await waiting.frame() == plain_answer(2)
        await served(broker, resting, 3)
        assert server.counters.slow_connections == 0


async def test_one_host_does_not_take_all_places(broker):
    """A host has half of the places by default, and gives them back when its connections close."""
    async with running(broker, max_connections=6) as server, AsyncExitStack() as stack:
        for _ in range(2):
            async with AsyncExitStack() as inner:
                clients = [await inner.enter_async_context(connected(server.port)) for _ in range(3)]
                for number, client in enumerate(clients):
                    await served(broker, client, number)
                async with connected(server.port) as fourth:
                    assert await closed(fourth) == b""
            await until(lambda: not server.open_connections)
        other = await stack.enter_async_context(connected(server.port))
        await served(broker, other)
        assert server.counters.refused_connections == 2
