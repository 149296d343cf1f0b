"""
The body of our manifests: a head in JSON and segments in columns, compressed.

Once inflated it is:

    u32         length of the head
    head        JSON: everything but the segments
    columns     each integer column as little-endian i64 differences to the row before,
                in the order of `model.segment_table.COLUMNS`; then the writers' numbers likewise

Differences of neighbouring rows are small and alike, which is what the compression lives on. What
the head says is for `formats.manifest_codec` and `formats.spillover_codec`.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, Any

from tieringd.model.segment import NO_CRC, NO_TIMESTAMP
from tieringd.model.segment_table import COLUMNS, SegmentTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BODY_BYTES_MAX = 1 << 30
"""An inflated body larger than this is an attack or a fault: a million rows take 80 MB."""
UNREADABLE = (ValueError, KeyError, TypeError, RecursionError, struct.error, zlib.error)
"""What reading a body may raise where it is not what it should be."""

_NEW_COLUMNS = {"broker_timestamp_ms": NO_TIMESTAMP, "index_crc32c": NO_CRC}
"""The columns that came with retention, and what stands in for a value where there was none."""
FIRST_COLUMNS = tuple(name for name in COLUMNS if name not in _NEW_COLUMNS)
"""The columns that there were before."""
_LENGTH = struct.Struct(">I")
_VALUE_BYTES = 8


def pack_body(head: Mapping[str, Any], table: SegmentTable) -> bytes:
    """Return a body; *head* names the table's rows and writers."""
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    columns = [table.column(name) for name in COLUMNS] + [table.writer_numbers]
    body = b"".join([_LENGTH.pack(len(text)), text, *(_differences(column) for column in columns)])
    return zlib.compress(body, level=6)


def unpack_body(packed: bytes) -> tuple[dict[str, Any], bytes]:
    """
    Return a body's head and the bytes of its columns.

    What it raises where it is not what it should be is one of `UNREADABLE`.
    """
    body = _inflate(packed)
    (head_bytes,) = _LENGTH.unpack_from(body)
    head = json.loads(body[_LENGTH.size : _LENGTH.size + head_bytes])
    if not isinstance(head, dict):
        raise TypeError("the head is no object")
    return head, body[_LENGTH.size + head_bytes :]


def unpack_table(
    rows: int, columns: bytes, writers: Sequence[str], names: Sequence[str] = COLUMNS
) -> SegmentTable:
    """
    Return the table of *rows* rows; a column that the version did not have holds nothing known.

    Raises:
        ValueError: The columns are not of that length, or hold impossible values.
    """
    width = rows * _VALUE_BYTES
    if len(columns) != width * (len(names) + 1):
        raise ValueError(f"{rows} rows do not take {len(columns)} bytes")
    values = [_sums(columns[number * width :][:width]) for number in range(len(names) + 1)]
    known: dict[str, Sequence[int]] = dict(zip(names, values[:-1], strict=True))
    for name, nothing in _NEW_COLUMNS.items():
        known.setdefault(name, [nothing] * rows)
    return SegmentTable.from_columns(known, values[-1], writers)


def _inflate(packed: bytes) -> bytes:
    inflater = zlib.decompressobj()
    body = inflater.decompress(packed, BODY_BYTES_MAX)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("the compressed body is cut short, too long, or followed by other bytes")
    return body


def _differences(column: Iterable[int]) -> bytes:
    values = list(column)
    return _little_endian(array("q", map(sub, values, [0, *values[:-1]]))).tobytes()


def _sums(data: bytes) -> list[int]:
    differences = array("q")
    differences.frombytes(data)
    return list(accumulate(_little_endian(differences)))


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
