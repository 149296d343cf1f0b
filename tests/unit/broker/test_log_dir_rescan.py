"""Log directories that one daemon scans again and again: what is looked up, and what is noticed."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tests.fakes.log_writer import LogWriter
from tests.unit.broker.test_disk_use import settle
from tieringd.broker.layout import KafkaLayout
from tieringd.errors import LocalFileError

OLD_ID, NEW_ID = "AAAAAAAAAAAAAAAAAAAAAQ", "AAAAAAAAAAAAAAAAAAAAAg"


@pytest.fixture
def log_dir(tmp_path):
    """Give a log directory with one partition that has not changed for a while."""
    LogWriter(tmp_path, "orders", topic_id=OLD_ID).closed_segment()
    settle(tmp_path / "orders-0")
    return tmp_path


def round_of(layout, log_dir):
    """Scan, read every partition, and return the topic ids and the logs."""
    partitions = layout.scan([str(log_dir)]).partitions
    return [one.topic_id for one in partitions], [layout.read_log(one, ()) for one in partitions]


def replaced(log_dir):
    """Put the directory of another topic of the same name in the place of the first one."""
    shutil.rmtree(log_dir / "orders-0")
    LogWriter(log_dir, "orders", topic_id=NEW_ID).closed_segment()
    settle(log_dir / "orders-0")


def test_unchanged_partition_is_the_same_object(log_dir):
    """Rounds in which nothing changed return what they returned before."""
    layout = KafkaLayout()
    (_, [first]), (_, [second]), (_, [third]) = (round_of(layout, log_dir) for _ in range(3))
    assert first is second is third


def test_unchanged_partitions_of_a_scan_are_the_same_tuple(log_dir):
    """A scan that finds the same partitions says so by identity. Another partition makes another tuple."""
    layout = KafkaLayout()
    first, second = (layout.scan([str(log_dir)]).partitions for _ in range(2))
    assert first is second
    LogWriter(log_dir, "orders", 1, topic_id=OLD_ID)
    assert layout.scan([str(log_dir)]).partitions != first


def test_log_is_of_the_partition_that_is_asked_for(log_dir):
    """A caller may know another id of the topic than the files have: the cluster's."""
    layout = KafkaLayout()
    (partition,) = layout.scan([str(log_dir)]).partitions
    first = layout.read_log(partition, ())
    asked = replace(partition, topic_id=NEW_ID)
    assert layout.read_log(asked, ()) == replace(first, partition=asked)
    assert layout.read_log(partition, ()) == first


@pytest.mark.parametrize("rounds_before", [1, 2, 3])
def test_topic_that_was_created_again_is_found_after_one_round_at_most(log_dir, rounds_before):
    """The first round finds it, or says that it cannot read the partition. The second one finds it."""
    layout = KafkaLayout()
    for _ in range(rounds_before):
        assert round_of(layout, log_dir)[0] == [OLD_ID]
    replaced(log_dir)
    try:
        ids, _ = round_of(layout, log_dir)
    except LocalFileError:
        ids, _ = round_of(layout, log_dir)
    assert ids == [NEW_ID]


@pytest.mark.parametrize("rounds_before", [0, 1, 2])
def test_log_is_never_read_under_another_topic_s_id(log_dir, rounds_before):
    """A directory that is replaced between scan and read belongs to a topic that the scan did not see."""
    layout = KafkaLayout()
    for _ in range(rounds_before):
        round_of(layout, log_dir)
    (partition,) = layout.scan([str(log_dir)]).partitions
    replaced(log_dir)
    with pytest.raises(LocalFileError, match="another topic"):
        layout.read_log(partition, ())


def test_topic_id_of_a_partition_that_is_not_read_any_more_is_looked_up(log_dir):
    """Only a read notices a new directory, so a partition that was not read is asked for its topic id."""
    layout = KafkaLayout()
    round_of(layout, log_dir)
    layout.scan([str(log_dir)])
    layout.scan([str(log_dir)])
    replaced(log_dir)
    (partition,) = layout.scan([str(log_dir)]).partitions
    assert partition.topic_id == NEW_ID


def test_partition_that_a_broker_moves_is_read_between_scans(log_dir, tmp_path):
    """
    A partition that is in two log directories is left out of scans.

    An earlier observation is still read.
    """
    other = tmp_path / "other"
    other.mkdir()
    layout = KafkaLayout()
    (partition,) = layout.scan([str(log_dir), str(other)]).partitions
    layout.read_log(partition, ())
    shutil.copytree(log_dir / "orders-0", other / "orders-0")
    for _ in range(2):
        assert layout.scan([str(log_dir), str(other)]).partitions == ()
        for _ in range(2):
            layout.read_log(partition, ())
    shutil.rmtree(other / "orders-0")
    assert layout.scan([str(log_dir), str(other)]).partitions == (partition,)
