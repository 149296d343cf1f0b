"""What a job works on: topics by name and pattern, with all their history, in shares for tasks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.fakes.archive import archive_in, archived
from tests.fakes.counted_calls import CountedCalls
from tests.fakes.log_writer import LogWriter
from tests.unit.model.values import PARTITION, remote, stored
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import TopicKey, manifest_key, topic_manifest_key
from tieringd.model.manifest import CLOSED_EPOCH
from tieringd.model.segment_table import BLOCK_ROWS, SegmentTable
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.spark.jobs.chosen import (
    LEFT_MEANWHILE,
    TASK_BYTES,
    chosen_partitions,
    in_rounds,
    loaded_again,
    rounds,
    shares,
)
from tieringd.storage.file import FileStore

IDS = {"orders": "W1xNUlUlTfigw_K-dvdxsA", "payments": "X1xNUlUlTfigw_K-dvdxsA"}


@pytest.fixture
async def archive(tmp_path, config):
    """Give a bucket with two partitions of orders, one of payments, and an old incarnation of orders."""
    archive = archive_in(FileStore(config.cloud_storage_file_root))
    for topic, number, topic_id in [
        ("orders", 0, IDS["orders"]),
        ("orders", 1, IDS["orders"]),
        ("payments", 0, IDS["payments"]),
        ("orders", 0, "Y1xNUlUlTfigw_K-dvdxsA"),
    ]:
        writer = LogWriter(tmp_path / f"{topic_id}", topic, number, topic_id=topic_id)
        for _ in range(3):
            writer.closed_segment()
        await archived(writer, archive)
        await archive.manifests.ensure_topic(TopicKey("cluster", topic, topic_id), partition_count=number + 1)
    return archive


def names(chosen):
    return [(str(one.partition), one.partition.topic_id[:1]) for one in chosen.partitions]


def test_every_archive_of_a_name_is_meant(bucket, archive):
    """A name stands for its deleted and re-created topics too."""
    chosen = bucket.run(chosen_partitions(bucket, ["orders"]))
    assert names(chosen) == [("orders-0", "W"), ("orders-1", "W"), ("orders-0", "Y")]
    assert (len(chosen.topics), chosen.faults) == (2, ())


@pytest.mark.parametrize(
    ("topics", "count"), [(["*"], 4), (["pay*", "payments"], 1), (["order[rs]s", "payments"], None)]
)
def test_topics_are_names_or_patterns(bucket, archive, topics, count):
    """One of them that is no topic's is a mistake."""
    if count is None:
        with pytest.raises(ObjectNotFound, match=r"no topic named order\[rs\]s"):
            bucket.run(chosen_partitions(bucket, topics))
    else:
        assert len(bucket.run(chosen_partitions(bucket, topics)).partitions) == count


def test_topic_that_is_not_asked_for_may_be_damaged(bucket, archive, config):
    """A topic that is asked for must be readable: its partitions are unknown otherwise."""
    key = topic_manifest_key(TopicKey("cluster", "payments", IDS["payments"]))
    (config.cloud_storage_file_root / key).write_bytes(b"damaged")
    assert len(bucket.run(chosen_partitions(bucket, ["orders"])).partitions) == 3
    with pytest.raises(CorruptDataError):
        bucket.run(chosen_partitions(bucket, ["*"]))


async def test_history_is_there_and_what_is_beyond_return_is_not(bucket, archive):
    """Spilled segments are in the manifest; purged topics and closed archives are left out."""
    (key,) = [one.key async for one in archive.catalog.topics() if one.key.topic_id == IDS["payments"]]
    partition = (await archive.manifests.load_topic(key)).partitions()[0]
    found = await archive.manifests.load(partition)
    part = part_to_spill(found.existing, 2)
    live = spilled(found.existing, part, await archive.manifests.spillovers.put(part))
    await archive.manifests.commit(found, live, leader_epoch=0)
    old = TopicKey("cluster", "orders", "Y1xNUlUlTfigw_K-dvdxsA")
    await archive.manifests.change_topic(old, lambda one: replace(one, lifecycle=Lifecycle.PURGING))
    (closed, _) = (
        await archive.manifests.load_topic(TopicKey("cluster", "orders", IDS["orders"]))
    ).partitions()
    loaded = await archive.manifests.load(closed)
    await archive.manifests.commit(loaded, loaded.existing, leader_epoch=CLOSED_EPOCH)

    await archive.manifests.change_topic(key, lambda one: replace(one, lifecycle=Lifecycle.DELETED))

    chosen = bucket.run(chosen_partitions(bucket, ["*"]))

    assert chosen.without_log == {partition}, "no broker has what is deleted"
    assert names(chosen) == [("orders-1", "W"), ("payments-0", "X")]
    assert [len(one.segments) for one in chosen.partitions] == [3, 3]


async def test_partitions_that_are_left_out_are_told(bucket, archive, config):
    """A missing manifest may be lost, and a closed one goes on in another bucket."""
    key = TopicKey("cluster", "orders", IDS["orders"])
    lost, moved = (await archive.manifests.load_topic(key)).partitions()
    (config.cloud_storage_file_root / manifest_key(lost)).unlink()
    loaded = await archive.manifests.load(moved)
    await archive.manifests.commit(loaded, loaded.existing, leader_epoch=CLOSED_EPOCH)

    chosen = bucket.run(chosen_partitions(bucket, ["*"]))

    assert names(chosen) == [("orders-0", "Y"), ("payments-0", "X")]
    assert chosen.faults == ()
    assert [(row[1], row[3].split(":")[0]) for table in chosen.tables() for row in table.rows] == [
        (0, "it has no manifest"),
        (1, "its archive is closed"),
    ]
    assert bucket.run(chosen_partitions(bucket, ["payments"])).tables() == ()


async def test_damaged_manifest_is_told_and_the_rest_is_done(bucket, archive, config):
    """The partition of a damaged manifest is left as it is, and named."""
    topic = await archive.manifests.load_topic(TopicKey("cluster", "orders", IDS["orders"]))
    path = config.cloud_storage_file_root / manifest_key(topic.partitions()[0])
    path.write_bytes(b"damaged")

    chosen = bucket.run(chosen_partitions(bucket, ["orders"]))

    assert names(chosen) == [("orders-1", "W"), ("orders-0", "Y")]
    (fault,) = chosen.faults
    assert fault.startswith("orders-0: ")


async def test_later_rounds_are_of_what_there_is_by_then(bucket, archive, config):
    """Partitions that cannot be read by then, or have left the bucket, are reported. The rest is done."""
    chosen = bucket.run(chosen_partitions(bucket, ["*"]))
    first, damaged, closed, changed = (one.partition for one in chosen.partitions)
    faults = []
    found = rounds(bucket, chosen.partitions, faults, round_bytes=1)
    some = [next(found)]
    for partition, epoch in ((first, 7), (closed, CLOSED_EPOCH), (changed, 7)):
        loaded = await archive.manifests.load(partition)
        await archive.manifests.commit(loaded, loaded.existing, leader_epoch=epoch)
    (config.cloud_storage_file_root / manifest_key(damaged)).write_bytes(b"damaged")

    some += found

    assert [[(one.partition, one.leader_epoch) for one in each] for each in some] == [
        [(first, 0)],
        [],
        [],
        [(changed, 7)],
    ]
    assert [len(one.segments) for one in some[-1]] == [3]
    assert faults[0].startswith(f"{damaged}: ")
    assert faults[1:] == [f"{closed}: {LEFT_MEANWHILE}"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1], [[0]]),
        ([TASK_BYTES, 1, 1], [[0], [1, 2]]),
        ([1, TASK_BYTES - 1, 5, TASK_BYTES], [[0, 1], [2, 3]]),
    ],
)
def test_shares_are_large_enough_to_be_worth_a_task(sizes, expected):
    """Together they are all segments, each with its row."""
    table = stored([remote(at, at, size_bytes=size) for at, size in enumerate(sizes)]).segments
    found = list(shares(PARTITION, table))
    assert [[one.base_offset for one in share.segments] for share in found] == expected
    assert [share.first_row for share in found] == [rows[0] for rows in expected]


def test_shares_of_a_long_history_touch_each_block_a_few_times(monkeypatch):
    """All shares together touch each block once: a million segments once took ten minutes."""
    count = 20 * BLOCK_ROWS
    table = stored([remote(at, at, size_bytes=TASK_BYTES) for at in range(count)]).segments
    touched = []
    real = SegmentTable.__init__

    def counted(self, blocks, writers):
        touched.append(len(blocks))
        real(self, blocks, writers)

    # The tables in question are made and dropped inside `shares`.
    monkeypatch.setattr(SegmentTable, "__init__", counted)
    assert sum(1 for _ in shares(PARTITION, table)) == count
    assert sum(touched) == count


class CountedSegments:
    """Segments of one byte; each time that they are added up is counted."""

    def __init__(self):
        self.sums = 0

    def __len__(self):
        return 1

    @property
    def total_bytes(self):
        self.sums += 1
        return 1


def test_segments_are_added_up_once():
    """Ten thousand small partitions are one round, and a sum over all segments for each would take hours."""
    partitions = [SimpleNamespace(segments=CountedSegments()) for _ in range(10)]
    assert [len(some) for some in in_rounds(partitions, 4)] == [4, 4, 2]
    assert [one.segments.sums for one in partitions] == [1] * 10


def test_rounds_have_about_so_many_bytes():
    """Partitions without a segment are in none."""
    sizes = [5, 0, 5, 20, 1, 1]
    partitions = [stored([remote(0, 9, size_bytes=size)] if size else []) for size in sizes]
    found = [[one.size_bytes for one in some] for some in in_rounds(partitions, 10)]
    assert found == [[5, 5], [20], [1, 1]]


def test_manifests_are_loaded_some_at_once(bucket, archive, monkeypatch):
    """One by one, ten thousand of them took five minutes where a store answers in 30 ms."""
    gets = CountedCalls.of(monkeypatch, FileStore, "get")
    chosen = bucket.run(chosen_partitions(bucket, ["*"]))
    assert (len(chosen.partitions), gets.most_at_once) == (4, 4)
    gets.most_at_once = 0
    assert len(bucket.run(loaded_again(bucket, chosen.partitions, []))) == 4
    assert gets.most_at_once == 4
