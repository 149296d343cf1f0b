"""How spans become tasks: nothing is lost or doubled, tasks are of one size, and limits hold."""

from __future__ import annotations

import pickle
from itertools import groupby
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.model.segment_table import SegmentTable
from tieringd.spark.source import planning
from tieringd.spark.source.planning import SPAN_COST_BYTES, TASKS_MAX, Span, Stretch, spans_of

MIB = 1 << 20


def segment(base_offset: int, offsets: int, size_bytes: int) -> RemoteSegment:
    return RemoteSegment(base_offset, base_offset + offsets - 1, size_bytes, 0, 0, 0, 0, "w", 0, 0)


def span(base_offset: int, offsets: int, size_bytes: int, *, partition: int = 0) -> Span:
    """Return a whole segment."""
    name = TopicIdPartition("c", "orders", "id", partition)
    return Span(name, segment(base_offset, offsets, size_bytes), base_offset, base_offset + offsets)


def plan_tasks(spans, *, joined=False, **limits) -> list[tuple[Span, ...]]:
    """Return the spans of each task. *joined*: those of a partition are one stretch; else each is one."""
    groups = (
        [list(some) for _, some in groupby(spans, attrgetter("partition"))]
        if joined
        else [[one] for one in spans]
    )
    stretches = [
        Stretch(
            some[0].partition,
            SegmentTable.of(one.segment for one in some),
            some[0].from_offset,
            some[-1].next_offset,
        )
        for some in groups
    ]
    return [tuple(spans_of(task)) for task in planning.plan_tasks(stretches, **limits)]


def row(count: int, *, offsets: int = 100, size_bytes: int = MIB) -> list[Span]:
    return [span(number * offsets, offsets, size_bytes) for number in range(count)]


def offsets_of(spans) -> list[tuple[TopicIdPartition, RemoteSegment, int]]:
    return [
        (one.partition, one.segment, offset)
        for one in spans
        for offset in range(one.from_offset, one.next_offset)
    ]


spans_of_some_partitions = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 4 * MIB)), max_size=5), max_size=4
).map(
    lambda partitions: [
        span(sum(one[0] for one in segments[:number]), offsets, size_bytes, partition=partition)
        for partition, segments in enumerate(partitions)
        for number, (offsets, size_bytes) in enumerate(segments)
    ]
)


@given(
    spans=spans_of_some_partitions,
    task_bytes=st.integers(1, 8 * MIB),
    tasks_min=st.none() | st.integers(1, 50),
    records_max=st.none() | st.integers(1, 60),
)
def test_tasks_together_are_the_spans(spans, task_bytes, tasks_min, records_max):
    """Every offset is in one task, in the order of the spans, and no task is empty or above its limit."""
    limits = {"task_bytes": task_bytes, "tasks_min": tasks_min, "task_records_max": records_max}
    tasks = plan_tasks(spans, **limits)
    assert plan_tasks(spans, joined=True, **limits) == tasks

    assert offsets_of(one for task in tasks for one in task) == offsets_of(spans)
    assert all(one.offsets > 0 for task in tasks for one in task)
    assert all(tasks)
    if records_max is not None:
        assert all(sum(one.offsets for one in task) <= records_max for task in tasks)


@given(
    sizes=st.lists(st.integers(0, 100 * MIB), min_size=1, max_size=30),
    tasks_min=st.none() | st.integers(1, 40),
)
def test_tasks_are_of_one_size(sizes, tasks_min):
    """A task takes little longer than its share, if segments have offsets enough to be cut."""
    spans = [span(number * 10**6, 10**6, size) for number, size in enumerate(sizes)]
    tasks = plan_tasks(spans, task_bytes=64 * MIB, tasks_min=tasks_min)

    total = sum(one.cost_bytes for one in spans)
    share = total / max(1, total // (64 * MIB), tasks_min or 1)
    # A task may be cut near either end of its share, and each of its segments has a cost of its own.
    assert all(sum(one.size_bytes for one in task) <= share * 1.2 + SPAN_COST_BYTES for task in tasks)
    assert len(tasks) <= total / share + 1


def test_small_segments_share_a_task():
    """A task is worth its cost: it has the bytes that are asked for, or more."""
    tasks = plan_tasks(row(100), task_bytes=20 * MIB)
    assert sorted(len(task) for task in tasks) == [16, 16, 17, 17, 17, 17]


def test_large_segment_is_cut():
    """A large segment is cut at offsets, as if its bytes were spread evenly over them."""
    (whole,) = row(1, offsets=1000, size_bytes=256 * MIB)
    tasks = plan_tasks([whole], task_bytes=64 * MIB)
    assert [[(one.from_offset, one.next_offset) for one in task] for task in tasks] == [
        [(0, 250)],
        [(250, 500)],
        [(500, 750)],
        [(750, 1000)],
    ]


def test_little_is_one_task():
    """Nothing is cut that is read in no time."""
    assert plan_tasks(row(3), task_bytes=64 * MIB) == [tuple(row(3))]


def test_nothing_is_no_task():
    """Spans without offsets are none."""
    (whole,) = row(1)
    empty, _ = whole.cut(0)
    assert plan_tasks([empty], task_bytes=64 * MIB) == []


@pytest.mark.parametrize("tasks_min", [2, 7, 50])
def test_more_tasks_may_be_asked_for(tasks_min):
    """A plan has as many tasks as asked for, however little there is to read."""
    assert len(plan_tasks(row(1), task_bytes=64 * MIB, tasks_min=tasks_min)) == tasks_min


def test_there_are_no_more_tasks_than_offsets():
    """A record is the least that a task can have."""
    assert len(plan_tasks(row(1, offsets=3), task_bytes=64 * MIB, tasks_min=8)) == 3


def test_cut_near_the_end_of_a_segment_is_not_made():
    """Segments of nearly one size are a task each."""
    spans = [span(0, 1000, 100 * MIB), span(1000, 1000, 98 * MIB), span(2000, 1000, 102 * MIB)]
    assert plan_tasks(spans, task_bytes=100 * MIB) == [(one,) for one in spans]


def test_tasks_of_records_end_where_the_limit_is():
    """A task ends at its limit of records, also across segments."""
    tasks = plan_tasks(row(2, offsets=100), task_bytes=64 * MIB, task_records_max=70)
    assert [[one.offsets for one in task] for task in tasks] == [[70], [30, 40], [60]]


def test_tasks_of_an_enormous_archive_are_larger():
    """Spark's driver has room for so many."""
    petabyte = [span(number * 10**9, 10**9, 1 << 40) for number in range(1024)]
    assert len(plan_tasks(petabyte, task_bytes=64 * MIB)) == TASKS_MAX


def test_part_of_a_segment_has_part_of_its_bytes():
    """A part of a segment has its share of the bytes, as if they were spread evenly over the offsets."""
    head, rest = span(100, 10, 1000).cut(3)
    assert (head.from_offset, head.next_offset, head.size_bytes) == (100, 103, 300)
    assert (rest.from_offset, rest.next_offset, rest.size_bytes) == (103, 110, 700)


@pytest.mark.timeout(120)
def test_many_more_tasks_than_offsets_are_divided_not_counted():
    """One offset is worth millions of shares then: a loop over them would not end."""
    tasks = plan_tasks(row(1, offsets=10), task_bytes=MIB, tasks_min=10**13)
    assert [[one.offsets for one in task] for task in tasks] == [[1]] * 10


def test_plan_makes_no_object_for_each_segment():
    """A million objects would take the driver most of the time of a plan."""
    made = []

    class Watched(SegmentTable):
        __slots__ = ()

        def __getitem__(self, row):
            made.append(row)
            return super().__getitem__(row)

        def __iter__(self):
            made.extend(range(len(self)))
            return super().__iter__()

    table = SegmentTable.of(segment(number * 1000, 1000, 8 * MIB) for number in range(1000))
    watched = Watched(table.blocks, table.writers)
    stretch = Stretch(TopicIdPartition("c", "orders", "id", 0), watched, 0, 1000 * 1000)
    assert len(planning.plan_tasks([stretch], task_bytes=80 * MIB)) == 103
    assert set(made) == {0, 999}


def test_plan_of_many_segments_is_small():
    """A million of them have to fit into the driver's memory, and to travel to executors."""
    count = 20_000
    segments = SegmentTable.of(segment(number * 1000, 1000, 8 * MIB + number) for number in range(count))
    stretch = Stretch(TopicIdPartition("c", "orders", "id", 0), segments, 0, count * 1000)
    tasks = planning.plan_tasks([stretch], task_bytes=512 * MIB)
    assert len(spans_of(one for task in tasks for one in task)) >= count
    assert len(pickle.dumps(tasks)) <= 40 * count
