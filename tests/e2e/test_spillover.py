"""A history beyond its manifest, on a real broker and S3: read, restored, expired and deleted from."""

# Long: one history goes through a broker, S3, the gateway, a restore and deletions.

from __future__ import annotations

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from tests.e2e.archives import (
    archived_manifest,
    assert_whole,
    base_of_active,
    data_keys,
    read_log,
    read_records,
    until_trimmed,
)
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS, consumed
from tests.support.daemon import kafka_config, run_json, running_daemon, write_config

_RECORDS = 2800
_VALUES = [b"%d" % number + b"." * (number * number % 97) for number in range(_RECORDS)]
"""Of many sizes: the table of equal segments is so small that the least manifest may hold all of them."""
_TINY = SEGMENTS | {"segment.index.bytes": "96", "index.interval.bytes": "0"}
"""Segments of a dozen batches: the broker begins another one when an index is full."""


class Through:
    """A cluster as clients of the gateway see it."""

    def __init__(self, bootstrap):
        self.bootstrap = bootstrap


@pytest.fixture
def config_of(behind, seaweedfs, tmp_path, prefix):
    """Give a function that writes the configuration of a daemon with a gateway and small manifests."""

    def write(topic, **properties):
        (tmp_path / f"tieringd-{len(properties)}").mkdir()
        tiered = {"remote.storage.enable": True, "local.retention.bytes": 8000} | properties
        config = kafka_config(
            behind.cluster,
            seaweedfs,
            tmp_path / "state",
            bucket=BUCKET,
            prefix=prefix,
            topics={topic: tiered},
            gateway=behind.gateway_config,
            cloud_storage_target_manifest_size_bytes="4KiB",
            cloud_storage_housekeeping_interval_ms="500ms",
            # A merge would leave one segment where the test counts many.
            cloud_storage_enable_segment_merging=False,
            archive_delete_delay_ms="500ms",
        )
        # A daemon's log lies beside its configuration, and each daemon has one of its own.
        return write_config(tmp_path / f"tieringd-{len(properties)}" / "tieringd.yaml", config)

    return write


def spillover_keys(objects) -> list[str]:
    return [key for key in objects.keys() if "/manifest." in key]  # noqa: SIM118 a method, not a mapping's


def spilled_segments(objects, topic) -> int:
    spillover = archived_manifest(objects, topic).spillover
    return 0 if spillover is None else spillover.segments


async def filled(cluster, topic):
    """Write a topic of many segments, and return its records."""
    await cluster.create_topic(topic, configs=_TINY)
    async with cluster.producer(linger_ms=0) as producer:
        for value in _VALUES:
            await producer.send_and_wait(topic, value, partition=0)
    return await consumed(cluster, topic, "read_uncommitted")


async def delete_before(cluster, topic, offset):
    """Delete records as a user does."""
    async with cluster.admin() as admin:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=offset)})


async def restored(fresh, config, topic):
    """Bring a topic back on another cluster, and return its records there."""
    await fresh.create_topic(topic, configs=_TINY)
    await fresh.broker.stop()
    options = ("--topics", topic.replace(".", r"\."), "--config", str(config))
    (row,) = run_json("recover", "directory", str(fresh.log_dir()), *options)
    await fresh.launch()
    assert row["start_offset"] == 0
    return await consumed(fresh, topic, "read_uncommitted")


def until_deleted(daemon, objects, topic):
    """Return when the bucket has no data but what the archive holds."""
    daemon.until(
        lambda: len(data_keys(objects)) == archived_manifest(objects, topic).segment_count,
        "the objects of what was let go of are gone",
    )


# Long: one history goes through a broker, S3, the gateway, a restore and deletions.
async def test_history_beyond_its_manifest(behind, fresh, config_of, objects, topic):
    """Clients, `read`, the gateway and `recover` find spilled segments. Expired ones are really gone."""
    cluster, through = behind.cluster, Through(behind.bootstrap)
    before = await filled(cluster, topic)
    assert len(before) == _RECORDS

    config = config_of(topic)
    with running_daemon(config) as daemon:
        daemon.until(lambda: spillover_keys(objects), "the oldest segments are spilled")
        daemon.until_next_offset(topic, base_of_active(cluster.log_dir() / f"{topic}-0"))
        until_trimmed(daemon)
        daemon.until(lambda: spilled_segments(objects, topic) > 32, "more of them are spilled")
        manifest = archived_manifest(objects, topic)
        assert manifest.segment_count > 150
        local = await consumed(cluster, topic, "read_uncommitted")
        assert len(local) < _RECORDS - 1000
        assert await consumed(through, topic, "read_uncommitted") == before
        assert read_log(config, topic) == before
        assert read_records(config, topic) == before[: manifest.next_offset]
        assert archived_manifest(objects, topic).start_offset == 0, "a trim of ours deletes nothing"
    assert_whole(config)
    assert await restored(fresh, config, topic) == before[: manifest.next_offset]

    # Retention reaches into what is spilled.
    limit_bytes = manifest.size_bytes // 2
    with running_daemon(config_of(topic, **{"retention.bytes": limit_bytes})) as daemon:
        daemon.until(
            lambda: archived_manifest(objects, topic).size_bytes <= limit_bytes, "the oldest have expired"
        )
        daemon.until_rounds(10)
        until_deleted(daemon, objects, topic)
        expired = archived_manifest(objects, topic)
        assert expired.start_offset > 0
        assert await consumed(through, topic, "read_uncommitted") == before[expired.start_offset :]

        # A user deletes records up to the middle of a segment that the broker has: all before it goes.
        start_offset = local[0].offset + 7
        await delete_before(cluster, topic, start_offset)
        daemon.until(
            lambda: archived_manifest(objects, topic).start_offset == start_offset,
            "the archive begins where the user said",
        )
        until_deleted(daemon, objects, topic)
        daemon.until(lambda: not spillover_keys(objects), "and so are all spillover manifests")
        assert await consumed(through, topic, "read_uncommitted") == before[start_offset:]
        assert read_log(config, topic) == before[start_offset:]
    assert_whole(config)
