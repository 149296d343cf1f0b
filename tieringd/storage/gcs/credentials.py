"""
Access tokens for Google Cloud Storage: fetched, refreshed before they expire, dropped when refused.

gcloud-aio knows how to request a token (a signed assertion, or the metadata server). This module decides
when to request one: all waiting callers share one refresh, a cancelled caller does not cancel it for the
others, and a refresh is not retried here (the library repeats five times over a minute;
`storage.resilient` has the deadline).

No token, assertion or key ever gets into an error: the text of a token endpoint is reduced to its code
and its description, and foreign exceptions that could quote more are not chained.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from gcloud.aio.auth import Token

from tieringd.errors import ConfigError, StorageDenied, StorageUnavailable, TieringError
from tieringd.storage.calls import TRUST_HINT, clock_hint, retry_after_seconds
from tieringd.storage.single_flight import Flight, SingleFlight

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
DEFAULT_METADATA_HOST = "metadata.google.internal"

_METADATA_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
_TIMEOUT_SECONDS = 10
_PAUSE_SECONDS = 10.0
"""Minimum between attempts to refresh early. The old token still works, so there is no hurry."""

_SECRET = re.compile(r"[\w./+=-]{40,}")
_HEADER_SAFE = re.compile(r"[!-~]+")
_BUSY_STATUSES = {408, 429}
_REFUSED_FROM, _FAILED_FROM = 400, 500
_CLOCK_WORDS = "in a reasonable timeframe"
"""Google says this of an assertion whose times are not those of its own clock."""
_REQUIRED_FIELDS = ("client_email", "private_key", "token_uri")

_FILE_HINT = (
    "check that the service account and its key still exist (cloud_storage_gcs_credentials_file), and set "
    "this machine's clock"
)
_METADATA_HINT = "attach a service account with access to the bucket to this instance"


class GcsToken(Token):
    """
    The current access token of one identity. It belongs to one event loop; *session* is the caller's.

    `get` returns the token. The caller reports with `accepted` or `refused` how the store received it.
    """

    def __init__(
        self,
        service_file: io.StringIO,
        session: aiohttp.ClientSession,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(service_file=service_file, session=session, scopes=[SCOPE])  # type: ignore[arg-type]
        self._clock = clock
        self._refresh_at = 0.0
        self._expires_at: float | None = None
        """The end of the current token, or of the last one after it was refused; None before the first."""
        self._refreshes: SingleFlight[Literal["token"], None] = SingleFlight(
            lambda key: f"fetching the access {key} from {self.origin} was cancelled: the store was closed"
        )
        self._is_replacement = False
        self._last_refusal: tuple[str, bool] | None = None

    @property
    def origin(self) -> str:
        """Return the host that issues the tokens."""
        return urlsplit(str(self.token_uri)).netloc

    async def get(self) -> str:
        """
        Return a token that has not expired.

        Raises:
            StorageUnavailable: The issuer cannot be reached, or fails.
            StorageDenied: The issuer knows no such account or key.
        """
        while True:
            await self.ensure_token()
            if self.access_token is not None:
                return str(self.access_token)

    async def ensure_token(self) -> None:
        """Wait for a token if there is none; begin to fetch the next one when the current one ages."""
        now = self._clock()
        if self.access_token is None or self._expires_at is None or now >= self._expires_at:
            await self._refreshes.arrived(self._begin_refresh())
        elif now >= self._refresh_at:
            self._begin_refresh()

    @property
    def end(self) -> float | None:
        """
        Return until when the token is used, in Unix time; None before the first token.

        A token that the store refused has ended then. Its end stays, and tells that no other one has come.
        """
        return None if self._expires_at is None else time.time() + self._expires_at - self._clock()

    def accepted(self, token: str) -> None:
        """Note that the store accepted a token."""
        if token == self.access_token:
            self._is_replacement = False

    def refused(self, token: str) -> bool:
        """
        Drop a token that the store refused (401). Return whether the next one may be accepted.

        It may, once. If the refused token itself replaced a refused one and was never accepted, any
        later token will be refused as well.
        """
        if token == self.access_token:
            self.access_token = None
            self._expires_at = self._clock()
            self._last_refusal = (token, not self._is_replacement)
            self._is_replacement = True
        known = self._last_refusal
        return known[1] if known is not None and known[0] == token else True

    async def aclose(self) -> None:
        """Cancel a refresh that is under way."""
        await self._refreshes.close()

    def _begin_refresh(self) -> Flight[Literal["token"], None]:
        return self._refreshes.join("token", self._fetch_or_fail)

    async def _fetch_or_fail(self) -> None:
        failure: TieringError | None = None
        try:
            await self._fetch()
        except Exception as error:  # noqa: BLE001 - `_failure` raises what it does not know.
            # A failed early refresh does no harm yet: the token still works.
            self._refresh_at = self._clock() + _PAUSE_SECONDS
            failure = self._failure(error)
        # Raised outside of the handler, because the context of an error could quote what was sent.
        if failure is not None:
            raise failure

    async def _fetch(self) -> None:
        answer = await self.refresh(timeout=_TIMEOUT_SECONDS)
        if not _HEADER_SAFE.fullmatch(answer.value):
            raise ValueError("not a token")
        now = self._clock()
        self.access_token = answer.value
        self._refresh_at = now + answer.expires_in * self.background_refresh_after
        self._expires_at = now + answer.expires_in * self.force_refresh_after

    def _failure(self, error: BaseException) -> TieringError:
        subject = f"no access token from {self.origin}"
        if isinstance(error, aiohttp.ClientResponseError) and error.status >= _REFUSED_FROM:
            text = f"{subject}: {error.status}{_said(error.message)}"
            if error.status in _BUSY_STATUSES or error.status >= _FAILED_FROM:
                wait = error.headers.get("Retry-After") if error.headers is not None else None
                return StorageUnavailable(text, retry_after_seconds=retry_after_seconds(wait))
            if not self.service_data:
                return StorageDenied(text, hint=_METADATA_HINT, may_pass=True)
            date = error.headers.get("Date") if error.headers is not None else None
            clock = clock_hint(date, is_certain=_CLOCK_WORDS in text)
            return StorageDenied(text, hint=clock or _FILE_HINT, may_pass=bool(clock))
        if isinstance(error, (aiohttp.ContentTypeError, KeyError, TypeError, ValueError)):
            return StorageUnavailable(f"{subject}: its response is not a token")
        if isinstance(error, (aiohttp.ClientError, OSError)):
            is_tls = isinstance(error, aiohttp.ClientSSLError)
            return StorageUnavailable(
                f"{subject}: {type(error).__name__} {error}".rstrip(), hint=TRUST_HINT if is_tls else None
            )
        raise error


def read_service_account(path: str) -> dict[str, str]:
    """
    Return the fields of a service account's key file. They identify the account, and are secret. Blocks.

    Raises:
        ConfigError: The file cannot be read, or holds no service account. (The library would take such a
            file for a wish to use the metadata server.)
    """
    setting = "cloud_storage_gcs_credentials_file"
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    except ValueError:
        # The parser's error holds the whole text, the private key included.
        raise ConfigError(f"{setting}: {path} is not a JSON document") from None
    kind = document.get("type") if isinstance(document, dict) else None
    if kind != "service_account":
        raise ConfigError(f"{setting}: {path} is not the key file of a service account (its type is {kind})")
    missing = [name for name in _REQUIRED_FIELDS if not isinstance(document.get(name), str)]
    if missing:
        raise ConfigError(f"{setting}: {path} has no {', no '.join(missing)}")
    try:
        load_pem_private_key(document["private_key"].encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{setting}: the private_key in {path} is not a usable PEM key") from None
    return {name: document[name] for name in ("type", *_REQUIRED_FIELDS)}


def account_token(account: dict[str, str], session: aiohttp.ClientSession) -> GcsToken:
    """Return the token of a service account read by `read_service_account`. Nothing is sent yet."""
    return GcsToken(io.StringIO(json.dumps(account)), session)


def instance_token(session: aiohttp.ClientSession, *, metadata_host: str | None = None) -> GcsToken:
    """
    Return the token of this machine's own service account. Nothing is sent yet.

    *metadata_host* is `host[:port]`; None means GCE_METADATA_HOST of the environment, or Google's name.
    """
    host = metadata_host or os.environ.get("GCE_METADATA_HOST") or DEFAULT_METADATA_HOST
    token = _token_without_file(session)
    token.token_uri = f"http://{host}{_METADATA_PATH}"
    return token


def no_token(session: aiohttp.ClientSession) -> GcsToken:
    """Return a placeholder where no token is needed. It is never asked for a token."""
    return _token_without_file(session)


def _token_without_file(session: aiohttp.ClientSession) -> GcsToken:
    # Without a file the library searches for one in places of its own. This empty one stops the search.
    return GcsToken(io.StringIO("{}"), session)


def _said(message: str) -> str:
    """Return the error code and description of a token endpoint's refusal, without possible secrets."""
    _, _, body = message.partition(": ")
    try:
        document = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(document, dict):
        return ""
    parts = [str(document[name]) for name in ("error", "error_description") if name in document]
    return "".join(f" {_SECRET.sub('[cut]', part)}" for part in parts)
