"""
The segment table: a partition's remote segments as columns.

Held as columns, and not as objects, a long history stays small in memory and is searched by
bisection. What rows mean together, such as that they follow each other, is for `model.manifest`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

from tieringd.model.segment import RemoteSegment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
    "broker_timestamp_ms",
    "index_crc32c",
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
    "broker_timestamp_ms": "q",
    "index_crc32c": "q",
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

    def without_head(self, rows: int) -> SegmentTable:
        """Return a table of all but the first *rows* rows."""
        columns = {name: column[rows:] for name, column in self._columns.items()}
        return SegmentTable(columns, self._writer_numbers[rows:], self._writers)

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
