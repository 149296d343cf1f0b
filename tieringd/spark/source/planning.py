"""
Divide the offsets to read into tasks. This is pure, and needs nothing but manifests.

A span is a range of offsets in one segment. A stretch is a range of offsets of one partition, with all of its
segments as columns, and a task is a list of stretches in ascending order. So a plan of a million segments
takes some tens of bytes for each of them, on the driver and on the way to executors.

Segments are cut at offsets, as if their bytes were spread evenly over the offsets. The task that reads a part
begins at the index entry before it. So each task has its own fixed offsets, even if the segments were
replaced meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.model.segment_table import SegmentTable

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


@dataclass(frozen=True, slots=True)
class Stretch:
    """The offsets of neighbouring segments from *from_offset* up to *next_offset*, exclusive."""

    partition: TopicIdPartition
    segments: SegmentTable
    """The segments that have some of the offsets."""
    from_offset: int
    next_offset: int

    def spans(self) -> Iterator[Span]:
        """Yield a span for each segment, in order."""
        return map(self._span_of, self.segments)

    def cost_bytes(self) -> int:
        """Return the cost of reading all spans, in bytes. Only segments at the ends are read in part."""
        unread_bytes = sum(
            segment.size_bytes - self._span_of(segment).size_bytes
            for segment in (self.segments[row] for row in {0, len(self.segments) - 1})
        )
        return self.segments.total_bytes - unread_bytes + SPAN_COST_BYTES * len(self.segments)

    def part(self, from_offset: int, next_offset: int) -> Stretch:
        """Return the part with the given offsets, at least one of which a segment has."""
        segments = self.segments
        begin, end = segments.row_at_or_after(from_offset), segments.row_at_or_after(next_offset)
        if end < len(segments) and segments.column("base_offset")[end] < next_offset:
            end += 1
        return Stretch(self.partition, segments.between(begin, end), from_offset, next_offset)

    def _span_of(self, segment: RemoteSegment) -> Span:
        return Span(
            self.partition,
            segment,
            max(segment.base_offset, self.from_offset),
            min(segment.next_offset, self.next_offset),
        )


def spans_of(stretches: Iterable[Stretch]) -> list[Span]:
    """Return the spans of *stretches*, in order."""
    return [span for stretch in stretches for span in stretch.spans()]


def plan_tasks(
    stretches: Sequence[Stretch],
    *,
    task_bytes: int,
    tasks_min: int | None = None,
    task_records_max: int | None = None,
) -> list[tuple[Stretch, ...]]:
    """
    Divide *stretches*, in their order, into tasks of about equal size.

    Args:
        stretches: Everything to read.
        task_bytes: The least size of a task, about.
        tasks_min: The least number of tasks, about; tasks may get smaller than *task_bytes* for it.
        task_records_max: The most offsets in a task, and so the most records.

    Returns:
        The stretches of each task, in order.
    """
    waiting = [one for one in stretches if one.segments and one.from_offset < one.next_offset]
    if not waiting:
        return []
    total_bytes = sum(one.cost_bytes() for one in waiting)
    tasks = max(1, min(total_bytes // task_bytes, TASKS_MAX), tasks_min or 1)
    cutter = _Cutter(total_bytes / tasks, task_records_max)
    for stretch in waiting:
        for span in stretch.spans():
            cutter.add(span, stretch)
    return cutter.finished()


class _Cutter:
    """Puts spans end to end on a line of bytes, and cuts the line where a task has its share."""

    def __init__(self, share_bytes: float, records_max: int | None) -> None:
        self._share_bytes = share_bytes
        self._records_max = records_max
        self._border_bytes = share_bytes
        """The position on the line, in bytes, at which the current task ends."""
        self._filled_bytes = 0.0
        self._task: list[Stretch] = []
        """The whole stretches that the current task has a part of."""
        self._from_offset = self._next_offset = 0
        """The first offset of the task in its first stretch, and its end in its last one."""
        self._offsets = 0
        """Offsets in the current task."""
        self._planned: list[tuple[Stretch, ...]] = []

    def add(self, span: Span, stretch: Stretch) -> None:
        """Append a span of *stretch* to the line."""
        rest, rest_bytes = span, float(span.cost_bytes)
        while (offsets := self._fitting(rest, rest_bytes)) < rest.offsets:
            if offsets:
                taken_bytes = rest_bytes * offsets / rest.offsets
                mine, rest = rest.cut(offsets)
                rest_bytes -= taken_bytes
                self._take(mine, stretch, taken_bytes)
            self._close()
        self._take(rest, stretch, rest_bytes)

    def finished(self) -> list[tuple[Stretch, ...]]:
        """End the last task, and return all tasks."""
        if self._task:
            self._close()
        return self._planned

    def _take(self, span: Span, stretch: Stretch, cost_bytes: float) -> None:
        if not self._task:
            self._from_offset = span.from_offset
        if not self._task or self._task[-1] is not stretch:
            self._task.append(stretch)
        self._next_offset = span.next_offset
        self._offsets += span.offsets
        self._filled_bytes += cost_bytes

    def _close(self) -> None:
        last = len(self._task) - 1
        self._planned.append(
            tuple(
                stretch.part(
                    stretch.from_offset if number else self._from_offset,
                    self._next_offset if number == last else stretch.next_offset,
                )
                for number, stretch in enumerate(self._task)
            )
        )
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
