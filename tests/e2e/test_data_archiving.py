"""Data archiving: a topic that is only written to the bucket, its recovery, and how it ends."""

from __future__ import annotations

import signal

import yaml

from tests.e2e.archives import archived_manifest, assert_whole, closed_segments, data_keys
from tests.e2e.sample_topics import SEGMENTS, consumed
from tests.support.cluster import cluster_admin
from tests.support.daemon import run_json, run_well, running_daemon

_VALUES = [bytes([number]) * 100_000 for number in range(45)]
_WRITE_ONLY = {"redpanda.remote.write": True, "redpanda.remote.read": False}
_PACE = {"cloud_storage_housekeeping_interval_ms": "500ms", "archive_delete_delay_ms": "500ms"}


async def test_topic_that_is_only_written_comes_back(kafka, fresh, write_kafka_config, objects, topic):
    """The broker keeps the local log, and a fresh broker gets every archived record at its offset."""
    config = write_kafka_config(topics={topic: _WRITE_ONLY})
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    before = await consumed(kafka, topic, "read_uncommitted")
    run_well("run", "--once", "--config", str(config))
    manifest = archived_manifest(objects, topic)
    assert list(closed_segments(kafka.log_dir() / f"{topic}-0")) == [
        one.base_offset for one in manifest.segments
    ]

    await fresh.create_topic(topic, configs=SEGMENTS)
    await fresh.broker.stop()
    (row,) = run_json(
        *("recover", "directory", str(fresh.log_dir()), "--topics", topic.replace(".", r"\.")),
        *("--config", str(config)),
    )
    assert (row["start_offset"], row["next_offset"]) == (0, manifest.next_offset)
    await fresh.launch()
    assert await consumed(fresh, topic, "read_uncommitted") == before[: manifest.next_offset]


async def test_writing_stops_and_retention_empties_the_archive(kafka, write_kafka_config, objects, topic):
    """Switched off, nothing more is copied and what is there stays; lowered retention deletes it."""
    config = write_kafka_config(topics={topic: _WRITE_ONLY}, **_PACE)
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES[:20], max_batch_size=200_000)

    def reload(**properties) -> None:
        changed = yaml.safe_load(config.read_text()) | {"topics": {topic: properties}}
        config.write_text(yaml.safe_dump(changed))
        count = len(daemon.events("configuration reloaded"))
        daemon.send_signal(signal.SIGHUP)
        daemon.until(lambda: len(daemon.events("configuration reloaded")) > count, "it is reloaded")
        daemon.until_rounds(2)

    with running_daemon(config) as daemon:
        daemon.until(lambda: daemon.next_offset(topic), "the first segments are archived")
        daemon.until_rounds(2)
        first = archived_manifest(objects, topic)

        reload(**_WRITE_ONLY | {"redpanda.remote.write": False})
        await kafka.produce(topic, _VALUES, max_batch_size=200_000)
        daemon.until_rounds(5)
        assert archived_manifest(objects, topic) == first
        assert_whole(config)

        reload(**_WRITE_ONLY)
        daemon.until(
            lambda: archived_manifest(objects, topic).next_offset > first.next_offset, "archiving goes on"
        )

        # Clients have only what the broker has, so its own retention comes first, and the archive's then.
        async with cluster_admin(kafka) as admin:
            await admin.configure(topic, {"retention.ms": "1000"})
        daemon.until(lambda: not archived_manifest(objects, topic).segments, "every segment has expired")
        daemon.until(lambda: not data_keys(objects), "its objects are deleted")
