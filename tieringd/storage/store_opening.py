"""From configuration to an object store: which backend, its settings, and the retries around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from tieringd.errors import ConfigError
from tieringd.processors import usable_processors
from tieringd.storage.base import ObjectStore, TriedStore
from tieringd.storage.checked_puts import require_conditional_writes
from tieringd.storage.file import FileStore
from tieringd.storage.file_root import create_root, make_marker
from tieringd.storage.known_roots import KnownRoots
from tieringd.storage.resilient import ResilientStore, StoreLimits
from tieringd.storage.store_settings import AzureSettings, GcsSettings, S3Settings

if TYPE_CHECKING:
    from pydantic import SecretStr

    # An ordinary import would load pydantic and prometheus_client into processes that do not need them.
    from tieringd.config import Config
    from tieringd.metrics import Metrics

PLUGIN_GROUP: Final = "tieringd.object_stores"
"""
The entry point group in which other packages name their stores.

Each store passes tests/contract/object_store_contract.py.
"""
_GCS_ENDPOINT = "https://storage.googleapis.com"
_S3_ENCRYPTION: dict[str | None, Literal["AES256", "aws:kms"] | None] = {
    None: None,
    "managed": "AES256",
    "kms": "aws:kms",
}
_ACCESS_TIERS: dict[str | None, Literal["Hot", "Cool", "Cold"]] = {
    "Hot": "Hot",
    "Cool": "Cool",
    "Cold": "Cold",
}


@asynccontextmanager
async def opened_store(config: Config, metrics: Metrics) -> AsyncIterator[ResilientStore]:
    """
    Open the configured store, with retries, for the duration of the context.

    Raises:
        ConfigError: The configuration names no object store.
    """
    backend = await _backend(config)
    store = ResilientStore(
        backend, store_limits(config), on_request=metrics.record_store_request, tries_checksums=True
    )
    metrics.watch_credentials(lambda: store.credentials_end)
    metrics.store_in_flight.set_function(lambda: store.in_flight)
    metrics.store_connections.set_function(lambda: store.concurrency)
    try:
        yield store
    finally:
        await store.close()


class StoreCheck:
    """Find out once whether the configured store honours conditional writes, and compares checksums."""

    def __init__(self, config: Config, store: ObjectStore) -> None:
        self._config = config
        self._store = store
        self._is_done = False

    async def __call__(self) -> None:
        """
        Return when the store honours conditional writes; send requests only until that is known.

        If the store does not compare checksums, a warning is logged, and every put is read back.

        Raises:
            ConfigError: The store ignores conditions: two writers would destroy each other's work.
            StorageError: An operator must act.
            StorageUnavailable: The store does not answer, so nothing is known.
        """
        if self._is_done:
            return
        if isinstance(self._store, TriedStore):
            await self._store.try_checksums()
        # An operator may guarantee that there is a single writer.
        if not self._config.cloud_storage_single_writer:
            await self._require_conditional_writes()
        self._is_done = True

    async def _require_conditional_writes(self) -> None:
        async with AsyncExitStack() as opened:
            second = self._store
            if self._config.backend == "file":
                # A second opening stands for another process. It must see what the first one writes.
                second = await _backend(self._config)
                opened.push_async_callback(second.close)
            await require_conditional_writes(self._store, second=second)


def begin_file_root(config: Config) -> None:
    """
    Prepare the file store's directory for writing: create it, and give it a marker.

    This is for directories that every run makes anew, such as an export's target. The directory of an
    archive is claimed instead (`daemon.file_archive`): an empty directory there is a disk that is not
    mounted.

    The parent directory is never created: if it is missing, a disk is not mounted, or a path is
    mistyped, and the store's own error says so. Blocks.

    Raises:
        StorageError: It cannot be created or written to.
    """
    if config.backend == "file" and config.cloud_storage_file_root is not None:
        create_root(config.cloud_storage_file_root)
        make_marker(config.cloud_storage_file_root)


def place_of(config: Config) -> str:
    """Return where the configured store keeps its objects, for people. Each place has a different name."""
    if config.backend == "file":
        place = f"file://{config.cloud_storage_file_root}"
    elif config.cloud_storage_azure_container is not None:
        account = config.cloud_storage_azure_storage_account
        place = f"azure://{account}/{config.cloud_storage_azure_container}"
    else:
        place = f"{config.cloud_storage_plugin or config.backend}://{config.cloud_storage_bucket}"
    where = f"{place}/{config.cloud_storage_prefix}" if config.cloud_storage_prefix else place
    address = config.endpoint_url if config.cloud_storage_api_endpoint else None
    return f"{where} at {address}" if address else where


def max_connections(config: Config) -> int:
    """Return the greatest number of connections. The property counts them per usable processor."""
    return config.cloud_storage_max_connections * usable_processors()


def store_limits(config: Config) -> StoreLimits:
    """Return the deadlines, backoff and concurrency of requests to the configured store."""
    return StoreLimits(
        initial_backoff_seconds=config.cloud_storage_initial_backoff_ms / 1000,
        segment_upload_timeout_seconds=config.cloud_storage_segment_upload_timeout_ms / 1000,
        manifest_upload_timeout_seconds=config.cloud_storage_manifest_upload_timeout_ms / 1000,
        max_concurrent_requests=max_connections(config),
    )


def s3_settings(config: Config) -> S3Settings:
    """Return where the configured bucket is and how to reach it, by the S3 API."""
    assert config.cloud_storage_bucket is not None, "checked with the configuration"
    source = config.cloud_storage_credentials_source
    has_keys = source == "config_file"
    return S3Settings(
        bucket=config.cloud_storage_bucket,
        prefix=config.cloud_storage_prefix,
        region=config.cloud_storage_region or "us-east-1",
        endpoint_url=config.endpoint_url,
        credentials_source=source if source in ("aws_instance_metadata", "sts") else "config_file",
        # Keys that are configured beside a role have no effect. The configuration warned about them.
        access_key=config.cloud_storage_access_key if has_keys else None,
        secret_key=_secret(config.cloud_storage_secret_key) if has_keys else None,
        url_style=config.url_style,
        trust_file=_text(config.cloud_storage_trust_file),
        disable_tls=config.cloud_storage_disable_tls,
        max_connections=max_connections(config),
        max_idle_seconds=config.cloud_storage_max_connection_idle_time_ms / 1000,
        encryption=_S3_ENCRYPTION[config.cloud_storage_sse],
        kms_key_id=config.cloud_storage_sse_kms_key_id,
        storage_class=config.cloud_storage_storage_class,
        multipart_threshold_bytes=config.cloud_storage_multipart_threshold_bytes,
        multipart_part_bytes=config.cloud_storage_multipart_part_size_bytes,
    )


def gcs_settings(config: Config) -> GcsSettings:
    """Return where the configured bucket is and how to reach it, by Google's own API."""
    assert config.cloud_storage_bucket is not None, "checked with the configuration"
    is_metadata = config.cloud_storage_credentials_source == "gcp_instance_metadata"
    return GcsSettings(
        bucket=config.cloud_storage_bucket,
        prefix=config.cloud_storage_prefix,
        endpoint=config.endpoint_url or _GCS_ENDPOINT,
        credentials_source="gcp_instance_metadata" if is_metadata else "config_file",
        service_account_file=_text(config.cloud_storage_gcs_credentials_file),
        trust_file=_text(config.cloud_storage_trust_file),
        disable_tls=config.cloud_storage_disable_tls,
        storage_class=config.cloud_storage_storage_class,
        kms_key_name=config.cloud_storage_sse_kms_key_id,
        max_connections=max_connections(config),
        max_idle_seconds=config.cloud_storage_max_connection_idle_time_ms / 1000,
    )


def azure_settings(config: Config) -> AzureSettings:
    """Return where the configured container is and how to reach it."""
    account, container = config.cloud_storage_azure_storage_account, config.cloud_storage_azure_container
    assert account is not None, "checked with the configuration"
    assert container is not None, "likewise"
    source = config.cloud_storage_credentials_source
    return AzureSettings(
        storage_account=account,
        container=container,
        prefix=config.cloud_storage_prefix,
        endpoint=config.azure_account_url,
        credentials=(
            source if source in ("azure_vm_instance_metadata", "azure_aks_oidc_federation") else "shared_key"
        ),
        shared_key=_secret(config.cloud_storage_azure_shared_key),
        managed_identity_id=config.cloud_storage_azure_managed_identity_id,
        trust_file=_text(config.cloud_storage_trust_file),
        disable_tls=config.cloud_storage_disable_tls,
        max_connections=max_connections(config),
        max_idle_seconds=config.cloud_storage_max_connection_idle_time_ms / 1000,
        access_tier=_ACCESS_TIERS.get(config.cloud_storage_storage_class),
        single_put_bytes=config.cloud_storage_multipart_threshold_bytes,
        block_bytes=config.cloud_storage_multipart_part_size_bytes,
    )


async def _backend(config: Config) -> ObjectStore:
    # Importing a store's SDK takes a tenth of a second or more, and a process uses one of them.
    match config.store_kind:
        case "file":
            assert config.cloud_storage_file_root is not None, "checked with the configuration"
            root = config.cloud_storage_file_root
            root_id = await asyncio.to_thread(KnownRoots(config.state_directory).id_of, root)
            return FileStore(
                root,
                prefix=config.cloud_storage_prefix,
                root_id=root_id,
                has_single_writer=config.cloud_storage_single_writer,
            )
        case "s3":
            from tieringd.storage.s3.store import S3Store  # noqa: PLC0415

            return await S3Store.open(s3_settings(config))
        case "gcs":
            from tieringd.storage.gcs.store import GcsStore  # noqa: PLC0415

            return await GcsStore.open(gcs_settings(config))
        case "azure":
            from tieringd.storage.azure.store import AzureStore  # noqa: PLC0415

            return await AzureStore.open(azure_settings(config))
        case "plugin":
            return await _plugin(config)
        case _:
            raise ConfigError(
                "the configuration names no object store",
                hint="Set cloud_storage_backend to aws, google, azure, file or plugin, and the properties "
                "that it needs",
            )


async def _plugin(config: Config) -> ObjectStore:
    """Open the store of an installed package: the entry point is a coroutine function of *config*."""
    name = config.cloud_storage_plugin
    found = {one.name: one for one in entry_points(group=PLUGIN_GROUP)}
    if name not in found:
        raise ConfigError(
            f"cloud_storage_plugin: no installed package provides the object store {name}",
            hint="Install the package beside tieringd. Installed stores: "
            f"{', '.join(sorted(found)) or 'none'}",
        )
    try:
        open_store = found[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cloud_storage_plugin: the object store {name} cannot be loaded: {error}",
            hint=f"Repair or reinstall the package that provides {found[name].value}",
        ) from error
    store: ObjectStore = await open_store(config)
    return store


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def bucket_name(config: Config) -> str:
    """Return the name of the bucket or container, or the path of the file store's directory."""
    match config.backend:
        case "file":
            return str(config.cloud_storage_file_root)
        case "azure":
            return str(config.cloud_storage_azure_container)
        case "plugin":
            return config.cloud_storage_bucket or str(config.cloud_storage_plugin)
        case _:
            return str(config.cloud_storage_bucket)
