"""Compacted topics on a real broker: the archive follows its cleaner, and gives what the broker gives."""

from __future__ import annotations

from random import Random

import pytest

from tests.e2e.archives import archived_manifest, assert_whole, base_of_active, closed_segments, read_records
from tests.e2e.cleaned_topics import cleaned_to, create, let_cleaner_at
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import consumed
from tests.support.daemon import kafka_config, run_json, running_daemon, write_config
from tests.support.gateway_clients import read_aiokafka, read_librdkafka

ISOLATIONS = ("read_uncommitted", "read_committed")
_KEYS = 7


@pytest.fixture
def config_of(behind, seaweedfs, tmp_path, prefix):
    """Give a function that writes the configuration of a daemon with a gateway."""

    def write(topic, *, is_trimmed=False):
        # A log that is read only from the broker is never trimmed. Else all that is durable goes at once.
        config = kafka_config(
            behind.cluster,
            seaweedfs,
            tmp_path / "state",
            bucket=BUCKET,
            prefix=prefix,
            topics={topic: {"redpanda.remote.write": True, "redpanda.remote.read": is_trimmed}},
            cloud_storage_housekeeping_interval_ms=500,
            gateway=behind.gateway_config,
        )
        return write_config(tmp_path / "tieringd.yaml", config)

    return write


async def write(behind, topic, *, seed):
    """
    Write a few keys again and again, some in transactions that end segments later, well or not.

    Some keys are deleted, and many records are of no client that reads committed ones.
    """
    random = Random(seed)
    cluster = behind.cluster
    async with (
        cluster.producer(max_batch_size=200_000) as plain,
        cluster.producer(transactional_id=f"{topic}-{seed}", max_batch_size=200_000) as in_doubt,
    ):
        for turn in range(4):
            await in_doubt.begin_transaction()
            for number in range(18):
                key = b"key-%d" % random.randrange(_KEYS)
                value = None if number == 5 else random.randbytes(60_000)
                producer = in_doubt if number % 3 == 0 else plain
                await producer.send_and_wait(topic, value, key=key, partition=0)
            await (in_doubt.abort_transaction() if turn % 2 else in_doubt.commit_transaction())
        # The marker of the last transaction is written a little after the answer.
        await cluster.until_stable(topic)
        for number in range(20):
            await plain.send_and_wait(topic, random.randbytes(60_000), key=b"last-%d" % number, partition=0)


def stored_sizes(manifest):
    """Return the size of each stored segment by its base offset."""
    return {one.base_offset: one.size_bytes for one in manifest.segments}


def until_archived(daemon, behind, topic):
    """Return when all that is closed is in the archive."""
    directory = behind.cluster.log_dir() / f"{topic}-0"
    daemon.until_next_offset(topic, base_of_active(directory))


def until_followed(daemon, behind, objects, topic):
    """Return when the cleaner has been over all that is closed, and the archive has what it left."""
    directory = behind.cluster.log_dir() / f"{topic}-0"
    active = base_of_active(directory)
    daemon.until(
        lambda: cleaned_to(behind.cluster, topic) == active, "the broker has compacted all that is closed"
    )

    def is_so():
        sizes = {base: len(data) for base, data in closed_segments(directory).items()}
        return sizes == stored_sizes(archived_manifest(objects, topic))

    daemon.until(is_so, "the archive has what the cleaner left")


async def as_the_broker_gives(behind, topic, isolation, next_offset):
    return [one for one in await consumed(behind.cluster, topic, isolation) if one.offset < next_offset]


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
async def test_archive_gives_what_the_broker_gives(behind, config_of, objects, topic, policy):
    """The archived records are the broker's after each run of the cleaner, in both isolation levels."""
    await create(behind.cluster, topic, policy)
    config = config_of(topic)
    await write(behind, topic, seed=1)
    with running_daemon(config) as daemon:
        until_archived(daemon, behind, topic)
        original = archived_manifest(objects, topic)
        before = {one: await as_the_broker_gives(behind, topic, one, 10**9) for one in ISOLATIONS}
        let_cleaner_at(behind.cluster, topic)
        until_followed(daemon, behind, objects, topic)
        for seed in (2, 3):
            await write(behind, topic, seed=seed)
            until_archived(daemon, behind, topic)
            until_followed(daemon, behind, objects, topic)
        saved = daemon.metric("tieringd_archive_compacted_bytes_before_total", topic=topic)
        saved -= daemon.metric("tieringd_archive_compacted_bytes_after_total", topic=topic)

    manifest = archived_manifest(objects, topic)
    assert (manifest.start_offset, manifest.gaps, manifest.replacements) == (0, (), ())
    assert saved > original.size_bytes // 2
    for isolation in ISOLATIONS:
        archived = read_records(config, topic, "--isolation", isolation)
        assert archived == await as_the_broker_gives(behind, topic, isolation, manifest.next_offset)
        assert len(archived) < len(before[isolation])
    assert_whole(config)
    explained = run_json("explain", topic, "0", "--format", "json", "--config", str(config))
    assert {one["state"] for one in explained["segments"]} == {"kept", "active"}


async def test_compacted_segments_are_trimmed_and_still_read(behind, config_of, objects, topic, tmp_path):
    """Compacted segments of a `compact,delete` topic read as before through the gateway once trimmed."""
    await create(behind.cluster, topic, "compact,delete")
    keep = config_of(topic)
    await write(behind, topic, seed=1)
    with running_daemon(keep) as daemon:
        until_archived(daemon, behind, topic)
        let_cleaner_at(behind.cluster, topic)
        until_followed(daemon, behind, objects, topic)
    whole = {
        one: [(each.offset, each.value) for each in await consumed(behind.cluster, topic, one)]
        for one in ISOLATIONS
    }

    config = config_of(topic, is_trimmed=True)
    with running_daemon(config, tmp_path / "trims.log") as daemon:
        daemon.until(lambda: daemon.events("local log trimmed"), "the log is trimmed")
        daemon.until_rounds(3)
        left = await consumed(behind.cluster, topic, "read_uncommitted")
        assert left[0].offset > whole["read_uncommitted"][0][0]
        for isolation in ISOLATIONS:
            expected = whole[isolation]
            settings = {"isolation_level": isolation}
            assert await read_aiokafka(behind.bootstrap, topic, len(expected), **settings) == expected
            librdkafka = {"isolation.level": isolation}
            assert read_librdkafka(behind.bootstrap, topic, len(expected), **librdkafka) == expected
    assert_whole(config)
