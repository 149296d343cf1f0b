"""
Check and decompress the batches of a segment. Their records are read elsewhere.

The checksum of each wanted batch is compared before any of its bytes are used. The checksum does not cover
the base offset; a batch whose base offset is out of order counts as damaged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from tieringd.errors import CorruptDataError
from tieringd.formats.compression import MAX_DECOMPRESSED_BYTES, Unpacker
from tieringd.formats.record_batch import (
    CODEC_MASK,
    CONTROL_FLAG,
    HEADER_BYTES,
    LENGTH_STARTS_AT,
    MAX_BATCH_BYTES,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    check_crc,
    parse_header,
)
from tieringd.formats.transactions import ReadCommittedFilter
from tieringd.model.segment import AbortedTransaction

_LENGTH = struct.Struct(">8xi")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records of a partition are wanted."""

    from_offset: int
    next_offset: int
    """The offset after the last wanted one."""
    aborted: tuple[AbortedTransaction, ...] | None = None
    """Aborted transactions whose records `read_committed` leaves out; None for `read_uncommitted`."""


class UnpackedBatch(NamedTuple):
    """A batch with a correct checksum and at least one wanted offset."""

    header: BatchHeader
    records: memoryview
    """The decompressed records, valid until the next batch is read."""


class SegmentBatchReader:
    """
    Reads the batches of a segment one after another. Owned by one decoder.

    A batch outside of the selection is skipped without comparing its checksum. Damage in batches that were
    not requested is no error.
    """

    def __init__(self, selection: Selection, *, limit_bytes: int = MAX_DECOMPRESSED_BYTES) -> None:
        """Read what *selection* wants. A batch that decompresses to more than *limit_bytes* is corrupt."""
        self._selection = selection
        self._limit_bytes = limit_bytes
        self._committed = None if selection.aborted is None else ReadCommittedFilter(selection.aborted)
        self._unpacker = Unpacker()
        self.expected_offset = 0
        """The lowest base offset that the next batch may have."""

    @property
    def left_out(self) -> int:
        """Return the mask of attributes of batches that the kernel leaves to `read`."""
        return CODEC_MASK | CONTROL_FLAG | (0 if self._committed is None else TRANSACTIONAL_FLAG)

    def read(self, data: memoryview) -> UnpackedBatch | None:
        """
        Return the batch that fills *data*; None if nothing of it is wanted.

        Transaction markers are never wanted.

        Raises:
            CorruptDataError: The batch is damaged, or its offsets are out of order.
        """
        header = parse_header(data)
        if header.base_offset < self.expected_offset:
            raise CorruptDataError(
                f"batch offset {header.base_offset} is out of order: {self.expected_offset} comes next",
                offset=header.base_offset,
            )
        wanted = self._selection
        if header.last_offset < wanted.from_offset or header.base_offset >= wanted.next_offset:
            # The checksum was not compared, so the batch's last offset is not certain.
            self.expected_offset = header.base_offset + 1
            return None
        check_crc(data, header)
        self.expected_offset = header.next_offset
        if header.is_control or not (self._committed is None or self._committed.accepts(header)):
            return None
        if header.record_count == 0 and len(data) == HEADER_BYTES:
            return None
        try:
            records = self._unpacker.unpack(header.codec, data[HEADER_BYTES:], limit_bytes=self._limit_bytes)
        except CorruptDataError as error:
            raise CorruptDataError(error.message, offset=header.base_offset) from error
        return UnpackedBatch(header, records)


def size_of_batch(data: memoryview, at: int) -> int:
    """
    Return the size in bytes of the batch at *at*, which *data* holds completely.

    Raises:
        CorruptDataError: The size in its header is impossible, so that no batch after it can be found.
    """
    left = len(data) - at
    if left >= HEADER_BYTES:
        size_bytes: int = LENGTH_STARTS_AT + _LENGTH.unpack_from(data, at)[0]
        if HEADER_BYTES <= size_bytes <= min(left, MAX_BATCH_BYTES):
            return size_bytes
    header = parse_header(data, at)
    raise CorruptDataError(
        f"the batch is cut: {left} of {header.size_bytes} bytes", position=at, offset=header.base_offset
    )
