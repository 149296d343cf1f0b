"""Progress of a recovery, printed on standard error where that is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tieringd.cli.human import human_size
from tieringd.cli.options import show_progress
from tieringd.formats.records import Record
from tieringd.model.partition import TopicIdPartition

SECONDS_BETWEEN = 2.0


class ByteProgress:
    """Prints how many bytes are done, at each tenth of the total."""

    def __init__(self, total_bytes: int, verb: str = "restored") -> None:
        """Begin the count; *verb* says what is done with the bytes."""
        self._verb = verb
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._said = 0

    def note(self, size_bytes: int) -> None:
        """Count bytes that are done."""
        self._done_bytes += size_bytes
        tenths = 10 * self._done_bytes // max(1, self._total_bytes)
        if tenths > self._said:
            self._said = tenths
            done, total = human_size(self._done_bytes), human_size(self._total_bytes)
            show_progress(f"{done} of {total} {self._verb}")


class RecordProgress:
    """Prints every few seconds how many records of all partitions together have been written."""

    def __init__(
        self, begins: dict[TopicIdPartition, int], ends: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Begin the count.

        Args:
            begins: The first offset to write, by partition.
            ends: The sum of all partitions' end offsets, exclusive.
            clock: Seconds of a monotonic clock.
        """
        self._positions = dict(begins)
        self._left_at_first = max(1, ends - sum(begins.values()))
        self._ends = ends
        self._clock = clock
        self._began = self._said = clock()
        self._records = 0
        self._size_bytes = 0

    def note(self, partition: TopicIdPartition, records: Sequence[Record], next_offset: int) -> None:
        """Count a block of records that has been written; *next_offset* is the one after it in the source."""
        self._positions[partition] = next_offset
        self._records += len(records)
        self._size_bytes += sum(len(one.key or b"") + len(one.value or b"") for one in records)
        now = self._clock()
        if now - self._said >= SECONDS_BETWEEN:
            self._said = now
            seconds = now - self._began
            share = min(1.0, 1 - (self._ends - sum(self._positions.values())) / self._left_at_first)
            left = f", about {seconds * (1 - share) / share:.0f} s left" if share > 0 else ""
            rate = human_size(round(self._size_bytes / seconds))
            show_progress(f"{self._records} records written ({share:.0%}), {rate}/s{left}")
