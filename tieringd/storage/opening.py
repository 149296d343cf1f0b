"""From configuration to an object store: which backend, its settings, and the retries around it."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from tieringd.errors import ConfigError
from tieringd.storage.file import FileStore
from tieringd.storage.resilient import ResilientStore, StoreLimits
from tieringd.storage.s3 import S3Settings, S3Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tieringd.config import Config
    from tieringd.metrics import Metrics
    from tieringd.storage.base import ObjectStore


@asynccontextmanager
async def opened_store(config: Config, metrics: Metrics) -> AsyncIterator[ResilientStore]:
    """
    Open the configured store, with retries, for the time of the context.

    Raises:
        ConfigError: The configuration names no object store.
    """
    backend = await _backend(config)
    store = ResilientStore(backend, store_limits(config), on_request=metrics.record_store_request)
    try:
        yield store
    finally:
        await store.close()


def create_file_root(config: Config) -> None:
    """
    Create the file store's directory where only its last part is missing.

    The directory that it lies in is never created: without it a disk is not mounted, or a path is
    mistyped, and the store's own error says so. Blocks.
    """
    if config.backend == "file" and config.cloud_storage_file_root is not None:
        with suppress(OSError):
            config.cloud_storage_file_root.mkdir(exist_ok=True)


def store_limits(config: Config) -> StoreLimits:
    """Return how long and how often the configured store is asked."""
    return StoreLimits(
        initial_backoff_seconds=config.cloud_storage_initial_backoff_ms / 1000,
        segment_upload_timeout_seconds=config.cloud_storage_segment_upload_timeout_ms / 1000,
        manifest_upload_timeout_seconds=config.cloud_storage_manifest_upload_timeout_ms / 1000,
        max_concurrent_requests=config.cloud_storage_max_connections,
    )


def s3_settings(config: Config) -> S3Settings:
    """Return where the configured bucket is and how to reach it."""
    assert config.cloud_storage_bucket is not None, "checked with the configuration"
    secret, trust_file = config.cloud_storage_secret_key, config.cloud_storage_trust_file
    return S3Settings(
        bucket=config.cloud_storage_bucket,
        prefix=config.cloud_storage_prefix,
        region=config.cloud_storage_region or "us-east-1",
        endpoint_url=config.endpoint_url,
        access_key=config.cloud_storage_access_key,
        secret_key=secret.get_secret_value() if secret else None,
        url_style=config.url_style,
        trust_file=str(trust_file) if trust_file else None,
        disable_tls=config.cloud_storage_disable_tls,
        max_connections=config.cloud_storage_max_connections,
        max_idle_seconds=config.cloud_storage_max_connection_idle_time_ms / 1000,
    )


async def _backend(config: Config) -> ObjectStore:
    if config.backend == "file":
        assert config.cloud_storage_file_root is not None, "checked with the configuration"
        return FileStore(config.cloud_storage_file_root, prefix=config.cloud_storage_prefix)
    if config.backend == "aws":
        return await S3Store.open(s3_settings(config))
    raise ConfigError(
        "the configuration names no object store",
        hint="Set cloud_storage_backend to file or aws, and the properties that go with it",
    )
