"""A socket that wakes the gateway only when much has come."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tieringd.gateway.wire import MemoryBudget, Wire

MUCH = 64 << 10


@pytest.fixture
def connected_sockets():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        ours.setblocking(False)
        yield ours, theirs


def acknowledges_at_once(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))


def acknowledge_late(sock: socket.socket) -> None:
    """Have the kernel wait for an answer that carries the acknowledgement, as after each request."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
    assert not acknowledges_at_once(sock)


async def test_socket_that_sleeps_acknowledges_at_once(connected_sockets):
    """Otherwise a sender that waits for the acknowledgement waits for a timer, about 10 ms each time."""
    ours, _ = connected_sockets
    wire = Wire(
        ours,
        asyncio.get_running_loop(),
        MemoryBudget(MUCH),
        on_readable=lambda: None,
        on_drained=lambda: None,
        on_lost=lambda: None,
        on_unreadable=lambda _: None,
    )
    for _ in range(2):
        acknowledge_late(ours)
        wire.wake_at(MUCH)
        assert acknowledges_at_once(ours)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == MUCH
    acknowledge_late(ours)
    wire.wake_at(1)
    assert not acknowledges_at_once(ours)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    wire.close()
