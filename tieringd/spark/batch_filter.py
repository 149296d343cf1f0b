"""A batch without the records that somebody does not want: the same bytes where all of them are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tieringd.formats.records import narrowed_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tieringd.spark.record_spans import RecordSpans


def filtered_batch(
    spans: RecordSpans, batch: memoryview, is_kept: NDArray[np.bool_]
) -> bytes | memoryview | None:
    """
    Return *batch* with those of its records that *is_kept* says yes for; None where it is none of them.

    *spans* are its records. A batch that had none before is kept.
    """
    kept = int(np.count_nonzero(is_kept))
    if kept == len(spans):
        return batch
    if not kept:
        return None
    rows = np.flatnonzero(is_kept)
    # Records that follow each other are copied together.
    breaks = np.flatnonzero(np.diff(rows) > 1)
    starts = spans.starts[rows[np.concatenate(([0], breaks + 1))]].tolist()
    ends = spans.ends[rows[np.concatenate((breaks, [kept - 1]))]].tolist()
    records = b"".join(spans.records[start:end] for start, end in zip(starts, ends, strict=True))
    latest_ms = int(spans.timestamps_ms[rows].max())
    return narrowed_batch(spans.header, records, record_count=kept, max_timestamp_ms=latest_ms)
