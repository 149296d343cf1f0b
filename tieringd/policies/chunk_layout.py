"""
Chunk layout: how a stored segment is cut into the ranges that are hydrated.

A chunk begins where a batch begins, according to the sparse index, and ends where the next one begins.
Together the chunks of a segment are its data object, byte for byte. A chunk is as large as possible
without exceeding the wanted size. One that holds a larger batch (or a larger step of the index) is
larger, because no batch is ever cut. In whole-segment mode there is one chunk.

`ReadSequences` recognises a reader that comes to a place from the one before it. A place is any hashable
value. The gateway's readers do not identify themselves, so only the recently read places show it.

`history_part` returns the part of an older archive that a restored log continues. The other cluster's
archive may grow after the restore, or lose its tail or head, or merge segments across the fixed end. Only its
offsets up to that end count, and those that are gone are a gap that readers cross.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import IndexEntry, SegmentIndex

REMEMBERED = 4096

GONE = "neither the old archive nor the new log still has these offsets"


class ReadSequences:
    """The recently read places of all readers together."""

    def __init__(self) -> None:
        self._recent: OrderedDict[Hashable, None] = OrderedDict()

    def note(self, place: Hashable) -> None:
        """Remember that *place* was read now."""
        self._recent[place] = None
        self._recent.move_to_end(place)
        if len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)

    def was_read(self, place: Hashable) -> bool:
        """Say whether *place* was read recently."""
        return place in self._recent


def history_part(manifest: PartitionManifest, *, end_offset: int, next_start: int) -> PartitionManifest:
    """
    Return the counting part of an older archive: its offsets before *end_offset*, then a gap.

    The gap ends at *next_start*, where the newer archive begins now. The leader epochs are left out: they
    mean nothing in another cluster. A segment that crosses the end stays, because the old cluster has merged
    segments, or was cut back. Its records past the end do not belong to this log: readers stop at
    `PartitionManifest.records_end`.

    Spilled segments stay spilled. The spilled part must end before *end_offset*: the caller has taken
    back what reaches further.
    """
    rows = manifest.segments.row_at_or_after(end_offset)
    bases = manifest.segments.column("base_offset")
    if manifest.start_offset < end_offset and rows < len(bases) and bases[rows] < end_offset:
        rows += 1
    gaps = tuple(
        replace(gap, last_offset=min(gap.last_offset, end_offset - 1))
        for gap in manifest.gaps
        if gap.base_offset < end_offset
    )
    part = replace(
        manifest,
        start_offset=min(manifest.start_offset, end_offset),
        next_offset=min(manifest.next_offset, end_offset),
        segments=manifest.segments.head(rows),
        gaps=gaps,
        epochs=(),
        retired=(),
        unsettled=None,
        deletions=(),
        crossing=(),
        spillover=manifest.spillover if manifest.start_offset < end_offset else None,
    )
    if part.next_offset < next_start:
        part = part.with_gap(Gap(part.next_offset, next_start - 1, GONE, 0))
    return part


def part_holding(parts: Iterable[PartitionManifest], offset: int) -> PartitionManifest | None:
    """Return the first of *parts* that covers *offset*, be it with a gap; None where none does."""
    return next((part for part in parts if part.start_offset <= offset < part.next_offset), None)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole batches of one segment."""

    number: int
    """The chunk's number in its segment, from 0."""
    position: int
    """Position in the data object, in bytes."""
    size_bytes: int
    base_offset: int
    """The offset of its first batch; for the first chunk, the segment's base."""
    next_offset: int
    """
    The offset of the next chunk's first batch; for the last chunk, the segment's end. Compaction may leave
    less.
    """

    @property
    def end(self) -> int:
        """Return the position in the data object where the next chunk begins."""
        return self.position + self.size_bytes


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """All chunks of one segment, in order; empty for a segment without bytes."""

    chunks: tuple[Chunk, ...]

    def holding(self, offset: int) -> Chunk | None:
        """
        Return the chunk in which reading from *offset* begins; None past the segment's end.

        That chunk may hold nothing at or after *offset* where compaction left a hole: the reader
        continues with the next one. Offsets before the segment are read from its beginning.
        """
        if not self.chunks or offset >= self.chunks[-1].next_offset:
            return None
        row = bisect_right(self.chunks, offset, key=lambda chunk: chunk.base_offset) - 1
        return self.chunks[max(0, row)]

    def after(self, chunk: Chunk) -> Chunk | None:
        """Return the chunk that a sequential reader needs after *chunk*; None after the last one."""
        number = chunk.number + 1
        return self.chunks[number] if number < len(self.chunks) else None


def plan_chunks(index: SegmentIndex, *, chunk_bytes: int, is_whole: bool = False) -> ChunkLayout:
    """Cut a segment into chunks of about *chunk_bytes*; into one with *is_whole*."""
    assert chunk_bytes > 0, "a chunk has a size"
    if not index.size_bytes:
        return ChunkLayout(())
    entries = index.entries
    rows = [] if is_whole else _first_rows(entries, index.size_bytes, chunk_bytes)
    positions = [0, *(entries[row].position for row in rows), index.size_bytes]
    offsets = [index.base_offset, *(entries[row].offset for row in rows), index.last_offset + 1]
    return ChunkLayout(
        tuple(
            Chunk(number, position, positions[number + 1] - position, offsets[number], offsets[number + 1])
            for number, position in enumerate(positions[:-1])
        )
    )


def _first_rows(entries: Sequence[IndexEntry], size_bytes: int, chunk_bytes: int) -> list[int]:
    """Return the index rows at which the second and later chunks begin."""
    rows: list[int] = []
    start, row = 0, 0
    while size_bytes - start > chunk_bytes:
        farthest = bisect_right(entries, start + chunk_bytes, lo=row, key=lambda entry: entry.position) - 1
        # Where no index entry lies within a chunk's size, the chunk extends to the next one.
        row = farthest if farthest >= row and entries[farthest].position > start else max(farthest + 1, row)
        if row >= len(entries) or entries[row].position >= size_bytes:
            break
        start = entries[row].position
        rows.append(row)
        row += 1
    return rows
