"""A real broker's cleaner joins what an erasure rewrote with what it did not: both tiers go on as before."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.e2e.archives import archived_manifest, base_of_active, closed_segments, read_records, segment_keys
from tests.e2e.cleaned_topics import cleaned_to, create, let_cleaner_at
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import consumed
from tests.e2e.spark.keyed_topics import SECRET, assert_sound, config_of
from tests.support.daemon import kafka_config, running_daemon, write_config
from tieringd.spark.jobs.erase import erase


@pytest.fixture
def cleaning(behind):
    """Give a broker whose cleaner checks every moment."""
    return behind.cluster


async def write(cluster, topic, numbers):
    """Write a few keys over and over, and one in five that stays; in the second segment there is SECRET."""
    random = Random(numbers.start)
    async with cluster.producer(max_batch_size=100_000) as producer:
        for number in numbers:
            key = b"key-%d" % (number % 7) if number % 5 else b"stays-%d" % number
            key = SECRET if number == 25 else key
            await producer.send_and_wait(topic, random.randbytes(60_000), key=key, partition=0)


async def cleaned(cluster, topic, directory):
    """Return when the broker has cleaned all that is closed."""
    async with asyncio.timeout(60):
        while cleaned_to(cluster, topic) != base_of_active(directory):  # noqa: ASYNC110 there is no event
            await asyncio.sleep(0.1)


# Long: the broker's cleaner has to run twice, and an erasure runs on Spark.
async def test_log_is_trimmed_though_the_cleaner_has_joined_its_files(  # noqa: PLR0917 - fixtures
    cleaning, seaweedfs, topic, objects, prefix, tmp_path, spark
):
    """
    Segments that the erasure left alone follow the cleaner.

    The key stays out, though the broker has it.
    """
    directory = cleaning.log_dir() / f"{topic}-0"
    await create(cleaning, topic, "compact,delete")
    await write(cleaning, topic, range(90))

    def config(*, is_trimmed):
        properties = {"redpanda.remote.write": True, "redpanda.remote.read": is_trimmed}
        found = kafka_config(
            cleaning,
            seaweedfs,
            tmp_path / "state",
            bucket=BUCKET,
            prefix=prefix,
            topics={topic: properties},
            cloud_storage_housekeeping_interval_ms=500,
        )
        return write_config(tmp_path / "tieringd.yaml", found)

    path = config(is_trimmed=False)
    with running_daemon(path) as daemon:
        daemon.until_next_offset(topic, base_of_active(directory))
    report = erase(spark, config_of(path), topics=[topic], keys=[SECRET], requested_by="dpo@example.org")
    assert (report.faults, report.figures["records_removed"]) == ((), 1)
    erased = archived_manifest(objects, topic)
    assert sum(one.is_rewritten for one in erased.segments) == 1

    let_cleaner_at(cleaning, topic)
    await cleaned(cleaning, topic, directory)
    # It joins what was small enough when it came.
    await write(cleaning, topic, range(90, 130))
    await cleaned(cleaning, topic, directory)
    active = base_of_active(directory)
    (rewritten,) = [one for one in erased.segments if one.is_rewritten]
    assert rewritten.base_offset not in closed_segments(directory), "it is joined with the one before it"
    given = [one for one in await consumed(cleaning, topic, "read_uncommitted") if one.offset < active]
    assert SECRET in {one.key for one in given}

    path = config(is_trimmed=True)
    with running_daemon(path) as daemon:
        daemon.until(lambda: not closed_segments(directory), "the log is trimmed to its active segment")

    manifest = archived_manifest(objects, topic)
    assert rewritten in manifest.segments
    within = range(rewritten.base_offset, rewritten.next_offset)
    archived = read_records(path, topic, "--isolation", "read_uncommitted")
    assert [one for one in archived if one.offset not in within] == [
        one for one in given if one.offset not in within
    ]
    assert SECRET not in {one.key for one in archived}
    assert not [key for key in segment_keys(manifest) if SECRET in objects.read(key)]
    assert_sound(path)
