"""
The token services of Azure that an identity uses: the metadata service and Entra.

Both are one handler for `tests.support.raw_http`. The handler refuses what the real services refuse, and
counts the tokens that it issues. A test may tell it to fail instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from tests.support.raw_http import Exchange

RESOURCE = "https://storage.azure.com"
METADATA_PATH = "/metadata/identity/oauth2/token"


@dataclass
class TokenService:
    """Issues tokens named `secret-token-1`, `secret-token-2` ..."""

    lifetime_seconds: int = 3600
    client_ids: set[str] = field(default_factory=set)
    """The identities that a caller may name in a request."""
    has_own_identity: bool = True
    """Whether the machine has an identity of its own."""
    tenant: str = "tenant"
    assertion: str = ""
    """The assertion that a workload must send."""
    refusal: tuple[str, bytes, dict[str, str]] | None = None
    """A status, a body and headers to answer instead."""
    issued: list[str] = field(default_factory=list)
    requests: int = 0

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        body = await exchange.read_body()
        self.requests += 1
        if self.refusal is not None:
            status, document, headers = self.refusal
            await exchange.answer(status, document, Content_Type="application/json", **headers)
            return
        url = urlsplit(exchange.path)
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == METADATA_PATH:
            problem = self._metadata_problem(exchange, query)
        elif url.path == f"/{self.tenant}/oauth2/v2.0/token":
            problem = self._exchange_problem(form)
        else:
            problem = ("404 Not Found", "not_found", "no such path")
        if problem is None:
            await self._issue(exchange)
        else:
            status, code, text = problem
            document = json.dumps({"error": code, "error_description": text}).encode()
            await exchange.answer(status, document, Content_Type="application/json")

    def _metadata_problem(self, exchange: Exchange, query: dict[str, str]) -> tuple[str, str, str] | None:
        if exchange.method != "GET" or exchange.headers.get("metadata") != "true":
            return ("400 Bad Request", "invalid_request", "Required metadata header not specified")
        if query.get("resource") != RESOURCE or "api-version" not in query:
            return ("400 Bad Request", "invalid_request", "Required query variable is missing")
        known = query["client_id"] in self.client_ids if "client_id" in query else self.has_own_identity
        return None if known else ("400 Bad Request", "invalid_request", "Identity not found")

    def _exchange_problem(self, form: dict[str, str]) -> tuple[str, str, str] | None:
        expected = {
            "grant_type": "client_credentials",
            "scope": f"{RESOURCE}/.default",
            "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
        }
        if {name: form.get(name) for name in expected} != expected:
            return ("400 Bad Request", "invalid_request", "AADSTS900144: a parameter is missing")
        if form.get("client_id") not in self.client_ids:
            return ("400 Bad Request", "unauthorized_client", "AADSTS700016: no such application")
        if form.get("client_assertion") != self.assertion:
            return ("401 Unauthorized", "invalid_client", "AADSTS70021: no matching federated identity")
        return None

    async def _issue(self, exchange: Exchange) -> None:
        self.issued.append(f"secret-token-{len(self.issued) + 1}")
        document = {
            "access_token": self.issued[-1],
            "expires_in": self.lifetime_seconds,
            "resource": RESOURCE,
            "token_type": "Bearer",
        }
        await exchange.answer("200 OK", json.dumps(document).encode(), Content_Type="application/json")
