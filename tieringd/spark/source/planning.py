"""
Divide the offsets to read into tasks. This is pure, and needs nothing but manifests.

A span is a range of offsets in one segment, and a task is a list of spans in ascending order. Segments are
cut at offsets, as if their bytes were spread evenly over the offsets. The task that reads a part begins at
the index entry before it. So each task has its own fixed offsets, even if the segments were replaced
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment

SPAN_COST_BYTES: Final = 256 << 10
"""The cost of opening a segment: two requests take as long as reading this many bytes."""
TASKS_MAX: Final = 50_000
"""Spark's driver keeps some memory for every task. In an archive of petabytes tasks get larger instead."""
_SLACK: Final = 16
"""A segment is not cut nearer to its end than a task's share divided by this."""


@dataclass(frozen=True, slots=True)
class Span:
    """The offsets of one segment from *from_offset* up to *next_offset*, exclusive; at least one."""

    partition: TopicIdPartition
    segment: RemoteSegment
    from_offset: int
    next_offset: int

    @property
    def offsets(self) -> int:
        """Return the number of offsets; there may be fewer records."""
        return self.next_offset - self.from_offset

    @property
    def size_bytes(self) -> int:
        """Return the estimated bytes of the span, if bytes are spread evenly over the segment's offsets."""
        segment = self.segment
        return ceil(segment.size_bytes * self.offsets / (segment.next_offset - segment.base_offset))

    @property
    def cost_bytes(self) -> int:
        """Return the cost of reading the span, in bytes, including that of opening its segment."""
        return self.size_bytes + SPAN_COST_BYTES

    def cut(self, offsets: int) -> tuple[Span, Span]:
        """Return two spans: the first *offsets* offsets, and the rest."""
        border = self.from_offset + offsets
        return replace(self, next_offset=border), replace(self, from_offset=border)


def plan_tasks(
    spans: Iterable[Span],
    *,
    task_bytes: int,
    tasks_min: int | None = None,
    task_records_max: int | None = None,
) -> list[tuple[Span, ...]]:
    """
    Divide *spans*, in their order, into tasks of about equal size.

    Args:
        spans: Everything to read.
        task_bytes: The least size of a task, about.
        tasks_min: The least number of tasks, about; tasks may get smaller than *task_bytes* for it.
        task_records_max: The most offsets in a task, and so the most records.

    Returns:
        The spans of each task, in order.
    """
    waiting = [span for span in spans if span.offsets > 0]
    if not waiting:
        return []
    total_bytes = sum(span.cost_bytes for span in waiting)
    tasks = max(1, min(total_bytes // task_bytes, TASKS_MAX), tasks_min or 1)
    cutter = _Cutter(total_bytes / tasks, task_records_max)
    for span in waiting:
        cutter.add(span)
    return cutter.finished()


class _Cutter:
    """Puts spans end to end on a line of bytes, and cuts the line where a task has its share."""

    def __init__(self, share_bytes: float, records_max: int | None) -> None:
        self._share_bytes = share_bytes
        self._records_max = records_max
        self._border_bytes = share_bytes
        """The position on the line, in bytes, at which the current task ends."""
        self._filled_bytes = 0.0
        self._task: list[Span] = []
        self._offsets = 0
        """Offsets in the current task."""
        self._planned: list[tuple[Span, ...]] = []

    def add(self, span: Span) -> None:
        """Append a span to the line."""
        rest, rest_bytes = span, float(span.cost_bytes)
        while (offsets := self._fitting(rest, rest_bytes)) < rest.offsets:
            if offsets:
                taken_bytes = rest_bytes * offsets / rest.offsets
                mine, rest = rest.cut(offsets)
                rest_bytes -= taken_bytes
                self._take(mine, taken_bytes)
            self._close()
        self._take(rest, rest_bytes)

    def finished(self) -> list[tuple[Span, ...]]:
        """End the last task, and return all tasks."""
        if self._task:
            self._close()
        return self._planned

    def _take(self, span: Span, cost_bytes: float) -> None:
        self._task.append(span)
        self._offsets += span.offsets
        self._filled_bytes += cost_bytes

    def _close(self) -> None:
        self._planned.append(tuple(self._task))
        self._task, self._offsets = [], 0
        is_full = self._filled_bytes >= self._border_bytes - self._slack_bytes
        if not is_full:
            # The task ended early because it has `records_max` records. The next task gets a normal share.
            self._border_bytes = self._filled_bytes
        behind_bytes = self._filled_bytes + self._slack_bytes - self._border_bytes
        if behind_bytes >= 0:
            # A single offset may be worth millions of shares, so they are divided and not counted.
            self._border_bytes += self._share_bytes * (behind_bytes // self._share_bytes + 1)

    @property
    def _slack_bytes(self) -> float:
        return self._share_bytes / _SLACK

    def _fitting(self, span: Span, cost_bytes: float) -> int:
        """Return how many of a span's offsets fit into the current task; at least one if it is empty."""
        offsets = span.offsets
        room_bytes = self._border_bytes - self._filled_bytes
        if cost_bytes > room_bytes + self._slack_bytes:
            offsets = round(span.offsets * room_bytes / cost_bytes) if room_bytes > self._slack_bytes else 0
        if self._records_max is not None:
            offsets = min(offsets, self._records_max - self._offsets)
        return offsets if self._task else max(offsets, 1)
