"""
Copy the records of batches into the columns' buffers, in machine code.

The bytes may be hostile, and machine code checks no address by itself. So the code compares every address
with the end of its memory before it uses the address. The rules for a valid batch are those of
`formats.record_batch` and `formats.records`, and tests compare the results. Positions are addresses, so
that helpers take no arrays: numba counts references in every call with an array, which would cost more than
the work itself.

All compiled code is in this file, because numba's cache notices changes in no other file. The constants
that it uses from other files never change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from llvmlite.ir import IntType
from numba.core import cgutils, types

from tieringd.compiled.machine_code import compiled, helper, instruction
from tieringd.formats.record_batch import (
    HEADER_BYTES,
    LENGTH_STARTS_AT,
    LOG_APPEND_TIME_FLAG,
    MAGIC,
    MAX_BATCH_BYTES,
)
from tieringd.spark.decoder.record_tables import BATCH, CORRUPT, CURSOR, DONE, FULL, NULL_TIME, PLACE, ROWS

Long: TypeAlias = Any
"""An int64. Before compilation it is an integer of Python or numpy."""

_NOWHERE: Final = np.int64(2**62)
"""An address after every end. A read from there fails, and gives _NOWHERE again."""

_MAX_TIME_MS: Final = np.int64((2**63 - 1) // 1000)
_OFFSETS_END: Final = 1 << 62
_SEVEN_BITS: Final = np.uint64(0x7F)
_MORE_BYTES_FOLLOW: Final = np.uint64(0x80)
_ONE: Final = np.uint64(1)
_SEVEN: Final = np.uint64(7)
_EIGHT: Final = np.uint64(8)
_LAST_SHIFT: Final = np.uint64(63)


@instruction
def _byte(_typing: Any, _address: Any) -> Any:
    """Return the byte at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.zext(
            builder.load(builder.inttoptr(arguments[0], IntType(8).as_pointer())), IntType(64)
        )

    return types.uint64(types.int64), generate


@instruction
def _int32(_typing: Any, _address: Any) -> Any:
    """Return the int32 at an address, in the machine's byte order."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.sext(
            builder.load(builder.inttoptr(arguments[0], IntType(32).as_pointer())), IntType(64)
        )

    return types.int64(types.int64), generate


@instruction
def _store(_typing: Any, _address: Any, value: Any) -> Any:
    """Store a value of any integer type at an address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, stored = arguments
        builder.store(stored, builder.inttoptr(address, stored.type.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


@instruction
def _copy(_typing: Any, _target: Any, _source: Any, _size: Any) -> Any:
    """Copy bytes from address to address. For a short key, slices would take several times as long."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@helper
def _number(at: Long, size: int) -> Long:
    """Return the signed big-endian integer of *size* bytes at *at*."""
    bits = np.uint64(0)
    for place in range(size):
        bits = bits << _EIGHT | _byte(at + place)
    unused = 64 - 8 * size
    return np.int64(bits << np.uint64(unused)) >> np.int64(unused)


@helper
def _varint(at: Long, end: Long) -> tuple[Long, Long]:
    """Return the zigzag varint at *at* and the address after it; _NOWHERE if it is cut or too long."""
    bits = shift = np.uint64(0)
    while at < end and shift <= _LAST_SHIFT:
        byte = _byte(at)
        at += 1
        bits |= (byte & _SEVEN_BITS) << shift
        if byte < _MORE_BYTES_FOLLOW:
            if shift == _LAST_SHIFT and byte > _ONE:
                break
            return np.int64(bits >> _ONE) ^ -np.int64(bits & _ONE), at
        shift += _SEVEN
    return np.int64(0), _NOWHERE


@helper
def _field(at: Long, end: Long) -> tuple[Long, Long]:
    """Return the size of the field at *at*, -1 for null, and its begin; _NOWHERE if it does not fit."""
    size, at = _varint(at, end)
    if size < -1 or size > end - at:
        return np.int64(0), _NOWHERE
    return size, at


@helper
def _end_of(ends: Long, place: Long) -> Long:
    """Return how many bytes or elements precede element *place* of a column; 0 for an unwanted column."""
    return _int32(ends + 4 * place) if ends else 0


@helper
def _keep(ends: Long, present: Long, kept: Long, place: Long, at: Long, size: Long) -> None:  # noqa: PLR0917
    """Store the field of *size* bytes at *at* as element *place* of a column, which must have room for it."""
    filled = _int32(ends + 4 * place)
    _store(present + place, np.uint8(size >= 0))
    _copy(kept + filled, at, max(size, 0))
    _store(ends + 4 * (place + 1), np.int32(filled + max(size, 0)))


@helper
def _time(base_ms: Long, delta_ms: Long) -> Long:
    """Return base plus delta in microseconds; NULL_TIME if that exceeds 64 bits."""
    if delta_ms >= 0:
        fits = base_ms <= _MAX_TIME_MS - delta_ms and base_ms + delta_ms >= -_MAX_TIME_MS
    else:
        fits = base_ms >= -_MAX_TIME_MS - delta_ms and base_ms + delta_ms <= _MAX_TIME_MS
    return (base_ms + delta_ms) * 1000 if fits else NULL_TIME


def place_batches(start: Long, end: Long, places: Any) -> Long:
    """
    Write the places of the batches from *start* on to *places*; return how many there are.

    Only sizes and offsets are read. It stops before a batch whose size is impossible, or that is cut.
    """
    at, found = start, 0
    while found < len(places) and end - at >= HEADER_BYTES:
        size = _number(at + 8, 4) + LENGTH_STARTS_AT
        if not HEADER_BYTES <= size <= end - at:
            break
        place = places[found]
        place.position, place.end, place.base_offset = at - start, at - start + size, _number(at, 8)
        place.next_offset = place.base_offset + _number(at + 23, 4) + 1
        at += size
        found += 1
    return found


def find_batches(run: Long, start: Long, end: Long, left_out: Long, cursors: Any, batches: Any) -> Long:  # noqa: PLR0917
    """
    Write the ordinary batches of *run* from *start* on to *batches*; return how many follow one another.

    An ordinary batch has a valid header, wanted offsets in order, and none of the attributes *left_out*, so
    that it is not compressed.
    """
    cursor = cursors[0]
    at, expected_offset, found = start, cursor.expected_offset, 0
    while found < len(batches) and end - at >= HEADER_BYTES:
        base_offset, last_delta, record_count = _number(at, 8), _number(at + 23, 4), _number(at + 57, 4)
        size, attributes = _number(at + 8, 4) + LENGTH_STARTS_AT, _number(at + 21, 2)
        if not (
            _number(at + 16, 1) == MAGIC
            and HEADER_BYTES <= size <= min(end - at, MAX_BATCH_BYTES)
            and expected_offset <= base_offset < min(cursor.next_offset, _OFFSETS_END)
            and base_offset + last_delta >= cursor.from_offset
            and 0 < record_count <= last_delta + 1
            and attributes & left_out == 0
        ):
            break
        batch = batches[found]
        batch.start, batch.end, batch.crc = at - run, at - run + size, _number(at + 17, 4) & 0xFFFFFFFF
        batch.records, batch.records_end = at + HEADER_BYTES, at + size
        batch.record_count, batch.last_delta, batch.base_offset = record_count, last_delta, base_offset
        batch.time_type = 1 if attributes & LOG_APPEND_TIME_FLAG else 0
        batch.base_time_ms, batch.max_time_ms = _number(at + 27, 8), _number(at + 35, 8)
        expected_offset = base_offset + last_delta + 1
        at += size
        found += 1
    return found


def read_batches(batches: Any, cursors: Any, rows_of: Any) -> Long:  # noqa: C901, PLR0911, PLR0912, PLR0915 one loop
    """
    Read *batches* from the cursor on into the rows; return DONE, FULL or CORRUPT.

    Unwanted records are checked as well. Rows before the cursor's row are not changed.
    """
    cursor, rows = cursors[0], rows_of[0]
    place, at, left, previous = cursor.batch, cursor.at, cursor.left, cursor.previous_delta
    row = cursor.row
    header = _end_of(rows.header_ends, row)
    used = _end_of(rows.key_ends, row) + _end_of(rows.value_ends, row)
    used += _end_of(rows.name_ends, header) + _end_of(rows.content_ends, header)

    while place < len(batches):
        batch = batches[place]
        if at == 0:
            at, left, previous = batch.records, batch.record_count, -1
            cursor.batch, cursor.first_row = place, row
        first_wanted = cursor.from_offset - batch.base_offset
        next_wanted = cursor.next_offset - batch.base_offset
        while left > 0:
            record_at = at
            size, at = _varint(at, batch.records_end)
            if not 0 < size <= batch.records_end - at:
                return CORRUPT
            end = at + size
            # `at + 1` skips the attributes, one byte that no version uses.
            time_delta, at = _varint(at + 1, end)
            delta, at = _varint(at, end)
            key_size, key_at = _field(at, end)
            value_size, value_at = _field(key_at + max(key_size, 0), end)
            header_count, at = _varint(value_at + max(value_size, 0), end)
            if not (0 <= header_count <= end - at and previous < delta <= batch.last_delta):
                return CORRUPT

            is_wanted = first_wanted <= delta < next_wanted
            if is_wanted:
                needed = needed_headers = 0
                if rows.key_ends:
                    needed += max(key_size, 0)
                if rows.value_ends:
                    needed += max(value_size, 0)
                if rows.header_ends:
                    needed += end - at
                    needed_headers = header_count
                if (
                    row == rows.rows_max
                    or needed > rows.bytes_max - used
                    or needed_headers > rows.headers_max - header
                ):
                    cursor.at, cursor.left, cursor.previous_delta, cursor.row = record_at, left, previous, row
                    cursor.needed_bytes, cursor.needed_headers = needed, needed_headers
                    return FULL
                used += needed
                _store(rows.offsets + 8 * row, batch.base_offset + delta)
                if batch.time_type:
                    _store(rows.times + 8 * row, _time(batch.max_time_ms, 0))
                else:
                    _store(rows.times + 8 * row, _time(batch.base_time_ms, time_delta))
                if rows.time_types:
                    _store(rows.time_types + 4 * row, np.int32(batch.time_type))
                if rows.key_ends:
                    _keep(rows.key_ends, rows.key_present, rows.key_bytes, row, key_at, key_size)
                if rows.value_ends:
                    _keep(rows.value_ends, rows.value_present, rows.value_bytes, row, value_at, value_size)

            for _ in range(header_count):
                name_size, name_at = _field(at, end)
                content_size, content_at = _field(name_at + max(name_size, 0), end)
                at = content_at + max(content_size, 0)
                if at > end or name_size < 0:
                    return CORRUPT
                if is_wanted and rows.header_ends:
                    _keep(rows.name_ends, rows.name_present, rows.name_bytes, header, name_at, name_size)
                    _keep(
                        rows.content_ends,
                        rows.content_present,
                        rows.content_bytes,
                        header,
                        content_at,
                        content_size,
                    )
                    header += 1
            if at != end:
                return CORRUPT
            if is_wanted:
                row += 1
                if rows.header_ends:
                    _store(rows.header_ends + 4 * row, np.int32(header))
            previous = delta
            left -= 1
        if at != batch.records_end:
            return CORRUPT
        place += 1
        at = 0
    cursor.batch, cursor.at, cursor.row = place, 0, row
    return DONE


class Kernel(NamedTuple):
    """`find_batches`, `place_batches` and `read_batches` as machine code."""

    find_batches: Callable[[int, int, int, int, Any, Any], int]
    place_batches: Callable[[int, int, Any], int]
    read_batches: Callable[[Any, Any, Any], int]


@cache
def kernel() -> Kernel:
    """
    Return the functions as machine code.

    To load them from numba's cache takes a quarter of a second in each process, and the import of numba
    another quarter. To compile them takes two seconds.
    """
    # The code is compiled for the types of these empty arguments.
    batches, cursors = np.zeros(0, BATCH), np.zeros(1, CURSOR)
    return Kernel(
        compiled(find_batches, 0, 0, 0, 0, cursors, batches),
        compiled(place_batches, 0, 0, np.zeros(0, PLACE)),
        compiled(read_batches, batches, cursors, np.zeros(1, ROWS)),
    )
