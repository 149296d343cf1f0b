"""
The batches of a segment, checked and unpacked: everything about them but their records.

Each wanted batch has its checksum compared before any of its bytes are believed. The base offset stands
outside of that sum; a batch that does not ascend is damaged.
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
    """The first offset that is not wanted any more."""
    aborted: tuple[AbortedTransaction, ...] | None = None
    """Their records are left out, as `read_committed` asks; None for `read_uncommitted`."""


class UnpackedBatch(NamedTuple):
    """A batch with sound bytes, of which some records are wanted."""

    header: BatchHeader
    records: memoryview
    """Unpacked; they hold until the next batch is read."""


class BatchReader:
    """
    Read batches that follow one another in a segment. Owned by one decoder.

    A batch outside of the selection is stepped over: whoever did not ask for it need not learn that it
    is damaged.
    """

    def __init__(self, selection: Selection, *, limit_bytes: int = MAX_DECOMPRESSED_BYTES) -> None:
        """Read what *selection* wants; a batch that unpacks to more than *limit_bytes* is corrupt."""
        self._selection = selection
        self._limit_bytes = limit_bytes
        self._committed = None if selection.aborted is None else ReadCommittedFilter(selection.aborted)
        self._unpacker = Unpacker()
        self.expected_offset = 0
        """The least that the next batch may begin with."""

    @property
    def left_out(self) -> int:
        """Return the attributes of batches that only `read` can deal with."""
        return CODEC_MASK | CONTROL_FLAG | (0 if self._committed is None else TRANSACTIONAL_FLAG)

    def read(self, data: memoryview) -> UnpackedBatch | None:
        """
        Return the batch that fills *data*; None if nothing of it is wanted.

        Markers of transactions are never wanted.

        Raises:
            CorruptDataError: It is damaged, or its offsets do not ascend.
        """
        header = parse_header(data)
        if header.base_offset < self.expected_offset:
            raise CorruptDataError(
                f"batch offset {header.base_offset} is out of order: {self.expected_offset} comes next",
                offset=header.base_offset,
            )
        wanted = self._selection
        if header.last_offset < wanted.from_offset or header.base_offset >= wanted.next_offset:
            # Nothing vouches for where it ends.
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
    Return the size of the batch at *at*, all of which is in *data*.

    Raises:
        CorruptDataError: Its header cannot be believed in this: no batch after it can be found.
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
