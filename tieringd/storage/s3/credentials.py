"""
Credentials of a role for S3: from the instance's metadata service, or from STS.

The SDK's own providers talk to the services. This module decides which single provider is used (never
another one instead), when it is asked again, and what its failures mean. It holds no keys of the
configuration: those are fixed, and go to the SDK unchanged.

Three rules: many waiting requests share one refresh; credentials are refreshed before they expire
without holding up a request; no object here has a representation that shows a secret.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import (
    AioAssumeRoleWithWebIdentityProvider,
    AioContainerProvider,
    AioInstanceMetadataProvider,
)
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.utils import AioContainerMetadataFetcher, AioInstanceMetadataFetcher, create_nested_client
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp, resolve_imds_endpoint_mode

from tieringd.errors import ConfigError, StorageDenied, StorageUnavailable, TieringError
from tieringd.storage.single_flight import Flight, SingleFlight

CredentialsSource: TypeAlias = Literal["config_file", "aws_instance_metadata", "sts"]

_CONTAINER_VARIABLES = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_STS_VARIABLES = ("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE")
_SERVICE_TIMEOUT_SECONDS = 2.0
"""Short, because the metadata services run on this machine."""
_NEEDED_SECONDS = 600
"""Credentials that expire within this time are refreshed before a request is signed with them."""
_EARLY_PAUSE_SECONDS = 30.0
"""Minimum between two early refreshes, so that a service that is down is not asked at each request."""
_BUSY_STATUSES = {408, 429}
_FAILED_FROM = 500
_STS_BUSY_CODES = {"IDPCommunicationError", "RequestLimitExceeded", "Throttling", "ThrottlingException"}
# Errors of the SDK's providers: its own ones, those of HTTP and of a token's file, a response that is not
# JSON (ValueError) or lacks a field (KeyError), and RuntimeError for credentials that arrive expired.
_PROVIDER_ERRORS = (
    BotoCoreError,
    ClientError,
    aiohttp.ClientError,
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
)


class CredentialSource(Protocol):
    """A provider of credentials."""

    async def load(self) -> Any:
        """Return the SDK's self-refreshing credentials; None when the service has none."""

    def end_of(self, loaded: Any) -> float | None:
        """Return when *loaded* expire as the service said it, in Unix time; None where it said nothing."""

    def explain(self, error: Exception | None) -> TieringError:
        """
        Return the error for a failed load or refresh.

        *error* is None when there were no credentials, or when the original error must not be shown.
        """


class RoleCredentials:
    """
    Credentials that renew themselves, with the interface that the SDK's signer expects.

    One instance belongs to one store and its event loop. It fetches nothing before the first use.
    """

    method = "role"  # The SDK reads the kind of credentials from this.

    def __init__(self, source: CredentialSource) -> None:
        self._source = source
        self._loaded: Any = None
        self._frozen: Any = None
        self._refreshes: SingleFlight[Literal["credentials"], None] = SingleFlight(
            lambda key: f"refreshing the {key} was cancelled: the store is closed"
        )
        self._early_from = 0.0
        self._is_proven = True
        self._refused_end: float | None = None
        self.generation = 0
        """How often credentials were discarded. A request keeps the value from its start for `renew`."""

    async def load_credentials(self) -> RoleCredentials:
        """Return itself: the SDK's session uses it as its provider of credentials too."""
        return self

    async def get_account_id(self) -> None:
        """Return None: no S3 endpoint depends on the account."""

    def get_deferred_property(self, _: str) -> Callable[[], Awaitable[None]]:
        """Return `get_account_id`: the SDK defers no other property."""
        return self.get_account_id

    async def get_frozen_credentials(self) -> Any:
        """
        Return credentials to sign with.

        Raises:
            StorageUnavailable: The service that issues them does not answer.
            StorageDenied: The service issues none to this process.
        """
        if self._loaded is None or self._loaded.refresh_needed(_NEEDED_SECONDS):
            await self._refreshes.arrived(self._fetch())
        elif self._loaded.refresh_needed() or self._has_moved_end():
            now = asyncio.get_running_loop().time()
            if now >= self._early_from:
                self._early_from = now + _EARLY_PAUSE_SECONDS
                self._fetch()
        while self._frozen is None:  # Discarded while we waited.
            await self._refreshes.arrived(self._fetch())
        return self._frozen

    @property
    def end(self) -> float | None:
        """
        Return when the credentials expire, in Unix time; None before the first, or without an expiry.

        Of credentials that were discarded it is the end until others are there: none at all is no better.
        """
        return self._refused_end if self._loaded is None else self._source.end_of(self._loaded)

    def note_success(self) -> None:
        """Note that the store accepted these credentials."""
        self._is_proven = True

    def _has_moved_end(self) -> bool:
        """Say whether the credentials end soon, and the SDK has moved their end (`_MetadataFetcher`)."""
        end = self.end
        return end is not None and end - time.time() < _NEEDED_SECONDS and not self._loaded.refresh_needed()

    def renew(self, generation: int) -> bool:
        """
        Discard credentials that the store calls expired. Return whether to repeat the request.

        *generation* is the value at the start of the refused request. The result is False if these
        credentials replaced refused ones and were never accepted: another set will not help.
        """
        if generation != self.generation:
            return True  # Another request has discarded them already.
        is_worthwhile = self._is_proven
        self.generation += 1
        self._is_proven = False
        self._refused_end = self.end
        self._loaded = self._frozen = None
        return is_worthwhile

    async def close(self) -> None:
        """Cancel a refresh that is under way."""
        await self._refreshes.close()

    def _fetch(self) -> Flight[Literal["credentials"], None]:
        """Return the refresh under way, or begin one."""
        return self._refreshes.join("credentials", partial(self._refresh, self.generation))

    async def _refresh(self, generation: int) -> None:
        try:
            # With a moved end the SDK would not ask the service again for a quarter of an hour.
            keep = self._loaded is not None and not self._has_moved_end()
            loaded = self._loaded if keep else await self._source.load()
            if loaded is None:
                raise self._source.explain(None)
            frozen = await loaded.get_frozen_credentials()
        except ResponseParserError:
            # Its text is the whole response, which may hold a secret, so it must not be shown.
            raise self._source.explain(None) from None
        except _PROVIDER_ERRORS as error:
            raise self._source.explain(error) from error
        if generation == self.generation:
            self._loaded, self._frozen = loaded, frozen


def role_credentials(
    source: CredentialsSource, session: Any, *, region: str, trust_file: str | None
) -> RoleCredentials:
    """
    Return the credentials of *source*. No request is sent yet.

    On ECS and EKS the metadata service is the container's, if the environment names one.

    Raises:
        ConfigError: The environment lacks what the source needs.
    """
    try:
        if source == "sts":
            return RoleCredentials(_WebIdentity(session, region=region, trust_file=trust_file))
        if any(os.environ.get(name) for name in _CONTAINER_VARIABLES):
            return RoleCredentials(_ContainerMetadata())
        return RoleCredentials(_InstanceMetadata(session))
    except BotoCoreError as error:
        raise ConfigError(f"cloud_storage_credentials_source {source} cannot be used: {error}") from error


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


# The SDK logs why a refresh failed. For an unreadable response it logs the response with its secrets.
logging.getLogger("aiobotocore.credentials").addFilter(_without_traceback)


def _expiry_of(loaded: Any) -> float | None:
    expiry: datetime | None = getattr(loaded, "_expiry_time", None)
    return None if expiry is None else expiry.timestamp()


class _MetadataFetcher(AioInstanceMetadataFetcher):  # type: ignore[misc]
    """
    The SDK's fetcher, which also keeps the end of credentials as the metadata service said it.

    The SDK goes on with credentials that the service does not renew, and moves their end to do so. That
    would hide from operators that the store is about to refuse every request.
    """

    said_end: float | None = None

    def _evaluate_expiration(self, credentials: dict[str, str]) -> None:
        self.said_end = parse_timestamp(credentials["expiry_time"]).timestamp()
        super()._evaluate_expiration(credentials)


class _WatchedSession:
    """An HTTP session that keeps the status of the last response. Unlike the SDK's own it uses no proxy."""

    def __init__(self) -> None:
        self._http: AIOHTTPSession | None = None
        self.status: int | None = None
        """The status of the last response; None if no response came."""

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[_WatchedSession]:
        async with AIOHTTPSession(timeout=_SERVICE_TIMEOUT_SECONDS) as self._http:
            yield self

    async def send(self, request: Any) -> Any:
        assert self._http is not None, "used outside of acquire"
        self.status = None
        response = await self._http.send(request)
        self.status = response.status_code
        return response

    def explain(self, error: Exception | None, *, service: str, hint: str) -> TieringError:
        """Return the error for the last request: the service is down, or has no credentials for us."""
        cause = f" ({error})" if error is not None and self.status is None else ""
        if self.status is None:
            return StorageUnavailable(f"{service} does not respond{cause}", hint=hint)
        if self.status >= _FAILED_FROM or self.status in _BUSY_STATUSES:
            return StorageUnavailable(f"{service} answers with status {self.status}", hint=hint)
        text = f"{service} returns no credentials (status {self.status})"
        return StorageDenied(text, hint=hint, may_pass=True)


class _InstanceMetadata:
    """The role of an EC2 instance, from version 2 of its metadata service (with a session token)."""

    def __init__(self, session: Any) -> None:
        self._watched = _WatchedSession()
        self._fetcher = _MetadataFetcher(
            # An operator who chooses this source does not want the environment to disable it.
            env={},
            user_agent=session.user_agent(),
            session=self._watched,
            config={
                "ec2_metadata_service_endpoint": session.get_config_variable("ec2_metadata_service_endpoint"),
                "ec2_metadata_service_endpoint_mode": resolve_imds_endpoint_mode(session),
                "ec2_metadata_v1_disabled": True,
            },
        )

    async def load(self) -> Any:
        return await AioInstanceMetadataProvider(iam_role_fetcher=self._fetcher).load()

    def end_of(self, loaded: Any) -> float | None:
        return None if loaded is None else self._fetcher.said_end

    def explain(self, error: Exception | None) -> TieringError:
        return self._watched.explain(
            error,
            service=f"the instance metadata service at {self._fetcher.get_base_url()}",
            hint="cloud_storage_credentials_source is aws_instance_metadata: attach a role to the instance "
            "and leave its metadata service on (a container may need a hop limit of 2), or set another "
            "source",
        )


class _ContainerMetadata:
    """The role of a task on ECS or of a pod on EKS, from the service that its environment names."""

    def __init__(self) -> None:
        self._watched = _WatchedSession()

    async def load(self) -> Any:
        # No pause between attempts: the waiting requests have a deadline and a backoff of their own.
        fetcher = AioContainerMetadataFetcher(session=self._watched, sleep=lambda _: asyncio.sleep(0))
        return await AioContainerProvider(fetcher=fetcher).load()

    def end_of(self, loaded: Any) -> float | None:
        return _expiry_of(loaded)

    def explain(self, error: Exception | None) -> TieringError:
        return self._watched.explain(
            error,
            service="the container's credentials service",
            hint="cloud_storage_credentials_source is aws_instance_metadata, and the environment names a "
            f"container's credentials service: check {' and '.join(_CONTAINER_VARIABLES)} and the "
            "task's role",
        )


class _WebIdentity:
    """A role that STS grants for the token in a file, such as Kubernetes mounts."""

    def __init__(self, session: Any, *, region: str, trust_file: str | None) -> None:
        missing = [name for name in _STS_VARIABLES if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"cloud_storage_credentials_source is sts, but the variables {' and '.join(missing)} are "
                "not set",
                hint="set these variables, as for a role with web identity, or choose another source",
            )
        self._session = session
        self._region = region
        self._trust_file = trust_file

    async def load(self) -> Any:
        return await AioAssumeRoleWithWebIdentityProvider(
            load_config=dict, client_creator=self._client, profile_name="default"
        ).load()

    def end_of(self, loaded: Any) -> float | None:
        return _expiry_of(loaded)

    def _client(self, service: str, *, config: AioConfig) -> Any:
        return create_nested_client(
            self._session,
            service,
            region_name=self._region,
            verify=self._trust_file,
            config=config.merge(
                AioConfig(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1})
            ),
        )

    def explain(self, error: Exception | None) -> TieringError:
        role = os.environ.get("AWS_ROLE_ARN", "")
        subject = f"STS returns no credentials for role {role} ({error or 'its response cannot be read'})"
        if isinstance(error, ClientError):
            code = error.response.get("Error", {}).get("Code")
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if code in _STS_BUSY_CODES or status in _BUSY_STATUSES or status >= _FAILED_FROM:
                return StorageUnavailable(subject)
            hint = "check the role's trust policy and the token's audience"
            return StorageDenied(subject, hint=hint, may_pass=True)
        if isinstance(error, OSError) and error.filename is not None:
            hint = "check the file that AWS_WEB_IDENTITY_TOKEN_FILE names"
            return StorageDenied(subject, hint=hint, may_pass=True)
        return StorageUnavailable(
            subject, hint="check the connection to sts.<region>.amazonaws.com, or set AWS_ENDPOINT_URL_STS"
        )
