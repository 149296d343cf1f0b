"""
TLS for servers and proxies with plain HTTP: a relay that adds or removes TLS, and passes bytes unchanged.

    async with relay(server_url, connect=trusting(certificate)) as plain_url: ...
    async with relay(plain_url, accept=presenting(certificate)) as tls_url: ...
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tests.support.connections import accepting, end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_CHUNK = 64 << 10


def presenting(certificate: Path) -> ssl.SSLContext:
    """Return a TLS context for a server with *certificate*."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def trusting(certificate: Path) -> ssl.SSLContext:
    """Return a TLS context for a client that trusts *certificate*."""
    return ssl.create_default_context(cafile=certificate)


@asynccontextmanager
async def relay(
    upstream_url: str, *, accept: ssl.SSLContext | None = None, connect: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Forward each connection to the server at *upstream_url*, and yield the URL to use instead."""
    upstream = urlsplit(upstream_url)

    async def connected(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(upstream.hostname, upstream.port, ssl=connect)
        try:
            await _until_one_ends(_pump(client, to_server), _pump(server, to_client))
        finally:
            await end(to_server)

    async with accepting(connected, tls=accept) as port:
        yield f"{'http' if accept is None else 'https'}://127.0.0.1:{port}"


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_CHUNK):
            writer.write(piece)
            await writer.drain()


async def _until_one_ends(*pumps) -> None:
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
