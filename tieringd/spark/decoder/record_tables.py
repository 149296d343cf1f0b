"""Tables and records of 64-bit integers that Python and the compiled code exchange."""

from __future__ import annotations

from typing import Final

import numpy as np

DONE: Final = 0
"""All records of all batches were read."""
FULL: Final = 1
"""The rows have no room for the next record; the cursor has the room that it needs."""
CORRUPT: Final = 2
"""The batch at the cursor is damaged; its rows begin at the cursor's `first_row`."""

NULL_TIME: Final = np.int64(-(2**63))
"""Stands for a time beyond the range of microseconds. No whole number of milliseconds has this value."""


def _longs(names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names.split()])


BATCH: Final = _longs(
    "start end crc records records_end record_count last_delta base_offset time_type base_time_ms max_time_ms"
)
"""
A stored batch: its start and end in a run, its checksum, the addresses of its decompressed records, and
fields of its header.
"""

PLACE: Final = _longs("position end base_offset next_offset")
"""The position and the end of a stored batch, and the offsets that its header says it has."""

CURSOR: Final = _longs(
    "from_offset next_offset expected_offset "
    "batch at left previous_delta row first_row needed_bytes needed_headers"
)
"""
Where to continue: the wanted offsets, and the lowest base offset of the next batch; the batch, the address
in it (0 for its beginning), the number of records left, and the previous record's offset delta; the next
row, and the batch's first row. After FULL, the room that the next record needs.
"""

ROWS: Final = _longs(
    "rows_max bytes_max headers_max offsets times time_types key_ends key_present key_bytes "
    "value_ends value_present value_bytes header_ends name_ends name_present name_bytes "
    "content_ends content_present content_bytes"
)
"""
The room for rows, and the addresses of the columns' buffers; 0 for a column that is not wanted.

`bytes_max` counts keys, values and headers together, and each `bytes` buffer has room for all of them. `ends`
are Arrow's offsets: int32, one more than there are elements, the first 0. A null element has 0 in `present`.
"""
