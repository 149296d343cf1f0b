"""Deleting a topic's records in both tiers: what is checked, in which order, and what is left on record."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.fakes.archive import archive_in, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import TOPIC_ID, LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.store import restore, store_unavailable
from tieringd.broker.kafka_deletion import LedLog, TopicLeaders
from tieringd.errors import BrokerDenied, BrokerUnavailable, ConfigError, ObjectNotFound
from tieringd.formats.object_keys import DELETIONS_PREFIX
from tieringd.model.manifest import CLOSED_EPOCH
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import TopicPartition
from tieringd.topics.record_deleter import RecordDeleter

HIGH_WATERMARK = 14
"""Two records are in the active segment, which is not archived."""


class FakeCluster:
    """A cluster with one topic of two partitions, which deletes as a broker does."""

    def __init__(self, log_start_offset=4) -> None:
        self.starts = {0: log_start_offset, 1: log_start_offset}
        self.refusals = {}
        self.deletions = []
        self.topic_id = TOPIC_ID
        self.leader_epoch = 3
        self.after_deletion = lambda: None

    async def leaders(self, topic):
        """Return the leaders: one broker for both partitions."""
        if topic != "orders":
            raise ObjectNotFound("the cluster has no such topic")
        leaders = dict.fromkeys(self.starts, (("broker", 9092), self.leader_epoch))
        return TopicLeaders("cluster", topic, self.topic_id, leaders, partition_count=2, asked_at=0.0)

    async def log_of(self, topic, number):
        """Return bounds."""
        name = TopicPartition(topic.topic, number)
        return LedLog(
            name,
            topic.leader_of(number)[1],
            log_start_offset=self.starts[number],
            high_watermark=HIGH_WATERMARK,
        )

    async def delete_before(self, topic, number, before_offset):
        """Move the log's start, unless the broker refuses."""
        if number in self.refusals:
            raise self.refusals[number]
        self.deletions.append((number, before_offset))
        self.starts[number] = max(self.starts[number], before_offset)
        self.after_deletion()
        return self.starts[number]


@pytest.fixture
async def writers(tmp_path, store, clock):
    """Archive three segments of four records in both partitions; two more records are not archived."""
    both = [LogWriter(tmp_path, "orders", number) for number in range(2)]
    for writer in both:
        for number in range(3):
            writer.closed_segment(*(b"%d-%d" % (number, at) for at in range(4)))
        writer.append(b"x", b"y")
        acting = archiver_of(writer, archive_in(store, now_ms=clock), FakeBroker(writer), now_ms=clock)
        while (await acting.step(observed(writer))).uploaded:
            pass
    return both


@pytest.fixture
def cluster():
    return FakeCluster()


@pytest.fixture
def delete(cluster, store, clock):
    """Give a function that deletes the records of a topic."""

    async def run(before_offset, *, topic="orders", numbers=None):
        manifests = archive_in(store, writer_id="job", now_ms=clock).manifests
        deleter = RecordDeleter(cluster, store, manifests, now_ms=clock)
        return await deleter.delete(topic, numbers, before_offset, requested_by="ops@host", job_id="0a0b")

    return run


def records_in(store) -> dict[str, dict]:
    """Return the audit records by the last word of their names."""
    return {
        key.rpartition("-")[2]: json.loads(data)
        for key, (data, *_) in store.objects.items()
        if key.startswith(DELETIONS_PREFIX)
    }


@pytest.mark.parametrize(
    "before_offset",
    [
        pytest.param(2, id="below the local log"),
        pytest.param(4, id="at its start, a segment's base"),
        pytest.param(6, id="inside"),
        pytest.param(8, id="at a segment's base"),
        pytest.param(13, id="past the archive"),
        pytest.param(14, id="all of it"),
    ],
)
async def test_records_go_in_both_tiers(writers, store, cluster, delete, before_offset):
    """A broker is asked only for offsets that its log has, and nothing at or past the offset goes."""
    done = await delete(before_offset)
    assert cluster.deletions == ([(0, before_offset), (1, before_offset)] if before_offset > 4 else [])
    start_offset = min(before_offset, 12)
    assert [(one.partition, one.fault) for one in done.results] == [(0, ""), (1, "")]
    for writer, result in zip(writers, done.results, strict=True):
        manifest = stored_manifest(store, writer)
        assert (manifest.start_offset, result.archive_start_offset) == (start_offset, start_offset)
        assert manifest.deletions == (RecordDeletion(before_offset, leader_epoch=3),)
        assert result.log_start_offset == max(4, before_offset)
        found = await values_in(archive_in(store), manifest)
        assert sorted(found) == list(range(start_offset, 12))


async def test_two_records_tell_of_it(writers, store, delete):
    """The records tell requester, request and outcome; the last one has all fields of the first."""
    done = await delete(6, numbers=[1])
    begun, outcome = records_in(store)["begun.json"], records_in(store)["done.json"]
    assert begun["requested_by"] == "ops@host"
    assert (begun["topic"], begun["partitions"], begun["before_offset"]) == ("orders", [1], 6)
    assert begun.items() <= outcome.items()
    assert outcome["results"] == [
        {"partition": 1, "log_start_offset": 6, "archive_start_offset": 6, "fault": ""}
    ]
    assert done.record in store.objects
    assert stored_manifest(store, writers[0]).start_offset == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ({"before_offset": 15}, "past the end of orders-0: its high watermark is 14"),
        ({"before_offset": 6, "numbers": [0, 2]}, "none is number 2"),
        ({"before_offset": 6, "topic": "other"}, "no such topic"),
    ],
)
async def test_what_cannot_be_deleted_is_refused_before_anything_is(writers, store, cluster, delete, wrong):
    """No record of it is stored either."""
    options, expected = wrong
    with pytest.raises((ConfigError, ObjectNotFound), match=expected):
        await delete(**options)
    assert (cluster.deletions, records_in(store)) == ([], {})
    assert [stored_manifest(store, writer).start_offset for writer in writers] == [0, 0]


async def test_partition_without_an_archive_or_with_a_closed_one_is_refused(writers, store, delete, cluster):
    """The deleted records would come back, or nothing would follow the deletion."""
    manifests = archive_in(store, writer_id="job").manifests
    stored = await manifests.load(writers[1].identified)
    await manifests.commit(stored, stored.existing, leader_epoch=CLOSED_EPOCH)
    with pytest.raises(ConfigError, match="the archive of orders-1 in this bucket is closed"):
        await delete(6)
    restore(store, {key: one for key, one in store.objects.items() if "orders" not in key})
    with pytest.raises(ObjectNotFound, match="no archive of orders-0"):
        await delete(6)
    assert cluster.deletions == []


@pytest.mark.parametrize("error", [BrokerDenied("POLICY_VIOLATION"), BrokerUnavailable("no answer")])
async def test_broker_that_refuses_leaves_the_archive_as_it_is(writers, store, cluster, delete, error):
    """The other partition is deleted, the outcome has both, and a repeat ends it."""
    cluster.refusals[0] = error
    done = await delete(6)
    assert [one.fault for one in done.results] == [str(error), ""]
    assert [stored_manifest(store, writer).start_offset for writer in writers] == [0, 6]
    assert records_in(store)["done.json"]["results"][0]["fault"] == str(error)
    cluster.refusals.clear()
    assert [one.fault for one in (await delete(6)).results] == ["", ""]
    assert [stored_manifest(store, writer).start_offset for writer in writers] == [6, 6]


@pytest.mark.parametrize(
    "changed",
    [
        ("topic_id", "AnotherIdAnotherIdAnoA", "was deleted and created again: its id is AnotherId"),
        ("leader_epoch", 4, "orders-1 is led under leader epoch 4 now, not 3"),
    ],
)
async def test_topic_that_was_created_again_during_the_run_keeps_its_records(
    writers, store, cluster, delete, changed
):
    """DeleteRecords goes by name: the id and the epoch are asked for again before each request."""
    name, value, fault = changed
    cluster.after_deletion = lambda: setattr(cluster, name, value)
    done = await delete(6)
    assert cluster.deletions == [(0, 6)]
    assert done.results[0].fault == ""
    assert fault in done.results[1].fault
    assert records_in(store)["done.json"]["results"][1]["fault"] == done.results[1].fault
    assert [stored_manifest(store, writer).start_offset for writer in writers] == [6, 0]


async def test_manifest_that_cannot_be_stored_is_told_and_a_repeat_ends_it(writers, store, cluster, delete):
    """The broker has deleted by then: the local log begins past the offset at the repeat."""
    put = store.put

    async def without_manifests(key, body, **options):
        if key.endswith("manifest"):
            raise store_unavailable("put")
        return await put(key, body, **options)

    store.put = without_manifests
    done = await delete(8)
    assert all(one.fault for one in done.results)
    assert [one.log_start_offset for one in done.results] == [8, 8]
    store.put = partial(put)
    assert [one.fault for one in (await delete(8)).results] == ["", ""]
    assert cluster.deletions == [(0, 8), (1, 8)]
    assert [stored_manifest(store, writer).start_offset for writer in writers] == [8, 8]


async def test_check_tells_what_would_be_deleted_and_changes_nothing(writers, store, cluster, clock):
    """The check refuses what a deletion refuses."""
    manifests = archive_in(store, writer_id="job", now_ms=clock).manifests
    deleter = RecordDeleter(cluster, store, manifests, now_ms=clock)
    before = dict(store.objects)
    logs = await deleter.check("orders", None, 6)
    assert [(one.name.partition, one.log_start_offset) for one in logs] == [(0, 4), (1, 4)]
    with pytest.raises(ConfigError, match="past the end"):
        await deleter.check("orders", [1], HIGH_WATERMARK + 1)
    assert (cluster.deletions, store.objects) == ([], before)
