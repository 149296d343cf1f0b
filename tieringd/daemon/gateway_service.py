"""
The read gateway of a daemon: its cache, its reader and its listener, built and run together.

`keeper_settings` and `hydration_limits` turn the configuration into the settings of the chunk cache's parts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tieringd.archiving.reconciler import Reconciler
from tieringd.broker.base import Broker
from tieringd.cache.cache_directory import CacheDirectory
from tieringd.clock import wall_clock_ms
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.daemon.gateway_tls import GatewayTls
from tieringd.gateway.connection import GatewaySettings
from tieringd.gateway.readable_partitions import ReadablePartitions
from tieringd.gateway.remote_answers import RemoteAnswers
from tieringd.gateway.server import GatewayServer
from tieringd.metrics import Metrics
from tieringd.metrics.restarts import restarted
from tieringd.policies.cache_trim import TrimLimits
from tieringd.policies.disk_areas import divide_disk
from tieringd.reading.cache_keeper import CacheKeeper, KeeperSettings, OpenChunks
from tieringd.reading.hydrator import HydrationLimits, Hydrator
from tieringd.reading.index_cache import CachedFiles
from tieringd.reading.partition_reader import PartitionReader
from tieringd.space.space_manager import area_settings
from tieringd.storage.store_opening import bucket_name


def keeper_settings(config: Config, *, disk_bytes: int, has_logs: bool) -> KeeperSettings:
    """
    Return how large the cache may be on a disk of *disk_bytes*, and how often that is checked.

    *has_logs* says whether log directories are on the same disk. While space management is enabled, the
    space manager subtracts what the logs have taken of the cache's area.
    """
    areas = divide_disk(disk_bytes, area_settings(config), has_logs=has_logs, has_cache=True)
    return KeeperSettings(
        TrimLimits(
            size_bytes=areas.cache_bytes,
            objects=config.cloud_storage_cache_max_objects,
            min_free_bytes=config.storage_min_free_bytes,
            threshold_percent_size=config.cloud_storage_cache_trim_threshold_percent_size,
            threshold_percent_objects=config.cloud_storage_cache_trim_threshold_percent_objects,
            carryover_bytes=config.cloud_storage_cache_trim_carryover_bytes,
        ),
        check_interval_seconds=config.cloud_storage_cache_check_interval_ms / 1000,
    )


def hydration_limits(config: Config) -> HydrationLimits:
    """Return how segments are cut into chunks and fetched."""
    return HydrationLimits(
        chunk_bytes=config.cloud_storage_cache_chunk_size, is_whole=config.cloud_storage_disable_chunk_reads
    )


class ReadCache:
    """The chunk cache and the parts that fill it."""

    def __init__(self, config: Config, archive: Archive, metrics: Metrics) -> None:
        self._config = config
        directory = config.cache_directory
        self._has_logs = _is_one_disk(directory, config)
        cache = CacheDirectory(
            directory,
            now_ms=wall_clock_ms,
            buckets=config.cloud_storage_cache_num_buckets,
            walk_concurrency=config.cloud_storage_cache_trim_walk_concurrency,
        )
        open_chunks = OpenChunks(config.chunk_eviction, now=time.monotonic, metrics=metrics.cache)
        self.keeper = CacheKeeper(cache, open_chunks, settings=self._settings(config), metrics=metrics.cache)
        self.hydrator = Hydrator(
            archive.store, self.keeper, limits=hydration_limits(config), metrics=metrics.cache
        )
        archive.manifests.spillovers.use_files(CachedFiles(self.keeper))

    def set_config(self, config: Config) -> None:
        """Use *config* from now on, as far as it can change."""
        self.keeper.set_settings(self._settings(config))
        self.keeper.open_chunks.limits = config.chunk_eviction
        self.keeper.directory.walk_concurrency = config.cloud_storage_cache_trim_walk_concurrency
        self.hydrator.set_limits(hydration_limits(config))

    def tasks(self, on_failure: Callable[[str], None]) -> Sequence[Coroutine[None, None, None]]:
        """Return what the cache runs until it is cancelled. *on_failure* is that of `restarted`."""
        return (
            restarted("cache_keeper", self.keeper.run, on_failure=on_failure),
            restarted("hydrator", self.hydrator.run, on_failure=on_failure),
        )

    def _settings(self, config: Config) -> KeeperSettings:
        found = os.statvfs(_existing(config.cache_directory))
        return keeper_settings(config, disk_bytes=found.f_blocks * found.f_frsize, has_logs=self._has_logs)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts that serve clients."""

    cache: ReadCache
    server: GatewayServer
    tls: GatewayTls | None = None
    """Renews certificates while the gateway runs."""
    on_failure: Callable[[str], None] = lambda _: None
    """Gets the name of a task that failed by a defect, for a metric."""

    async def listen(self) -> None:
        """
        Begin to listen; `run` serves.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        await self.server.start()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for task in self.cache.tasks(self.on_failure):
                tasks.create_task(task)
            if self.tls is not None:
                renewing = restarted("gateway_certificates", self.tls.run, on_failure=self.on_failure)
                tasks.create_task(renewing)
            await self.server.watch()


@asynccontextmanager
async def gateway_of(
    config: Config,
    archive: Archive,
    *,
    broker: Broker,
    reconciler: Reconciler,
    cache: ReadCache | None,
    may_produce: Callable[[], bool],
    metrics: Metrics,
) -> AsyncIterator[Gateway | None]:
    """Build the gateway where it is enabled, and close it at the end."""
    if cache is None:
        yield None
        return

    answers = RemoteAnswers(
        ReadablePartitions(
            reconciler, archive.manifests, now=time.monotonic, now_ms=archive.clock, broker=broker
        ),
        PartitionReader(cache.hydrator, archive.manifests.spillovers),
        records=archive.records,
        history=archive.history,
        bucket=bucket_name(config) if config.kafka_enable_describe_log_dirs_remote_storage else None,
        may_produce=may_produce,
        now=time.monotonic,
        on_answer=metrics.durations.archived_answer.observe,
        on_topic=metrics.readers.count_topic,
    )
    tls = GatewayTls(config, has_broker=True)
    server = GatewayServer(
        gateway_settings(config, tls),
        answers,
        on_failure=metrics.health.task_failed,
        readers=metrics.readers,
    )
    metrics.watch_gateway(server)
    try:
        yield Gateway(cache, server, tls, metrics.health.task_failed)
    finally:
        await server.close()
        await answers.close()
        await cache.hydrator.close()


def gateway_settings(config: Config, tls: GatewayTls) -> GatewaySettings:
    """Return the listener's settings. An archive endpoint has them too, and no broker behind it."""
    gateway = config.gateway
    host, _, port = gateway.broker.rpartition(":")
    return GatewaySettings(
        host=gateway.host,
        port=gateway.port,
        broker_host=host.strip("[]"),
        broker_port=int(port),
        proxy_protocol=gateway.proxy_protocol,
        client_tls=tls.clients,
        broker_tls=tls.broker,
        max_connections=gateway.max_connections,
        max_connections_per_host=gateway.max_connections_per_host,
        idle_timeout_seconds=gateway.connections_max_idle_ms / 1000,
        slow_timeout_seconds=gateway.slow_client_timeout_ms / 1000,
        max_request_bytes=gateway.max_request_bytes,
        max_held_bytes=gateway.max_inspected_bytes,
        buffered_bytes=gateway.buffer_bytes,
        archive_bytes_per_second=gateway.archive_bytes_per_second,
        client_archive_bytes_per_second=gateway.client_archive_bytes_per_second,
        principal_bytes_per_second=gateway.principal_archive_bytes_per_second,
        principal_dollars_per_day=gateway.principal_store_dollars_per_day,
        slow_fetch_seconds=gateway.slow_fetch_ms / 1000,
    )


def _existing(path: Path) -> Path:
    """Return *path*, or the nearest existing directory above it."""
    return next(one for one in (path, *path.parents) if one.exists())


def _is_one_disk(directory: Path, config: Config) -> bool:
    """Say whether a log directory is on the filesystem of *directory*."""
    device = _existing(directory).stat().st_dev
    return any(_existing(one).stat().st_dev == device for one in config.broker.log_dirs)
