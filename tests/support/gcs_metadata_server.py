"""
The access tokens of a Google Compute Engine instance's metadata server, on loopback.

The server requires the header `Metadata-Flavor: Google`, and numbers its tokens. A test may make it refuse or
delay its answers. Nothing here depends on pytest.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.support.raw_http import Exchange, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"


class GcsMetadataServer:
    """Issues `token-1`, `token-2` and so on, each valid for *expires_in* seconds."""

    def __init__(self, *, expires_in: int = 3600) -> None:
        self.expires_in = expires_in
        self.issued = 0
        self.requests = 0
        self.refusal: str | None = None
        """A status line to answer with instead of a token."""
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.host = ""

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        self.requests += 1
        self.is_asked.set()
        await self.may_answer.wait()
        if exchange.headers.get("metadata-flavor") != "Google":
            await exchange.answer("403 Forbidden", b"Missing Metadata-Flavor:Google header.")
        elif exchange.path.partition("?")[0] != TOKEN_PATH or exchange.method != "GET":
            await exchange.answer("404 Not Found", Metadata_Flavor="Google")
        elif self.refusal is not None:
            await exchange.answer(self.refusal, b"<html>no</html>", Metadata_Flavor="Google")
        else:
            self.issued += 1
            document = {
                "access_token": f"token-{self.issued}",
                "expires_in": self.expires_in,
                "token_type": "Bearer",
            }
            headers = {"Content_Type": "application/json", "Metadata_Flavor": "Google"}
            await exchange.answer("200 OK", json.dumps(document).encode(), **headers)


@asynccontextmanager
async def running_metadata_server(*, expires_in: int = 3600) -> AsyncIterator[GcsMetadataServer]:
    """Run a server in the context. Its attribute `host` is its address and port."""
    server = GcsMetadataServer(expires_in=expires_in)
    async with serving(server) as url:
        server.host = url.removeprefix("http://")
        yield server
