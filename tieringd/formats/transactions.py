"""
Transactions in a log: which are open, how they end, and what `read_committed` shows.

All classes take batch headers ascending by offset. A transaction is identified by its producer id: a
producer has at most one open at a time, and a marker in the log ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import BatchHeader
from tieringd.formats.records import NO_MARKER
from tieringd.model.segment import AbortedTransaction, CrossingTransaction

Marker: TypeAlias = Literal["commit", "abort"] | int


class TransactionTracker:
    """
    Follows the transactions of one partition's log from *start_offset* on.

    Feed it every transactional batch, in offset order. A marker of a producer without an earlier batch
    since the start ends a transaction that began before it. If such a transaction is aborted, it is
    reported from *start_offset*, since none of its records are between the start and the marker.
    """

    __slots__ = ("_ended", "_open", "_start_offset")

    def __init__(self, start_offset: int = 0) -> None:
        self._start_offset = start_offset
        self._open: dict[int, int] = {}
        # An empty set takes 200 bytes, and most partitions have no transactions.
        self._ended: set[int] | None = None

    @classmethod
    def with_open(cls, first_offsets: Mapping[int, int]) -> TransactionTracker:
        """Return a tracker in which the transactions *first_offsets*, by producer, are open."""
        tracker = cls()
        tracker._open = dict(first_offsets)
        return tracker

    def _go_on_from(self, other: TransactionTracker) -> None:
        self._start_offset = other._start_offset
        self._open = other._open.copy()
        self._ended = None if other._ended is None else other._ended.copy()

    @property
    def open_transactions(self) -> Mapping[int, int]:
        """Return the first offset of each producer's open transaction."""
        return self._open

    @property
    def first_unstable_offset(self) -> int | None:
        """Return the first offset of the oldest open transaction; None when none is open."""
        return min(self._open.values(), default=None)

    def note_data(self, header: BatchHeader) -> None:
        """Record a batch of records that belongs to a transaction."""
        self._open.setdefault(header.producer_id, header.base_offset)

    def note_marker(self, header: BatchHeader, marker: Marker) -> AbortedTransaction | None:
        """Record a control batch; return the transaction that it aborts, if it does."""
        if isinstance(marker, int):
            return None
        producer_id = header.producer_id
        first_offset = self._open.pop(producer_id, None)
        if self._ended is None:
            self._ended = set()
        is_first_of_producer = first_offset is None and producer_id not in self._ended
        self._ended.add(producer_id)
        if marker == "commit":
            return None
        if is_first_of_producer:
            first_offset = self._start_offset
        # A producer whose last transaction ended above has aborted one without any records.
        return (
            None
            if first_offset is None
            else AbortedTransaction(producer_id, first_offset, header.last_offset)
        )


class MarkerSearch(TransactionTracker):
    """A tracker that continues from *tracker*, and finds the markers of the transactions open there."""

    __slots__ = ("_awaited", "_found")

    def __init__(self, tracker: TransactionTracker) -> None:
        super().__init__()
        self._go_on_from(tracker)
        self._awaited = dict(tracker.open_transactions)
        self._found: list[CrossingTransaction] = []

    @property
    def awaited(self) -> Mapping[int, int]:
        """Return, by producer, the first offset of each transaction without a marker so far."""
        return self._awaited

    @property
    def found(self) -> tuple[CrossingTransaction, ...]:
        """Return the transactions whose markers were met, in the order of the markers."""
        return tuple(self._found)

    def note_marker(self, header: BatchHeader, marker: Marker) -> AbortedTransaction | None:
        """
        Record a control batch; return the transaction that it aborts, if it does.

        Raises:
            CorruptDataError: The cleaner has removed the marker of an awaited transaction. A later marker of
                the producer does not say how that transaction ended.
        """
        if marker == NO_MARKER and header.producer_id in self._awaited:
            raise CorruptDataError(
                f"the marker of producer {header.producer_id}'s transaction from offset "
                f"{self._awaited[header.producer_id]} was removed by the cleaner, and its records were not",
                offset=header.base_offset,
            )
        first_offset = None if isinstance(marker, int) else self._awaited.pop(header.producer_id, None)
        if first_offset is not None:
            self._found.append(
                CrossingTransaction(header.producer_id, first_offset, header.last_offset, header.leader_epoch)
            )
        return super().note_marker(header, marker)


class ReadCommittedFilter:
    """
    Decides which batches a `read_committed` consumer sees below the last stable offset.

    Owned by one reader, which passes batches in ascending order.
    """

    __slots__ = ("_aborted_until", "_pending")

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._pending = sorted(aborted, key=lambda one: one.first_offset, reverse=True)
        self._aborted_until: dict[int, int] = {}

    def accepts(self, header: BatchHeader) -> bool:
        """Return whether the records of this batch are visible; markers never are."""
        while self._pending and self._pending[-1].first_offset <= header.last_offset:
            begun = self._pending.pop()
            self._aborted_until[begun.producer_id] = begun.last_offset
        if header.is_control:
            return False
        if not header.is_transactional:
            return True
        return self._aborted_until.get(header.producer_id, -1) < header.base_offset
