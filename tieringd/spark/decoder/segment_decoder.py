"""
A segment's bytes to record batches of Arrow, in one pass over the records.

Each batch is checked, unpacked and read straight into the buffers of the columns; what is not wanted
is not copied. `formats.records` reads the same, slowly, and says what is wrong with a damaged batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from tieringd.errors import CorruptDataError
from tieringd.formats.compression import MAX_DECOMPRESSED_BYTES
from tieringd.formats.record_batch import CRC_STARTS_AT
from tieringd.formats.records import iter_records
from tieringd.spark.decoder.batches import BatchReader, Selection, UnpackedBatch, size_of_batch
from tieringd.spark.decoder.kernel import kernel
from tieringd.spark.decoder.layouts import BATCH, CORRUPT, CURSOR, DONE, FULL
from tieringd.spark.decoder.row_buffer import RowBuffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table: TypeAlias = NDArray[np.void]
    """Of type BATCH."""

ROWS_MAX: Final = 16_384
"""Spark is slower with fewer rows in a record batch, and with many more."""

BYTES_MAX: Final = 16 << 20

_TEXT_BYTES_LIMIT: Final = (2**31 - 1) // 3
"""Each byte of a malformed header name may become three, and Arrow counts a column's bytes in 31 bits."""

_ROWS_LIMIT: Final = 1 << 20

_TABLE_ROWS: Final = 1024
"""Of batches that are read with one call of the kernel."""


@dataclass(frozen=True, slots=True)
class CorruptBatch:
    """A batch that was skipped; *position* is its place in the object."""

    position: int
    offset: int | None
    """Its base offset, if that is one."""
    message: str


class SegmentDecoder:
    """
    Decode one segment's object, run by run, to record batches of the wanted records.

    Owned by one task. Record batches are filled across batches and runs: `finish` gives the last one. They
    hold for as long as anyone wants them.
    """

    def __init__(
        self,
        columns: Sequence[str],
        *,
        topic: str,
        partition: int,
        selection: Selection,
        source: str,
        skip_corrupt: bool = False,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """
        Decode *columns* of the object *source*, at most *rows_max* rows and *bytes_max* bytes at once.

        The bytes are those of keys, values and headers. A record that has more is alone in its record batch.
        With *skip_corrupt* a damaged batch is left out whole and noted in `corrupt`.

        Raises:
            ConfigError: A column is unknown or named twice, or there is none.
        """
        if not (0 < rows_max <= _ROWS_LIMIT and 0 < bytes_max <= _TEXT_BYTES_LIMIT):
            raise ValueError(f"a record batch cannot have {rows_max} rows or {bytes_max} bytes")
        self.corrupt: list[CorruptBatch] = []
        """The damaged batches that were skipped, in their order."""
        self._source = source
        self._skip_corrupt = skip_corrupt
        self._buffer = RowBuffer(
            columns, topic=topic, partition=partition, rows_max=rows_max, bytes_max=bytes_max
        )
        limit_bytes = _TEXT_BYTES_LIMIT if "headers" in columns else MAX_DECOMPRESSED_BYTES
        self._batches = BatchReader(selection, limit_bytes=limit_bytes)
        self._kernel = kernel()
        self._table = np.zeros(_TABLE_ROWS, BATCH)
        self._one_batch = np.zeros(1, BATCH)
        self._cursor = np.zeros(1, CURSOR)
        self._wanted = (selection.from_offset, selection.next_offset)
        self._is_decoding = False

    def decode(self, data: memoryview, position: int) -> Iterator[pa.RecordBatch]:
        """
        Yield the record batches that *data* fills: whole batches, at *position* of the object.

        A batch whose size cannot be believed hides what follows it: with *skip_corrupt* it is noted once,
        and the rest of *data* is skipped.

        Raises:
            CorruptDataError: A batch is damaged, and *skip_corrupt* is not asked for; nothing of it was
                yielded. The error names the object, the batch's position in it and its offset.
        """
        assert not self._is_decoding, "the record batches of a run are taken before the next run comes"
        self._is_decoding = True
        run, at = pa.py_buffer(data).address, 0
        while at < len(data):
            ordinary = self._ordinary_batches(data, run, at)
            if ordinary is not None:
                yield from self._rows_of(ordinary, data, position)
                at = int(ordinary[-1]["end"])
                continue
            try:
                end = at + size_of_batch(data, at)
            except CorruptDataError as error:
                self._note(error, position + at)
                break
            try:
                batch = self._batches.read(data[at:end])
            except CorruptDataError as error:
                self._note(error, position + at)
            else:
                if batch is not None:
                    yield from self._rows_of(self._table_of(batch, at, end), data, position)
            at = end
        self._is_decoding = False

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows that do not fill a record batch, if there are any."""
        if self._buffer.count:
            last = self._buffer.to_record_batch()
            self._buffer.make_room()
            yield last

    def _ordinary_batches(self, data: memoryview, run: int, at: int) -> Table | None:
        """Return the batches from *at* on that `find_batches` finds, as far as their checksums are right."""
        self._set_cursor(expected_offset=self._batches.expected_offset)
        found = self._kernel.find_batches(
            run, run + at, run + len(data), self._batches.left_out, self._cursor, self._table
        )
        if not found:
            return None
        table = self._table[:found]
        places = zip(table["start"].tolist(), table["end"].tolist(), table["crc"].tolist(), strict=True)
        sound = 0
        for start, end, crc in places:
            if crc32c(data[start + CRC_STARTS_AT : end]) != crc:
                break
            sound += 1
        if not sound:
            return None
        last = table[sound - 1]
        self._batches.expected_offset = int(last["base_offset"] + last["last_delta"]) + 1
        return table[:sound]

    def _rows_of(self, table: Table, data: memoryview, position: int) -> Iterator[pa.RecordBatch]:
        """Read the records of batches of *data* into the buffer; yield that whenever it is full."""
        buffer, read_batches, cursor = self._buffer, self._kernel.read_batches, self._cursor
        self._set_cursor(row=buffer.count)
        checked = -1
        while (outcome := read_batches(table, cursor, buffer.rows)) != DONE:
            batch = int(cursor["batch"][0])
            if outcome == FULL and batch != checked:
                # Nothing of a damaged batch may leave: the rest is checked first, by wanting none of it.
                unwanted = cursor.copy()
                unwanted["next_offset"] = 0
                outcome = read_batches(table[: batch + 1], unwanted, buffer.rows)
                checked = batch
            if outcome == CORRUPT:
                start, end = int(table["start"][batch]), int(table["end"][batch])
                self._note(_fault_of(data[start:end]), position + start)
                cursor["batch"], cursor["at"], cursor["row"] = batch + 1, 0, cursor["first_row"]
                continue
            buffer.count = int(cursor["row"][0])
            full = buffer.to_record_batch()
            needed_bytes, needed_headers = cursor["needed_bytes"][0], cursor["needed_headers"][0]
            buffer.make_room(needed_bytes=int(needed_bytes), needed_headers=int(needed_headers))
            cursor["row"] = 0
            # Nothing is there yet when the first record of all is larger than a record batch may be.
            if full.num_rows:
                yield full
        buffer.count = int(cursor["row"][0])

    def _set_cursor(self, *, expected_offset: int = 0, row: int = 0) -> None:
        """Set the cursor to the beginning of a table, and to *row*. All at once is what costs least."""
        self._cursor[0] = (*self._wanted, expected_offset, 0, 0, 0, 0, row, 0, 0, 0)

    def _table_of(self, batch: UnpackedBatch, start: int, end: int) -> Table:
        """Return the table of one batch that stands from *start* to *end* of its run."""
        header, records = batch.header, pa.py_buffer(batch.records).address
        self._one_batch[0] = (
            start,
            end,
            header.crc,
            records,
            records + len(batch.records),
            header.record_count,
            header.last_offset_delta,
            header.base_offset,
            header.timestamp_type,
            header.base_timestamp_ms,
            header.max_timestamp_ms,
        )
        return self._one_batch

    def _note(self, error: CorruptDataError, position: int) -> None:
        if not self._skip_corrupt:
            raise CorruptDataError(
                error.message, source=self._source, position=position, offset=error.offset, hint=error.hint
            ) from error
        self.corrupt.append(CorruptBatch(position, error.offset, error.message))


def _fault_of(stored: memoryview) -> CorruptDataError:
    """Return what is wrong with a batch's records; it is looked at again, slowly."""
    try:
        deque(iter_records(stored), maxlen=0)
    except CorruptDataError as error:
        return error
    raise AssertionError("the kernel refuses a batch that formats.records reads")
