"""Google's token endpoint for service accounts, on loopback. It verifies the assertions that it receives."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import jwt

if TYPE_CHECKING:
    from tests.support.raw_http import Exchange

ACCOUNT = "archiver@project.iam.gserviceaccount.com"


class GcsTokenEndpoint:
    """Issues `token-1` and so on for assertions that *public_key* verifies, or refuses everything."""

    def __init__(self, public_key):
        self.public_key = public_key
        self.assertions = []
        self.refusal: str | None = None
        """A status line to refuse with. The refusal quotes the assertion, unless `words` has others."""
        self.words: str | None = None

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        body = (await exchange.read_body()).decode()
        form = {name: value for name, (value,) in parse_qs(body).items()}
        assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
        self.assertions.append(form["assertion"])
        if self.refusal is not None:
            words = self.words or f"Bad signature of {form['assertion']}"
            said = {"error": "invalid_grant", "error_description": words}
            await self._answer(exchange, self.refusal, said)
            return
        url = f"http://{exchange.headers['host']}{exchange.path}"
        claims = jwt.decode(form["assertion"], self.public_key, algorithms=["RS256"], audience=url)
        assert (claims["iss"], claims["scope"]) == (
            ACCOUNT,
            "https://www.googleapis.com/auth/devstorage.read_write",
        )
        assert time.time() < claims["exp"] <= time.time() + 3600
        token = {"access_token": f"token-{len(self.assertions)}", "expires_in": 3600}
        await self._answer(exchange, "200 OK", token)

    async def _answer(self, exchange: Exchange, status: str, document: dict) -> None:
        headers = {"Content_Type": "application/json", "Retry_After": "3"}
        await exchange.answer(status, json.dumps(document).encode(), **headers)
