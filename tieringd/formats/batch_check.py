"""
A check of a run of stored batches: whole, in order, and with the right checksums.

It proves that the bytes may be sent to clients unchanged. It reads through windows, so that a whole
segment needs no more memory than its largest batch. It does not read the records: `formats.segment_scan`
does that, once, before the upload.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.batch_offsets import BatchPlace, ExpectedBatches, OffsetCheck
from tieringd.formats.record_batch import (
    CRC_STARTS_AT,
    HEADER_BYTES,
    LENGTH_STARTS_AT,
    MAGIC,
    MAX_BATCH_BYTES,
    MIN_LENGTH,
    check_crc,
    parse_header,
)

_WINDOW_BYTES = 4 << 20
_FIELDS = struct.Struct(">qi4xbI2xi")
"""The fields of a header that the check needs: base offset, length, magic, checksum, last offset delta."""
_MAX_LENGTH = MAX_BATCH_BYTES - LENGTH_STARTS_AT


def check_batches(data: memoryview, expected: ExpectedBatches) -> None:
    """
    Check that *data* is whole batches, and those that are *expected*.

    Raises:
        CorruptDataError: It is not; with the position in *data*.
    """
    check = OffsetCheck(expected)
    consumed = _check(data, 0, check)
    if consumed != len(data):
        raise _cut(len(data) - consumed, consumed, check.expected_offset)
    if expected.checksum is not None:
        expected.require_checksum(crc32c(data))


def check_batches_in(
    read_at: Callable[[int, int], bytes],
    size_bytes: int,
    expected: ExpectedBatches,
    *,
    window_bytes: int = _WINDOW_BYTES,
) -> None:
    """
    Check *size_bytes* bytes as `check_batches` does. *read_at* gets a position and a size.

    *window_bytes* are read at once, and more only for a larger batch.

    Raises:
        CorruptDataError: They are not such batches, or end inside one.
    """
    check, checksum = OffsetCheck(expected), 0
    position, least_bytes = 0, window_bytes
    while position < size_bytes:
        window = memoryview(read_at(position, min(window_bytes, size_bytes - position)))
        is_last = position + len(window) == size_bytes
        try:
            consumed = _check(window, position, check)
        except CorruptDataError as error:
            raise CorruptDataError(
                error.message, position=position + (error.position or 0), offset=error.offset, hint=error.hint
            ) from error
        if not consumed and (is_last or len(window) < window_bytes):
            raise _cut(len(window), position, check.expected_offset)
        # A batch larger than the window is read again through a larger window.
        window_bytes = least_bytes if consumed else window_bytes * 2
        position += consumed
        if expected.checksum is not None:
            checksum = crc32c(window[:consumed], checksum)
    expected.require_checksum(checksum)


def _check(view: memoryview, position: int, check: OffsetCheck) -> int:
    """Check the whole batches at the front of *view*, which begins at *position*; return their bytes."""
    unpack_from, checksum = _FIELDS.unpack_from, crc32c
    at, size = 0, len(view)
    last_header = size - HEADER_BYTES
    while at <= last_header:
        offset, length, magic, crc, delta = unpack_from(view, at)
        end = at + LENGTH_STARTS_AT + length
        is_possible = magic == MAGIC and MIN_LENGTH <= length <= _MAX_LENGTH
        if is_possible and end > size:
            break
        if not (
            is_possible and offset >= 0 and delta >= 0 and checksum(view[at + CRC_STARTS_AT : end]) == crc
        ):
            raise _fault(view, at)
        fault = check.fault_of(BatchPlace(position + at, offset, offset + delta + 1))
        if fault is not None:
            raise CorruptDataError(fault, position=at, offset=offset)
        at = end
    return at


def _fault(view: memoryview, at: int) -> CorruptDataError:
    """Return the fault of the batch at *at*, found by a slower, detailed check."""
    try:
        header = parse_header(view, at)
        check_crc(view, header, at)
    except CorruptDataError as error:
        return error
    raise AssertionError("the check refuses a batch that parse_header and check_crc take")


def _cut(left_bytes: int, position: int, offset: int) -> CorruptDataError:
    return CorruptDataError(
        f"the last batch is cut short: {left_bytes} bytes are left over", position=position, offset=offset
    )
