"""A topic that is deleted takes its archive with it, and one that is created again begins anew."""

from __future__ import annotations

import json

from tests.e2e.archives import archived_bytes, archived_manifests, assert_whole, closed_segments
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import run_json, running_daemon

_VALUES = [bytes([number]) * 100_000 for number in range(35)]
_PACE = {
    "cloud_storage_topic_purge_grace_period_ms": "1s",
    "cloud_storage_housekeeping_interval_ms": "500ms",
}


def base_of_active(kafka, topic) -> int:
    return max(int(path.stem) for path in (kafka.log_dir() / f"{topic}-0").glob("*.log"))


def remote_delete_of(objects, topic) -> bool | None:
    """None as long as the topic manifest, which comes after the first segments, is not there."""
    keys = [key for key in objects.keys() if f"/{topic}_" in key and key.endswith("topic_manifest.json")]  # noqa: SIM118
    return json.loads(objects.read(keys[0]))["remote_delete"] if keys else None


async def test_archive_of_a_deleted_topic_is_purged(kafka, write_kafka_config, objects, topic):
    """Nothing of it is left after the grace but a mark; one of the same name is whole, and so are others."""
    stays = f"{topic}-stays"
    path = write_kafka_config(topics={f"{topic}*": {"redpanda.remote.write": True}}, **_PACE)
    with running_daemon(path) as daemon:
        # The one that stays comes first: only a topic that is no younger vouches for the other's end.
        for name in (stays, topic):
            await kafka.create_topic(name, configs=SEGMENTS)
            await kafka.produce(name, _VALUES, max_batch_size=200_000)
            daemon.until_next_offset(name, base_of_active(kafka, name))
        (old_id,) = archived_manifests(objects, topic)
        daemon.until(lambda: remote_delete_of(objects, topic), "remote.delete is recorded")

        await kafka.delete_topic(topic)
        daemon.until(lambda: not daemon.partition(topic), "the deleted topic is not archived any more")
        await kafka.create_topic(topic, configs=SEGMENTS)
        await kafka.produce(topic, _VALUES[::-1][:25], max_batch_size=200_000)
        daemon.until_next_offset(topic, base_of_active(kafka, topic))
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
