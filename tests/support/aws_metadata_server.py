"""
The services of AWS that issue a role's credentials: instance metadata, STS, containers.

One handler for `tests.support.raw_http`. It refuses what the real services refuse: instance metadata
without a session token, and unknown web identities. It counts the credentials that it issues.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from tests.support.raw_http import Exchange

ROLE = "archive-role"
ROLE_ARN = "arn:aws:iam::123456789012:role/archive-role"
SESSION = "hush-session-token-of-the-metadata-service"
IDENTITY = "hush-web-identity-token"
CONTAINER_PATH = "/v2/credentials/of-this-task"
CONTAINER_TOKEN = "hush-authorization-of-the-container"
_TOKEN_PATH = "/latest/api/token"
_ROLES_PATH = "/latest/meta-data/iam/security-credentials/"


@dataclass
class CredentialService:
    """Issues access keys named `ASIA1`, `ASIA2` ..., with secrets that begin with `hush`."""

    lifetime_seconds: int = 3600
    has_role: bool = True
    refusal: tuple[str, bytes] | None = None
    """A status and a body to answer instead. A status of success replaces only answers with credentials."""
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    """While a test clears this event, no answer is sent."""
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first request has come."""
    known_keys: tuple[str, str] | None = None
    """An access key and its secret that a real server knows: they are issued without a session token."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    issued: int = 0

    def __post_init__(self) -> None:
        self.is_open.set()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        body = await exchange.read_body()
        self.requests.append((exchange.method, exchange.path))
        self.is_asked.set()
        await self.is_open.wait()
        issues = exchange.path not in {_TOKEN_PATH, _ROLES_PATH}
        if self.refusal is not None and (issues or not self.refusal[0].startswith("200")):
            await exchange.answer(*self.refusal)
        elif exchange.path == "/":
            await self._answer_sts(exchange, body)
        elif exchange.path == CONTAINER_PATH:
            await self._answer_container(exchange)
        elif exchange.path == _TOKEN_PATH:
            is_right = exchange.method == "PUT" and "x-aws-ec2-metadata-token-ttl-seconds" in exchange.headers
            await exchange.answer(*(("200 OK", SESSION.encode()) if is_right else ("400 Bad Request", b"")))
        else:
            await self._answer_metadata(exchange)

    async def _answer_metadata(self, exchange: Exchange) -> None:
        if exchange.headers.get("x-aws-ec2-metadata-token") != SESSION:
            await exchange.answer("401 Unauthorized")
        elif not self.has_role or exchange.path not in {_ROLES_PATH, _ROLES_PATH + ROLE}:
            await exchange.answer("404 Not Found", b"not found")
        elif exchange.path == _ROLES_PATH:
            await exchange.answer("200 OK", ROLE.encode())
        else:
            await exchange.answer("200 OK", json.dumps({"Code": "Success", **self._issue()}).encode())

    async def _answer_container(self, exchange: Exchange) -> None:
        if exchange.headers.get("authorization") != CONTAINER_TOKEN:
            await exchange.answer("403 Forbidden")
        else:
            await exchange.answer("200 OK", json.dumps(self._issue()).encode())

    async def _answer_sts(self, exchange: Exchange, body: bytes) -> None:
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        assert form["Action"] == "AssumeRoleWithWebIdentity"
        if form["WebIdentityToken"] != IDENTITY or form["RoleArn"] != ROLE_ARN:
            error = "<Error><Code>InvalidIdentityToken</Code><Message>no such identity</Message></Error>"
            await exchange.answer("400 Bad Request", f"<ErrorResponse>{error}</ErrorResponse>".encode())
            return
        keys = self._issue()
        names = {"AccessKeyId": "AccessKeyId", "SecretAccessKey": "SecretAccessKey"}
        names |= {"SessionToken": "Token", "Expiration": "Expiration"}
        values = "".join(f"<{name}>{keys[key]}</{name}>" for name, key in names.items())
        result = f"<AssumeRoleWithWebIdentityResult><Credentials>{values}</Credentials>"
        result += (
            f"<AssumedRoleUser><Arn>{ROLE_ARN}</Arn><AssumedRoleId>a:b</AssumedRoleId></AssumedRoleUser>"
        )
        result += "</AssumeRoleWithWebIdentityResult>"
        document = f"<AssumeRoleWithWebIdentityResponse>{result}</AssumeRoleWithWebIdentityResponse>"
        await exchange.answer("200 OK", document.encode(), Content_Type="text/xml")

    def _issue(self) -> dict[str, str]:
        self.issued += 1
        end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.lifetime_seconds)
        key, secret = self.known_keys or (f"ASIA{self.issued}", f"hush-secret-{self.issued}")
        return {
            "AccessKeyId": key,
            "SecretAccessKey": secret,
            "Token": "" if self.known_keys else f"hush-token-{self.issued}",
            "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
