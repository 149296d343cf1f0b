"""
The chunk cache of a process that serves readers, by its configuration.

`keeper_settings` and `hydration_limits` turn the configuration into the settings of the cache's parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

from tieringd.cache.cache_directory import CacheDirectory
from tieringd.clock import wall_clock_ms
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.metrics import Metrics
from tieringd.metrics.restarts import restarted
from tieringd.policies.cache_trim import TrimLimits
from tieringd.policies.disk_alert import cache_min_free_bytes
from tieringd.policies.disk_areas import divide_disk
from tieringd.reading.cache_keeper import CacheKeeper, KeeperSettings, OpenChunks
from tieringd.reading.chunk_download import DownloadLimits
from tieringd.reading.hydrator import HydrationLimits, Hydrator
from tieringd.reading.index_cache import CachedFiles
from tieringd.reading.shared_cache import CacheRoom, SharedCacheKeeper
from tieringd.space.space_manager import area_settings
from tieringd.storage.store_opening import store_limits


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
            min_free_bytes=cache_min_free_bytes(config.storage_min_free_bytes),
            threshold_percent_size=config.cloud_storage_cache_trim_threshold_percent_size,
            threshold_percent_objects=config.cloud_storage_cache_trim_threshold_percent_objects,
            carryover_bytes=config.cloud_storage_cache_trim_carryover_bytes,
        ),
        check_interval_seconds=config.cloud_storage_cache_check_interval_ms / 1000,
    )


def hydration_limits(config: Config, *, workers: int = 1) -> HydrationLimits:
    """Return how segments are cut into chunks and fetched. Memory is divided among *workers*."""
    limits, downloads = HydrationLimits(), DownloadLimits()
    # A download holds a connection until the cache disk has the bytes. A hung disk leaves some for uploads.
    for_reads = 3 * store_limits(config).max_concurrent_requests // 4
    return HydrationLimits(
        chunk_bytes=config.cloud_storage_cache_chunk_size,
        is_whole=config.cloud_storage_disable_chunk_reads,
        index_bytes_max=limits.index_bytes_max // workers,
        downloads=replace(
            downloads,
            downloads_max=max(1, min(downloads.downloads_max // workers, for_reads)),
            bytes_max=max(downloads.stream_bytes_max, downloads.bytes_max // workers),
        ),
    )


def cache_keeper_of(config: Config, metrics: Metrics, *, room: CacheRoom | None = None) -> CacheKeeper:
    """Return a keeper of the configured directory. With *room* another process keeps the directory."""
    directory = CacheDirectory(
        config.cache_directory,
        now_ms=wall_clock_ms,
        buckets=config.cloud_storage_cache_num_buckets,
        walk_concurrency=config.cloud_storage_cache_trim_walk_concurrency,
    )
    open_chunks = OpenChunks(config.chunk_eviction, now=time.monotonic, metrics=metrics.cache)
    if room is not None:
        return SharedCacheKeeper(directory, open_chunks, room=room, metrics=metrics.cache)
    return CacheKeeper(directory, open_chunks, settings=keeper_settings_of(config), metrics=metrics.cache)


class ReadCache:
    """The chunk cache and the parts that fill it."""

    def __init__(
        self,
        config: Config,
        archive: Archive,
        metrics: Metrics,
        *,
        room: CacheRoom | None = None,
        workers: int = 1,
    ) -> None:
        """Build the parts. In one of several *workers*, *room* is the daemon, which keeps the directory."""
        self._workers = workers
        self.keeper = cache_keeper_of(config, metrics, room=room)
        self.hydrator = Hydrator(
            archive.store,
            self.keeper,
            limits=hydration_limits(config, workers=workers),
            metrics=metrics.cache,
        )
        archive.manifests.spillovers.use_files(CachedFiles(self.keeper))

    def set_config(self, config: Config) -> None:
        """Use *config* from now on, as far as it can change."""
        self.keeper.set_settings(keeper_settings_of(config))
        self.keeper.open_chunks.limits = config.chunk_eviction
        self.keeper.directory.walk_concurrency = config.cloud_storage_cache_trim_walk_concurrency
        self.hydrator.set_limits(hydration_limits(config, workers=self._workers))

    def tasks(self, on_failure: Callable[[str], None]) -> Sequence[Coroutine[None, None, None]]:
        """Return what the cache runs until it is cancelled. *on_failure* is that of `restarted`."""
        return (
            restarted("cache_keeper", self.keeper.run, on_failure=on_failure),
            restarted("hydrator", self.hydrator.run, on_failure=on_failure),
        )


def keeper_settings_of(config: Config) -> KeeperSettings:
    """Return how large the cache may be on its disk, and how often that is checked."""
    directory = config.cache_directory
    found = os.statvfs(_existing(directory))
    return keeper_settings(
        config, disk_bytes=found.f_blocks * found.f_frsize, has_logs=_is_one_disk(directory, config)
    )


def _existing(path: Path) -> Path:
    """Return *path*, or the nearest existing directory above it."""
    return next(one for one in (path, *path.parents) if one.exists())


def _is_one_disk(directory: Path, config: Config) -> bool:
    """Say whether a log directory is on the filesystem of *directory*."""
    device = _existing(directory).stat().st_dev
    return any(_existing(one).stat().st_dev == device for one in config.broker.log_dirs)
