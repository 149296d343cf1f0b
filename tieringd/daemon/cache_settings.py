"""What the configuration says to the chunk cache, in the words of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.policies.cache_trim import TrimLimits
from tieringd.policies.disk_areas import divide_disk
from tieringd.reading.cache_keeper import KeeperSettings
from tieringd.reading.hydrator import HydrationLimits
from tieringd.space.space_manager import area_settings

if TYPE_CHECKING:
    from tieringd.config import Config


def keeper_settings(config: Config, *, disk_bytes: int, has_logs: bool) -> KeeperSettings:
    """
    Return how large the cache may be on a disk of *disk_bytes*, and how often that is looked at.

    *has_logs* says whether log directories are on the same disk. What they use of the cache's area is
    told by the space manager, while that is enabled.
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
    """Return how segments are cut and fetched."""
    return HydrationLimits(
        chunk_bytes=config.cloud_storage_cache_chunk_size, is_whole=config.cloud_storage_disable_chunk_reads
    )
