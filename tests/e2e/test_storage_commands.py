"""The commands that tell where a topic's bytes are, beside a real broker and a real store."""

from __future__ import annotations

import pytest

from tests.e2e.archives import archived_manifest, closed_segments, until_trimmed
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import kafka_config, run_json, run_well, running_daemon, write_config

_VALUES = [bytes([number]) * 100_000 for number in range(35)]
_COMPACTED = SEGMENTS | {"cleanup.policy": "compact", "min.compaction.lag.ms": "3600000"}


@pytest.fixture
def config(write_kafka_config, topic):
    """Give a configuration that keeps one MiB of the topic on the broker."""
    tiered = {"remote.storage.enable": True, "local.retention.bytes": 1 << 20}
    return write_kafka_config(topics={topic: tiered})


def file_bytes(kafka, topic) -> int:
    return sum(path.stat().st_size for path in (kafka.log_dir() / f"{topic}-0").glob("*.log"))


async def test_commands_tell_where_the_bytes_of_a_topic_are(kafka, config, objects, topic):
    """`explain`, `describe-storage` and `logdirs` agree with the files and the manifest after a trim."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    directory = kafka.log_dir() / f"{topic}-0"
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    before = sorted(closed_segments(directory))
    fresh = run_json("explain", topic, "0", "--config", str(config))
    assert [row["base_offset"] for row in fresh["segments"] if row["state"] == "due"] == before
    assert fresh["segments"][-1]["state"] == "active"

    with running_daemon(config) as daemon:
        until_trimmed(daemon)
        start_offset = daemon.events("local log trimmed")[-1]["log_start_offset"]
        daemon.until(
            lambda: min(closed_segments(directory)) == start_offset, "the broker has deleted the files"
        )

    manifest = archived_manifest(objects, topic)
    on_disk = sorted(closed_segments(directory))
    rows = run_json("explain", topic, "0", "--config", str(config))["segments"]
    assert [row["base_offset"] for row in rows if row["place"] == "archive"] == [
        base for base in before if base < on_disk[0]
    ]
    kept = [row for row in rows if row["place"] == "both"]
    assert [row["base_offset"] for row in kept] == on_disk
    assert all(f"local.retention.bytes={1 << 20} in the file" in row["reason"] for row in kept)

    storage = run_json("topic", "describe-storage", topic, "--config", str(config))
    (partition,) = storage["partitions"]
    assert storage["cloud_storage_mode"] == "full"
    assert partition["cloud_log_last_offset"] == manifest.next_offset - 1
    assert partition["cloud_log_size_bytes"] == manifest.segments.total_bytes
    assert (partition["local_log_start_offset"], partition["local_log_last_offset"]) == (on_disk[0], 34)
    assert partition["local_log_segment_count"] == len(on_disk) + 1
    assert partition["ms_since_last_manifest_upload"] <= partition["ms_since_last_segment_upload"]
    assert b"CLOUD-STORAGE-MODE" in run_well(
        "topic", "describe-storage", topic, "--print-all", "--config", str(config)
    )

    sizes = {
        row["dir"]: (row["broker"], row["size"], row["error"])
        for row in run_json("logdirs", "describe", "--topics", topic, "--config", str(config))
    }
    assert sizes == {
        str(kafka.log_dir()): (1, file_bytes(kafka, topic), None),
        f"remote://{BUCKET}": (1, manifest.segments.total_bytes, None),
    }


async def test_compact_only_topic_is_explained_as_never_trimmed(kafka, config, topic):
    """Kafka refuses to delete records of it, and each segment says so."""
    await kafka.create_topic(topic, configs=_COMPACTED)
    async with kafka.producer(max_batch_size=200_000) as producer:
        for value in _VALUES:
            await producer.send_and_wait(topic, value, key=value[:1], partition=0)
    run_well("run", "--once", "--config", str(config))
    found = run_json("explain", topic, "0", "--config", str(config))
    refusal = "Kafka refuses to delete records of a topic whose cleanup.policy is only compact"
    assert found["never_trimmed_because"] == refusal
    kept = [row for row in found["segments"] if row["place"] == "both"]
    assert {(row["state"], row["reason"]) for row in kept} == {("kept", refusal)}


async def test_commands_beside_a_follower_tell_what_is_known_there(
    brokers, seaweedfs, prefix, topic, tmp_path
):
    """A follower knows its files and the bucket; its daemon moves nothing; every broker tells its sizes."""
    await brokers.create_topic(topic, replicas=[[1, 2]], configs=SEGMENTS)
    await brokers.produce(topic, _VALUES, max_batch_size=200_000, acks="all")

    def config_beside(node_id):
        config = kafka_config(
            brokers,
            seaweedfs,
            tmp_path / f"state-{node_id}",
            bucket=BUCKET,
            prefix=prefix,
            node_id=node_id,
            topics={topic: {"remote.storage.enable": True}},
        )
        return str(write_config(tmp_path / f"{node_id}.yaml", config))

    run_well("run", "--once", "--config", config_beside(1))
    beside = config_beside(2)
    found = run_json("explain", topic, "0", "--config", beside)
    assert "another broker leads" in found["trim_because"]
    assert {row["state"] for row in found["segments"]} == {"kept", "active"}
    (row,) = run_json("topic", "describe-storage", topic, "--config", beside)["partitions"]
    assert (row["local_log_last_offset"], row["local_log_start_offset"]) == (None, 0)
    assert row["cloud_log_last_offset"] == found["archive_next_offset"] - 1
    rows = run_json("logdirs", "describe", "--topics", topic, "--config", config_beside(3))
    archived_bytes = row["cloud_log_size_bytes"]
    assert [(row["broker"], row["dir"]) for row in rows] == [
        (node_id, path)
        for node_id in (1, 2)
        for path in (str(brokers.log_dir(node_id)), f"remote://{BUCKET}")
    ]
    assert [row["size"] for row in rows if row["dir"].startswith("remote")] == [archived_bytes] * 2
    assert run_json("explain", topic, "0", "--config", config_beside(3))["trim_because"] == (
        "this broker has no replica of the partition"
    )
