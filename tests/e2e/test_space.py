"""A real broker on a disk of its own that is a third of what is written to it."""

# Long: a broker fills a real disk several times.

from __future__ import annotations

import asyncio
import os

import pytest

from tests.e2e.archives import assert_whole, read_records
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import consumed
from tests.support.daemon import kafka_config, running_daemon, write_config
from tests.support.gateway_clients import read_aiokafka
from tests.support.gateways import BrokerBehind
from tests.support.kafka import KafkaCluster
from tests.support.small_disks import small_disk_at

_DISK_BYTES = 96 << 20
_VALUE_BYTES = 64 << 10
_COUNT = 3 * _DISK_BYTES // _VALUE_BYTES
_BATCH = 64
_LAG = 4 * _BATCH
"""Records that the archive may be behind: 16 MiB."""
SMALL_SEGMENTS = {"segment.bytes": str(1 << 20), "retention.ms": "-1", "file.delete.delay.ms": "100"}


@pytest.fixture
async def cluster(tmp_path):
    """Give a broker whose log directory is a small filesystem of its own."""
    with small_disk_at(tmp_path / "disk", _DISK_BYTES) as root:
        cluster = await KafkaCluster.start(root)
        try:
            yield cluster
        finally:
            await cluster.kill()


@pytest.fixture
def config(cluster, seaweedfs, prefix, tmp_path):
    """Give a configuration whose local targets are only advice, and whose disk leaves the logs two fifths."""
    settings = kafka_config(
        cluster,
        seaweedfs,
        tmp_path / "state",
        bucket=BUCKET,
        prefix=prefix,
        retention_local_strict=False,
        retention_local_trim_interval="500ms",
        retention_local_target_capacity_percent=40,
        pin_segments=False,
        cloud_storage_enable_remote_write=True,
    )
    return write_config(tmp_path / "tieringd.yaml", settings)


def values(count: int) -> list[bytes]:
    return [number.to_bytes(8, "big") * (_VALUE_BYTES // 8) for number in range(count)]


# Long: three times a disk is written.
async def test_broker_whose_disk_is_too_small_never_fills_it(cluster, config, topic):
    """Three times the disk is written; nothing is lost, and the disk is never full."""
    await cluster.create_topic(topic, configs=SMALL_SEGMENTS)
    written, most_used = values(_COUNT), 0.0
    with running_daemon(config) as daemon:
        for first in range(0, _COUNT, _BATCH):
            await cluster.produce(topic, written[first : first + _BATCH], max_batch_size=_VALUE_BYTES * 2)
            found = os.statvfs(cluster.log_dir(1))
            most_used = max(most_used, 1 - found.f_bavail / found.f_blocks)
            # About as fast as the store takes it: a producer that is faster is degraded mode's business.
            await asyncio.sleep(0.2)
            wanted = first + _BATCH - _LAG
            daemon.until(
                lambda at=wanted: (daemon.next_offset(topic) or 0) >= at, "the archive is not far behind"
            )
        daemon.until(
            lambda: (daemon.metric("tieringd_space_log_bytes") or 0) <= 0.45 * _DISK_BYTES,
            "the logs are within their area",
        )
        assert daemon.metric("tieringd_space_planned_bytes_total") > 0
        local = await consumed(cluster, topic, "read_uncommitted")
        archived = read_records(config, topic)
    assert most_used < 0.95
    assert_whole(config)
    assert local[0].offset > 0
    # Trims go on: one of them may pass the consumer between two of its reads.
    seen = {one.offset: one.value for one in (*archived, *local)}
    assert [seen[offset] for offset in sorted(seen)] == written
    first_archived, last_archived = archived[0].offset, archived[-1].offset
    assert (first_archived, len(archived)) == (0, last_archived + 1)


# Long: readers fill a cache, and producers a disk.
async def test_cache_gives_way_to_the_log(seaweedfs, prefix, tmp_path, topic):
    """Readers fill the cache beside the log; when producers need the disk it goes first, and both go on."""
    with small_disk_at(tmp_path / "disk", _DISK_BYTES) as root:
        behind = await BrokerBehind.start(root)
        try:
            settings = kafka_config(
                behind.cluster,
                seaweedfs,
                tmp_path / "state",
                bucket=BUCKET,
                prefix=prefix,
                gateway=behind.gateway_config,
                topics={topic: {"remote.storage.enable": True, "local.retention.bytes": 2 << 20}},
                cloud_storage_cache_directory=str(root / "cache"),
                cloud_storage_cache_size_percent=40,
                cloud_storage_cache_check_interval_ms="200ms",
                retention_local_trim_interval="200ms",
                retention_local_target_capacity_percent=40,
                pin_segments=False,
            )
            await _read_and_fill(behind, write_config(tmp_path / "tieringd.yaml", settings), topic)
        finally:
            await behind.cluster.kill()


async def _read_and_fill(behind, config, topic) -> None:
    cluster, disk = behind.cluster, behind.cluster.log_dir().parent.parent
    await cluster.create_topic(topic, configs=SMALL_SEGMENTS)
    await cluster.create_topic(f"{topic}.untiered", configs=SMALL_SEGMENTS)
    written = values(_COUNT // 4)
    await cluster.produce(topic, written, max_batch_size=_VALUE_BYTES * 2)

    def cached() -> float:
        return daemon.metric("tieringd_space_cache_bytes") or 0

    def logged() -> float:
        return daemon.metric("tieringd_space_log_bytes") or _DISK_BYTES

    def used() -> float:
        found = os.statvfs(disk)
        return 1 - found.f_bavail / found.f_blocks

    with running_daemon(config) as daemon:
        # The broker unlinks what was trimmed a while later. What is local is not read from the archive.
        daemon.until(lambda: logged() < 0.1 * _DISK_BYTES, "the log is trimmed, and its files are gone")
        assert await _values(behind, topic, len(written)) == written
        daemon.until(lambda: cached() > 0.2 * _DISK_BYTES, "the cache is filled")
        before, area = cached(), daemon.metric("tieringd_space_cache_area_bytes")
        # A log that is not tiered takes more than its area: what it needs is taken from the cache alone.
        rest = values(int(0.6 * _DISK_BYTES) // _VALUE_BYTES)
        for first in range(0, len(rest), _BATCH):
            await cluster.produce(
                f"{topic}.untiered", rest[first : first + _BATCH], max_batch_size=_VALUE_BYTES * 2
            )
            assert used() < 0.98
            await asyncio.sleep(0.3)
            # A producer that is faster than the daemon notices is degraded mode's business.
            daemon.until(lambda: used() < 0.85, "the cache gives way to what was written")
        daemon.until(lambda: cached() < before / 2, "the cache has given way")
        assert daemon.metric("tieringd_space_cache_area_bytes") < area
        assert await _values(behind, f"{topic}.untiered", len(rest)) == rest
        assert await _values(behind, topic, len(written)) == written
        assert used() < 0.98


async def _values(behind, topic, count) -> list[bytes]:
    return [value for _, value in await read_aiokafka(behind.bootstrap, topic, count)]
