"""
Spillover manifests: the oldest part of a partition's history, kept out of every commit.

Plain values. A spillover manifest never changes. Its name describes its content and contains its own
checksum: the same content has the same name under every writer. Each names the one before it, and the
live manifest names the newest. So these names decide what belongs to an archive, and not what happens to
lie in the bucket. `model.spilling` moves parts out of a manifest and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from operator import lt

from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import NO_TIMESTAMP
from tieringd.model.segment_table import SegmentTable


@dataclass(frozen=True, slots=True, order=True)
class SpilloverName:
    """What the key of a spillover manifest says of it."""

    base_offset: int
    last_offset: int
    base_timestamp_ms: int
    """The smallest of its segments' base timestamps; 0 if no segment has a time."""
    max_timestamp_ms: int
    """The largest of its segments' maximum timestamps; 0 if no segment has a time."""
    crc32c: int
    """Checksum of the whole document."""

    @property
    def next_offset(self) -> int:
        """Return the first offset after it."""
        return self.last_offset + 1


@dataclass(frozen=True, slots=True)
class SpilloverManifest:
    """One part of a partition's history: segments and gaps without a hole between them."""

    partition: TopicIdPartition
    base_offset: int
    next_offset: int
    segments: SegmentTable
    gaps: tuple[Gap, ...]
    previous: SpilloverName | None
    """The part that ends where this one begins; None if there was none when this one was made."""

    def name(self, crc32c: int) -> SpilloverName:
        """Return the name of this part, given the checksum of its document."""
        times = [time for time in self.segments.column("base_timestamp_ms") if time != NO_TIMESTAMP]
        latest = self.segments.latest_timestamp_ms
        return SpilloverName(
            self.base_offset, self.next_offset - 1, min(times, default=0), max(latest or 0, 0), crc32c
        )

    def faults(self) -> tuple[str, ...]:
        """Return its faults, in words; empty for a sound part."""
        found = list(span_faults(self.segments, self.gaps, begin=self.base_offset, end=self.next_offset))
        if not self.segments:
            found.append("the spillover manifest has no segment")
        if self.previous is not None and self.previous.next_offset != self.base_offset:
            found.append(
                f"the spillover manifest begins at {self.base_offset}, but its predecessor ends at "
                f"{self.previous.last_offset}"
            )
        return tuple(found)


@dataclass(frozen=True, slots=True)
class ExpiredSpillover:
    """Records that total retention dropped all spilled segments before *next_offset*, and when."""

    next_offset: int
    retired_at_ms: int


@dataclass(frozen=True, slots=True)
class Spillover:
    """The part of a live manifest that describes the spilled segments."""

    begin_offset: int
    """All spilled objects below it have been deleted. Parts that end before it are deleted, or will be."""
    newest: SpilloverName
    segments: int
    """How many segments are spilled and still held."""
    size_bytes: int
    """Size of their data objects."""
    gap_offsets: int = 0
    """How many offsets are in recorded gaps of the spilled part, from the archive's start on."""
    retired: tuple[ExpiredSpillover, ...] = ()
    """Ascending marks of segments that are no longer held, and whose objects are still in the store."""

    @property
    def next_offset(self) -> int:
        """Return the first offset that is not spilled."""
        return self.newest.next_offset

    def expired(self, gone: SegmentTable, mark: ExpiredSpillover, *, gap_offsets: int) -> Spillover:
        """Return it without the segments in *gone* and the gaps among them, which *mark* covers."""
        return replace(
            self,
            segments=self.segments - len(gone),
            size_bytes=self.size_bytes - gone.total_bytes,
            gap_offsets=self.gap_offsets - gap_offsets,
            retired=(*self.retired, mark),
        )

    def faults(self, *, start_offset: int) -> tuple[str, ...]:
        """Return its faults in a manifest that begins at *start_offset*, in words."""
        found = []
        if min(self.segments, self.size_bytes, self.gap_offsets) < 0:
            found.append("the number of spilled segments, bytes or offsets is negative")
        if self.segments and not self.begin_offset <= start_offset < self.next_offset:
            found.append(f"the archive begins at {start_offset}, which is not in its spilled part")
        if not self.segments and not self.retired:
            found.append("the manifest has a spilled part with neither live nor expired segments")
        marks = [self.begin_offset, *(one.next_offset for one in self.retired), self.next_offset + 1]
        if any(later <= mark for mark, later in pairwise(marks)):
            found.append("the expired ranges of the spilled part are out of order")
        if self.segments and self.retired and self.retired[-1].next_offset > start_offset:
            found.append(f"the spilled part has already expired up to {self.retired[-1].next_offset}")
        return tuple(found)


def span_faults(segments: SegmentTable, gaps: tuple[Gap, ...], *, begin: int, end: int) -> tuple[str, ...]:
    """Return, in words, where segments and gaps do not fill the offsets from *begin* to *end* exactly."""
    bases, lasts = list(segments.column("base_offset")), list(segments.column("last_offset"))
    nexts = [last_offset + 1 for last_offset in lasts]
    if not gaps and [begin, *nexts] == [*bases, end] and all(map(lt, bases, nexts)):
        # Most manifests: this takes a quarter of the time of the search below.
        return ()
    found = [
        f"segment {later} follows segment {base}, out of order"
        for base, later in pairwise(bases)
        if later <= base
    ]
    spans = [(base, last, "segment") for base, last in zip(bases, lasts, strict=True)]
    spans += [(gap.base_offset, gap.last_offset, "gap") for gap in gaps]
    if gaps or found:
        spans.sort()
    expected = begin
    for base_offset, last_offset, kind in spans:
        if last_offset < base_offset:
            found.append(f"{kind} {base_offset} ends before it begins, at {last_offset}")
        if base_offset > expected:
            found.append(f"offsets {expected} to {base_offset - 1} are neither stored nor a recorded gap")
        if base_offset < expected:
            found.append(f"{kind} {base_offset} overlaps the offsets before {expected}")
        expected = max(expected, last_offset + 1)
    if expected != end:
        found.append(f"next_offset is {end}, but the last entry ends before {expected}")
    return tuple(found)
