"""Recovery of topics into a fresh broker: the same records at the same offsets, and a log that goes on."""

from __future__ import annotations

import pytest_asyncio

from tests.e2e.archives import archived_manifest
from tests.e2e.sample_topics import ISOLATIONS, SAMPLE_TOPICS, SEGMENTS, consumed
from tests.support.daemon import run_command, run_json
from tests.support.kafka import KafkaCluster

_VALUES = [bytes([number]) * 100_000 for number in range(45)]


@pytest_asyncio.fixture
async def fresh(tmp_path):
    """Give a broker of a cluster of its own."""
    cluster = await KafkaCluster.start(tmp_path / "fresh")
    yield cluster
    await cluster.stop()


async def recovered(fresh, config, *topics, options=()):
    """Create *topics* on the fresh broker, restore them while it is stopped, start it; return the report."""
    for topic in topics:
        await fresh.create_topic(topic, configs=SEGMENTS)
    await fresh.broker.stop()
    pattern = "|".join(topic.replace(".", r"\.") for topic in topics)
    report = run_json(
        *("recover", "directory", str(fresh.log_dir()), "--topics", pattern, "--config", str(config)),
        *options,
    )
    await fresh.launch()
    return report


async def test_every_kind_of_topic_comes_back_record_by_record(kafka, fresh, samples, sample_objects):
    """All codecs, transactions, headers and times, in both isolation levels, and new records after them."""
    report = await recovered(fresh, samples.config, *SAMPLE_TOPICS)
    assert {row["topic"] for row in report} == set(SAMPLE_TOPICS)
    for topic in SAMPLE_TOPICS:
        end = archived_manifest(sample_objects, topic).next_offset
        await fresh.produce(topic, [b"after the recovery"])
        for isolation in ISOLATIONS:
            wanted = [one for one in await consumed(kafka, topic, isolation) if one.offset < end]
            found = await consumed(fresh, topic, isolation)
            assert [one for one in found if one.offset < end] == wanted
            assert [one.value for one in found if one.offset >= end] == [b"after the recovery"]
    assert any(row["ended_transactions"] for row in report)


async def test_newest_part_comes_back_with_its_offsets(kafka, fresh, write_kafka_config, objects, topic):
    """The log begins where the restored part does; a broker that restarts again reads the same."""
    config = write_kafka_config(topics={topic: {"remote.storage.enable": True}})
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    manifest = archived_manifest(objects, topic)
    newest = list(manifest.segments)[-2:]

    (row,) = await recovered(
        fresh, config, topic, options=("--last-bytes", str(sum(one.size_bytes for one in newest)))
    )

    assert (row["start_offset"], row["next_offset"]) == (newest[0].base_offset, manifest.next_offset)
    assert (row["segments"], row["left_segments"]) == (2, len(manifest.segments) - 2)
    wanted = [
        one
        for one in await consumed(kafka, topic, "read_uncommitted")
        if newest[0].base_offset <= one.offset < manifest.next_offset
    ]
    await fresh.produce(topic, [b"one more"])
    assert (await consumed(fresh, topic, "read_uncommitted"))[:-1] == wanted
    await fresh.restart()
    assert (await consumed(fresh, topic, "read_uncommitted"))[:-1] == wanted


async def test_restore_refuses_what_it_could_damage(kafka, fresh, samples):
    """A running broker, a topic that is not there, and one that holds records, each with the way out."""
    topic = SAMPLE_TOPICS[0]

    def told(*options):
        done = run_command(
            *("recover", "directory", str(fresh.log_dir()), "--topics", topic.replace(".", r"\.")),
            *("--config", str(samples.config), *options),
        )
        assert done.returncode in {1, 2}
        return done.stderr.decode()

    assert "a broker is running on" in told()
    await fresh.broker.stop()
    assert "create the topic with as many partitions" in told()
    await fresh.launch()
    await fresh.create_topic(topic, configs=SEGMENTS)
    await fresh.produce(topic, [b"mine"])
    await fresh.broker.stop()
    assert "holds records: a partition is restored only into an empty one" in told()
    await fresh.launch()
    assert [one.value for one in await consumed(fresh, topic, "read_uncommitted")] == [b"mine"]
