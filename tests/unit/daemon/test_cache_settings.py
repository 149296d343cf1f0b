"""What the file says to the cache is what its parts go by."""

from __future__ import annotations

from tests.builders import segment_bytes
from tests.fakes.hydration import BATCHES, Host, OddStore, Stored, running
from tests.fakes.virtual_loop import virtually
from tests.unit.config.texts import TIERED, parsed
from tieringd.broker.disk_use import FilesystemMeasurement, FilesystemReading
from tieringd.daemon.read_cache import hydration_limits, keeper_settings
from tieringd.metrics import Metrics
from tieringd.model.disk_state import DiskState
from tieringd.policies.cache_trim import TrimLimits
from tieringd.space.disk_monitor import DiskMonitor
from tieringd.storage.store_opening import store_limits

GIB = 2**30
MIB = 2**20
DISK = {"disk_bytes": 1000 * GIB, "has_logs": True}


def test_defaults_are_a_fifth_of_the_disk():
    """A hundred thousand files, and a fifth more than the disk's least free space."""
    settings = keeper_settings(parsed(TIERED), **DISK)
    assert settings.limits == TrimLimits(200 * GIB, 100_000, 6 * GIB)
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
    assert keeper_settings(config, **DISK).limits == TrimLimits(
        10 * GIB, 7, GIB + 2 * (GIB // 10), 70, 80, 5 << 20
    )
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


class SharedDisk:
    """A disk of 100 MiB for logs, the cache, and what is neither."""

    total_bytes = 100 * MIB

    def __init__(self, host: Host) -> None:
        self.other_bytes = 0
        self._use = host.directory.accounts.use
        host.directory.free_bytes = self.free_bytes

    @property
    def cached_bytes(self) -> int:
        """Return what the cache holds."""
        return self._use().size_bytes

    def free_bytes(self) -> int:
        """Return what is free."""
        return self.total_bytes - self.other_bytes - self.cached_bytes

    async def measure(self, paths: list[str]) -> FilesystemMeasurement:
        """Return one reading for all *paths*."""
        return FilesystemMeasurement(
            (FilesystemReading(1, tuple(paths), self.total_bytes, self.free_bytes()),)
        )


@virtually
async def test_cache_gives_way_until_its_disk_is_not_degraded(tmp_path):
    """The cache evicts more than the degraded state takes to end, and not all that it holds."""
    config = parsed(
        TIERED + "storage_min_free_bytes: 10MiB\nstorage_space_alert_free_threshold_percent: 0\n"
        "cloud_storage_cache_size: 50MiB\ncloud_storage_cache_size_percent: 0\n"
    )
    store = OddStore()
    limits = keeper_settings(config, disk_bytes=SharedDisk.total_bytes, has_logs=True).limits
    host = Host(tmp_path / "cache", store, limits=limits)
    disk = SharedDisk(host)
    monitor = DiskMonitor(
        disk,
        log_dirs=["/logs"],
        cache_dir=None,
        settings=config.disk_alerts,
        metrics=Metrics(),
        now=lambda: 0.0,
    )
    per_segment = 3 * BATCHES
    segments = [
        Stored(
            store,
            base_offset,
            data=segment_bytes(base_offset, batches=BATCHES, value=b"v" * 30_000),
            next_offset=base_offset + per_segment,
        )
        for base_offset in range(0, 10 * per_segment, per_segment)
    ]
    async with running(host, chunk_bytes=100_000):
        for one in segments:
            for number in range(len(host.hydrator.layout(one.index).chunks)):
                await host.read(one, number)
        held_bytes = disk.cached_bytes
        assert held_bytes > 8 * MIB
        # Something else fills the disk into its reserve: pins while the store is away, or another program.
        disk.other_bytes = disk.total_bytes - held_bytes - 10 * MIB + 200_000
        await monitor.step()
        assert monitor.state is DiskState.DEGRADED
        await host.keeper.step()
        await monitor.step()
        assert monitor.state is DiskState.OK
        assert disk.cached_bytes > held_bytes // 2
