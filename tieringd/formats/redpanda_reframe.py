"""
The re-framing of a Redpanda segment into a Kafka segment with the same records.

The re-framer does no I/O: its caller feeds it views of any buffer with the bytes, and takes Kafka
batches (v2) from a buffer of its own. Every batch is checked, also those that are dropped. Offsets are
translated by a delta that grows with each batch without Kafka offsets; the next segment continues with
the delta at the end.

Redpanda allocates space ahead, so zeros may follow the last batch. In a closed segment the zeros must
reach to the end of the file. The caller decides whether the segment is complete, because it knows where
the next one begins. In an active segment, a damaged batch counts as one that is being written: the
output ends before it, and it is read again once the segment is closed.

`RedpandaWalk` walks over the batch headers alone: no records, and no checksums but the headers' own. It
counts the offsets that are not Kafka's, which gives the Kafka offsets of every later segment, and finds
the markers of transactions. It proves nothing about the bytes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import HEADER
from tieringd.formats.records import control_type
from tieringd.formats.redpanda_batch import (
    HEADER_CRC_STARTS_AT,
    RAW_HEADER,
    RAW_HEADER_BYTES,
    RawHeader,
    check_raw_crc,
    kafka_header,
    parse_raw_header,
    reframed_batch,
    require_possible,
)
from tieringd.formats.segment_scan import EndedBy
from tieringd.formats.transactions import Marker, TransactionTracker
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.segment import AbortedTransaction

_READ_BYTES = 4096
"""A header costs a page of the page cache anyway, and small batches share one."""

_MAX_MARKER_BATCH_BYTES = 64 * 1024

_ZERO_HEADER = bytes(RAW_HEADER_BYTES)


class RedpandaWalk:
    """
    A walk over the headers of one segment file to its last whole batch.

    *read_at* returns the bytes at a position, fewer only at the end of the file. In an active segment a
    damaged header or marker counts as one that is being written: the walk ends there.
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
        """Position of the next batch; after the walk, the end of the log."""
        self.next_raw_offset = raw_base_offset
        """The first raw offset after the last batch."""
        self.uncounted_offsets = 0
        """How many of the raw offsets so far are not Kafka's."""
        self.ended_by = EndedBy.END_OF_FILE

    def batches(self) -> Iterator[tuple[int, RawHeader]]:
        """
        Yield each batch's position and header, ascending; the totals include the batch by then.

        Raises:
            UnsupportedBatchTypeError: A batch has a type for which it is unknown whether it has Kafka
                offsets.
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

        *delta* is that of the segment's base; *tracker* gets Kafka offsets.

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
            # A marker is small. A larger control batch holds no marker, whether cut short or whole.
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


@dataclass(frozen=True, slots=True)
class Reframing:
    """The result of re-framing one segment."""

    translation: OffsetTranslation
    """Translation after the last batch: that of the next segment's base, unless compaction left a hole."""
    read_bytes: int
    """Bytes of whole batches, including dropped ones. Zeros may follow them in the file."""
    size_bytes: int
    """Bytes of the resulting Kafka batches."""
    batch_count: int
    dropped_batches: int
    ended_by: EndedBy


class SegmentReframer:
    """
    Turns the batches of one segment into Kafka's as they are fed.

    Feed it views that begin where the last one was consumed to, until `is_done` or the end of the bytes;
    then call `finish`. It cannot be used after an error. *translation* is that of the segment's base.
    With *next_offset*, a Kafka offset, the segment is closed and no batch may reach past it. Without it,
    the segment is active.
    """

    def __init__(
        self,
        translation: OffsetTranslation,
        next_offset: int | None,
        *,
        leader_epoch: int,
        source: str | None = None,
    ) -> None:
        self._expected_raw_offset = translation.raw_offset
        self._delta = translation.delta
        self._next_offset = next_offset
        self._is_active = next_offset is None
        self._leader_epoch = leader_epoch
        self._source = source
        self._wanted_bytes = RAW_HEADER_BYTES
        self._ended_by: EndedBy | None = None
        self._is_in_zeros = False
        self._position = 0
        self._size_bytes = 0
        self._batch_count = 0
        self._dropped_batches = 0

    @property
    def wanted_bytes(self) -> int:
        """Return how many bytes the next view must have for `feed` to make progress."""
        return self._wanted_bytes

    @property
    def is_done(self) -> bool:
        """Return whether the end was found before the bytes ended. More bytes change nothing."""
        return self._ended_by is not None

    def feed(self, view: memoryview, out: bytearray) -> int:
        """
        Append the Kafka form of the whole batches at the front of *view* to *out*.

        Returns how many bytes of *view* were consumed, and need not be fed again.

        Raises:
            UnsupportedBatchTypeError: A batch has a type for which it is unknown whether it has Kafka
                offsets.
            CorruptDataError: A batch is damaged, or not at its place; with its position in the file and
                its Kafka offset.
        """
        if self._ended_by is not None:
            return 0
        if self._is_in_zeros:
            return self._feed_zeros(view)
        start, position, size = self._position, 0, len(view)
        self._wanted_bytes = RAW_HEADER_BYTES
        try:
            while position <= size - RAW_HEADER_BYTES:
                header = self._header(view, position)
                if header is None:
                    break
                end = position + header.size_bytes
                if end > size:
                    self._wanted_bytes = header.size_bytes
                    break
                if not self._take(view, position, header, out):
                    break
                position = end
                self._position = start + position
        except CorruptDataError as error:
            raise self._placed(error) from error
        return position

    def finish(self, left: memoryview | bytes = b"") -> Reframing:
        """
        Return the result; *left* are the bytes that `feed` did not consume.

        Raises:
            CorruptDataError: The segment is closed, and its last bytes are neither a whole batch nor zeros.
        """
        if self._ended_by is None:
            self._ended_by = self._end_before(left)
        return Reframing(
            translation=OffsetTranslation(self._expected_raw_offset, self._delta),
            read_bytes=self._position,
            size_bytes=self._size_bytes,
            batch_count=self._batch_count,
            dropped_batches=self._dropped_batches,
            ended_by=self._ended_by,
        )

    def _header(self, view: memoryview, position: int) -> RawHeader | None:
        """Return the sound header at *position*, or None if the log ends before it."""
        header = RawHeader._make(RAW_HEADER.unpack_from(view, position))
        end = position + RAW_HEADER_BYTES
        # No field of a header, least of all its length, is trusted before its checksum is right.
        found = crc32c(view[position + HEADER_CRC_STARTS_AT : end])
        if found != header.header_crc:
            if view[position:end] == _ZERO_HEADER:
                # The rest of a closed segment is still fed, to check that it is zeros.
                self._is_in_zeros = True
                self._ended_by = EndedBy.ZERO_TAIL if self._is_active else None
                return None
            if self._is_active:
                self._ended_by = EndedBy.TORN_TAIL
                return None
            raise CorruptDataError(f"batch header CRC is {found:08x} and should be {header.header_crc:08x}")
        require_possible(header)
        self._require_in_order(header)
        return header

    def _require_in_order(self, header: RawHeader) -> None:
        if header.base_offset < self._expected_raw_offset:
            raise CorruptDataError(
                f"raw batch offset {header.base_offset} is out of order: {self._expected_raw_offset} "
                "comes next"
            )
        end_offset = header.next_offset - self._delta - header.uncounted_offsets
        if self._next_offset is not None and end_offset > self._next_offset:
            raise CorruptDataError(
                f"batch offset {end_offset - 1} is beyond the segment's last offset {self._next_offset - 1}"
            )

    def _take(self, view: memoryview, position: int, header: RawHeader, out: bytearray) -> bool:
        """Check a whole batch and append it to *out*, or drop it; False if it is being written."""
        try:
            check_raw_crc(view, header, position)
        except CorruptDataError:
            if not self._is_active:
                raise
            self._ended_by = EndedBy.TORN_TAIL
            return False
        if header.is_data:
            out += HEADER.pack(*kafka_header(header, delta=self._delta, leader_epoch=self._leader_epoch))
            out += view[position + RAW_HEADER_BYTES : position + header.size_bytes]
            self._size_bytes += header.size_bytes
            self._batch_count += 1
        else:
            self._delta += header.uncounted_offsets
            self._dropped_batches += 1
        self._expected_raw_offset = header.next_offset
        return True

    def _end_before(self, left: memoryview | bytes) -> EndedBy:
        """
        Return why the log ends before the *left* bytes, which are no whole batch.

        Raises:
            CorruptDataError: The segment is closed, and the bytes are not zeros.
        """
        if self._is_in_zeros or left:
            if _is_zero(left):
                return EndedBy.ZERO_TAIL
            if self._is_active:
                return EndedBy.TORN_TAIL
            raise self._placed(
                CorruptDataError(
                    f"the last batch is cut: only {len(left)} of at least {self._wanted_bytes} bytes exist"
                )
            )
        return EndedBy.END_OF_FILE

    def _feed_zeros(self, view: memoryview) -> int:
        if not _is_zero(view):
            raise self._placed(
                CorruptDataError("zeros stand where a batch should begin, and data follows them")
            )
        return len(view)

    def _placed(self, error: CorruptDataError) -> CorruptDataError:
        """Return *error* with the place of the next batch. The error keeps its class."""
        return type(error)(
            error.message,
            source=self._source,
            position=self._position,
            offset=self._expected_raw_offset - self._delta,
            hint=error.hint,
        )


def _is_zero(view: memoryview | bytes) -> bool:
    return not bytes(view).strip(b"\0")
