"""
Which offsets the batches of a stored segment may have.

No checksum of a batch covers its base offset: a damaged one gives records other offsets, or hides them. So
each batch is held against what else is known: the segment's bounds, the batches before it, and the entries
of the segment's index, each of which has the position and the base offset of one batch. Where a segment has
a record at each of its offsets, every batch has to begin exactly where the one before it ends.

A segment with holes leaves room for a damaged base offset between two index entries. A reader of
the whole object compares its checksum as well.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tieringd.compiled.walks import Checked
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import HEADER_BYTES, LENGTH_STARTS_AT
from tieringd.model.segment import SegmentIndex

_PLACE = struct.Struct(">qi11xi")


class BatchPlace(NamedTuple):
    """The position of a batch, and the offsets that its header says it has."""

    position: int
    base_offset: int
    next_offset: int


def places_in(data: memoryview, position: int) -> Iterator[BatchPlace]:
    """
    Yield the places of the batches that *data* holds; *position* is that of its first byte.

    Only sizes and offsets are read. It ends before a batch whose size is impossible, or that is cut.
    """
    at = 0
    while len(data) - at >= HEADER_BYTES:
        base_offset, length, last_delta = _PLACE.unpack_from(data, at)
        size_bytes = LENGTH_STARTS_AT + length
        if not HEADER_BYTES <= size_bytes <= len(data) - at:
            return
        yield BatchPlace(position + at, base_offset, base_offset + last_delta + 1)
        at += size_bytes


@dataclass(frozen=True, slots=True)
class ExpectedBatches:
    """What is known of consecutive stored batches before they are read."""

    base_offset: int
    """The lowest offset that there may be."""
    next_offset: int
    """The offset after the highest one that there may be."""
    positions: Sequence[int] = ()
    """Positions of some batches, in bytes, ascending."""
    offsets: Sequence[int] = ()
    """The base offsets of the batches at these positions."""
    is_dense: bool = False
    """Whether there is a record at each offset."""
    checksum: int | None = None
    """The CRC32C of all the batches together, where it is known."""

    @classmethod
    def of_index(cls, index: SegmentIndex, begin: int = 0, end: int | None = None) -> ExpectedBatches:
        """
        Return what *index* says of the bytes from *begin* up to *end* of its data object.

        Batches begin at both. Positions count from *begin*.
        """
        end = index.size_bytes if end is None else end
        entries = index.entries
        first, last = (bisect_left(entries, at, key=lambda entry: entry.position) for at in (begin, end))
        floor = bisect_right(entries, begin, key=lambda entry: entry.position) - 1
        return cls(
            entries[floor].offset if begin and floor >= 0 else index.base_offset,
            entries[last].offset if last < len(entries) else index.last_offset + 1,
            [entry.position - begin for entry in entries[first:last]],
            [entry.offset for entry in entries[first:last]],
            index.record_count == index.last_offset + 1 - index.base_offset,
            index.crc32c if (begin, end) == (0, index.size_bytes) else None,
        )

    def require_checksum(self, checksum: int) -> None:
        """
        Check the checksum of all the batches.

        Raises:
            CorruptDataError: It is another one.
        """
        if self.checksum not in {None, checksum}:
            raise CorruptDataError(
                f"the object has checksum {checksum:08x}, but its index has {self.checksum:08x}"
            )


class OffsetCheck:
    """
    Holds batches, in the order in which they are stored, against what is known of their offsets.

    Reading may begin at any batch. Owned by one reader.
    """

    def __init__(self, expected: ExpectedBatches) -> None:
        self.expected_offset = expected.base_offset
        """The lowest base offset that the next batch may have."""
        self._batches = expected
        self._is_exact = False
        """Whether the next batch has to begin exactly at the expected offset."""
        self._section_end = -1
        """The position of the next index entry: limits change there."""
        self._limit = expected.next_offset
        self._row = 0
        """The index entry with which the next section begins."""

    @property
    def place(self) -> Checked:
        """Return where the check is, for a compiled walk."""
        return Checked(self.expected_offset, self._is_exact, self._section_end, self._limit, self._row)

    @place.setter
    def place(self, at: Checked) -> None:
        """Go on where a compiled walk has ended."""
        self.expected_offset, self._is_exact, self._section_end, self._limit, self._row, _ = at

    def passes(self, position: int, base_offset: int, next_offset: int) -> bool:
        """
        Say whether the next batch's offsets are right. Only then the check goes on after the batch.

        This is `fault_of` for the common case: it is called for each batch, and makes nothing.
        """
        if position >= self._section_end:
            self._enter(position)
        expected = self.expected_offset
        if base_offset != expected and (base_offset < expected or self._is_exact):
            return False
        if next_offset > self._limit:
            return False
        self.expected_offset = next_offset
        self._is_exact = self._batches.is_dense
        return True

    def fault_of(self, batch: BatchPlace) -> str | None:
        """Return what is wrong with the next batch's offsets, or None. The check goes on after the batch."""
        position, base_offset, next_offset = batch
        if self.passes(position, base_offset, next_offset):
            return None
        fault = self._in_words(batch)
        if self._is_exact:
            # Its checksum covers how many offsets it has, so the batch after it is expected behind it.
            self.expected_offset = min(self.expected_offset + next_offset - base_offset, self._limit)
            self._is_exact = self._batches.is_dense
        return fault

    def require(self, batch: BatchPlace) -> None:
        """
        Check the next batch's offsets.

        Raises:
            CorruptDataError: They are wrong. The error has the batch's position and the offset that it says.
        """
        fault = self.fault_of(batch)
        if fault is not None:
            offset = batch.base_offset if batch.base_offset >= 0 else None
            raise CorruptDataError(fault, position=batch.position, offset=offset)

    def go_on_at(self, next_offset: int) -> None:
        """Pass over batches that are right, of which the last one ends at *next_offset*."""
        self.expected_offset = next_offset
        self._is_exact = self._batches.is_dense

    def faults_of(self, batches: Sequence[BatchPlace], *, damaged: Container[int] = ()) -> dict[int, str]:
        """
        Return the faults of the next batches, by position. The check goes on after them.

        *damaged* has the positions of those with wrong checksums: what their headers say is not used.

        One damaged base offset can put the batches after it out of order. Where the order alone tells, the
        batches that belong to every longest ordered selection of their section are right.
        """
        faults: dict[int, str] = {}
        start = 0
        while start < len(batches):
            self._enter(batches[start].position)
            end = start
            while end < len(batches) and batches[end].position < self._section_end:
                end += 1
            # An entry of the index has the offset of a section's first batch, and order tells the others'.
            is_known = self._is_exact
            rest = [one for one in batches[start + is_known : end] if one.position not in damaged]
            kept = None if self._batches.is_dense and is_known else self._ordered(rest)
            for place in range(start, end):
                batch = batches[place]
                if batch.position in damaged:
                    self._is_exact = False
                    continue
                is_kept = kept is None or batch.position in kept or (is_known and place == start)
                fault = self.fault_of(batch) if is_kept else self._in_words(batch)
                if fault is not None:
                    faults[batch.position] = fault
            start = end
        return faults

    def _enter(self, position: int) -> None:
        """Take the limits of the section that *position* is in."""
        batches = self._batches
        positions = batches.positions
        # The next section is usually the one after the last: only a jump needs a search.
        row = self._row + 1
        if not (row < len(positions) and positions[row - 1] <= position < positions[row]):
            row = bisect_right(positions, position)
        self._row = row
        is_last = row == len(positions)
        self._section_end = 1 << 63 if is_last else batches.positions[row]
        self._limit = batches.next_offset if is_last else batches.offsets[row]
        if row and batches.positions[row - 1] == position:
            self.expected_offset, self._is_exact = batches.offsets[row - 1], True
        elif row:
            self.expected_offset = max(self.expected_offset, batches.offsets[row - 1])
        self.expected_offset = min(self.expected_offset, self._limit)

    def _ordered(self, section: Sequence[BatchPlace]) -> frozenset[int]:
        """Return the positions of the batches that are in every longest ordered selection of a section."""
        possible = [
            one for one in section if self.expected_offset <= one.base_offset < one.next_offset <= self._limit
        ]
        before = _lengths([(one.base_offset, one.next_offset) for one in possible])
        after = _lengths([(-one.next_offset, -one.base_offset) for one in reversed(possible)])[::-1]
        longest = max(before, default=0)
        by_place: dict[int, list[int]] = {}
        for one, left, right in zip(possible, before, after, strict=True):
            if left + right - 1 == longest:
                by_place.setdefault(left, []).append(one.position)
        return frozenset(found[0] for found in by_place.values() if len(found) == 1)

    def _in_words(self, batch: BatchPlace) -> str:
        if self._is_exact:
            wanted = f"it has to begin at offset {self.expected_offset}"
        else:
            wanted = f"offsets {self.expected_offset} to {self._limit - 1} are possible there"
        return (
            f"the batch says that it has offsets {batch.base_offset} to {batch.next_offset - 1}, but "
            f"{wanted}: its base offset, which its checksum does not cover, is damaged"
        )


def _lengths(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each range the length of the longest selection of ordered ranges that ends with it."""
    ends: list[int] = []
    """The smallest end of a selection of each length."""
    lengths: list[int] = []
    for begin, end in ranges:
        length = bisect_right(ends, begin)
        if length == len(ends):
            ends.append(end)
        else:
            ends[length] = min(ends[length], end)
        lengths.append(length + 1)
    return lengths
