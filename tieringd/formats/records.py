"""
The records inside one batch, for people and tests; Spark has a faster decoder of its own.

Arbitrary bytes give records or a `CorruptDataError`, nothing else. The checksum is not checked here: see
`record_batch.check_crc`.

`batch_with` and `narrowed_batch` make a batch with some of its records removed, as a broker's own
cleaner does. The remaining records keep their offsets, times and bytes: their deltas count from the
batch's base, which is kept. The batch also keeps its offsets, its producer with epoch and sequence, its
leader epoch and its attributes, including the codec. The number of records, the largest timestamp, the
length and the checksum are computed anew.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from tieringd.errors import CorruptDataError
from tieringd.formats.compression import MAX_DECOMPRESSED_BYTES, Codec, compress, decompress
from tieringd.formats.record_batch import (
    ABORT_MARKER,
    COMMIT_MARKER,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    BatchHeader,
    parse_header,
    sealed,
)

NO_MARKER = -1
"""The marker of a control batch without a record; see `control_type`."""

_MARKER_KEY = struct.Struct(">hh")
_MAX_VARINT_BITS = 63
_MORE_BYTES_FOLLOW = 0x80
_SEVEN_BITS = 0x7F


class Record(NamedTuple):
    """One record as a consumer sees it."""

    offset: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def iter_records(view: memoryview, *, limit_bytes: int = MAX_DECOMPRESSED_BYTES) -> Iterator[Record]:
    """
    Yield the records of the batch that fills *view*, ascending by offset.

    Markers of control batches are yielded as records too; a caller that wants none skips the batch by
    its header.

    Raises:
        CorruptDataError: The batch is damaged, at the latest when its last record was taken.
    """
    for record, _ in iter_packed_records(view, limit_bytes=limit_bytes):
        yield record


def iter_packed_records(
    view: memoryview, *, limit_bytes: int = MAX_DECOMPRESSED_BYTES
) -> Iterator[tuple[Record, memoryview]]:
    """
    Yield the records of the batch that fills *view*, as `iter_records` does, each with its unpacked bytes.

    Raises:
        CorruptDataError: The batch is damaged, at the latest when its last record was taken.
    """
    header = parse_header(view)
    if header.size_bytes != len(view):
        raise CorruptDataError(
            f"a batch of {header.size_bytes} bytes does not fill {len(view)}", offset=header.base_offset
        )
    try:
        yield from _iter_body(header, view[HEADER_BYTES:], limit_bytes)
    except CorruptDataError as error:
        raise type(error)(error.message, offset=header.base_offset) from error


def control_type(view: memoryview) -> Literal["commit", "abort"] | int:
    """
    Return the marker of the control batch in *view*; a number for one that ends no transaction.

    When the cleaner has removed all records of a transaction, it removes the record of its marker. It leaves
    the batch's header while the broker still knows the producer. NO_MARKER is returned for such a batch.

    Raises:
        CorruptDataError: There is no readable marker.
    """
    header = parse_header(view)
    if header.is_control and not header.record_count and len(view) == header.size_bytes == HEADER_BYTES:
        return NO_MARKER
    record = next(iter_records(view), None)
    if record is None or record.key is None or len(record.key) < _MARKER_KEY.size:
        raise CorruptDataError("the control batch holds no marker", offset=header.base_offset)
    _version, marker = _MARKER_KEY.unpack_from(record.key)
    if marker == COMMIT_MARKER:
        return "commit"
    return "abort" if marker == ABORT_MARKER else int(marker)


def read_varint(body: memoryview, position: int) -> tuple[int, int]:
    """
    Return the zigzag varint at *position*, and the position after it.

    Raises:
        CorruptDataError: The bytes end first, or the number has more than 64 bits.
    """
    result = shift = 0
    try:
        while (byte := body[position]) >= _MORE_BYTES_FOLLOW:
            result |= (byte & _SEVEN_BITS) << shift
            position += 1
            shift += 7
            if shift > _MAX_VARINT_BITS:
                raise CorruptDataError("a variable-length number is too long")
    except IndexError as error:
        raise CorruptDataError("the records end inside a number") from error
    result |= byte << shift
    if result >> 64:
        raise CorruptDataError("a variable-length number is too long")
    return (result >> 1) ^ -(result & 1), position + 1


def _iter_body(
    header: BatchHeader, packed: memoryview, limit_bytes: int
) -> Iterator[tuple[Record, memoryview]]:
    if header.record_count == 0 and not packed:
        return
    body = decompress(header.codec, packed, limit_bytes=limit_bytes)
    base_offset, timestamp_type = header.base_offset, header.timestamp_type
    position, previous_delta = 0, -1
    for _ in range(header.record_count):
        begin = position
        position, timestamp_delta, delta, key, value, headers = _read_record(body, position)
        if not previous_delta < delta <= header.last_offset_delta:
            raise CorruptDataError(f"record offset {base_offset + delta} is out of order")
        previous_delta = delta
        timestamp_ms = header.base_timestamp_ms + timestamp_delta
        if timestamp_type == LOG_APPEND_TIME:
            timestamp_ms = header.max_timestamp_ms
        record = Record(base_offset + delta, timestamp_ms, timestamp_type, key, value, headers)
        yield record, body[begin:position]
    if position != len(body):
        raise CorruptDataError(
            f"{len(body) - position} bytes follow the last of {header.record_count} records"
        )


_Fields = tuple[int, int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


def _read_record(body: memoryview, position: int) -> _Fields:
    """Return the position after the record, its time and offset deltas, key, value and headers."""
    size, position = read_varint(body, position)
    end = position + size
    if not 0 < size <= len(body) - position:
        raise CorruptDataError(f"a record of {size} bytes does not fit in the batch")
    record = body[:end]
    # One byte of attributes, which no version uses.
    timestamp_delta, position = read_varint(record, position + 1)
    offset_delta, position = read_varint(record, position)
    key, position = _read_bytes(record, position)
    value, position = _read_bytes(record, position)
    count, position = read_varint(record, position)
    if not 0 <= count <= end - position:
        raise CorruptDataError(f"{count} record headers do not fit in the record")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, position = _read_bytes(record, position)
        header_value, position = _read_bytes(record, position)
        if name is None:
            raise CorruptDataError("a record header has no name")
        # C clients may send any bytes. Java's client reads them with replacement characters too.
        headers.append((name.decode("utf-8", "replace"), header_value))
    if position != end:
        raise CorruptDataError(f"{end - position} bytes of a record are left over")
    return position, timestamp_delta, offset_delta, key, value, tuple(headers)


def _read_bytes(record: memoryview, position: int) -> tuple[bytes | None, int]:
    size, position = read_varint(record, position)
    if size == -1:
        return None, position
    end = position + size
    if size < 0 or end > len(record):
        raise CorruptDataError(f"a field of {size} bytes does not fit in the record")
    return bytes(record[position:end]), end


def batch_with(batch: memoryview, is_kept: Callable[[Record], bool]) -> bytes | memoryview | None:
    """
    Return *batch* with only the records for which *is_kept* is true; None if there are none.

    If all records are kept, the same bytes are returned. Spark has a faster function of its own.

    Raises:
        CorruptDataError: The batch is damaged.
    """
    kept = [(record, data) for record, data in iter_packed_records(batch) if is_kept(record)]
    header = parse_header(batch)
    if len(kept) == header.record_count:
        return batch
    if not kept:
        return None
    return narrowed_batch(
        header,
        b"".join(data for _, data in kept),
        record_count=len(kept),
        max_timestamp_ms=max(record.timestamp_ms for record, _ in kept),
    )


def narrowed_batch(header: BatchHeader, records: bytes, *, record_count: int, max_timestamp_ms: int) -> bytes:
    """
    Return the batch of *header* with only *records*: some of its own, unpacked, one after the other.

    *max_timestamp_ms* is the largest time of *records*, as a consumer sees it.
    """
    left = header._replace(record_count=record_count, max_timestamp_ms=max_timestamp_ms)
    return sealed(left, compress(Codec(header.codec), records))
