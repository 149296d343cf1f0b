"""Segments, local logs and the names of partitions."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.model.values import PARTITION, TOPIC_ID, local, local_log, remote
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition, TopicPartition
from tieringd.model.segment import SegmentSlice


def test_local_segment_is_active_until_another_follows():
    """Only a segment without a following one is active; offset 0 as the next is not "none"."""
    assert local(5, None).is_active
    assert not local(5, 9).is_active
    assert not local(0, 0).is_active


@pytest.mark.parametrize("field", ["inode", "size_bytes", "modified_ns"])
def test_local_segment_identity_changes_with_the_file(field):
    """Another inode, size or time of change makes another identity."""
    segment = local(5, 9)
    assert dataclasses.replace(segment, **{field: 77}).identity != segment.identity


def test_local_segment_identity_stays_when_the_next_segment_appears():
    """The appearance of a next segment says nothing about the bytes of this file."""
    assert dataclasses.replace(local(5, None), next_offset=9).identity == local(5, None).identity


@pytest.mark.parametrize(
    ("part", "is_whole"),
    [
        pytest.param(SegmentSlice(local(5, 9), 5, 9), True, id="all of it"),
        pytest.param(SegmentSlice(local(5, 9), 6, 9), False, id="without its head"),
        pytest.param(SegmentSlice(local(5, 9), 5, 8), False, id="without its tail"),
        pytest.param(SegmentSlice(local(5, 9), 5, 9, is_open=True), False, id="up to a bound"),
        pytest.param(SegmentSlice(local(5, None), 5, 9, is_open=True), False, id="of an active one"),
        pytest.param(SegmentSlice(local(5, None), 5, 9), False, id="of one that was active"),
    ],
)
def test_slice_is_whole_when_it_is_all_of_a_closed_segment(part, is_whole):
    """Only from base to end, of a segment that has one, and with nothing after it."""
    assert part.is_whole is is_whole


def test_slice_of_a_whole_segment_has_its_bounds():
    """All of a closed segment is one slice of it; an active segment has no end to take it to."""
    assert SegmentSlice.whole(local(5, 9)) == SegmentSlice(local(5, 9), 5, 9)
    assert SegmentSlice.whole(local(5, 9)).is_whole
    with pytest.raises(AssertionError, match="an active segment has no end"):
        SegmentSlice.whole(local(5, None))


def test_remote_segment_and_gap_end_before_their_next_offset():
    """The last offset is inclusive and the next one exclusive."""
    assert remote(10, 19).next_offset == 20
    assert Gap(10, 19, "gone", 0).next_offset == 20


def test_local_log_knows_its_closed_segments_first_offset_and_size():
    """The active segment counts in the size, and is not closed."""
    log = local_log([7, 20, 33], sizes={7: 100, 20: 20, 33: 3})
    assert [segment.base_offset for segment in log.closed_segments] == [7, 20]
    assert log.first_offset == 7
    assert log.size_bytes == 123


def test_empty_local_log_has_no_first_offset():
    """A directory without segments is a log of no bytes."""
    log = local_log([])
    assert (log.closed_segments, log.first_offset, log.size_bytes) == ((), None, 0)


def test_local_log_that_begins_at_zero_has_a_first_offset():
    """Offset 0 is an offset."""
    assert local_log([0]).first_offset == 0


def test_partitions_print_as_their_directory_name():
    """A partition's text is the name of its directory, with or without a topic id."""
    assert str(PARTITION) == str(TopicPartition("orders", 3)) == "orders-3"
    assert PARTITION.topic_partition == TopicPartition("orders", 3)


def test_recreated_topic_is_another_partition():
    """The same name under another topic id, or in another cluster, is not equal."""
    again = TopicIdPartition("cluster-1", "orders", "A" * 22, 3)
    elsewhere = TopicIdPartition("cluster-2", "orders", TOPIC_ID, 3)
    assert len({PARTITION, again, elsewhere}) == 3
    assert again.topic_partition == PARTITION.topic_partition
