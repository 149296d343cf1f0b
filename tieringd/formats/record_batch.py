"""
The header of a Kafka record batch (message format v2), and the writing of whole batches.

    0  i64 base offset        8  i32 length, from byte 12    12 i32 partition leader epoch
    16 i8  magic, 2           17 u32 CRC32C of byte 21 on    21 i16 attributes
    23 i32 last offset delta  27 i64 base timestamp          35 i64 maximum timestamp
    43 i64 producer id        51 i16 producer epoch          53 i32 base sequence
    57 i32 record count       61 records

All integers are big endian. The leader epoch stands outside the checksum: the broker fills
it in. Records are read in `formats.records`; a whole segment in `formats.segment_scan`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.compression import Codec, compress
from tieringd.model.segment import NO_TIMESTAMP

HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES = 61
LENGTH_STARTS_AT = 12
"""The length field counts the bytes from this position on."""
CRC_STARTS_AT = 21
MIN_LENGTH = HEADER_BYTES - LENGTH_STARTS_AT
MAX_BATCH_BYTES = 256 << 20
"""Far above any sensible `message.max.bytes`. It limits how much one damaged length can make us read."""
MAGIC = 2

CODEC_MASK = 0x07
LOG_APPEND_TIME_FLAG = 0x08
TRANSACTIONAL_FLAG = 0x10
CONTROL_FLAG = 0x20
DELETE_HORIZON_FLAG = 0x40

CREATE_TIME = 0
LOG_APPEND_TIME = 1

ABORT_MARKER = 0
COMMIT_MARKER = 1

NO_PRODUCER_ID = -1
NO_LEADER_EPOCH = -1
"""The leader epoch of a batch that no leader has written."""

_OLD_MAGICS = (0, 1)
_OLD_CRC_COVERS_FROM = 16
"""A message of format v0 or v1 has the CRC-32 of all its bytes from its magic on, right before them."""
_OLD_LENGTH_MIN = 14

_CRC = struct.Struct(">I")
_MARKER_KEY = struct.Struct(">hh")
_MARKER_VALUE = struct.Struct(">hi")


class OldMagicError(CorruptDataError):
    """The bytes are sound, but in message format v0 or v1, which has no batches."""


class BatchHeader(NamedTuple):
    """The 61 bytes in front of a batch's records, in their stored order."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    """Base of the record timestamps, in ms. It is the delete horizon of a batch that has one."""
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole batch."""
        return LENGTH_STARTS_AT + self.length

    @property
    def last_offset(self) -> int:
        """Return the last offset the batch occupies, records or not."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Return the first offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def is_transactional(self) -> bool:
        """Return whether the batch belongs to a transaction; markers do too."""
        return self.attributes & TRANSACTIONAL_FLAG != 0

    @property
    def is_control(self) -> bool:
        """Return whether the batch holds a marker of the broker and no client's records."""
        return self.attributes & CONTROL_FLAG != 0

    @property
    def codec(self) -> int:
        """Return the compression of the records; see `compression.Codec`."""
        return self.attributes & CODEC_MASK

    @property
    def timestamp_type(self) -> int:
        """Return CREATE_TIME or LOG_APPEND_TIME."""
        return LOG_APPEND_TIME if self.attributes & LOG_APPEND_TIME_FLAG else CREATE_TIME

    @property
    def has_delete_horizon(self) -> bool:
        """Return whether compaction has set the time at which tombstones are removed."""
        return self.attributes & DELETE_HORIZON_FLAG != 0


class NewRecord(NamedTuple):
    """A record to be written."""

    value: bytes | None
    key: bytes | None = None
    timestamp_ms: int = 0
    headers: Sequence[tuple[str, bytes | None]] = ()
    offset_delta: int | None = None
    """None for the record's place in the batch; compaction leaves holes."""


def parse_header(buffer: bytes | memoryview, position: int = 0) -> BatchHeader:
    """
    Return the header at *position*. Its checksum is not checked: see `check_crc`.

    Raises:
        OldMagicError: This is a message of format v0 or v1.
        CorruptDataError: No batch can have this header, or the buffer ends inside it.
    """
    if len(buffer) - position < HEADER_BYTES:
        raise CorruptDataError(
            f"a batch header needs {HEADER_BYTES} bytes, but only {max(0, len(buffer) - position)} are left",
            position=position,
        )
    header = BatchHeader._make(HEADER.unpack_from(buffer, position))
    fault = header_fault(header)
    if fault is not None:
        raise located_fault(header, fault, position=position)
    return header


def header_fault(header: BatchHeader) -> str | None:
    """Return the fault of *header* taken by itself; None for a possible header."""
    if header.magic != MAGIC:
        return f"message format magic is {header.magic}, not 2"
    if not MIN_LENGTH <= header.length <= MAX_BATCH_BYTES - LENGTH_STARTS_AT:
        return f"batch length {header.length} is impossible"
    return offsets_fault(header.base_offset, header.last_offset_delta, header.record_count)


def offsets_fault(base_offset: int, last_offset_delta: int, record_count: int) -> str | None:
    """Return the fault of a batch's offsets and number of records; None if a batch can have them."""
    if base_offset < 0 or last_offset_delta < 0:
        return f"batch offsets {base_offset} to {base_offset + last_offset_delta} are impossible"
    if not 0 <= record_count <= last_offset_delta + 1:
        return f"{record_count} records cannot stand in {last_offset_delta + 1} offsets"
    return None


def located_fault(
    header: BatchHeader,
    fault: str,
    *,
    position: int,
    source: str | None = None,
    message: bytes | memoryview | None = None,
) -> CorruptDataError:
    """
    Return *fault* as an error at *position*: an `OldMagicError` if the format is merely old.

    *message* is all that *header* counts as its message, or less where the bytes end early. With it, the
    message's checksum tells an old format from a damaged header. Without it, the header alone decides.
    """
    if is_of_old_format(header) and (message is None or _is_sound_old(header, message)):
        return OldMagicError(
            f"message format v{header.magic} is not supported",
            source=source,
            position=position,
            offset=header.base_offset,
            hint="Only message format v2 can be archived; Kafka 4 does not convert older segments",
        )
    offset = header.base_offset if header.base_offset >= 0 else None
    return CorruptDataError(fault, source=source, position=position, offset=offset)


def is_of_old_format(header: BatchHeader) -> bool:
    """Say whether *header* may be of a message of format v0 or v1, which has its size in the same place."""
    return (
        header.magic in _OLD_MAGICS and _OLD_LENGTH_MIN <= header.length <= MAX_BATCH_BYTES - LENGTH_STARTS_AT
    )


def _is_sound_old(header: BatchHeader, message: bytes | memoryview) -> bool:
    """
    Say whether *message* is whole, and has the checksum of a message of format v0 or v1.

    The magic of a batch is outside its own checksum, so one wrong bit or a lost page makes it look old.
    """
    if len(message) < header.size_bytes:
        return False
    (crc,) = _CRC.unpack_from(message, LENGTH_STARTS_AT)
    return bool(zlib.crc32(message[_OLD_CRC_COVERS_FROM : header.size_bytes]) == crc)


def check_crc(view: memoryview, header: BatchHeader, position: int = 0) -> None:
    """
    Check the bytes of the whole batch at *position* against its checksum.

    Raises:
        CorruptDataError: The checksum differs, or *view* ends inside the batch.
    """
    end = position + header.size_bytes
    if end > len(view):
        raise CorruptDataError(
            f"the batch is cut: {len(view) - position} of {header.size_bytes} bytes",
            position=position,
            offset=header.base_offset,
        )
    require_crc(header, crc32c(view[position + CRC_STARTS_AT : end]), position)


def require_crc(header: BatchHeader, found: int, position: int = 0) -> None:
    """
    Check the checksum that was *found* for the batch at *position*.

    Raises:
        CorruptDataError: The header has another one.
    """
    if found != header.crc:
        raise CorruptDataError(
            f"batch CRC is {found:08x} and should be {header.crc:08x}",
            position=position,
            offset=header.base_offset,
        )


def encode_batch(
    base_offset: int,
    records: Iterable[NewRecord],
    *,
    codec: Codec = Codec.NONE,
    leader_epoch: int = 0,
    last_offset_delta: int | None = None,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    is_transactional: bool = False,
    append_time_ms: int | None = None,
) -> bytes:
    """
    Return a valid batch of *records*.

    With *append_time_ms* every record has that time, as with `message.timestamp.type=LogAppendTime`. A
    *last_offset_delta* past the last record makes the batch of a compacted log; without records it makes
    the empty batch with which compaction preserves a producer's state.
    """
    rows = list(records)
    timestamps = [record.timestamp_ms for record in rows] or [NO_TIMESTAMP]
    deltas = [
        place if record.offset_delta is None else record.offset_delta for place, record in enumerate(rows)
    ]
    body = bytearray()
    for record, delta in zip(rows, deltas, strict=True):
        _append_record(body, record, offset_delta=delta, timestamp_delta=record.timestamp_ms - timestamps[0])
    attributes = int(codec) if rows else int(Codec.NONE)
    attributes |= TRANSACTIONAL_FLAG if is_transactional else 0
    attributes |= LOG_APPEND_TIME_FLAG if append_time_ms is not None else 0
    header = BatchHeader(
        base_offset=base_offset,
        length=0,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=attributes,
        last_offset_delta=max([0, *deltas]) if last_offset_delta is None else last_offset_delta,
        base_timestamp_ms=timestamps[0],
        max_timestamp_ms=max(timestamps) if append_time_ms is None else append_time_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(rows),
    )
    return sealed(header, compress(codec, bytes(body)) if rows else b"")


def encode_marker(
    offset: int,
    *,
    producer_id: int,
    producer_epoch: int = 0,
    marker: int = COMMIT_MARKER,
    timestamp_ms: int = 0,
    leader_epoch: int = 0,
) -> bytes:
    """Return the control batch that ends a transaction: COMMIT_MARKER or ABORT_MARKER."""
    record = NewRecord(
        key=_MARKER_KEY.pack(0, marker), value=_MARKER_VALUE.pack(0, 0), timestamp_ms=timestamp_ms
    )
    plain = encode_batch(
        offset,
        [record],
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        is_transactional=True,
    )
    return _as_control(plain)


def encode_passage(base_offset: int, *, last_offset: int, timestamp_ms: int) -> bytes:
    """
    Return a batch that moves every client past offsets of which no record is left.

    It is the marker of a transaction that was never begun, at *last_offset*. Clients show no marker to their
    users, and go on behind it. KafkaJS does not go on behind a batch without any record.

    *timestamp_ms* is the time of the records before it. franz-go goes back to it after an offset that is out
    of range. The batch has no leader epoch: a client that took one from it would ask where that epoch ends.
    """
    record = NewRecord(
        key=_MARKER_KEY.pack(0, COMMIT_MARKER),
        value=_MARKER_VALUE.pack(0, 0),
        timestamp_ms=timestamp_ms,
        offset_delta=last_offset - base_offset,
    )
    return _as_control(encode_batch(base_offset, [record], leader_epoch=NO_LEADER_EPOCH))


def _as_control(plain: bytes) -> bytes:
    """Return a batch as a control batch."""
    header = parse_header(plain)
    return sealed(header._replace(attributes=header.attributes | CONTROL_FLAG), plain[HEADER_BYTES:])


def sealed(header: BatchHeader, body: bytes) -> bytes:
    """Return the batch of *header* and *body*, with its length and checksum filled in."""
    batch = bytearray(HEADER.pack(*header._replace(length=MIN_LENGTH + len(body))))
    batch += body
    _CRC.pack_into(batch, 17, crc32c(memoryview(batch)[CRC_STARTS_AT:]))
    return bytes(batch)


def _append_record(body: bytearray, record: NewRecord, *, offset_delta: int, timestamp_delta: int) -> None:
    row = bytearray(b"\x00")
    _append_varint(row, timestamp_delta)
    _append_varint(row, offset_delta)
    _append_bytes(row, record.key)
    _append_bytes(row, record.value)
    _append_varint(row, len(record.headers))
    for name, value in record.headers:
        _append_bytes(row, name.encode())
        _append_bytes(row, value)
    _append_varint(body, len(row))
    body += row


def _append_bytes(row: bytearray, data: bytes | None) -> None:
    if data is None:
        _append_varint(row, -1)
    else:
        _append_varint(row, len(data))
        row += data


def _append_varint(row: bytearray, value: int) -> None:
    """Append a zigzag varint: small numbers of either sign take few bytes."""
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    while rest > 0x7F:  # noqa: PLR2004 - seven bits to a byte
        row.append(rest & 0x7F | 0x80)
        rest >>= 7
    row.append(rest)
