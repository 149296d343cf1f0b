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


def check_batches(data: memoryview, *, base_offset: int, next_offset: int) -> None:
    """
    Check that *data* is whole batches with offsets from *base_offset* up to *next_offset* (exclusive).

    Raises:
        CorruptDataError: It is not; with the position in *data*.
    """
    consumed, expected = _check(data, expected=base_offset, next_offset=next_offset)
    if consumed != len(data):
        raise _cut(len(data) - consumed, consumed, expected)


def check_batches_in(
    read_at: Callable[[int, int], bytes],
    size_bytes: int,
    *,
    base_offset: int,
    next_offset: int,
    window_bytes: int = _WINDOW_BYTES,
) -> None:
    """
    Check *size_bytes* bytes as `check_batches` does. *read_at* gets a position and a size.

    *window_bytes* are read at once, and more only for a larger batch.

    Raises:
        CorruptDataError: They are not such batches, or end inside one.
    """
    position, expected, least_bytes = 0, base_offset, window_bytes
    while position < size_bytes:
        window = memoryview(read_at(position, min(window_bytes, size_bytes - position)))
        is_last = position + len(window) == size_bytes
        try:
            consumed, expected = _check(window, expected=expected, next_offset=next_offset)
        except CorruptDataError as error:
            raise CorruptDataError(
                error.message, position=position + (error.position or 0), offset=error.offset, hint=error.hint
            ) from error
        if not consumed and (is_last or len(window) < window_bytes):
            raise _cut(len(window), position, expected)
        # A batch larger than the window is read again through a larger window.
        window_bytes = least_bytes if consumed else window_bytes * 2
        position += consumed


def _check(view: memoryview, *, expected: int, next_offset: int) -> tuple[int, int]:
    """Check the whole batches at the front of *view*; return their bytes, and the next offset."""
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
            is_possible
            and expected <= offset
            and 0 <= delta < next_offset - offset
            and checksum(view[at + CRC_STARTS_AT : end]) == crc
        ):
            raise _fault(view, at, expected, next_offset)
        expected = offset + delta + 1
        at = end
    return at, expected


def _fault(view: memoryview, at: int, expected: int, next_offset: int) -> CorruptDataError:
    """Return the fault of the batch at *at*, found by a slower, detailed check."""
    try:
        header = parse_header(view, at)
        check_crc(view, header, at)
    except CorruptDataError as error:
        return error
    return CorruptDataError(
        f"the batch has offsets {header.base_offset} to {header.last_offset}, but offsets {expected} to "
        f"{next_offset - 1} are expected here",
        position=at,
        offset=header.base_offset,
    )


def _cut(left_bytes: int, position: int, offset: int) -> CorruptDataError:
    return CorruptDataError(
        f"the last batch is cut short: {left_bytes} bytes are left over", position=position, offset=offset
    )
