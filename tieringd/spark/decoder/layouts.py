"""What Python and the compiled code hand each other: tables and records of 64-bit integers."""

from __future__ import annotations

from typing import Final

import numpy as np

DONE: Final = 0
"""All records of all batches were read."""
FULL: Final = 1
"""The next record has no room in the rows; the cursor says how much it needs."""
CORRUPT: Final = 2
"""The batch at the cursor is damaged; its rows begin at the cursor's `first_row`."""

NULL_TIME: Final = np.int64(-(2**63))
"""Stands for a time that microseconds cannot hold. No time in milliseconds is this many microseconds."""


def _longs(names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names.split()])


BATCH: Final = _longs(
    "start end crc records records_end record_count last_delta base_offset time_type base_time_ms max_time_ms"
)
"""
A stored batch: where it stands in a run and its checksum, the addresses of its unpacked records, and what
its header says about them.
"""

CURSOR: Final = _longs(
    "from_offset next_offset expected_offset "
    "batch at left previous_delta row first_row needed_bytes needed_headers"
)
"""
Where to go on: the wanted offsets, and the one that the next batch may begin with; the batch, the address
in it (0 where it begins), how many records are left and the last one's offset delta; the next row, and the
batch's first. After FULL, what the next record needs.
"""

ROWS: Final = _longs(
    "rows_max bytes_max headers_max offsets times time_types key_ends key_present key_bytes "
    "value_ends value_present value_bytes header_ends name_ends name_present name_bytes "
    "content_ends content_present content_bytes"
)
"""
How much room there is, and the addresses of the columns' buffers, 0 for one that is not wanted.

`bytes_max` counts keys, values and headers together, and each `bytes` has room for all of them. `ends` are
as in Arrow: int32, one more than there are elements, the first 0. What is null has 0 in its `present`.
"""
