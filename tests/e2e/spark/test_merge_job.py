"""Merging whole archives on Spark: fewer objects, the same records, with a daemon beside it or without."""

from __future__ import annotations

import pytest

from tests.e2e.archives import unreferenced, until_trimmed
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
from tieringd.spark.jobs.erase import erase
from tieringd.spark.jobs.merge import merge

_SIZES = {
    "cloud_storage_segment_size_target": "4MiB",
    "cloud_storage_segment_size_min": "2MiB",
    "cloud_storage_enable_segment_merging": False,
}


@pytest.fixture
def keyed(kafka, topic, objects):
    return KeyedTopic(kafka, topic, objects)


async def test_small_segments_become_few(keyed, write_kafka_config, spark):
    """Spilled history too; each byte is there in its order, and another run has nothing to do."""
    await keyed.create()
    for seed in range(3):
        await keyed.write(seed=seed)
    path = write_kafka_config(
        topics={keyed.name: {"redpanda.remote.write": True}},
        cloud_storage_target_manifest_size_bytes=4096,
        **_SIZES,
    )
    archive_once(path)
    before, records = keyed.manifest, archived_records(path, keyed.name)

    report = merge(spark, config_of(path), topics=[keyed.name])
    assert (report.faults, report.figures["runs"]) == ((), 0), "the broker has all of it"
    report = merge(spark, config_of(path), topics=[keyed.name], has_broker=False)

    assert report.faults == ()
    after = keyed.manifest
    assert report.figures["segments_before"] - report.figures["segments_after"] == (
        before.segment_count - after.segment_count
    )
    assert after.segment_count <= before.segment_count // 2
    assert (after.size_bytes, after.next_offset) == (before.size_bytes, before.next_offset)
    assert all(one.size_bytes <= 4 << 20 for one in after.segments)
    assert archived_records(path, keyed.name) == records
    assert_sound(path)

    again = merge(spark, config_of(path), topics=[keyed.name], has_broker=False, delete_after_ms=0)
    assert (again.faults, again.figures["runs"]) == ((), 0)
    assert (keyed.manifest.retired, unreferenced(keyed.objects, [keyed.manifest])) == ((), [])
    assert archived_records(path, keyed.name) == records


async def test_compacted_topics_are_left_alone(keyed, write_kafka_config, spark):
    """Compacted topics are not merged if they follow the broker's cleaner."""
    await keyed.create()
    await keyed.write(seed=1)
    properties = {"redpanda.remote.write": True, "cleanup.policy": "compact,delete"}
    path = write_kafka_config(topics={keyed.name: properties}, **_SIZES)
    archive_once(path)
    before = keyed.manifest

    report = merge(spark, config_of(path), topics=[keyed.name])

    assert (report.figures["compacted_topics_left"], report.figures["runs"]) == (1, 0)
    assert keyed.manifest == before


async def test_daemon_goes_on_and_what_was_erased_stays_so(keyed, write_kafka_config, spark, tmp_path):
    """Rewritten segments are trimmed; then they are joined beside the daemon, and stay marked."""
    await keyed.create()
    await keyed.write(seed=2)
    config = {"topics": {keyed.name: {"remote.storage.enable": True}}} | _SIZES
    path = write_kafka_config(**config)
    with running_daemon(path, tmp_path / "first.log") as daemon:
        daemon.until(lambda: keyed.is_archived, "everything closed is archived")
        expected = without(archived_records(path, keyed.name), {SECRET})
        who = {"requested_by": "dpo@example.org"}
        assert erase(spark, config_of(path), topics=[keyed.name], keys=[SECRET], **who).faults == ()
        end = keyed.manifest.next_offset
        assert any(one.is_rewritten for one in keyed.manifest.segments)
        await keyed.write(seed=3)
        daemon.until(lambda: keyed.is_archived and keyed.manifest.next_offset > end, "the archive goes on")
    path = write_kafka_config(**config | {"retention_local_target_bytes_default": 1})
    with running_daemon(path, tmp_path / "second.log") as daemon:
        until_trimmed(daemon)
        assert not daemon.events("local segment differs from its stored copy; it is not trimmed")
        assert (await keyed.consumed())["read_uncommitted"][0].offset >= end
        assert merge(spark, config_of(path), topics=[keyed.name]).faults == ()
        assert any(one.is_rewritten and one.size_bytes > 2 << 20 for one in keyed.manifest.segments)
        daemon.until_rounds(2)
    found = archived_records(path, keyed.name)
    assert {name: [one for one in some if one.offset < end] for name, some in found.items()} == expected
    assert_sound(path)
