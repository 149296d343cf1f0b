"""
The index files of a Kafka segment: `.index`, `.timeindex` and `.txnindex`.

    .index      u32 relative offset, u32 position             the batch with this last offset
    .timeindex  i64 timestamp, u32 relative offset
    .txnindex   i16 version 0, i64 producer id, i64 first offset, i64 last offset,
                i64 last stable offset                         aborted transactions only

They have no checksum. The first two are preallocated while their segment is active, so a
tail of zeros is room, not entries. We archive them and never read a log by them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from tieringd.errors import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Iterable

_OFFSET_ENTRY = struct.Struct(">II")
_TIME_ENTRY = struct.Struct(">qI")
_TRANSACTION_ENTRY = struct.Struct(">hqqqq")


class OffsetEntry(NamedTuple):
    """The batch whose last offset is *offset* begins at byte *position*."""

    offset: int
    position: int


class TimeEntry(NamedTuple):
    """The largest timestamp up to *offset*."""

    timestamp_ms: int
    offset: int


class TransactionEntry(NamedTuple):
    """An aborted transaction, and the last stable offset once its marker was written."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def parse_offset_index(data: bytes, *, base_offset: int) -> list[OffsetEntry]:
    """
    Return the entries of an `.index`.

    Raises:
        CorruptDataError: The length is no multiple of an entry, or entries do not ascend.
    """
    entries: list[OffsetEntry] = []
    for position, (relative_offset, file_position) in _unpacked(_OFFSET_ENTRY, data):
        entry = OffsetEntry(base_offset + relative_offset, file_position)
        if entries and not (entry.offset > entries[-1].offset and entry.position > entries[-1].position):
            if _is_zero_from(data, position):
                break
            raise CorruptDataError(
                "offset index entries do not ascend", position=position, offset=entry.offset
            )
        entries.append(entry)
    return entries


def parse_time_index(data: bytes, *, base_offset: int) -> list[TimeEntry]:
    """
    Return the entries of a `.timeindex`.

    Raises:
        CorruptDataError: The length is no multiple of an entry, or entries do not ascend.
    """
    entries: list[TimeEntry] = []
    for position, (timestamp_ms, relative_offset) in _unpacked(_TIME_ENTRY, data):
        entry = TimeEntry(timestamp_ms, base_offset + relative_offset)
        if entries and not (
            entry.timestamp_ms > entries[-1].timestamp_ms and entry.offset >= entries[-1].offset
        ):
            if _is_zero_from(data, position):
                break
            raise CorruptDataError("time index entries do not ascend", position=position, offset=entry.offset)
        entries.append(entry)
    return entries


def parse_transaction_index(data: bytes) -> list[TransactionEntry]:
    """
    Return the entries of a `.txnindex`, ascending by the offset of their markers.

    Raises:
        CorruptDataError: The length or version is wrong, or offsets are impossible.
    """
    entries: list[TransactionEntry] = []
    for position, (version, *fields) in _unpacked(_TRANSACTION_ENTRY, data):
        entry = TransactionEntry(*fields)
        if version != 0:
            raise CorruptDataError(f"transaction index entry has version {version}, not 0", position=position)
        if not 0 <= entry.first_offset <= entry.last_offset or (
            entries and entry.last_offset <= entries[-1].last_offset
        ):
            raise CorruptDataError(
                "transaction index entries do not ascend", position=position, offset=entry.last_offset
            )
        entries.append(entry)
    return entries


def encode_offset_index(entries: Iterable[OffsetEntry], *, base_offset: int) -> bytes:
    """Return *entries* as an `.index`."""
    return b"".join(_OFFSET_ENTRY.pack(entry.offset - base_offset, entry.position) for entry in entries)


def encode_time_index(entries: Iterable[TimeEntry], *, base_offset: int) -> bytes:
    """Return *entries* as a `.timeindex`."""
    return b"".join(_TIME_ENTRY.pack(entry.timestamp_ms, entry.offset - base_offset) for entry in entries)


def encode_transaction_index(entries: Iterable[TransactionEntry]) -> bytes:
    """Return *entries* as a `.txnindex`."""
    return b"".join(_TRANSACTION_ENTRY.pack(0, *entry) for entry in entries)


def _unpacked(entry: struct.Struct, data: bytes) -> Iterable[tuple[int, tuple[int, ...]]]:
    """Return the raw entries of *data*, each with its position; none of an index that is all room."""
    if len(data) % entry.size:
        raise CorruptDataError(
            f"an index of {len(data)} bytes is no whole number of {entry.size}-byte entries",
            position=len(data) - len(data) % entry.size,
        )
    if _is_zero_from(data, 0):
        return ()
    return zip(range(0, len(data), entry.size), entry.iter_unpack(data), strict=True)


def _is_zero_from(data: bytes, position: int) -> bool:
    return data.count(0, position) == len(data) - position
