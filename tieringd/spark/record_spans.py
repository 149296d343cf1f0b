"""
The positions of a batch's records in its decompressed bytes, found by machine code without copying.

For jobs that read keys or take records out of batches; the kept records are copied byte for byte. Record
headers are skipped without parsing. The bytes may be hostile, so the code compares each position with the end
of its record before it uses the position. `formats.records` does the same in Python, and tests compare the
two.

`filtered_batch` makes a batch without unwanted records. A batch that keeps all its records keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numba.extending import register_jitable

from tieringd.compiled.machine_code import compiled
from tieringd.errors import CorruptDataError
from tieringd.formats.compression import decompress
from tieringd.formats.record_batch import HEADER_BYTES, LOG_APPEND_TIME, BatchHeader
from tieringd.formats.records import narrowed_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray


NULL: Final = -1
"""The size of a null key or value; an empty one has size 0."""

_START, _END, _OFFSET_DELTA, _TIMESTAMP_DELTA, _KEY_START, _KEY_BYTES, _VALUE_BYTES = range(7)
_COLUMNS: Final = 7
_FAULTS: Final = (
    "",
    "a record, or a field in it, is cut short or does not fit",
    "the offset of a record is out of order",
    "bytes follow the last record",
)
_MISFIT, _DISORDER, _LEFT_OVER = range(1, len(_FAULTS))
_RECORD_BYTES_MIN: Final = 7
"""One byte for each field of a record: size, attributes, time, offset, key, value, number of headers."""


@dataclass(frozen=True, slots=True)
class RecordSpans:
    """The records of one batch, in columns of equal length."""

    header: BatchHeader
    records: memoryview
    """The batch's records, decompressed."""
    _table: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self._table)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Return the position in `records` at which each record begins."""
        return self._table[:, _START]

    @property
    def ends(self) -> NDArray[np.int64]:
        """Return the position in `records` at which each record ends, exclusive."""
        return self._table[:, _END]

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Return the records' offsets, ascending."""
        return self._table[:, _OFFSET_DELTA] + self.header.base_offset

    @property
    def timestamps_ms(self) -> NDArray[np.int64]:
        """Return the records' timestamps in milliseconds, as a consumer sees them."""
        if self.header.timestamp_type == LOG_APPEND_TIME:
            return np.full(len(self), self.header.max_timestamp_ms)
        return self._table[:, _TIMESTAMP_DELTA] + self.header.base_timestamp_ms

    @property
    def key_bytes(self) -> NDArray[np.int64]:
        """Return the sizes of the keys; NULL for a null key."""
        return self._table[:, _KEY_BYTES]

    @property
    def value_bytes(self) -> NDArray[np.int64]:
        """Return the sizes of the values; NULL for a null value, which makes the record a tombstone."""
        return self._table[:, _VALUE_BYTES]

    def keys(self) -> list[bytes | None]:
        """Return a copy of each record's key; None for a null key."""
        starts, sizes = self._table[:, _KEY_START].tolist(), self.key_bytes.tolist()
        records = self.records
        return [
            None if size == NULL else bytes(records[start : start + size])
            for start, size in zip(starts, sizes, strict=True)
        ]


def record_spans(header: BatchHeader, batch: memoryview) -> RecordSpans:
    """
    Return the positions of the records of *batch*, which begins with *header*.

    Raises:
        CorruptDataError: The batch does not have exactly the records that the header announces.
    """
    packed = batch[HEADER_BYTES:]
    is_empty = header.record_count == 0 and not packed
    records = packed if is_empty else decompress(header.codec, packed)
    if header.record_count * _RECORD_BYTES_MIN > len(records):
        # Before the table is allocated: a damaged count would ask for more memory than there is.
        raise CorruptDataError(_FAULTS[_MISFIT], offset=header.base_offset)
    table = np.empty((header.record_count, _COLUMNS), np.int64)
    fault = _compiled_walk()(np.frombuffer(records, np.uint8), header.last_offset_delta, table)
    if fault:
        raise CorruptDataError(_FAULTS[fault], offset=header.base_offset)
    return RecordSpans(header, records, table)


def _varint(body: NDArray[np.uint8], position: int, end: int) -> tuple[int, int]:
    """Return the zigzag varint at *position*, and the position after it; -1 if there is no valid varint."""
    bits = shift = 0
    while 0 <= position < end:
        byte = int(body[position])
        position += 1
        if shift == 63 and byte > 1:  # noqa: PLR2004 - the tenth byte has one bit left
            break
        bits |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - more bytes follow
            return ((bits >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(bits & 1), position
        shift += 7
    return 0, -1


register_jitable(_varint)


def _walk(body: NDArray[np.uint8], last_offset_delta: int, table: NDArray[np.int64]) -> int:
    """Fill *table* with the records in *body*; return the index of the fault in _FAULTS, 0 for none."""
    position, previous_delta = 0, -1
    for row in range(len(table)):
        size, begin = _varint(body, position, len(body))
        if begin < 0 or not 0 < size <= len(body) - begin:
            return _MISFIT
        end = begin + size
        # `begin + 1` skips the attributes, one byte that no version uses. After an invalid varint the
        # position is -1, and every later varint is invalid as well.
        timestamp_delta, at = _varint(body, begin + 1, end)
        offset_delta, at = _varint(body, at, end)
        key_bytes, key_start = _varint(body, at, end)
        value_bytes, value_start = _varint(body, key_start + max(0, key_bytes), end)
        if (
            key_start < 0
            or value_start < 0
            or key_bytes < NULL
            or not NULL <= value_bytes <= end - value_start
        ):
            return _MISFIT
        if not previous_delta < offset_delta <= last_offset_delta:
            return _DISORDER
        previous_delta = offset_delta
        table[row, _START] = position
        table[row, _END] = end
        table[row, _OFFSET_DELTA] = offset_delta
        table[row, _TIMESTAMP_DELTA] = timestamp_delta
        table[row, _KEY_START] = key_start
        table[row, _KEY_BYTES] = key_bytes
        table[row, _VALUE_BYTES] = value_bytes
        position = end
    return 0 if position == len(body) else _LEFT_OVER


@cache
def _compiled_walk() -> Callable[[NDArray[np.uint8], int, NDArray[np.int64]], int]:
    """Return `_walk` as machine code, compiled with empty arguments."""
    return compiled(_walk, np.frombuffer(b"", np.uint8), 0, np.empty((0, _COLUMNS), np.int64))


def filtered_batch(
    spans: RecordSpans, batch: memoryview, is_kept: NDArray[np.bool_]
) -> bytes | memoryview | None:
    """
    Return *batch* with only the records that *is_kept* marks; None if it marks none.

    *spans* are the batch's records, and *is_kept* has one element for each. A batch without records is
    returned as it is.
    """
    kept = int(np.count_nonzero(is_kept))
    if kept == len(spans):
        return batch
    if not kept:
        return None
    rows = np.flatnonzero(is_kept)
    # Kept records that follow one another are copied in one slice.
    breaks = np.flatnonzero(np.diff(rows) > 1)
    starts = spans.starts[rows[np.concatenate(([0], breaks + 1))]].tolist()
    ends = spans.ends[rows[np.concatenate((breaks, [kept - 1]))]].tolist()
    records = b"".join(spans.records[start:end] for start, end in zip(starts, ends, strict=True))
    latest_ms = int(spans.timestamps_ms[rows].max())
    return narrowed_batch(spans.header, records, record_count=kept, max_timestamp_ms=latest_ms)
