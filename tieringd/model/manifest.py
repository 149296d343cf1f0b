"""
The partition manifest: which segments of one partition are in the object store.

A manifest is a value. Every change returns a new manifest and keeps these rules:

1. segments ascend and never overlap;
2. between two neighbours there is either nothing, or a recorded gap that fills it exactly;
3. `next_offset` is the end of the last segment or gap, and never moves back;
4. leader epochs ascend, and so do their start offsets.

Segments are held as columns, not as objects: a long history stays small in memory and is
searched by bisection. Bytes live in `formats.manifest_codec`; reading and conditional writing
in `services.manifest_store`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tieringd.model.segment import RemoteSegment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tieringd.model.offset_translation import OffsetTranslation
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import EpochStart

COLUMNS: tuple[str, ...] = (
    "base_offset",
    "last_offset",
    "size_bytes",
    "crc32c",
    "base_timestamp_ms",
    "max_timestamp_ms",
    "leader_epoch",
    "uploaded_at_ms",
    "index_size_bytes",
)
"""The integer columns of a segment table, in their stored order."""

_TYPECODES = {
    "base_offset": "q",
    "last_offset": "q",
    "size_bytes": "q",
    "crc32c": "I",
    "base_timestamp_ms": "q",
    "max_timestamp_ms": "q",
    "leader_epoch": "i",
    "uploaded_at_ms": "q",
    "index_size_bytes": "I",
}


class SegmentTable:
    """
    Remote segments in columns, ascending by base offset. Immutable.

    Writer ids are few and long, so each is kept once and rows hold its number.
    """

    __slots__ = ("_columns", "_writer_numbers", "_writers")

    def __init__(
        self,
        columns: Mapping[str, array[int]],
        writer_numbers: array[int],
        writers: tuple[str, ...],
    ) -> None:
        self._columns = columns
        self._writer_numbers = writer_numbers
        self._writers = writers

    @classmethod
    def of(cls, segments: Iterable[RemoteSegment] = ()) -> SegmentTable:
        """Build a table from segments that ascend by base offset."""
        columns = {name: array(code) for name, code in _TYPECODES.items()}
        numbers = array("H")
        writers: dict[str, int] = {}
        for segment in segments:
            for name, column in columns.items():
                column.append(getattr(segment, name))
            numbers.append(writers.setdefault(segment.writer_id, len(writers)))
        return cls(columns, numbers, tuple(writers))

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Iterable[int]], writer_numbers: Iterable[int], writers: Iterable[str]
    ) -> SegmentTable:
        """
        Build a table from decoded columns.

        Raises:
            ValueError: The columns differ in length, or a value does not fit its column.
        """
        try:
            built = {name: array(code, columns[name]) for name, code in _TYPECODES.items()}
            table = cls(built, array("H", writer_numbers), tuple(writers))
        except OverflowError as error:
            raise ValueError(f"a segment column holds a value out of range: {error}") from error
        if len({len(column) for column in (*built.values(), table._writer_numbers)}) != 1:
            raise ValueError("segment columns differ in length")
        if any(number >= len(table._writers) for number in table._writer_numbers):
            raise ValueError("a segment names a writer that the manifest does not list")
        return table

    def column(self, name: str) -> array[int]:
        """Return one integer column; the caller does not change it."""
        return self._columns[name]

    @property
    def writers(self) -> tuple[str, ...]:
        """Return the writer ids that rows refer to by number."""
        return self._writers

    @property
    def writer_numbers(self) -> array[int]:
        """Return each row's position in `writers`; the caller does not change it."""
        return self._writer_numbers

    @property
    def total_bytes(self) -> int:
        """Return the size of all data objects."""
        return sum(self._columns["size_bytes"])

    def __len__(self) -> int:
        return len(self._writer_numbers)

    def __getitem__(self, row: int) -> RemoteSegment:
        values = {name: column[row] for name, column in self._columns.items()}
        return RemoteSegment(writer_id=self._writers[self._writer_numbers[row]], **values)

    def __iter__(self) -> Iterator[RemoteSegment]:
        return (self[row] for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SegmentTable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SegmentTable({len(self)} segments)"

    def row_at_or_after(self, offset: int) -> int:
        """Return the first row whose last offset is at or past *offset*; `len(self)` when none is."""
        row = bisect_right(self._columns["base_offset"], offset) - 1
        if row >= 0 and self._columns["last_offset"][row] >= offset:
            return row
        return row + 1

    def covering(self, offset: int) -> RemoteSegment | None:
        """Return the segment that holds *offset*, or None."""
        row = self.row_at_or_after(offset)
        if row < len(self) and self._columns["base_offset"][row] <= offset:
            return self[row]
        return None

    def overlapping(self, base_offset: int, next_offset: int) -> tuple[RemoteSegment, ...]:
        """Return the segments with offsets from *base_offset* to before *next_offset*, ascending."""
        bases = self._columns["base_offset"]
        found = []
        for row in range(self.row_at_or_after(base_offset), len(self)):
            if bases[row] >= next_offset:
                break
            found.append(self[row])
        return tuple(found)

    def head(self, rows: int) -> SegmentTable:
        """Return a table of the first *rows* rows."""
        columns = {name: column[:rows] for name, column in self._columns.items()}
        return SegmentTable(columns, self._writer_numbers[:rows], self._writers)

    def appended(self, segments: Iterable[RemoteSegment]) -> SegmentTable:
        """Return a table with *segments* at the end; the caller has checked their order."""
        columns = {name: column[:] for name, column in self._columns.items()}
        numbers = self._writer_numbers[:]
        writers = {writer: number for number, writer in enumerate(self._writers)}
        for segment in segments:
            for name, column in columns.items():
                column.append(getattr(segment, name))
            numbers.append(writers.setdefault(segment.writer_id, len(writers)))
        return SegmentTable(columns, numbers, tuple(writers))


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets that the archive will never hold, and why. Never silent: also a metric and an alert."""

    base_offset: int
    last_offset: int
    reason: str
    recorded_at_ms: int

    @property
    def next_offset(self) -> int:
        """Return the first offset after the gap."""
        return self.last_offset + 1


@dataclass(frozen=True, slots=True)
class Replacement:
    """Offsets that were stored, and replaced: another leader's log took their place."""

    base_offset: int
    last_offset: int
    leader_epoch: int
    """Of the leader whose log is archived from here on."""
    replaced_at_ms: int


@dataclass(frozen=True, slots=True)
class PartitionManifest:
    """What the object store holds of one partition, and who said so last."""

    partition: TopicIdPartition
    start_offset: int
    """The first offset that the archive was ever asked to hold, or still holds."""
    next_offset: int
    """Exclusive: uploading goes on from here."""
    leader_epoch: int = -1
    """The epoch of the last writer; a writer with a lower one is fenced."""
    writer_id: str = ""
    """The daemon process that wrote this version."""
    commit_number: int = 0
    """Unique per writer, so that a writer can recognise a commit of its own."""
    committed_at_ms: int = 0
    began_at_ms: int = 0
    """When the first version was written."""
    epochs: tuple[EpochStart, ...] = ()
    segments: SegmentTable = field(default_factory=SegmentTable.of)
    gaps: tuple[Gap, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    translation: OffsetTranslation | None = None
    """Of Redpanda's own offsets, at the archive's end or before it; None where there are none."""

    @classmethod
    def begin(cls, partition: TopicIdPartition, *, start_offset: int, now_ms: int = 0) -> PartitionManifest:
        """Return the manifest of a partition of which nothing is stored yet."""
        return cls(partition, start_offset=start_offset, next_offset=start_offset, began_at_ms=now_ms)

    @property
    def last_offset(self) -> int | None:
        """Return the highest offset that is stored or recorded as lost; None before the first."""
        return self.next_offset - 1 if self.next_offset > self.start_offset else None

    def appended(
        self, segments: Iterable[RemoteSegment], epochs: Iterable[EpochStart] = ()
    ) -> PartitionManifest:
        """
        Return a manifest with *segments* at its tip, and *epochs* added to the history.

        Raises:
            ValueError: A segment does not begin where the one before it ends, or is empty, or an
                epoch goes back.
        """
        added = tuple(segments)
        next_offset = self.next_offset
        for segment in added:
            if segment.base_offset != next_offset or segment.last_offset < segment.base_offset:
                raise ValueError(
                    f"segment {segment.base_offset} to {segment.last_offset} cannot follow offset "
                    f"{next_offset - 1} of {self.partition}"
                )
            next_offset = segment.next_offset
        return replace(
            self,
            segments=self.segments.appended(added),
            next_offset=next_offset,
            epochs=_extended(self.epochs, epochs),
        )

    def with_gap(self, gap: Gap) -> PartitionManifest:
        """
        Return a manifest in which *gap* is recorded at the tip.

        Raises:
            ValueError: The gap does not begin at `next_offset`, or is empty.
        """
        if gap.base_offset != self.next_offset or gap.last_offset < gap.base_offset:
            raise ValueError(
                f"gap {gap.base_offset} to {gap.last_offset} cannot follow offset {self.next_offset - 1}"
            )
        return replace(self, gaps=(*self.gaps, gap), next_offset=gap.next_offset)

    def cut_back(self, next_offset: int, *, leader_epoch: int, now_ms: int) -> PartitionManifest:
        """
        Return a manifest that ends at *next_offset*, and remembers what was replaced.

        The epochs that began at or past the cut go as well: another leader's follow.

        Raises:
            ValueError: *next_offset* is inside a segment or gap, or outside the manifest.
        """
        ends = {self.start_offset, *(one.next_offset for one in self.gaps)}
        table = self.segments
        kept = table.row_at_or_after(next_offset)
        if not self.start_offset <= next_offset < self.next_offset or (
            next_offset not in ends
            and not (kept > 0 and table.column("last_offset")[kept - 1] == next_offset - 1)
        ):
            raise ValueError(f"the manifest of {self.partition} cannot be cut back to offset {next_offset}")
        replacement = Replacement(next_offset, self.next_offset - 1, leader_epoch, now_ms)
        return replace(
            self,
            next_offset=next_offset,
            segments=table.head(kept),
            gaps=tuple(gap for gap in self.gaps if gap.base_offset < next_offset),
            epochs=tuple((epoch, start) for epoch, start in self.epochs if start < next_offset),
            replacements=(*self.replacements, replacement),
        )

    def committed(
        self, *, writer_id: str, leader_epoch: int, commit_number: int, now_ms: int
    ) -> PartitionManifest:
        """Return this manifest under the name of the writer that is about to store it."""
        return replace(
            self,
            writer_id=writer_id,
            leader_epoch=leader_epoch,
            commit_number=commit_number,
            committed_at_ms=now_ms,
        )

    def faults(self) -> tuple[str, ...]:
        """Return every broken rule of this page, in words; empty for a sound manifest."""
        bases = self.segments.column("base_offset")
        found = [
            f"segment {later} follows segment {base}, out of order"
            for base, later in pairwise(bases)
            if later <= base
        ]
        spans = sorted(
            [(segment.base_offset, segment.last_offset, "segment") for segment in self.segments]
            + [(gap.base_offset, gap.last_offset, "gap") for gap in self.gaps]
        )
        expected = self.start_offset
        for base_offset, last_offset, kind in spans:
            if last_offset < base_offset:
                found.append(f"{kind} {base_offset} ends before it begins, at {last_offset}")
            if base_offset > expected:
                found.append(f"offsets {expected} to {base_offset - 1} are neither stored nor a recorded gap")
            if base_offset < expected:
                found.append(f"{kind} {base_offset} overlaps the offsets before {expected}")
            expected = max(expected, last_offset + 1)
        if expected != self.next_offset:
            found.append(f"next_offset is {self.next_offset}, but the last entry ends before {expected}")
        for (epoch, start), (later_epoch, later_start) in pairwise(self.epochs):
            if later_epoch <= epoch or later_start < start:
                found.append(f"leader epoch {later_epoch} at {later_start} follows {epoch} at {start}")
        return tuple(found)


def _extended(history: tuple[EpochStart, ...], epochs: Iterable[EpochStart]) -> tuple[EpochStart, ...]:
    """Return *history* with those of *epochs* that it does not know yet."""
    result = list(history)
    for epoch, start_offset in epochs:
        known, known_start = result[-1] if result else (epoch - 1, start_offset)
        if epoch < known or (epoch > known and start_offset < known_start):
            raise ValueError(
                f"leader epoch {epoch} at offset {start_offset} follows epoch {known} at {known_start}"
            )
        if epoch > known:
            result.append((epoch, start_offset))
    return tuple(result)
