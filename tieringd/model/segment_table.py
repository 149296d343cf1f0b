"""
The segment table: a partition's remote segments as columns.

Held as columns, and not as objects, a long history stays small in memory and is searched by bisection.
`model.manifest` keeps the rules between rows, such as that they follow each other.

Rows lie in blocks of a few hundred. In a block, a column keeps its smallest value once, and for each row
the difference to it, in as few bytes as the block needs. A column of one value takes no room at all.
Blocks never change, so tables that were made of one another share most of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat
from operator import add, sub
from typing import Any, Final, TypeAlias

from tieringd.model.segment import RemoteSegment

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

BLOCK_ROWS: Final = 512
"""A larger block needs less overhead per row, and more time when a row is added to it."""

_WRITER: Final = "writer_number"
_NAMES: Final = (*COLUMNS, _WRITER)
_INT64: Final = (-(2**63), 2**63 - 1)
_LIMITS: Final = {
    **dict.fromkeys(COLUMNS, _INT64),
    "crc32c": (0, 2**32 - 1),
    "leader_epoch": (-(2**31), 2**31 - 1),
    "index_size_bytes": (0, 2**32 - 1),
    _WRITER: (0, 2**16 - 1),
}
_PLACES: Final = {name: place for place, name in enumerate(_NAMES)}
_REFERENCES: Final = {"last_offset": "base_offset", "base_timestamp_ms": "max_timestamp_ms"}
"""Columns that are near another one are kept as the difference to it."""
_REFERENCE_PLACES: Final = [(_PLACES[name], _PLACES[reference]) for name, reference in _REFERENCES.items()]
_BlockParts: TypeAlias = "tuple[int, tuple[int, ...], tuple[array[int] | None, ...], int, int]"
_WIDTHS: Final = ((1 << 8, "B"), (1 << 16, "H"), (1 << 32, "I"))


@dataclass(frozen=True, slots=True)
class _Cells:
    """One column of a block."""

    low: int
    above: array[int] | None
    """The difference of each row to *low*; None if all are 0."""

    def __getitem__(self, row: int) -> int:
        return self.low if self.above is None else self.low + self.above[row]

    def values(self, rows: int) -> Iterable[int]:
        if self.above is None:
            return repeat(self.low, rows)
        return map(self.low.__add__, self.above) if self.low else self.above

    def part(self, begin: int, end: int) -> _Cells:
        return self if self.above is None else _Cells(self.low, self.above[begin:end])


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive rows; at least one."""

    rows: int
    cells: tuple[_Cells, ...]
    """The values of each column, in the order of `_NAMES`."""
    base_offset: int
    """Base offset of its first row."""
    latest_ms: int
    """The largest maximum timestamp of its rows."""

    @classmethod
    def of(cls, values: Mapping[str, Sequence[int]]) -> _Block:
        """Pack the columns of a block, which have the same length."""
        cells = []
        for name in _NAMES:
            column = values[name]
            low, high = min(column), max(column)
            least, most = _LIMITS[name]
            if low < least or high > most:
                raise ValueError(f"a segment column holds a value out of range: {name}")
            reference = _REFERENCES.get(name)
            if reference:
                column = list(map(sub, column, values[reference]))
                low, high = min(column), max(column)
            cells.append(_packed(column, low, high))
        latest_ms = max(values["max_timestamp_ms"])
        return cls(len(values[_WRITER]), tuple(cells), values["base_offset"][0], latest_ms)

    def value(self, name: str, row: int) -> int:
        value = self.cells[_PLACES[name]][row]
        reference = _REFERENCES.get(name)
        return value + self.cells[_PLACES[reference]][row] if reference else value

    def row(self, row: int) -> list[int]:
        """Return the values of a row, in the order of `_NAMES`."""
        values = [cells[row] for cells in self.cells]
        for place, reference in _REFERENCE_PLACES:
            values[place] += values[reference]
        return values

    def values(self, name: str) -> Iterable[int]:
        values = self.cells[_PLACES[name]].values(self.rows)
        reference = _REFERENCES.get(name)
        return map(add, values, self.cells[_PLACES[reference]].values(self.rows)) if reference else values

    def parts(self) -> _BlockParts:
        """Return the values that make it up, without objects of our own."""
        lows, aboves = (tuple(getattr(cells, name) for cells in self.cells) for name in ("low", "above"))
        return self.rows, lows, aboves, self.base_offset, self.latest_ms

    @classmethod
    def of_parts(cls, parts: _BlockParts) -> _Block:
        """Return the block that has these `parts`."""
        rows, lows, aboves, base_offset, latest_ms = parts
        return cls(rows, tuple(map(_Cells, lows, aboves)), base_offset, latest_ms)

    def part(self, begin: int, end: int) -> _Block:
        rows, cells = end - begin, tuple(cells.part(begin, end) for cells in self.cells)
        latest_ms = max(cells[_PLACES["max_timestamp_ms"]].values(rows))
        return _Block(rows, cells, self.value("base_offset", begin), latest_ms)

    def renumbered(self, numbers: Sequence[int]) -> _Block:
        """Return the same rows, with each writer number replaced by its entry in *numbers*."""
        values = [numbers[number] for number in self.values(_WRITER)]
        writers = _packed(values, min(values), max(values))
        return replace(self, cells=(*self.cells[:-1], writers))


class Column:
    """One integer column of a table. It has a length, and is read by row or in order."""

    __slots__ = ("_name", "_table")

    def __init__(self, table: SegmentTable, name: str) -> None:
        self._table = table
        self._name = name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> int:
        block, row = self._table.place(row)
        return block.value(self._name, row)

    def __iter__(self) -> Iterator[int]:
        name = self._name
        return chain.from_iterable(block.values(name) for block in self._table.blocks)


class SegmentTable:
    """
    Remote segments in columns, ascending by base offset. Immutable.

    Writer ids are few and long, so each is kept once and rows hold its number.
    """

    __slots__ = ("_bases", "_ends", "_latest", "_writers", "blocks")

    def __init__(self, blocks: tuple[_Block, ...], writers: tuple[str, ...]) -> None:
        self.blocks = blocks
        """The rows, block by block. Only `Column` uses this from outside."""
        self._writers = writers
        self._ends = array("q", accumulate(block.rows for block in blocks))
        self._bases = array("q", (block.base_offset for block in blocks))
        self._latest = array("q", accumulate((block.latest_ms for block in blocks), max))
        """The newest timestamp up to the end of each block. Times do not ascend, but this does."""

    @classmethod
    def of(cls, segments: Iterable[RemoteSegment] = ()) -> SegmentTable:
        """
        Build a table from segments that ascend by base offset.

        Raises:
            ValueError: A value does not fit its column.
        """
        return cls((), ()).appended(segments)

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Iterable[int]], writer_numbers: Iterable[int], writers: Iterable[str]
    ) -> SegmentTable:
        """
        Build a table from decoded columns.

        Raises:
            ValueError: The columns differ in length, or a value does not fit its column.
        """
        known = tuple(writers)
        values = {name: _listed(columns[name]) for name in COLUMNS} | {_WRITER: _listed(writer_numbers)}
        if len({len(column) for column in values.values()}) != 1:
            raise ValueError("segment columns differ in length")
        table = cls(_blocks(values), known)
        if max(values[_WRITER], default=-1) >= len(known):
            raise ValueError("a segment names a writer that the manifest does not list")
        return table

    def column(self, name: str) -> Column:
        """Return one integer column."""
        return Column(self, name)

    @property
    def writers(self) -> tuple[str, ...]:
        """Return the writer ids that rows refer to by number."""
        return self._writers

    @property
    def writer_numbers(self) -> Column:
        """Return each row's position in `writers`."""
        return Column(self, _WRITER)

    @property
    def total_bytes(self) -> int:
        """Return the size of all data objects."""
        return sum(self.column("size_bytes"))

    @property
    def latest_timestamp_ms(self) -> int | None:
        """Return the largest maximum timestamp; None if there is no segment."""
        return self._latest[-1] if self._latest else None

    def place(self, row: int) -> tuple[_Block, int]:
        """Return the block that holds *row*, and the row's index in the block; for `Column` only."""
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row} in a table of {len(self)}")
        number = bisect_right(self._ends, row)
        return self.blocks[number], row - (self._ends[number - 1] if number else 0)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> RemoteSegment:
        block, row = self.place(row)
        *values, number = block.row(row)
        return RemoteSegment(writer_id=self._writers[number], **dict(zip(COLUMNS, values, strict=True)))

    def __iter__(self) -> Iterator[RemoteSegment]:
        for block in self.blocks:
            columns = [block.values(name) for name in COLUMNS]
            for *values, number in zip(*columns, block.values(_WRITER), strict=True):
                fields = dict(zip(COLUMNS, values, strict=True))
                yield RemoteSegment(writer_id=self._writers[number], **fields)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle few objects: each task of a large plan has a table, and objects cost more than rows."""
        return _unpickled, (self._writers, [block.parts() for block in self.blocks])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, SegmentTable) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SegmentTable({len(self)} segments)"

    def row_at_or_after(self, offset: int) -> int:
        """Return the first row whose last offset is at or past *offset*, or `len(self)` if none is."""
        number = bisect_right(self._bases, offset) - 1
        if number < 0:
            return 0
        block = self.blocks[number]
        bases = block.cells[_PLACES["base_offset"]]
        row = block.rows - 1 if bases.above is None else bisect_right(bases.above, offset - bases.low) - 1
        first = self._ends[number - 1] if number else 0
        return first + row if block.value("last_offset", row) >= offset else first + row + 1

    def rows_reaching(self, timestamp_ms: int) -> Iterator[int]:
        """Yield the rows whose maximum timestamp is *timestamp_ms* or later, ascending; lazily."""
        first_block = bisect_left(self._latest, timestamp_ms)
        for number in range(first_block, len(self.blocks)):
            first = self._ends[number - 1] if number else 0
            for row, latest in enumerate(self.blocks[number].values("max_timestamp_ms"), first):
                if latest >= timestamp_ms:
                    yield row

    def covering(self, offset: int) -> RemoteSegment | None:
        """Return the segment that holds *offset*, or None."""
        row = self.row_at_or_after(offset)
        if row < len(self) and self.column("base_offset")[row] <= offset:
            return self[row]
        return None

    def overlapping(self, base_offset: int, next_offset: int) -> tuple[RemoteSegment, ...]:
        """Return the segments with offsets from *base_offset* to before *next_offset*, ascending."""
        bases = self.column("base_offset")
        found = []
        for row in range(self.row_at_or_after(base_offset), len(self)):
            if bases[row] >= next_offset:
                break
            found.append(self[row])
        return tuple(found)

    def head(self, rows: int) -> SegmentTable:
        """Return a table of the first *rows* rows."""
        if rows >= len(self):
            return self
        number = bisect_right(self._ends, rows)
        left = rows - (self._ends[number - 1] if number else 0)
        cut = (self.blocks[number].part(0, left),) if left else ()
        return SegmentTable((*self.blocks[:number], *cut), self._writers)

    def without_head(self, rows: int) -> SegmentTable:
        """Return a table of all but the first *rows* rows."""
        if rows >= len(self):
            return SegmentTable((), self._writers)
        number = bisect_right(self._ends, rows)
        block = self.blocks[number]
        cut = block.part(rows - (self._ends[number - 1] if number else 0), block.rows)
        return SegmentTable((cut, *self.blocks[number + 1 :]), self._writers)

    def between(self, begin: int, end: int) -> SegmentTable:
        """Return a table of the rows from *begin* to before *end*. Only their own blocks are touched."""
        end = min(end, len(self))
        if begin >= end:
            return SegmentTable((), self._writers)
        first, last = bisect_right(self._ends, begin), bisect_left(self._ends, end)
        blocks = []
        for number in range(first, last + 1):
            block, base = self.blocks[number], self._ends[number - 1] if number else 0
            rows = max(0, begin - base), min(block.rows, end - base)
            blocks.append(block if rows == (0, block.rows) else block.part(*rows))
        return SegmentTable(tuple(blocks), self._writers)

    def appended(self, segments: Iterable[RemoteSegment]) -> SegmentTable:
        """
        Return a table with *segments* at the end. The caller has checked their order.

        Raises:
            ValueError: A value does not fit its column.
        """
        writers = {writer: number for number, writer in enumerate(self._writers)}
        added: dict[str, list[int]] = {name: [] for name in _NAMES}
        for segment in segments:
            for name in COLUMNS:
                added[name].append(getattr(segment, name))
            added[_WRITER].append(writers.setdefault(segment.writer_id, len(writers)))
        return self._followed_by(added, tuple(writers))

    def replaced(self, first: int, last: int, *segments: RemoteSegment) -> SegmentTable:
        """
        Return a table with *segments* in the place of the rows from *first* to before *last*.

        The rest of the block after them is packed with them, so that blocks do not get smaller and smaller.

        Raises:
            ValueError: A value does not fit its column.
        """
        rest = self.without_head(last)
        near = rest.blocks[0].rows if rest.blocks else 0
        begin = self.head(first).appended([*segments, *rest.head(near)])
        return SegmentTable.joined([begin, rest.without_head(near)])

    @classmethod
    def joined(cls, tables: Iterable[SegmentTable]) -> SegmentTable:
        """Return the rows of one table after another. The caller has checked their order."""
        writers: dict[str, int] = {}
        blocks: list[_Block] = []
        for table in tables:
            numbers = [writers.setdefault(writer, len(writers)) for writer in table.writers]
            is_same = numbers == list(range(len(numbers)))
            blocks += table.blocks if is_same else [block.renumbered(numbers) for block in table.blocks]
        return cls(tuple(blocks), tuple(writers))

    def with_writers(self, writers: Sequence[str]) -> SegmentTable:
        """Return the same rows, numbered by *writers*, which include all writers of the rows."""
        places = {writer: number for number, writer in enumerate(writers)}
        numbers = [places.get(writer, -1) for writer in self._writers]
        return SegmentTable(tuple(block.renumbered(numbers) for block in self.blocks), tuple(writers))

    def _followed_by(self, added: Mapping[str, list[int]], writers: tuple[str, ...]) -> SegmentTable:
        """Return a table with *added* at the end. The last block is filled up first."""
        blocks = self.blocks
        if blocks and blocks[-1].rows < BLOCK_ROWS:
            added = {name: [*blocks[-1].values(name), *column] for name, column in added.items()}
            blocks = blocks[:-1]
        return SegmentTable((*blocks, *_blocks(added)), writers)


def _unpickled(writers: tuple[str, ...], blocks: Iterable[_BlockParts]) -> SegmentTable:
    """Return the table that `SegmentTable.__reduce__` has described."""
    return SegmentTable(tuple(map(_Block.of_parts, blocks)), writers)


def _listed(values: Iterable[int]) -> Sequence[int]:
    return values if isinstance(values, array | list) else list(values)


def _blocks(values: Mapping[str, Sequence[int]]) -> tuple[_Block, ...]:
    return tuple(
        _Block.of({name: column[begin : begin + BLOCK_ROWS] for name, column in values.items()})
        for begin in range(0, len(values[_WRITER]), BLOCK_ROWS)
    )


def _packed(values: Sequence[int], low: int, high: int) -> _Cells:
    """Pack *values*, of which *low* is the smallest and *high* the largest."""
    if low == high:
        return _Cells(low, None)
    code = next((code for limit, code in _WIDTHS if high - low < limit), "Q")
    try:
        return _Cells(low, array(code, [value - low for value in values]))
    except OverflowError as error:
        raise ValueError(f"a segment column holds a value out of range: {error}") from error
