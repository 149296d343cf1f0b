"""Which topics are archived, and which incarnation of them."""

from __future__ import annotations

from tests.e2e.archives import (
    archived_bytes,
    archived_manifest,
    archived_manifests,
    base_of_active,
    closed_segments,
    data_keys,
    stored_segments,
)
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import run_json, running_daemon

_VALUES = [bytes([number]) * 100_000 for number in range(35)]


async def test_topic_created_again_shares_nothing_with_the_old_one(kafka, write_kafka_config, objects, topic):
    """A topic that is deleted and created again has a manifest of its own; the old one stays as it was."""
    properties = {"redpanda.remote.write": True, "redpanda.remote.delete": False}
    path = write_kafka_config(topics={topic: properties})
    with running_daemon(path) as daemon:
        await kafka.create_topic(topic, configs=SEGMENTS)
        await kafka.produce(topic, _VALUES, max_batch_size=200_000)
        daemon.until_next_offset(topic, base_of_active(kafka.log_dir() / f"{topic}-0"))
        old = archived_manifest(objects, topic)
        old_bytes = stored_segments(objects, old)

        await kafka.delete_topic(topic)
        daemon.until(lambda: not daemon.partition(topic), "the deleted topic is not archived any more")
        await kafka.create_topic(topic, configs=SEGMENTS)
        await kafka.produce(topic, _VALUES[::-1][:25], max_batch_size=200_000)
        daemon.until_next_offset(topic, base_of_active(kafka.log_dir() / f"{topic}-0"))
        # Topic manifests are kept beside the rounds.
        daemon.until(
            lambda: len(run_json("archive", "topics", "--config", str(path))) == 2, "both topics are listed"
        )

    both = archived_manifests(objects, topic)
    old_id = old.partition.topic_id
    (new_id,) = both.keys() - {old_id}
    assert both[old_id] == old
    assert stored_segments(objects, both[old_id]) == old_bytes
    closed = closed_segments(kafka.log_dir() / f"{topic}-0")
    assert stored_segments(objects, both[new_id]) == closed
    assert both[new_id].gaps == ()
    listed = run_json("archive", "topics", "--config", str(path))
    assert {row["topic_id"] for row in listed} == {old_id, new_id}
    assert archived_bytes(path, topic) == b"".join(closed.values())


async def test_only_topics_with_remote_write_are_archived(kafka, write_kafka_config, objects, topic):
    """A topic that is switched off by name, though its pattern is on, never reaches the bucket."""
    off, unnamed = f"{topic}-off", f"other.{topic}"
    for name in (topic, off, unnamed):
        await kafka.create_topic(name, configs=SEGMENTS)
        await kafka.produce(name, _VALUES[:15], max_batch_size=200_000)
    topics = {f"{topic}*": {"redpanda.remote.write": True}, off: {"redpanda.remote.write": False}}
    with running_daemon(write_kafka_config(topics=topics, retention_local_target_bytes_default=1)) as daemon:
        daemon.until_next_offset(topic, base_of_active(kafka.log_dir() / f"{topic}-0"))
        daemon.until_rounds(3)
        assert [one["topic"] for one in daemon.status()["partitions"]] == [topic]

    assert data_keys(objects)
    others = [key for key in objects.keys() if off in key or unnamed in key]  # noqa: SIM118
    # Of topics that are not archived the bucket knows how they began, and nothing else.
    assert all(key.endswith("/topic_manifest.json") for key in others)
    assert len(closed_segments(kafka.log_dir() / f"{off}-0")) >= 1


async def test_compacted_topic_is_archived_and_never_trimmed(kafka, write_kafka_config, objects, topic):
    """Kafka does not trim a compact-only topic: it is archived, stays on the broker, and no trim is sent."""
    await kafka.create_topic(
        topic, configs=SEGMENTS | {"cleanup.policy": "compact", "min.compaction.lag.ms": "3600000"}
    )
    async with kafka.producer(max_batch_size=200_000) as producer:
        for number, value in enumerate(_VALUES):
            await producer.send_and_wait(topic, value, key=b"%d" % number, partition=0)
    path = write_kafka_config(
        topics={topic: {"redpanda.remote.write": True}}, retention_local_target_bytes_default=1
    )
    with running_daemon(path) as daemon:
        daemon.until_next_offset(topic, base_of_active(kafka.log_dir() / f"{topic}-0"))
        daemon.until_rounds(5)
        assert daemon.events("trim refused") == []
        assert not daemon.metric("tieringd_trim_failures_total", topic=topic)
        # A single round that the broker answers late makes it unready until the next one.
        daemon.until(lambda: daemon.get("/readyz")[0] == 200, "the daemon is ready")

    closed = closed_segments(kafka.log_dir() / f"{topic}-0")
    assert len(closed) >= 3
    assert stored_segments(objects, archived_manifest(objects, topic)) == closed
