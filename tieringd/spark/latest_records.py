"""
Compaction on an executor: find the latest record of each key, and rewrite segments without the others.

Compaction sees the records that a `read_committed` consumer sees. Records of aborted transactions never win,
and are all removed. A record without a key has no later version. It stays, unless the rules drop it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tieringd.formats.records import control_type
from tieringd.formats.transactions import ReadCommittedFilter
from tieringd.model.segment import SegmentIndex
from tieringd.spark.record_spans import NULL, filtered_batch, record_spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    # An ordinary import would load xxhash into processes that do not need it.
    from tieringd.archive.archive_reader import Batch


@dataclass(frozen=True, slots=True)
class CompactionRules:
    """Which of a partition's records compaction considers, and which latest records it removes as well."""

    start_offset: int
    """The archive's first offset. A segment may hold records before it, which no consumer reads."""
    due_before_ms: int | None
    """Tombstones with an older timestamp are removed; None keeps all tombstones."""
    drops_keyless: bool = False
    """Whether records without a key are removed."""


class LatestKeys:
    """Collects the latest record of each key in one segment or a part of one, batch by batch."""

    def __init__(self, index: SegmentIndex, rules: CompactionRules) -> None:
        self._committed = ReadCommittedFilter(index.aborted)
        self._rules = rules
        self.latest: dict[bytes, tuple[int, bool]] = {}
        """The latest offset of each key, and whether it is a tombstone to remove. Callers may empty it."""
        self.records = 0
        """
        All records that clients wrote, with those of aborted transactions and before the archive's start.
        """
        self.keyless = 0
        """The records among them that stay because they have no key."""

    def note(self, batch: Batch) -> None:
        """
        Count the next batch and note its keys. Batches come in offset order.

        Raises:
            CorruptDataError: The batch's records cannot be read.
        """
        header = batch.header
        is_visible = self._committed.accepts(header)
        if header.is_control:
            return
        self.records += header.record_count
        if not is_visible or header.last_offset < self._rules.start_offset:
            return
        spans = record_spans(header, batch.data)
        offsets = spans.offsets
        is_due = self._due(spans.value_bytes == NULL, spans.timestamps_ms)
        for key, offset, due in zip(spans.keys(), offsets.tolist(), is_due.tolist(), strict=True):
            if offset < self._rules.start_offset:
                continue
            if key is not None:
                self.latest[key] = (offset, due)
            elif not self._rules.drops_keyless:
                self.keyless += 1

    def _due(self, is_tombstone: NDArray[np.bool_], timestamps_ms: NDArray[np.int64]) -> NDArray[np.bool_]:
        before_ms = self._rules.due_before_ms
        if before_ms is None:
            return np.zeros(len(is_tombstone), np.bool_)
        # The age of a record without a timestamp is unknown: its tombstone stays.
        return is_tombstone & (timestamps_ms >= 0) & (timestamps_ms < before_ms)


class LatestCut:
    """
    Takes out what compaction removes from neighbouring segments, as an `archive.segment_rewriter.Cut`.

    *winners* are the ascending offsets of the records that stay for their keys. A transaction's commit marker
    stays if one of its records stays, or if the transaction may have begun before these segments.
    """

    keeps_aborted = False

    def __init__(self, winners: NDArray[np.int64], rules: CompactionRules) -> None:
        self._winners = winners
        self._rules = rules
        self._committed = ReadCommittedFilter(())
        self._kept_of: set[int] = set()
        """Producers of which a transactional record stays since their last marker."""
        self._ended: set[int] = set()
        """Producers with a marker so far. Their next transaction began in these segments."""
        self.removed_records = 0

    def begin(self, index: SegmentIndex) -> None:
        """Begin a segment with its index, which lists the aborted transactions."""
        self._committed = ReadCommittedFilter(index.aborted)

    def left_of(self, batch: Batch) -> bytes | memoryview | None:
        """Return the batch without the records that compaction removes; None if nothing of it is left."""
        header = batch.header
        is_visible = self._committed.accepts(header)
        if header.is_control:
            return batch.data if self._keeps_marker(batch) else None
        left = self._left_of_records(batch) if is_visible and header.record_count else None
        if left is None:
            self.removed_records += header.record_count
        elif header.is_transactional:
            self._kept_of.add(header.producer_id)
        return left

    def _left_of_records(self, batch: Batch) -> bytes | memoryview | None:
        header = batch.header
        begin, end = np.searchsorted(self._winners, (header.base_offset, header.next_offset))
        if end - begin == header.record_count:
            return batch.data
        if begin == end and self._rules.drops_keyless:
            return None
        spans = record_spans(header, batch.data)
        offsets = spans.offsets
        is_kept = np.isin(offsets, self._winners[begin:end], assume_unique=True)
        if not self._rules.drops_keyless:
            is_kept |= (spans.key_bytes == NULL) & (offsets >= self._rules.start_offset)
        left = filtered_batch(spans, batch.data, is_kept)
        if left is not None:
            self.removed_records += len(spans) - int(np.count_nonzero(is_kept))
        return left

    def _keeps_marker(self, batch: Batch) -> bool:
        marker, producer_id = control_type(batch.data), batch.header.producer_id
        if isinstance(marker, int):
            return True
        is_of_kept = producer_id in self._kept_of
        may_be_older = producer_id not in self._ended
        self._kept_of.discard(producer_id)
        self._ended.add(producer_id)
        # An aborted transaction has no records left, wherever it began, and needs no marker.
        return marker == "commit" and (is_of_kept or may_be_older)
