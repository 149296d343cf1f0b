"""
Opens the connections of `tls_transport` for aiohttp.

What a connection is, and what may be done with it, is said there; here are name, address and handshake.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import aiohappyeyeballs
import aiohttp

from tieringd.storage.tls_transport import TlsTransport

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable


class TlsConnector(aiohttp.TCPConnector):
    """
    Opens connections that can be lent to threads.

    Those through a proxy are the loop's own, as aiohttp makes them: the proxy's tunnel may itself
    be encrypted.
    """

    async def _wrap_create_connection(self, *args: Any, **kwargs: Any) -> Any:
        context, request = kwargs.get("ssl"), kwargs["req"]
        if not isinstance(context, ssl.SSLContext) or request.proxy is not None:
            return await super()._wrap_create_connection(*args, **kwargs)
        protocol = args[0]()
        # Each error means to aiohttp's callers what it means when aiohttp connects.
        try:
            async with asyncio.timeout(kwargs["timeout"].sock_connect):
                plain = await aiohappyeyeballs.start_connection(kwargs["addr_infos"], loop=self._loop)
                connection = await _shake_hands(context, plain, kwargs["server_hostname"])
        except ssl.SSLCertVerificationError as error:
            raise aiohttp.ClientConnectorCertificateError(request.connection_key, error) from error
        except ssl.SSLError as error:
            raise aiohttp.ClientConnectorSSLError(request.connection_key, error) from error
        except TimeoutError:
            raise
        except OSError as error:
            raise kwargs["client_error"](request.connection_key, error) from error
        return TlsTransport(connection, protocol), protocol


async def _shake_hands(context: ssl.SSLContext, plain: socket.socket, name: str | None) -> ssl.SSLSocket:
    """Return the encrypted connection over *plain*, which it takes over."""
    try:
        connection = context.wrap_socket(plain, server_hostname=name, do_handshake_on_connect=False)
    except BaseException:
        plain.close()
        raise
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                connection.do_handshake()
            except ssl.SSLWantReadError:
                await _until(connection, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _until(connection, loop.add_writer, loop.remove_writer)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


async def _until(connection: ssl.SSLSocket, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    number = connection.fileno()
    event = asyncio.Event()
    add(number, event.set)
    try:
        await event.wait()
    finally:
        remove(number)
