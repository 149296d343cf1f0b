"""A topic that is deleted takes its archive with it, and one that is created again begins anew."""

# Long: a broker is formatted again, and grace periods run out.

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.e2e.archives import (
    archived_bytes,
    archived_manifests,
    assert_whole,
    base_of_active,
    closed_segments,
    read_records,
)
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import kafka_config, run_json, running_daemon, write_config
from tests.support.kafka import KafkaCluster

if TYPE_CHECKING:
    from pathlib import Path

_VALUES = [bytes([number]) * 100_000 for number in range(35)]
_PACE = {
    "cloud_storage_topic_purge_grace_period_ms": "1s",
    "cloud_storage_housekeeping_interval_ms": "500ms",
}


def remote_delete_of(objects, topic) -> bool | None:
    """None as long as the topic manifest, which comes after the first segments, is not there."""
    keys = [key for key in objects.keys() if f"/{topic}_" in key and key.endswith("topic_manifest.json")]  # noqa: SIM118
    return json.loads(objects.read(keys[0]))["remote_delete"] if keys else None


# Long: a grace period runs out.
async def test_archive_of_a_deleted_topic_is_purged(kafka, write_kafka_config, objects, topic):
    """Nothing of it is left after the grace but a mark; one of the same name is whole, and so are others."""
    stays = f"{topic}-stays"
    path = write_kafka_config(topics={f"{topic}*": {"redpanda.remote.write": True}}, **_PACE)
    with running_daemon(path) as daemon:
        # The one that stays comes first: only a topic that is no younger vouches for the other's end.
        for name in (stays, topic):
            await kafka.create_topic(name, configs=SEGMENTS)
            await kafka.produce(name, _VALUES, max_batch_size=200_000)
            daemon.until_next_offset(name, base_of_active(kafka.log_dir() / f"{name}-0"))
        (old_id,) = archived_manifests(objects, topic)
        daemon.until(lambda: remote_delete_of(objects, topic), "remote.delete is recorded")

        await kafka.delete_topic(topic)
        daemon.until(lambda: not daemon.partition(topic), "the deleted topic is not archived any more")
        await kafka.create_topic(topic, configs=SEGMENTS)
        await kafka.produce(topic, _VALUES[::-1][:25], max_batch_size=200_000)
        daemon.until_next_offset(topic, base_of_active(kafka.log_dir() / f"{topic}-0"))
        daemon.until(
            lambda: [key for key in objects.keys() if old_id in key and "topic_manifest" not in key] == [],  # noqa: SIM118
            "every object of the deleted topic is gone",
        )
        daemon.until(
            lambda: daemon.metric("tieringd_archive_purged_topics_total") == 1, "the purge is recorded"
        )

    states = {row["topic_id"]: row for row in run_json("archive", "topics", "--config", str(path))}
    assert states[old_id]["lifecycle"] == "purged"
    assert "purged " in states[old_id]["remark"]
    assert sorted(row["lifecycle"] for row in states.values()) == ["live", "live", "purged"]
    for name in (topic, stays):
        closed = closed_segments(kafka.log_dir() / f"{name}-0")
        assert archived_bytes(path, name) == b"".join(closed.values())
    assert_whole(path)


# Long: a broker is formatted again.
async def test_cluster_that_was_lost_is_not_purged(seaweedfs, prefix, objects, topic, tmp_path):
    """Formatted again under its old id, it deletes only what it deletes itself; the rest can be restored."""
    old, lost = f"{topic}-old", f"{topic}-lost"

    def config_of(name: str, cluster: KafkaCluster) -> Path:
        changes = _PACE | {"topics": {f"{topic}*": {"redpanda.remote.write": True}}}
        state = tmp_path / f"{name}-state"
        config = kafka_config(cluster, seaweedfs, state, bucket=BUCKET, prefix=prefix, **changes)
        return write_config(tmp_path / f"{name}.yaml", config)

    async def archive(cluster: KafkaCluster, daemon, *names: str) -> None:
        for name in names:
            await cluster.create_topic(name, configs=SEGMENTS)
            await cluster.produce(name, _VALUES, max_batch_size=200_000)
            daemon.until_next_offset(name, base_of_active(cluster.log_dir() / f"{name}-0"))

    first = await KafkaCluster.start(tmp_path / "first")
    try:
        path = config_of("first", first)
        with running_daemon(path) as daemon:
            await archive(first, daemon, old, lost)
            end = daemon.next_offset(lost)
    finally:
        await first.kill()

    second = await KafkaCluster.start(tmp_path / "second", cluster_id=first.cluster_id)
    try:
        path = config_of("second", second)
        with running_daemon(path) as daemon:
            await archive(second, daemon, f"{topic}-new", topic)
            daemon.until(lambda: remote_delete_of(objects, topic), "remote.delete is recorded")
            await second.delete_topic(topic)
            daemon.until(
                lambda: daemon.metric("tieringd_archive_purged_topics_total") == 1, "its own is purged"
            )
    finally:
        await second.kill()

    states = {row["topic"]: row["lifecycle"] for row in run_json("archive", "topics", "--config", str(path))}
    assert states == {old: "live", lost: "live", f"{topic}-new": "live", topic: "purged"}
    assert len(read_records(path, lost)) == end
    assert_whole(path)
