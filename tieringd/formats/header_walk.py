"""
A walk over batch headers alone: no checksums, no records.

It finds the end of a log and its transactions for little. It proves nothing about the
bytes in between: `formats.segment_scan` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import (
    HEADER,
    HEADER_BYTES,
    BatchHeader,
    header_fault,
    located_fault,
)
from tieringd.formats.records import control_type
from tieringd.formats.segment_scan import EndedBy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieringd.formats.transactions import Marker, TransactionTracker
    from tieringd.model.segment import AbortedTransaction

_READ_BYTES = 4096
"""A header costs a page of the page cache anyway, and small batches share one."""

_MAGIC_STARTS_AT = 16

_MAX_MARKER_BATCH_BYTES = 64 * 1024


class HeaderWalk:
    """
    Walk the headers of one segment file, from *position* to the last whole batch.

    *read_at* returns the bytes at a position, fewer only at the end of the file.
    """

    def __init__(
        self,
        read_at: Callable[[int, int], bytes],
        *,
        size_bytes: int,
        base_offset: int,
        position: int = 0,
        source: str | None = None,
    ) -> None:
        self._read_at = read_at
        self._size_bytes = size_bytes
        self._source = source
        self.position = position
        """Where the next batch begins; at the end, where the log ends."""
        self.next_offset = base_offset
        """The first offset after the last batch."""
        self.ended_by = EndedBy.END_OF_FILE

    def batches(self) -> Iterator[tuple[int, BatchHeader]]:
        """
        Yield each batch's position and header, ascending.

        Raises:
            OldMagicError: The segment holds message format v0 or v1.
            CorruptDataError: A header is impossible or out of order.
        """
        block, block_at = b"", 0
        while (left := self._size_bytes - self.position) > 0:
            in_block = self.position - block_at
            if not 0 <= in_block <= len(block) - HEADER_BYTES:
                block_at, in_block = self.position, 0
                block = self._read_at(block_at, min(_READ_BYTES, left))
            if left < HEADER_BYTES or not block[in_block + _MAGIC_STARTS_AT]:
                # Magic 0 may be an old message; then the header's other bytes are not all zero.
                raw = block[in_block : in_block + HEADER_BYTES]
                if not raw.strip(b"\0"):
                    self.ended_by = EndedBy.ZERO_TAIL
                    return
                if left < HEADER_BYTES:
                    self.ended_by = EndedBy.TORN_TAIL
                    return
            header = BatchHeader._make(HEADER.unpack_from(block, in_block))
            self._check(header)
            size_bytes = header.size_bytes
            if size_bytes > left:
                self.ended_by = EndedBy.TORN_TAIL
                return
            at = self.position
            self.position += size_bytes
            self.next_offset = header.next_offset
            yield at, header

    def follow_transactions(self, tracker: TransactionTracker) -> list[AbortedTransaction]:
        """
        Walk to the end with *tracker*; return the transactions whose abort marker was met.

        Raises:
            CorruptDataError: A header is impossible or out of order, or a marker unreadable.
        """
        aborted = []
        for position, header in self.batches():
            if not header.is_transactional:
                continue
            if not header.is_control:
                tracker.note_data(header)
                continue
            ended = tracker.note_marker(header, self._marker(position, header))
            if ended is not None:
                aborted.append(ended)
        return aborted

    def _marker(self, position: int, header: BatchHeader) -> Marker:
        if header.size_bytes > _MAX_MARKER_BATCH_BYTES:
            raise self._fault(f"a control batch of {header.size_bytes} bytes is impossible", position, header)
        try:
            return control_type(memoryview(self._read_at(position, header.size_bytes)))
        except CorruptDataError as error:
            raise self._fault(error.message, position, header) from error

    def _check(self, header: BatchHeader) -> None:
        fault = header_fault(header)
        if fault is None and header.base_offset < self.next_offset:
            fault = f"batch offset {header.base_offset} is out of order: {self.next_offset} comes next"
        if fault is not None:
            raise located_fault(header, fault, position=self.position, source=self._source)

    def _fault(self, fault: str, position: int, header: BatchHeader) -> CorruptDataError:
        return CorruptDataError(fault, source=self._source, position=position, offset=header.base_offset)
