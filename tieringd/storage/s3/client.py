"""
The SDK's client for one bucket on an S3 server: its settings, its HTTP session and its credentials.

`storage.s3.store` sends the requests through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError
from botocore.handlers import add_expect_header
from botocore.loaders import Loader, create_loader
from botocore.utils import parse_timestamp

from tieringd.errors import ConfigError
from tieringd.storage.calls import send_once
from tieringd.storage.s3.credentials import RoleCredentials, role_credentials
from tieringd.storage.store_settings import S3Settings
from tieringd.storage.tls_transport import TlsConnector

USER_AGENT = "tieringd"  # botocore builds its own for each request: 15% of a small one's cost.
_OFFLINE_CLASSES = {"GLACIER", "DEEP_ARCHIVE"}


def check(settings: S3Settings) -> None:
    """
    Raise an error for settings that no client could work with.

    Raises:
        ConfigError: Names the property.
    """
    if settings.trust_file is not None and not Path(settings.trust_file).is_file():
        raise ConfigError(f"cloud_storage_trust_file: the file {settings.trust_file} does not exist")
    if settings.credentials_source == "config_file" and not (settings.access_key and settings.secret_key):
        raise ConfigError(
            "cloud_storage_access_key and cloud_storage_secret_key must be set for bucket " + settings.bucket,
            hint="set both, or set cloud_storage_credentials_source to aws_instance_metadata or sts",
        )
    if settings.storage_class in _OFFLINE_CLASSES:
        raise ConfigError(
            f"cloud_storage_storage_class {settings.storage_class}: objects of this class cannot be read "
            "immediately",
            hint="choose a class with immediate access, such as STANDARD_IA or GLACIER_IR",
        )


async def open_client(
    settings: S3Settings, resources: AsyncExitStack
) -> tuple[Any, Callable[[], OneTrySession], RoleCredentials | None]:
    """
    Build a client, which *resources* closes. Nothing is sent yet.

    Returns the client, a function that returns its HTTP session, and the credentials of a role; None for
    fixed keys.

    Raises:
        ConfigError: The endpoint, a file or the credentials of the settings cannot be used.
    """
    built: list[OneTrySession] = []

    def build_session(**options: Any) -> OneTrySession:
        built.append(OneTrySession(**options))
        return built[-1]

    session = get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parsed_time)
    credentials = None
    if settings.credentials_source != "config_file":
        credentials = role_credentials(
            settings.credentials_source,
            session,
            region=settings.region,
            trust_file=settings.trust_file,
        )
        session.register_component("credential_provider", credentials)
        resources.push_async_callback(credentials.close)
    is_fixed = credentials is None
    try:
        client = await resources.enter_async_context(
            session.create_client(
                "s3",
                region_name=settings.region,
                endpoint_url=settings.endpoint_url,
                aws_access_key_id=settings.access_key if is_fixed else None,
                aws_secret_access_key=settings.secret_key if is_fixed else None,
                use_ssl=not settings.disable_tls,
                verify=settings.trust_file,
                config=_client_config(settings, build_session),
            )
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"the S3 client for bucket {settings.bucket} cannot be built: {error}",
            hint="check cloud_storage_api_endpoint and cloud_storage_region",
        ) from error
    # This header costs every file-like body a round trip before the first byte.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client, lambda: built[-1], credentials


def parsed_time(value: str | float) -> datetime:
    """
    Return the time that the SDK reads from *value*, sooner.

    The SDK tries every form of a time, which takes most of a listing's CPU. Listings have times such as
    `2026-11-28T03:55:09.561Z`.
    """
    if isinstance(value, str) and value[10:11] == "T" and value.endswith("Z"):
        with suppress(ValueError):
            return datetime.fromisoformat(value)
    found: datetime = parse_timestamp(value)
    return found


class OneTrySession(AIOHTTPSession):  # type: ignore[misc]
    """
    An HTTP session that sends each request once.

    By default aiohttp repeats a PUT whose connection breaks before the response. A conditional PUT that
    succeeded would then fail against its own first attempt.

    Its connections can be lent to threads, except those through a proxy.
    """

    async def _create_connector(self, proxy_url: str | None) -> Any:
        if proxy_url is not None:
            return await super()._create_connector(proxy_url)
        context = await asyncio.to_thread(self._build_verify_context)
        return TlsConnector(limit=self._max_pool_connections, ssl=context, **self._connector_args)

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        send_once(session)
        return session


def _client_config(settings: S3Settings, build_session: Callable[..., OneTrySession]) -> AioConfig:
    """Return the SDK's configuration for a store whose HTTP session *build_session* makes."""
    return AioConfig(
        connect_timeout=settings.connect_timeout_seconds,
        read_timeout=settings.read_timeout_seconds,
        max_pool_connections=settings.max_connections,
        connector_args={"keepalive_timeout": settings.max_idle_seconds},
        http_session_cls=build_session,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # The settings alone name the endpoint; AWS_ENDPOINT_URL of the environment is ignored.
        ignore_configured_endpoint_urls=True,
        # Every call carries a CRC32C for integrity. The SDK's defaults would hash every body again, with
        # SHA-256 and on the loop's thread.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        parameter_validation=False,
        user_agent=USER_AGENT,
        s3={
            "addressing_style": "path" if settings.url_style == "path" else "virtual",
            "payload_signing_enabled": False,
        },
    )


@cache
def _loader(data_path: str | None) -> Loader:
    """Return the loader of the SDK's description of S3: a megabyte of JSON, read once per process."""
    return create_loader(data_path)
