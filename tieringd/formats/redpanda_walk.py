"""
A walk over the batch headers of a Redpanda segment: no records, no checksums but the headers' own.

It counts the offsets that are not Kafka's, which places every later segment, and finds the
markers of transactions. Of the bytes in between it proves nothing: `formats.redpanda_reframe`
does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.errors import CorruptDataError
from tieringd.formats.records import control_type
from tieringd.formats.redpanda_batch import (
    RAW_HEADER_BYTES,
    RawHeader,
    kafka_header,
    parse_raw_header,
    reframed_batch,
)
from tieringd.formats.segment_scan import EndedBy
from tieringd.model.offset_translation import OffsetTranslation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieringd.formats.transactions import Marker, TransactionTracker
    from tieringd.model.segment import AbortedTransaction

_READ_BYTES = 4096
"""A header costs a page of the page cache anyway, and small batches share one."""

_MAX_MARKER_BATCH_BYTES = 64 * 1024


class RedpandaWalk:
    """
    Walk the headers of one segment file to its last whole batch.

    *read_at* returns the bytes at a position, fewer only at the end of the file. In an active
    segment a damaged header or marker is taken for one that is being written: the walk ends there.
    """

    def __init__(
        self,
        read_at: Callable[[int, int], bytes],
        *,
        size_bytes: int,
        raw_base_offset: int,
        is_active: bool,
        source: str | None = None,
    ) -> None:
        self._read_at = read_at
        self._size_bytes = size_bytes
        self._is_active = is_active
        self._source = source
        self.position = 0
        """Where the next batch begins; at the end, where the log ends."""
        self.next_raw_offset = raw_base_offset
        """The first raw offset after the last batch."""
        self.uncounted_offsets = 0
        """Of the raw offsets walked over, how many are not Kafka's."""
        self.ended_by = EndedBy.END_OF_FILE

    def batches(self) -> Iterator[tuple[int, RawHeader]]:
        """
        Yield each batch's position and header, ascending; what it counts is in the totals by then.

        Raises:
            UnsupportedBatchTypeError: Whether a batch has Kafka offsets is not known.
            CorruptDataError: A header is damaged, impossible or out of order.
        """
        block, block_at = b"", 0
        while (left := self._size_bytes - self.position) > 0:
            in_block = self.position - block_at
            if not 0 <= in_block <= len(block) - RAW_HEADER_BYTES:
                block_at, in_block = self.position, 0
                block = self._read_at(block_at, min(_READ_BYTES, left))
            header = self._header(block[in_block : in_block + RAW_HEADER_BYTES])
            if header is None:
                return
            if header.size_bytes > left:
                self.ended_by = EndedBy.TORN_TAIL
                return
            at = self.position
            self.position += header.size_bytes
            self.next_raw_offset = header.next_offset
            self.uncounted_offsets += header.uncounted_offsets
            yield at, header

    def follow_transactions(
        self, tracker: TransactionTracker, *, delta: int, leader_epoch: int
    ) -> list[AbortedTransaction]:
        """
        Walk to the end with *tracker*; return the transactions whose abort marker was met.

        *delta* is that of the segment's base; the tracker is told Kafka offsets.

        Raises:
            CorruptDataError: As for `batches`, or a marker is unreadable.
        """
        aborted = []
        for position, header in self.batches():
            if not header.is_transactional:
                continue
            here = delta + self.uncounted_offsets
            kafka = kafka_header(header, delta=here, leader_epoch=leader_epoch)
            if not header.is_control:
                tracker.note_data(kafka)
                continue
            marker = self._marker(position, header, here)
            if marker is None:
                break
            ended = tracker.note_marker(kafka, marker)
            if ended is not None:
                aborted.append(ended)
        return aborted

    def _header(self, raw: bytes) -> RawHeader | None:
        """Return the header in *raw*, or None at the end of the log."""
        if not raw.strip(b"\0"):
            self.ended_by = EndedBy.ZERO_TAIL
            return None
        if len(raw) < RAW_HEADER_BYTES:
            self.ended_by = EndedBy.TORN_TAIL
            return None
        try:
            header = parse_raw_header(raw)
        except CorruptDataError as error:
            if self._is_active and type(error) is CorruptDataError:
                self.ended_by = EndedBy.TORN_TAIL
                return None
            raise self._placed(error) from error
        if header.base_offset < self.next_raw_offset:
            raise self._placed(CorruptDataError(f"raw batch offset {header.base_offset} is out of order"))
        return header

    def _marker(self, position: int, header: RawHeader, delta: int) -> Marker | None:
        """Return the marker of a control batch, or None if the batch is still being written."""
        place = OffsetTranslation(header.base_offset, delta)
        try:
            # A marker is small. A control batch that is not holds none, cut short or whole.
            size_bytes = min(header.size_bytes, _MAX_MARKER_BATCH_BYTES)
            batch = memoryview(self._read_at(position, size_bytes))
            return control_type(memoryview(reframed_batch(batch, place, leader_epoch=-1)))
        except CorruptDataError as error:
            if self._is_active:
                self.ended_by = EndedBy.TORN_TAIL
                return None
            raise CorruptDataError(
                error.message, source=self._source, position=position, offset=place.kafka_offset
            ) from error

    def _placed(self, error: CorruptDataError) -> CorruptDataError:
        return type(error)(
            f"{error.message}, where raw offset {self.next_raw_offset} should be",
            source=self._source,
            position=self.position,
            hint=error.hint,
        )
