"""The network that tests cut: what is held, what passes, and what is known of who connects."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.support.connections import accepting
from tests.support.network import Network

PIECE = b"0123456789"
NO_ONES_PORT = 1


@pytest.fixture
async def echo_port():
    """Give the port of a server that sends back what it gets."""

    async def echo(reader, writer):
        while piece := await reader.read(100):
            writer.write(piece)
            await writer.drain()

    async with accepting(echo) as port:
        yield port


@pytest.fixture
async def network(echo_port):
    """Give a network with two relays to the echo server, and their ports."""
    found = Network()
    async with found.relay("left", 1, echo_port) as left, found.relay("right", 2, echo_port) as right:
        yield found, left, right
        found.mend()


async def connected(port):
    return await asyncio.open_connection("127.0.0.1", port)


async def echoed(reader, writer) -> bytes:
    writer.write(PIECE)
    return await reader.readexactly(len(PIECE))


async def test_cut_holds_bytes_and_new_connections_until_it_is_mended(network):
    """No connection ends; other relays pass everything; afterwards all that was held arrives."""
    net, left, right = network
    old, other = await connected(left), await connected(right)
    assert await echoed(*old) == PIECE
    net.cut(lambda passage: passage.kind == "left")
    new = await connected(left)
    waiting = [asyncio.ensure_future(echoed(*one)) for one in (old, new)]
    for _ in range(20):
        assert await echoed(*other) == PIECE
    assert not any(one.done() for one in waiting)
    assert net.held_connections == 2
    net.mend()
    assert await asyncio.gather(*waiting) == [PIECE, PIECE]
    for _, writer in (old, new, other):
        writer.close()


async def test_connection_knows_the_process_at_its_other_end(network):
    """The same relay can be cut for one process and not for another."""
    net, left, _ = network
    found = []

    def is_cut(passage):
        found.append(passage.source([os.getppid(), os.getpid()]))
        return False

    net.cut(is_cut)
    reader, writer = await connected(left)
    assert await echoed(reader, writer) == PIECE
    assert set(found) == {os.getpid()}
    writer.close()


async def test_relay_to_a_part_that_does_not_listen_ends_the_connection(network):
    """The peer tries again, as it does with the part itself."""
    net, *_ = network
    async with net.relay("gone", 3, NO_ONES_PORT) as relay_port:
        reader, writer = await connected(relay_port)
        assert await reader.read() == b""
        writer.close()
