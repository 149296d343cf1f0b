"""
Decode a segment's bytes to Arrow record batches, in one pass over the records.

Each batch is checked, decompressed and read straight into the columns' buffers. Unwanted columns are not
copied. `formats.records` reads the same format slowly, and finds the fault of a damaged batch.
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
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.formats.compression import MAX_DECOMPRESSED_BYTES
from tieringd.formats.record_batch import CRC_STARTS_AT, parse_header
from tieringd.formats.records import iter_records
from tieringd.spark.decoder.batch_places import RunCheck
from tieringd.spark.decoder.kernel import kernel
from tieringd.spark.decoder.record_tables import BATCH, CORRUPT, CURSOR, DONE, FULL
from tieringd.spark.decoder.row_buffer import RowBuffer
from tieringd.spark.decoder.segment_batches import SegmentBatchReader, Selection, UnpackedBatch, size_of_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table: TypeAlias = NDArray[np.void]
    """An array of type BATCH."""

ROWS_MAX: Final = 16_384
"""Rows in a record batch. Spark is slower with fewer, and with many more."""

BYTES_MAX: Final = 2 << 20
"""
Bytes of keys, values and headers in a record batch. A larger one leaves the processor's caches on its way to
Spark's rows, and Spark waits longer for the first one.
"""

TEXT_BYTES_LIMIT: Final = (2**31 - 1) // 3
"""
Limit for the bytes of a batch with headers. Each byte of a malformed header name may become three bytes, and
Arrow counts a column's bytes in 31 bits.
"""

_ROWS_LIMIT: Final = 1 << 20

_TABLE_ROWS: Final = 1024
"""Batches that one call of the kernel reads at most."""


@dataclass(frozen=True, slots=True)
class CorruptBatch:
    """A damaged batch that was skipped; *position* is its position in the object, in bytes."""

    position: int
    offset: int | None
    """The batch's base offset, if it is readable."""
    message: str


class SegmentDecoder:
    """
    Decodes one segment's object, run by run, to Arrow record batches of the wanted records.

    Owned by one task. An Arrow record batch is filled from several stored batches and runs; `finish` gives
    the last one. Record batches stay valid as long as they are referenced.
    """

    def __init__(
        self,
        columns: Sequence[str],
        *,
        topic: str,
        partition: int,
        selection: Selection,
        source: str,
        expected: ExpectedBatches | None = None,
        skip_corrupt: bool = False,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """
        Decode *columns* of the object *source*.

        A record batch has at most *rows_max* rows, and *bytes_max* bytes of keys, values and headers. A
        larger record is alone in its record batch. *expected* is what the object's index says of all its
        batches; without it no batch's offsets are checked but their order. With *skip_corrupt* a damaged
        batch is left out completely, and noted in `corrupt`.

        Raises:
            ConfigError: A column is unknown or named twice, or *columns* is empty.
            ValueError: *rows_max* or *bytes_max* is out of range.
        """
        if not (0 < rows_max <= _ROWS_LIMIT and 0 < bytes_max <= TEXT_BYTES_LIMIT):
            raise ValueError(f"a record batch cannot have {rows_max} rows or {bytes_max} bytes")
        self.corrupt: list[CorruptBatch] = []
        """The damaged batches that were skipped, in order."""
        self._source = source
        self._skip_corrupt = skip_corrupt
        self._buffer = RowBuffer(
            columns, topic=topic, partition=partition, rows_max=rows_max, bytes_max=bytes_max
        )
        limit_bytes = TEXT_BYTES_LIMIT if "headers" in columns else MAX_DECOMPRESSED_BYTES
        self._batches = SegmentBatchReader(selection, limit_bytes=limit_bytes)
        self._check = None if expected is None else RunCheck(expected)
        self._kernel = kernel()
        self._table = np.zeros(_TABLE_ROWS, BATCH)
        self._one_batch = np.zeros(1, BATCH)
        self._cursor = np.zeros(1, CURSOR)
        self._wanted = (selection.from_offset, selection.next_offset)
        self._is_decoding = False

    def decode(self, data: memoryview, position: int) -> Iterator[pa.RecordBatch]:
        """
        Yield the Arrow record batches that *data* fills, which has whole stored batches.

        *position* is that of *data* in the object. After a batch with an impossible size no further batch can
        be found: with *skip_corrupt* it is noted once, and the rest of *data* is skipped.

        Raises:
            CorruptDataError: A batch is damaged, and *skip_corrupt* is not set; none of its records were
                yielded. The error has the object, the batch's position in it, and the batch's offset.
        """
        assert not self._is_decoding, "the record batches of a run are taken before the next run comes"
        self._is_decoding = True
        run, at = pa.py_buffer(data).address, 0
        faults = {} if self._check is None else self._check.faults_of(data, position)
        stops = deque([*faults, position + len(data)])
        while at < len(data):
            if position + at == stops[0] and stops[0] in faults:
                fault = CorruptDataError(faults[stops.popleft()], offset=parse_header(data, at).base_offset)
                self._note(fault, position + at)
                at += size_of_batch(data, at)
                continue
            ordinary = self._ordinary_batches(data, run, at, stops[0] - position)
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
        """Yield the rows that are left in the buffer as a last record batch, if there are any."""
        if self._buffer.count:
            last = self._buffer.to_record_batch()
            self._buffer.make_room()
            yield last

    def _ordinary_batches(self, data: memoryview, run: int, at: int, stop: int) -> Table | None:
        """
        Return the batches that `find_batches` finds from *at* to *stop*, up to the first with a wrong CRC.

        None if there is none.
        """
        self._set_cursor(expected_offset=self._batches.expected_offset)
        found = self._kernel.find_batches(
            run, run + at, run + stop, self._batches.left_out, self._cursor, self._table
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
        """Read the records of *table*'s batches into the buffer; yield a record batch when it is full."""
        buffer, read_batches, cursor = self._buffer, self._kernel.read_batches, self._cursor
        self._set_cursor(row=buffer.count)
        checked = -1
        while (outcome := read_batches(table, cursor, buffer.rows)) != DONE:
            batch = int(cursor["batch"][0])
            if outcome == FULL and batch != checked:
                # No record of a damaged batch may be yielded. So the rest of the batch is checked first, with
                # a cursor that wants none of its records.
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
            # The buffer is empty if the very first record is larger than a record batch may be.
            if full.num_rows:
                yield full
        buffer.count = int(cursor["row"][0])

    def _set_cursor(self, *, expected_offset: int = 0, row: int = 0) -> None:
        """Set the cursor to the beginning of a table and to *row*. One assignment for all is fastest."""
        self._cursor[0] = (*self._wanted, expected_offset, 0, 0, 0, 0, row, 0, 0, 0)

    def _table_of(self, batch: UnpackedBatch, start: int, end: int) -> Table:
        """Return a table with one batch, which is from *start* to *end* of its run."""
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
    """Return the fault of a damaged batch, found by the slow reader of `formats.records`."""
    try:
        deque(iter_records(stored), maxlen=0)
    except CorruptDataError as error:
        return error
    raise AssertionError("the kernel refuses a batch that formats.records reads")
