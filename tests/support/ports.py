"""Free TCP ports on loopback, for servers that cannot be told to pick one themselves."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_GRPC_OFFSET = 10_000
# All of them below the range from which Linux picks outgoing ports (32768 up): a port of that range may be a
# client's before its server has started, or while it restarts.
_SINGLE = range(12_000, 20_000)
_PAIRED = range(20_000, 32_768 - _GRPC_OFFSET)
_given: set[int] = set()
"""Each is given once in a process, also while its server is yet to start."""


def free_ports(count: int) -> list[int]:
    """Return different ports that were free a moment ago, and that no client gets by itself."""
    return _free(count, _SINGLE, companions=(0,))


def free_port_pairs(count: int) -> list[int]:
    """Return different ports likewise whose gRPC companion (port + 10000) is free as well."""
    return _free(count, _PAIRED, companions=(0, _GRPC_OFFSET))


def _free(count: int, ports: Collection[int], *, companions: Iterable[int]) -> list[int]:
    found: list[int] = []
    for port in random.SystemRandom().sample(list(ports), k=len(ports)):
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
