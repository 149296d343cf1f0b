"""
The header of the PROXY protocol, version 2: a load balancer's word on where a connection comes from.

It comes before anything else, TLS included. Version 1, which is text, is not read. Additional fields after
the addresses are skipped.
"""

from __future__ import annotations

import asyncio
import struct
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

from tieringd.errors import ProtocolViolation

if TYPE_CHECKING:
    import socket

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
_HEAD: Final = struct.Struct(">12sBBH")
"""Signature, version and command, address family and transport, size of what follows."""
_LOCAL: Final = 0x20
"""Version 2, and a connection of the balancer's own, such as a check of health."""
_PROXY: Final = 0x21
"""Version 2, and a connection of a client."""
_UNSPECIFIED: Final = 0x00
_TCP_ADDRESSES: Final[dict[int, tuple[type[IPv4Address | IPv6Address], int, int]]] = {
    0x11: (IPv4Address, 4, 12),
    0x21: (IPv6Address, 16, 36),
}
"""TCP over IPv4 and IPv6: the kind of an address, its size, and the size of both addresses and ports."""
_BODY_BYTES_MAX: Final = 4096
"""Addresses take 36 bytes, and what balancers add a few hundred."""


async def proxied_host(sock: socket.socket, *, timeout_seconds: float) -> str | None:
    """
    Read the header from a new connection, and not one byte more. Return the address of the client's host.

    None means that the connection is the balancer's own, or that it does not know whose it is.

    Raises:
        EOFError: The connection ended before its first byte, as a check of health does.
        OSError: The connection is broken.
        ProtocolViolation: What comes is no header of version 2 for TCP.
        TimeoutError: The header was not whole in time.
    """
    async with asyncio.timeout(timeout_seconds):
        first = await _exactly(sock, _HEAD.size)
        signature, command, family, size = _HEAD.unpack(first)
        if signature != SIGNATURE or command not in {_LOCAL, _PROXY} or size > _BODY_BYTES_MAX:
            raise _violation("does not begin with a header of version 2")
        body = await _exactly(sock, size) if size else b""
    if command == _LOCAL or family == _UNSPECIFIED:
        return None
    if family not in _TCP_ADDRESSES:
        raise _violation(f"has a header for the family {family:#04x}, which is not TCP")
    kind, address_bytes, both_bytes = _TCP_ADDRESSES[family]
    if size < both_bytes:
        raise _violation(f"has a header of {size} bytes, too few for its addresses")
    return str(kind(body[:address_bytes]))


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        # What follows the header belongs to TLS or to Kafka, so no more than the header is taken.
        part = await loop.sock_recv(sock, size - len(data))
        if not part and not data and size == _HEAD.size:
            raise EOFError
        if not part:
            raise _violation("ended in its header")
        data += part
    return data


def _violation(what: str) -> ProtocolViolation:
    return ProtocolViolation(
        f"a connection {what}",
        hint="With gateway.proxy_protocol every connection comes from a load balancer that sends the PROXY "
        "protocol, version 2; set it to false where clients connect themselves",
    )
