"""
The work of a task: decode its spans, one after another, from the segments' objects to Arrow batches.

A segment's object may be merged, compacted or expired after the plan was made. Then the manifest is read
again, and reading continues at the next offset. No offset is read twice, and none is skipped silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import structlog
from crc32c import crc32c

from tieringd.archive.archive_reader import fault_in
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.formats.object_keys import data_key
from tieringd.formats.record_batch import check_crc, parse_header
from tieringd.spark.decoder import SegmentDecoder, Selection
from tieringd.spark.decoder.segment_batches import size_of_batch
from tieringd.spark.source.data_loss import Loss, OnLoss
from tieringd.spark.source.planning import Span, spans_of
from tieringd.spark.source.segment_runs import BatchRun, SegmentGone, span_runs
from tieringd.spark.source.segment_spans import OffsetRange, find_stretches

if TYPE_CHECKING:
    import pyarrow as pa

    # An ordinary import would load prometheus_client into processes that do not need it.
    from tieringd.spark.bucket import Bucket

log = structlog.get_logger(__name__)

_CORRUPT_TOLD: Final = 10
"""The number of a segment's corrupt batches that are logged one by one."""


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """How records are read."""

    columns: tuple[str, ...]
    read_committed: bool
    skip_corrupt: bool
    loss: OnLoss


class TaskReader:
    """Reads spans. Owned by one task."""

    def __init__(self, bucket: Bucket, rules: ReadingRules) -> None:
        self._bucket = bucket
        self._rules = rules

    def batches(self, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
        """
        Yield the records of *spans* in their order.

        Raises:
            CorruptDataError: Stored bytes are damaged, and corrupt batches are not skipped.
            DataLossError: Offsets are gone since the plan was made, and the loss rule does not allow that.
            ObjectNotFound: The manifest names an object that the bucket does not have.
        """
        waiting = list(spans)
        while waiting:
            reading = _Reading(waiting, self._rules)
            runs = self._bucket.iterate(
                span_runs(self._bucket, waiting, skip_corrupt=self._rules.skip_corrupt)
            )
            gone: SegmentGone | None = None
            with closing(runs):
                try:
                    for run in runs:
                        yield from reading.take(run)
                except SegmentGone as error:
                    gone = error
            yield from reading.finish()
            waiting = [] if gone is None else self._planned_anew(reading, gone)

    def _planned_anew(self, reading: _Reading, gone: SegmentGone) -> list[Span]:
        """
        Return new spans for the offsets that are left, after the object of span *gone* went missing.

        Spans of the same partition are planned anew from its current manifest.

        Raises:
            ObjectNotFound: The current manifest names the same object, and corrupt batches are not skipped.
            DataLossError: Offsets are missing, and the loss rule does not allow that.
        """
        first, left = reading.rest_of(gone.number), reading.after(gone.number)
        if first is None:
            return left
        left = [first, *left]
        stale = list(takewhile(lambda span: span.partition == first.partition, left))
        name = first.partition.topic_partition
        manifest = self._bucket.run(self._bucket.current_manifest(first.partition))
        fresh: list[Span] = []
        if manifest is None:
            last_offset = stale[-1].next_offset - 1
            self._rules.loss.meet(
                Loss(
                    name, first.from_offset, last_offset, "the topic's archive was deleted while it was read"
                )
            )
        else:
            wanted = OffsetRange(name, manifest, first.from_offset, stale[-1].next_offset)
            fresh = spans_of(find_stretches(self._bucket, [wanted], rule=self._rules.loss))
        if fresh and fresh[0].segment == first.segment:
            return [*self._after_loss(fresh, gone), *left[len(stale) :]]
        log.info(
            "a segment has been replaced; reading goes on", partition=str(name), offset=first.from_offset
        )
        return [*fresh, *left[len(stale) :]]

    def _after_loss(self, spans: list[Span], gone: SegmentGone) -> list[Span]:
        """
        Return *spans* without the first one, whose object cannot be read at all.

        Raises:
            ObjectNotFound: The object is missing, and corrupt batches are not skipped.
            DataLossError: The loss rule does not allow that offsets are missing.
        """
        lost, name = spans[0], spans[0].partition.topic_partition
        is_missing = isinstance(gone.cause, ObjectNotFound)
        if is_missing and not self._rules.skip_corrupt:
            raise ObjectNotFound(
                f"offset {lost.from_offset} of {name} cannot be read: its manifest names an object that the "
                f"bucket does not have: {gone.key}",
                key=gone.key or "",
                hint="`tieringd archive scrub` shows what is left of the segment",
            ) from gone.cause
        fault = "the bucket does not have the object" if is_missing else "the index is damaged:"
        reason = f"{fault} {gone.key}, which the manifest names; `tieringd archive scrub` shows what is left"
        self._rules.loss.meet(Loss(name, lost.from_offset, lost.next_offset - 1, reason))
        return spans[1:]


class _Reading:
    """One pass over spans, with the current span and its last run."""

    def __init__(self, spans: Sequence[Span], rules: ReadingRules) -> None:
        self._spans = spans
        self._rules = rules
        self._number = -1
        self._decoder: SegmentDecoder | None = None
        self._last: BatchRun | None = None
        self._expected: ExpectedBatches | None = None
        self._read_bytes = self._checksum = 0
        """The bytes of the current span's object that were read without a hole, and their checksum."""

    def take(self, run: BatchRun) -> Iterator[pa.RecordBatch]:
        """Yield the Arrow record batches that the next run fills."""
        if run.number != self._number or self._decoder is None:
            yield from self.finish()
            self._number, self._expected = run.number, ExpectedBatches.of_index(run.index)
            self._decoder = self._decoder_of(run, self._expected)
            self._read_bytes = self._checksum = 0
        if run.position == self._read_bytes:
            self._read_bytes += len(run.data)
            self._checksum = crc32c(run.data, self._checksum)
        yield from self._decoder.decode(run.data, run.position)
        self._last = run

    def finish(self) -> Iterator[pa.RecordBatch]:
        """
        Yield the last record batch of the current span, and log its corrupt batches.

        Raises:
            CorruptDataError: The whole object was read, and is another one than its index says.
        """
        decoder, self._decoder = self._decoder, None
        if decoder is None:
            return
        yield from decoder.finish()
        source = data_key(self._spans[self._number].partition, self._spans[self._number].segment)
        for one in decoder.corrupt[:_CORRUPT_TOLD]:
            log.warning(
                "corrupt batch passed over",
                object=source,
                position=one.position,
                offset=one.offset,
                error=one.message,
            )
        if len(decoder.corrupt) > _CORRUPT_TOLD:
            log.warning("corrupt batches passed over", object=source, batches=len(decoder.corrupt))
        if not decoder.corrupt:
            self._check_whole(source)

    def _check_whole(self, source: str) -> None:
        """Compare the object's checksum if all of it was read. None of its batches is known to be damaged."""
        if self._last is None or self._expected is None or self._read_bytes != self._last.index.size_bytes:
            return
        try:
            with fault_in(source):
                self._expected.require_checksum(self._checksum)
        except CorruptDataError as error:
            if not self._rules.skip_corrupt:
                raise
            log.warning("an object is damaged, but none of its batches", object=source, error=error.message)

    def rest_of(self, number: int) -> Span | None:
        """Return the part of span *number* that was not read; None if all of it was."""
        span = self._spans[number]
        if self._last is None or self._last.number != number:
            return span
        next_offset = _end_of(self._last, span.from_offset)
        return None if next_offset >= span.next_offset else span.cut(next_offset - span.from_offset)[1]

    def after(self, number: int) -> list[Span]:
        """Return the spans after span *number*."""
        return list(self._spans[number + 1 :])

    def _decoder_of(self, run: BatchRun, expected: ExpectedBatches) -> SegmentDecoder:
        span = self._spans[run.number]
        aborted = run.index.aborted if self._rules.read_committed else None
        return SegmentDecoder(
            self._rules.columns,
            topic=span.partition.topic,
            partition=span.partition.partition,
            selection=Selection(span.from_offset, span.next_offset, aborted),
            source=data_key(span.partition, span.segment),
            expected=expected,
            skip_corrupt=self._rules.skip_corrupt,
        )


def _end_of(run: BatchRun, from_offset: int) -> int:
    """
    Return the offset after the last valid batch of a run, or *from_offset* if that is later.

    A batch that claims offsets past the segment's end has a damaged base offset.

    The decoder read up to this offset, and skipped the corrupt batches before it.
    """
    at, next_offset = 0, from_offset
    while at < len(run.data):
        try:
            end = at + size_of_batch(run.data, at)
        except CorruptDataError:
            break
        with suppress(CorruptDataError):
            header = parse_header(run.data, at)
            check_crc(run.data, header, at)
            if header.last_offset <= run.index.last_offset:
                next_offset = max(next_offset, header.next_offset)
        at = end
    return next_offset
