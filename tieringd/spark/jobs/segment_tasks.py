"""
Divide segments into tasks of about equal duration.

A task has rows of segment tables, some tens of bytes for each segment of any size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment_table import SegmentTable

TASKS_PER_CORE: Final = 6
"""Enough tasks that no core waits long for the last one."""
TASK_BYTES_MIN: Final = 128 << 20
"""A smaller task is not worth its start."""
TASK_BYTES_MAX: Final = 8 << 30
"""A larger task would be much work to repeat after the loss of an executor."""
SEGMENT_COST_BYTES: Final = 1 << 20
"""The cost of a segment's requests, in bytes that could be read in the same time."""


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """The segments that one task reads."""

    stretches: tuple[tuple[TopicIdPartition, SegmentTable], ...]
    """Partitions, each with segments that follow one another in its manifest or in a spillover manifest."""
    cost_bytes: int


def plan_segment_tasks(
    tables: Iterable[tuple[TopicIdPartition, SegmentTable]], *, cores: int
) -> tuple[SegmentTask, ...]:
    """Divide the segments of *tables* into tasks for *cores* cores. The longest tasks come first."""
    wanted = [(partition, table) for partition, table in tables if table]
    whole = sum(table.total_bytes + SEGMENT_COST_BYTES * len(table) for _, table in wanted)
    task_bytes = min(TASK_BYTES_MAX, max(TASK_BYTES_MIN, whole // (TASKS_PER_CORE * max(1, cores))))
    tasks: list[SegmentTask] = []
    stretches: list[tuple[TopicIdPartition, SegmentTable]] = []
    cost_bytes = 0
    for partition, table in wanted:
        begin = 0
        for row, size_bytes in enumerate(table.column("size_bytes"), 1):
            cost_bytes += size_bytes + SEGMENT_COST_BYTES
            if cost_bytes >= task_bytes:
                stretches.append((partition, table.between(begin, row)))
                tasks.append(SegmentTask(tuple(stretches), cost_bytes))
                stretches, cost_bytes, begin = [], 0, row
        if begin < len(table):
            stretches.append((partition, table.without_head(begin)))
    if stretches:
        tasks.append(SegmentTask(tuple(stretches), cost_bytes))
    return tuple(sorted(tasks, key=lambda one: one.cost_bytes, reverse=True))
