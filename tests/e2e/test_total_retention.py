"""Total retention beside a real broker: Amazon MSK's example with seconds for days, and by size."""

# Long: retention runs by real time on a real broker.

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.e2e.archives import (
    archived_manifest,
    assert_whole,
    base_of_active,
    closed_segments,
    data_keys,
    read_records,
)
from tests.e2e.sample_topics import SEGMENTS, consumed
from tests.support.daemon import run_json, run_well, running_daemon
from tests.support.topic_config import set_topic_config

if TYPE_CHECKING:
    from pathlib import Path

_LONG_MS = 3_600_000
_LOCAL_MS, _TOTAL_MS = 5_000, 20_000
"""How much older records become before they leave the disk, and before they leave the archive."""
_VALUES = [bytes([number]) * 100_000 for number in range(15)]
"""One closed segment of a MiB, and an active one."""
_PACE = {"cloud_storage_housekeeping_interval_ms": "500ms", "archive_delete_delay_ms": "500ms"}


def directory_of(kafka, topic) -> Path:
    return kafka.log_dir() / f"{topic}-0"


def ms_since(time_ms: int) -> int:
    return int(time.time() * 1000) - time_ms


# Long: retention runs by real time on a real broker.
async def test_msk_example_from_t0_to_t3(kafka, write_kafka_config, objects, topic):
    """
    Copied once closed; off the disk after local retention, out of the archive after retention.

    Each retention is set when the state before its end has been seen, however long that took.
    """
    managed = {"remote.storage.enable": True, "tieringd.managed.retention": True}
    config = write_kafka_config(topics={topic: managed}, **_PACE)
    retention = {"retention.ms": str(_LONG_MS), "local.retention.ms": str(_LONG_MS)}
    await kafka.create_topic(topic, configs=SEGMENTS | retention)
    directory = directory_of(kafka, topic)

    with running_daemon(config) as daemon:
        # T1: copied as soon as it is tiered, and still local; the active segment is not eligible.
        await kafka.produce(topic, _VALUES, max_batch_size=200_000)
        daemon.until(lambda: daemon.next_offset(topic), "segment 0 is in the archive")
        (zero,) = closed_segments(directory)
        before = await consumed(kafka, topic, "read_uncommitted")
        newest_ms = max(one.timestamp_ms for one in before)
        (stored,) = archived_manifest(objects, topic).segments
        assert stored.base_offset == zero
        archived = read_records(config, topic)
        assert archived == before[: stored.last_offset + 1]

        # T2: past local retention it goes from the broker, and stays in the archive.
        local_ms = ms_since(newest_ms) + _LOCAL_MS
        set_topic_config(kafka.bootstrap, topic, "local.retention.ms", str(local_ms))
        daemon.until(lambda: not closed_segments(directory), "segment 0 has left the disk")
        assert ms_since(stored.max_timestamp_ms) >= local_ms
        assert len(archived_manifest(objects, topic).segments) == 1
        assert read_records(config, topic) == archived

        # T3: past retention it goes from the archive: out of the manifest, and then out of the bucket.
        total_ms = ms_since(newest_ms) + _TOTAL_MS
        set_topic_config(kafka.bootstrap, topic, "retention.ms", str(total_ms))
        daemon.until(lambda: not archived_manifest(objects, topic).segments, "segment 0 has expired")
        assert ms_since(stored.max_timestamp_ms) >= total_ms
        daemon.until(lambda: not data_keys(objects), "its objects are deleted")
        daemon.until(lambda: not archived_manifest(objects, topic).retired, "and the manifest says so")
        assert daemon.metric("tieringd_archive_expired_segments_total", topic=topic) == 1
        assert daemon.metric("tieringd_archive_deleted_segments_total", topic=topic) == 1

        # The active segment is never touched: it never closed, however old its records are.
        while ms_since(newest_ms) < 1.2 * total_ms:
            daemon.until_rounds(1)
        assert [path.name for path in directory.glob("*.log")] == [f"{stored.next_offset:020d}.log"]
        assert await consumed(kafka, topic, "read_uncommitted") == before[stored.next_offset :]
        assert archived_manifest(objects, topic).start_offset == stored.next_offset
        explained = run_json("explain", topic, "0", "--config", str(config))
        assert explained["total_retention_ms"] == total_ms
        assert explained["expired_offset"] == stored.next_offset
    assert_whole(config)

    # What was taken over goes back as it was.
    run_well("topic", "release", topic, "--config", str(config))
    async with kafka.admin() as admin:
        (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    settings = {name: value for *_, entries in answer.resources for name, value, *_ in entries}
    assert settings["retention.ms"] == str(total_ms)


async def test_partition_is_kept_within_its_bytes_over_both_tiers(kafka, write_kafka_config, objects, topic):
    """Size removal goes on until at or under the limit, however much of it is on the broker as well."""
    limit_bytes = 3 << 20
    config = write_kafka_config(
        topics={
            topic: {
                "remote.storage.enable": True,
                "retention.bytes": limit_bytes,
                "local.retention.bytes": 1 << 20,
            }
        },
        **_PACE,
    )
    await kafka.create_topic(topic, configs=SEGMENTS)
    directory = directory_of(kafka, topic)
    await kafka.produce(topic, _VALUES * 6, max_batch_size=200_000)
    before = await consumed(kafka, topic, "read_uncommitted")
    closed = closed_segments(directory)
    active_bytes = max(directory.glob("*.log")).stat().st_size

    with running_daemon(config) as daemon:
        daemon.until(
            lambda: daemon.next_offset(topic) == base_of_active(directory),
            "all closed segments are archived",
        )
        daemon.until(
            lambda: archived_manifest(objects, topic).segments.total_bytes + active_bytes <= limit_bytes,
            "the oldest have expired",
        )
        daemon.until(
            lambda: len(data_keys(objects)) == len(archived_manifest(objects, topic).segments),
            "their objects are deleted",
        )
        daemon.until_rounds(3)

    manifest = archived_manifest(objects, topic)
    kept = manifest.segments.total_bytes + active_bytes
    oldest_gone = max(base for base in closed if base < manifest.start_offset)
    assert kept <= limit_bytes < kept + len(closed[oldest_gone])
    assert read_records(config, topic) == before[manifest.start_offset : manifest.next_offset]
    assert_whole(config)
