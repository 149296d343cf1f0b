"""
How what is to be read is shared among tasks: pure, and known from manifests alone.

A span is a range of offsets in one segment, and a task is some spans, ascending. A segment is cut at offsets,
as if its bytes were spread evenly over them; the task that reads a part begins at the index entry before it.
So every task knows by itself which offsets are its own, whatever has become of the segments by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment

SPAN_COST_BYTES: Final = 256 << 10
"""Opening a segment takes two requests, in the time of which so much would be read."""
TASKS_MAX: Final = 50_000
"""Of an archive of petabytes each task takes more: Spark's driver keeps something of every task."""
_SLACK: Final = 16
"""A cut nearer than this part of a task's share to the end of a segment is not made."""


@dataclass(frozen=True, slots=True)
class Span:
    """The offsets of one segment from *from_offset* up to *next_offset*, exclusive; at least one."""

    partition: TopicIdPartition
    segment: RemoteSegment
    from_offset: int
    next_offset: int

    @property
    def offsets(self) -> int:
        """Return how many offsets are in it; there may be fewer records."""
        return self.next_offset - self.from_offset

    @property
    def size_bytes(self) -> int:
        """Return about how many bytes of the segment that is."""
        segment = self.segment
        return ceil(segment.size_bytes * self.offsets / (segment.next_offset - segment.base_offset))

    @property
    def cost_bytes(self) -> int:
        """Return what reading it takes, as bytes to read."""
        return self.size_bytes + SPAN_COST_BYTES

    def cut(self, offsets: int) -> tuple[Span, Span]:
        """Return its first *offsets* offsets, and the rest."""
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
    Return the spans of each task, all of about one size; together they are *spans*, in their order.

    A task has *task_bytes* or more, and less where there are to be *tasks_min* of them, about. None has more
    than *task_records_max* offsets, and so no more records.
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
    """Lays spans end to end, and cuts the line where a task has its share."""

    def __init__(self, share_bytes: float, records_max: int | None) -> None:
        self._share_bytes = share_bytes
        self._records_max = records_max
        self._border_bytes = share_bytes
        """Where on the line the task ends that is being filled."""
        self._filled_bytes = 0.0
        self._task: list[Span] = []
        self._offsets = 0
        """In the task that is being filled."""
        self._planned: list[tuple[Span, ...]] = []

    def add(self, span: Span) -> None:
        """Lay a span behind the ones before it."""
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
        """Return the tasks."""
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
            # It has as many records as it may; that does not make the next one larger.
            self._border_bytes = self._filled_bytes
        while self._border_bytes <= self._filled_bytes + self._slack_bytes:
            self._border_bytes += self._share_bytes

    @property
    def _slack_bytes(self) -> float:
        return self._share_bytes / _SLACK

    def _fitting(self, span: Span, cost_bytes: float) -> int:
        """Return how many of a span's offsets fit; a task that has nothing yet takes one at the least."""
        offsets = span.offsets
        room_bytes = self._border_bytes - self._filled_bytes
        if cost_bytes > room_bytes + self._slack_bytes:
            offsets = round(span.offsets * room_bytes / cost_bytes) if room_bytes > self._slack_bytes else 0
        if self._records_max is not None:
            offsets = min(offsets, self._records_max - self._offsets)
        return offsets if self._task else max(offsets, 1)
