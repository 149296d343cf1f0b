"""
The index files of a Kafka segment: `.index`, `.timeindex` and `.txnindex`.

    .index      u32 relative offset, u32 position             the batch with this last offset
    .timeindex  i64 timestamp, u32 relative offset
    .txnindex   i16 version 0, i64 producer id, i64 first offset, i64 last offset,
                i64 last stable offset                         aborted transactions only

They have no checksum. The first two are preallocated while their segment is active, so a
tail of zeros is free space, not entries. They are archived, but no read of ours uses them.

`whole_indexes` and `aborted_index` make the side files of a segment from our index where the archive lacks
the broker's. A log must have all of them: otherwise Kafka reads the whole segment, and keeps state of its
batches' producers. These files are coarser than the broker's own, and never lead a reader past the wanted
position.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from operator import le, lt
from typing import NamedTuple

from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.model.segment import AbortedTransaction, BrokerIndexes, RemoteSegment, SegmentIndex

_VERSION = 1
_NO_PRODUCERS = bytes(4)

EMPTY_PRODUCER_SNAPSHOT = struct.pack(">hI", _VERSION, crc32c(_NO_PRODUCERS)) + _NO_PRODUCERS

_OFFSET_ENTRY = struct.Struct(">II")
_TIME_ENTRY = struct.Struct(">qI")
_TRANSACTION_ENTRY = struct.Struct(">hqqqq")

_SIGN_BIT = 1 << 31


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


def offset_index_columns(data: bytes, *, base_offset: int) -> tuple[Sequence[int], Sequence[int]]:
    """
    Return the offsets and the positions of an `.index`, each ascending.

    It creates no object per entry, so it costs a fraction of `parse_offset_index`.

    Raises:
        CorruptDataError: As from `parse_offset_index`.
    """
    words = _words(data, entry_words=2)
    relative_offsets, positions = words[0::2], words[1::2]
    if any(words) and _ascends(relative_offsets, lt) and _ascends(positions, lt):
        return [base_offset + each for each in relative_offsets], positions
    # There is a fault, or free space after the entries.
    entries = parse_offset_index(data, base_offset=base_offset)
    return [entry.offset for entry in entries], [entry.position for entry in entries]


def time_index_columns(data: bytes, *, base_offset: int) -> tuple[Sequence[int], Sequence[int]]:
    """
    Return the timestamps and the offsets of a `.timeindex`, each ascending.

    Raises:
        CorruptDataError: As from `parse_time_index`.
    """
    words = _words(data, entry_words=3)
    high, low, relative_offsets = words[0::3], words[1::3], words[2::3]
    timestamps = [upper << 32 | lower for upper, lower in zip(high, low, strict=True)]
    # These timestamps have no sign. Where they ascend, a negative one would be the last.
    if any(words) and high[-1] < _SIGN_BIT and _ascends(timestamps, lt) and _ascends(relative_offsets, le):
        return timestamps, [base_offset + each for each in relative_offsets]
    entries = parse_time_index(data, base_offset=base_offset)
    return [entry.timestamp_ms for entry in entries], [entry.offset for entry in entries]


def parse_offset_index(data: bytes, *, base_offset: int) -> list[OffsetEntry]:
    """
    Return the entries of an `.index`.

    Raises:
        CorruptDataError: The length is not a multiple of an entry's, or entries do not ascend.
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
        CorruptDataError: The length is not a multiple of an entry's, or entries do not ascend.
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
    """Return the raw entries of *data*, each with its position; none if all of it is free space."""
    if len(data) % entry.size:
        raise CorruptDataError(
            f"an index of {len(data)} bytes is not a whole number of {entry.size}-byte entries",
            position=len(data) - len(data) % entry.size,
        )
    if _is_zero_from(data, 0):
        return ()
    return zip(range(0, len(data), entry.size), entry.iter_unpack(data), strict=True)


def _words(data: bytes, *, entry_words: int) -> array[int]:
    """Return *data* as big-endian 32-bit words; none unless it is a whole number of entries."""
    words = array("I")
    if len(data) % (entry_words * words.itemsize) == 0:
        words.frombytes(data)
        if sys.byteorder == "little":
            words.byteswap()
    return words


def _ascends(values: Sequence[int], is_before: Callable[[int, int], bool]) -> bool:
    return all(map(is_before, values, islice(values, 1, None)))


def _is_zero_from(data: bytes, position: int) -> bool:
    return data.count(0, position) == len(data) - position


def whole_indexes(
    segment: RemoteSegment, index: SegmentIndex, aborted: Iterable[AbortedTransaction]
) -> BrokerIndexes:
    """Return the side files of *segment*; *aborted* are the transactions whose markers may be in it."""
    kept = index.broker
    base_offset = segment.base_offset
    offset_index, time_index = kept.offset_index, kept.time_index
    if offset_index is None:
        entries = [OffsetEntry(one.offset, one.position) for one in index.entries if one.position]
        offset_index = encode_offset_index(entries, base_offset=base_offset)
    if time_index is None:
        time_index = encode_time_index(_times(segment, index), base_offset=base_offset)
    transaction_index = kept.transaction_index
    if transaction_index is None:
        ended = [one for one in aborted if base_offset <= one.last_offset < segment.next_offset]
        transaction_index = aborted_index(ended) or None
    return BrokerIndexes(offset_index, time_index, transaction_index)


def aborted_index(aborted: Iterable[AbortedTransaction]) -> bytes:
    """Return a `.txnindex` of transactions that end in its segment."""
    # A reader uses the last stable offset only to stop its search: a value too low costs time.
    return encode_transaction_index(
        TransactionEntry(one.producer_id, one.first_offset, one.last_offset, one.first_offset)
        for one in sorted(aborted, key=lambda one: one.last_offset)
    )


def _times(segment: RemoteSegment, index: SegmentIndex) -> Iterator[TimeEntry]:
    """
    Yield each new maximum time, with an offset from which all records of that time are found.

    That is the offset of the entry before, because the first record of that time may lie between the two.
    """
    entries = index.entries
    if not entries:
        return
    times = [(entries[0].max_timestamp_ms, entries[0].offset)]
    times += [(later.max_timestamp_ms, before.offset) for before, later in pairwise(entries)]
    times.append((segment.max_timestamp_ms, entries[-1].offset))
    newest_ms = -1
    for timestamp_ms, offset in times:
        if timestamp_ms > newest_ms:
            newest_ms = timestamp_ms
            yield TimeEntry(timestamp_ms, offset)
