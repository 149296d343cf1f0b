"""Free TCP ports on loopback, for servers that cannot choose a port themselves."""

from __future__ import annotations

import os
import random
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_GRPC_OFFSET = 10_000
# All ports are below the range of outgoing ports in Linux (from 32768). A client could take a port of that
# range before the server starts, or while it restarts.
_SINGLE = range(12_000, 20_000)
_PAIRED = range(20_000, 32_768 - _GRPC_OFFSET)
_given: set[int] = set()
"""Ports that were returned. A process returns each port only once, since its server may start later."""
# Each of pytest's workers has its own ports: a server of another worker may not have started yet.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def free_ports(count: int) -> list[int]:
    """Return different ports that are free, and that the system gives to no client."""
    return _free(count, _SINGLE, companions=(0,))


def free_port_pairs(count: int) -> list[int]:
    """Return different free ports whose gRPC port (port + 10000) is free as well."""
    return _free(count, _PAIRED, companions=(0, _GRPC_OFFSET))


def _free(count: int, ports: Sequence[int], *, companions: Iterable[int]) -> list[int]:
    found: list[int] = []
    ours = ports[_WORKER::_WORKERS]
    for port in random.SystemRandom().sample(ours, k=len(ours)):
        if len(found) == count:
            break
        if port not in _given and all(_is_free(port + offset) for offset in companions):
            _given.add(port)
            found.append(port)
    if len(found) < count:
        raise RuntimeError(f"no {count} free ports between {min(ports)} and {max(ports)}")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
