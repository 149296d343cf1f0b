"""
The index of a merged segment, from those of its parts. No data is read.

The merged object is the parts' bytes one after the other. So each part's positions move by the size of
the parts before it, and counts add up. Cumulative values are recomputed: an entry's largest timestamp
includes the parts before it. Each part describes a transaction as far as the part saw it, from the first
offset in that part on. Two descriptions belong to the same transaction if the abort marker has the same
offset.

The broker's own index files are joined if all parts have them. Otherwise they are left out: the broker
builds missing ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tieringd.errors import CorruptDataError
from tieringd.formats.crc32c_combine import combined_crc32c
from tieringd.formats.index_files import (
    OffsetEntry,
    TimeEntry,
    encode_offset_index,
    encode_time_index,
    encode_transaction_index,
    parse_offset_index,
    parse_time_index,
    parse_transaction_index,
)
from tieringd.model.segment import (
    NO_TIMESTAMP,
    AbortedTransaction,
    BrokerIndexes,
    EpochStart,
    IndexEntry,
    RemoteSegment,
    SegmentIndex,
)


@dataclass(frozen=True, slots=True)
class IndexedSegment:
    """A stored segment and its index."""

    segment: RemoteSegment
    index: SegmentIndex


def merged_index(parts: Sequence[IndexedSegment]) -> SegmentIndex:
    """
    Return the index of the object that *parts* make, one after the other.

    Raises:
        CorruptDataError: The parts are not adjacent, or their leader epochs go back.
    """
    indexes = [part.index for part in parts]
    for before, after in pairwise(indexes):
        if after.base_offset != before.last_offset + 1:
            raise CorruptDataError(
                f"a segment that begins at offset {after.base_offset} does not follow one that ends at "
                f"{before.last_offset}",
                offset=after.base_offset,
            )
    return SegmentIndex(
        base_offset=indexes[0].base_offset,
        last_offset=indexes[-1].last_offset,
        size_bytes=sum(index.size_bytes for index in indexes),
        crc32c=combined_crc32c((index.crc32c, index.size_bytes) for index in indexes),
        record_count=sum(index.record_count for index in indexes),
        batch_count=sum(index.batch_count for index in indexes),
        epochs=_epochs(indexes),
        aborted=_aborted(indexes),
        entries=tuple(_entries(parts)),
        broker=_broker_indexes(indexes),
    )


def _positions(indexes: Iterable[SegmentIndex]) -> list[int]:
    """Return the position of each part in the merged object, and at the end the object's size."""
    return list(accumulate((index.size_bytes for index in indexes), initial=0))


def _epochs(indexes: Iterable[SegmentIndex]) -> tuple[EpochStart, ...]:
    found: list[EpochStart] = []
    for index in indexes:
        for epoch, start_offset in index.epochs:
            if found and epoch < found[-1][0]:
                raise CorruptDataError(
                    f"leader epoch {epoch} follows {found[-1][0]} in the indexes", offset=start_offset
                )
            if not found:
                found.append((epoch, start_offset))
            elif epoch > found[-1][0]:
                # A part's first epoch is clipped to its base; inside a part, epochs begin with a batch.
                is_clipped = start_offset == index.base_offset
                found.append((epoch, index.entries[0].offset if is_clipped else start_offset))
    return tuple(found)


def _aborted(indexes: Iterable[SegmentIndex]) -> tuple[AbortedTransaction, ...]:
    first_offsets: dict[tuple[int, int], int] = {}
    for one in (one for index in indexes for one in index.aborted):
        known = first_offsets.setdefault((one.last_offset, one.producer_id), one.first_offset)
        first_offsets[one.last_offset, one.producer_id] = min(known, one.first_offset)
    return tuple(
        AbortedTransaction(producer_id, first_offset, marker_offset)
        for (marker_offset, producer_id), first_offset in sorted(first_offsets.items())
    )


def _entries(parts: Sequence[IndexedSegment]) -> Iterable[IndexEntry]:
    latest_ms = NO_TIMESTAMP
    positions = _positions(part.index for part in parts)
    for part, position in zip(parts, positions, strict=False):
        for entry in part.index.entries:
            yield IndexEntry(entry.offset, position + entry.position, max(latest_ms, entry.max_timestamp_ms))
        latest_ms = max(latest_ms, part.segment.max_timestamp_ms)


def _broker_indexes(indexes: Sequence[SegmentIndex]) -> BrokerIndexes:
    """Return the broker's indexes joined; the producer snapshot is that of the last part."""
    at_end = BrokerIndexes(producer_snapshot=indexes[-1].broker.producer_snapshot)
    if not all(_is_complete(index) for index in indexes):
        return at_end
    base_offset = indexes[0].base_offset
    offsets: list[OffsetEntry] = []
    times: list[TimeEntry] = []
    for index, position in zip(indexes, _positions(indexes), strict=False):
        own = parse_offset_index(index.broker.offset_index or b"", base_offset=index.base_offset)
        offsets += [OffsetEntry(entry.offset, position + entry.position) for entry in own]
        for entry in parse_time_index(index.broker.time_index or b"", base_offset=index.base_offset):
            # An entry holds the largest timestamp so far; a part may have no larger one.
            if not times or entry.timestamp_ms > times[-1].timestamp_ms:
                times.append(entry)
    aborted = [
        entry for index in indexes for entry in parse_transaction_index(index.broker.transaction_index or b"")
    ]
    return replace(
        at_end,
        offset_index=encode_offset_index(offsets, base_offset=base_offset),
        time_index=encode_time_index(times, base_offset=base_offset),
        transaction_index=encode_transaction_index(aborted) or None,
    )


def _is_complete(index: SegmentIndex) -> bool:
    """
    Return whether a part has the broker's indexes.

    Only a part with an abort marker needs a `.txnindex`.
    """
    broker = index.broker
    if not index.size_bytes:
        return True
    has_marker = any(one.last_offset <= index.last_offset for one in index.aborted)
    return None not in {broker.offset_index, broker.time_index} and (
        broker.transaction_index is not None or not has_marker
    )
