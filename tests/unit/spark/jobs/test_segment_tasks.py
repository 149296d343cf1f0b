"""Segments dealt out: each once, in tasks of about one size, the longest first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import PARTITION, remote
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment_table import SegmentTable
from tieringd.spark.jobs.segment_tasks import (
    SEGMENT_COST_BYTES,
    TASK_BYTES_MAX,
    TASK_BYTES_MIN,
    TASKS_PER_CORE,
    plan_segment_tasks,
)

MIB = 1 << 20


def table(*sizes: int) -> SegmentTable:
    return SegmentTable.of(
        remote(number * 10, number * 10 + 9, size_bytes=size_bytes) for number, size_bytes in enumerate(sizes)
    )


def partition(number: int) -> TopicIdPartition:
    return TopicIdPartition(PARTITION.cluster, PARTITION.topic, PARTITION.topic_id, number)


tables = st.lists(st.lists(st.integers(0, 3 << 30), max_size=12).map(lambda sizes: table(*sizes)), max_size=6)


@given(tables, st.integers(1, 50))
def test_each_segment_is_in_one_task(found, cores):
    """Each segment is in one task, under its own partition, in the order of its table."""
    wanted = list(enumerate(found))
    tasks = plan_segment_tasks([(partition(number), one) for number, one in wanted], cores=cores)
    stretches = [stretch for task in tasks for stretch in task.stretches]
    for number, one in wanted:
        rows = sorted(
            (segment for owner, some in stretches if owner == partition(number) for segment in some),
            key=lambda segment: segment.base_offset,
        )
        assert rows == list(one)
    assert all(some for _, some in stretches)


@given(tables, st.integers(1, 50))
def test_tasks_are_of_about_one_size_and_the_longest_come_first(found, cores):
    """A task is larger than wanted by one segment at most, and only the last one is smaller."""
    tasks = plan_segment_tasks([(partition(number), one) for number, one in enumerate(found)], cores=cores)
    costs = [task.cost_bytes for task in tasks]
    whole = sum(one.total_bytes + SEGMENT_COST_BYTES * len(one) for one in found)
    wanted = min(TASK_BYTES_MAX, max(TASK_BYTES_MIN, whole // (TASKS_PER_CORE * cores)))
    assert costs == sorted(costs, reverse=True)
    assert sum(costs) == whole
    assert all(cost >= wanted for cost in costs[:-1])
    largest = max((size for one in found for size in one.column("size_bytes")), default=0)
    assert all(cost < wanted + largest + SEGMENT_COST_BYTES for cost in costs)


@pytest.mark.parametrize(
    ("sizes", "cores", "tasks"),
    [
        pytest.param([], 4, 0, id="nothing"),
        pytest.param([MIB] * 10, 4, 1, id="too little to share"),
        pytest.param([64 * MIB] * 10, 1, 5, id="more than the least"),
        pytest.param([MIB] * 1000, 1, 6, id="small segments count by their requests"),
        pytest.param([1 << 30] * 1024, 1, 128, id="tasks that may have to be done again are not endless"),
    ],
)
def test_number_of_tasks(sizes, cores, tasks):
    """A few for each core, unless they would be too small or too large."""
    assert len(plan_segment_tasks([(PARTITION, table(*sizes))], cores=cores)) == tasks


def test_small_partitions_share_a_task():
    """A partition of a megabyte is not worth one of its own."""
    (task,) = plan_segment_tasks([(partition(number), table(MIB)) for number in range(5)], cores=2)
    assert [owner.partition for owner, _ in task.stretches] == [0, 1, 2, 3, 4]
