"""Compaction on Spark of what a real broker wrote: the latest of each key, and nothing lost on the way."""

# Long: a broker compacts, Spark runs several jobs, and one of them is killed in a process of its own.

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial

import pytest
import yaml

from tests.e2e.archives import (
    FileObjects,
    archived_manifest,
    read_log,
    read_records,
    unreferenced,
    until_trimmed,
)
from tests.e2e.log_files import write_partition
from tests.e2e.sample_topics import ISOLATIONS
from tests.e2e.spark.keyed_topics import (
    KeyedTopic,
    archive_once,
    archived_records,
    assert_sound,
    config_of,
)
from tests.support.daemon import directory_config, endpoint_properties, running_daemon, write_config
from tests.support.fault_proxy import StallRequest, fault_proxy
from tests.support.processes import Server
from tests.unit.spark.rewriting import latest_of
from tieringd.spark.jobs import swapping
from tieringd.spark.jobs.chosen import rounds
from tieringd.spark.jobs.compact import compact
from tieringd.spark.jobs.compaction_range import CompactOptions


@pytest.fixture
def keyed(kafka, topic, objects):
    return KeyedTopic(kafka, topic, objects)


async def test_archive_is_what_a_consumer_would_keep(keyed, write_kafka_config, spark):
    """The latest committed record of each key below the archive's end; then nothing is left to be done."""
    await keyed.create()
    await keyed.write(seed=1, codec="gzip")
    path = write_kafka_config(topics={keyed.name: {"redpanda.remote.write": True}})
    archive_once(path)
    before = keyed.manifest
    seen = await keyed.consumed(before.next_offset)
    expected = latest_of(seen["read_committed"])
    assert len(expected) < len(seen["read_committed"]) // 2
    told = []

    report = compact(
        spark,
        config_of(path),
        topics=[keyed.name],
        has_broker=False,
        progress=lambda *said: told.append(said),
    )

    assert report.faults == ()
    assert report.figures["records_removed"] == len(seen["read_uncommitted"]) - len(expected)
    assert report.figures["keys"] == len({one.key for one in expected if one.key is not None})
    assert {what for what, _, _ in told} == {"reading keys", "rewriting segments"}
    assert archived_records(path, keyed.name) == dict.fromkeys(ISOLATIONS, expected)
    after = keyed.manifest
    assert (after.next_offset, after.gaps, len(after.segments)) == (before.next_offset, (), 1)
    assert after.size_bytes == report.figures["size_bytes_after"] < before.size_bytes // 2
    assert_sound(path)

    again = compact(spark, config_of(path), topics=[keyed.name])
    assert (again.faults, again.figures["partitions_changed"]) == ((), 0)
    assert keyed.manifest == after

    # All tombstones are old, and due as soon as no reader waits for them.
    options = CompactOptions(delete_retention_ms=0, drops_keyless=True)
    last = compact(
        spark, config_of(path), topics=[keyed.name], options=options, has_broker=False, delete_after_ms=0
    )
    assert last.faults == ()
    left = [one for one in expected if one.key is not None and one.value is not None]
    tombstones = [one for one in expected if one.key is not None and one.value is None]
    assert last.figures["tombstones_removed"] == len(tombstones) > 0
    assert archived_records(path, keyed.name) == dict.fromkeys(ISOLATIONS, left)
    final = keyed.manifest
    assert (final.retired, unreferenced(keyed.objects, [final])) == ((), [])
    assert_sound(path)


async def test_daemon_goes_on_beside_the_job(keyed, write_kafka_config, spark, tmp_path):
    """
    The daemon uploads what comes, trims compacted segments, and puts nothing back.

    Both tiers are one log.
    """
    await keyed.create()
    await keyed.write(seed=1)
    config = {
        "topics": {keyed.name: {"remote.storage.enable": True}},
        "cloud_storage_housekeeping_interval_ms": 500,
        "cloud_storage_enable_segment_merging": False,
    }
    path = write_kafka_config(**config)
    with running_daemon(path, tmp_path / "first.log") as daemon:
        daemon.until(lambda: keyed.is_archived, "all that is closed is archived")
        report = compact(spark, config_of(path), topics=[keyed.name])
        assert report.faults == ()
        compacted_to = keyed.manifest.next_offset
        await keyed.write(seed=2)
        daemon.until(lambda: keyed.is_archived, "the archive goes on")
        assert keyed.manifest.next_offset > compacted_to
    write_kafka_config(**config | {"retention_local_target_bytes_default": 1})
    with running_daemon(path, tmp_path / "second.log") as daemon:
        until_trimmed(daemon)
        assert not daemon.events("local segment differs from its stored copy; it is not trimmed")
        seen = await keyed.consumed()
        first_offset = seen["read_uncommitted"][0].offset
        assert first_offset >= compacted_to
        printed = {one: read_log(path, keyed.name, "--isolation", one) for one in ISOLATIONS}
    for isolation in ISOLATIONS:
        assert [one for one in printed[isolation] if one.offset >= first_offset] == seen[isolation]
        head = [one for one in printed[isolation] if one.offset < compacted_to]
        assert head == latest_of(head)
        assert head
    assert_sound(path)


# Long: a JVM of its own is killed, and another one does the work again.
async def test_job_that_is_killed_leaves_the_archive_as_it_was(
    keyed, write_kafka_config, spark, seaweedfs, tmp_path
):
    """
    A job that is killed while it writes replaces nothing, and another run does all of its work.

    No manifest names what the killed job had stored.
    """
    await keyed.create()
    await keyed.write(seed=3, records=200)
    topics = {keyed.name: {"redpanda.remote.write": True}}
    path = write_kafka_config(topics=topics, cloud_storage_segment_size_target=1)
    archive_once(path)
    before, records = keyed.manifest, archived_records(path, keyed.name)
    (tmp_path / "work").mkdir()
    begun = []

    def stalls_later(exchange):
        """Let the first object pass, and nothing after it. The job cannot end before it is killed."""
        if exchange.method != "PUT" or "-rewritten-" not in exchange.path:
            return None
        begun.append(exchange.path)
        return StallRequest() if len(begun) > 1 else None

    async with fault_proxy(seaweedfs.endpoint_url) as proxy:
        proxy.weather = stalls_later
        through = tmp_path / "through.yaml"
        write_config(through, yaml.safe_load(path.read_text()) | endpoint_properties(proxy.url))
        arguments = [str(tmp_path / "work"), str(through), keyed.name]
        command = [sys.executable, "-m", "tests.support.spark_job", *arguments]
        job = Server(command, output=tmp_path / "job.log")
        job.launch()
        try:
            await asyncio.to_thread(
                job.wait_until,
                lambda: any("-rewritten-" in key for key in keyed.objects.keys()),  # noqa: SIM118 a method
                timeout_seconds=240,
            )
        finally:
            # Its JVM and its workers are of its process group.
            os.killpg(job.pid, signal.SIGKILL)
            job.stop()

    assert keyed.manifest == before
    assert archived_records(path, keyed.name) == records
    assert any("-rewritten-" in key for key in unreferenced(keyed.objects, [before]))
    assert_sound(path)

    report = compact(spark, config_of(path), topics=[keyed.name])
    assert report.faults == ()
    expected = latest_of(records["read_committed"])
    assert archived_records(path, keyed.name) == dict.fromkeys(ISOLATIONS, expected)
    assert_sound(path)


async def test_round_that_fails_leaves_what_those_before_it_did(tmp_path, spark, monkeypatch):
    """The report has both, the second partition is as it was, and another run does it."""
    for number in range(2):
        write_partition(tmp_path / "logs", f"orders-{number}", segments=4)
    bucket, aside = tmp_path / "archive", tmp_path / "aside"
    bucket.mkdir()
    properties = directory_config([tmp_path / "logs"], bucket, tmp_path / "state")
    path = write_config(tmp_path / "tieringd.yaml", properties)
    archive_once(path)
    objects = FileObjects(bucket)
    before = [archived_manifest(objects, "orders", number) for number in range(2)]
    # A second round needs a tebibyte of segments otherwise.
    monkeypatch.setattr("tieringd.spark.jobs.compact.rounds", partial(rounds, round_bytes=1))
    phases = []

    def take_the_bucket_away(what, done, total):
        if done == total and phases[-1:] != [what]:
            phases.append(what)
            if len(phases) == 3:  # keys of the second partition have been read
                bucket.rename(aside)
                bucket.touch()

    report = compact(spark, config_of(path), topics=["orders"], progress=take_the_bucket_away)
    bucket.unlink()
    aside.rename(bucket)

    (fault,) = report.faults
    assert fault.startswith("the job stopped before its end; run it again: a task failed: ")
    assert report.figures["partitions_changed"] == 1
    after = [archived_manifest(objects, "orders", number) for number in range(2)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True]
    assert_sound(path)

    again = compact(spark, config_of(path), topics=["orders"])
    assert (again.faults, again.figures["partitions_changed"]) == ((), 1)
    for number in range(2):
        assert [one.key for one in read_records(path, "orders", number=number)] == [b"k0", b"k1", b"k2"]
    assert_sound(path)


async def test_retention_that_takes_a_segment_each_time_does_not_stop_the_job(tmp_path, spark, monkeypatch):
    """The run whose first segment is gone is rewritten without it, until it can be swapped in."""
    write_partition(tmp_path / "logs", "orders-0", segments=8)
    bucket = tmp_path / "archive"
    bucket.mkdir()
    path = write_config(
        tmp_path / "tieringd.yaml", directory_config([tmp_path / "logs"], bucket, tmp_path / "state")
    )
    archive_once(path)
    objects = FileObjects(bucket)
    before = archived_manifest(objects, "orders", 0)
    real, expired = swapping.swap, []

    async def swap_after_retention(bucket, partition, successors, *args, **options):
        if len(expired) < 3:

            async def change(manifest):
                return manifest.expired(1, now_ms=1)

            await bucket.manifests.edit(partition, change)
            expired.append(len(successors[0].parts))
        return await real(bucket, partition, successors, *args, **options)

    # Retention has to win against the job each time, so it runs right before the swap.
    monkeypatch.setattr(swapping, "swap", swap_after_retention)
    report = compact(spark, config_of(path), topics=["orders"], has_broker=False)

    assert report.faults == ()
    assert expired == [len(before.segments) - taken for taken in range(3)]
    after = archived_manifest(objects, "orders", 0)
    assert after.start_offset == before.segments[3].base_offset
    assert (len(after.segments), after.next_offset) == (1, before.next_offset)
    assert [one.key for one in read_records(path, "orders", number=0)] == [b"k0", b"k1", b"k2"]
    assert_sound(path)
