"""Erasure on Spark of what a real broker wrote: no byte is left in the bucket, and a record of it is."""

# Long: jobs of Spark rewrite archives, and every record is read again.

from __future__ import annotations

import hashlib
import json

import pytest

from tests.e2e.archives import archived_manifest, segment_keys, unreferenced
from tests.e2e.spark.keyed_topics import (
    SECRET,
    KeyedTopic,
    archive_once,
    archived_records,
    assert_sound,
    config_of,
    without,
)
from tests.support.daemon import running_daemon
from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.spark.jobs.erase import erase

WHO = {"requested_by": "dpo@example.org", "reason": "request 4711"}


@pytest.fixture
def keyed(kafka, topic, objects):
    return KeyedTopic(kafka, topic, objects)


def holding(objects, text: bytes) -> list[str]:
    """Return the keys of the objects that have *text* in them."""
    return [key for key in objects.keys() if text in (objects.read(key) or b"")]  # noqa: SIM118 a method


async def test_every_record_of_a_key_goes_and_is_noted(keyed, write_kafka_config, spark):
    """Old versions, tombstones and aborted ones; nothing else, and the bucket holds no byte of the key."""
    await keyed.create()
    await keyed.write(seed=5)
    path = write_kafka_config(topics={keyed.name: {"redpanda.remote.write": True}})
    archive_once(path)
    before = keyed.manifest
    records = archived_records(path, keyed.name)
    assert holding(keyed.objects, SECRET) == sorted(segment_keys(before))
    expected = without(records, {SECRET})

    report = erase(spark, config_of(path), topics=[keyed.name], keys=[SECRET, b"never written"], **WHO)

    assert report.faults == ()
    removed = len(records["read_uncommitted"]) - len(expected["read_uncommitted"])
    assert report.figures["records_removed"] == removed > 0
    assert archived_records(path, keyed.name) == expected
    after = keyed.manifest
    assert [one.base_offset for one in after.segments] == [one.base_offset for one in before.segments]
    # Readers of before may be at it: the old objects go later.
    assert holding(keyed.objects, SECRET) == sorted(segment_keys(before))
    assert_sound(path)

    done = json.loads(keyed.objects.read(report.figures["record"]))
    begun = json.loads(keyed.objects.read(report.figures["record"].replace("-done", "-begun")))
    assert begun.items() <= done.items()
    assert done["key_sha256"] == sorted(hashlib.sha256(key).hexdigest() for key in (SECRET, b"never written"))
    assert (done["requested_by"], done["reason"], done["topics"]) == (*WHO.values(), [keyed.name])
    (partition,) = done["partitions"]
    assert partition["partition"]["topic_id"] == before.partition.topic_id
    assert (partition["records"], partition["replaced"]) == (removed, segment_keys(before))
    assert partition["stored"] == segment_keys(after)
    assert (done["faults"], done["deleted_at_ms"]) == ([], None)
    assert partition["deletion_due_at_ms"] - partition["retired_at_ms"] == 3_600_000

    again = erase(spark, config_of(path), topics=[keyed.name], keys=[SECRET], delete_after_ms=0, **WHO)

    assert (again.figures["records_removed"], again.figures["deleted_segments"]) == (0, len(before.segments))
    assert holding(keyed.objects, SECRET) == []
    assert (keyed.manifest.retired, unreferenced(keyed.objects, [keyed.manifest])) == ((), [])
    assert archived_records(path, keyed.name) == expected
    assert_sound(path)


async def test_daemon_does_not_bring_it_back(keyed, write_kafka_config, spark, tmp_path):
    """The daemon deletes the old objects, trims its log, merges and scrubs, and the key stays gone."""
    await keyed.create()
    await keyed.write(seed=6)
    path = write_kafka_config(
        topics={keyed.name: {"remote.storage.enable": True}},
        archive_delete_delay_ms="500ms",
        cloud_storage_housekeeping_interval_ms=500,
        cloud_storage_enable_scrubbing=True,
        cloud_storage_idle_timeout_ms="200ms",
        cloud_storage_segment_size_target="4MiB",
    )
    with running_daemon(path, tmp_path / "daemon.log") as daemon:
        daemon.until(lambda: keyed.is_archived, "all that is closed is archived")
        expected = without(archived_records(path, keyed.name), {SECRET})
        report = erase(spark, config_of(path), topics=[keyed.name], keys=[SECRET], **WHO)
        assert report.faults == ()
        daemon.until(lambda: not keyed.manifest.retired, "the replaced objects are deleted")
        daemon.until(lambda: not holding(keyed.objects, SECRET), "no object has the key")
        daemon.until_rounds(10)
        assert holding(keyed.objects, SECRET) == []
        assert archived_records(path, keyed.name) == expected
    assert_sound(path)


async def test_all_archives_of_a_name_are_gone_over(keyed, write_kafka_config, spark, kafka):
    """A topic that was deleted and created again has two; both have the key, and lose it."""
    path = write_kafka_config(topics={keyed.name: {"redpanda.remote.write": True}})
    for seed in (7, 8):
        await keyed.create()
        await keyed.write(seed=seed, records=80)
        archive_once(path)
        await kafka.delete_topic(keyed.name)
    assert len(holding(keyed.objects, SECRET)) > 2

    report = erase(spark, config_of(path), topics=[keyed.name], keys=[SECRET], delete_after_ms=0, **WHO)

    assert (report.faults, report.figures["partitions_changed"]) == ((), 2)
    assert holding(keyed.objects, SECRET) == []
    with pytest.raises(ValueError, match="unpack"):
        archived_manifest(keyed.objects, keyed.name)


async def test_erasure_that_says_too_little_changes_nothing(keyed, write_kafka_config, spark):
    """No key, no requester, or no such topic: nothing is stored, not even a record."""
    path = write_kafka_config(topics={keyed.name: {"redpanda.remote.write": True}})
    before = keyed.objects.keys()
    with pytest.raises(ConfigError, match="no key is given"):
        erase(spark, config_of(path), topics=[keyed.name], keys=[], **WHO)
    with pytest.raises(ConfigError, match="the name of the person who requested the erasure is missing"):
        erase(spark, config_of(path), topics=[keyed.name], keys=[SECRET], requested_by=" ")
    with pytest.raises(ObjectNotFound, match="no topic named"):
        erase(spark, config_of(path), topics=[keyed.name], keys=[SECRET], **WHO)
    assert keyed.objects.keys() == before


async def test_quarantine_is_told_of(keyed, write_kafka_config, spark):
    """Objects that no manifest names are there under their old keys, and may hold the record."""
    await keyed.create()
    await keyed.write(seed=9, records=80)
    path = write_kafka_config(topics={keyed.name: {"redpanda.remote.write": True}})
    archive_once(path)
    (key, *_) = segment_keys(keyed.manifest)
    keyed.objects.write(f"quarantine/objects/{key}", b"a copy")
    keyed.objects.write("quarantine/objects/other", b"not ours")

    report = erase(spark, config_of(path), topics=[keyed.name], keys=[SECRET], **WHO)

    assert report.figures["quarantined_objects"] == 1
