"""Free TCP ports on loopback, for servers that cannot be told to pick one themselves."""

from __future__ import annotations

import random
import socket

_GRPC_OFFSET = 10_000
_LOWEST, _HIGHEST = 20_000, 32_000  # Below the range from which Linux picks outgoing ports (32768 up).


def free_ports(count: int) -> list[int]:
    """Return different ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def free_port_pairs(count: int) -> list[int]:
    """Return different ports that are free and whose gRPC companion (port + 10000) is free as well."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(_LOWEST, _HIGHEST), k=1000):
        if _is_free(port) and _is_free(port + _GRPC_OFFSET):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports between {_LOWEST} and {_HIGHEST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
