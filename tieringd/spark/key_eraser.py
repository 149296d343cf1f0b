"""Erase keys from a segment: take out the records with one of the keys, and keep everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tieringd.model.segment import SegmentIndex
from tieringd.spark.record_spans import filtered_batch, record_spans

if TYPE_CHECKING:
    # An ordinary import would load xxhash into processes that do not need it.
    from tieringd.archive.archive_reader import Batch


def holds_any(batch: Batch, keys: frozenset[bytes]) -> bool:
    """
    Return whether a batch has a record with one of *keys*.

    Raises:
        CorruptDataError: The batch does not have the records that its header announces.
    """
    header = batch.header
    if header.is_control or not header.record_count:
        return False
    return any(key in keys for key in record_spans(header, batch.data).keys())  # noqa: SIM118 a list


class ErasureCut:
    """
    Takes out every version of some keys, as an `archive.segment_rewriter.Cut`.

    Tombstones of the keys go too, and so do records with the keys that no consumer sees: those of aborted
    transactions, and those before the archive's start. Transaction markers stay, and so do the empty
    batches that a broker's cleaner keeps for the state of producers.
    """

    keeps_aborted = True

    def __init__(self, keys: frozenset[bytes]) -> None:
        """Take out records with one of *keys*. A record without a key always stays."""
        self._keys = keys
        self.removed_records = 0

    def begin(self, _index: SegmentIndex) -> None:
        """Begin a segment. Its index is not needed here."""

    def left_of(self, batch: Batch) -> bytes | memoryview | None:
        """Return the batch without the records of the keys; None if no record is left."""
        header = batch.header
        if header.is_control or not header.record_count:
            return batch.data
        spans = record_spans(header, batch.data)
        is_kept = np.array([key not in self._keys for key in spans.keys()], np.bool_)  # noqa: SIM118 a list
        self.removed_records += len(spans) - int(np.count_nonzero(is_kept))
        return filtered_batch(spans, batch.data, is_kept)
