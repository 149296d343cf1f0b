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

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from operator import sub
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

    def span(self, row: int) -> Span:
        """Return the span of the segment in *row*."""
        return self._span_of(self.segments[row])

    def cost_bytes(self) -> int:
        """Return the cost of reading all spans, in bytes. Only segments at the ends are read in part."""
        unread_bytes = sum(
            span.segment.size_bytes - span.size_bytes for span in map(self.span, {0, len(self.segments) - 1})
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
        cutter.add(stretch)
    return cutter.finished()


class _Line:
    """
    The spans of one stretch as pieces of a line of bytes, each as long as its cost.

    A place on the line is the row of a span and the number of its offsets that are before the place.
    """

    def __init__(self, stretch: Stretch, begin_bytes: int) -> None:
        segments = stretch.segments
        self._stretch = stretch
        self._begin_bytes = begin_bytes
        self._bases = list(segments.column("base_offset"))
        self._ends = [last_offset + 1 for last_offset in segments.column("last_offset")]
        costs = [size_bytes + SPAN_COST_BYTES for size_bytes in segments.column("size_bytes")]
        # Only segments at the ends are read in part.
        for row in {0, len(segments) - 1}:
            span = stretch.span(row)
            self._bases[row], self._ends[row], costs[row] = (
                span.from_offset,
                span.next_offset,
                span.cost_bytes,
            )
        self.ends_bytes = list(accumulate(costs, initial=begin_bytes))[1:]
        """Where each span ends, in bytes from the beginning of the whole line."""
        self.ends_offsets = list(accumulate(map(sub, self._ends, self._bases)))
        """How many offsets the spans have, up to the end of each."""

    def __len__(self) -> int:
        return len(self.ends_bytes)

    def offsets(self, row: int) -> int:
        """Return how many offsets the span in *row* has."""
        return self._ends[row] - self._bases[row]

    def offsets_before(self, row: int, used: int) -> int:
        """Return how many offsets of the stretch are before a place."""
        return (self.ends_offsets[row - 1] if row else 0) + used

    def bytes_before(self, row: int, used: int) -> float:
        """Return the position of a place, in bytes from the beginning of the whole line."""
        begin_bytes = self.ends_bytes[row - 1] if row else self._begin_bytes
        if not used:
            return begin_bytes
        return begin_bytes + (self.ends_bytes[row] - begin_bytes) * used / self.offsets(row)

    def part(self, begin: tuple[int, int], end: tuple[int, int]) -> Stretch:
        """Return the stretch between two places, which has at least one offset."""
        (first, used), (row, end_used) = begin, end
        last = row if end_used else row - 1
        return Stretch(
            self._stretch.partition,
            self._stretch.segments.between(first, last + 1),
            self._bases[first] + used,
            self._bases[last] + end_used if end_used else self._ends[last],
        )


class _Cutter:
    """Puts stretches end to end on a line of bytes, and cuts the line where a task has its share."""

    def __init__(self, share_bytes: float, records_max: int | None) -> None:
        self._share_bytes = share_bytes
        self._slack_bytes = share_bytes / _SLACK
        self._records_max = records_max
        self._border_bytes = share_bytes
        """The position on the line, in bytes, at which the current task ends."""
        self._line_bytes = 0
        """The length of the line. Whole numbers: the plan does not depend on how spans form stretches."""
        self._task: list[Stretch] = []
        self._offsets = 0
        """Offsets in the current task."""
        self._planned: list[tuple[Stretch, ...]] = []

    def add(self, stretch: Stretch) -> None:
        """Append the spans of *stretch* to the line."""
        line = _Line(stretch, self._line_bytes)
        place = (0, 0)
        while (end := self._task_end(line, *place)) is not None:
            self._take(line, place, end)
            self._close(line.bytes_before(*end))
            place = end
        self._take(line, place, (len(line), 0))
        self._line_bytes = line.ends_bytes[-1]

    def finished(self) -> list[tuple[Stretch, ...]]:
        """End the last task, and return all tasks."""
        return [*self._planned, tuple(self._task)]

    def _task_end(self, line: _Line, row: int, used: int) -> tuple[int, int] | None:
        """
        Return the place at which the current task ends, if it goes on at a place of *line*.

        None: it goes on past the line's end.
        """
        # Whole spans first.
        limit_bytes = self._border_bytes + self._slack_bytes
        cut = bisect_right(line.ends_bytes, limit_bytes, row)
        offsets_before = line.offsets_before(row, used) - self._offsets
        if self._records_max is not None:
            cut = min(cut, bisect_right(line.ends_offsets, offsets_before + self._records_max, row))
        if cut == len(line):
            return None
        # Then part of the next one.
        is_empty = not self._task and cut == row
        used = used if cut == row else 0
        rest = line.offsets(cut) - used
        offsets = rest
        if line.ends_bytes[cut] > limit_bytes:
            filled_bytes = line.bytes_before(cut, used)
            room_bytes = self._border_bytes - filled_bytes
            rest_bytes = line.ends_bytes[cut] - filled_bytes
            offsets = round(rest * room_bytes / rest_bytes) if room_bytes > self._slack_bytes else 0
        if self._records_max is not None:
            taken = line.offsets_before(cut, used) - offsets_before
            offsets = min(offsets, self._records_max - taken)
        # A task has at least one offset.
        offsets = max(offsets, 1) if is_empty else offsets
        if offsets < rest:
            return cut, used + offsets
        return (cut + 1, 0) if cut + 1 < len(line) else None

    def _take(self, line: _Line, begin: tuple[int, int], end: tuple[int, int]) -> None:
        if begin < end:
            self._task.append(line.part(begin, end))
            self._offsets += line.offsets_before(*end) - line.offsets_before(*begin)

    def _close(self, filled_bytes: float) -> None:
        """End the current task where the line has *filled_bytes*."""
        self._planned.append(tuple(self._task))
        self._task, self._offsets = [], 0
        is_full = filled_bytes >= self._border_bytes - self._slack_bytes
        if not is_full:
            # The task ended early because it has `records_max` records. The next task gets a normal share.
            self._border_bytes = filled_bytes
        behind_bytes = filled_bytes + self._slack_bytes - self._border_bytes
        if behind_bytes >= 0:
            # A single offset may be worth millions of shares, so they are divided and not counted.
            self._border_bytes += self._share_bytes * (behind_bytes // self._share_bytes + 1)
