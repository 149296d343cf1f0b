"""
Credentials for Azure: a shared key, a virtual machine's managed identity, or a Kubernetes workload.

azure-identity talks to the token services, keeps tokens and refreshes them before they expire. This
module adds three things: one attempt per call (`storage.resilient` retries), failures as errors of our
tree, and a fresh token when the store rejects one that should still be valid. No message contains a key
or a token.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Self

import aiohttp
from azure.core.credentials import AccessToken, AccessTokenInfo, TokenRequestOptions
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.core.pipeline.transport import AioHttpTransport
from azure.identity.aio import ManagedIdentityCredential, WorkloadIdentityCredential

from tieringd.errors import ConfigError, StorageDenied, StorageUnavailable
from tieringd.storage.azure.errors import retry_after_seconds
from tieringd.storage.store_settings import AzureSettings

Library = ManagedIdentityCredential | WorkloadIdentityCredential

_FEDERATION_VARIABLES = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE")
_TRANSIENT_STATUSES = {404, 408, 410, 429}  # The metadata service's statuses during an update.
_CLIENT_ERRORS = range(400, 500)
_NEARLY_EXPIRED_SECONDS = 600  # The SDK asks anew from 300 s before expiry, at a random moment.
_RENEWAL_PAUSE_SECONDS = 30
_DENIED_HINT = {
    "azure_vm_instance_metadata": (
        "assign a managed identity to this machine, or check cloud_storage_azure_managed_identity_id"
    ),
    "azure_aks_oidc_federation": "check the application's federated credential: issuer, subject, audience",
}


def shared_key_credential(settings: AzureSettings) -> dict[str, str]:
    """
    Return the credential that the SDK signs with.

    Raises:
        ConfigError: There is no key, or it is not base64.
    """
    key = settings.shared_key
    if not key:
        raise ConfigError(
            "cloud_storage_azure_shared_key is not set",
            hint="set it, or set cloud_storage_credentials_source to an identity",
        )
    try:
        base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(
            "cloud_storage_azure_shared_key is not base64", hint="copy the whole key, with its = signs"
        ) from error
    return {"account_name": settings.storage_account, "account_key": key}


async def open_identity(settings: AzureSettings, resources: AsyncExitStack) -> Identity:
    """
    Return the identity that the settings name; *resources* closes it.

    Raises:
        ConfigError: The environment does not describe one.
    """
    is_workload = settings.credentials == "azure_aks_oidc_federation"
    if is_workload:
        _require_federation()
    session = await resources.enter_async_context(
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=2, ssl=_trust(settings)),
            # The metadata service is on this machine's own link, so no proxy is used.
            trust_env=is_workload,
            auto_decompress=False,
        )
    )
    options: dict[str, Any] = {
        "transport": AioHttpTransport(
            session=session,
            session_owner=False,
            connection_timeout=settings.connect_timeout_seconds,
            read_timeout=settings.read_timeout_seconds,
        ),
        "retry_total": 0,
    }

    def build() -> Library:
        if is_workload:
            return WorkloadIdentityCredential(**options)
        return ManagedIdentityCredential(
            client_id=settings.managed_identity_id, _exclude_workload_identity_credential=True, **options
        )

    identity = Identity(settings.credentials, build)
    resources.push_async_callback(identity.close)
    return identity


class Identity:
    """
    A source of tokens, with the interface that the SDK expects.

    The SDK keeps its token, and asks again when the token is about to expire or when the store has
    rejected it. If the SDK asks early, the store has rejected the token, and this class drops the tokens
    that azure-identity keeps.
    """

    def __init__(self, source: str, build: Callable[[], Library]) -> None:
        self._source = source
        self._build = build
        self._library = build()
        self._last: AccessTokenInfo | None = None
        self._renewed_at = float("-inf")

    def __repr__(self) -> str:
        return f"Identity({self._source})"

    async def get_token_info(
        self, *scopes: str, options: TokenRequestOptions | None = None
    ) -> AccessTokenInfo:
        """
        Return a token that is valid for a while.

        Raises:
            StorageUnavailable: The token service does not answer, or fails for now.
            StorageDenied: The token service refuses this identity.
        """
        if self._is_rejected():
            self._renewed_at = time.monotonic()
            await self._library.close()
            self._library = self._build()
        with _translated(self._source):
            self._last = await self._library.get_token_info(*scopes, options=options)
        return self._last

    @property
    def end(self) -> float | None:
        """Return when the last token expires, in Unix time; None before the first."""
        return None if self._last is None else self._last.expires_on

    async def held_token(self, *scopes: str) -> str:
        """Return the SDK's current token, for a second use in one request; a new one if it expires soon."""
        last = self._last
        if last is None or last.expires_on - time.time() <= _NEARLY_EXPIRED_SECONDS:
            last = await self.get_token_info(*scopes)
        return last.token

    async def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        """Return a token in the SDK's older form. The SDK requires this method but does not call it."""
        token = await self.get_token_info(*scopes)
        return AccessToken(token.token, token.expires_on)

    async def close(self) -> None:
        """Close the library's credential."""
        await self._library.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _is_rejected(self) -> bool:
        """Return whether the SDK asks although its last token should still be valid."""
        if self._last is None or time.monotonic() - self._renewed_at < _RENEWAL_PAUSE_SECONDS:
            return False
        now = time.time()
        is_due = self._last.refresh_on is not None and self._last.refresh_on <= now
        return not is_due and self._last.expires_on - now > _NEARLY_EXPIRED_SECONDS


def _require_federation() -> None:
    missing = [name for name in _FEDERATION_VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"azure_aks_oidc_federation needs environment variables that are not set: {', '.join(missing)}",
            hint="label the pod azure.workload.identity/use: true, and annotate its service account",
        )
    authority = os.environ.get("AZURE_AUTHORITY_HOST", "")
    if authority.startswith("http://"):
        raise ConfigError("AZURE_AUTHORITY_HOST begins with http://, but tokens travel over TLS only")


def _trust(settings: AzureSettings) -> ssl.SSLContext:
    """Trust the system's authorities and the trust file's, which may be there for the store alone."""
    context = ssl.create_default_context()
    if settings.trust_file is not None:
        context.load_verify_locations(settings.trust_file)
    return context


@contextmanager
def _translated(source: str) -> Iterator[None]:
    try:
        yield
    except ClientAuthenticationError as error:
        response: Any = error.response
        if response is None and isinstance(error.__cause__, HttpResponseError):
            response = error.__cause__.response
        status = response.status_code if response is not None else 0
        text = f"no token from {source}: {error.message}"
        if status in _CLIENT_ERRORS and status not in _TRANSIENT_STATUSES:
            raise StorageDenied(text, hint=_DENIED_HINT[source], may_pass=True) from error
        wait = retry_after_seconds(response.headers) if response is not None else None
        raise StorageUnavailable(text, retry_after_seconds=wait) from error
    except (AzureError, OSError) as error:
        raise StorageUnavailable(f"no token from {source}: {error}") from error
