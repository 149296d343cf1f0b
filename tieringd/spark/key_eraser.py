"""What erasing keys leaves of a segment: everything but the records that have one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tieringd.spark.record_spans import filtered_batch, record_spans

if TYPE_CHECKING:
    from tieringd.archive.archive_reader import Batch
    from tieringd.model.segment import SegmentIndex


def holds_any(batch: Batch, keys: frozenset[bytes]) -> bool:
    """
    Say whether a batch has a record with one of *keys*.

    Raises:
        CorruptDataError: It does not have the records that its header announces.
    """
    header = batch.header
    if header.is_control or not header.record_count:
        return False
    return any(key in keys for key in record_spans(header, batch.data).keys())  # noqa: SIM118 a list


class ErasureCut:
    """
    Take out every version of some keys; see `archive.segment_rewriter.Cut`.

    Tombstones go, and so do records that nobody reads: of aborted transactions, and before the archive's
    start. Markers stay, and what a broker's cleaner has left of producers.
    """

    keeps_aborted = True

    def __init__(self, keys: frozenset[bytes]) -> None:
        """Take out records with one of *keys*; one without a key has none of them."""
        self._keys = keys
        self.removed_records = 0

    def begin(self, _index: SegmentIndex) -> None:
        """Take the index of the segment whose batches come next."""

    def left_of(self, batch: Batch) -> bytes | memoryview | None:
        """Return what is left of a batch."""
        header = batch.header
        if header.is_control or not header.record_count:
            return batch.data
        spans = record_spans(header, batch.data)
        is_kept = np.array([key not in self._keys for key in spans.keys()], np.bool_)  # noqa: SIM118 a list
        self.removed_records += len(spans) - int(np.count_nonzero(is_kept))
        return filtered_batch(spans, batch.data, is_kept)
