"""A broker with two log directories moves a partition there and back, under a daemon and a producer."""

from __future__ import annotations

import pytest

from tests.e2e.archives import archived_manifest, assert_whole, base_of_active, read_log
from tests.e2e.sample_topics import SEGMENTS
from tests.support.cluster import cluster_admin
from tests.support.daemon import kafka_config, running_daemon, write_config
from tests.support.kafka import KafkaCluster

_SLOW = {"replica.alter.log.dirs.io.max.bytes.per.second": str(4 << 20)}
"""A move of some megabytes takes a second, so that the daemon meets a partition in two directories."""


def values(first: int, last: int) -> list[bytes]:
    return [b"%d:" % number + bytes(100_000) for number in range(first, last)]


@pytest.fixture
async def two_directories(tmp_path):
    """Give a broker of its own with two log directories, and the directories."""
    paths = [tmp_path / "kafka" / "broker-1" / "data", tmp_path / "second"]
    cluster = await KafkaCluster.start(
        tmp_path / "kafka", properties={"log.dirs": ",".join(map(str, paths)), **_SLOW}
    )
    yield cluster, paths
    await cluster.kill()


# Long: a broker of its own starts, and moves a log at a bounded rate, there and back.
async def test_partition_that_is_moved_is_archived_on(two_directories, seaweedfs, objects, prefix, tmp_path):
    """There and back, while records come: each is read once and in order, and nothing counts as missing."""
    cluster, paths = two_directories
    topic = "moved"
    await cluster.create_topic(topic, configs=SEGMENTS)
    broker = {
        "kind": "kafka",
        "log_dirs": [str(path) for path in paths],
        "bootstrap": [cluster.broker.bootstrap],
        "node_id": 1,
    }
    local = {topic: {"redpanda.remote.write": True, "retention.local.target.bytes": 4 << 20}}
    config = write_config(
        tmp_path / "tieringd.yaml",
        kafka_config(
            *(cluster, seaweedfs, tmp_path / "state"),
            bucket="e2e",
            prefix=prefix,
            broker=broker,
            topics=local,
        ),
    )
    name = f"{topic}-0"
    written = values(0, 60)
    with running_daemon(config) as daemon:
        await cluster.produce(topic, written, max_batch_size=200_000)
        for turn in (1, 2):
            (source,) = [path for path in paths if (path / name).exists()]
            (target,) = set(paths) - {source}
            async with cluster_admin(cluster) as admin:
                await admin.move_log_dir(topic, target)
            more = values(60 * turn, 60 * (turn + 1))
            await cluster.produce(topic, more, max_batch_size=200_000)
            written += more
            daemon.until(
                lambda source=source, target=target: (
                    (target / name).exists() and not (source / name).exists()
                ),
                "the partition has moved",
            )
            daemon.until_next_offset(topic, base_of_active(target / name))
        daemon.until(lambda: daemon.events("local log trimmed", topic=topic), "it is trimmed as well")
        assert not daemon.events("archiver stopped")
    found = read_log(config, topic)
    assert [record.offset for record in found] == list(range(len(written)))
    assert [record.value for record in found] == written
    assert not archived_manifest(objects, topic).gaps
    assert_whole(config)
