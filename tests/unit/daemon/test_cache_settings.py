"""What the file says to the cache is what its parts go by."""

from __future__ import annotations

from tests.unit.config.texts import TIERED, parsed
from tieringd.daemon.read_cache import hydration_limits, keeper_settings
from tieringd.policies.cache_trim import TrimLimits
from tieringd.storage.store_opening import store_limits

GIB = 2**30
DISK = {"disk_bytes": 1000 * GIB, "has_logs": True}


def test_defaults_are_a_fifth_of_the_disk():
    """A hundred thousand files, and the disk's least free space."""
    settings = keeper_settings(parsed(TIERED), **DISK)
    assert settings.limits == TrimLimits(200 * GIB, 100_000, 5 * GIB)
    assert settings.check_interval_seconds == 30
    limits = hydration_limits(parsed(TIERED))
    assert (limits.chunk_bytes, limits.is_whole) == (16 << 20, False)


def test_every_property_reaches_its_limit():
    """The smaller of percentage and bytes counts, and the log's area comes first."""
    text = """\
cloud_storage_cache_size: 10GiB
cloud_storage_cache_max_objects: 7
cloud_storage_cache_check_interval_ms: 2s
cloud_storage_cache_trim_carryover_bytes: 5MiB
cloud_storage_cache_trim_threshold_percent_size: 70
cloud_storage_cache_trim_threshold_percent_objects: 80
cloud_storage_cache_chunk_size: 8MiB
cloud_storage_disable_chunk_reads: true
storage_min_free_bytes: 1GiB
"""
    config = parsed(TIERED + text)
    assert keeper_settings(config, **DISK).limits == TrimLimits(10 * GIB, 7, GIB, 70, 80, 5 << 20)
    assert keeper_settings(config, **DISK).check_interval_seconds == 2
    assert (hydration_limits(config).chunk_bytes, hydration_limits(config).is_whole) == (8 << 20, True)
    crowded = parsed(TIERED + "retention_local_target_capacity_percent: 75\n")
    assert keeper_settings(crowded, **DISK).limits.size_bytes == 50 * GIB
    own_disk = keeper_settings(crowded, disk_bytes=1000 * GIB, has_logs=False)
    assert own_disk.limits.size_bytes == 200 * GIB
    assert keeper_settings(parsed(TIERED + NO_CACHE), **DISK).limits.size_bytes == 0


NO_CACHE = "cloud_storage_cache_size_percent: 0\n"


def test_downloads_leave_connections_to_uploads():
    """A cache disk that hangs holds its downloads, and with them at most three connections of four."""
    for connections in (1, 2, 5, 100):
        config = parsed(TIERED + f"cloud_storage_max_connections: {connections}\n")
        downloads = hydration_limits(config).downloads.downloads_max
        slots = store_limits(config).max_concurrent_requests
        assert 1 <= downloads <= max(1, slots * 3 // 4)
    assert downloads == 16
