"""
The index sidecar of a stored segment (`.log.index`): an envelope (`TRDI`) around sections.

    u32         length of the head
    head        JSON: the segment's bounds, size, checksum, counts, epochs, aborted
                transactions, and the length of each section (null where there is none)
    entries     our sparse index: i64 offset, i64 position, i64 maximum timestamp
    sections    the broker's offset, time and transaction index and producer snapshot,
                byte for byte

With the data object and its sidecar, a segment can be read by offset or time, filtered for
`read_committed`, and put back into a broker's log directory.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.model.segment import (
    NO_CRC,
    AbortedTransaction,
    BrokerIndexes,
    IndexEntry,
    RemoteSegment,
    SegmentIndex,
)

MAGIC = b"TRDI"
VERSION = 1

_LENGTH = struct.Struct(">I")
_ENTRY = struct.Struct(">qqq")
_SECTIONS = ("offset_index", "time_index", "transaction_index", "producer_snapshot")


def encode_sidecar(index: SegmentIndex) -> bytes:
    """Return *index* as bytes."""
    sections = {name: getattr(index.broker, name) for name in _SECTIONS}
    head = {
        "base_offset": index.base_offset,
        "last_offset": index.last_offset,
        "size_bytes": index.size_bytes,
        "crc32c": index.crc32c,
        "record_count": index.record_count,
        "batch_count": index.batch_count,
        "epochs": index.epochs,
        "aborted": [[one.producer_id, one.first_offset, one.last_offset] for one in index.aborted],
        "entries": len(index.entries),
        "sections": {name: None if part is None else len(part) for name, part in sections.items()},
    }
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    entries = (_ENTRY.pack(entry.offset, entry.position, entry.max_timestamp_ms) for entry in index.entries)
    parts = (part for part in sections.values() if part is not None)
    return seal(MAGIC, VERSION, b"".join([_LENGTH.pack(len(text)), text, *entries, *parts]))


def decode_sidecar(data: bytes) -> SegmentIndex:
    """
    Return the index in *data*.

    Raises:
        CorruptDataError: The bytes are not a whole index of a known version.
    """
    _version, body = unseal(data, MAGIC, newest_version=VERSION, kind="segment index")
    try:
        (head_bytes,) = _LENGTH.unpack_from(body)
        head = json.loads(body[_LENGTH.size : _LENGTH.size + head_bytes])
        return _index(head, body[_LENGTH.size + head_bytes :])
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise CorruptDataError(f"segment index cannot be read: {error}") from error


def decode_sidecar_of(data: bytes, segment: RemoteSegment, *, key: str) -> SegmentIndex:
    """
    Return the index of *segment*, which the object *key* with the bytes *data* must hold.

    Raises:
        CorruptDataError: The bytes are not a whole index, or describe another data object.
    """
    try:
        index = decode_sidecar(data)
    except CorruptDataError as error:
        raise error.located(key) from error
    if (index.base_offset, index.size_bytes, index.crc32c) != (
        segment.base_offset,
        segment.size_bytes,
        segment.crc32c,
    ):
        raise CorruptDataError("the index describes another data object", source=key)
    if segment.index_crc32c not in {NO_CRC, crc32c(data)}:
        raise CorruptDataError("the index is not the one that the manifest names", source=key)
    return index


def _index(head: dict[str, Any], rest: bytes) -> SegmentIndex:
    entries_bytes = head["entries"] * _ENTRY.size
    sections: dict[str, bytes | None] = {}
    position = entries_bytes
    for name in _SECTIONS:
        length = head["sections"][name]
        sections[name] = None if length is None else rest[position : position + length]
        position += length or 0
    if position != len(rest):
        raise ValueError(f"sections end at {position} of {len(rest)} bytes")
    return SegmentIndex(
        base_offset=head["base_offset"],
        last_offset=head["last_offset"],
        size_bytes=head["size_bytes"],
        crc32c=head["crc32c"],
        record_count=head["record_count"],
        batch_count=head["batch_count"],
        epochs=tuple((epoch, start) for epoch, start in head["epochs"]),
        aborted=tuple(AbortedTransaction(*fields) for fields in head["aborted"]),
        entries=tuple(IndexEntry(*fields) for fields in _ENTRY.iter_unpack(rest[:entries_bytes])),
        broker=BrokerIndexes(**sections),
    )
