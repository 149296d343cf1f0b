"""Read the bytes of spans as runs of whole batches. Small segments are opened ahead of their turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import structlog

from tieringd.archive.archive_reader import CHUNK_BYTES, batch_boundaries, ceiling_position, floor_position
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.model.segment import SegmentIndex
from tieringd.spark.source.planning import Span

if TYPE_CHECKING:
    # An ordinary import would load prometheus_client into processes that do not need it.
    from tieringd.spark.bucket import Bucket

log = structlog.get_logger(__name__)

AHEAD_MAX: Final = 8
AHEAD_BYTES: Final = 2 * CHUNK_BYTES
"""An open span holds at most two chunks. So only one large span is opened ahead, and several small ones."""


class SegmentGone(Exception):
    """
    The object of a span, or its index, is not in the bucket, or the index is damaged.

    `TaskReader` handles this.
    """

    def __init__(self, number: int, cause: ObjectNotFound | CorruptDataError) -> None:
        super().__init__(number)
        self.number = number
        """The span's place in the list of spans."""
        self.cause = cause
        self.key = cause.key if isinstance(cause, ObjectNotFound) else cause.source
        """The object that is missing or damaged."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Whole batches of one span."""

    number: int
    """The span's place in the list of spans."""
    data: memoryview
    position: int
    """The position of *data* in the data object, in bytes."""
    index: SegmentIndex
    """The index of the whole segment."""


@dataclass(frozen=True, slots=True)
class _Opened:
    first: BatchRun | None
    """None if the span has no bytes."""
    following: AsyncGenerator[BatchRun]


async def span_runs(bucket: Bucket, spans: Sequence[Span], *, skip_corrupt: bool) -> AsyncGenerator[BatchRun]:
    """
    Yield the batches that hold the offsets of *spans*, in order, and some batches around them.

    With *skip_corrupt*, bytes that are not batches are skipped, up to the next index entry that is at least a
    chunk away.

    Raises:
        SegmentGone: An object is not in the bucket, or with *skip_corrupt* an index is damaged. All runs
            before it were yielded.
        CorruptDataError: An index is damaged, or an object is damaged and *skip_corrupt* is not set.
    """
    opening: deque[asyncio.Task[_Opened]] = deque()
    loop = asyncio.get_running_loop()
    started = 0
    # With *skip_corrupt*, `_runs` passes over damage in the data: what it raises is damage in an index.
    passed_on = (ObjectNotFound, CorruptDataError) if skip_corrupt else (ObjectNotFound,)
    try:
        for number in range(len(spans)):
            while started < len(spans) and _is_near(spans[number:started]):
                opening.append(
                    loop.create_task(_opened(bucket, started, spans[started], skip_corrupt=skip_corrupt))
                )
                started += 1
            try:
                opened = await opening[0]
                async with aclosing(opened.following) as following:
                    if opened.first is not None:
                        yield opened.first
                    async for run in following:
                        yield run
            except passed_on as error:
                raise SegmentGone(number, error) from error
            opening.popleft()
    finally:
        for task in opening:
            task.cancel()
        for ended in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(ended, _Opened):
                await ended.following.aclose()


def _is_near(ahead: Sequence[Span]) -> bool:
    """Return whether one more span may be opened after *ahead*, of which the first is being read."""
    held_bytes = sum(span.size_bytes for span in ahead[1:])
    return len(ahead) < 2 or (len(ahead) <= AHEAD_MAX and held_bytes < AHEAD_BYTES)  # noqa: PLR2004 the next one


async def _opened(bucket: Bucket, number: int, span: Span, *, skip_corrupt: bool) -> _Opened:
    try:
        index = await bucket.indexes.index_of(span.partition, span.segment)
    except CorruptDataError as error:
        # No batch is known, so the error names the first offset that cannot be read.
        raise CorruptDataError(
            error.message,
            source=error.source,
            position=error.position,
            offset=span.from_offset,
            hint=error.hint,
        ) from error
    runs = _runs(bucket, number, span, index, skip_corrupt=skip_corrupt)
    try:
        return _Opened(await anext(runs, None), runs)
    except BaseException:
        await runs.aclose()
        raise


async def _runs(
    bucket: Bucket, number: int, span: Span, index: SegmentIndex, *, skip_corrupt: bool
) -> AsyncGenerator[BatchRun]:
    key = data_key(span.partition, span.segment)
    begin, end = floor_position(index, span.from_offset), ceiling_position(index, span.next_offset)
    borders = sections(index, begin, end) if skip_corrupt else [begin, end]
    boundaries = batch_boundaries(index)
    for section_begin, section_end in pairwise(borders):
        try:
            async with aclosing(
                bucket.reader.runs(key, section_begin, section_end, boundaries=boundaries)
            ) as runs:
                async for data, position in runs:
                    yield BatchRun(number, data, position, index)
        except CorruptDataError as error:
            if not skip_corrupt:
                raise
            log.warning(
                "bytes that are no batches passed over",
                object=key,
                position=section_begin if error.position is None else error.position,
                end=section_end,
                error=error.message,
            )


def sections(index: SegmentIndex, begin: int, end: int, *, section_bytes: int = CHUNK_BYTES) -> list[int]:
    """
    Return the borders of sections that can be read independently: *begin*, index entries, *end*.

    Each section but the last has at least *section_bytes*.
    """
    borders = [begin]
    for entry in index.entries:
        if begin < entry.position < end and entry.position - borders[-1] >= section_bytes:
            borders.append(entry.position)
    return [*borders, end] if end > begin else [begin]
