"""One snapshot of one topic: what is held, what is led, and what could not be seen."""

from __future__ import annotations

import pytest

from tests.fakes.archive import archive_in, archived, archiver_of, tiered_config
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.spilling import filled, make_parts_small
from tieringd.cli.topic_snapshot import topic_snapshot_with
from tieringd.errors import BrokerUnavailable, ObjectNotFound
from tieringd.formats.object_keys import TopicKey


def written(tmp_path, partition=0) -> LogWriter:
    """Return a log with one closed segment."""
    writer = LogWriter(tmp_path, partition=partition)
    writer.closed_segment()
    return writer


async def taken(tmp_path, broker, *, archive=None, number=None):
    found = archive or archive_in(MemoryStore())
    return await topic_snapshot_with(tiered_config(tmp_path), found, broker, "orders", number=number)


async def test_leader_knows_files_bounds_and_manifest(tmp_path):
    """Everything is known of a partition that this broker leads."""
    writer, archive = written(tmp_path), archive_in(MemoryStore())
    manifest = await archived(writer, archive)
    other = LogWriter(tmp_path, "payments", partition=5)
    snapshot = await taken(tmp_path, FakeBroker(writer, other), archive=archive)
    (one,) = snapshot.partitions
    assert (one.manifest, one.bounds, one.log.segments) == (
        manifest,
        writer.bounds(),
        writer.local_log().segments,
    )
    assert (one.is_held, one.is_led, one.problem, snapshot.is_paused) == (True, True, "", False)
    assert snapshot.key.topic_id == writer.identified.topic_id


async def test_follower_knows_its_files_only(tmp_path):
    """Only the files of a follower are known: the leader knows where its log ends."""
    writer = written(tmp_path)
    broker = FakeBroker(writer)
    broker.followed[writer.name] = broker.epochs.pop(writer.name)
    (one,) = (await taken(tmp_path, broker)).partitions
    assert (one.is_held, one.is_led, one.bounds) == (True, False, None)
    assert one.log.segments == writer.local_log().segments


async def test_directory_that_is_no_replica_is_left_out(tmp_path):
    """The directory of a deleted or moved partition is no part of the topic."""
    writer, other = written(tmp_path), written(tmp_path, partition=1)
    broker = FakeBroker(writer, other)
    del broker.epochs[other.name]
    snapshot = await taken(tmp_path, broker)
    assert [one.partition.partition for one in snapshot.partitions] == [0]


async def test_one_partition_is_read_where_it_is_asked_for(tmp_path):
    """Only the partition with this number is among the answers, and a number too high is an error."""
    broker = FakeBroker(written(tmp_path), written(tmp_path, partition=1))
    snapshot = await taken(tmp_path, broker, number=1)
    assert [one.partition.partition for one in snapshot.partitions] == [1]
    with pytest.raises(ObjectNotFound, match="has 2 partitions, and no partition 2"):
        await taken(tmp_path, broker, number=2)


async def test_bounds_that_the_broker_does_not_tell_are_a_problem(tmp_path):
    """A partition without bounds has its reason, and the others are complete."""
    writer, other = written(tmp_path), written(tmp_path, partition=1)
    broker = FakeBroker(writer, other)
    broker.bounds_errors[writer.name] = BrokerUnavailable("it is being elected")
    one, two = (await taken(tmp_path, broker)).partitions
    assert (one.bounds, one.problem) == (None, "it is being elected")
    assert (two.bounds, two.problem) == (other.bounds(), "")


async def test_unknown_topic_is_an_error(tmp_path):
    """A topic that neither the disk nor the bucket has is an error."""
    with pytest.raises(ObjectNotFound, match="neither this broker nor the bucket"):
        await taken(tmp_path, FakeBroker())


async def test_topic_of_another_cluster_is_not_this_one(tmp_path):
    """A topic that only another cluster has in the bucket is unknown here."""
    archive = archive_in(MemoryStore())
    other = TopicKey("another-cluster", "orders", "AAAAAAAAAAAAAAAAAAAAAA")
    await archive.manifests.ensure_topic(other, partition_count=1)
    with pytest.raises(ObjectNotFound, match="has a topic named orders of cluster"):
        await taken(tmp_path, FakeBroker(), archive=archive)


async def test_one_partition_is_read_with_what_is_spilled(tmp_path, monkeypatch):
    """The snapshot of one partition loads spilled segments. One of a whole topic loads no history."""
    make_parts_small(monkeypatch)
    writer, archive = LogWriter(tmp_path), archive_in(MemoryStore())
    broker = FakeBroker(writer)
    await filled(writer, archiver_of(writer, archive, broker))
    await archive.manifests.ensure_topic(
        TopicKey(writer.identified.cluster, "orders", writer.identified.topic_id), partition_count=1
    )
    (whole,) = (await taken(tmp_path, broker, archive=archive, number=0)).partitions
    assert [one.base_offset for one in whole.manifest.segments] == [0, 2, 4, 6, 8, 10]
    (one,) = (await taken(tmp_path, broker, archive=archive)).partitions
    assert [one.base_offset for one in one.manifest.segments] == [8, 10]
