"""
The header of a batch in a Redpanda segment, and how it becomes a Kafka record batch (v2).

     0  u32 CRC32C of bytes 4 to 60     4 i32 size, header included   8 i64 base offset (raw)
    16  i8  type                       17 u32 CRC32C as Kafka's      21 i16 attributes
    23  i32 last offset delta          27 i64 base timestamp         35 i64 maximum timestamp
    43  i64 producer id                51 i16 producer epoch         53 i32 base sequence
    57  i32 record count               61 records, byte for byte as in Kafka

All integers are little endian, but the second checksum is the one that a Kafka client computes, over
big-endian fields. So a batch becomes Kafka's by writing its header anew; the records and their
checksum stay. The leader epoch is not in the header: it is the term in the file's name. Raw offsets
count batches that clients never see: see `model.offset_translation`. Errors of this module name no
place; the caller adds it: the file, and the Kafka offset.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import (
    CONTROL_FLAG,
    HEADER,
    HEADER_BYTES,
    LENGTH_STARTS_AT,
    MAGIC,
    MAX_BATCH_BYTES,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    offsets_fault,
)
from tieringd.model.offset_translation import OffsetTranslation

RAW_HEADER = struct.Struct("<IiqbIhiqqqhii")
RAW_HEADER_BYTES = 61
HEADER_CRC_STARTS_AT = 4
"""The header's own checksum covers the bytes from this position to the end of the header."""

DATA_TYPE = 1
"""Records of clients, and the markers that end their transactions. All other batches are dropped."""

UNCOUNTED_TYPES = frozenset((2, 19, 23, 25, 34, 38, 40))
"""
Types of bookkeeping batches without Kafka offsets.

They are configuration, archival metadata, version fence, prefix truncation, partition properties,
translation state and group block. Compaction never removes these, so the delta of a place can always be
counted again.
"""

COUNTED_TYPES = frozenset((5, 7, 9, 10, 14, 15, 16, 29, 33))
"""
Types of bookkeeping batches with Kafka offsets.

They are checkpoint, ghost, the batches that prepare and fence transactions, and what compaction leaves
in place of a batch. No client ever receives them.
"""

CLOUD_TOPIC_TYPES = frozenset((36, 37))
"""Placeholders for records that Redpanda keeps in object storage only."""

_CHECKED_FIELDS = struct.Struct(">hiqqqhii")


class UnsupportedBatchTypeError(CorruptDataError):
    """The bytes are sound, but it is unknown whether this type of batch has Kafka offsets."""


class RawHeader(NamedTuple):
    """The 61 bytes in front of a batch's records, in their stored order. Offsets are raw."""

    header_crc: int
    size_bytes: int
    base_offset: int
    type: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        """Return the last raw offset the batch occupies."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Return the first raw offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def is_data(self) -> bool:
        """Return whether Kafka clients receive this batch; transaction markers count."""
        return self.type == DATA_TYPE

    @property
    def uncounted_offsets(self) -> int:
        """Return how many of the batch's offsets are not Kafka's: all of them, or none."""
        return self.last_offset_delta + 1 if self.type in UNCOUNTED_TYPES else 0

    @property
    def is_transactional(self) -> bool:
        """Return whether the batch belongs to a client's transaction; markers do too."""
        return self.is_data and self.attributes & TRANSACTIONAL_FLAG != 0

    @property
    def is_control(self) -> bool:
        """Return whether the batch holds a marker."""
        return self.attributes & CONTROL_FLAG != 0


def parse_raw_header(buffer: bytes | memoryview, position: int = 0) -> RawHeader:
    """
    Return the header at *position*, after a check of its own checksum. For the records': `check_raw_crc`.

    Raises:
        UnsupportedBatchTypeError: The header is sound, and its type unknown or not archivable.
        CorruptDataError: The header is damaged or impossible, or the buffer ends inside it.
    """
    if len(buffer) - position < RAW_HEADER_BYTES:
        raise CorruptDataError(
            f"a batch header needs {RAW_HEADER_BYTES} bytes, but only {max(0, len(buffer) - position)} are "
            "left"
        )
    header = RawHeader._make(RAW_HEADER.unpack_from(buffer, position))
    # No field of a header, least of all its length, is trusted before its checksum is right.
    found = crc32c(buffer[position + HEADER_CRC_STARTS_AT : position + RAW_HEADER_BYTES])
    if found != header.header_crc:
        raise CorruptDataError(f"batch header CRC is {found:08x} and should be {header.header_crc:08x}")
    require_possible(header)
    return header


def require_possible(header: RawHeader) -> None:
    """
    Check a header with a right checksum by itself.

    Raises:
        UnsupportedBatchTypeError: Its type is unknown, or does not occur in an ordinary topic.
        CorruptDataError: No batch can have this header.
    """
    fault = offsets_fault(header.base_offset, header.last_offset_delta, header.record_count)
    if not RAW_HEADER_BYTES <= header.size_bytes <= MAX_BATCH_BYTES:
        fault = f"batch size {header.size_bytes} is impossible"
    if fault is not None:
        raise CorruptDataError(fault)
    if header.is_data or header.type in UNCOUNTED_TYPES or header.type in COUNTED_TYPES:
        return
    hint = "Update tieringd: a newer Redpanda may have written the log"
    if header.type in CLOUD_TOPIC_TYPES:
        hint = "Switch archiving off for this topic: Redpanda itself keeps its records in object storage"
    raise UnsupportedBatchTypeError(
        f"batch type {header.type} at raw offset {header.base_offset} is not supported", hint=hint
    )


def check_raw_crc(view: memoryview, header: RawHeader, position: int = 0) -> None:
    """
    Check the records of the batch at *position*, and the header's fields that Kafka's CRC covers.

    Raises:
        CorruptDataError: The checksum differs, or *view* ends inside the batch.
    """
    end = position + header.size_bytes
    if end > len(view):
        raise CorruptDataError(f"the batch is cut: {len(view) - position} of {header.size_bytes} bytes")
    found = crc32c(view[position + RAW_HEADER_BYTES : end], crc32c(_CHECKED_FIELDS.pack(*header[5:])))
    if found != header.crc:
        raise CorruptDataError(f"batch CRC is {found:08x} and should be {header.crc:08x}")


def kafka_header(header: RawHeader, *, delta: int, leader_epoch: int) -> BatchHeader:
    """Return the batch's header in a Kafka log; its offset is lower by *delta*."""
    return BatchHeader(
        base_offset=header.base_offset - delta,
        length=header.size_bytes - RAW_HEADER_BYTES + HEADER_BYTES - LENGTH_STARTS_AT,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=header.crc,
        attributes=header.attributes,
        last_offset_delta=header.last_offset_delta,
        base_timestamp_ms=header.base_timestamp_ms,
        max_timestamp_ms=header.max_timestamp_ms,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        record_count=header.record_count,
    )


def reframed_batch(view: memoryview, translation: OffsetTranslation, *, leader_epoch: int) -> bytes:
    """
    Return the batch that fills *view* in Kafka's format; *translation* is that of its base offset.

    Raises:
        CorruptDataError: The batch is damaged, does not fill *view*, or has another base offset.
    """
    header = parse_raw_header(view)
    if header.size_bytes != len(view) or header.base_offset != translation.raw_offset:
        raise CorruptDataError(
            f"a batch of {header.size_bytes} bytes at raw offset {header.base_offset} was expected to have "
            f"{len(view)} at {translation.raw_offset}"
        )
    check_raw_crc(view, header)
    kafka = kafka_header(header, delta=translation.delta, leader_epoch=leader_epoch)
    return HEADER.pack(*kafka) + view[RAW_HEADER_BYTES:]
