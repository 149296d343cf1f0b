"""
A batch with some of its records taken out, as a broker's own cleaner leaves one.

What stays keeps its offset, its time and its bytes: deltas are counted from the batch's base, and that
stays. So do the batch's offsets, its producer with epoch and sequence, its leader epoch and its attributes,
with the codec among them. What is counted anew: records, largest timestamp, length, checksum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.formats.compression import Codec, compress
from tieringd.formats.record_batch import sealed

if TYPE_CHECKING:
    from tieringd.formats.record_batch import BatchHeader


def narrowed_batch(header: BatchHeader, records: bytes, *, record_count: int, max_timestamp_ms: int) -> bytes:
    """
    Return the batch of *header* with only *records*: some of its own, unpacked, one after the other.

    *max_timestamp_ms* is the largest time of these, as a consumer sees it.
    """
    left = header._replace(record_count=record_count, max_timestamp_ms=max_timestamp_ms)
    return sealed(left, compress(Codec(header.codec), records))
