"""Three brokers: what is uploaded when no segment closes, and what an open transaction holds back."""

# Long: three brokers, and a daemon beside each.

from __future__ import annotations

import json

from aiokafka.admin import RecordsToDelete
from aiokafka.structs import TopicPartition as ClientPartition

from tests.e2e.archives import (
    archived_bytes,
    archived_manifest,
    assert_whole,
    base_of_active,
    closed_segments,
    data_keys,
    read_records,
)
from tests.e2e.sample_topics import ISOLATIONS, SEGMENTS, consumed
from tests.support.daemon import run_json
from tieringd.formats.archive_owners import ARCHIVE_OWNERS_KEY, BROKER
from tieringd.formats.object_keys import brokers_prefix

_INTERVAL = {"cloud_storage_segment_max_upload_interval_sec": 2}
_VALUE_BYTES = 100_000
_LARGE = {"max_batch_size": 200_000}


def values(count: int) -> list[bytes]:
    return [bytes([number]) * _VALUE_BYTES for number in range(count)]


async def test_idle_timeout_uploads_the_stable_part_of_an_active_segment(brokers, daemons_of, objects, topic):
    """The active segment is archived within the interval, and later uploads go on from there."""
    await brokers.create_topic(topic, replicas=[[1, 2, 3], [2, 3, 1]], configs=SEGMENTS)
    daemons = daemons_of(topic, **_INTERVAL)
    daemons.launch()
    await brokers.produce(topic, [b"first"] * 10)
    daemons[1].until_next_offset(topic, 10)
    await brokers.produce(topic, [b"second"] * 5)
    daemons[1].until_next_offset(topic, 15)

    manifest = archived_manifest(objects, topic)
    uploads = daemons[1].metric("tieringd_uploads_total", topic=topic)
    assert not closed_segments(brokers.log_dir(1) / f"{topic}-0")
    assert (manifest.start_offset, manifest.gaps, manifest.faults()) == (0, (), ())
    assert len(manifest.segments) >= 2
    assert read_records(daemons.config(), topic) == await consumed(brokers, topic, "read_uncommitted")
    # The three daemons agree on whose the archive is.
    (owner,) = json.loads(objects.read(ARCHIVE_OWNERS_KEY))["clusters"].values()
    assert owner == BROKER

    # The other partition's uploads show that the interval has passed twice more.
    for count in (1, 2, 3):
        await brokers.produce(topic, [b"elsewhere"], partition=1)
        daemons[2].until_next_offset(topic, count, 1)

    assert archived_manifest(objects, topic) == manifest
    assert daemons[1].metric("tieringd_uploads_total", topic=topic) == uploads
    assert len([key for key in data_keys(objects) if f"/{topic}/0_" in key]) == len(manifest.segments)
    assert_whole(daemons.config())


async def test_segment_that_went_in_parts_is_trimmed_when_it_closes(brokers, daemons_of, objects, topic):
    """A segment that is archived in parts is let go like any other, and no record is lost between."""
    await brokers.create_topic(topic, replicas=[[1, 2, 3]], configs=SEGMENTS)
    properties = {"redpanda.remote.write": True, "retention.local.target.bytes": 1 << 20}
    daemons = daemons_of(topics={topic: properties}, **_INTERVAL)
    daemons.launch()
    written = values(46)
    for count in (3, 6):
        await brokers.produce(topic, written[count - 3 : count], **_LARGE)
        daemons[1].until_next_offset(topic, count)
    first_parts = [segment.base_offset for segment in archived_manifest(objects, topic).segments]
    assert len(first_parts) >= 2

    await brokers.produce(topic, written[6:], **_LARGE)
    directory = brokers.log_dir(1) / f"{topic}-0"
    daemons[1].until(lambda: daemons[1].events("local log trimmed"), "the log is trimmed")
    daemons[1].until(lambda: min(closed_segments(directory), default=0) > 0, "the broker has deleted files")
    daemons[1].until_next_offset(topic, len(written))

    archived = read_records(daemons.config(), topic)
    stored = [segment.base_offset for segment in archived_manifest(objects, topic).segments]
    assert [(one.offset, one.value) for one in archived] == list(enumerate(written))
    assert stored[: len(first_parts)] == first_parts
    left = await consumed(brokers, topic, "read_uncommitted")
    assert 0 < left[0].offset <= archived[-1].offset
    assert left == archived[left[0].offset :]
    assert not daemons.events("local segment differs from its stored copy; it is not trimmed")
    assert_whole(daemons.config())


async def test_open_transaction_holds_its_partition_back_and_says_so(brokers, daemons_of, objects, topic):
    """
    Records before an open transaction are archived, and none after its start.

    Metric, status page and command name the transaction.
    """
    await brokers.create_topic(topic, replicas=[[1, 2, 3]], configs=SEGMENTS)
    daemons = daemons_of(topic, **_INTERVAL)
    daemons.launch()
    leader = daemons[1]
    async with (
        brokers.producer(transactional_id=f"{topic}-short") as short,
        # It stays open until all is seen of it.
        brokers.producer(transactional_id=f"{topic}-long", transaction_timeout_ms=300_000) as long,
    ):
        await brokers.produce(topic, [b"plain"] * 3)
        await short.begin_transaction()
        await short.send_and_wait(topic, b"aborted", partition=0)
        await long.begin_transaction()
        held_from = (await long.send_and_wait(topic, b"open", partition=0)).offset
        # Its data lies below the last stable offset, and the marker that aborts it does not.
        await short.abort_transaction()
        await brokers.produce(topic, values(15), **_LARGE)
        leader.until_next_offset(topic, held_from)
        leader.until(lambda: (held_seconds(leader, topic) or 0) > 0, "the metric shows the transaction")
        leader.until(
            lambda: "a transaction is open" in (leader.partition(topic)["waits_because"] or ""),
            "the status page shows the transaction",
        )
        daemons.change(1, admin={"port": leader.admin_port})
        (described,) = run_json("archive", "describe", topic, "-c", str(daemons.config()))
        assert "a transaction is open" in described["waits_because"]
        leader.until_rounds(5)
        assert archived_manifest(objects, topic).next_offset == held_from == leader.next_offset(topic)
        assert b"aborted" in [one.value for one in read_records(daemons.config(), topic)]
        assert [one.value for one in committed(daemons, topic)] == [b"plain"] * 3

        await long.commit_transaction()
        await short.begin_transaction()
        await short.send_and_wait(topic, b"aborted as well", partition=0)
        await short.abort_transaction()
    await brokers.until_stable(topic)
    last_offset = await brokers.produce(topic, [b"end"])
    leader.until_next_offset(topic, last_offset + 1)
    leader.until(lambda: held_seconds(leader, topic) == 0, "the metric shows nothing")

    for isolation in ISOLATIONS:
        expected = await consumed(brokers, topic, isolation)
        assert read_records(daemons.config(), topic, "--isolation", isolation) == expected
    told = [one.value for one in committed(daemons, topic)]
    assert b"open" in told
    assert not [value for value in told if value.startswith(b"aborted")]
    assert_whole(daemons.config())


def held_seconds(daemon, topic):
    return daemon.metric("tieringd_upload_held_by_transaction_seconds", topic=topic, partition="0")


def committed(daemons, topic):
    return read_records(daemons.config(), topic, "--isolation", "read_committed")


async def test_topic_that_holds_data_is_archived_from_its_earliest_offset(
    brokers, daemons_of, objects, topic
):
    """A topic that is enabled late is archived from the first offset on disk, and nothing counts as lost."""
    await brokers.create_topic(topic, replicas=[[1, 2, 3]], configs=SEGMENTS)
    daemons = daemons_of()
    daemons.launch()
    await brokers.produce(topic, values(45), **_LARGE)
    directory = brokers.log_dir(1) / f"{topic}-0"
    first = sorted(closed_segments(directory))[1]
    async with brokers.admin() as admin:
        await admin.delete_records({ClientPartition(topic, 0): RecordsToDelete(first)})
    daemons[1].until(lambda: min(closed_segments(directory)) == first, "the broker has deleted the head")
    daemons[1].until_rounds(2)
    # What daemons tell each other of their brokers, and whose the archive is, is of no topic.
    told = (brokers_prefix(brokers.cluster_id), ARCHIVE_OWNERS_KEY)
    stored = [key for key in objects.keys() if not key.startswith(told)]  # noqa: SIM118 a method
    assert [key for key in stored if not key.endswith("/topic_manifest.json")] == []

    daemons.kill(1)
    daemons.change(1, topics={topic: {"redpanda.remote.write": True}})
    daemons.launch(1)
    daemons[1].until_next_offset(topic, base_of_active(directory))

    manifest = archived_manifest(objects, topic)
    assert (manifest.start_offset, manifest.gaps, manifest.faults()) == (first, (), ())
    closed = closed_segments(directory)
    assert archived_bytes(daemons.config(), topic) == b"".join(closed.values())
    assert not daemons.events("gap recorded in the archive")
    assert_whole(daemons.config())


async def test_manifests_exist_before_the_first_segment_closes(brokers, daemons_of, objects, topic):
    """A new topic is known to the bucket while its first segment is still open: leader, end and count."""
    await brokers.create_topic(topic, replicas=[[1, 2, 3], [2, 3, 1]], configs=SEGMENTS)
    await brokers.produce(topic, [b"one record"])
    daemons = daemons_of(topic)
    daemons.launch()
    daemons[1].until_next_offset(topic, 0)
    daemons[2].until_next_offset(topic, 0, 1)
    daemons[1].until(lambda: topic_manifests(objects), "the topic is known")

    for number in (0, 1):
        manifest = archived_manifest(objects, topic, number)
        assert (manifest.start_offset, manifest.next_offset, len(manifest.segments)) == (0, 0, 0)
    assert not data_keys(objects)
    # A step of the archiver shows its metrics before it ends, and its status afterwards.
    daemons[1].until(
        lambda: "segment 0 is active" in daemons[1].partition(topic)["waits_because"],
        "the status page says what it waits for",
    )


def topic_manifests(objects):
    return [key for key in objects.keys() if key.endswith("/topic_manifest.json")]  # noqa: SIM118 a method
