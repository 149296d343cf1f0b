"""
How the S3 client sends: one attempt per request, no hashing by the SDK, idle connections closed.

The SDK itself finds proxies in the environment (HTTPS_PROXY, HTTP_PROXY, NO_PROXY).
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession

from tieringd.storage.calls import send_once
from tieringd.storage.store_settings import S3Settings
from tieringd.storage.tls_transport import TlsConnector

_USER_AGENT = "tieringd"  # botocore builds its own for each request: 15% of a small one's cost.


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


def client_config(settings: S3Settings) -> AioConfig:
    """Return the SDK's configuration for a store."""
    return AioConfig(
        connect_timeout=settings.connect_timeout_seconds,
        read_timeout=settings.read_timeout_seconds,
        max_pool_connections=settings.max_connections,
        connector_args={"keepalive_timeout": settings.max_idle_seconds},
        http_session_cls=OneTrySession,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # The settings alone name the endpoint; AWS_ENDPOINT_URL of the environment is ignored.
        ignore_configured_endpoint_urls=True,
        # Every call carries a CRC32C for integrity. The SDK's defaults would hash every body again, with
        # SHA-256 and on the loop's thread.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        parameter_validation=False,
        user_agent=_USER_AGENT,
        s3={
            "addressing_style": "path" if settings.url_style == "path" else "virtual",
            "payload_signing_enabled": False,
        },
    )
