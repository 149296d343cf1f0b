"""
Side files of a Kafka segment, made from our index where the archive has none of the broker's.

A log must not lack one: Kafka then reads the whole segment, and remembers the producers of its batches.
What is made here is coarser than the broker's own, and never leads a reader past what it looks for.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tieringd.formats.index_files import (
    OffsetEntry,
    TimeEntry,
    TransactionEntry,
    encode_offset_index,
    encode_time_index,
    encode_transaction_index,
)
from tieringd.model.segment import BrokerIndexes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tieringd.model.segment import AbortedTransaction, RemoteSegment, SegmentIndex


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
    # The last stable offset only tells a reader when it may stop to look: too low a one costs time.
    return encode_transaction_index(
        TransactionEntry(one.producer_id, one.first_offset, one.last_offset, one.first_offset)
        for one in sorted(aborted, key=lambda one: one.last_offset)
    )


def _times(segment: RemoteSegment, index: SegmentIndex) -> Iterator[TimeEntry]:
    """
    Yield each new maximum with an offset from which on all records of that time are found.

    That is the entry before: the first record of that time may lie between the two.
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
