"""The buffers of the rows that are being filled. They become a record batch without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from tieringd.spark.decoder.record_tables import NULL_TIME, ROWS
from tieringd.spark.decoder.schema import HEADER_TYPE, arrow_schema

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[Any]

_HEADERS_PER_ROW: Final = 4
"""Headers that a buffer has room for, on average. With more headers a record batch has fewer rows."""


class RowBuffer:
    """
    Buffers for the rows of one record batch of a partition. Owned by one decoder.

    Each record batch has buffers of its own, and stays valid as long as it is referenced. Arrow's allocator
    allocates them, because it reuses the pages of released record batches, where others ask for new pages.
    """

    def __init__(
        self, columns: Sequence[str], *, topic: str, partition: int, rows_max: int, bytes_max: int
    ) -> None:
        """Allocate room for *rows_max* rows and *bytes_max* bytes of keys, values and headers."""
        self.schema = arrow_schema(columns)
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._constants = {
            "topic": pa.repeat(pa.scalar(topic, pa.string()), rows_max),
            "partition": pa.repeat(pa.scalar(partition, pa.int32()), rows_max),
        }
        self.make_room()

    def make_room(self, *, needed_bytes: int = 0, needed_headers: int = 0) -> None:
        """Allocate new buffers, with room for a record of at least *needed_bytes* and *needed_headers*."""
        self.count = 0
        """The number of filled rows."""
        rows_max, bytes_max = self._rows_max, max(self._bytes_max, needed_bytes)
        headers_max = max(_HEADERS_PER_ROW * rows_max, needed_headers)
        sizes = {"offsets": 8 * rows_max, "times": 8 * rows_max}
        if "timestampType" in self.schema.names:
            sizes |= {"time_types": 4 * rows_max}
        for column in ("key", "value"):
            if column in self.schema.names:
                sizes |= _binary_sizes(column, rows_max, bytes_max)
        if "headers" in self.schema.names:
            sizes |= {"header_ends": 4 * (rows_max + 1)}
            sizes |= _binary_sizes("name", headers_max, bytes_max)
            sizes |= _binary_sizes("content", headers_max, bytes_max)
        self._buffers = {name: pa.allocate_buffer(size_bytes) for name, size_bytes in sizes.items()}
        self.rows = np.zeros(1, ROWS)
        """The room and the buffers' addresses, as an array of type ROWS for the kernel."""
        self.rows[["rows_max", "bytes_max", "headers_max"]] = (rows_max, bytes_max, headers_max)
        for name, buffer in self._buffers.items():
            self.rows[name] = buffer.address
            if name.endswith("_ends"):
                np.frombuffer(buffer, np.int32, 1)[0] = 0

    def to_record_batch(self) -> pa.RecordBatch:
        """
        Return the filled rows as a record batch.

        It shares the memory of the buffers. Call `make_room` before more rows are read.
        """
        columns = [self._column(name) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, name: str) -> pa.Array:
        type_ = self.schema.field(name).type
        match name:
            case "key" | "value":
                return self._binary(name, type_, self.count, present=self._present(name, self.count))
            case "offset":
                return self._numbers(type_, "offsets")
            case "timestamp":
                times = np.frombuffer(self._buffers["times"], np.int64, self.count)
                return self._numbers(type_, "times", present=_bitmap(times != NULL_TIME))
            case "timestampType":
                return self._numbers(type_, "time_types")
            case "headers":
                return self._headers(type_)
            case _:
                return self._constants[name].slice(0, self.count)

    def _headers(self, type_: pa.DataType) -> pa.Array:
        """Return the lists of headers. As in Spark's Kafka source, a record without headers has null."""
        stored_ends = self._buffers["header_ends"].slice(0, 4 * (self.count + 1))
        ends = np.frombuffer(stored_ends, np.int32)
        headers = int(ends[-1])
        names = _text(self._binary("name", pa.binary(), headers))
        contents = self._binary("content", pa.binary(), headers, present=self._present("content", headers))
        pairs = pa.Array.from_buffers(HEADER_TYPE, headers, [None], children=[names, contents])
        buffers = [_bitmap(ends[1:] > ends[:-1]), stored_ends]
        return pa.Array.from_buffers(type_, self.count, buffers, children=[pairs])

    def _numbers(self, type_: pa.DataType, name: str, *, present: pa.Buffer | None = None) -> pa.Array:
        content = self._buffers[name].slice(0, self.count * type_.bit_width // 8)
        return pa.Array.from_buffers(type_, self.count, [present, content])

    def _binary(
        self, name: str, type_: pa.DataType, count: int, *, present: pa.Buffer | None = None
    ) -> pa.Array:
        ends = self._buffers[f"{name}_ends"].slice(0, 4 * (count + 1))
        content = self._buffers[f"{name}_bytes"].slice(0, int(np.frombuffer(ends, np.int32)[-1]))
        return pa.Array.from_buffers(type_, count, [present, ends, content])

    def _present(self, name: str, count: int) -> pa.Buffer | None:
        return _bitmap(np.frombuffer(self._buffers[f"{name}_present"], np.uint8, count))


def _binary_sizes(name: str, elements: int, bytes_max: int) -> dict[str, int]:
    return {f"{name}_ends": 4 * (elements + 1), f"{name}_present": elements, f"{name}_bytes": bytes_max}


def _text(binary: pa.Array) -> pa.Array:
    """Return *binary* as text. Bytes that are not UTF-8 become U+FFFD, as in `formats.records`."""
    try:
        return binary.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([one.decode("utf-8", "replace") for one in binary.to_pylist()], pa.string())


def _bitmap(present: Numbers) -> pa.Buffer | None:
    """Return Arrow's validity bitmap of *present*; None if all elements are present."""
    return None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
