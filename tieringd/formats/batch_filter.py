"""
A batch with some of its records taken out, as a broker's own cleaner leaves one.

What stays keeps its offset, its time and its bytes: deltas are counted from the batch's base, and that
stays. So do the batch's offsets, its producer with epoch and sequence, its leader epoch and its attributes,
with the codec among them. What is counted anew: records, largest timestamp, length, checksum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.formats.compression import Codec, compress
from tieringd.formats.record_batch import parse_header, sealed
from tieringd.formats.records import iter_packed_records

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.formats.record_batch import BatchHeader
    from tieringd.formats.records import Record


def batch_with(batch: memoryview, is_kept: Callable[[Record], bool]) -> bytes | memoryview | None:
    """
    Return *batch* with those of its records that *is_kept* says yes for; None where it is none of them.

    It is the same bytes where all records stay. Spark has a faster one of its own.

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

    *max_timestamp_ms* is the largest time of these, as a consumer sees it.
    """
    left = header._replace(record_count=record_count, max_timestamp_ms=max_timestamp_ms)
    return sealed(left, compress(Codec(header.codec), records))
