"""
Sockets of the gateway until a connection takes them: options, the connection to the broker, TLS handshakes.

Handshakes wait for readiness of the socket itself, because the gateway uses no transports of asyncio.
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from aiohappyeyeballs import start_connection

from tieringd.storage.tls_transport import shaken

if TYPE_CHECKING:
    from tieringd.gateway.connection import GatewaySettings

BACKLOG: Final = 1024
"""How many clients the kernel lets wait until they are accepted."""
_LOCAL_SEND_BYTES: Final = 128 << 10
"""
The send buffer to a client on this machine, which the kernel doubles. The kernel copies sent bytes.

With a larger buffer the bytes have left the processor's cache before the client reads them. For clients
on other machines the kernel sizes the buffer itself.
"""


def prepare(sock: socket.socket) -> None:
    """Set the options that every connection of the gateway needs."""
    sock.setblocking(False)
    # Send small messages at once, and detect a peer whose machine is gone.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if ip_address(sock.getpeername()[0]).is_loopback:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)


async def connected(settings: GatewaySettings) -> socket.socket:
    """
    Return a connection to the broker, encrypted if the settings ask for it.

    Raises:
        OSError: The broker accepts no connection, or its certificate is not trusted.
        TimeoutError: The broker did not answer in time.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(settings.connect_timeout_seconds):
        addresses = await loop.getaddrinfo(
            settings.broker_host, settings.broker_port, type=socket.SOCK_STREAM
        )
        sock = await start_connection(addresses)
        try:
            prepare(sock)
            if settings.broker_tls is None:
                return sock
            name = settings.broker_server_name or settings.broker_host
            return await shaken(
                settings.broker_tls.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            )
        except BaseException:
            sock.close()
            raise


async def accepted(sock: socket.socket, settings: GatewaySettings) -> socket.socket:
    """
    Return a client's connection after its TLS handshake.

    Raises:
        OSError: The client speaks no accepted TLS version or cipher, or is gone.
        TimeoutError: The client was silent for too long.
    """
    assert settings.client_tls is not None, "a plain connection needs no handshake"
    async with asyncio.timeout(settings.connect_timeout_seconds):
        try:
            return await shaken(
                settings.client_tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            )
        except BaseException:
            sock.close()
            raise
